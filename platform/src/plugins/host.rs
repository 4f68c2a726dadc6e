//! What a plugin can ask of the platform: `botix:webhook/host@1.0.0`, and nothing else.
//!
//! Every function answers from memory and costs the host a bounded amount of work, paid in the
//! plugin's own fuel, because fuel otherwise counts only instructions of the guest. Nothing that a
//! plugin passes is copied before its length is known. A signing key is used here and never lowered
//! into the guest. The log is bounded in lines and bytes, and says once that it overflowed.

use std::collections::HashMap;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretSlice};
use sha2::Sha256;
use wasmtime::component::{ComponentType, Lift, Linker, WasmList, WasmStr};
use wasmtime::{StoreContextMut, Trap};

use super::interface;
use super::limits::{Limits, MemoryBudget};

/// What a host call costs in fuel, before its bytes.
const CALL_FUEL: u64 = 500;
/// HMAC-SHA256 takes about 1.5 ns a byte without hardware help, fuel about 0.1 ns a unit.
const HMAC_FUEL_PER_BYTE: u64 = 16;

/// The signing keys that a plugin may use by name. `endpoint` is the endpoint's own secret.
#[derive(Default)]
pub struct Keys(HashMap<String, SecretSlice<u8>>);

impl Keys {
    /// The key of that name.
    fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(ExposeSecret::expose_secret)
    }
}

impl<N: Into<String>> FromIterator<(N, Vec<u8>)> for Keys {
    fn from_iter<T: IntoIterator<Item = (N, Vec<u8>)>>(keys: T) -> Self {
        Self(
            keys.into_iter()
                .map(|(name, key)| (name.into(), key.into()))
                .collect(),
        )
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// How loud a log line is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, ComponentType, Lift,
)]
#[component(enum)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Level {
    /// For the plugin's author.
    #[component(name = "debug")]
    Debug,
    /// Worth noting.
    #[component(name = "info")]
    Info,
    /// Odd, but it went on.
    #[component(name = "warn")]
    Warn,
    /// Something failed.
    #[component(name = "error")]
    Error,
}

/// A line that a plugin logged.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LogLine {
    /// As the plugin gave it.
    pub level: Level,
    /// As the plugin gave it, cut where the log's bytes end.
    pub message: String,
}

/// The log of one run.
#[derive(Debug)]
struct Log {
    lines: Vec<LogLine>,
    lines_left: usize,
    bytes_left: usize,
    overflowed: bool,
}

impl Log {
    /// Keeps what there is room for; the message is not looked at when there is none.
    fn push<'a, E>(
        &mut self,
        level: Level,
        message: impl FnOnce() -> Result<std::borrow::Cow<'a, str>, E>,
    ) -> Result<(), E> {
        if self.overflowed {
            return Ok(());
        }
        if self.lines_left > 0 && self.bytes_left > 0 {
            let message = message()?;
            let kept = message.floor_char_boundary(self.bytes_left);
            self.lines.push(LogLine {
                level,
                message: message[..kept].to_owned(),
            });
            self.lines_left -= 1;
            self.bytes_left -= kept;
            if kept == message.len() {
                return Ok(());
            }
        }
        self.overflowed = true;
        self.lines.push(LogLine {
            level: Level::Warn,
            message: "log truncated: the plugin wrote more than is kept".to_owned(),
        });
        Ok(())
    }
}

/// A run's state on the host's side of the fence; it goes from stage to stage.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) memory: MemoryBudget,
    /// Ticks of processor time that are left.
    pub(super) ticks: u64,
    config: Arc<str>,
    now_ms: u64,
    keys: Arc<Keys>,
    log: Log,
}

impl Host {
    /// The state at the beginning of a run.
    pub(super) fn new(
        limits: &Limits,
        memory: MemoryBudget,
        ticks: u64,
        config: Arc<str>,
        now_ms: u64,
        keys: Arc<Keys>,
    ) -> Self {
        Self {
            memory,
            ticks,
            config,
            now_ms,
            keys,
            log: Log {
                lines: Vec::new(),
                lines_left: limits.log_lines,
                bytes_left: limits.log_bytes,
                overflowed: false,
            },
        }
    }

    /// The log, at the end of a run.
    pub(super) fn into_log(self) -> Vec<LogLine> {
        self.log.lines
    }
}

/// Defines the host's functions.
pub(super) fn add_to_linker(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    let mut host = linker.instance(interface::HOST)?;
    host.func_wrap("log", log)?;
    host.func_wrap("config", |mut store: StoreContextMut<'_, Host>, (): ()| {
        let config = store.data().config.clone();
        pay(&mut store, config.len() as u64)?;
        Ok((config,))
    })?;
    host.func_wrap("now", |mut store: StoreContextMut<'_, Host>, (): ()| {
        pay(&mut store, 0)?;
        Ok((store.data().now_ms,))
    })?;
    host.func_wrap("hmac-sha256", hmac_sha256)
}

fn log(
    mut store: StoreContextMut<'_, Host>,
    (level, message): (Level, WasmStr),
) -> wasmtime::Result<()> {
    // The fuel for the longest text that is looked at; `to_str` checks all of it for UTF-8.
    pay(&mut store, 1_000)?;
    if store.data().log.overflowed {
        return Ok(());
    }
    let message = message.to_str(&store)?.into_owned();
    pay(&mut store, message.len() as u64)?;
    store.data_mut().log.push(level, || Ok(message.into()))
}

fn hmac_sha256(
    mut store: StoreContextMut<'_, Host>,
    (key_name, message): (WasmStr, WasmList<u8>),
) -> wasmtime::Result<(Result<Vec<u8>, String>,)> {
    let bytes = message.as_le_slice(&store).len() as u64;
    pay(&mut store, bytes.saturating_mul(HMAC_FUEL_PER_BYTE))?;
    let key_name = key_name.to_str(&store)?;
    let mac = store
        .data()
        .keys
        .get(&key_name)
        .and_then(|key| Hmac::<Sha256>::new_from_slice(key).ok());
    let Some(mac) = mac else {
        let name = super::truncated(&key_name, 100);
        return Ok((Err(format!("there is no signing key named `{name}`")),));
    };
    let digest = mac.chain_update(message.as_le_slice(&store)).finalize();
    Ok((Ok(digest.into_bytes().to_vec()),))
}

/// Takes the price of a host call out of the plugin's fuel.
fn pay(store: &mut StoreContextMut<'_, Host>, work: u64) -> wasmtime::Result<()> {
    let left = store
        .get_fuel()?
        .checked_sub(CALL_FUEL.saturating_add(work))
        .ok_or(Trap::OutOfFuel)?;
    store.set_fuel(left)
}
