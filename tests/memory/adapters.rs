//! Adapters that requests name share their model's weights in memory.
//!
//! The counter covers the whole process, so the test runs in a separate process.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::greedy;
use inference::{LoadOptions, Prompt};
use mlx_rs_core::memory;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

const HIDDEN: usize = 256;
const VOCAB: usize = 4096;

/// Writes tensors whose elements follow a fixed pattern, and returns their size in bytes.
fn write(path: &Path, shapes: &[(String, Vec<usize>)]) -> usize {
    let number = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 8) % 1000) as f32 / 2e4 - 0.025;
    let bytes: Vec<Vec<u8>> = shapes
        .iter()
        .map(|(_, shape)| {
            let size = shape.iter().product();
            (0..size).flat_map(|i| number(i).to_le_bytes()).collect()
        })
        .collect();
    let views: BTreeMap<&str, TensorView<'_>> = shapes
        .iter()
        .zip(&bytes)
        .map(|((name, shape), bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
            (name.as_str(), view)
        })
        .collect();
    safetensors::serialize_to_file(views, None, path).unwrap();
    bytes.iter().map(Vec::len).sum()
}

/// A llama of one layer, and its size in bytes.
fn model(dir: &Path) -> usize {
    let config = json!({"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "intermediate_size": HIDDEN, "num_attention_heads": 4, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true});
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let tokenizer = crate::common::fixture("tiny/llama/tokenizer.json");
    std::fs::copy(tokenizer, dir.join("tokenizer.json")).unwrap();
    let block = "model.layers.0";
    let square = vec![HIDDEN, HIDDEN];
    let shapes = [
        ("model.embed_tokens".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm".to_owned(), vec![HIDDEN]),
        (format!("{block}.input_layernorm"), vec![HIDDEN]),
        (format!("{block}.post_attention_layernorm"), vec![HIDDEN]),
        (format!("{block}.self_attn.q_proj"), square.clone()),
        (format!("{block}.self_attn.k_proj"), square.clone()),
        (format!("{block}.self_attn.v_proj"), square.clone()),
        (format!("{block}.self_attn.o_proj"), square.clone()),
        (format!("{block}.mlp.gate_proj"), square.clone()),
        (format!("{block}.mlp.up_proj"), square.clone()),
        (format!("{block}.mlp.down_proj"), square),
    ]
    .map(|(name, shape)| (format!("{name}.weight"), shape));
    write(&dir.join("model.safetensors"), &shapes)
}

/// An adapter of rank 4, and its size in bytes.
fn adapter(dir: &Path) -> usize {
    std::fs::create_dir(dir).unwrap();
    let config = json!({"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {
        "rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}});
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    let name = "model.layers.0.self_attn.q_proj";
    let shapes = [
        (format!("{name}.lora_a"), vec![HIDDEN, 4]),
        (format!("{name}.lora_b"), vec![4, HIDDEN]),
    ];
    write(&dir.join("adapters.safetensors"), &shapes)
}

#[test]
fn adapters_add_only_their_own_matrices() {
    crate::alone::alone(
        "adapters::adapters_add_only_their_own_matrices",
        adapters_add_only_their_own_matrices_alone,
    );
}

fn adapters_add_only_their_own_matrices_alone() {
    let dir = tempfile::tempdir().unwrap();
    let weights = model(dir.path());
    let own = adapter(&dir.path().join("adapter"));
    let options = LoadOptions::new().with_backend("cpu");
    let model = inference::load_model(dir.path(), &options).unwrap();
    let reply = |name: Option<&str>| {
        let options = greedy(4)
            .with_cache_prompt(false)
            .with_adapter(name.map(str::to_owned));
        let stream = model.generate(&Prompt::Tokens((5..30).collect()), &options);
        stream.unwrap().for_each(|token| drop(token.unwrap()));
        memory::clear_cache().unwrap();
        memory::active().unwrap()
    };
    let before = reply(None);
    assert!(before >= weights, "{before} bytes for {weights} of weights");
    let mut used = before;
    for name in ["a", "b", "c", "d"] {
        model
            .add_adapter(name, &dir.path().join("adapter"))
            .unwrap();
        let now = reply(Some(name));
        // A and B, and their copies for the kernels.
        assert!(
            now - used <= 3 * own,
            "{name}: {used} bytes grew to {now}; an adapter has {own}"
        );
        used = now;
    }
    assert!(3 * own < weights / 100, "{own} of {weights}");
    for name in ["a", "b", "c", "d"] {
        assert!(model.drop_adapter(name).unwrap());
    }
    assert!(reply(None) <= before + own, "dropped adapters stay");
}
