//! Tests checkpoints as transformers 5 writes them: unchanged tensors, but another form of
//! `config.json`.

use std::fs;
use std::path::Path;

use crate::common::{fixture, load};
use inference::{Interrupt, Prompt};
use safetensors::SafeTensors;
use serde_json::Value;

/// For each checkpoint, the new configuration and the names of tensors that the new form omits.
/// `tools/golden/transformers5.py` made them.
fn checkpoints() -> serde_json::Map<String, Value> {
    let text = fs::read(fixture("transformers5.json")).unwrap();
    let all: Value = serde_json::from_slice(&text).unwrap();
    all["checkpoints"].as_object().unwrap().clone()
}

/// The file without the `dropped` tensors.
fn without(file: &Path, dropped: &[Value]) -> Vec<u8> {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let is_kept = |name: &str| !dropped.iter().any(|other| other == name);
    let is_kept = tensors.iter().filter(|(name, _)| is_kept(name));
    safetensors::serialize(is_kept, None).unwrap()
}

/// The logits after a prompt that is longer than the sliding windows.
fn logits(dir: &Path) -> Vec<f32> {
    let model = load(dir);
    let ids = (0..40).map(|i| (i * i * 7 + i * 13 + 5) % 300).collect();
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&Prompt::Tokens(ids), true, &Interrupt::new())
        .unwrap()
        .logits
}

#[test]
fn checkpoints_as_transformers_5_saves_them_compute_the_same() {
    let checkpoints = checkpoints();
    assert!(checkpoints.len() > 40, "{}", checkpoints.len());
    for (name, saved) in checkpoints {
        let source = fixture("tiny").join(&name);
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(&source).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        let dropped = saved["dropped"].as_array().unwrap();
        let file = source.join("model.safetensors");
        fs::write(
            dir.path().join("model.safetensors"),
            without(&file, dropped),
        )
        .unwrap();
        let text = serde_json::to_vec_pretty(&saved["config"]).unwrap();
        fs::write(dir.path().join("config.json"), text).unwrap();
        assert_eq!(logits(dir.path()), logits(&source), "{name}");
    }
}
