//! Compares whole models in three modes: with the CPU kernels, with the kernels' portable form, and
//! without kernels. Logits and tokens must agree. The mode is global to a process, so the test
//! starts itself once per mode.

use std::process::{Command, Stdio};

use crate::common::{greedy, max_difference, tiny, tiny_names};
use inference::{Interrupt, Prompt};
use serde_json::{Value, json};

/// The environment variable with the result file of a child process.
const OUT: &str = "KERNELS_TEST_OUT";

/// Prompt length. It is long enough for full panels of the matrix multiplications, blocks of
/// attention, and a remainder.
const PROMPT: u32 = 37;

/// Length of a short prompt, which uses the kernels for few rows.
const FEW: u32 = 9;

/// Number of generated tokens.
const TOKENS: usize = 12;

#[test]
#[ignore = "a part of `kernels_change_nothing`, which starts it"]
fn compute() {
    let Some(out) = std::env::var_os(OUT) else {
        return;
    };
    let mut results = serde_json::Map::new();
    for name in tiny_names() {
        let model = tiny(&name);
        let vocab = u32::try_from(model.info().vocab_size).unwrap();
        let ids =
            |n: u32| Prompt::Tokens((0..n).map(|i| (i * i * 7 + i * 13 + 5) % vocab).collect());
        let prompt = ids(PROMPT);
        let logits = |prompt: &Prompt| {
            let model = model.as_token_model().unwrap();
            model
                .logits(prompt, true, &Interrupt::new())
                .unwrap()
                .logits
        };
        let options = greedy(TOKENS).with_cache_prompt(false);
        let output = model
            .generate(&prompt, &options)
            .unwrap()
            .collect_output()
            .unwrap();
        results.insert(
            name,
            json!({
                "logits": logits(&prompt),
                "few": logits(&ids(FEW)),
                "tokens": output.tokens,
            }),
        );
    }
    let devices: Vec<String> = inference::backends().iter().map(|b| b.device()).collect();
    results.insert("devices".into(), json!(devices));
    std::fs::write(out, Value::Object(results).to_string()).unwrap();
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
    let mut runs = Vec::new();
    for (mode, out, mut child) in started {
        assert!(child.wait().unwrap().success(), "{mode}");
        let text = std::fs::read_to_string(out).unwrap();
        runs.push((mode, serde_json::from_str::<Value>(&text).unwrap()));
    }
    let (_, plain) = runs.pop().unwrap();
    for (mode, runs) in &runs {
        for name in tiny_names() {
            for which in ["logits", "few"] {
                let logits = [&runs[&name][which], &plain[&name][which]].map(crate::common::floats);
                let difference = max_difference(&logits[0], &logits[1]);
                // See `golden.rs` for the bound.
                assert!(difference < 3e-3, "{name}, {mode}, {which}: {difference}");
            }
            assert_eq!(
                runs[&name]["tokens"], plain[&name]["tokens"],
                "{name}, {mode}"
            );
        }
    }
    // The list of devices also reports the kernel mode.
    let said = |runs: &Value| runs["devices"].to_string();
    assert!(
        said(&plain).contains("kernels off by MLX_CPU_KERNELS"),
        "{}",
        said(&plain)
    );
    assert!(said(&runs[1].1).contains("kernels: portable as MLX_CPU_KERNELS says"));
    assert!(said(&runs[0].1).contains("kernels: "));
}
