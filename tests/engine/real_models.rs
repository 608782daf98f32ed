//! Compares token ids and greedy replies of real models, such as Gemma 3, Qwen or Llama, with
//! mlx-lm. The test downloads nothing: `RUST_MLX_REAL_MODELS` lists model directories, and
//! `tools/golden/real_models.py` writes the expected results into each.

use std::path::Path;

use inference::Prompt;
use serde_json::Value;

use crate::common::{fixture, floats, greedy, ids, load};

const VARIABLE: &str = "RUST_MLX_REAL_MODELS";

/// The order of sums differs between the engines. So a token whose logit leads by less than this
/// margin may differ.
const MARGIN: f32 = 1e-3;

/// Compares the model in a directory with mlx-lm's results, and returns the number of compared
/// tokens.
fn compare(directory: &Path) -> usize {
    let path = directory.join("greedy.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| {
        let how = "tools/golden/real_models.py writes it";
        panic!("{}: {e}; {how}", path.display())
    });
    let golden: Value = serde_json::from_str(&text).unwrap();
    let model = load(directory);
    let tokens = model.as_token_model().unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(!cases.is_empty(), "{}", path.display());
    let mut compared = 0;
    for case in cases {
        let prompt = ids(&case["tokens"]);
        let what = format!("{}, {}", directory.display(), case["text"]);
        if let Some(text) = case["text"].as_str() {
            assert_eq!(tokens.encode(text, true).unwrap(), prompt, "{what}");
        }
        let margins = floats(&case["margins"]);
        let sure = margins.iter().position(|margin| *margin < MARGIN);
        let sure = sure.unwrap_or(margins.len());
        let expected = &ids(&case["greedy"])[..sure];
        let stream = model.generate(&Prompt::Tokens(prompt), &greedy(sure.max(1)));
        let actual = stream.unwrap().collect_output().unwrap().tokens;
        assert_eq!(&actual[..sure], expected, "{what}");
        compared += sure;
    }
    assert!(compared > 0, "{}: no token is sure", path.display());
    compared
}

#[test]
#[cfg_attr(
    not(test_real_models),
    ignore = "needs weights of gigabytes: set RUST_MLX_REAL_MODELS to their directories"
)]
fn real_models_answer_as_mlx_lm_does() {
    let directories = std::env::var_os(VARIABLE)
        .unwrap_or_else(|| panic!("{VARIABLE} was set when this was built, and is not now"));
    let mut models = 0;
    for directory in std::env::split_paths(&directories) {
        println!("{}: {} tokens", directory.display(), compare(&directory));
        models += 1;
    }
    assert!(models > 0);
}

/// Tests the comparison itself on a tiny checkpoint with mlx-lm's results. The comparison must
/// detect a wrong token.
#[test]
fn the_comparison_finds_a_wrong_token() {
    let tiny = fixture("tiny/llama");
    let golden = crate::common::golden(&tiny);
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(tiny.join(file), dir.path().join(file)).unwrap();
    }
    let write = |change: u32, margin: f32| {
        let cases: Vec<Value> = (golden["prompts"].as_array().unwrap().iter())
            .map(|case| {
                let mut greedy = ids(&case["greedy"]);
                greedy[5] += change;
                let margins = vec![margin; greedy.len()];
                serde_json::json!({"text": null, "tokens": case["tokens"], "greedy": greedy,
                    "margins": margins})
            })
            .collect();
        let text = serde_json::json!({ "cases": cases }).to_string();
        std::fs::write(dir.path().join("greedy.json"), text).unwrap();
    };
    let run = || std::panic::catch_unwind(|| compare(dir.path()));
    write(0, 1.0);
    let prompts = golden["prompts"].as_array().unwrap();
    let all: usize = prompts.iter().map(|case| ids(&case["greedy"]).len()).sum();
    assert_eq!(run().unwrap(), all);
    write(1, 1.0);
    assert!(run().is_err());
    // Each margin is below the bound, so no token was compared.
    write(0, 1e-6);
    assert!(run().is_err());
}
