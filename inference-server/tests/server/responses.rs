//! Tests of OpenAI's Responses API, streamed and unstreamed.

use crate::common::{Running, Script, config, events, serve, serve_script};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

#[test]
fn a_text_is_answered() {
    let server = serve(&config());
    let body = json!({"model": "tiny", "instructions": "Be brief.", "input": "say:Guten Tag",
        "metadata": {"a": "b"}});
    let reply = server.client().post(PATH, &body).expect(200);
    assert_eq!(reply["object"], "response");
    assert_eq!(reply["status"], "completed");
    assert_eq!(reply["model"], "tiny");
    assert_eq!(reply["store"], false);
    assert_eq!(reply["instructions"], "Be brief.");
    assert_eq!(reply["metadata"], json!({"a": "b"}));
    assert!(reply["id"].as_str().unwrap().starts_with("resp_"));
    let item = &reply["output"][0];
    assert_eq!(item["type"], "message");
    assert_eq!(item["role"], "assistant");
    assert_eq!(item["content"][0]["type"], "output_text");
    assert_eq!(item["content"][0]["text"], "Guten Tag");
    let prompt = "system: Be brief.\nuser: say:Guten Tag\n";
    assert_eq!(server.state.last_prompt(), prompt);
    assert_eq!(
        reply["usage"],
        json!({
            "input_tokens": prompt.len(),
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens": 9,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt.len() + 9,
        })
    );
}

#[test]
fn tokens_are_counted_as_a_reply_counts_them() {
    let server = serve(&config());
    let client = server.client();
    let count = format!("{PATH}/input_tokens");
    for body in [
        json!({"input": "say:Guten Tag"}),
        json!({"instructions": "Be brief.", "input": [{"role": "user", "content": "say:a"}]}),
    ] {
        let counted = client.post(&count, &body).expect(200);
        let tokens = client.post(PATH, &body).expect(200)["usage"]["input_tokens"].clone();
        assert!(tokens.as_u64() > Some(0));
        let expected = json!({"object": "response.input_tokens", "input_tokens": tokens});
        assert_eq!(counted, expected);
    }
    let stored = json!({"input": "a", "previous_response_id": "resp_1"});
    let message = client.post(&count, &stored).expect(400)["error"]["message"].to_string();
    assert!(message.contains("previous_response_id"), "{message}");
    client.post(&count, &json!({"input": []})).expect(400);
}

#[test]
fn a_reply_that_is_cut_is_incomplete() {
    let server = serve(&config());
    let body = json!({"input": [{"role": "user", "content": "say:hello"}], "max_output_tokens": 3});
    let reply = server.client().post(PATH, &body).expect(200);
    assert_eq!(reply["status"], "incomplete");
    assert_eq!(
        reply["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(reply["output"][0]["status"], "incomplete");
    assert_eq!(reply["output"][0]["content"][0]["text"], "hel");
}

/// Checks the rules that every stream must follow, and returns the events and the final response.
#[track_caller]
fn streamed(server: &Running, body: &Value) -> (Vec<Value>, Value) {
    let mut body = body.clone();
    body["stream"] = true.into();
    let reply = server.client().post(PATH, &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let all: Vec<Value> = events(&reply)
        .into_iter()
        .map(|(name, event)| {
            assert_eq!(event["type"], name.as_str());
            event
        })
        .collect();
    for (i, event) in all.iter().enumerate() {
        assert_eq!(event["sequence_number"], i, "{event}");
    }
    assert_eq!(all[0]["type"], "response.created");
    assert_eq!(all[1]["type"], "response.in_progress");
    let last = all.last().unwrap()["response"].clone();
    assert_eq!(all[0]["response"]["id"], last["id"]);
    (all, last)
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<&str> = Vec::new();
    for event in events {
        let kind = event["type"].as_str().unwrap();
        let kind = kind.strip_prefix("response.").unwrap_or(kind);
        if kinds.last() != Some(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

#[test]
fn a_stream_tells_of_each_item() {
    let server = serve(&config());
    let (events, last) = streamed(&server, &json!({"input": "say:hello"}));
    assert_eq!(
        kinds(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
    );
    let text: String = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, "hello");
    assert_eq!(last["output"][0]["content"][0]["text"], "hello");
    let done = events
        .iter()
        .find(|e| e["type"] == "response.output_item.done")
        .unwrap();
    assert_eq!(done["item"], last["output"][0]);
    assert_eq!(last["usage"]["output_tokens"], 5);
}

/// A model that writes calls and reasoning in Qwen 3's format.
fn caller() -> Running {
    let template = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";
    serve_script(&config(), Script::writing(template, &[]), |model| {
        model.with_context(10_000)
    })
}

fn tool() -> Value {
    json!({"type": "function", "name": "weather", "description": "d", "strict": true,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}})
}

#[test]
fn reasoning_and_calls_are_items_of_their_own() {
    let server = caller();
    let says = "say:<think>hm</think>ok <tool_call>⏎{\"name\": \"weather\", \"arguments\": {\"city\": \
                \"Bonn\"}}⏎</tool_call>";
    let body = json!({"input": says, "tools": [tool()]});
    let complete = server.client().post(PATH, &body).expect(200);
    let (events, last) = streamed(&server, &body);
    for reply in [&complete, &last] {
        let output = reply["output"].as_array().unwrap();
        let kinds: Vec<&str> = output.iter().map(|i| i["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call"]);
        assert_eq!(
            output[0]["content"],
            json!([{"type": "reasoning_text", "text": "hm"}])
        );
        assert_eq!(
            output[1]["content"][0]["text"].as_str().unwrap().trim(),
            "ok"
        );
        assert_eq!(output[2]["name"], "weather");
        let arguments: Value =
            serde_json::from_str(output[2]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": "Bonn"}));
        assert!(!output[2]["call_id"].as_str().unwrap().is_empty());
        assert!(
            reply["usage"]["output_tokens_details"]["reasoning_tokens"]
                .as_u64()
                .unwrap()
                > 0
        );
    }
    let arguments: String = events
        .iter()
        .filter(|e| e["type"] == "response.function_call_arguments.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    assert_eq!(arguments, last["output"][2]["arguments"].as_str().unwrap());

    // The client sends the model's output again, with the result of the call.
    let mut input = vec![json!({"role": "user", "content": "Bonn?"})];
    input.extend(last["output"].as_array().unwrap().iter().cloned());
    let id = &last["output"][2]["call_id"];
    input.push(json!({"type": "function_call_output", "call_id": id, "output": "rain"}));
    let body = json!({"input": input, "tools": [tool()]});
    server.client().post(PATH, &body).expect(200);
    let prompt = server.state.last_prompt();
    let order = ["tool weather", "user: Bonn?", "call weather", "tool: rain"];
    let places: Vec<usize> = order
        .iter()
        .map(|part| prompt.find(part).unwrap())
        .collect();
    assert!(places.is_sorted(), "{prompt}");
}

#[test]
fn schemas_bind_the_answer() {
    let server = serve(&config());
    let format = json!({"type": "json_schema", "name": "x", "schema": {"type": "object"}});
    let body = json!({"input": "x", "text": {"format": format}});
    let reply = server.client().post(PATH, &body).expect(200);
    assert_eq!(reply["output"][0]["content"][0]["text"], "{\"a\":1}");
    assert_eq!(reply["text"]["format"]["schema"], json!({"type": "object"}));
    assert!(server.state.last_options().constraints.grammar.is_some());
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let server = serve(&config());
    for (field, value) in [
        ("previous_response_id", json!("resp_1")),
        ("conversation", json!("conv_1")),
        ("background", json!(true)),
        ("prompt", json!({"id": "x"})),
        ("top_logprobs", json!(3)),
        ("truncation", json!("auto")),
        ("temperature", json!(3)),
        ("max_output_tokens", json!(0)),
        ("tool_choice", json!({"type": "web_search"})),
        ("tool_choice", json!("required")),
    ] {
        let mut body = json!({"input": "x"});
        body[field] = value;
        let error = server.client().post(PATH, &body).expect(400);
        assert_eq!(error["error"]["param"], field, "{error}");
    }
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "messages"),
        (
            json!({"input": "x", "tools": [{"type": "web_search"}]}),
            "tools[0]",
        ),
        (
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            "input[0]",
        ),
    ] {
        let error = server.client().post(PATH, &body).expect(400);
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

#[test]
fn a_reply_that_fails_says_so() {
    let server = serve(&config());
    let body = json!({"input": "!fail say:hello world"});
    let error = server.client().post(PATH, &body).expect(500);
    assert_eq!(error["error"]["code"], "internal_error");
    let (events, last) = streamed(&server, &body);
    assert_eq!(last["status"], "failed");
    assert_eq!(last["error"]["code"], "internal_error");
    let said = &events[events.len() - 2];
    assert_eq!(
        (&said["type"], &said["code"]),
        (&json!("error"), &json!("internal_error"))
    );
    server.idle();
}
