//! Tests that a vindex of level `all` loads as a complete model, with walking layers.
#![cfg(feature = "probe")]

use std::path::{Path, PathBuf};

use crate::common::{fixture, max_difference, order_bound, tiny, tiny_names};
use crate::program::{mlx, text};
use inference::{ErrorKind, Interrupt, LoadOptions, Prompt, TextModel};

/// Writes all weights of a tiny model to `dir`, or returns the error.
fn build(name: &str, dir: &Path, more: &[&str]) -> Result<PathBuf, String> {
    let path = dir.join(name);
    let args = ["vindex", "build", "--backend", "cpu", "--down-top-k", "0"];
    let mut command = mlx(dir, &args);
    command.arg("--model").arg(fixture("tiny").join(name));
    let done = command.arg("-o").arg(&path).args(more).output().unwrap();
    match done.status.code() {
        Some(0) => Ok(path),
        _ => Err(text(&done.stderr)),
    }
}

fn load(path: &Path) -> inference::Result<Box<dyn TextModel>> {
    inference::load_model(path, &LoadOptions::new().with_backend("cpu"))
}

fn logits(model: &dyn TextModel) -> Vec<f32> {
    let prompt = Prompt::Tokens((3..23).collect());
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, false, &Interrupt::new())
        .unwrap()
        .logits
}

#[test]
fn it_gives_the_logits_of_the_model_for_all_families_that_walk() {
    if crate::alone::ran_elsewhere(
        "vindex_alone::it_gives_the_logits_of_the_model_for_all_families_that_walk",
    ) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut compared = Vec::new();
    let mut refused = Vec::new();
    let mut wrong = Vec::new();
    for name in tiny_names() {
        let Ok(vindex) = build(&name, dir.path(), &["--level", "all"]) else {
            continue;
        };
        let dense = tiny(&name);
        match load(&vindex) {
            Ok(model) => {
                let expected = logits(dense.as_ref());
                let greatest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
                let difference = max_difference(&logits(model.as_ref()), &expected) / greatest;
                // The kernels round inputs of quantized multiplications. Multiplications with a
                // vindex are in float32.
                let bound = match dense.info().quantization_bits {
                    Some(_) => 2e-2,
                    None => order_bound(1e-5),
                };
                if difference < bound {
                    compared.push(name.clone());
                } else {
                    wrong.push(format!("{name}: {difference}"));
                }
            }
            Err(e) => {
                assert!(format!("{e:#}").contains("has experts"), "{name}: {e:#}");
                refused.push(name.clone());
            }
        }
        std::fs::remove_dir_all(&vindex).unwrap();
    }
    assert!(wrong.is_empty(), "other logits:\n{}", wrong.join("\n"));
    assert!(
        compared.len() >= 40,
        "only {compared:?}; refused {refused:?}"
    );
}

#[test]
fn what_is_missing_or_damaged_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let few = build("llama", dir.path(), &[]).unwrap();
    let wrong = load(&few).err().unwrap();
    assert!(format!("{wrong:#}").contains("--level all"), "{wrong:#}");
    std::fs::remove_dir_all(&few).unwrap();
    let all = build("llama", dir.path(), &["--level", "all", "--f16"]).unwrap();
    assert!(load(&all).is_ok());
    for name in ["attn_weights.bin", "down_features.bin", "config.json"] {
        let path = all.join(name);
        let original = std::fs::read(&path).unwrap();
        let mut bytes = original.clone();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let wrong = load(&all).err().unwrap();
        assert_eq!(wrong.kind(), ErrorKind::InvalidModel, "{name}: {wrong:#}");
        assert!(
            format!("{wrong:#}").contains("damaged"),
            "{name}: {wrong:#}"
        );
        std::fs::write(&path, &original).unwrap();
    }
    assert!(load(&all).is_ok());
}
