//! BOTIX: a multi-tenant public API whose webhooks tenants extend with WebAssembly plugins.
//!
//! The map, top floor first; a room imports only from its own floor's side doors or from below.
//!
//! | room | what lives there |
//! | --- | --- |
//! | [`cli`] | a file per command of the `botix` program |
//! | [`app`] | the composition root: builds every part once and hands it on; the API, the work, the sweeps |
//! | [`console`] | what people and monitors look at: docs, how webhooks stand, error codes, changelog, health, metrics |
//! | [`resources`] | the business: a file per resource with its types, handlers and SQL |
//! | [`webhooks`] | endpoints, events, deliveries, the ladder, signing, sending, the inspector |
//! | [`plugins`] | tenants' WebAssembly: registry, engine, host imports, limits |
//! | [`contract`] | what every route shares: auth, errors, idempotency, cursors, request ids |
//! | [`jobs`] | apalis: enqueueing inside a transaction, workers, jobs begun where they were enqueued, jobs parked for want of room |
//! | [`db`] | what lets the same text run on two databases; where the texts differ, the caller has both; connections, and who gets how many |
//! | [`shared`] | what nodes share through Redis, and a circuit in front of a store |
//! | [`config`] | typed settings |
//! | `fuzzing` | in tests and fuzz builds alone: what must hold for whatever bytes come in |

pub mod app;
pub mod cli;
pub mod config;
pub mod console;
pub mod contract;
pub mod db;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod jobs;
pub mod plugins;
pub mod resources;
pub mod shared;
pub mod webhooks;
