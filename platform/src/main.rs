//! The `botix` program.

/// A webhook on its way makes hundreds of short-lived allocations, and those of the threads meet.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    botix::cli::main()
}
