//! Helpers for the commands' tests: a model with a fixed reply, and streams in memory.

use std::io::Cursor;
use std::time::Duration;

use inference::{Capabilities, GenerateMetrics};
use inference_conformance::scripted::{Scripted, ScriptedBackend};

use crate::cli::terminal::console::Console;

/// Standard streams in memory.
pub struct Streams {
    input: Cursor<Vec<u8>>,
    out: Vec<u8>,
    err: Vec<u8>,
}

impl Streams {
    pub fn new(input: &str) -> Self {
        Self {
            input: Cursor::new(input.into()),
            out: Vec::new(),
            err: Vec::new(),
        }
    }

    pub fn console(&mut self) -> Console<'_> {
        Console {
            input: &mut self.input,
            out: &mut self.out,
            err: &mut self.err,
            in_is_terminal: false,
            out_is_terminal: false,
            err_is_terminal: false,
            quiet: false,
            verbose: false,
            catches_interrupts: false,
        }
    }

    pub fn out(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    pub fn err(&self) -> String {
        String::from_utf8(self.err.clone()).unwrap()
    }
}

/// A model that replies with fixed pieces, whose ids count from 0.
pub fn base(pieces: &[&str]) -> Scripted {
    let model = Scripted::replies(pieces.iter().copied());
    let model = model.with_info(|info| {
        info.architecture = "mock".into();
        info.vocab_size = 100;
        info.context_length = Some(1024);
    });
    model.with_metrics(measure)
}

/// A mock model with a chat template.
pub fn instruct(pieces: &[&str]) -> Scripted {
    base(pieces).with_info(|info| info.has_chat_template = true)
}

/// Sets the times and the memory, which are the same for every request.
fn measure(metrics: &mut GenerateMetrics) {
    metrics.prefill_time = Duration::from_millis(10);
    metrics.decode_time = Duration::from_millis(20);
    metrics.total_time = Duration::from_millis(30);
    metrics.time_to_first_token = Duration::from_millis(11);
    metrics.peak_memory_bytes = 3 << 20;
}

/// A backend that loads nothing. With a `reason`, it is unavailable.
pub fn backend(name: &str, reason: Option<&str>) -> ScriptedBackend {
    let capabilities = Capabilities::new().with_streaming();
    let backend = ScriptedBackend::new(name).with_capabilities(capabilities);
    match reason {
        Some(reason) => backend.unavailable(reason),
        None => backend,
    }
}
