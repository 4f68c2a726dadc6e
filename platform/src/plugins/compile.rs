//! Compiling, where a tenant's file costs real time and memory.
//!
//! A small component can take seconds and hundreds of megabytes to compile, and a fault in the
//! compiler could end the process that it happens in. So the server compiles in a child: this same
//! program with a hidden command, the component on standard input, the code on standard output. The
//! child has no environment, and lowers its own limits of memory and processor time before it reads a
//! byte; the parent gives it a wall clock, one child at a time. [`PluginEngine::compile`] does the
//! same within the process, for the command line and for tests.
//!
//! The child says what engine it is before anything else, so that a program file replaced under a
//! running server is noticed and not trusted.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, nice, setrlimit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use wasmtime::Engine;

use super::artifact::Artifact;
use super::engine::{PluginEngine, fingerprint, settings};
use super::inspect::{Refusal, inspect};

/// The hidden command that [`compile_child_main`] is the body of.
pub const COMPILE_COMMAND: &str = "plugin-compile";

/// Memory of the child. A 12 MB JavaScript engine took 440 MB.
const MEMORY: u64 = 1 << 30;
/// Processor seconds of the child, all threads together. The Python interpreter takes about 30.
const CPU_SECONDS: u64 = 120;
/// Time that the parent waits.
const WALL: Duration = Duration::from_mins(2);
/// Threads that compile; each costs memory.
const THREADS: &str = "4";
/// The largest code that the parent takes over.
const CODE_BYTES: u64 = 256 << 20;
/// The longest message that the parent takes over.
const MESSAGE_BYTES: u16 = 2_048;
/// The largest component that the child reads; uploads are smaller.
const WASM_BYTES: u64 = 64 << 20;

/// The child's exit status for a component that does not compile; the message is on standard error.
const REJECTED: u8 = 3;

/// Why there is no artifact.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The upload check's verdict. The text is public.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The compiler's verdict on the component, which another try will not change. Public.
    #[error("the component does not compile: {0}")]
    Rejected(String),
    /// It takes more memory or time than compiling may take; so will another try. Public.
    #[error("compiling the component takes too much memory or time")]
    TooExpensive,
    /// The child could not be run or broke off; another try may go better.
    #[error("the compiler could not be run: {0}")]
    Child(String),
}

impl CompileError {
    /// Whether the component is at fault, so that compiling it again is of no use.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Child(_))
    }
}

impl PluginEngine {
    /// Checks and compiles a component in this process, on this thread: milliseconds to minutes.
    pub fn compile(&self, wasm: &[u8]) -> Result<Artifact, CompileError> {
        let exports = inspect(wasm)?;
        let code = compile(&self.inner.engine, wasm).map_err(CompileError::Rejected)?;
        Ok(Artifact::compiled(self.fingerprint(), wasm, exports, code))
    }

    /// Checks and compiles a component in a child process with limits, after any that waits before.
    ///
    /// The running program must call [`compile_child_main`] for [`COMPILE_COMMAND`].
    pub async fn compile_isolated(&self, wasm: &[u8]) -> Result<Artifact, CompileError> {
        let exports = {
            let wasm = wasm.to_vec();
            tokio::task::spawn_blocking(move || inspect(&wasm))
                .await
                .map_err(|error| CompileError::Child(error.to_string()))??
        };
        // Never closed, so this wait ends in a permit.
        let _one_at_a_time = self.inner.compiling.acquire().await;
        let answer = tokio::time::timeout(WALL, run_child(wasm))
            .await
            .map_err(|_| CompileError::TooExpensive)?
            .map_err(|error| CompileError::Child(error.to_string()))?;
        let code = answer.code(&self.fingerprint().0)?;
        Ok(Artifact::compiled(self.fingerprint(), wasm, exports, code))
    }
}

/// What a child left behind.
struct Answer {
    status: ExitStatus,
    output: Vec<u8>,
    message: Vec<u8>,
}

impl Answer {
    /// Tells a child that met its limits from one that somebody stopped.
    fn killed(&self) -> CompileError {
        let met_a_limit = [
            Signal::ABORT, // memory: Rust aborts when an allocation fails
            Signal::SEGV,  // stack
            Signal::KILL,  // processor time, or the kernel was out of memory
            Signal::XCPU,
        ];
        let signal = self.status.signal();
        if met_a_limit.iter().any(|s| signal == Some(s.as_raw())) {
            return CompileError::TooExpensive;
        }
        CompileError::Child(format!("it was stopped by signal {}", signal.unwrap_or(0)))
    }

    fn code(mut self, fingerprint: &[u8; 32]) -> Result<Vec<u8>, CompileError> {
        let message = || {
            super::truncated(
                String::from_utf8_lossy(&self.message).trim(),
                usize::from(MESSAGE_BYTES),
            )
        };
        match self.status.code() {
            Some(0) => {}
            Some(code) if code == i32::from(REJECTED) => {
                return Err(CompileError::Rejected(message()));
            }
            Some(code) => {
                return Err(CompileError::Child(format!(
                    "it ended with {code}: {}",
                    message()
                )));
            }
            None => return Err(self.killed()),
        }
        if !self.output.starts_with(fingerprint) {
            return Err(CompileError::Child(
                "the program was replaced; restart it".into(),
            ));
        }
        Ok(self.output.split_off(fingerprint.len()))
    }
}

async fn run_child(wasm: &[u8]) -> std::io::Result<Answer> {
    let mut child = Command::new(program()?)
        .arg(COMPILE_COMMAND)
        .env_clear()
        .env("RAYON_NUM_THREADS", THREADS)
        // The allocator would take a gigabyte at once, and all of it would count.
        .env("MIMALLOC_ARENA_EAGER_COMMIT", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let stdin = child.stdin.take();
    let ((), output, message) = tokio::join!(
        async {
            if let Some(mut stdin) = stdin {
                // A child that ends early says why by its status.
                let _ = stdin.write_all(wasm).await;
            }
        },
        read_up_to(child.stdout.take(), CODE_BYTES),
        read_up_to(child.stderr.take(), u64::from(MESSAGE_BYTES)),
    );
    Ok(Answer {
        output: output?,
        message: message?,
        status: child.wait().await?,
    })
}

async fn read_up_to(pipe: Option<impl AsyncRead + Unpin>, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(limit).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

/// The program that is running. On Linux the file itself, even if its name now means another one.
fn program() -> std::io::Result<PathBuf> {
    if cfg!(target_os = "linux") {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    std::env::current_exe()
}

/// The body of [`COMPILE_COMMAND`]: a component on standard input becomes code on standard output.
pub fn compile_child_main() -> ExitCode {
    match compile_child() {
        Ok(()) => ExitCode::SUCCESS,
        Err(ChildError::Rejected(message)) => {
            eprintln!("{message}");
            ExitCode::from(REJECTED)
        }
        Err(ChildError::Broken(message)) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

enum ChildError {
    Rejected(String),
    Broken(String),
}

fn compile_child() -> Result<(), ChildError> {
    let broken = |error: std::io::Error| ChildError::Broken(error.to_string());
    lower_limits().map_err(broken)?;
    let mut wasm = Vec::new();
    std::io::stdin()
        .lock()
        .take(WASM_BYTES)
        .read_to_end(&mut wasm)
        .map_err(broken)?;
    let engine =
        Engine::new(&settings(None)).map_err(|error| ChildError::Broken(format!("{error:#}")))?;
    let code = compile(&engine, &wasm).map_err(ChildError::Rejected)?;
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(&fingerprint(&engine).0)
        .and_then(|()| stdout.write_all(&code))
        .and_then(|()| stdout.flush())
        .map_err(broken)
}

/// Gives up, for this process and for good, what compiling has no need of.
fn lower_limits() -> std::io::Result<()> {
    let limits = [
        // Writable memory: unlike address space it does not count what threads only reserve.
        (Resource::Data, MEMORY),
        (Resource::Cpu, CPU_SECONDS),
        (Resource::Core, 0),
        (Resource::Fsize, 0),
    ];
    for (resource, limit) in limits {
        let limit = getrlimit(resource)
            .maximum
            .map_or(limit, |hard| limit.min(hard));
        setrlimit(
            resource,
            Rlimit {
                current: Some(limit),
                maximum: Some(limit),
            },
        )?;
    }
    // Serving goes first. Where niceness is not to be had, compile anyway.
    let _ = nice(10);
    Ok(())
}

fn compile(engine: &Engine, wasm: &[u8]) -> Result<Vec<u8>, String> {
    // A panic of the compiler is the fault of the component that provoked it.
    catch_unwind(AssertUnwindSafe(|| engine.precompile_component(wasm)))
        .map_err(|_| "the compiler gave up on it".to_owned())?
        .map_err(|error| super::truncated(&format!("{error:#}"), 1_024))
}
