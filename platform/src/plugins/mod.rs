//! Plugins: tenants' WebAssembly components that transform and sign webhooks on their way out.
//!
//! An upload goes [`inspect`] (at once, cheap) → [`PluginEngine::compile_isolated`] (a job, in a
//! child process) → [`Artifact::seal`] (kept in the database) → [`Artifact::open`] and
//! [`PluginEngine::load`] (each node, once per version) → [`PluginEngine::run`] (each attempt). What
//! a plugin does can fail only its own run.

pub(crate) mod answer;
mod artifact;
mod call;
mod compile;
mod engine;
mod failure;
mod host;
mod inspect;
mod interface;
mod limits;
mod registry;
mod runtime;
mod upload;

pub use artifact::{Artifact, Fingerprint, OpenError};
pub use call::{Call, Delivery, Event, Outcome, Report, Stage};
pub use compile::{COMPILE_COMMAND, CompileError, compile_child_main};
pub use engine::{EngineError, LoadError, Plugin, PluginEngine};
pub use failure::PluginError;
pub use host::{Keys, Level, LogLine};
pub use inspect::{Exports, Refusal, inspect};
pub use limits::Limits;
pub use registry::{PluginId, PluginsApi, lists};
pub use runtime::{Active, CompilePlugin, PluginHost};
pub use upload::Upload;

/// Text from outside, cut at a character boundary to at most `bytes` bytes and an ellipsis.
fn truncated(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(bytes)])
}

#[cfg(test)]
#[path = "../../../tests/fixtures/plugins.rs"]
pub(crate) mod fixtures;
#[cfg(test)]
mod tests;
