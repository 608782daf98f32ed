//! What is fuzzed: the readers of everything that a model file says before a network is built. Shared by
//! the targets for cargo-fuzz and by `metal-backend/tests/fuzz.rs`.
//!
//! An entry may refuse its input in any way but by crashing, hanging, or taking memory that the input does
//! not have the size for.

#![allow(dead_code, reason = "each target uses one")]

use std::path::PathBuf;
use std::sync::OnceLock;

use inference::Message;
use metal_backend::checkpoint::safetensors::SafetensorsCheckpoint;
use metal_backend::checkpoint::{Gguf, ModelConfig, gguf_config, gguf_quant};
use metal_backend::text::{ChatOptions, ChatTemplate, TextLimits, Tokenizer};

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

/// A GGUF file: header, metadata, tensors, their decoding, configuration and tokenizer.
pub fn gguf(data: &[u8]) {
    let path = scratch("input.gguf");
    std::fs::write(&path, data).expect("the input can be written");
    let Ok(file) = Gguf::open(&path) else { return };
    let mut total = 0;
    for tensor in file.tensors().values() {
        if let Ok(bytes) = file.read(tensor) {
            total += bytes.len();
            let numbers = gguf_quant::dequantize(tensor.kind, &bytes);
            let packed = gguf_quant::repack(tensor.kind, &bytes);
            if let (Some(numbers), Some(packed)) = (numbers, packed) {
                assert_eq!(
                    numbers.len() * packed.bits as usize,
                    packed.packed.len() * 32
                );
            }
        }
    }
    assert!(total <= data.len(), "tensors overlap");
    let _ = gguf_config::config(&file);
    if let Ok(parts) = gguf_config::tokenizer_parts(&file)
        && let Ok(tokenizer) = Tokenizer::from_gguf(&parts)
    {
        let ids = tokenizer.encode_plain("Hello <s> wörld 12");
        for id in ids.unwrap_or_default() {
            assert!(!tokenizer.is_control(id), "text became a control token");
        }
    }
}

/// A safetensors file: header and tensors.
pub fn safetensors(data: &[u8]) {
    let dir = scratch("model");
    std::fs::create_dir_all(&dir).expect("a directory can be made");
    std::fs::write(dir.join("model.safetensors"), data).expect("the input can be written");
    let Ok(checkpoint) = SafetensorsCheckpoint::open(&dir) else {
        return;
    };
    let mut total = 0;
    for name in checkpoint.names() {
        if let Some(info) = checkpoint.info(name)
            && let Ok(bytes) = checkpoint.read::<u8>(info)
        {
            total += bytes.len();
        }
    }
    assert!(total <= data.len(), "tensors overlap");
}

/// A `config.json`.
pub fn config(data: &[u8]) {
    if let Ok(config) = ModelConfig::from_json(data) {
        // What passed is safe to compute with.
        assert!(config.num_attention_heads > 0 && config.num_key_value_heads > 0);
        assert_eq!(config.num_attention_heads % config.num_key_value_heads, 0);
        assert_eq!(config.layer_kinds.len(), config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            let _ = (config.window(layer), config.rope_of(layer));
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
