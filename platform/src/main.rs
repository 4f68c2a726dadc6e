//! The `botix` program.

fn main() -> std::process::ExitCode {
    botix::cli::main()
}
