//! Whole models with the CPU kernels, with their portable form as on a processor without known
//! vector instructions, and without kernels. Logits and tokens are the same. The setting belongs to
//! a process, so each is computed by this program started anew.

use std::process::{Command, Stdio};

use crate::common::{greedy, max_difference, tiny, tiny_names};
use inference::Prompt;
use serde_json::{Value, json};

/// Where a started process writes its results.
const OUT: &str = "KERNELS_TEST_OUT";

/// Positions of the prompt: enough for panels of products, sweeps of attention, and a rest.
const PROMPT: u32 = 37;

/// Positions of a short one, whose products are those of a few rows.
const FEW: u32 = 9;

/// Tokens that are generated, one after another.
const TOKENS: usize = 12;

#[test]
#[ignore = "a part of `kernels_change_nothing`, which starts it"]
fn compute() {
    let Some(out) = std::env::var_os(OUT) else {
        return;
    };
    let mut found = serde_json::Map::new();
    for name in tiny_names() {
        let model = tiny(&name);
        let vocab = u32::try_from(model.info().vocab_size).unwrap();
        let ids =
            |n: u32| Prompt::Tokens((0..n).map(|i| (i * i * 7 + i * 13 + 5) % vocab).collect());
        let prompt = ids(PROMPT);
        let logits = |prompt: &Prompt| {
            let model = model.as_token_model().unwrap();
            model.logits(prompt, true).unwrap().logits
        };
        let options = greedy(TOKENS).with_cache_prompt(false);
        let output = model
            .generate(&prompt, &options)
            .unwrap()
            .collect_output()
            .unwrap();
        found.insert(
            name,
            json!({
                "logits": logits(&prompt),
                "few": logits(&ids(FEW)),
                "tokens": output.tokens,
            }),
        );
    }
    let devices: Vec<String> = inference::backends().iter().map(|b| b.device()).collect();
    found.insert("devices".into(), json!(devices));
    std::fs::write(out, Value::Object(found).to_string()).unwrap();
}

#[test]
fn kernels_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let started: Vec<_> = ["on", "portable", "off"]
        .into_iter()
        .map(|mode| {
            let out = dir.path().join(mode);
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "kernels::compute", "--ignored"])
                .env("MLX_CPU_KERNELS", mode)
                .env(OUT, &out)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            (mode, out, child)
        })
        .collect();
    let mut found = Vec::new();
    for (mode, out, mut child) in started {
        assert!(child.wait().unwrap().success(), "{mode}");
        let text = std::fs::read_to_string(out).unwrap();
        found.push((mode, serde_json::from_str::<Value>(&text).unwrap()));
    }
    let (_, plain) = found.pop().unwrap();
    for (mode, found) in &found {
        for name in tiny_names() {
            for which in ["logits", "few"] {
                let logits =
                    [&found[&name][which], &plain[&name][which]].map(crate::common::floats);
                let difference = max_difference(&logits[0], &logits[1]);
                assert!(difference < 2e-3, "{name}, {mode}, {which}: {difference}");
            }
            assert_eq!(
                found[&name]["tokens"], plain[&name]["tokens"],
                "{name}, {mode}"
            );
        }
    }
    // And people are told.
    let said = |found: &Value| found["devices"].to_string();
    assert!(
        said(&plain).contains("kernels off by MLX_CPU_KERNELS"),
        "{}",
        said(&plain)
    );
    assert!(said(&found[1].1).contains("kernels: portable as MLX_CPU_KERNELS says"));
    assert!(said(&found[0].1).contains("kernels: "));
}
