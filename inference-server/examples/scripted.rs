//! Serves the scripted model of the tests, as `tiny`: for checks of the server from outside that
//! need no engine. Prints the address; ends when standard input does.
//!
//!     cargo run -p rust-mlx-inference-server --example scripted

#![forbid(unsafe_code)]

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/common/script.rs"]
mod script;

use std::io::Read;
use std::sync::Arc;

use inference::{CancelToken, Result, TextModel};
use inference_server::{Config, ServedModel, Server};

/// A template of the Hermes family, which shows tools and reasoning.
const TEMPLATE: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

fn main() -> Result<()> {
    let model: Arc<dyn TextModel> = Arc::new(script::Script::writing(TEMPLATE, &[]));
    let model = ServedModel::new("tiny", model, script::capabilities())?.with_context(100_000);
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let server = Server::bind(&Config::new().with_address(address), vec![model])?;
    println!("http://{}", server.address());
    let stop = CancelToken::new();
    let raised = stop.clone();
    std::thread::spawn(move || {
        // The parent process holds the other end.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        raised.cancel();
    });
    server.run(&stop)
}
