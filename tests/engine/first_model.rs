//! Tests of the first real model, which the first run downloads as the program does. Its results
//! are compared with a float32 reference (`tools/golden/first_model.py`), also through the program.

#[cfg(feature = "probe")]
mod edits;
#[path = "../../inference-text/tests/text/first_model.rs"]
mod text_golden;
mod training;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

use crate::common::{golden, greedy, ids, load};
use inference::{ChatPrompt, Interrupt, Message, Prompt, TextModel};

static FIRST: LazyLock<PathBuf> = LazyLock::new(|| {
    rust_mlx::hub::first_model().unwrap_or_else(|e| panic!("cannot fetch the first model: {e}"))
});
static MODEL: LazyLock<Box<dyn TextModel>> = LazyLock::new(|| load(&FIRST));

fn mlx(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn logits_and_greedy_tokens_equal_the_reference() {
    if crate::alone::ran_elsewhere("first_model::logits_and_greedy_tokens_equal_the_reference") {
        return;
    }
    let golden = golden(&crate::common::fixture("first-model"));
    let tokens = MODEL.as_token_model().unwrap();
    let plain = golden["plain"].as_array().unwrap();
    let chat = golden["chat"].as_array().unwrap();
    assert!(plain.len() >= 3 && chat.len() >= 2);
    for case in plain.iter().chain(chat) {
        let text = case["prompt"].as_str().unwrap();
        let prompt = Prompt::Tokens(ids(&case["tokens"]));
        let logits = tokens
            .logits(&prompt, false, &Interrupt::new())
            .unwrap()
            .logits;
        for pair in case["top"].as_array().unwrap().iter().take(10) {
            let id = usize::try_from(pair[0].as_u64().unwrap()).unwrap();
            let difference = (logits[id] - pair[1].as_f64().unwrap() as f32).abs();
            // The logits are about 25. See `golden.rs` for the bound.
            assert!(
                difference < 3e-3,
                "{text:?}: logit {id} differs by {difference}"
            );
        }
        let expected = ids(&case["greedy"]);
        assert_eq!(expected.len(), 24);
        let output = MODEL.generate(&prompt, &greedy(expected.len())).unwrap();
        assert_eq!(
            output.collect_output().unwrap().tokens,
            expected,
            "{text:?}"
        );
    }
    // Our tokenizer and the reference return the same ids.
    for case in plain {
        let text = case["prompt"].as_str().unwrap();
        assert_eq!(
            tokens.encode(text, true).unwrap(),
            ids(&case["tokens"]),
            "{text:?}"
        );
    }
    for case in chat {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let chat = ChatPrompt::new(messages.as_slice());
        assert_eq!(tokens.prepare_chat(&chat).unwrap().text, case["prompt"]);
        let output = MODEL
            .chat(&messages, &greedy(1))
            .unwrap()
            .collect_output()
            .unwrap();
        assert_eq!(output.metrics.prompt_tokens, ids(&case["tokens"]).len());
    }
}

#[test]
fn perplexity_is_that_of_mlx_lm() {
    let text = std::fs::read_to_string(crate::common::fixture("perplexity.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let golden = &golden["first_model"];
    let tokens = MODEL.as_token_model().unwrap();
    let expected = ids(&golden["tokens"]);
    let text = tokens.decode(&expected).unwrap();
    assert_eq!(tokens.encode(&text, true).unwrap(), expected);
    let length = golden["sequence_length"].to_string();
    let output = mlx(&[
        "perplexity",
        "--prompt",
        &text,
        "--sequence-length",
        &length,
        "--precision",
        "exact",
    ]);
    let ours: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    for name in ["perplexity", "standard_error"] {
        let (ours, expected) = (&ours[name], &golden[name]);
        let difference = (ours.as_f64().unwrap() - expected.as_f64().unwrap()).abs();
        assert!(difference < 1e-3, "{name}: {ours} is not {expected}");
    }
}

#[test]
fn the_tokenizer_agrees_on_every_golden_text() {
    text_golden::assert_golden(MODEL.as_token_model().unwrap());
}

#[test]
fn the_readme_s_command_answers_paris() {
    let output = mlx(&[
        "generate",
        "--prompt",
        "What is the capital of France?",
        "--max-tokens",
        "24",
    ]);
    assert!(stdout(&output).contains("Paris"));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("tok/s"),
        "statistics go to stderr"
    );
    let output = mlx(&[
        "generate",
        "--raw",
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "8",
    ]);
    assert!(stdout(&output).starts_with(" Paris"));
}

/// As in mlx-lm, only text of the template precedes a message.
#[test]
fn every_command_asks_as_the_template_says() {
    let golden = golden(&crate::common::fixture("first-model"));
    for case in &golden["chat"].as_array().unwrap()[..2] {
        let question = case["messages"][0]["content"].as_str().unwrap();
        let expected = ids(&case["tokens"]).len();
        let args = ["generate", "--json", "--ignore-eos", "-n", "24", "-p"];
        let output = mlx(&[&args[..], &[question]].concat());
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(json["prompt_tokens"], expected);
        assert_eq!(json["tokens"], case["greedy"]);
        let output = chat(&["-n", "1"], &format!("{question}\n/stats\n"));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            told.contains(&format!("prompt: {expected} tokens")),
            "{told}"
        );
    }
}

#[test]
fn json_names_tokens_reason_and_figures() {
    let output = mlx(&[
        "generate",
        "--json",
        "--raw",
        "--tokens",
        "504,3575,282,4649,314",
        "--max-tokens",
        "3",
    ]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(json["prompt_tokens"], 5);
    assert_eq!(json["generated_tokens"], 3);
    assert_eq!(json["tokens"].as_array().unwrap().len(), 3);
    assert_eq!(json["finish_reason"], "length");
    assert!(
        json["metrics"]["decode_tokens_per_second"]
            .as_f64()
            .unwrap()
            > 0.0
    );
}

fn chat(args: &[&str], script: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_mlx"))
        .arg("chat")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(script.as_bytes()).unwrap();
    drop(input);
    child.wait_with_output().unwrap()
}

#[test]
fn a_chat_remembers_what_was_said() {
    let script = "/system You are a helpful assistant.\nWhat is the capital of France?\n/bye\n";
    assert!(stdout(&chat(&["--max-tokens", "16"], script)).contains("Paris"));
}
