//! Serves the scripted model of the tests, for external checks of the server that need no engine.
//! It prints the address, and stops when standard input ends.
//!
//!     cargo run -p rust-mlx-inference-server --example scripted
//!
//! The program accepts some flags of `mlx serve`: `--port`, `--api-key`, `--parallel`,
//! `--ctx-size`, `--any-model` and `--no-ui`. `--name` sets the model's name; the default is
//! `tiny`. With `--keep`, the program continues after standard input ends.

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/common/script.rs"]
mod script;

use std::io::Read;
use std::str::FromStr;

use inference::{CancelToken, Error, ErrorKind, Result};
use inference_server::{Config, ServedModel, Server};

/// A chat template in Hermes's format, so the server detects tool calls and reasoning.
const TEMPLATE: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Parses a flag's value.
fn value<T: FromStr>(flag: &str, text: Option<String>) -> Result<T> {
    let text = text.ok_or_else(|| invalid(format!("{flag} needs a value")))?;
    text.parse()
        .map_err(|_| invalid(format!("{flag} cannot be {text:?}")))
}

fn main() -> Result<()> {
    let (mut port, mut name, mut context, mut keep) = (0u16, String::from("tiny"), 100_000, false);
    let mut config = Config::new();
    let mut flags = std::env::args().skip(1);
    while let Some(flag) = flags.next() {
        match flag.as_str() {
            "--port" => port = value(&flag, flags.next())?,
            "--name" => name = value(&flag, flags.next())?,
            "--ctx-size" => context = value(&flag, flags.next())?,
            "--api-key" => config.api_key = Some(value(&flag, flags.next())?),
            "--parallel" => config.parallel = value(&flag, flags.next())?,
            "--any-model" => config.any_model = true,
            "--no-ui" => config.ui = false,
            "--keep" => keep = true,
            _ => return Err(invalid(format!("there is no flag {flag}"))),
        }
    }
    let model = script::Script::writing(TEMPLATE, &[]).into_model();
    let model = ServedModel::new(name, model, script::capabilities())?.with_context(context);
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let server = Server::bind(&config.with_address(address), vec![model])?;
    println!("http://{}", server.address());
    let stop = CancelToken::new();
    if !keep {
        let raised = stop.clone();
        std::thread::spawn(move || {
            // Reads until the parent process closes standard input.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            raised.cancel();
        });
    }
    server.run(&stop)
}
