//! Tests of Anthropic's and Ollama's APIs, and of tool calls in all APIs with a test-specific
//! parser.

use std::sync::Arc;

use crate::common::{Reply, Running, config, events, lines, serve, serve_as};
use inference::{StopCause, Token};
use inference_server::{Delta, ReplyFormat, ReplyParser, ReplyRequest};
use serde_json::{Value, json};

/// A test format: `(thought)` is reasoning and `[name{json}]` is a call. Its parser reads token by
/// token.
#[derive(Clone, Default)]
struct Brackets {
    thinking: bool,
    name: Option<String>,
    arguments: bool,
    calls: usize,
}

impl ReplyFormat for Brackets {
    fn reads_tools(&self) -> bool {
        true
    }
    fn reads_reasoning(&self) -> bool {
        true
    }
    fn parser(&self, request: &ReplyRequest) -> Box<dyn ReplyParser> {
        assert!(request.prompt_end.ends_with('\n'));
        Box::new(Brackets::default())
    }
}

impl ReplyParser for Brackets {
    fn feed(&mut self, token: &Token) -> Vec<Delta> {
        let text = token.text.clone();
        match text.as_str() {
            "(" => self.thinking = true,
            ")" => self.thinking = false,
            "[" => self.name = Some(String::new()),
            "]" => {
                self.arguments = false;
                let index = self.calls;
                self.calls += 1;
                return vec![Delta::CallEnded { index }];
            }
            _ if self.arguments => {
                return vec![Delta::Arguments {
                    index: self.calls,
                    json: text,
                }];
            }
            "{" => {
                if let Some(name) = self.name.take() {
                    self.arguments = true;
                    let index = self.calls;
                    let id = format!("call{index}");
                    return vec![
                        Delta::ToolCall { index, id, name },
                        Delta::Arguments { index, json: text },
                    ];
                }
                return vec![Delta::Content(text)];
            }
            _ if self.thinking => return vec![Delta::Reasoning(text)],
            _ => match &mut self.name {
                Some(name) => name.push_str(&text),
                None => return vec![Delta::Content(text)],
            },
        }
        Vec::new()
    }

    fn finish(&mut self, _: Option<&StopCause>) -> Vec<Delta> {
        match self.name.take() {
            Some(name) => vec![Delta::Content(format!("[{name}"))],
            None => Vec::new(),
        }
    }
}

fn with_tools() -> Running {
    serve_as(&config(), |model| {
        model
            .with_context(1000)
            .with_format(Arc::new(Brackets::default()))
    })
}

const CALLS: &str = "say:(hm)so [f{\"a\":1}][g{}]";

fn openai(text: &str, stream: bool) -> Value {
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    json!({"messages": [{"role": "user", "content": text}], "tools": [tool], "stream": stream})
}

#[test]
fn openai_calls_are_the_same_whole_and_streamed() {
    let server = with_tools();
    let client = server.client();
    let path = "/v1/chat/completions";
    let complete = client.post(path, &openai(CALLS, false)).expect(200);
    assert!(server.state.last_prompt().starts_with("tool f\n"));
    let choice = &complete["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("so "), &json!("hm"))
    );
    let call = |id, name, arguments| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = json!([call("call0", "f", "{\"a\":1}"), call("call1", "g", "{}")]);
    assert_eq!(message["tool_calls"], expected);

    let (mut content, mut reasoning, mut finish) = (String::new(), String::new(), Value::Null);
    let mut calls: Vec<Value> = Vec::new();
    for (_, chunk) in events(&client.post(path, &openai(CALLS, true))) {
        let choice = &chunk["choices"][0];
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        reasoning.push_str(
            choice["delta"]["reasoning_content"]
                .as_str()
                .unwrap_or_default(),
        );
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
        for call in choice["delta"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let at = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            let more = call["function"]["arguments"].as_str().unwrap();
            if at == calls.len() {
                let mut call = call.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.push(call);
            } else {
                let old = calls[at]["function"]["arguments"]
                    .as_str()
                    .unwrap()
                    .to_owned();
                calls[at]["function"]["arguments"] = (old + more).into();
            }
        }
    }
    assert_eq!((content.as_str(), reasoning.as_str()), ("so ", "hm"));
    assert_eq!((json!(calls), finish), (expected, json!("tool_calls")));
    // The parser withholds the incomplete call, so its text arrives only at the end.
    let half = client.post(path, &openai("say:a[b", false)).expect(200);
    assert_eq!(half["choices"][0]["message"]["content"], "a[b");
    assert_eq!(half["choices"][0]["finish_reason"], "stop");
    // A reply may consist of a call only, without text.
    let bare = client.post(path, &openai("say:[f{}]", false)).expect(200);
    assert_eq!(bare["choices"][0]["message"]["content"], Value::Null);
}

fn anthropic(text: &str, fields: &Value) -> Value {
    let mut body =
        json!({"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": text}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

const MESSAGES: &str = "/v1/messages";

#[test]
fn anthropic_messages_are_answered() {
    let server = serve(&config());
    let client = server.client();
    let fields = json!({"system": [{"type": "text", "text": "Be brief."}], "temperature": 0.5,
        "stop_sequences": ["!"], "metadata": {"user_id": "x"}});
    let body = client
        .post(MESSAGES, &anthropic("say:yes!no", &fields))
        .expect(200);
    assert_eq!(
        (&body["type"], &body["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(body["content"], json!([{"type": "text", "text": "yes"}]));
    assert_eq!(body["stop_reason"], "stop_sequence");
    assert_eq!(body["stop_sequence"], "!");
    assert_eq!(
        server.state.last_prompt(),
        "system: Be brief.\nuser: say:yes!no\n"
    );
    let prompt = server.state.last_prompt().len();
    assert_eq!(body["usage"]["input_tokens"], prompt - 2);
    assert_eq!(body["usage"]["cache_read_input_tokens"], 2);
    assert_eq!(body["usage"]["output_tokens"], 4);
    let count =
        json!({"messages": [{"role": "user", "content": "say:yes!no"}], "system": "Be brief."});
    let count = client.post("/v1/messages/count_tokens", &count).expect(200);
    assert_eq!(count, json!({"input_tokens": prompt}));
    for (text, fields, reason) in [
        ("say:yes", json!({}), "end_turn"),
        ("say:yes", json!({"max_tokens": 2}), "max_tokens"),
    ] {
        let body = client.post(MESSAGES, &anthropic(text, &fields)).expect(200);
        assert_eq!(
            (&body["stop_reason"], &body["stop_sequence"]),
            (&json!(reason), &Value::Null)
        );
    }
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    for fields in [
        json!({"output_config": {"format": format}}),
        json!({"output_format": format}),
    ] {
        client.post(MESSAGES, &anthropic("x", &fields)).expect(200);
        let grammar = server.state.last_options().constraints.grammar;
        assert_eq!(grammar, Some(inference::Grammar::json_object()));
    }
    for fields in [
        json!({"max_tokens": 0}),
        json!({"max_tokens": null}),
        json!({"temperature": 2}),
        json!({"messages": []}),
        json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 16}}),
        json!({"thinking": {"type": "disabled", "budget_tokens": "many"}}),
        json!({"thinking": {"type": "adaptive", "budget_tokens": 0}}),
        json!({"thinking": {"type": "adaptive", "budget_tokens": 1_000_000}}),
        json!({"cache_salt": ""}),
        json!({"stop_sequences": [""]}),
        json!({"output_config": {"format": {"type": "grammar"}}}),
        json!({"output_format": {"type": "json_schema", "schema": 3}}),
    ] {
        let error = client.post(MESSAGES, &anthropic("x", &fields)).expect(400);
        assert_eq!(error["type"], "error", "{fields}");
        assert_eq!(error["error"]["type"], "invalid_request_error", "{fields}");
    }
    let error = client
        .post(MESSAGES, &anthropic("x", &json!({"model": "claude"})))
        .expect(404);
    assert_eq!(error["error"]["type"], "not_found_error");
}

fn names(reply: &Reply) -> Vec<String> {
    let events = events(reply);
    for (name, data) in &events {
        assert_eq!(data["type"], name.as_str());
    }
    events.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn anthropic_streams_have_every_event() {
    let server = serve(&config());
    let client = server.client();
    let reply = client.post(MESSAGES, &anthropic("say:ab", &json!({"stream": true})));
    assert_eq!(
        names(&reply),
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let events: Vec<Value> = events(&reply).into_iter().map(|(_, data)| data).collect();
    assert_eq!(
        events[0]["message"]["usage"]["input_tokens"],
        "user: say:ab\n".len()
    );
    assert_eq!(
        events[3]["delta"],
        json!({"type": "text_delta", "text": "a"})
    );
    assert_eq!(events[6]["delta"]["stop_reason"], "end_turn");
    assert_eq!(events[6]["usage"]["output_tokens"], 2);
    // If a stream fails, the failure is its last event.
    let failed = client.post(
        MESSAGES,
        &anthropic("say:hello !fail", &json!({"stream": true})),
    );
    assert_eq!(names(&failed).last().unwrap(), "error");
}

#[test]
fn anthropic_blocks_go_one_after_another() {
    let server = with_tools();
    let client = server.client();
    let tool = json!([{"name": "f", "description": "d", "input_schema": {"type": "object"}}]);
    let fields = json!({"tools": tool, "thinking": {"type": "enabled", "budget_tokens": 16}});
    let body = client
        .post(MESSAGES, &anthropic(CALLS, &fields))
        .expect(200);
    assert_eq!(body["stop_reason"], "tool_use");
    assert_eq!(
        body["content"],
        json!([
            {"type": "thinking", "thinking": "hm", "signature": "local"},
            {"type": "text", "text": "so "},
            {"type": "tool_use", "id": "call0", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "call1", "name": "g", "input": {}},
        ])
    );
    assert!(server.state.last_prompt().contains("enable_thinking=true"));
    let mut streamed = fields.clone();
    streamed["stream"] = true.into();
    let (mut open, mut blocks) = (None, Vec::new());
    for (name, data) in events(&client.post(MESSAGES, &anthropic(CALLS, &streamed))) {
        let index = data["index"].as_u64();
        match name.as_str() {
            "content_block_start" => {
                assert_eq!((open, index), (None, Some(blocks.len() as u64)));
                open = index;
                blocks.push((data["content_block"]["type"].clone(), String::new()));
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                let delta = &data["delta"];
                let text = ["text", "thinking", "partial_json"]
                    .iter()
                    .find_map(|k| delta[k].as_str());
                blocks
                    .last_mut()
                    .unwrap()
                    .1
                    .push_str(text.unwrap_or_default());
            }
            "content_block_stop" => {
                assert_eq!(open.take(), index);
            }
            _ => assert_eq!(open, None),
        }
    }
    let expected = [
        ("thinking", "hm"),
        ("text", "so "),
        ("tool_use", "{\"a\":1}"),
        ("tool_use", "{}"),
    ];
    let expected = expected.map(|(kind, text)| (json!(kind), String::from(text)));
    assert_eq!(blocks, expected);
}

#[test]
fn ollama_lists_and_shows_models() {
    let server = serve(&config());
    let client = server.client();
    assert_eq!(client.get("/").text(), "Ollama is running");
    assert_eq!(client.ask("HEAD", "/", b"").status, 200);
    assert!(client.get("/api/version").expect(200)["version"].is_string());
    let tags = client.get("/api/tags").expect(200);
    assert_eq!(tags["models"][0]["name"], "tiny");
    assert_eq!(tags["models"][0]["details"]["family"], "script");
    assert_eq!(tags["models"][0]["digest"].as_str().unwrap().len(), 64);
    let ps = client.get("/api/ps").expect(200);
    assert_eq!(ps["models"][0]["context_length"], 1000);
    for body in [json!({"model": "tiny"}), json!({"name": "tiny:latest"})] {
        let show = client.post("/api/show", &body).expect(200);
        assert_eq!(show["capabilities"], json!(["completion", "embedding"]));
        assert_eq!(show["model_info"]["script.vocab_size"], 257);
    }
    let error = client
        .post("/api/show", &json!({"model": "../../etc/passwd"}))
        .expect(404);
    assert!(error["error"].as_str().unwrap().contains("tiny"));
}

#[test]
fn ollama_chats_in_lines() {
    let server = serve(&config());
    let client = server.client();
    let ask = |fields: Value| {
        let mut body =
            json!({"model": "tiny:latest", "messages": [{"role": "user", "content": "say:abc"}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let reply = client.post("/api/chat", &ask(json!({"keep_alive": "5m"})));
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let all = lines(&reply);
    let text: String = all
        .iter()
        .map(|l| l["message"]["content"].as_str().unwrap())
        .collect();
    assert_eq!(text, "abc");
    let (last, others) = all.split_last().unwrap();
    assert!(others.len() == 3 && others.iter().all(|l| l["done"] == false));
    assert_eq!(
        (&last["done"], &last["done_reason"]),
        (&json!(true), &json!("stop"))
    );
    assert_eq!(
        (&last["eval_count"], &last["prompt_eval_count"]),
        (&json!(3), &json!(14))
    );
    for field in [
        "total_duration",
        "load_duration",
        "prompt_eval_duration",
        "eval_duration",
    ] {
        assert!(last[field].is_u64(), "{field}");
    }
    let o = server.state.last_options();
    assert_eq!(
        (
            o.sampling.temperature,
            o.sampling.top_k,
            o.sampling.top_p,
            o.penalties.repeat_penalty
        ),
        (0.8, 40, 0.9, 1.1)
    );

    let fields = json!({"stream": false, "think": false, "options": {"num_predict": 2, "temperature": 0,
        "seed": 3, "stop": ["x"], "num_ctx": 100, "num_gpu": 1,
        "num_keep": 4, "typical_p": 1.0, "tfs_z": 1, "mirostat_tau": 5.0}});
    let one = client.post("/api/chat", &ask(fields)).expect(200);
    assert_eq!(
        (&one["message"]["content"], &one["done_reason"]),
        (&json!("ab"), &json!("length"))
    );
    let o = server.state.last_options();
    assert_eq!(
        (o.sampling.temperature, o.sampling.seed, o.stop.stop_strings),
        (0.0, Some(3), vec![String::from("x")])
    );
    assert!(
        server
            .state
            .last_prompt()
            .starts_with("enable_thinking=false")
    );
    client
        .post(
            "/api/chat",
            &ask(json!({"format": "json", "stream": false})),
        )
        .expect(200);
    assert!(server.state.last_options().constraints.grammar.is_some());
    let loaded = client
        .post("/api/chat", &json!({"model": "tiny"}))
        .expect(200);
    assert_eq!(loaded["done_reason"], "load");
    // Types of fields are checked even in requests that only load a model.
    for options in [json!({"min_p": {}}), json!({"top_k": 0.5})] {
        let wrong = json!({"model": "tiny", "options": options});
        client.post("/api/chat", &wrong).expect(400);
    }

    for fields in [
        json!({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        json!({"think": true}),
        json!({"think": "high"}),
        json!({"format": 3}),
        json!({"logprobs": true}),
        json!({"options": {"mirostat": 2}}),
        json!({"options": {"typical_p": 1.5}}),
        json!({"options": {"tfs_z": 0.9}}),
        json!({"options": {"temprature": 0.9}}),
        json!({"options": {"temperature": -1}}),
        json!({"options": {"num_ctx": 5}}),
    ] {
        let error = client.post("/api/chat", &ask(fields.clone())).expect(400);
        assert!(error["error"].is_string(), "{fields}");
    }
    let failed = client.post(
        "/api/chat",
        &json!({"messages": [{"role": "user", "content": "say:hello !fail"}]}),
    );
    assert_eq!(failed.status, 200);
    assert!(lines(&failed).last().unwrap()["error"].is_string());
}

#[test]
fn ollama_generates_and_embeds() {
    let server = serve(&config());
    let client = server.client();
    let path = "/api/generate";
    let body = json!({"model": "tiny", "prompt": "say:abc", "system": "Hm.", "stream": false});
    let reply = client.post(path, &body).expect(200);
    assert_eq!(
        (&reply["response"], &reply["done"]),
        (&json!("abc"), &json!(true))
    );
    assert_eq!(server.state.last_prompt(), "system: Hm.\nuser: say:abc\n");
    let raw = json!({"model": "tiny", "prompt": "say:ab", "raw": true});
    let text: String = lines(&client.post(path, &raw))
        .iter()
        .map(|l| l["response"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(
        (text.as_str(), server.state.last_prompt().as_str()),
        ("ab", "say:ab")
    );
    assert_eq!(
        client.post(path, &json!({"model": "tiny"})).expect(200)["done_reason"],
        "load"
    );
    for fields in [
        json!({"template": "x"}),
        json!({"suffix": "x"}),
        json!({"context": [1]}),
        json!({"images": ["x"]}),
    ] {
        let mut body = body.clone();
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        client.post(path, &body).expect(400);
    }
    let reply = client
        .post(
            "/api/embed",
            &json!({"model": "tiny", "input": ["a", "bc"]}),
        )
        .expect(200);
    assert_eq!(
        reply["embeddings"],
        json!([[0.6f32, 0.8f32], [0.8f32, 0.6f32]])
    );
    assert_eq!(reply["prompt_eval_count"], 3);
    client
        .post("/api/embed", &json!({"model": "tiny", "input": []}))
        .expect(400);
}

#[test]
fn ollama_calls_are_whole() {
    let server = with_tools();
    let tool = json!([{"type": "function", "function": {"name": "f"}}]);
    let body = |stream: bool| {
        json!({"messages": [
            {"role": "user", "content": CALLS},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2}}}]},
            {"role": "tool", "tool_name": "f", "content": CALLS},
        ], "tools": tool, "think": true, "stream": stream})
    };
    let expected = json!([
        {"function": {"name": "f", "arguments": {"a": 1}}},
        {"function": {"name": "g", "arguments": {}}},
    ]);
    let reply = server.client().post("/api/chat", &body(false)).expect(200);
    assert_eq!(reply["message"]["tool_calls"], expected);
    assert_eq!(reply["message"]["thinking"], "hm");
    assert!(
        server
            .state
            .last_prompt()
            .contains("call f {\"a\": Number(2)}")
    );
    let all = lines(&server.client().post("/api/chat", &body(true)));
    // A call's line is sent as soon as the call is complete.
    let calls: Vec<&Value> = all
        .iter()
        .filter_map(|l| l["message"].get("tool_calls"))
        .collect();
    assert_eq!(calls, [&json!([expected[0]]), &json!([expected[1]])]);
    let thinking: String = all
        .iter()
        .filter_map(|l| l["message"]["thinking"].as_str())
        .collect();
    assert_eq!(thinking, "hm");
}
