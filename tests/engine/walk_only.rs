//! Tests models whose walking layers load no feed-forward weights: results, loaded memory, and the
//! report of `mlx inspect`.
#![cfg(feature = "probe")]

use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::common::{fixture, floats, max_difference, order_bound};
use crate::program::{mlx, refused, stdout};
use inference::{ErrorKind, Interrupt, LoadOptions, Precision, Prompt, Result, TextModel};
use inference_formats::footprint::{Footprint, WeightStorage, feed_forward_layer};
use inference_formats::safetensors::SafetensorsCheckpoint;
use inference_formats::{Gguf, ModelConfig, ModelFiles, gguf_config, locate};
use mlx_rs_core::memory;
use serde_json::Value;

/// Serializes the tests, because they measure the memory of the process.
static ALONE: Mutex<()> = Mutex::new(());

fn path(name: &str) -> PathBuf {
    fixture("tiny").join(name)
}

fn build(name: &str, dir: &Path) -> PathBuf {
    let to = dir.join(name);
    let args = ["vindex", "build", "--backend", "cpu", "--down-top-k", "0"];
    let mut command = mlx(dir, &args);
    command.arg("--model").arg(path(name)).arg("-o").arg(&to);
    stdout(&command.output().unwrap());
    to
}

fn options(plan: &str, vindex: &Path) -> LoadOptions {
    LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
        .with_feed_forward(plan.parse().unwrap())
        .with_vindex(vindex.to_owned())
        .with_walk_only(true)
}

fn walking(name: &str, plan: &str, vindex: &Path) -> Result<Box<dyn TextModel>> {
    inference::load_model(path(name), &options(plan, vindex))
}

fn dense(name: &str) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact);
    inference::load_model(path(name), &options).unwrap()
}

fn logits(model: &dyn TextModel) -> Vec<f32> {
    let prompt = Prompt::Tokens((3..23).collect());
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, false, &Interrupt::new())
        .unwrap()
        .logits
}

fn relative(ours: &[f32], expected: &[f32]) -> f32 {
    let greatest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    max_difference(ours, expected) / greatest
}

/// The bytes in memory of each layer's feed-forward part, unpacked, computed from the file headers.
fn parts(name: &str) -> Vec<u64> {
    let mut storage = WeightStorage::converted(4);
    storage.keeps_halves = true;
    let (footprint, layers) = match locate(&path(name)).unwrap() {
        ModelFiles::Directory(dir) => {
            let config = ModelConfig::from_file(&dir.join("config.json")).unwrap();
            let checkpoint = SafetensorsCheckpoint::open(&dir).unwrap();
            let all = Footprint::of_safetensors(&checkpoint, &config, &storage);
            (all, config.num_hidden_layers)
        }
        ModelFiles::Gguf(file) => {
            let gguf = Gguf::open(&file).unwrap();
            let config = gguf_config::config(&gguf).unwrap();
            let all = Footprint::of_gguf(&gguf, &config, &storage);
            (all, config.num_hidden_layers)
        }
    };
    let of = |layer| {
        let layer_tensors = footprint.tensors().iter();
        let layer_tensors = layer_tensors.filter(|t| feed_forward_layer(&t.name) == Some(layer));
        layer_tensors.map(|t| t.loaded_bytes).sum()
    };
    (0..layers).map(of).collect()
}

/// The test covers separate gate matrices, fused gate and up matrices, biases, models without
/// gates, other kinds of blocks, packed weights, and GGUF.
#[test]
fn nothing_of_the_part_is_loaded_and_the_logits_stay() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "llama",
        "gpt2",
        "starcoder2",
        "gemma2",
        "qwen2",
        "phi3",
        "glm4",
        "xlstm",
        "lfm2",
        "granite",
        "gemma4-small",
        "cohere2",
        "llama-gguf",
        "qwen3-q4",
    ] {
        let (dense_model, vindex) = (dense(name), build(name, dir.path()));
        let expected = logits(dense_model.as_ref());
        let all = walking(name, "walk", &vindex).unwrap();
        let packed = dense_model.info().quantization_bits.is_some();
        let bound = if packed { 2e-2 } else { order_bound(1e-5) };
        let difference = relative(&logits(all.as_ref()), &expected);
        assert!(difference < bound, "{name}: {difference}");
        let one = walking(name, "0=walk", &vindex).unwrap();
        assert!(relative(&logits(one.as_ref()), &expected) < bound, "{name}");
        let left = |model: &dyn TextModel| model.info().weight_bytes;
        let less = |model: &dyn TextModel| left(dense_model.as_ref()) - left(model);
        if packed {
            assert!(less(all.as_ref()) > less(one.as_ref()) && less(one.as_ref()) > 0);
            continue;
        }
        let parts = parts(name);
        assert!(parts[0] > 0, "{name}");
        assert_eq!(less(all.as_ref()), parts.iter().sum::<u64>(), "{name}");
        assert_eq!(less(one.as_ref()), parts[0], "{name}");
    }
}

/// MLX's allocator counts these bytes, so the engine's own accounting cannot hide an error.
#[test]
fn the_memory_of_the_part_is_free() {
    crate::alone::alone(
        "walk_only::the_memory_of_the_part_is_free",
        the_memory_of_the_part_is_free_alone,
    );
}

fn the_memory_of_the_part_is_free_alone() {
    let dir = tempfile::tempdir().unwrap();
    let vindex = build("llama", dir.path());
    let loaded = |load: &dyn Fn() -> Box<dyn TextModel>| {
        let before = memory::active().unwrap();
        let model = load();
        let after = memory::active().unwrap();
        drop(model);
        after.saturating_sub(before)
    };
    let dense_memory = loaded(&|| dense("llama"));
    let few = loaded(&|| walking("llama", "walk:7", &vindex).unwrap());
    let part = usize::try_from(parts("llama").iter().sum::<u64>()).unwrap();
    // MLX rounds each array up to whole pages.
    let saved = dense_memory.saturating_sub(few);
    assert!(saved >= part * 9 / 10, "{saved} of {part}");
}

#[test]
fn an_estimate_counts_what_is_loaded() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama", "gpt2", "phi3"] {
        let vindex = build(name, dir.path());
        let inspect = |kernels: &str, more: &[&str]| -> (u64, u64) {
            let mut command = mlx(dir.path(), &["inspect", "--json", "--backend", "cpu"]);
            command.arg(path(name)).args(more);
            if more.contains(&"--ffn") {
                command.arg("--vindex").arg(&vindex);
            }
            command.env("MLX_CPU_KERNELS", kernels);
            let all: Value = serde_json::from_str(&stdout(&command.output().unwrap())).unwrap();
            let number = |at: &str| all.pointer(at).and_then(Value::as_u64).unwrap();
            (
                number("/report/memory/weights"),
                number("/info/weight_bytes"),
            )
        };
        for kernels in ["on", "off"] {
            let (full_estimate, loaded) = inspect(kernels, &[]);
            assert_eq!(full_estimate, loaded, "{name}");
            let (walk, loaded) = inspect(kernels, &["--ffn", "walk:3"]);
            assert_eq!(walk, loaded, "{name}");
            let (only, loaded) = inspect(kernels, &["--ffn", "walk:3", "--walk-only"]);
            assert_eq!(only, loaded, "{name}");
            let (one, loaded) = inspect(kernels, &["--ffn", "1=walk", "--walk-only"]);
            assert_eq!(one, loaded, "{name}");
            if kernels == "on" {
                assert_eq!(
                    (walk, full_estimate - only),
                    (full_estimate, parts(name).iter().sum())
                );
                assert_eq!(full_estimate - one, parts(name)[1]);
            } else {
                // MLX's operations use a copy of the features, so the saving applies to the kernels
                // only.
                assert!(
                    walk > full_estimate && only == full_estimate && one == full_estimate,
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn mlx_finds_the_gates_that_the_kernels_find() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama", "gpt2"] {
        let vindex = build(name, dir.path());
        let run = |kernels: &str, tokens: &str| {
            let mut command = mlx(dir.path(), &["logits", "--backend", "cpu", "--walk-only"]);
            command.args(["--precision", "exact"]);
            command.args(["--tokens", tokens, "--ffn", "walk:9", "--vindex"]);
            command.arg(&vindex).arg("--model").arg(path(name));
            command.env("MLX_CPU_KERNELS", kernels);
            let all: Value = serde_json::from_str(&stdout(&command.output().unwrap())).unwrap();
            floats(&all["logits"])
        };
        for tokens in ["5", "5,6,7,8,9"] {
            let difference = relative(&run("on", tokens), &run("off", tokens));
            assert!(difference < 1e-5, "{name} {tokens}: {difference}");
        }
    }
}

#[test]
fn gates_that_are_damaged_and_parts_that_are_not_there_are_errors() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().unwrap();
    let vindex = build("llama", dir.path());
    let model = walking("llama", "1=walk:3", &vindex).unwrap();
    let inspector = model.as_attention_inspector().unwrap();
    inspector.feed_forward_weights(0).unwrap();
    let error = inspector.feed_forward_weights(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("not loaded"), "{error}");

    let file = vindex.join("gate_vectors.bin");
    let original = std::fs::read(&file).unwrap();
    let n = original.len();
    for at in [0, 1, n / 2, n - 1] {
        let mut bytes = original.clone();
        bytes[at] ^= 0x80;
        std::fs::write(&file, bytes).unwrap();
        let error = walking("llama", "walk:3", &vindex).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{at}: {error}");
        assert!(error.to_string().contains("another hash"), "{error}");
    }
    let own_gate = options("walk:3", &vindex).with_walk_only(false);
    inference::load_model(path("llama"), &own_gate).unwrap();

    // Without a matching vindex, the report would describe another model. So the command is
    // refused.
    let mut command = mlx(dir.path(), &["inspect", "--no-load", "--ffn", "walk"]);
    command.arg(path("gpt2")).arg("--vindex").arg(&vindex);
    let wrong = refused(&command.output().unwrap(), 1);
    assert!(wrong.contains("of the model llama"), "{wrong}");

    let none = LoadOptions::new().with_walk_only(true);
    let error = inference::load_model(path("llama"), &none).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    let args = ["generate", "--tokens", "5", "--walk-only", "--ffn", "walk"];
    let mut command = mlx(dir.path(), &args);
    command.arg("--model").arg(path("llama"));
    let wrong = refused(&command.output().unwrap(), 2);
    assert!(wrong.contains("walk_only"), "{wrong}");
    // A model with experts is refused, even when its weights are not loaded.
    let error = walking("mixtral", "walk", &vindex).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}
