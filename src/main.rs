//! The `mlx` program: language models from the command line. All of it is in `cli`.
#![forbid(unsafe_code)]

mod cli;

/// The C library's allocator takes a tenth of the time of a token on a CPU, most of it within MLX.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
