//! The ways in which a plugin fails its own run, in words for the tenant who wrote it.
//!
//! A failure names what happened and, where there is a limit, the limit. A trap brings the
//! plugin's own functions along, from the component's name section; source lines are left out,
//! because they would come from parsing the tenant's DWARF on the host, at a cost nobody bounds.

use wasmtime::{PoolConcurrencyLimitError, Trap, WasmBacktrace};

use super::engine::HOSTCALL_BYTES;
use super::limits::Limits;

/// Most bytes of a trap's text, backtrace included.
const TRAP_BYTES: usize = 2_048;
/// Most bytes of an error that the plugin returned itself.
const GUEST_ERROR_BYTES: usize = 1_024;

/// Why a run of a plugin came to nothing. The text is for the tenant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PluginError {
    /// It trapped: a panic, an out-of-bounds access, an exhausted stack, …
    #[error("it trapped: {0}")]
    Trap(String),
    /// It used up its processor time, or the run took too long altogether.
    #[error("it ran out of time: a delivery's plugin has {} ms", .limit.as_millis())]
    Timeout {
        /// The time that ran out: processor time, or wall time where that was first.
        limit: std::time::Duration,
    },
    /// It used up its fuel.
    #[error("it ran out of fuel: a delivery's plugin may use {limit} units")]
    OutOfFuel {
        /// Fuel that a run has.
        limit: u64,
    },
    /// It wanted more memory than it may have, and gave up.
    #[error("it ran out of memory: a plugin may have {limit} bytes; then it trapped: {trap}")]
    OutOfMemory {
        /// Memory that a run has.
        limit: usize,
        /// How the plugin gave up.
        trap: String,
    },
    /// The event's body or the configuration is more than a plugin may be given.
    #[error("the input has {bytes} bytes; a plugin is given at most {limit}")]
    InputTooLarge {
        /// How large it is.
        bytes: usize,
        /// How large it may be.
        limit: usize,
    },
    /// The body that it answered is too large.
    #[error("it answered a body of {}; at most {limit} bytes are sent", size(*.bytes))]
    AnswerTooLarge {
        /// How large it is; `None` when it was too large to be taken over at all.
        bytes: Option<usize>,
        /// How large it may be.
        limit: usize,
    },
    /// The body that it answered is not JSON.
    #[error("it answered a body that is not JSON: {0}")]
    InvalidBody(String),
    /// A header that cannot be sent, or that is the platform's own.
    #[error("it answered a header that is not sent: {0}")]
    InvalidHeader(String),
    /// More headers than are sent.
    #[error("it answered {count} headers of {bytes} bytes; at most {} of {} are sent", .limit.0, .limit.1)]
    HeadersTooLarge {
        /// How many there are.
        count: usize,
        /// Bytes of all names and values.
        bytes: usize,
        /// The most of each.
        limit: (usize, usize),
    },
    /// It answered an error itself; these are its words.
    #[error("it answered an error: {0}")]
    Guest(String),
    /// The platform's fault, not the plugin's.
    #[error("the platform could not run it")]
    Internal,
}

fn size(bytes: Option<usize>) -> String {
    bytes.map_or_else(
        || format!("more than {HOSTCALL_BYTES} bytes"),
        |bytes| format!("{bytes} bytes"),
    )
}

impl PluginError {
    /// A short name that does not change, for attempts and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Trap(_) => "plugin_trap",
            Self::Timeout { .. } => "plugin_timeout",
            Self::OutOfFuel { .. } => "plugin_out_of_fuel",
            Self::OutOfMemory { .. } => "plugin_out_of_memory",
            Self::InputTooLarge { .. } => "plugin_input_too_large",
            Self::AnswerTooLarge { .. } | Self::HeadersTooLarge { .. } => "plugin_answer_too_large",
            Self::InvalidBody(_) => "plugin_invalid_body",
            Self::InvalidHeader(_) => "plugin_invalid_header",
            Self::Guest(_) => "plugin_error",
            Self::Internal => "plugin_internal",
        }
    }

    /// What the plugin's own `err` becomes.
    pub(super) fn guest(message: &str) -> Self {
        Self::Guest(super::truncated(message, GUEST_ERROR_BYTES))
    }

    /// Tells apart what wasmtime reports. `memory_refused`: the store was denied memory before.
    pub(super) fn from_wasmtime(
        error: &wasmtime::Error,
        memory_refused: bool,
        limits: &Limits,
    ) -> Self {
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => return Self::OutOfFuel { limit: limits.fuel },
            Some(Trap::Interrupt) => return Self::Timeout { limit: limits.cpu },
            _ => {}
        }
        if error.is::<PoolConcurrencyLimitError>() || error.root_cause().is::<std::io::Error>() {
            tracing::error!(error = format!("{error:#}"), "a plugin could not be run");
            return Self::Internal;
        }
        let backtrace = error.downcast_ref::<WasmBacktrace>();
        if backtrace.is_none() && is_hostcall_exhaustion(error) {
            // Outside of the guest the only thing copied is its answer.
            return Self::AnswerTooLarge {
                bytes: None,
                limit: limits.output_bytes,
            };
        }
        let trap = trap_text(error, backtrace);
        if memory_refused {
            return Self::OutOfMemory {
                limit: limits.memory_bytes,
                trap,
            };
        }
        Self::Trap(trap)
    }
}

/// wasmtime does not export the type of this error; a test pins its words.
fn is_hostcall_exhaustion(error: &wasmtime::Error) -> bool {
    error
        .root_cause()
        .to_string()
        .contains("fuel allocated for hostcalls has been exhausted")
}

fn trap_text(error: &wasmtime::Error, backtrace: Option<&WasmBacktrace>) -> String {
    let cause = error.root_cause().to_string();
    let cause = cause.strip_prefix("wasm trap: ").unwrap_or(&cause);
    let frames = backtrace
        .filter(|b| !b.frames().is_empty())
        .map(ToString::to_string);
    let frames = frames.as_deref().and_then(|text| text.split_once('\n'));
    let text = match frames {
        // Components have no names for their modules.
        Some((_heading, frames)) => format!("{cause}\n{}", frames.replace("<unknown>!", "")),
        None => cause.to_owned(),
    };
    super::truncated(&text, TRAP_BYTES)
}
