//! Tool calls and reasoning in the APIs of Anthropic and Ollama.

use super::{
    CASES, MESSAGES, Outcome, anthropic, arguments, check_cases, functions, hermes, lark, with,
};
use crate::common::{Client, events, lines};
use serde_json::{Value, json};

/// Converts Anthropic's blocks to an outcome. Reasoning and text may occur at most once, before the
/// calls.
fn of_blocks(blocks: &[Value], end: &Value) -> Outcome {
    let mut outcome = Outcome {
        end: end.as_str().unwrap_or_default().into(),
        ..Outcome::default()
    };
    let mut ids = Vec::new();
    for block in blocks {
        match block["type"].as_str().unwrap() {
            "thinking" => outcome.reasoning += block["thinking"].as_str().unwrap(),
            "text" => outcome.content += block["text"].as_str().unwrap(),
            "tool_use" => {
                let id = block["id"].as_str().unwrap();
                assert!(!id.is_empty() && !ids.contains(&id), "{id}");
                ids.push(id);
                let name = block["name"].as_str().unwrap();
                outcome.calls.push((name.into(), block["input"].clone()));
            }
            other => panic!("{other}"),
        }
    }
    outcome
}

fn anthropic_whole(client: &Client, body: &Value) -> Outcome {
    let reply = client.post(MESSAGES, body).expect(200);
    of_blocks(reply["content"].as_array().unwrap(), &reply["stop_reason"])
}

fn anthropic_streamed(client: &Client, body: &Value) -> Outcome {
    let reply = client.post(MESSAGES, &with(body.clone(), &json!({"stream": true})));
    let (mut blocks, mut end, mut open) = (Vec::<Value>::new(), Value::Null, false);
    let mut json_text = String::new();
    for (name, data) in events(&reply) {
        assert!(end.is_null() || name == "message_stop", "{name}");
        match name.as_str() {
            "content_block_start" => {
                assert!(!open && data["index"] == blocks.len());
                open = true;
                blocks.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(open && data["index"] == blocks.len() - 1);
                let (block, delta) = (blocks.last_mut().unwrap(), &data["delta"]);
                match delta["type"].as_str().unwrap() {
                    "input_json_delta" => json_text += delta["partial_json"].as_str().unwrap(),
                    "signature_delta" => {}
                    kind => {
                        let field = kind.strip_suffix("_delta").unwrap();
                        let text = block[field].as_str().unwrap().to_owned();
                        block[field] = (text + delta[field].as_str().unwrap()).into();
                    }
                }
            }
            "content_block_stop" => {
                assert!(std::mem::take(&mut open));
                let block = blocks.last_mut().unwrap();
                if block["type"] == "tool_use" {
                    assert_eq!(block["input"], json!({}));
                    block["input"] = arguments(&std::mem::take(&mut json_text));
                }
            }
            "message_delta" => end = data["delta"]["stop_reason"].clone(),
            "message_start" | "ping" | "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    assert!(!open);
    of_blocks(&blocks, &end)
}

#[test]
fn anthropic_replies_are_read_alike_whole_and_streamed() {
    let server = hermes();
    let client = server.client();
    for fields in [
        json!({}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 16}}),
    ] {
        check_cases(
            ("tool_use", "end_turn"),
            true,
            |said| anthropic_whole(&client, &anthropic(said, &fields)),
            |said| anthropic_streamed(&client, &anthropic(said, &fields)),
        );
    }
    assert!(
        server
            .state
            .last_prompt()
            .starts_with("tool f\ntool g\nenable_thinking=true\n")
    );
}

#[test]
fn anthropic_tool_choices() {
    let server = hermes();
    let client = server.client();
    let said = CASES[1].said;
    let fields = json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
    let outcome = anthropic_whole(&client, &anthropic(said, &fields));
    assert_eq!(outcome.calls, [("f".into(), json!({"a": 1}))]);
    assert_eq!(server.state.last_options().constraints.grammar, None);
    for (choice, shapes) in [
        (json!({"type": "any"}), "call: call_0 | call_1\n"),
        (json!({"type": "tool", "name": "g"}), "call: call_0\n"),
    ] {
        let fields = json!({"tool_choice": choice});
        let outcome = anthropic_streamed(&client, &anthropic(said, &fields));
        assert_eq!(outcome.end, "tool_use");
        assert!(lark(&server).contains(shapes), "{fields}");
    }
    for choice in [
        json!({"type": "tool", "name": "h"}),
        json!({"type": "tool"}),
        json!({"type": "some"}),
    ] {
        let body = anthropic(said, &json!({"tool_choice": choice}));
        let error = client.post(MESSAGES, &body).expect(400);
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
}

fn ollama(said: &str, stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": format!("say:{said}")}],
        "tools": functions(), "stream": stream, "think": true,
        "options": {"num_predict": 500}})
}

fn add_line(outcome: &mut Outcome, line: &Value) {
    let message = &line["message"];
    outcome.content += message["content"].as_str().unwrap();
    outcome.reasoning += message["thinking"].as_str().unwrap_or_default();
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        assert!(function["arguments"].is_object(), "{call}");
        let name = function["name"].as_str().unwrap().to_owned();
        outcome.calls.push((name, function["arguments"].clone()));
    }
    if line["done"] == true {
        outcome.end = line["done_reason"].as_str().unwrap().into();
    }
}

#[test]
fn ollama_replies_are_read_alike_whole_and_streamed() {
    let server = hermes();
    let client = server.client();
    check_cases(
        ("stop", "stop"),
        false,
        |said| {
            let mut outcome = Outcome::default();
            add_line(
                &mut outcome,
                &client.post("/api/chat", &ollama(said, false)).expect(200),
            );
            outcome
        },
        |said| {
            let mut outcome = Outcome::default();
            for line in lines(&client.post("/api/chat", &ollama(said, true))) {
                assert_eq!(outcome.end, "", "nothing comes after the end");
                add_line(&mut outcome, &line);
            }
            outcome
        },
    );
}

#[test]
fn ollama_generates_with_thinking_and_tells_of_it() {
    let server = hermes();
    let client = server.client();
    let body = json!({"prompt": "say:<think>hm</think>so", "think": true, "stream": false,
        "options": {"num_predict": 500}});
    let reply = client.post("/api/generate", &body).expect(200);
    assert_eq!(
        (&reply["thinking"], &reply["response"]),
        (&json!("hm"), &json!("so"))
    );
    // The server does not parse a raw continuation.
    let body = with(body, &json!({"raw": true, "think": null}));
    let reply = client.post("/api/generate", &body).expect(200);
    assert_eq!(reply["response"], "<think>hm</think>so");
    let shown = client
        .post("/api/show", &json!({"model": "tiny"}))
        .expect(200);
    let can = shown["capabilities"].as_array().unwrap();
    assert!(
        can.contains(&json!("tools")) && can.contains(&json!("thinking")),
        "{can:?}"
    );
}
