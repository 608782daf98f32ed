//! Tests of tool calls and reasoning in the models' formats, in all APIs, streamed and unstreamed.

mod other_apis;

use crate::common::{Client, Running, Script, config, events, serve_script};
use inference::Grammar;
use serde_json::{Value, json};

/// A chat template with the markers that identify Qwen's format.
const HERMES: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

/// A template in LFM2's format, whose marks are special tokens.
const LFM2: &str = "<|tool_list_start|>{{ tools }}<|tool_list_end|>";
const LFM2_SPECIALS: &[&str] = &["<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"];

fn hermes() -> Running {
    serve_script(&config(), Script::writing(HERMES, &[]), |model| {
        model.with_context(2000)
    })
}

/// The result of a reply, independent of the API.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<(String, Value)>,
    /// Why the reply ended, in the API's own word.
    pub(crate) end: String,
}

struct Case {
    said: &'static str,
    content: &'static str,
    reasoning: &'static str,
    calls: &'static [(&'static str, &'static str)],
    /// Calls that a stream has started before the fault, with their partial arguments.
    begun: &'static [(&'static str, &'static str)],
}

impl Case {
    /// The expected result for streams that pass on partial calls.
    fn in_parts(&self, called: &str, not: &str) -> Outcome {
        let mut outcome = self.outcome(called, not);
        let begun = |(name, json): &(&str, &str)| (String::from(*name), Value::from(*json));
        outcome.calls.splice(0..0, self.begun.iter().map(begun));
        outcome
    }

    fn outcome(&self, called: &str, not: &str) -> Outcome {
        let call = |(name, json): &(&str, &str)| {
            let json = serde_json::from_str(json).unwrap();
            (String::from(*name), json)
        };
        Outcome {
            content: self.content.into(),
            reasoning: self.reasoning.into(),
            calls: self.calls.iter().map(call).collect(),
            end: if self.calls.is_empty() { not } else { called }.into(),
        }
    }
}

const CASES: &[Case] = &[
    Case {
        said: r#"<tool_call>⏎{"name": "f", "arguments": {"a": [1, "x"]}}⏎</tool_call>"#,
        content: "",
        reasoning: "",
        calls: &[("f", r#"{"a": [1, "x"]}"#)],
        begun: &[],
    },
    Case {
        said: r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>⏎<tool_call>{"name": "g", "arguments": {}}</tool_call>"#,
        content: "",
        reasoning: "",
        calls: &[("f", r#"{"a": 1}"#), ("g", "{}")],
        begun: &[],
    },
    Case {
        said: r#"Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>"#,
        content: "Let me see.",
        reasoning: "",
        calls: &[("f", "{}")],
        begun: &[],
    },
    Case {
        said: r#"<think>⏎hm ⏎</think>⏎⏎<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>"#,
        content: "",
        reasoning: "hm",
        calls: &[("f", r#"{"a": 1}"#)],
        begun: &[],
    },
    Case {
        said: "<think>two words</think>⏎⏎The answer.",
        content: "The answer.",
        reasoning: "two words",
        calls: &[],
        begun: &[],
    },
    // The call becomes malformed after its name and a part of its arguments were sent.
    Case {
        said: r#"<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> end"#,
        content: r#"<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> end"#,
        reasoning: "",
        calls: &[],
        begun: &[("f", r#"{"a": 1"#)],
    },
    // White space before the call is content, too.
    Case {
        said: r#"So.⏎⏎<tool_call>{"name": "f", "arguments": {"a"}}</tool_call>"#,
        content: "So.\n\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"}}</tool_call>",
        reasoning: "",
        calls: &[],
        begun: &[("f", r#"{"a""#)],
    },
    // The call is truncated.
    Case {
        said: r#"<tool_call>{"name": "f", "arguments": {"a": "#,
        content: r#"<tool_call>{"name": "f", "arguments": {"a": "#,
        reasoning: "",
        calls: &[],
        begun: &[("f", r#"{"a": "#)],
    },
    // A well-formed call follows a malformed one, and becomes the first call.
    Case {
        said: r#"<tool_call>{"name": "f", "arguments": 3}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>"#,
        content: r#"<tool_call>{"name": "f", "arguments": 3}</tool_call>"#,
        reasoning: "",
        calls: &[("g", "{}")],
        begun: &[],
    },
    Case {
        said: "No tool is needed; write <tool_cal and {\"name\": 1}",
        content: "No tool is needed; write <tool_cal and {\"name\": 1}",
        reasoning: "",
        calls: &[],
        begun: &[],
    },
];

/// Adds fields to a request body.
fn with(mut body: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn functions() -> Value {
    let tool = |name: &str| {
        let parameters = json!({"type": "object", "properties": {"a": {}}});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    json!([tool("f"), tool("g")])
}

/// Parses a call's arguments. Incomplete arguments are returned as a string.
fn arguments(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_else(|_| json.into())
}

/// Checks all cases, streamed and unstreamed. `in_parts` is whether streams pass on partial calls.
fn check_cases(
    (called, not): (&str, &str),
    in_parts: bool,
    outcome: impl Fn(&str) -> Outcome,
    streamed: impl Fn(&str) -> Outcome,
) {
    for case in CASES {
        let expected = case.outcome(called, not);
        assert_eq!(outcome(case.said), expected, "{}", case.said);
        let expected = match in_parts {
            true => case.in_parts(called, not),
            false => expected,
        };
        assert_eq!(streamed(case.said), expected, "streamed {}", case.said);
    }
}

const CHAT: &str = "/v1/chat/completions";

pub(crate) fn openai(said: &str, fields: &Value) -> Value {
    let body = json!({"messages": [{"role": "user", "content": format!("say:{said}")}],
        "tools": functions()});
    with(body, fields)
}

pub(crate) fn openai_whole(client: &Client, body: &Value) -> Outcome {
    let reply = client.post(CHAT, body).expect(200);
    let choice = &reply["choices"][0];
    let message = &choice["message"];
    let mut ids = Vec::new();
    let call = |call: &Value| {
        assert_eq!(call["type"], "function");
        ids.push(call["id"].as_str().unwrap().to_owned());
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let name = call["function"]["name"].as_str().unwrap();
        (name.to_owned(), serde_json::from_str(arguments).unwrap())
    };
    let calls: Vec<_> = match message.get("tool_calls") {
        None => {
            assert!(message["content"].is_string());
            Vec::new()
        }
        Some(calls) => calls.as_array().unwrap().iter().map(call).collect(),
    };
    assert!(ids.iter().all(|id| id.starts_with("call_")), "{ids:?}");
    ids.dedup();
    assert_eq!(ids.len(), calls.len());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Outcome {
        content: text(&message["content"]),
        reasoning: text(&message["reasoning_content"]),
        calls,
        end: text(&choice["finish_reason"]),
    }
}

pub(crate) fn openai_streamed(client: &Client, body: &Value) -> Outcome {
    let reply = client.post(CHAT, &with(body.clone(), &json!({"stream": true})));
    let events = events(&reply);
    assert_eq!(events.last().unwrap().1, Value::Null);
    let mut outcome = Outcome::default();
    let mut calls: Vec<(String, String)> = Vec::new();
    for (_, chunk) in &events[..events.len() - 1] {
        let choice = &chunk["choices"][0];
        assert_eq!(outcome.end, "", "nothing comes after the end");
        if let Some(end) = choice["finish_reason"].as_str() {
            outcome.end = end.into();
        }
        let delta = &choice["delta"];
        outcome.content += delta["content"].as_str().unwrap_or_default();
        outcome.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let (index, function) = (call["index"].as_u64().unwrap() as usize, &call["function"]);
            let arguments = function["arguments"].as_str().unwrap();
            match call["id"].as_str() {
                // Id and name arrive first, and exactly once.
                Some(id) => {
                    assert!(id.starts_with("call_"), "{id}");
                    assert_eq!((index, arguments), (calls.len(), ""));
                    assert_eq!(call["type"], "function");
                    calls.push((function["name"].as_str().unwrap().into(), String::new()));
                }
                None => {
                    assert_eq!(function.get("name"), None);
                    calls[index].1 += arguments;
                }
            }
        }
    }
    let call = |(name, json): (String, String)| (name, arguments(&json));
    outcome.calls = calls.into_iter().map(call).collect();
    outcome
}

#[test]
fn openai_replies_are_read_alike_whole_and_streamed() {
    let server = hermes();
    let client = server.client();
    check_cases(
        ("tool_calls", "stop"),
        true,
        |said| openai_whole(&client, &openai(said, &json!({}))),
        |said| openai_streamed(&client, &openai(said, &json!({}))),
    );
}

/// Arguments must arrive while the model writes them, without delay by the server.
#[test]
fn arguments_come_piece_by_piece() {
    let server = hermes();
    let client = server.client();
    let said = CASES[0].said;
    let body = openai(said, &json!({"stream": true}));
    let pieces: Vec<String> = events(&client.post(CHAT, &body))
        .iter()
        .filter_map(|(_, chunk)| {
            let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
            Some(call["function"]["arguments"].as_str()?.to_owned())
        })
        .collect();
    // The first piece has the tool's name. Afterwards, the script writes one byte per token.
    let json = r#"{"a": [1, "x"]}"#;
    assert_eq!(pieces.concat(), json);
    assert_eq!(pieces.len(), 1 + json.len());
    let body = anthropic(said, &json!({"stream": true}));
    let pieces: Vec<String> = events(&client.post(MESSAGES, &body))
        .iter()
        .filter_map(|(_, data)| Some(data["delta"]["partial_json"].as_str()?.to_owned()))
        .collect();
    assert_eq!(pieces.concat(), json);
    assert_eq!(pieces.len(), json.len());
}

#[test]
fn without_tools_calls_are_text_and_reasoning_is_not() {
    let server = hermes();
    let client = server.client();
    let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    for fields in [json!({"tools": null}), json!({"tool_choice": "none"})] {
        let body = openai(&format!("<think>hm</think>{call}"), &fields);
        let expected = Outcome {
            content: call.into(),
            reasoning: "hm".into(),
            end: "stop".into(),
            ..Outcome::default()
        };
        assert_eq!(openai_whole(&client, &body), expected);
        assert_eq!(openai_streamed(&client, &body), expected);
    }
}

#[test]
fn special_tokens_are_markers() {
    let script = Script::writing(LFM2, LFM2_SPECIALS);
    let server = serve_script(&config(), script, |model| model.with_context(2000));
    let client = server.client();
    let said = "So. <|tool_call_start|>[f(a=1), g()]<|tool_call_end|><|im_end|>";
    let expected = Outcome {
        content: "So.".into(),
        calls: vec![("f".into(), json!({"a": 1})), ("g".into(), json!({}))],
        end: "tool_calls".into(),
        ..Outcome::default()
    };
    let body = openai(said, &json!({}));
    assert_eq!(openai_whole(&client, &body), expected);
    assert_eq!(openai_streamed(&client, &body), expected);
}

#[test]
fn a_reply_that_is_cut_gives_what_it_has() {
    let server = hermes();
    let client = server.client();
    let body = openai(CASES[0].said, &json!({"max_tokens": 30}));
    let expected = Outcome {
        content: CASES[0].said.replace('⏎', "\n")[..30].into(),
        end: "length".into(),
        ..Outcome::default()
    };
    assert_eq!(openai_whole(&client, &body), expected);
    assert_eq!(openai_streamed(&client, &body), expected);
}

#[test]
fn one_call_at_most_where_parallel_calls_are_off() {
    let server = hermes();
    let client = server.client();
    let body = openai(CASES[1].said, &json!({"parallel_tool_calls": false}));
    let expected = Outcome {
        calls: vec![("f".into(), json!({"a": 1}))],
        end: "tool_calls".into(),
        ..Outcome::default()
    };
    assert_eq!(openai_whole(&client, &body), expected);
    assert_eq!(openai_streamed(&client, &body), expected);
}

/// The grammar of the last request.
pub(crate) fn lark(server: &Running) -> String {
    match server.state.last_options().constraints.grammar {
        Some(Grammar::Lark(text)) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_are_forced_by_grammars() {
    let server = hermes();
    let client = server.client();
    let body = openai(CASES[1].said, &json!({"tool_choice": "required"}));
    let outcome = openai_whole(&client, &body);
    assert_eq!(outcome, CASES[1].outcome("tool_calls", "stop"));
    let grammar = lark(&server);
    assert!(grammar.contains("call: call_0 | call_1\n"), "{grammar}");
    assert!(grammar.contains("call)*"), "{grammar}");

    let named = json!({"type": "function", "function": {"name": "g"}});
    let said = r#"<tool_call>{"name": "g", "arguments": {}}</tool_call>"#;
    let body = openai(said, &json!({"tool_choice": named}));
    let outcome = openai_streamed(&client, &body);
    assert_eq!(outcome.calls, [("g".into(), json!({}))]);
    let grammar = lark(&server);
    assert!(
        grammar.starts_with("start: call\ncall: call_0\n"),
        "{grammar}"
    );
    assert!(!grammar.contains("\"f\""), "{grammar}");

    // The reply must first close the reasoning that the prompt opened.
    let fields = json!({"tool_choice": "required", "continue_final_message": true, "messages": [
        {"role": "user", "content": "say:</think>"},
        {"role": "assistant", "content": "<think>"},
    ]});
    openai_whole(&client, &openai("", &fields));
    let grammar = lark(&server);
    assert!(
        grammar.starts_with("start: \"</think>\\n\\n\" call"),
        "{grammar}"
    );
}

/// A chat template that ignores tools.
const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}";

#[test]
fn a_model_without_a_format_of_calls_gets_a_generic_one() {
    let server = serve_script(&config(), Script::writing(PLAIN, &[]), |model| {
        model.with_context(4000)
    });
    let client = server.client();
    for case in [&CASES[0], &CASES[1], &CASES[2], &CASES[5]] {
        let body = openai(case.said, &json!({}));
        let expected = case.outcome("tool_calls", "stop");
        assert_eq!(openai_whole(&client, &body), expected, "{}", case.said);
        let expected = case.in_parts("tool_calls", "stop");
        assert_eq!(openai_streamed(&client, &body), expected, "{}", case.said);
    }
    openai_whole(
        &client,
        &openai(CASES[1].said, &json!({"tool_choice": "required"})),
    );
    let grammar = lark(&server);
    assert!(grammar.contains("call: call_0 | call_1\n"), "{grammar}");
    assert!(grammar.contains("<tool_call>"), "{grammar}");

    let call = json!([{"id": "1", "type": "function",
        "function": {"name": "f", "arguments": "{\"a\": 1}"}}]);
    let mut body = openai("", &json!({}));
    body["messages"] = json!([
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": null, "tool_calls": call},
        {"role": "tool", "tool_call_id": "1", "content": "20 C"},
    ]);
    let text = client.post("/apply-template", &body).expect(200);
    let text = text["prompt"].as_str().unwrap();
    assert!(
        text.starts_with("system: You can call functions."),
        "{text}"
    );
    for part in [
        "\"name\":\"f\"",
        "\"name\":\"g\"",
        "assistant: <tool_call>\n{",
        "user: <tool_response>\n20 C\n</tool_response>",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn calls_that_cannot_be_forced_are_refused() {
    let server = hermes();
    let client = server.client();
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (fields, param) in [
        (json!({"tool_choice": named("h")}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (
            json!({"tool_choice": {"type": "allowed_tools"}}),
            "tool_choice",
        ),
        (
            json!({"tool_choice": "required", "tools": []}),
            "tool_choice",
        ),
        (json!({"tools": [named("a b")]}), "tools[0]"),
        (json!({"tools": [named("")]}), "tools[0]"),
    ] {
        let error = client.post(CHAT, &openai("x", &fields)).expect(400);
        assert_eq!(error["error"]["param"], param, "{fields}");
    }
    // In this format, arguments are not JSON, and their syntax does not express all schemas.
    let script = Script::writing(LFM2, LFM2_SPECIALS);
    let server = serve_script(&config(), script, |model| model.with_context(2000));
    let schema = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}});
    let fields = json!({"tool_choice": "required", "tools": [{"type": "function",
        "function": {"name": "f", "parameters": schema}}]});
    let body = openai("x", &fields);
    let error = server.client().post(CHAT, &body).expect(400);
    assert_eq!(error["error"]["param"], "tool_choice");
    let message = error["error"]["message"].as_str().unwrap();
    for part in ["lfm2", "'f'", "'pattern'"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn replies_that_match_a_schema_are_answers() {
    let server = hermes();
    let client = server.client();
    // The prompt opens the reasoning, but a reply with a schema has no reasoning.
    let fields = json!({"response_format": {"type": "json_object"}, "continue_final_message": true,
    "tool_choice": "none", "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "<think>"},
    ]});
    let outcome = openai_whole(&client, &openai("", &fields));
    assert_eq!(
        (outcome.content.as_str(), outcome.reasoning.as_str()),
        ("{\"a\":1}", "")
    );
    // The server must not parse raw continuations either.
    let body = json!({"prompt": "say:<think>a</think>b", "max_tokens": 50});
    let reply = client.post("/v1/completions", &body).expect(200);
    assert_eq!(reply["choices"][0]["text"], "<think>a</think>b");
}

const MESSAGES: &str = "/v1/messages";

fn anthropic(said: &str, fields: &Value) -> Value {
    let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
    let body = json!({
        "max_tokens": 500,
        "messages": [{"role": "user", "content": format!("say:{said}")}],
        "tools": [tool("f"), tool("g")],
    });
    with(body, fields)
}
