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
    let words = [
        "the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs",
    ];
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
    let common = [
        "--json",
        "--data",
        data,
        "--sequence-length",
        "32",
        "--num-samples",
        "16",
    ];
    let run = mlx(model, output, &[arguments, &common[..]].concat());
    assert!(run.status.success(), "{arguments:?}: {}", said(&run));
    serde_json::from_slice(&run.stdout).unwrap()
}

/// The mean difference of log-probabilities between two models, for a text like the calibration.
fn distance(a: &Path, b: &Path) -> f64 {
    let text = "two dogs sat and saw the cat on a mat and the dogs saw a cat on the mat";
    let scores = |path: &Path| -> Vec<f32> {
        let model = load(path);
        let model = model.as_token_model().unwrap();
        let prompt = Prompt::Text(text.to_owned());
        model.token_logprobs(&prompt, &Interrupt::new()).unwrap()
    };
    let (a, b) = (scores(a), scores(b));
    let sum: f64 = (a.iter().zip(&b))
        .map(|(a, b)| f64::from((a - b).abs()))
        .sum();
    sum / a.len() as f64
}

const METHODS: [&[&str]; 4] = [
    &["--method", "gptq"],
    &["--method", "awq"],
    &["--method", "dynamic", "--high-bits", "6"],
    &["--method", "dwq", "--learning-rate", "1e-3"],
];

/// Bits and group size; the rows of tiny models have 32 or 64 elements.
const FORMAT: [&str; 2] = ["--group-size", "32"];

#[test]
fn each_method_makes_a_model_that_is_nearer_than_by_plain_rounding() {
    let dirs = tempfile::tempdir().unwrap();
    let data = text(dirs.path());
    let model = fixture("tiny/llama");
    let plain = dirs.path().join("plain");
    let run = Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args([
            "convert",
            "-q",
            "--bits",
            "2",
            "--group-size",
            "32",
            "--model",
        ])
        .arg(&model)
        .arg("--output")
        .arg(&plain)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", said(&run));
    let rounded = distance(&model, &plain);
    for method in METHODS {
        let output = dirs.path().join(method[1]);
        let bits = match method[1] {
            "dynamic" => ["--low-bits", "2"],
            _ => ["--bits", "2"],
        };
        let group = match method[1] {
            "dynamic" => ["--low-group-size", "32", "--high-group-size", "32"].as_slice(),
            _ => &FORMAT,
        };
        let report = learn(&model, &output, &data, &[method, &bits, group].concat());
        let learned = distance(&model, &output);
        assert!(
            learned < rounded,
            "{method:?}: {learned} beside {rounded}; {report}"
        );
        let config: Value =
            serde_json::from_slice(&fs::read(output.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["quantization"]["bits"], 2, "{method:?}");
        assert_eq!(report["quantized_matrices"], 23, "{method:?}");
        let mixed = config["quantization"].as_object().unwrap().values();
        let mixed = mixed.filter(|v| v["bits"] == 6).count();
        assert_eq!(mixed > 0, method[1] == "dynamic", "{config}");
        if method[1] != "dynamic" {
            let size = |dir: &Path| fs::metadata(dir.join("model.safetensors")).unwrap().len();
            assert_eq!(size(&output), size(&plain), "{method:?}");
        }
    }
}

/// Families with other norms, biases, fused matrices and experts.
#[test]
fn other_families_are_learned_or_refused() {
    let dirs = tempfile::tempdir().unwrap();
    let data = text(dirs.path());
    let bits = ["--bits", "3", "--group-size", "32"];
    for (name, method, works) in [
        ("qwen2", "awq", true),
        ("qwen3", "awq", true),
        ("gemma2", "awq", true),
        ("gemma3", "gptq", true),
        ("phi3", "awq", true),
        ("mixtral", "gptq", true),
        ("gemma4-small", "gptq", true),
        ("mamba2", "gptq", true),
        // Tensors of the text part have a prefix, or the family has other names for layers.
        ("qwen3-vl", "awq", true),
        ("qwen3-5-moe", "gptq", true),
        ("dbrx", "gptq", true),
        ("llama4", "gptq", true),
        // The norm is also the input of the feed-forward part.
        ("cohere", "awq", false),
        ("mamba", "awq", false),
    ] {
        let (model, output) = (fixture("tiny").join(name), dirs.path().join(name));
        let data = data.to_str().unwrap();
        let arguments = [
            "--method",
            method,
            "--data",
            data,
            "--sequence-length",
            "16",
        ];
        let arguments = [&arguments[..], &["--num-samples", "4"], &bits].concat();
        let run = mlx(&model, &output, &arguments);
        if works {
            assert!(run.status.success(), "{name}: {}", said(&run));
            assert!(distance(&model, &output).is_finite(), "{name}");
        } else {
            assert_eq!(run.status.code(), Some(1), "{name}");
            assert!(
                said(&run).contains("awq: block 0"),
                "{name}: {}",
                said(&run)
            );
            assert!(!output.exists(), "{name}");
        }
    }
}

#[test]
fn sensitivities_are_written_and_read() {
    let dirs = tempfile::tempdir().unwrap();
    let data = text(dirs.path());
    let model = fixture("tiny/llama");
    let file = dirs.path().join("sensitivities.json");
    let flags = [
        "--method",
        "dynamic",
        "--low-bits",
        "3",
        "--low-group-size",
        "32",
        "--high-group-size",
        "32",
        "--sensitivities",
        file.to_str().unwrap(),
    ];
    learn(&model, &dirs.path().join("measured"), &data, &flags);
    let pairs: Vec<(String, f64)> = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(pairs.len(), 23);
    assert!(pairs.iter().any(|(_, sensitivity)| *sensitivity > 0.0));
    // The file with the sensitivities already exists, so the command reads it instead of the data.
    let read = dirs.path().join("read");
    let run = mlx(&model, &read, &flags);
    assert!(run.status.success(), "{}", said(&run));
    let config = |name: &str| fs::read(dirs.path().join(name).join("config.json")).unwrap();
    assert_eq!(config("measured"), config("read"));
    fs::write(&file, "[[\"model.embed_tokens\", 1]]").unwrap();
    let run = mlx(&model, &dirs.path().join("other"), &flags);
    assert!(said(&run).contains("another model"), "{}", said(&run));
    let low = [
        &flags[..8],
        &["--target-bpw", "2", "--data", data.to_str().unwrap()],
    ]
    .concat();
    let run = mlx(&model, &dirs.path().join("low"), &low);
    assert!(said(&run).contains("target_bpw is 2"), "{}", said(&run));
}

#[test]
fn what_cannot_be_learned_is_refused_without_files() {
    let dirs = tempfile::tempdir().unwrap();
    let data = text(dirs.path());
    let data = data.to_str().unwrap();
    let empty = dirs.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    let empty = empty.to_str().unwrap();
    let output = dirs.path().join("output");
    for (model, flags, code, says) in [
        ("llama", &["--method", "gptq"][..], 2, "--data"),
        ("llama", &["--data", data], 2, "--method"),
        (
            "llama",
            &["--method", "gptq", "--data", data, "--n-grid", "3"],
            2,
            "--method awq",
        ),
        (
            "llama",
            &["--method", "dwq", "--data", data, "--learning-rate", "0"],
            1,
            "learning_rate",
        ),
        (
            "llama",
            &["--method", "gptq", "--data", data, "--num-samples", "0"],
            2,
            "--num-samples",
        ),
        (
            "llama",
            &["--method", "gptq", "--data", empty],
            1,
            "longer text",
        ),
        (
            "llama",
            &["--method", "gptq", "--data", data, "--mode", "mxfp4"],
            1,
            "affine",
        ),
        (
            "llama-q4",
            &["--method", "gptq", "--data", data],
            1,
            "--dequantize",
        ),
        (
            "llama",
            &["--method", "gptq", "--data", data, "--dequantize"],
            2,
            "--dequantize",
        ),
    ] {
        let flags = [flags, &["--group-size", "32"]].concat();
        let flags = match flags.contains(&"--dequantize") {
            true => flags[..5].to_vec(),
            false => flags,
        };
        let run = mlx(&fixture("tiny").join(model), &output, &flags);
        assert_eq!(run.status.code(), Some(code), "{flags:?}: {}", said(&run));
        assert!(said(&run).contains(says), "{flags:?}: {}", said(&run));
        assert!(!output.exists(), "{flags:?}");
    }
}

/// Each expert is learned from the tokens that the router sends to it.
#[test]
fn experts_are_learned_from_their_own_tokens() {
    let dirs = tempfile::tempdir().unwrap();
    let data = text(dirs.path());
    let bits = ["--bits", "2", "--group-size", "32"];
    for name in ["mixtral", "qwen3-moe"] {
        let model = fixture("tiny").join(name);
        let [plain, output] =
            ["plain", "learned"].map(|kind| dirs.path().join(format!("{name}-{kind}")));
        let run = Command::new(env!("CARGO_BIN_EXE_mlx"))
            .args(["convert", "-q", "--model"])
            .args([&model, Path::new("--output"), &plain])
            .args(bits)
            .output()
            .unwrap();
        assert!(run.status.success(), "{name}: {}", said(&run));
        let flags = [&["--method", "gptq"][..], &bits].concat();
        let report = learn(&model, &output, &data, &flags);
        let notes = report["notes"].to_string();
        assert!(
            !notes.contains("without calibration: model.layers"),
            "{name}: {notes}"
        );
        assert!(
            !notes.contains("switch_mlp.gate_proj (2), "),
            "{name}: {notes}"
        );
        let (learned, rounded) = (distance(&model, &output), distance(&model, &plain));
        // At two bits, the logits of `qwen3-moe`, whose weights are random, are not closer. The
        // engine's unit tests show that the outputs of its experts are closer.
        let is_nearer = learned < rounded || name == "qwen3-moe";
        assert!(is_nearer, "{name}: {learned} beside {rounded}");
    }
    // With two sequences, some experts receive too few tokens.
    let few = dirs.path().join("few");
    let run = mlx(
        &fixture("tiny/mixtral"),
        &few,
        &[
            &[
                "--method",
                "gptq",
                "--json",
                "--data",
                data.to_str().unwrap(),
            ][..],
            &["--sequence-length", "6", "--num-samples", "1"],
            &bits,
        ]
        .concat(),
    );
    assert!(run.status.success(), "{}", said(&run));
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    let notes = report["notes"].to_string();
    assert!(notes.contains("experts with too few tokens"), "{notes}");
    assert!(notes.contains("switch_mlp.up_proj ("), "{notes}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_quantization_leaves_no_files() {
    use std::io::{BufRead, BufReader, Read};

    let dirs = tempfile::tempdir().unwrap();
    let data = dirs.path().join("long.txt");
    fs::write(
        &data,
        "the cat sat on a mat and saw two dogs ".repeat(40_000),
    )
    .unwrap();
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let place = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_mlx"))
            .args(["convert", "--backend", "cpu", "--method", "gptq", "--model"])
            .arg(fixture("tiny/llama"))
            .arg("--output")
            .arg(place.path().join("output"))
            .arg("--data")
            .arg(&data)
            .args(["--group-size", "32", "--num-samples", "-1"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("quantizing blocks") {
            line.clear();
            assert!(told.read_line(&mut line).unwrap() > 0, "it ended before");
        }
        let sent = Command::new("kill")
            .args([signal, &child.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
        let mut rest = String::new();
        told.read_to_string(&mut rest).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{rest}");
        assert!(!rest.contains("writing"), "{rest}");
        // Not even hidden files remain.
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "{rest}");
    }
}
