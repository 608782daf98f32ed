//! Tests of `mlx launch`, where several local processes compute one model. One process computes the
//! expected results.
#![cfg(all(unix, feature = "mlx-backend"))]

mod members;
mod mpi;
mod pipeline;
#[cfg(feature = "serve")]
mod serving;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use crate::common::order_bound;
use crate::program::{mlx, refused, stdout};
use serde_json::Value;

fn model(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("tests/fixtures/tiny").join(name);
    path.to_str().unwrap().to_owned()
}

fn fixture(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("tests/fixtures").join(name);
    path.to_str().unwrap().to_owned()
}

fn run(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    mlx(home.path(), args).output().unwrap()
}

/// Runs the same command in `n` processes.
fn launched(n: usize, args: &[&str]) -> Output {
    let n = n.to_string();
    run(&[&["launch", "-n", &n, "--"], args].concat())
}

fn logits(output: &Output) -> Vec<f64> {
    let value: Value = serde_json::from_str(&stdout(output)).unwrap();
    let logits = value["logits"].as_array().unwrap();
    logits.iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Expects the logits of `n` processes to equal those of one process up to `bound`, and equal
/// greedy tokens.
fn same(name: &str, counts: &[usize], kernels: &str, bound: f64) {
    same_with(&[], &model(name), counts, kernels, bound);
}

/// Like [`same`], with launcher flags and a model path.
fn same_with(flags: &[&str], path: &str, counts: &[usize], kernels: &str, bound: f64) {
    let name = path.rsplit('/').next().unwrap();
    let command = |args: &[&str]| {
        let home = tempfile::tempdir().unwrap();
        let mut command = mlx(home.path(), args);
        command.env("MLX_CPU_KERNELS", kernels).output().unwrap()
    };
    let parts_of = |n: usize, args: &[&str]| {
        let n = n.to_string();
        command(&[&["launch", "-n", &n], flags, &["--"], args].concat())
    };
    let tokens = "5,17,42,7,100,3";
    let asked = ["logits", "--model", path, "--tokens", tokens, "--all"];
    let greedy = |max_tokens| {
        [
            &["generate", "--model", path, "--tokens", "5,17,42"][..],
            &["--max-tokens", max_tokens, "--ignore-eos", "--json"],
        ]
        .concat()
    };
    let reply = |output: &Output| {
        let value: Value = serde_json::from_str(&stdout(output)).unwrap();
        (value["text"].clone(), value["tokens"].clone())
    };
    let expected = logits(&command(&asked));
    for &n in counts {
        let parts = logits(&parts_of(n, &asked));
        assert_eq!(parts.len(), expected.len(), "{name}, {n}");
        let off = parts.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let most = off.fold(0.0, f64::max);
        assert!(most < bound, "{name} in {n} processes is off by {most}");
        // Processes wait for each other by polling. On two cores, four processes use fourteen times
        // the processor time of two. The number of processes changes heads and matrices, which
        // prefill and three steps of decode cover. Two processes compute the longer reply.
        let tokens = if n > 2 && counts.contains(&2) {
            "4"
        } else {
            "12"
        };
        let greedy = greedy(tokens);
        let alone = reply(&command(&greedy));
        assert_eq!(reply(&parts_of(n, &greedy)), alone, "{name}, {n}");
    }
}

/// Caches that do not round. Keys in float16 may differ in their last bit where processes add in
/// another order.
const EXACT_CACHES: &[&str] = &["--kv-bits", "32"];

/// As [`same_with`], for two processes, without text. `options` are further options of the model.
fn same_logits(flags: &[&str], path: &str, options: &[&str]) {
    let asked = ["logits", "--model", path, "--tokens", "5,17,42,7", "--all"];
    let asked = [&asked, options].concat();
    let expected = logits(&run(&asked));
    let parts = run(&[&["launch", "-n", "2"], flags, &["--"], &asked].concat());
    let parts = logits(&parts);
    assert_eq!(parts.len(), expected.len(), "{path}");
    let off = parts.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let most = off.fold(0.0, f64::max);
    assert!(most < 1e-4, "{path} is off by {most}");
}

#[test]
fn dense_models_are_computed_by_several() {
    for name in ["llama", "qwen3", "gemma3", "mixtral", "gpt-oss", "olmo3"] {
        same(name, &[2, 4], "on", f64::from(order_bound(1e-4)));
    }
}

#[test]
fn quantized_models_are_computed_by_several() {
    // The models have groups of 64 that the split divides, groups of 32, 8 bits, and experts. Our
    // kernels round inputs per group, so a divided group changes roundings.
    for (kernels, bound) in [("off", 1e-4), ("on", 1e-3)] {
        same("qwen3-q4", &[2, 4], kernels, bound);
        for name in [
            "llama-q4",
            "llama-q8",
            "gemma3-text-q4",
            "mixtral-q4",
            "gpt-oss-mxfp4",
        ] {
            same(name, &[2], kernels, bound);
        }
    }
}

/// Expects the logits of two processes to equal those of one. Each model has another kind of
/// layers; `tools/group_families.py` compares all families.
#[test]
fn other_families_are_computed_by_several() {
    for name in [
        "phi3",
        "qwen2-moe",
        "starcoder2",
        "granite",
        // Queries, keys and values in one matrix, grouped by key heads.
        "gpt-neox",
        "internlm2",
        // Matrices stored as `[in, out]`.
        "gpt2",
        "llama4",
        // Norms across heads.
        "olmo2",
        "minimax",
        // Latent attention.
        "deepseek-v2-lite",
        "glm4-moe-lite",
        // Recurrent layers, which each process computes.
        "granitemoehybrid",
        "lfm2-moe",
        "qwen3-next",
        "nemotron-h-moe",
        // Shared keys, and inputs for each layer.
        "gemma4-small",
        "cohere2-moe",
    ] {
        same_logits(&[], &model(name), EXACT_CACHES);
    }
}

#[test]
fn gguf_files_are_computed_by_several() {
    for name in [
        "llama-yarn",
        "gpt-oss-mxfp4",
        "gpt-neox",
        "granitemoehybrid",
        "olmo2",
    ] {
        same_logits(&[], &fixture(&format!("gguf/{name}.gguf")), EXACT_CACHES);
    }
}

#[test]
fn adapters_are_divided_with_their_models() {
    let (path, adapter) = (model("llama"), fixture("training/llama-1"));
    let asked = ["logits", "--model", &path, "--tokens", "5,17,42,7", "--all"];
    let adapted = [&asked[..], &["--adapter-path", &adapter]].concat();
    let expected = logits(&run(&adapted));
    let off = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        let off = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        off.fold(0.0, f64::max)
    };
    assert!(off(&logits(&run(&asked)), &expected) > 1e-2);
    for flags in [&["-n", "2"][..], &["-n", "4"], &["-n", "2", "--pipeline"]] {
        let parts = logits(&run(&[&["launch"], flags, &["--"], &adapted].concat()));
        let most = off(&parts, &expected);
        assert!(most < 1e-4, "{flags:?} is off by {most}");
    }
}

#[test]
fn what_does_not_divide_is_told_once_by_each() {
    let path = model("llama");
    let output = launched(3, &["logits", "--model", &path, "--tokens", "1"]);
    let err = refused(&output, 1);
    assert!(err.contains("num_attention_heads is 4"), "{err}");
    // Each process gets 16 inputs, which is less than a group.
    let path = model("llama-q8");
    let err = refused(
        &launched(4, &["logits", "--model", &path, "--tokens", "1"]),
        1,
    );
    assert!(err.contains("groups of 32"), "{err}");
}

#[test]
fn a_wrong_command_line_starts_nothing() {
    for (args, told) in [
        (&["launch", "-n", "2", "--", "ls"][..], "none of them"),
        (
            &["launch", "-n", "2", "--", "generate"],
            "there is no prompt",
        ),
        (
            &["launch", "-n", "0", "--", "logits", "--tokens", "1"],
            "1 or more",
        ),
        (&["launch"], "required"),
        (
            &["launch", "--hosts", "-oX", "logits", "--tokens", "1"],
            "-oX",
        ),
    ] {
        let err = refused(&run(args), 2);
        assert!(err.contains(told), "{args:?}: {err}");
    }
}

#[test]
fn the_plan_tells_what_each_process_holds() {
    let path = model("llama");
    let output = run(&[
        "inspect",
        &path,
        "--split",
        "2",
        "--json",
        "--backend",
        "cpu",
    ]);
    let value: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let plan = &value["split"];
    assert_eq!((&plan["heads"], &plan["kv_heads"]), (&2.into(), &2.into()));
    let tensors = plan["tensors"].as_array().unwrap();
    let bytes = |t: &Value, which: &str| t[which].as_u64().unwrap();
    let sum: u64 = tensors.iter().map(|t| bytes(t, "bytes_per_process")).sum();
    assert_eq!(sum, bytes(plan, "bytes_per_process"));
    for tensor in tensors {
        let (part, full) = (
            bytes(tensor, "bytes_per_process"),
            bytes(tensor, "bytes_whole"),
        );
        let share = if tensor["share"] == "whole" { 1 } else { 2 };
        assert_eq!(part * share, full, "{tensor}");
    }
    let table = stdout(&run(&["inspect", &path, "--split", "2"]));
    let line = table
        .lines()
        .find(|line| line.contains("layers.0.self_attn.q_proj"));
    let words: Vec<&str> = line.unwrap().split_whitespace().collect();
    assert_eq!(words[1..], ["outputs", "2.0", "KiB", "of", "4.0", "KiB"]);
    let err = refused(&run(&["inspect", &path, "--split", "3"]), 1);
    assert!(err.contains("num_attention_heads is 4"), "{err}");
}

/// A script named `ssh` replaces the real one. It runs the remote command on this machine.
#[test]
fn other_machines_are_reached_by_ssh() {
    let dir = tempfile::tempdir().unwrap();
    let ssh = dir.path().join("ssh");
    std::fs::write(
        &ssh,
        "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\necho \"$2\" >> \"$0.hosts\"\nexec sh -c \"$3\"\n",
    )
    .unwrap();
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let hosts = dir.path().join("hosts.json");
    let list = r#"{"backend": "ring", "envs": ["MLX_NUM_THREADS=1"], "hosts": [
        {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "other", "ips": ["127.0.0.1"]}]}"#;
    std::fs::write(&hosts, list).unwrap();
    let path = model("llama");
    let asked = ["logits", "--model", &path, "--tokens", "5,17"];
    let port = inference_group::free_ports(8).unwrap()[0].to_string();
    let args = [
        &["launch", "--hostfile", hosts.to_str().unwrap(), "-p", &port],
        &["--program", env!("CARGO_BIN_EXE_mlx"), "--"][..],
        &asked,
    ]
    .concat();
    let search = format!(
        "{}:{}",
        dir.path().display(),
        std::env::var("PATH").unwrap()
    );
    let home = tempfile::tempdir().unwrap();
    let output = mlx(home.path(), &args)
        .env("PATH", search)
        .output()
        .unwrap();
    let (parts, expected) = (logits(&output), logits(&run(&asked)));
    assert!(
        parts
            .iter()
            .zip(&expected)
            .all(|(a, b)| (a - b).abs() < 1e-4)
    );
    let reached = std::fs::read_to_string(dir.path().join("ssh.hosts")).unwrap();
    assert_eq!(reached, "other\n");
}

/// Training with several processes must have the losses of one process with whole batches. Rank 0
/// must write equal files.
#[test]
fn training_together_learns_as_one() {
    let path = model("llama");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/pirate");
    let dir = tempfile::tempdir().unwrap();
    let losses = |name: &str, processes: Option<usize>| -> Vec<f64> {
        let adapters = dir.path().join(name);
        let asked = [
            &[
                "train",
                "--train",
                "--model",
                &path,
                "--data",
                data.to_str().unwrap(),
            ][..],
            &[
                "--adapter-path",
                adapters.to_str().unwrap(),
                "--iters",
                "10",
            ],
            &[
                "--batch-size",
                "4",
                "--steps-per-report",
                "1",
                "--learning-rate",
                "1e-4",
            ],
            &["--val-batches", "0", "--backend", "cpu", "--json"],
        ]
        .concat();
        let output = match processes {
            Some(n) => launched(n, &asked),
            None => run(&asked),
        };
        stdout(&output);
        assert!(adapters.join("adapters.safetensors").is_file());
        let log = std::fs::read_to_string(adapters.join("train_log.jsonl")).unwrap();
        let lines = log
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines
            .filter(|line| line["event"] == "train")
            .map(|line| line["loss"].as_f64().unwrap())
            .collect()
    };
    let alone = losses("alone", None);
    assert_eq!(alone.len(), 10);
    assert!(alone[9] < alone[0], "{alone:?}");
    for n in [2, 4] {
        let together = losses(&n.to_string(), Some(n));
        assert_eq!(together.len(), 10);
        let off = together.iter().zip(&alone).map(|(a, b)| (a - b).abs());
        let most = off.fold(0.0, f64::max);
        assert!(most < 1e-5, "{n}: off by {most}: {together:?} {alone:?}");
    }
    let asked = [
        "train",
        "--train",
        "--model",
        &path,
        "--data",
        data.to_str().unwrap(),
    ];
    let adapters = dir.path().join("small");
    let small = [
        "--adapter-path",
        adapters.to_str().unwrap(),
        "--batch-size",
        "1",
    ];
    let err = refused(&launched(2, &[&asked[..], &small].concat()), 1);
    assert!(err.contains("batch_size is 1"), "{err}");
}
