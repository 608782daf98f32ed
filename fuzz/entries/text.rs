//! The fuzz targets of `inference-text`: chat templates, and tokenizers from GGUF metadata. Shared
//! by the targets for cargo-fuzz and by `inference-text/tests/text/fuzz.rs`.
//!
//! An entry may refuse its input. It must not crash, hang, or take memory out of proportion to the
//! input.

#![allow(dead_code, reason = "each target uses one")]

use std::path::PathBuf;
use std::sync::OnceLock;

use inference::Message;
use inference_formats::{Gguf, gguf_config};
use inference_text::{ChatOptions, ChatTemplate, TextLimits, Tokenizer};

/// A directory for this process's inputs; in memory where the system has that.
fn scratch(name: &str) -> PathBuf {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .expect("a temporary directory")
    });
    dir.path().join(name)
}

/// The tokenizer of a GGUF file.
pub fn gguf_tokenizer(data: &[u8]) {
    let path = scratch("tokenizer.gguf");
    std::fs::write(&path, data).expect("the input can be written");
    if let Ok(file) = Gguf::open(&path)
        && let Ok(parts) = gguf_config::tokenizer_parts(&file)
        && let Ok(tokenizer) = Tokenizer::from_gguf(&parts)
    {
        let ids = tokenizer.encode_plain("Hello <s> wörld 12");
        for id in ids.unwrap_or_default() {
            assert!(!tokenizer.is_control(id), "text became a control token");
        }
    }
}

/// A chat template, with a conversation to render.
pub fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else {
        return;
    };
    // Smaller bounds than usual, so that each run is short; the mechanism is the same.
    let mut limits = TextLimits::default();
    limits.text_bytes = 1 << 18;
    limits.template_bytes = 1 << 14;
    limits.template_fuel = 50_000;
    let Ok(template) = ChatTemplate::with_limits(source, "fuzzing", &limits) else {
        return;
    };
    let messages = [
        Message::system("Be brief."),
        Message::user("Hi <b>\n é"),
        Message::assistant("<think>x</think>It's \"4\"."),
        Message::user("Bye"),
    ];
    let options = ChatOptions::answer().with_now(1_709_211_909);
    if let Ok(text) = template.render(&messages, &options, "<s>", "</s>") {
        assert!(text.len() <= 1 << 18);
    }
}
