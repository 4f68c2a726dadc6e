//! The program as a command: with a clean environment, and watched while it runs.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// 32 bytes, base64; fixed, so that a restart reads what the first start wrote.
pub const MASTER_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

const PROGRAM: &str = env!("CARGO_BIN_EXE_botix");

/// The program with a clean environment: what the developer has exported must not reach it.
pub fn program() -> Command {
    let mut command = Command::new(PROGRAM);
    command.env_clear();
    for kept in ["PATH", "HOME", "TMPDIR", "RUST_BACKTRACE"] {
        if let Some(value) = std::env::var_os(kept) {
            command.env(kept, value);
        }
    }
    command
}

/// A program that is not a server of a store: its output is watched line by line.
pub struct Watched {
    child: Child,
    output: PathBuf,
}

impl Watched {
    pub fn start(mut command: Command, output: PathBuf) -> Self {
        let file = File::create(&output).expect("a file for the output");
        let child = command
            .stdin(Stdio::null())
            .stderr(file.try_clone().expect("a second handle"))
            .stdout(file)
            .spawn()
            .expect("the program starts");
        Self { child, output }
    }

    pub fn output(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    pub async fn ended_within(&mut self, deadline: Duration) -> ExitStatus {
        super::eventually_within(deadline, "the program ends", || {
            let status = self.child.try_wait().expect("a child");
            async move { status }
        })
        .await
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- output of the program\n{}---", self.output());
        }
    }
}
