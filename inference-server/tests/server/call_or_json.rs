//! Tests of tools together with a schema for the reply, in chat completions and Responses. The
//! schema governs only texts, as in OpenAI's API.

use crate::common::{Running, Script, config, events, serve_script};
use crate::tools::{Outcome, lark, openai, openai_streamed, openai_whole};
use inference::Grammar;
use serde_json::{Value, json};

/// A chat template with the markers that identify Qwen's format.
const HERMES: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

/// JSON with the marks of a call inside a string. It is not a call.
const JSON: &str = r#"{"a": "<tool_call>{}</tool_call> <think>x</think>"}"#;

const CALL: &str = r#"<tool_call>⏎{"name": "f", "arguments": {"a": 1}}⏎</tool_call>"#;

fn server(template: &'static str) -> Running {
    serve_script(&config(), Script::writing(template, &[]), |model| {
        model.with_context(4000)
    })
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
}

fn format() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}})
}

#[test]
fn a_chat_reply_is_a_call_or_json() {
    let server = server(HERMES);
    let client = server.client();
    let json = Outcome {
        content: JSON.into(),
        end: "stop".into(),
        ..Outcome::default()
    };
    let call = Outcome {
        calls: vec![("f".into(), json!({"a": 1}))],
        end: "tool_calls".into(),
        ..Outcome::default()
    };
    for choice in [Value::Null, json!("auto")] {
        for (said, expected) in [(JSON, &json), (CALL, &call)] {
            let fields = json!({"response_format": format(), "tool_choice": choice});
            let body = openai(said, &fields);
            assert_eq!(&openai_whole(&client, &body), expected, "{said}");
            assert_eq!(&openai_streamed(&client, &body), expected, "{said}");
            let grammar = lark(&server);
            assert!(
                grammar.starts_with("start: (calls | answer)\ncalls: call"),
                "{grammar}"
            );
            let rule = grammar
                .lines()
                .find_map(|l| l.strip_prefix("answer: %json "));
            let mut rule: Value = serde_json::from_str(rule.unwrap()).unwrap();
            rule.as_object_mut().unwrap().remove("x-guidance");
            assert_eq!(rule, schema());
        }
    }
    // The prompt has opened the reasoning, so the reply closes it first.
    for (said, expected) in [(JSON, &json), (CALL, &call)] {
        let fields = json!({"response_format": format(), "continue_final_message": true,
        "messages": [
            {"role": "user", "content": format!("say:</think>⏎⏎{said}")},
            {"role": "assistant", "content": "<think>"},
        ]});
        let body = openai("", &fields);
        assert_eq!(&openai_whole(&client, &body), expected, "{said}");
        assert_eq!(&openai_streamed(&client, &body), expected, "{said}");
        let start = r#"start: "</think>\n\n" (calls | answer)"#;
        assert!(lark(&server).starts_with(start), "{}", lark(&server));
    }
}

#[test]
fn a_forced_call_ignores_the_schema() {
    let server = server(HERMES);
    let client = server.client();
    let named = json!({"type": "function", "function": {"name": "f"}});
    for (choice, calls) in [(json!("required"), 2), (named, 1)] {
        let plain = openai(CALL, &json!({"tool_choice": choice}));
        let expected = openai_whole(&client, &plain);
        assert_eq!(expected.calls.len(), 1);
        let grammar = lark(&server);
        assert_eq!(grammar.matches("%json").count(), calls, "{grammar}");
        let fields = json!({"tool_choice": choice, "response_format": format()});
        let body = openai(CALL, &fields);
        assert_eq!(openai_whole(&client, &body), expected);
        assert_eq!(openai_streamed(&client, &body), expected);
        assert_eq!(lark(&server), grammar);
        // The schema is still checked.
        let bad = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": 3}});
        let fields = json!({"tool_choice": choice, "response_format": bad});
        client
            .post("/v1/chat/completions", &openai(CALL, &fields))
            .expect(400);
    }
    // Without a call, only the schema counts.
    let fields = json!({"tool_choice": "none", "response_format": format()});
    openai_whole(&client, &openai("x", &fields));
    let grammar = server.state.last_options().constraints.grammar;
    assert_eq!(grammar, Some(Grammar::JsonSchema(schema())));
}

/// The items of a response, whole and streamed, without their ids.
fn responses(server: &Running, body: &Value) -> Vec<Value> {
    let without_ids = |response: &Value| -> Vec<Value> {
        let items = response["output"].as_array().unwrap().iter();
        items
            .map(|item| match item["type"].as_str().unwrap() {
                "message" => json!({"text": item["content"][0]["text"]}),
                "function_call" => json!({"name": item["name"], "arguments": item["arguments"]}),
                other => panic!("{other}"),
            })
            .collect()
    };
    let client = server.client();
    let whole = without_ids(&client.post("/v1/responses", body).expect(200));
    let mut body = body.clone();
    body["stream"] = true.into();
    let reply = client.post("/v1/responses", &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let (name, last) = events(&reply).pop().unwrap();
    assert_eq!(name, "response.completed");
    assert_eq!(without_ids(&last["response"]), whole);
    whole
}

#[test]
fn a_response_is_a_call_or_json() {
    let server = server(HERMES);
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let text = json!({"format": {"type": "json_schema", "name": "x", "schema": schema()}});
    let call = json!([{"name": "f", "arguments": r#"{"a": 1}"#}]);
    let auto = json!("auto");
    let named = json!({"type": "function", "name": "f"});
    for (said, choice, expected) in [
        (JSON, &auto, json!([{"text": JSON}])),
        (CALL, &auto, call.clone()),
        (CALL, &json!("required"), call.clone()),
        (CALL, &named, call.clone()),
    ] {
        let body = json!({"input": format!("say:{said}"), "tools": [tool], "tool_choice": choice,
            "text": text});
        let items = responses(&server, &body);
        assert_eq!(Value::from(items), expected, "{said} {choice}");
        let either = lark(&server).contains("(calls | answer)");
        assert_eq!(either, choice == &auto, "{choice}");
    }
}

/// Llama's calls are JSON objects, so a reader cannot tell them from JSON of the schema.
#[test]
fn a_call_that_begins_like_the_schema_is_refused() {
    let server = server("<|python_tag|> {{ tools }}");
    let client = server.client();
    let body = openai("x", &json!({"response_format": format()}));
    let error = client.post("/v1/chat/completions", &body).expect(400);
    assert_eq!(error["error"]["param"], "tool_choice");
    let message = error["error"]["message"].as_str().unwrap();
    for part in ["llama3", "begin", "\"none\"", "\"required\""] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // A list begins with another character.
    let list = json!({"type": "json_object", "schema": {"type": "array"}});
    let body = openai("[1]", &json!({"response_format": list}));
    assert_eq!(openai_whole(&client, &body).content, "[1]");
    for choice in ["none", "required"] {
        let fields = json!({"response_format": format(), "tool_choice": choice});
        client
            .post("/v1/chat/completions", &openai("x", &fields))
            .expect(200);
    }
}
