//! Compares `mlx vindex edges`, `circuits` and `extract` with numpy (`tools/golden/walkers.py`).
#![cfg(feature = "probe")]

use std::path::Path;

use crate::common::fixture;
use crate::program::{output, refused, stdout};
use inference::{ErrorKind, Interrupt, Prompt};
use serde_json::Value;

fn golden() -> Value {
    let text = std::fs::read_to_string(fixture("walkers.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The command on a tiny model.
fn command(what: &str, name: &str, out: &Path, more: &[&str]) -> std::process::Output {
    let model = fixture("tiny").join(name).display().to_string();
    let out = out.display().to_string();
    let base = [
        "vindex",
        what,
        "--model",
        &model,
        "--backend",
        "cpu",
        "-o",
        &out,
    ];
    output(&[&base[..], more].concat())
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[track_caller]
fn near(ours: &Value, expected: &Value) {
    let (a, b) = (number(ours), number(expected));
    assert!((a - b).abs() < 2e-5 * b.abs().max(1.0), "{a} is not {b}");
}

#[test]
fn edges_are_those_of_numpy() {
    let golden = golden();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("edges.jsonl");
    let name = golden["model"].as_str().unwrap();
    let flags = ["--top-k", "3", "--json"];
    let stats: Value =
        serde_json::from_str(&stdout(&command("edges", name, &path, &flags))).unwrap();
    let all = lines(&path);
    for (layer, expected) in golden["layers"].as_array().unwrap().iter().enumerate() {
        let (expected, stats) = (&expected["mlp"], &stats[layer]);
        let actual: Vec<&Value> = all.iter().filter(|e| e["layer"] == layer).collect();
        assert_eq!(Some(actual.len() as u64), expected["count"].as_u64());
        assert_eq!(stats["edges"], expected["count"]);
        near(&stats["mean_c"], &expected["mean_c"]);
        for (pair, n) in stats["at_least"]
            .as_array()
            .unwrap()
            .iter()
            .zip(expected["at_least"].as_array().unwrap())
        {
            assert_eq!(&pair[1], n);
        }
        for (ours, edge) in actual.iter().zip(expected["edges"].as_array().unwrap()) {
            assert_eq!(ours["relation"], format!("L{layer}-F{}", edge[0]));
            assert_eq!((&ours["input"], &ours["output"]), (&edge[1], &edge[2]));
            near(&ours["c_in"], &edge[3]);
            near(&ours["c_out"], &edge[4]);
            near(&ours["c"], &edge[5]);
            near(&ours["selectivity"], &edge[6]);
            assert!(ours["input_text"].is_string());
        }
    }
    let text = stdout(&command("edges", name, &path, &["--layers", "1"]));
    assert!(
        text.starts_with("LAYER") && text.lines().count() == 2,
        "{text}"
    );
    assert!(lines(&path).iter().all(|e| e["layer"] == 1));
}

#[test]
fn circuits_are_those_of_numpy() {
    let golden = golden();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("circuits.jsonl");
    let name = golden["model"].as_str().unwrap();
    let inputs = golden["inputs"].to_string();
    stdout(&command(
        "circuits",
        name,
        &path,
        &["--top-k", "3", "--inputs", &inputs],
    ));
    let all = lines(&path);
    let mut seen = 0;
    for (layer, expected) in golden["layers"].as_array().unwrap().iter().enumerate() {
        for (head, expected) in expected["heads"].as_array().unwrap().iter().enumerate() {
            let relation = format!("L{layer}-H{head}");
            let actual: Vec<&Value> = all.iter().filter(|r| r["relation"] == relation).collect();
            let mut actual = actual.into_iter();
            for input in expected.as_array().unwrap() {
                for output in input[2].as_array().unwrap() {
                    let ours = actual.next().unwrap();
                    assert_eq!(
                        (&ours["input"], &ours["output"]),
                        (&input[0], &output[0]),
                        "{relation}"
                    );
                    near(&ours["c_in"], &input[1]);
                    near(&ours["c_out"], &output[1]);
                    seen += 1;
                }
            }
            assert!(actual.next().is_none(), "{relation}");
        }
    }
    assert!(seen > 100);
    // A recurrent model has no attention heads.
    let wrong = refused(&command("circuits", "mamba2", &path, &[]), 1);
    assert!(
        wrong.contains("the attention of layer 0 cannot be shown"),
        "{wrong}"
    );
}

#[test]
fn vectors_are_the_weights_and_go_on_where_they_were_cut() {
    let model = crate::common::tiny("llama-tied-gqa");
    let inspector = model.as_attention_inspector().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("v");
    let all = [
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "attn_ov",
        "attn_qk",
        "embeddings",
    ];
    let components = all.join(",");
    let flags = ["--component", &components, "--top-k", "2"];
    let said = stdout(&command("extract", "llama-tied-gqa", &out, &flags));
    assert_eq!(said.lines().count(), 6);
    let vectors = |lines: &[Value], layer: usize, field: &str| -> Vec<f32> {
        let matching = lines
            .iter()
            .filter(|l| l["layer"] == layer && l["vector"].is_array());
        let numbers = matching.flat_map(|l| l[field].as_array().unwrap().clone());
        numbers.map(|n| number(&n) as f32).collect()
    };
    let mut originals = Vec::new();
    for name in all {
        let path = out.join(format!("{name}.ndjson"));
        originals.push(std::fs::read(&path).unwrap());
        let lines = lines(&path);
        assert_eq!(lines[0]["component"], name);
        let scores = inspector
            .token_scores(&vectors(&lines[1..2], 0, "vector"))
            .unwrap();
        let best = &lines[1]["top_k"][0];
        let greatest = scores[0].iter().copied().fold(f32::MIN, f32::max);
        // Another kernel scores several vectors at once, so roundings may differ.
        let difference = (number(&best["score"]) as f32 - greatest).abs();
        assert!(
            difference < 1e-5 * greatest.abs().max(1.0),
            "{name}: {difference}"
        );
        for layer in 0..2 {
            let weights = inspector.feed_forward_weights(layer).unwrap();
            let attention = inspector.attention_projections(layer).unwrap();
            let group = attention.num_heads / attention.num_kv_heads;
            let size = attention.head_dim * attention.hidden_size;
            let shared = |rows: &[f32]| -> Vec<f32> {
                let heads = (0..attention.num_heads).map(|h| h / group * size);
                heads
                    .flat_map(|from| rows[from..from + size].to_vec())
                    .collect()
            };
            let (expected, input) = match name {
                "ffn_gate" => (weights.gate, None),
                "ffn_up" => (weights.up.unwrap(), None),
                "ffn_down" => (weights.down, None),
                "attn_ov" => (attention.outputs.clone(), Some(shared(&attention.values))),
                "attn_qk" => (attention.queries.clone(), Some(shared(&attention.keys))),
                _ if layer > 0 => continue,
                _ => (
                    inspector
                        .token_embeddings(&(0..300).collect::<Vec<_>>())
                        .unwrap(),
                    None,
                ),
            };
            assert_eq!(vectors(&lines, layer, "vector"), expected, "{name} {layer}");
            if let Some(input) = input {
                assert_eq!(vectors(&lines, layer, "input"), input, "{name} {layer}");
            }
        }
    }
    // Without `--resume`, the command overwrites no file. With `--resume`, the final files are
    // equal to those of one run.
    let wrong = refused(&command("extract", "llama-tied-gqa", &out, &flags), 1);
    assert!(wrong.contains("ffn_gate.ndjson"), "{wrong}");
    for (name, bytes) in all.iter().zip(&originals).step_by(2) {
        let cut = bytes.len() * 2 / 3;
        std::fs::write(out.join(format!("{name}.ndjson")), &bytes[..cut]).unwrap();
    }
    stdout(&command(
        "extract",
        "llama-tied-gqa",
        &out,
        &[&flags[..], &["--resume"]].concat(),
    ));
    for (name, bytes) in all.iter().zip(&originals) {
        let again = std::fs::read(out.join(format!("{name}.ndjson"))).unwrap();
        assert!(again == *bytes, "{name}");
    }
    let other = command(
        "extract",
        "llama",
        &out,
        &[&flags[..], &["--resume"]].concat(),
    );
    assert!(refused(&other, 1).contains("another model"));
    let wrong = refused(
        &command(
            "extract",
            "gpt2",
            &dir.path().join("g"),
            &["--component", "ffn_up"],
        ),
        1,
    );
    assert!(wrong.contains("has no ffn_up"), "{wrong}");
    let wrong = refused(
        &command("extract", "llama", &out, &["--component", "norms"]),
        2,
    );
    assert!(wrong.contains("ffn_gate"), "{wrong}");
}

#[test]
fn what_is_asked_of_weights_is_checked() {
    let model = crate::common::tiny("llama");
    let inspector = model.as_attention_inspector().unwrap();
    let invalid = ErrorKind::InvalidOption;
    assert_eq!(
        inspector.attention_projections(99).unwrap_err().kind(),
        invalid
    );
    assert_eq!(
        inspector.token_embeddings(&[u32::MAX]).unwrap_err().kind(),
        invalid
    );
    assert!(inspector.token_embeddings(&[]).unwrap().is_empty());
    assert_eq!(
        inspector.token_scores(&[0.0; 3]).unwrap_err().kind(),
        invalid
    );
    // The dot product of an embedding with itself is its squared length.
    let one = inspector.token_embeddings(&[7]).unwrap();
    let square: f32 = one.iter().map(|x| x * x).sum();
    let score = inspector.token_scores(&one).unwrap()[0][7];
    assert!((score - square).abs() < 1e-4 * square, "{score} {square}");
    let states = inspector
        .hidden_states(&Prompt::Tokens(vec![7]), &[0], &Interrupt::new())
        .unwrap();
    assert_eq!(states.embedding, one);
    model.close().unwrap();
    assert_eq!(
        inspector.token_scores(&one).unwrap_err().kind(),
        ErrorKind::Closed
    );
}
