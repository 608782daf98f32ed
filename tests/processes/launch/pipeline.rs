//! Tests of `mlx launch --pipeline`, where each process computes a stage, a range of whole layers.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use super::members::{member, ring};
use super::{fixture, launched, logits, model, run, same_logits, same_with};
use crate::program::{refused, stdout};

const PIPELINE: [&str; 1] = ["--pipeline"];

#[test]
fn dense_models_go_through_pipelines() {
    for (name, counts) in [
        // Stages have different numbers of layers. With three processes, one stage is neither first
        // nor last.
        ("llama", &[2, 3][..]),
        ("qwen3", &[2]),
        ("gemma3", &[2, 4]),
        ("mixtral", &[2]),
        ("gpt-oss", &[2]),
        ("olmo3", &[4]),
        ("phi3", &[2]),
    ] {
        same_with(&PIPELINE, &model(name), counts, "on", 1e-4);
    }
}

#[test]
fn recurrent_models_go_through_pipelines() {
    // With the first two models, one stage has only recurrent layers, or only attention layers.
    for name in ["jamba", "lfm2", "xlstm"] {
        same_with(&PIPELINE, &model(name), &[2], "on", 1e-4);
    }
    for name in ["mamba2", "falcon-h1", "nemotron-h", "gpt2"] {
        same_logits(&PIPELINE, &model(name), &[]);
    }
}

/// All stages must refuse what the recurrent layers of one stage cannot do.
#[test]
fn guesses_are_refused_by_all_stages_of_recurrent_models() {
    let path = model("jamba");
    let asked = ["generate", "--model", &path, "--tokens", "5,17,42"];
    let lookup = ["--prompt-lookup", "2", "--num-draft-tokens", "3"];
    let start = ["launch", "-n", "2", "--pipeline", "--"];
    let err = refused(&run(&[&start[..], &asked, &lookup].concat()), 1);
    assert!(err.contains("recurrent state"), "{err}");
    assert!(!err.contains("lost"), "{err}");
}

#[test]
fn quantized_models_go_through_pipelines() {
    for kernels in ["off", "on"] {
        for name in [
            "llama-q4",
            "qwen3-q4",
            "gemma3-text-q4",
            "mixtral-q4",
            "gpt-oss-mxfp4",
        ] {
            same_with(&PIPELINE, &model(name), &[2], kernels, 1e-4);
        }
    }
}

#[test]
fn gguf_files_go_through_pipelines() {
    for name in ["gguf/gemma3-text.gguf", "gguf/mixtral.gguf"] {
        same_with(&PIPELINE, &fixture(name), &[2], "on", 1e-4);
    }
}

/// The test covers prefill steps that need no logits, and concurrent requests.
#[test]
fn prompts_in_steps_and_batches_go_through_pipelines() {
    let dir = tempfile::tempdir().unwrap();
    let path = model("gemma3");
    let tokens: Vec<String> = (1..60).map(|n| (n * 7 % 90).to_string()).collect();
    let tokens = tokens.join(",");
    let asked = [
        &["generate", "--model", &path, "--tokens", &tokens][..],
        &["--prefill-step-size", "7", "--max-tokens", "8"],
        &["--ignore-eos", "--json"],
    ]
    .concat();
    let text = |output| -> Value {
        let value: Value = serde_json::from_str(&stdout(&output)).unwrap();
        value["text"].clone()
    };
    let alone = text(run(&asked));
    let n = ["launch", "-n", "3", "--pipeline", "--"];
    assert_eq!(text(run(&[&n[..], &asked].concat())), alone);

    let file = dir.path().join("text.txt");
    std::fs::write(
        &file,
        "the quick brown fox jumps over the lazy dog ".repeat(20),
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let asked = ["perplexity", "--model", &path, "--file", file];
    let perplexity = |output| -> f64 {
        let value: Value = serde_json::from_str(&stdout(&output)).unwrap();
        value["perplexity"].as_f64().unwrap()
    };
    let (alone, staged) = (
        perplexity(run(&asked)),
        perplexity(run(&[&n[..], &asked].concat())),
    );
    assert!((alone / staged - 1.0).abs() < 1e-5, "{alone} {staged}");
}

#[test]
fn what_has_no_stages_is_told() {
    for (name, n, told) in [
        ("rwkv7", "2", "rwkv7"),
        ("gemma4-small", "2", "gemma4_text"),
        ("llama", "4", "num_hidden_layers is 3"),
    ] {
        let path = model(name);
        let asked = ["logits", "--model", &path, "--tokens", "1"];
        let start = ["launch", "-n", n, "--pipeline", "--"];
        let err = refused(&run(&[&start[..], &asked].concat()), 1);
        assert!(err.contains(told), "{err}");
    }
    let start = [
        "launch",
        "-n",
        "2",
        "--pipeline",
        "--",
        "train",
        "--data",
        "d",
    ];
    let err = refused(&run(&start), 2);
    assert!(err.contains("batches"), "{err}");
}

/// The byte range of each tensor in a safetensors file.
fn places(file: &[u8]) -> Vec<(String, Range<usize>)> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let at = |one: &Value| 8 + length + one.as_u64().unwrap() as usize;
    let tensors = header.as_object().unwrap().iter();
    tensors
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, info)| {
            let offsets = &info["data_offsets"];
            (name.clone(), at(&offsets[0])..at(&offsets[1]))
        })
        .collect()
}

/// Each rank gets a model whose tensors of other stages are NaN. So a rank that read them would
/// return NaN.
#[test]
fn each_stage_uses_its_own_tensors_alone() {
    let path = model("llama");
    let plan = run(&["inspect", &path, "--split", "2", "--pipeline", "--json"]);
    let plan: Value = serde_json::from_str(&stdout(&plan)).unwrap();
    let stages = plan["pipeline"]["stages"].as_array().unwrap();
    let table = stdout(&run(&["inspect", &path, "--split", "2", "--pipeline"]));
    assert!(table.contains("layers 1 to 2"), "{table}");
    let asked = ["logits", "--model", &path, "--tokens", "5,17,42"];
    let expected = logits(&run(&asked));
    let dir = tempfile::tempdir().unwrap();
    let file = ring(dir.path(), 2);
    let mut all = Vec::new();
    let mut total = 0;
    for (rank, stage) in stages.iter().enumerate() {
        let rank_dir = dir.path().join(rank.to_string());
        std::fs::create_dir(&rank_dir).unwrap();
        for entry in std::fs::read_dir(&path).unwrap().flatten() {
            std::fs::copy(entry.path(), rank_dir.join(entry.file_name())).unwrap();
        }
        let weights = rank_dir.join("model.safetensors");
        let mut bytes = std::fs::read(&weights).unwrap();
        let mine = stage["tensors"].as_array().unwrap();
        for (name, place) in places(&bytes) {
            if mine.iter().any(|one| *one == *name) {
                total += 1;
            } else {
                bytes[place].fill(0xff);
            }
        }
        std::fs::write(&weights, bytes).unwrap();
        let rank_dir = rank_dir.to_str().unwrap();
        let asked = ["logits", "--model", rank_dir, "--tokens", "5,17,42"];
        let mut command = member(rank, &file, &asked);
        all.push(command.env("MLX_SPLIT", "pipeline").spawn().unwrap());
    }
    // Each tensor is in exactly one stage, except the norm and the head.
    let count = places(&std::fs::read(Path::new(&path).join("model.safetensors")).unwrap()).len();
    assert_eq!(total, count + 2);
    let last = all.pop().unwrap();
    let staged = logits(&all.pop().unwrap().wait_with_output().unwrap());
    assert!(last.wait_with_output().unwrap().status.success());
    assert_eq!(staged.len(), expected.len());
    assert!(
        staged
            .iter()
            .zip(&expected)
            .all(|(a, b)| (a - b).abs() < 1e-4)
    );
}

/// Ranks with different models or splits would wait for each other forever. They must detect the
/// difference and report it.
#[test]
fn processes_with_different_models_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let file = ring(dir.path(), 2);
    let names = ["llama-q4", "qwen3"].map(model);
    let mut all: Vec<_> = (0..2)
        .map(|rank| {
            let asked = ["logits", "--model", &names[rank], "--tokens", "5"];
            let mut command = member(rank, &file, &asked);
            command.env("MLX_SPLIT", "pipeline").spawn().unwrap()
        })
        .collect();
    let (second, first) = (all.pop().unwrap(), all.pop().unwrap());
    // One rank may detect the difference and exit first, and the other may then fail because of
    // that. So the test requires only one report.
    let outputs = [first, second].map(|one| one.wait_with_output().unwrap());
    let told = outputs.map(|output| refused(&output, 1));
    let other = |err: &String| err.contains("rank 1 has loaded another model");
    assert!(told.iter().any(other), "{told:?}");
    let asked = ["launch", "-n", "2", "--env", "MLX_SPLIT=layers", "--"];
    let err = refused(
        &run(&[
            &asked[..],
            &["logits", "--model", &names[0], "--tokens", "5"],
        ]
        .concat()),
        2,
    );
    assert!(err.contains("tensor or pipeline"), "{err}");
    let output = launched(2, &["logits", "--model", &names[0], "--tokens", "5"]);
    assert!(!logits(&output).is_empty());
}
