//! Tests of OpenAI's API, streamed and unstreamed, and of its errors.

use crate::common::{Reply, Script, config, events, serve, serve_script};
use serde_json::{Value, json};

fn ask(text: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": text}]})
}

fn with(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const CHAT: &str = "/v1/chat/completions";

#[test]
fn models_are_listed_and_found() {
    let server = serve(&config());
    let client = server.client();
    let list = client.get("/v1/models").expect(200);
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "tiny");
    assert_eq!(list["data"][0]["max_model_len"], 1000);
    assert_eq!(client.get("/v1/models/tiny").expect(200), list["data"][0]);
    let error = client.get("/v1/models/owner/other").expect(404);
    assert_eq!(error["error"]["code"], "model_not_found");
    assert!(error["error"]["message"].as_str().unwrap().contains("tiny"));
}

#[test]
fn a_chat_is_answered() {
    let server = serve(&config());
    let reply = server.client().post(CHAT, &ask("say:Guten Tag"));
    assert!(reply.header("x-request-id").is_some());
    let body = reply.expect(200);
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "tiny");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "Guten Tag");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["logprobs"], Value::Null);
    let prompt = "user: say:Guten Tag\n".len();
    assert_eq!(
        body["usage"],
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": 9,
            "total_tokens": prompt + 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        })
    );
    // These are OpenAI's default values.
    let options = server.state.last_options();
    assert_eq!(
        (options.sampling.temperature, options.sampling.top_p),
        (1.0, 1.0)
    );
    assert!(options.interrupt.deadline.is_some() && options.interrupt.cancel.is_some());
    // By default, a reply may fill the context.
    assert_eq!(options.max_tokens, 1000 - prompt);
}

#[test]
fn what_the_model_recommends_holds_until_a_request_says_otherwise() {
    let mut defaults = inference::SamplingDefaults::default();
    (defaults.temperature, defaults.top_p, defaults.top_k) = (Some(0.6), Some(0.95), Some(20));
    defaults.repeat_penalty = Some(1.05);
    let script = Script::new().recommending(defaults);
    let server = serve_script(&config(), script, |model| model.with_context(1000));
    let messages = json!([{"role": "user", "content": "say:a"}]);
    let ask = |path: &str, body: Value| {
        let reply = server.client().post(path, &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        let o = server.state.last_options();
        let reply: Value = serde_json::from_str(&reply.text()).unwrap();
        let s = o.sampling;
        let used = (s.temperature, s.top_p, s.top_k, o.penalties.repeat_penalty);
        (used, reply)
    };
    let (used, _) = ask("/v1/chat/completions", json!({"messages": messages}));
    assert_eq!(used, (0.6, 0.95, 20, 1.05));
    let (used, _) = ask(
        "/v1/chat/completions",
        json!({"messages": messages, "temperature": 0, "top_k": 0, "repetition_penalty": 1}),
    );
    assert_eq!(used, (0.0, 0.95, 0, 1.0));
    let (used, reply) = ask("/v1/responses", json!({"input": "say:a", "top_p": 0.5}));
    assert_eq!(used, (0.6, 0.5, 20, 1.05));
    let actual = (
        reply["temperature"].as_f64().unwrap() as f32,
        reply["top_p"].as_f64().unwrap() as f32,
    );
    assert_eq!(actual, (0.6, 0.5));
}

fn chunks(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let mut events = events(reply);
    assert_eq!(events.pop().unwrap().1, Value::Null, "[DONE] is the last");
    events.into_iter().map(|(_, data)| data).collect()
}

#[test]
fn a_stream_has_the_text_in_pieces() {
    let server = serve(&config());
    let body = with(ask("say:abc"), json!({"stream": true}));
    let chunks = chunks(&server.client().post(CHAT, &body));
    assert!(chunks.iter().all(|c| c["system_fingerprint"].is_string()));
    let deltas: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]["delta"]).collect();
    assert_eq!(
        deltas,
        [
            &json!({"role": "assistant", "content": ""}),
            &json!({"content": "a"}),
            &json!({"content": "b"}),
            &json!({"content": "c"}),
            &json!({}),
        ]
    );
    for (i, chunk) in chunks.iter().enumerate() {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        // Without a request for usage, no chunk may have counts or an empty list of choices.
        assert!(chunk.get("usage").is_none());
        let finish = &chunk["choices"][0]["finish_reason"];
        assert_eq!(*finish, if i == 4 { json!("stop") } else { Value::Null });
    }
}

#[test]
fn usage_is_the_last_chunk_where_asked_for() {
    let server = serve(&config());
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = chunks(&server.client().post(CHAT, &with(ask("say:abc"), fields)));
    let (last, others) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 3);
    assert!(others.iter().all(|chunk| chunk["usage"].is_null()));
    let body = with(ask("x"), json!({"stream_options": {"include_usage": true}}));
    let error = server.client().post(CHAT, &body).expect(400);
    assert_eq!(error["error"]["param"], "stream_options");
}

#[test]
fn options_reach_the_engine() {
    let server = serve(&config());
    let fields = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5,
        "logit_bias": {"65": -100}, "stop": ["END", "\n\n"], "stop_token_ids": [7],
        "seed": 42, "max_completion_tokens": 5, "max_tokens": 99, "ignore_eos": true, "min_tokens": 2,
        "user": "me", "metadata": {"a": "b"}, "unknown_field": 1,
    });
    let body = server
        .client()
        .post(CHAT, &with(ask("say:hello there"), fields));
    let body = body.expect(200);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["choices"][0]["message"]["content"], "hello");
    let o = server.state.last_options();
    assert_eq!(
        (
            o.sampling.temperature,
            o.sampling.top_p,
            o.sampling.top_k,
            o.sampling.min_p
        ),
        (0.5, 0.25, 7, 0.125)
    );
    assert_eq!(
        (
            o.penalties.presence_penalty,
            o.penalties.frequency_penalty,
            o.penalties.repeat_penalty
        ),
        (1.0, -1.0, 1.5)
    );
    assert_eq!(
        o.constraints.logit_bias.into_iter().collect::<Vec<_>>(),
        [(65, -100.0)]
    );
    assert_eq!(o.stop.stop_strings, ["END", "\n\n"]);
    assert_eq!(
        (o.stop.stop_tokens, o.sampling.seed, o.max_tokens),
        (vec![7], Some(42), 5)
    );
    assert!(o.stop.ignore_eos && o.stop.min_tokens == 2);

    let one = with(
        ask("say:a.b"),
        json!({"stop": ".", "max_tokens": 10, "top_p": 0}),
    );
    server.client().post(CHAT, &one).expect(200);
    let o = server.state.last_options();
    assert_eq!(
        (o.stop.stop_strings, o.max_tokens, o.sampling.temperature),
        (vec![String::from(".")], 10, 0.0)
    );
}

#[test]
fn several_choices_are_several_replies() {
    let server = serve(&config());
    let body = with(ask("say:ab"), json!({"n": 3, "seed": 5}));
    let reply = server.client().post(CHAT, &body).expect(200);
    assert_eq!(reply["choices"].as_array().unwrap().len(), 3);
    assert_eq!(reply["choices"][2]["index"], 2);
    // The prompt counts once for all choices.
    let prompt = "user: say:ab\n".len();
    assert_eq!(reply["usage"]["prompt_tokens"], prompt);
    assert_eq!(reply["usage"]["completion_tokens"], 6);
    let asked = server.state.asked();
    let seeds: Vec<_> = asked.iter().map(|a| a.options.sampling.seed).collect();
    assert_eq!(seeds, [Some(5), Some(6), Some(7)]);

    let body = with(ask("say:ab"), json!({"n": 2, "stream": true}));
    let chunks = chunks(&server.client().post(CHAT, &body));
    for i in 0..2 {
        let text: String = chunks
            .iter()
            .filter(|c| c["choices"][0]["index"] == i)
            .filter_map(|c| c["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, "ab");
    }
}

/// The server must read all replies of a request concurrently. The engine cancels a reply with too
/// many unread tokens, because it takes the reader for a slow client.
#[test]
fn long_choices_are_read_side_by_side() {
    let server = serve(&config());
    let body = with(ask("!long"), json!({"n": 3, "max_tokens": 900}));
    let reply = server.client().post(CHAT, &body).expect(200);
    assert_eq!(reply["usage"]["completion_tokens"], 2700);
    let body = json!({"prompt": ["!long", "!long"], "max_tokens": 900});
    let reply = server.client().post("/v1/completions", &body).expect(200);
    assert_eq!(reply["usage"]["completion_tokens"], 1800);
}

#[test]
fn log_probabilities_come_when_asked_for() {
    let server = serve(&config());
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let reply = server
        .client()
        .post(CHAT, &with(ask("say:ab"), fields.clone()));
    let content = reply.expect(200)["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(content.as_array().unwrap().len(), 2);
    assert_eq!(content[0]["token"], "a");
    assert_eq!(content[0]["bytes"], json!([97]));
    assert_eq!(content[0]["logprob"], -0.5);
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let streamed = with(with(ask("say:ab"), fields), json!({"stream": true}));
    let chunks = chunks(&server.client().post(CHAT, &streamed));
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(json!(streamed), content);
}

#[test]
fn response_formats_are_grammars() {
    let server = serve(&config());
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    for (format, expected) in [
        (
            json!({"type": "json_object"}),
            Some(json!({"type": "object"})),
        ),
        (
            json!({"type": "json_object", "schema": schema}),
            Some(schema.clone()),
        ),
        (
            json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}),
            Some(schema.clone()),
        ),
        (json!({"type": "text"}), None),
    ] {
        let body = with(ask("x"), json!({"response_format": format}));
        server.client().post(CHAT, &body).expect(200);
        let grammar = server.state.last_options().constraints.grammar;
        let expected = expected.map(inference::Grammar::JsonSchema);
        assert_eq!(grammar, expected);
    }
    // One of llama.cpp's fields is supported, and another is refused.
    let body = with(ask("x"), json!({"json_schema": schema}));
    server.client().post(CHAT, &body).expect(200);
    let grammar = server.state.last_options().constraints.grammar;
    assert_eq!(grammar, Some(inference::Grammar::JsonSchema(schema)));
    for (field, more) in [
        (
            "json_schema",
            json!({"json_schema": {}, "response_format": {"type": "text"}}),
        ),
        ("grammar", json!({"grammar": "root ::= \"a\""})),
    ] {
        let error = server.client().post(CHAT, &with(ask("x"), more));
        assert_eq!(error.expect(400)["error"]["param"], field);
    }
    let body = json!({"prompt": "x", "grammar": "root ::= \"a\""});
    let error = server.client().post("/v1/completions", &body).expect(400);
    assert_eq!(error["error"]["param"], "grammar");
}

#[test]
fn conversations_reach_the_template() {
    let server = serve(&config());
    let body = json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "assistant", "content": "so it"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": false},
        "continue_final_message": true,
    });
    server.client().post(CHAT, &body).expect(200);
    let prompt = server.state.last_prompt();
    assert!(
        prompt.starts_with("enable_thinking=false\nuser: what now\n"),
        "{prompt}"
    );
    assert!(prompt.contains("call f {\"a\": Number(1)}"), "{prompt}");
    assert!(prompt.ends_with("assistant: so it"), "{prompt}");
}

#[test]
fn bad_requests_name_what_is_wrong() {
    let server = serve(&config());
    let client = server.client();
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    for (fields, param) in [
        (json!({"temperature": 3}), "temperature"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 1.5}), "top_p"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1_000_000}), "n"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -5}), "max_tokens"),
        (json!({"stop": [""]}), "stop[0]"),
        (json!({"stop": vec!["x"; 17]}), "stop"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias"),
        (json!({"logit_bias": {"word": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
        ),
        (json!({"tools": tool}), "tools"),
        (
            json!({"tools": tool, "tool_choice": "required"}),
            "tool_choice",
        ),
        (json!({"functions": []}), "functions"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (
            json!({"messages": [{"role": "user", "content": "!template"}]}),
            "messages",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0]",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": "{"}}]}]}),
            "messages[0].tool_calls[0]",
        ),
        (
            json!({"response_format": {"type": "yaml"}}),
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}),
            "response_format.json_schema.schema",
        ),
    ] {
        let error = client
            .post(CHAT, &with(ask("x"), fields.clone()))
            .expect(400);
        let error = &error["error"];
        assert_eq!(error["type"], "invalid_request_error", "{fields}");
        let actual = error["param"].as_str().unwrap_or_default();
        assert!(actual.starts_with(param), "{fields}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    for body in [
        &b"{"[..],
        b"[]",
        b"\xff",
        b"",
        b"null",
        b"{\"messages\": [1",
    ] {
        let error = client.ask("POST", CHAT, body).expect(400);
        assert_eq!(error["error"]["type"], "invalid_request_error");
    }
    // None of these requests may reach the engine.
    assert_eq!(server.state.started(), 0);
    let error = client
        .post(CHAT, &with(ask("x"), json!({"model": "gpt-9"})))
        .expect(404);
    assert_eq!(error["error"]["code"], "model_not_found");
}

#[test]
fn a_prompt_beyond_the_context_is_told_both_counts() {
    let server = serve(&config());
    let error = server
        .client()
        .post(CHAT, &ask(&"x".repeat(2000)))
        .expect(400);
    let error = &error["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["n_ctx"], 1000);
    assert_eq!(error["n_prompt_tokens"], 2007);
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("2007") && message.contains("1000"),
        "{message}"
    );
    // A reply that reaches the end of the context must stop there and report the reason `length`.
    let body = with(ask("!long"), json!({"max_tokens": 100_000}));
    let reply = server.client().post(CHAT, &body).expect(200);
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["total_tokens"], 1000);
}

#[test]
fn a_request_that_is_refused_at_the_start_has_a_status_even_in_a_stream() {
    let server = serve(&config());
    for stream in [true, false] {
        let body = with(ask("!refuse"), json!({"stream": stream}));
        let error = server.client().post(CHAT, &body).expect(400);
        assert_eq!(error["error"]["message"], "the grammar has no end");
    }
}

#[test]
fn completions_continue_texts_and_ids() {
    let server = serve(&config());
    let client = server.client();
    let path = "/v1/completions";
    let reply = client.post(path, &json!({"prompt": "say:abc"})).expect(200);
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["choices"][0]["text"], "abc");
    assert_eq!(server.state.last_options().max_tokens, 16);
    assert_eq!(server.state.last_prompt(), "say:abc");

    let ids: Vec<u32> = "say:d".bytes().map(u32::from).collect();
    let reply = client
        .post(path, &json!({"prompt": ids, "echo": true}))
        .expect(200);
    assert_eq!(reply["choices"][0]["text"], "say:dd");
    let reply = client
        .post(path, &json!({"prompt": ["say:a", "say:b"], "n": 2}))
        .expect(200);
    let texts: Vec<&str> = reply["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["a", "a", "b", "b"]);
    assert_eq!(reply["usage"]["prompt_tokens"], 10);
    let reply = client
        .post(path, &json!({"prompt": [ids, ids], "logprobs": 1}))
        .expect(200);
    assert_eq!(
        reply["choices"][1]["logprobs"],
        json!({"tokens": ["d"], "token_logprobs": [-0.5], "top_logprobs": [{"d": -0.5}], "text_offset": [0]})
    );
    let body =
        json!({"prompt": "say:ab", "stream": true, "stream_options": {"include_usage": true}});
    let chunks = chunks(&client.post(path, &body));
    let texts: Vec<&str> = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(texts, ["a", "b", ""]);
    assert_eq!(chunks[2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[3]["usage"]["completion_tokens"], 2);

    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": "x", "suffix": "y"}), "suffix"),
        (json!({"prompt": "x", "best_of": 3}), "best_of"),
        (json!({"prompt": "x", "echo": true, "logprobs": 1}), "echo"),
        (json!({"prompt": "x", "logprobs": 6}), "logprobs"),
        (json!({"prompt": vec!["x"; 33]}), "prompt"),
    ] {
        let error = client.post(path, &body).expect(400);
        assert_eq!(error["error"]["param"], param, "{body}");
    }
    for body in [json!({"prompt": ""}), json!({"prompt": [4000]})] {
        client.post(path, &body).expect(400);
    }
}

#[test]
fn embeddings_are_vectors_in_order() {
    let server = serve(&config());
    let client = server.client();
    let path = "/v1/embeddings";
    let reply = client
        .post(path, &json!({"input": ["a", "bcd"]}))
        .expect(200);
    let vector: Vec<f32> = serde_json::from_value(reply["data"][1]["embedding"].clone()).unwrap();
    assert_eq!(vector, [0.0, 1.0]);
    assert_eq!(reply["data"][1]["index"], 1);
    assert_eq!(
        reply["usage"],
        json!({"prompt_tokens": 4, "total_tokens": 4})
    );
    let reply = client
        .post(
            path,
            &json!({"input": "abc", "encoding_format": "base64", "dimensions": 2}),
        )
        .expect(200);
    // 0.0 and 1.0 as little-endian float32.
    assert_eq!(reply["data"][0]["embedding"], "AAAAAAAAgD8=");
    for body in [
        json!({"input": []}),
        json!({"input": ""}),
        json!({"input": "x", "encoding_format": "int8"}),
        json!({"input": "x", "dimensions": 3}),
        json!({"input": vec!["x"; 257]}),
        json!({"input": "x".repeat(1000)}),
        json!({"input": {"a": 1}}),
    ] {
        client.post(path, &body).expect(400);
    }
    // A panic becomes an error, and the next request succeeds.
    client
        .post(path, &json!({"input": "!embedpanic"}))
        .expect(500);
    client.post(path, &json!({"input": "x"})).expect(200);
}

#[test]
fn whole_answers_with_log_probabilities_are_bounded() {
    let mut limits = crate::common::limits();
    limits.whole_logprobs = 100;
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    // Two choices have ten tokens each. Each token has its own log-probability and four
    // alternatives.
    let chat = json!({"messages": [{"role": "user", "content": "!long"}], "n": 2,
        "logprobs": true, "top_logprobs": 4});
    let text = json!({"prompt": "!long", "n": 2, "logprobs": 4});
    let native = json!({"prompt": ["!long", "!long"], "n_probs": 4});
    for (path, body, param) in [
        ("/v1/chat/completions", &chat, "max_completion_tokens"),
        ("/v1/chat/completions", &chat, "max_tokens"),
        ("/v1/completions", &text, "max_tokens"),
        ("/completion", &native, "n_predict"),
    ] {
        let mut body = body.clone();
        body[param] = 11.into();
        let error = client.post(path, &body).expect(400);
        assert_eq!(error["error"]["param"], param, "{path}: {error}");
        assert!(error["error"]["message"].to_string().contains("stream"));
        body[param] = 10.into();
        client.post(path, &body).expect(200);
        body[param] = 11.into();
        body["stream"] = true.into();
        assert_eq!(client.post(path, &body).status, 200, "{path}");
    }
    // If the request sets no length, the reply gets the greatest allowed number of tokens and
    // reports the truncation.
    let reply = client.post("/v1/chat/completions", &chat).expect(200);
    for choice in reply["choices"].as_array().unwrap() {
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 10);
    }
}

#[test]
fn what_a_template_gets_is_bounded() {
    let server = serve(&config());
    let client = server.client();
    let refused = |fields: Value| client.post(CHAT, &with(ask("say:x"), fields)).expect(400);
    let tool = |bytes: usize| {
        json!({"type": "function", "function": {"name": "f",
            "parameters": {"type": "object", "description": "x".repeat(bytes)}}})
    };
    let calls = |n: usize| {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f",
            "arguments": "{}"}});
        json!({"messages": [{"role": "assistant", "tool_calls": vec![call; n]},
            {"role": "user", "content": "say:x"}]})
    };
    let kwargs = json!({"chat_template_kwargs": {"x": "y".repeat(60 << 10)}});
    for fields in [kwargs, calls(128)] {
        let body = with(ask("say:x"), fields);
        client.post("/apply-template", &body).expect(200);
    }
    for (fields, param) in [
        (
            json!({"chat_template_kwargs": {"x": "y".repeat(64 << 10)}}),
            "chat_template_kwargs",
        ),
        (calls(129), "messages[0].tool_calls"),
        (
            json!({"messages": [{"role": "user", "content": "x"},
                {"role": "robot", "content": "x"}]}),
            "messages[1].role",
        ),
        (json!({"tools": [tool(10), tool(64 << 10)]}), "tools[1]"),
        (json!({"tools": vec![tool(60 << 10); 20]}), "tools"),
    ] {
        let error = refused(fields);
        assert_eq!(error["error"]["param"], param, "{error}");
        if param.ends_with("role") {
            let message = error["error"]["message"].to_string();
            for role in ["robot", "system", "developer", "user", "assistant", "tool"] {
                assert!(message.contains(role), "{message}");
            }
        }
    }
}

#[test]
fn a_salt_reaches_the_engine() {
    let server = serve(&config());
    let client = server.client();
    let message = json!([{"role": "user", "content": "say:x"}]);
    for (path, mut body) in [
        (CHAT, json!({"messages": message})),
        ("/v1/completions", json!({"prompt": "say:x"})),
        ("/v1/responses", json!({"input": "say:x"})),
        (
            "/v1/messages",
            json!({"messages": message, "max_tokens": 2}),
        ),
        ("/completion", json!({"prompt": "say:x"})),
        ("/api/chat", json!({"messages": message, "stream": false})),
        ("/api/generate", json!({"prompt": "say:x", "stream": false})),
    ] {
        client.post(path, &body).expect(200);
        assert_eq!(server.state.last_options().prefill.cache_salt, None);
        body["cache_salt"] = "mine".into();
        client.post(path, &body).expect(200);
        let salt = server.state.last_options().prefill.cache_salt;
        assert_eq!(salt.as_deref(), Some("mine"), "{path}");
        for bad in ["", &"x".repeat(257)] {
            body["cache_salt"] = bad.into();
            client.post(path, &body).expect(400);
        }
    }
}
