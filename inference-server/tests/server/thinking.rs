//! Tests of `budget_tokens` in Anthropic's `thinking`. When the budget is used up, the reply is
//! forced to end its reasoning and to continue with the answer.

use crate::common::{Running, Script, config, events, serve_script};
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";

/// A chat template with the markers that identify Qwen's format.
const HERMES: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

/// A template in Mistral's format. Its marks are special tokens and may occur anywhere.
const MISTRAL: &str = "[THINK]{{ thinking }}[/THINK]";
const MISTRAL_SPECIALS: &[&str] = &["[THINK]", "[/THINK]"];

/// A template in gpt-oss's format, which has channels.
const HARMONY: &str = "<|channel|>{{ channel }}<|message|>";
const HARMONY_SPECIALS: &[&str] = &["<|channel|>", "<|message|>", "<|end|>", "<|start|>"];

fn serve(template: &'static str, specials: &'static [&'static str]) -> Running {
    serve_script(&config(), Script::writing(template, specials), |model| {
        model.with_context(2000)
    })
}

fn ask(said: &str, budget: Option<usize>) -> Value {
    let mut body = json!({"max_tokens": 500,
        "messages": [{"role": "user", "content": format!("say:{said}")}]});
    if let Some(budget) = budget {
        body["thinking"] = json!({"type": "enabled", "budget_tokens": budget});
    }
    body
}

/// Sends a request. Returns reasoning, answer and number of reply tokens. The streamed reply must
/// equal the unstreamed one.
fn answer(server: &Running, mut body: Value) -> (String, String, u64) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let reply = server.client().post(PATH, &body).expect(200);
    let (mut thinking, mut answer) = (String::new(), String::new());
    for block in reply["content"].as_array().unwrap() {
        thinking += &text(&block["thinking"]);
        answer += &text(&block["text"]);
    }
    body["stream"] = true.into();
    let (mut thought, mut said) = (String::new(), String::new());
    for (_, data) in events(&server.client().post(PATH, &body)) {
        thought += &text(&data["delta"]["thinking"]);
        said += &text(&data["delta"]["text"]);
    }
    assert_eq!((&thought, &said), (&thinking, &answer));
    let tokens = reply["usage"]["output_tokens"].as_u64().unwrap();
    (thinking, answer, tokens)
}

#[test]
fn thinking_ends_at_its_budget() {
    let server = serve(HERMES, &[]);
    let said = "<think>one two three</think>⏎⏎The answer.";
    // Each token is one byte. Within the budget, the reply must not change.
    for budget in [None, Some(13), Some(100)] {
        let (thinking, text, tokens) = answer(&server, ask(said, budget));
        assert_eq!(
            (thinking.as_str(), text.as_str()),
            ("one two three", "The answer.")
        );
        assert_eq!(tokens, said.replace('⏎', "\n").len() as u64, "{budget:?}");
    }
    // Beyond the budget, the rest of the script becomes the answer. The forced letters replace
    // script letters, which are lost.
    for (budget, thinking, text) in [
        (12, "one two thre", "e</think>\n\nThe answer."),
        (7, "one two", " three</think>\n\nThe answer."),
        (2, "on", "e two three</think>\n\nThe answer."),
    ] {
        let (thought, said, _) = answer(&server, ask(said, Some(budget)));
        assert_eq!(
            (thought.as_str(), said.trim()),
            (thinking, text.trim()),
            "{budget}"
        );
    }
    // A model that would reason forever is forced to stop.
    let mut body = ask("!long", Some(40));
    body["max_tokens"] = 100.into();
    let last = json!({"role": "assistant", "content": "<think>"});
    body["messages"].as_array_mut().unwrap().push(last);
    let (thinking, text, _) = answer(&server, body);
    assert_eq!(thinking, "x".repeat(40));
    assert!(text.ends_with("xxxx"), "{text}");
}

#[test]
fn what_does_not_think_has_no_budget() {
    let server = serve(HERMES, &[]);
    for said in [
        "An answer that is longer.",
        "No <think>thinking at all</think>.",
    ] {
        let (thinking, text, _) = answer(&server, ask(said, Some(3)));
        assert_eq!((thinking.as_str(), text.as_str()), ("", said));
    }
    // The budget has no effect if reasoning is off or adaptive, or if the reply must be a call.
    for (kind, choice) in [
        ("disabled", "auto"),
        ("adaptive", "auto"),
        ("enabled", "any"),
    ] {
        let mut body = ask("<think>one two</think>x", None);
        body["thinking"] = json!({"type": kind, "budget_tokens": 3});
        body["tools"] = json!([{"name": "f", "input_schema": {"type": "object"}}]);
        body["tool_choice"] = json!({"type": choice});
        server.client().post(PATH, &body).expect(200);
        let constraints = server.state.last_options().constraints;
        assert!(constraints.logits_processors.is_empty(), "{kind} {choice}");
    }
}

#[test]
fn thinking_that_the_prompt_began_counts() {
    let server = serve(HERMES, &[]);
    let mut body = ask("one two three</think>The answer.", Some(7));
    let last = json!({"role": "assistant", "content": "<think>"});
    body["messages"].as_array_mut().unwrap().push(last);
    let (thinking, text, _) = answer(&server, body);
    assert_eq!(thinking, "one two");
    assert!(
        text.starts_with("three") || text.starts_with(" three"),
        "{text}"
    );
}

#[test]
fn channels_have_a_budget() {
    let server = serve(HARMONY, HARMONY_SPECIALS);
    let said = "<|channel|>analysis<|message|>one two<|end|><|start|>assistant<|channel|>analysis\
                <|message|>xyz<|end|><|start|>assistant<|channel|>final<|message|>Done.";
    let (thinking, text, _) = answer(&server, ask(said, Some(100)));
    // The template writes one message on each line.
    assert_eq!((thinking.as_str(), text.trim()), ("one two\nxyz", "Done."));
    // Without tools, the answer starts where the reasoning was ended.
    let (thinking, text, _) = answer(&server, ask(said, Some(3)));
    assert_eq!(thinking, "one");
    assert!(text.trim().starts_with("two"), "{text}");
    // With tools, the model chooses the next channel. If it chooses reasoning again, it is forced
    // to answer.
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let mut body = ask(said, Some(7));
    body["tools"] = tools;
    let (thinking, text, _) = answer(&server, body);
    assert_eq!(thinking.trim(), "one two");
    assert!(text.trim().starts_with("xyz"), "{text}");
}

#[test]
fn several_thoughts_have_one_budget() {
    let server = serve(MISTRAL, MISTRAL_SPECIALS);
    let said = "[THINK]one[/THINK]A.[THINK]two three[/THINK]B.";
    let (thinking, text, _) = answer(&server, ask(said, Some(100)));
    assert_eq!((thinking.as_str(), text.as_str()), ("onetwo three", "A.B."));
    let (thinking, text, _) = answer(&server, ask(said, Some(6)));
    assert_eq!(thinking, "onetwo");
    // The closing mark that the script writes later is text of the answer.
    assert_eq!(text, "A.three[/THINK]B.");
}
