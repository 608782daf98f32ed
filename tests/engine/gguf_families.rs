//! Tests GGUF files of every family that llama.cpp can write and this engine can read. A file has
//! the exact weights of a tiny checkpoint (`tools/golden/gguf_families.py`), so the checkpoint's
//! golden numbers apply.

use crate::common::{fixture, floats, golden, greedy, ids, load, max_difference};
use inference::{Interrupt, Prompt};

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
    let families = families();
    assert!(families.len() >= 16, "{families:?}");
    for name in families {
        let model = load(&fixture("gguf").join(format!("{name}.gguf")));
        let tokens = model.as_token_model().unwrap();
        let golden = golden(&fixture("tiny").join(&name));
        for case in golden["prompts"].as_array().unwrap() {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let ours = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
            let difference = max_difference(&ours.logits, &floats(&case["logits"]));
            assert!(difference < 1e-3, "{name}: {difference}");
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
}
