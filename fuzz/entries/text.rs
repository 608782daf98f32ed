//! The fuzz targets of `inference-text`: chat templates, and tokenizers from GGUF metadata. Both
//! the cargo-fuzz targets and `inference-text/tests/text/fuzz.rs` use this file.
//!
//! An entry may refuse its input. It must not crash or hang, and must not use memory out of
//! proportion to the input's size.

#![allow(dead_code, reason = "each target uses one")]

use std::path::PathBuf;
use std::sync::OnceLock;

use inference::Message;
use inference_formats::{Gguf, gguf_config};
use inference_text::{ChatOptions, ChatTemplate, TextLimits, Tokenizer};

/// A directory for the inputs of this process, in memory if the system supports it.
fn scratch(name: &str) -> PathBuf {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .expect("a temporary directory")
    });
    dir.path().join(name)
}

/// Fuzzes the loading of a GGUF file's tokenizer.
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

/// Fuzzes a chat template, which renders a conversation.
pub fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else {
        return;
    };
    // The limits are smaller than usual, so that each run is short. The checks are the usual ones.
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
