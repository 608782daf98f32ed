//! Compares the results of tiny random checkpoints with numbers that transformers or mlx-lm
//! computed for the same weights. The `made_by` field of each `golden.json` names the script in
//! `tools/golden`.

use crate::common::{floats, golden, greedy, has_amx, ids, max_difference, tiny, tiny_names};
use inference::{ChatPrompt, Interrupt, Message, Prompt};

/// The bound is 0.001, or 0.003 for quantized models with the kernels. Those round inputs to 16
/// bits, with a scale for sixteen of them, and the small random models enlarge this error
/// twentyfold (docs/results.md has the perplexity of a real model). `kernels.rs` tests the effect
/// of the kernels alone.
#[test]
fn logits_agree_with_the_reference_to_a_thousandth() {
    if crate::alone::ran_elsewhere("golden::logits_agree_with_the_reference_to_a_thousandth") {
        return;
    }
    let kernels = std::env::var("MLX_CPU_KERNELS").map_or(true, |v| v != "off");
    for name in tiny_names() {
        let model = tiny(&name);
        let bound = match model.info().quantization_bits {
            Some(_) if kernels => 3e-3,
            None if kernels && has_amx() => 2e-3,
            _ => 1e-3,
        };
        let tokens = model.as_token_model().unwrap();
        for case in golden(&crate::common::fixture("tiny").join(&name))["prompts"]
            .as_array()
            .unwrap()
        {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let ours = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
            let difference = max_difference(&ours.logits, &floats(&case["logits"]));
            assert!(difference < bound, "{name}: {difference}");
            if let Some(rows) = case["logits_all"].as_array() {
                let ours = tokens.logits(&prompt, true, &Interrupt::new()).unwrap();
                assert_eq!(ours.shape, [rows.len(), model.info().vocab_size]);
                let expected: Vec<f32> = rows.iter().flat_map(floats).collect();
                let difference = max_difference(&ours.logits, &expected);
                assert!(difference < bound, "{name}, all positions: {difference}");
            }
        }
    }
}

/// The setting is global to a process. So this test runs the test above again, in another process.
#[test]
fn without_kernels_all_agree_to_a_thousandth() {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "golden::logits_agree_with_the_reference_to_a_thousandth",
        ])
        .env("MLX_CPU_KERNELS", "off")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn greedy_tokens_equal_those_of_the_reference() {
    if crate::alone::ran_elsewhere("golden::greedy_tokens_equal_those_of_the_reference") {
        return;
    }
    let mut checked = 0;
    for name in tiny_names() {
        let model = tiny(&name);
        for case in golden(&crate::common::fixture("tiny").join(&name))["prompts"]
            .as_array()
            .unwrap()
        {
            let expected = ids(&case["greedy"]);
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let output = model
                .generate(&prompt, &greedy(expected.len()))
                .unwrap()
                .collect_output()
                .unwrap();
            assert_eq!(output.tokens, expected, "{name}");
            checked += expected.len();
        }
    }
    assert!(checked >= 24 * 20, "only {checked} tokens were compared");
}

#[test]
fn text_and_conversations_become_the_reference_s_ids() {
    if crate::alone::ran_elsewhere("golden::text_and_conversations_become_the_reference_s_ids") {
        return;
    }
    for name in tiny_names() {
        let golden = golden(&crate::common::fixture("tiny").join(&name));
        let model = tiny(&name);
        let tokens = model.as_token_model().unwrap();
        for case in golden["text"]["encode"].as_array().into_iter().flatten() {
            let text = case["text"].as_str().unwrap();
            let encoded = tokens.encode(text, false).unwrap();
            assert_eq!(encoded, ids(&case["tokens"]), "{name}: {text:?}");
            if !text.contains("<|") {
                assert_eq!(tokens.decode(&encoded).unwrap(), text, "{name}");
            }
        }
        for case in golden["text"]["chat"].as_array().into_iter().flatten() {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let chat = ChatPrompt::new(messages.as_slice());
            let prepared = tokens.prepare_chat(&chat).unwrap();
            assert_eq!(prepared.text, case["text"], "{name}");
            let output = model
                .chat(&messages, &greedy(1))
                .unwrap()
                .collect_output()
                .unwrap();
            assert_eq!(
                output.metrics.prompt_tokens,
                ids(&case["tokens"]).len(),
                "{name}"
            );
        }
    }
}
