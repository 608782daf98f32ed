//! The `mlx` program: language models from the command line. All of it is in `cli`.
#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
