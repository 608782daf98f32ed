//! Tests `mlx convert --method`: learned quantization of tiny models through the command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{fixture, load};
use inference::{Interrupt, Prompt};
use metal_backend as _;
use serde_json::Value;

/// A text for calibration, in a directory of its own.
fn text(dir: &Path) -> PathBuf {
    let path = dir.join("calibration.txt");
    let words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"];
    let text: Vec<&str> = (0..3000).map(|i: usize| words[i * i * 7 % 10]).collect();
    fs::write(&path, text.join(" ")).unwrap();
    path
}

fn mlx(model: &Path, output: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(["convert", "--backend", "cpu", "--model"])
        .arg(model)
        .arg("--output")
        .arg(output)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Quantizes with a method and returns the report.
fn learn(model: &Path, output: &Path, data: &Path, arguments: &[&str]) -> Value {
    let data = data.to_str().unwrap();
    let common = ["--json", "--data", data, "--sequence-length", "32", "--num-samples", "16"];
    let run = mlx(model, output, &[arguments, &common[..]].concat());
    assert!(run.status.success(), "{arguments:?}: {}", said(&run));
    serde_json::from_slice(&run.stdout).unwrap()
}

/// The mean difference of log-probabilities of a text between two models.
fn distance(a: &Path, b: &Path) -> f64 {
    let ids: Vec<u32> = (0..24).map(|i: u32| (i * 37 + 11) % 100).collect();
    let scores = |path: &Path| -> Vec<f32> {
        let model = load(path);
        let model = model.as_token_model().unwrap();
        let prompt = Prompt::Tokens(ids.clone());
        model.token_logprobs(&prompt, &Interrupt::new()).unwrap()
    };
    let (a, b) = (scores(a), scores(b));
    let sum: f64 = (a.iter().zip(&b)).map(|(a, b)| f64::from((a - b).abs())).sum();
    sum / a.len() as f64
}
