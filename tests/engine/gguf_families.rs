//! Tests GGUF files of every family that llama.cpp can write and this engine can read. A file has
//! the exact weights of a tiny checkpoint (`tools/golden/gguf_families.py`), so the checkpoint's
//! golden numbers apply.

use std::path::Path;

use crate::common::{fixture, floats, golden, greedy, ids, load, max_difference, reference_bound};
use inference::{Interrupt, Prompt};
use serde_json::{Value, json};

fn families() -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(fixture("gguf"))
        .expect("the GGUF files are part of the repository")
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| Some(name.strip_suffix(".gguf")?.to_owned()))
        .collect();
    names.sort();
    names
}

#[test]
fn a_gguf_file_computes_what_its_safetensors_twin_does() {
    if crate::alone::ran_elsewhere(
        "gguf_families::a_gguf_file_computes_what_its_safetensors_twin_does",
    ) {
        return;
    }
    let families = families();
    assert!(families.len() >= 81, "{families:?}");
    for name in families {
        let file = fixture("gguf").join(format!("{name}.gguf"));
        computes(&file, &fixture("tiny").join(&name));
    }
}

/// Tests files of older converters, which join matrices that newer files store separately.
#[test]
fn old_forms_of_files_compute_the_same() {
    for name in ["deepseek-v2-lite", "glm", "phi"] {
        let file = fixture("gguf_other").join(format!("{name}-old.gguf"));
        computes(&file, &fixture("tiny").join(name));
    }
}

/// Compares logits, replies and ids of a file with the golden numbers of a checkpoint.
fn computes(file: &Path, checkpoint: &Path) {
    let name = file.display();
    let model = load(file);
    let tokens = model.as_token_model().unwrap();
    let golden = golden(checkpoint);
    for case in golden["prompts"].as_array().unwrap() {
        let prompt = Prompt::Tokens(ids(&case["tokens"]));
        let ours = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
        let difference = max_difference(&ours.logits, &floats(&case["logits"]));
        assert!(difference < reference_bound(1e-3), "{name}: {difference}");
        let expected = ids(&case["greedy"]);
        let output = model
            .generate(&prompt, &greedy(expected.len()))
            .unwrap()
            .collect_output()
            .unwrap();
        assert_eq!(output.tokens, expected, "{name}");
    }
    for case in golden["text"]["encode"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            tokens.encode(text, false).unwrap(),
            ids(&case["tokens"]),
            "{name}: {text:?}"
        );
    }
}

/// Tests values that a GGUF file cannot contain, so that its readers assume the published value.
/// The changed checkpoint has this value. For the factor of `YaRN`, files of DeepSeek contain only
/// the weight `mscale_all_dim`.
#[test]
fn a_value_that_files_do_not_hold_is_the_published_one() {
    for (name, values) in [
        ("deepseek-v2", vec![("/rope_scaling/mscale", json!(0.9))]),
        ("deepseek-v3", vec![("/rope_scaling/mscale", json!(0.9))]),
        (
            "llama4",
            vec![
                ("/attention_chunk_size", json!(8192)),
                ("/use_qk_norm", json!(true)),
                ("/attn_temperature_tuning", json!(true)),
                ("/floor_scale", json!(8192)),
                ("/attn_scale", json!(0.1)),
            ],
        ),
        (
            "minicpm3",
            vec![("/scale_emb", json!(12.0)), ("/dim_model_base", json!(256))],
        ),
        ("phimoe", vec![("/router_jitter_noise", json!(0.01))]),
        (
            "gpt-bigcode",
            vec![("/activation_function", json!("gelu_pytorch_tanh"))],
        ),
        ("kimi-linear", vec![("/num_expert_group", json!(1))]),
        (
            "laguna",
            vec![("/moe_router_logit_softcapping", json!(0.0))],
        ),
        (
            "cohere2-moe-rms",
            vec![("/shared_expert_combination_strategy", json!("average"))],
        ),
    ] {
        let twin = tempfile::tempdir().unwrap();
        let source = fixture("tiny").join(name);
        for file in [
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            std::fs::copy(source.join(file), twin.path().join(file)).unwrap();
        }
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
        for (field, value) in values {
            let old = std::mem::replace(config.pointer_mut(field).unwrap(), value.clone());
            assert_ne!(old, value, "{name}: the checkpoint has the value itself");
        }
        std::fs::write(twin.path().join("config.json"), config.to_string()).unwrap();

        let (file, twin) = (
            load(&fixture("gguf_other").join(format!("{name}.gguf"))),
            load(twin.path()),
        );
        for case in golden(&source)["prompts"].as_array().unwrap() {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let [ours, theirs] = [&file, &twin].map(|model| {
                let tokens = model.as_token_model().unwrap();
                let all = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
                all.logits
            });
            let difference = max_difference(&ours, &theirs);
            assert!(difference < 1e-3, "{name}: {difference}");
            // The value affects the logits, so the comparison would detect another value.
            let other = max_difference(&ours, &floats(&case["logits"]));
            assert!(
                other > 10.0 * difference.max(1e-5),
                "{name}: {other}, {difference}"
            );
        }
    }
}
