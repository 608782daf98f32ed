//! A minimal conversation: the model reads all messages so far, and its reply is added to them.
//!
//! ```text
//! cargo run --release --example chat
//! ```
//!
//! Each input line is a message. A reply stops after ten seconds. `mlx chat` is the full program.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use rust_mlx::hub;
use rust_mlx::inference::{self, ErrorKind, GenerateOptions, LoadOptions, Message};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = inference::load_model(hub::first_model()?, &LoadOptions::default())?;
    let mut messages = vec![Message::system("Answer in one sentence.")];
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        messages.push(Message::user(line?));
        let mut options = GenerateOptions::default();
        options.interrupt.deadline = Some(Instant::now() + Duration::from_secs(10));

        let mut reply = String::new();
        for token in model.chat(&messages, &options)? {
            match token {
                Ok(token) => {
                    write!(out, "{}", token.text)?;
                    out.flush()?;
                    reply.push_str(&token.text);
                }
                // At the deadline, the stream returns an error. The tokens before it stay in the
                // reply.
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => break,
                Err(error) => return Err(error.into()),
            }
        }
        writeln!(out)?;
        messages.push(Message::assistant(reply));
    }
    Ok(())
}
