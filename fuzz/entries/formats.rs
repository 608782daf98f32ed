//! The fuzz targets of `inference-formats`: the readers of configurations, safetensors and GGUF
//! files. Both the cargo-fuzz targets and `inference-formats/tests/formats/fuzz.rs` use this file.
//!
//! An entry may refuse its input. It must not crash or hang, and must not use memory out of
//! proportion to the input's size.

#![allow(dead_code, reason = "each target uses one")]

use std::path::PathBuf;
use std::sync::OnceLock;

use inference_formats::gguf::GgufSummary;
use inference_formats::quantization::Misfit;
use inference_formats::safetensors::SafetensorsCheckpoint;
use inference_formats::{Gguf, ModelConfig, gguf_config, quantization};

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

/// Fuzzes the reading of a GGUF file: summary, header, metadata, tensors, decoding, configuration,
/// and the parts of a tokenizer.
pub fn gguf(data: &[u8]) {
    let path = scratch("input.gguf");
    std::fs::write(&path, data).expect("the input can be written");
    let summary = GgufSummary::open(&path);
    let Ok(file) = Gguf::open(&path) else { return };
    let named = file.metadata().str("general.architecture");
    if let Ok(named) = named {
        // If `Gguf::open` accepts the file, `GgufSummary::open` must accept it, too. Both must find
        // the same architecture.
        let summary = summary.expect("the header was read before");
        assert_eq!(summary.architecture.as_deref(), named);
    }
    let mut total = 0;
    for tensor in file.tensors().values() {
        if let Ok(bytes) = file.read(tensor) {
            total += bytes.len();
            let numbers = quantization::dequantize(tensor.kind, &bytes);
            let packed = quantization::repack(tensor.kind, &bytes);
            let layout = tensor.kind.layout();
            if let Some(numbers) = &numbers {
                let sizes: Vec<_> = (layout.parts().iter())
                    .map(|part| part.bytes(numbers.len()))
                    .collect();
                assert_eq!(
                    sizes.iter().sum::<usize>() as u64,
                    layout.bytes(numbers.len() as u64)
                );
                // The memory consists of words, so that the parts are aligned.
                let mut memory: Vec<Vec<u32>> =
                    sizes.iter().map(|size| vec![0; size.div_ceil(4)]).collect();
                let mut parts: Vec<&mut [u8]> = (memory.iter_mut().zip(&sizes))
                    .map(|(memory, size)| &mut bytemuck::cast_slice_mut(memory)[..*size])
                    .collect();
                let done = quantization::pack_into(tensor.kind, &bytes, &mut parts);
                let expected = [Ok(()), Err(Misfit::Layout), Err(Misfit::Scale)];
                assert!(expected.contains(&done), "{done:?}");
            }
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
    let _ = gguf_config::tokenizer_parts(&file);
}

/// Fuzzes the reading of a safetensors file: header and tensors.
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

/// Fuzzes the reading of a `config.json`.
pub fn config(data: &[u8]) {
    if let Ok(config) = ModelConfig::from_json(data) {
        // A validated configuration must be safe to compute with.
        assert!(config.num_attention_heads > 0 && config.num_key_value_heads > 0);
        assert_eq!(config.num_attention_heads % config.num_key_value_heads, 0);
        assert_eq!(config.layer_kinds.len(), config.num_hidden_layers);
        for layer in 0..config.num_hidden_layers {
            let _ = (config.window(layer), config.rope_of(layer));
        }
    }
}
