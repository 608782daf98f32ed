//! Helpers that the integration tests share.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};

use inference::{GenerateOptions, LoadOptions, Precision, TextModel};
use metal_backend as _; // without this use, the linker drops the registration
use serde_json::Value;

/// The path of `name` in `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// The names of all tiny checkpoints.
pub fn tiny_names() -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(fixture("tiny"))
        .expect("the tiny checkpoints are part of the repository")
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Loads a model on the backend that every machine has. Prefill is exact, because the golden
/// numbers are float32.
pub fn load(path: &Path) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact);
    inference::load_model(path, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn tiny(name: &str) -> Box<dyn TextModel> {
    load(&fixture("tiny").join(name))
}

/// The golden numbers of a checkpoint directory.
pub fn golden(dir: &Path) -> Value {
    let path = dir.join("golden.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| u32::try_from(v.as_u64().unwrap()).unwrap())
        .collect()
}

pub fn floats(value: &Value) -> Vec<f32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap() as f32)
        .collect()
}

/// The greatest absolute difference between two slices.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// Whether the CPU multiplies bfloat16, 4-bit and 8-bit matrices with AMX tiles.
pub fn has_amx() -> bool {
    rust_mlx::mlx::cpu::instruction_set() == "amx"
}

/// A bound for the effect of summation order, relative to the largest value. AMX represents an
/// input as the sum of two bfloat16, with an error up to 2^-17. A few layers enlarge this error to
/// about 1e-5.
pub fn order_bound(bound: f32) -> f32 {
    match has_amx() {
        true => 10.0 * bound,
        false => bound,
    }
}

/// A bound for the difference from a reference. AMX rounds inputs, so the difference may be twice
/// as large.
pub fn reference_bound(bound: f32) -> f32 {
    match has_amx() {
        true => 2.0 * bound,
        false => bound,
    }
}

/// Greedy options that ignore the end-of-text token.
pub fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions::new()
        .with_max_tokens(max_tokens)
        .with_ignore_eos(true)
}
