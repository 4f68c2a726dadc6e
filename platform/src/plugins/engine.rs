//! The one wasmtime engine of a process: its settings, its clock, its slots, and what is loaded in it.
//!
//! Settings come from [`settings`] alone, so that the compiling child and the serving parent cannot
//! disagree; what they come to is the [`Fingerprint`] that every artifact carries. Instances come
//! from a pool sized for `concurrency` runs at once, and a semaphore of the same size stands before
//! it, so the pool is never found empty. No single plugin may hold more than half of the slots,
//! so one that is slow leaves the other half to the others. A thread advances the epoch every 2 ms; each plugin
//! yields to the other tasks at every tick that it lives through and is stopped when its processor
//! time is spent. The settings were measured; `docs/performance.md` has the numbers.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use wasmtime::component::{Component, ComponentExportIndex, InstancePre, Linker};
use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig,
    WasmBacktraceDetails,
};

use super::artifact::{Artifact, Fingerprint};
use super::host::{self, Host};
use super::inspect::{Exports, FEATURES};
use super::interface;
use super::limits::Limits;

/// How often the epoch advances: the grain of processor time and the longest run without a yield.
pub(super) const TICK: Duration = Duration::from_millis(2);
/// The most elements of a table; interpreters need some thousands.
pub(super) const TABLE_ELEMENTS: usize = 20_000;
/// The most bytes that a guest hands to the host in one call, before they are looked at.
pub(super) const HOSTCALL_BYTES: usize = 256 << 10;

const MEMORIES_PER_PLUGIN: u32 = 4;
const TABLES_PER_PLUGIN: u32 = 16;
const CORE_INSTANCES_PER_PLUGIN: u32 = 64;

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// wasmtime refuses the settings, or the address space for the pool is not to be had.
    #[error("the plugin engine did not start: {0}")]
    Wasmtime(String),
    /// The clock's thread did not start.
    #[error("the plugin engine's clock did not start")]
    Clock(#[source] std::io::Error),
    /// A concurrency of none, or of more than the pool can have.
    #[error("plugins can run 1 to 1,000 at once, not {0}")]
    Concurrency(u32),
    /// Limits that the pool cannot keep.
    #[error("a plugin can have at most 64 MiB of memory, not {0} bytes")]
    Memory(usize),
}

/// Why an artifact does not load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Made by another version, with other settings or for another processor: compile it again.
    #[error("the artifact was compiled by another engine")]
    OtherEngine,
    /// More memories, tables or instances than a plugin may have. The text is public.
    #[error("the component does not fit: {0}")]
    DoesNotFit(String),
}

/// Compiles, loads and runs plugins. Cheap to clone.
#[derive(Clone)]
pub struct PluginEngine {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) engine: Engine,
    pub(super) limits: Limits,
    pub(super) slots: Semaphore,
    pub(super) compiling: Semaphore,
    pub(super) fingerprint: Fingerprint,
    linker: Linker<Host>,
    slots_per_plugin: usize,
    _clock: Clock,
}

/// A compiled plugin that is ready to run. Cheap to clone.
#[derive(Clone)]
pub struct Plugin {
    pub(super) inner: Arc<Loaded>,
}

pub(super) struct Loaded {
    pub(super) pre: InstancePre<Host>,
    pub(super) transform: Option<ComponentExportIndex>,
    pub(super) sign: Option<ComponentExportIndex>,
    pub(super) slots: Semaphore,
}

impl Plugin {
    /// The functions that it exports.
    pub fn exports(&self) -> Exports {
        Exports {
            transform: self.inner.transform.is_some(),
            sign: self.inner.sign.is_some(),
        }
    }
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin")
            .field("exports", &self.exports())
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for PluginEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginEngine")
            .field("limits", &self.inner.limits)
            .finish_non_exhaustive()
    }
}

impl PluginEngine {
    /// Starts an engine that runs up to `concurrency` plugins at once.
    ///
    /// Address space for all of them is reserved at once (not memory): 0.5 GiB for each.
    pub fn new(limits: Limits, concurrency: u32) -> Result<Self, EngineError> {
        if !(1..=1_000).contains(&concurrency) {
            return Err(EngineError::Concurrency(concurrency));
        }
        if limits.memory_bytes > Limits::default().memory_bytes {
            return Err(EngineError::Memory(limits.memory_bytes));
        }
        let failed = |error: wasmtime::Error| EngineError::Wasmtime(format!("{error:#}"));
        let engine = Engine::new(&settings(Some(pool(concurrency)))).map_err(failed)?;
        let mut linker = Linker::new(&engine);
        host::add_to_linker(&mut linker).map_err(failed)?;
        let slots = concurrency as usize;
        Ok(Self {
            inner: Arc::new(Inner {
                fingerprint: fingerprint(&engine),
                _clock: Clock::start(engine.clone()).map_err(EngineError::Clock)?,
                linker,
                engine,
                limits,
                slots: Semaphore::new(slots),
                slots_per_plugin: slots.div_ceil(2),
                compiling: Semaphore::new(1),
            }),
        })
    }

    /// What artifacts must have been compiled by to load here.
    pub fn fingerprint(&self) -> Fingerprint {
        self.inner.fingerprint
    }

    /// The limits of every run.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Makes a compiled plugin ready to run: 50 µs to 5 ms, by its size.
    pub fn load(&self, artifact: &Artifact) -> Result<Plugin, LoadError> {
        if artifact.fingerprint() != self.inner.fingerprint {
            return Err(LoadError::OtherEngine);
        }
        let does_not_fit = |error: wasmtime::Error| {
            LoadError::DoesNotFit(super::truncated(&error.root_cause().to_string(), 500))
        };
        let component = artifact
            .deserialize(&self.inner.engine)
            .map_err(does_not_fit)?;
        component
            .initialize_copy_on_write_image()
            .map_err(does_not_fit)?;
        let exports = artifact.exports();
        let transform = exports
            .transform
            .then(|| {
                export(
                    &component,
                    interface::TRANSFORMER,
                    interface::TRANSFORM.name,
                )
            })
            .transpose()?;
        let sign = exports
            .sign
            .then(|| export(&component, interface::SIGNER, interface::SIGN.name))
            .transpose()?;
        Ok(Plugin {
            inner: Arc::new(Loaded {
                pre: self
                    .inner
                    .linker
                    .instantiate_pre(&component)
                    .map_err(does_not_fit)?,
                transform,
                sign,
                slots: Semaphore::new(self.inner.slots_per_plugin),
            }),
        })
    }
}

fn export(
    component: &Component,
    interface: &str,
    function: &str,
) -> Result<ComponentExportIndex, LoadError> {
    component
        .get_export_index(None, interface)
        .and_then(|instance| component.get_export_index(Some(&instance), function))
        .ok_or_else(|| LoadError::DoesNotFit(format!("`{interface}#{function}` is missing")))
}

/// The settings of every engine, with or without a pool for instances (a compiler has none; the
/// pool does not show in compiled code).
pub(super) fn settings(pool: Option<PoolingAllocationConfig>) -> Config {
    let mut config = Config::new();
    config
        .wasm_features(!FEATURES, false)
        .wasm_features(FEATURES, true)
        .concurrency_support(false)
        .shared_memory(false)
        .epoch_interruption(true)
        .consume_fuel(true)
        .max_wasm_stack(512 << 10)
        .async_stack_size(1 << 20)
        .memory_init_cow(true)
        // Bounds are checked by code. Pages that fault would have to be closed again after each run that grew
        // its memory, at every processor, which cost a small plugin more than its checks do.
        .signals_based_traps(false)
        .memory_guard_size(0)
        // Twice what a memory may have: between two of them lies what nobody can reach.
        .memory_reservation(2 * Limits::default().memory_bytes as u64)
        // Resolving source lines would parse a tenant's DWARF on the host at every trap.
        .wasm_backtrace_details(WasmBacktraceDetails::Disable);
    if let Some(pool) = pool {
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    }
    config
}

fn pool(concurrency: u32) -> PoolingAllocationConfig {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(concurrency)
        .total_stacks(concurrency)
        .total_core_instances(concurrency * CORE_INSTANCES_PER_PLUGIN)
        .total_memories(concurrency * MEMORIES_PER_PLUGIN)
        .total_tables(concurrency * TABLES_PER_PLUGIN)
        .max_core_instances_per_component(CORE_INSTANCES_PER_PLUGIN)
        .max_memories_per_component(MEMORIES_PER_PLUGIN)
        .max_tables_per_component(TABLES_PER_PLUGIN)
        .max_memory_size(Limits::default().memory_bytes)
        .table_elements(TABLE_ELEMENTS)
        .pagemap_scan(Enabled::Auto)
        .linear_memory_keep_resident(2 << 20)
        .table_keep_resident(TABLE_ELEMENTS * size_of::<usize>());
    pool
}

/// Digests everything in an engine that compiled code depends on.
pub(super) fn fingerprint(engine: &Engine) -> Fingerprint {
    struct Collect(Sha256);
    impl Hasher for Collect {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0 // not asked for: the digest is taken whole
        }
    }
    let mut collect = Collect(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut collect);
    Fingerprint(collect.0.finalize().into())
}

/// Advances an engine's epoch until it is dropped.
struct Clock {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Clock {
    fn start(engine: Engine) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("plugin-clock".into())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    thread::park_timeout(TICK);
                    engine.increment_epoch();
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has nothing to say, and a panic of its own would already be on standard error.
            let _ = thread.join();
        }
    }
}
