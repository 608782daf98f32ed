//! Tests of tools that the server runs: their calls and results stay in the server, and the client
//! gets one reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Running, Script, config, events, lines, serve_script};
use crate::tools::{Outcome, openai_streamed, openai_whole};
use inference::Tool;
use inference_server::{ServerTools, ToolHost};
use serde_json::{Map, Value, json};

/// A chat template with the markers that identify Qwen's format.
const HERMES: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

/// A host of two tools. Its results tell the scripted model what to say next.
#[derive(Default)]
struct Host {
    calls: AtomicUsize,
}

impl ToolHost for Host {
    fn tools(&self) -> Vec<Tool> {
        vec![
            Tool::new(
                "clock",
                json!({"type": "object", "properties": {"zone": {"type": "string"}}}),
            ),
            Tool::new("again", None),
        ]
    }

    fn call(&self, name: &str, arguments: &Map<String, Value>) -> Result<String, String> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match (name, arguments.get("zone").and_then(Value::as_str)) {
            ("clock", Some("UTC")) => Ok("say:It is noon.".into()),
            // This result makes the model call a tool of the request.
            ("clock", Some("theirs")) => Ok(format!("say:{}", call("f", "{}"))),
            ("clock", _) => Err("there is no such zone say:Sorry.".into()),
            _ => Ok(format!("say:{}", call("again", "{}"))),
        }
    }
}

fn call(name: &str, arguments: &str) -> String {
    format!(r#"<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>"#)
}

fn server(max_rounds: usize) -> (Running, Arc<Host>) {
    let host = Arc::new(Host::default());
    let tools = ServerTools::new(Arc::clone(&host) as Arc<dyn ToolHost>, max_rounds);
    let config = config().with_tools(tools);
    let server = serve_script(&config, Script::writing(HERMES, &[]), |model| {
        model.with_context(4000)
    });
    (server, host)
}

fn asked(said: &str, fields: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": format!("say:{said}")}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn text(content: &str) -> Outcome {
    Outcome {
        content: content.into(),
        end: "stop".into(),
        ..Outcome::default()
    }
}

#[test]
fn calls_are_run_and_the_client_sees_one_reply() {
    let (server, host) = server(8);
    let client = server.client();
    let said = format!(
        "<think>hm</think>Let me see. {}",
        call("clock", r#"{"zone": "UTC"}"#)
    );
    let body = asked(&said, &json!({}));
    let expected = Outcome {
        reasoning: "hm".into(),
        ..text("Let me see.\n\nIt is noon.")
    };
    assert_eq!(openai_whole(&client, &body), expected);
    let prompt = server.state.last_prompt();
    assert!(prompt.contains("tool clock\ntool again\n"), "{prompt}");
    let order = ["assistant: Let me see.", "call clock", "tool: say:It is"];
    let places: Vec<_> = order.iter().map(|part| prompt.find(part)).collect();
    assert!(places[0].is_some() && places.is_sorted(), "{prompt}");
    assert_eq!(openai_streamed(&client, &body), expected);
    assert_eq!(host.calls.load(Ordering::SeqCst), 2);
    // The usage is that of both rounds.
    let reply = client.post("/v1/chat/completions", &body).expect(200);
    let generated = said.len() + "It is noon.".len();
    assert_eq!(reply["usage"]["completion_tokens"], generated);

    // The same conversation through the other APIs.
    let input = json!({"input": format!("say:{said}")});
    let reply = client.post("/v1/responses", &input).expect(200);
    let items = reply["output"].as_array().unwrap();
    let kinds: Vec<&str> = items.iter().map(|i| i["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message"]);
    assert_eq!(items[1]["content"][0]["text"], expected.content.as_str());
    let mut body = asked(&said, &json!({"max_tokens": 500}));
    let reply = client.post("/v1/messages", &body).expect(200);
    assert_eq!(reply["stop_reason"], "end_turn");
    assert_eq!(reply["content"][1]["text"], expected.content.as_str());
    body["stream"] = true.into();
    let streamed: String = events(&client.post("/v1/messages", &body))
        .iter()
        .filter_map(|(_, data)| data["delta"]["text"].as_str())
        .collect();
    assert_eq!(streamed, expected.content);
    let reply = client.post("/api/chat", &asked(&said, &json!({"model": "tiny"})));
    let told: String = lines(&reply)
        .iter()
        .map(|line| {
            assert_eq!(line["message"].get("tool_calls"), None, "{line}");
            line["message"]["content"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(told, expected.content);
    server.idle();
}

#[test]
fn several_calls_of_a_reply_are_one_round() {
    let (server, host) = server(1);
    let utc = call("clock", r#"{"zone": "UTC"}"#);
    let body = asked(&format!("{utc}{utc}"), &json!({}));
    assert_eq!(openai_whole(&server.client(), &body), text("It is noon."));
    assert_eq!(host.calls.load(Ordering::SeqCst), 2);
    let prompt = server.state.last_prompt();
    assert_eq!(prompt.matches("tool: say:").count(), 2, "{prompt}");
    // After the last round, the model gets no tools.
    assert!(!prompt.contains("tool clock"), "{prompt}");
}

#[test]
fn the_error_of_a_tool_is_for_the_model() {
    let (server, _) = server(8);
    let body = asked(&call("clock", r#"{"zone": "Mars"}"#), &json!({}));
    assert_eq!(openai_whole(&server.client(), &body), text("Sorry."));
    let prompt = server.state.last_prompt();
    let result = "tool: Error: there is no such zone";
    assert!(prompt.contains(result), "{prompt}");
}

#[test]
fn rounds_are_bounded() {
    let (server, host) = server(3);
    let body = asked(&call("again", "{}"), &json!({}));
    // Without tools, the last call is text.
    let expected = text(&call("again", "{}"));
    assert_eq!(openai_whole(&server.client(), &body), expected);
    assert_eq!(host.calls.load(Ordering::SeqCst), 3);
    assert_eq!(openai_streamed(&server.client(), &body), expected);
    assert_eq!(host.calls.load(Ordering::SeqCst), 6);
}

#[test]
fn a_reply_ends_at_its_length_over_all_rounds() {
    let (server, host) = server(8);
    let said = call("clock", r#"{"zone": "UTC"}"#);
    // The call ends one token before the limit; the script also writes the end of the text.
    let body = asked(&said, &json!({"max_tokens": said.len() + 5}));
    let outcome = openai_whole(&server.client(), &body);
    assert_eq!(
        (outcome.content.as_str(), outcome.end.as_str()),
        ("It is", "length")
    );
    assert_eq!(host.calls.load(Ordering::SeqCst), 1);
    // A call that is cut is not run.
    let body = asked(&said, &json!({"max_tokens": said.len() - 3}));
    let outcome = openai_whole(&server.client(), &body);
    assert_eq!(outcome.end, "length");
    assert_eq!(host.calls.load(Ordering::SeqCst), 1);
}

fn own(name: &str) -> Value {
    json!([{"type": "function", "function": {"name": name}}])
}

#[test]
fn the_tools_of_a_request_are_for_its_client() {
    let (server, host) = server(8);
    let client = server.client();
    let utc = call("clock", r#"{"zone": "UTC"}"#);
    // The request has a tool of the same name.
    let fields = json!({"tools": own("clock")});
    let outcome = openai_whole(&client, &asked(&utc, &fields));
    assert_eq!(outcome.calls, [("clock".into(), json!({"zone": "UTC"}))]);
    assert_eq!(host.calls.load(Ordering::SeqCst), 0);
    // One reply calls both: the client runs its own call, and the other one is dropped.
    let fields = json!({"tools": own("f")});
    let both = asked(&format!("{utc}{}", call("f", r#"{"a": 1}"#)), &fields);
    let expected = Outcome {
        calls: vec![("f".into(), json!({"a": 1}))],
        end: "tool_calls".into(),
        ..Outcome::default()
    };
    assert_eq!(openai_whole(&client, &both), expected);
    assert_eq!(openai_streamed(&client, &both), expected);
    assert_eq!(host.calls.load(Ordering::SeqCst), 0);
    // A call of the server's tool comes first, then one of the client's.
    let theirs = asked(&call("clock", r#"{"zone": "theirs"}"#), &fields);
    let expected = Outcome {
        calls: vec![("f".into(), json!({}))],
        end: "tool_calls".into(),
        ..Outcome::default()
    };
    assert_eq!(openai_whole(&client, &theirs), expected);
    assert_eq!(openai_streamed(&client, &theirs), expected);
    assert_eq!(host.calls.load(Ordering::SeqCst), 2);
}

#[test]
fn some_requests_get_no_tools_of_the_server() {
    let (server, host) = server(8);
    let client = server.client();
    for fields in [
        json!({"tool_choice": "none"}),
        json!({"tool_choice": "required", "tools": own("f")}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"logprobs": true}),
    ] {
        let body = asked("x", &fields);
        client.post("/v1/chat/completions", &body).expect(200);
        let prompt = server.state.last_prompt();
        assert!(!prompt.contains("tool clock"), "{fields}: {prompt}");
    }
    assert_eq!(host.calls.load(Ordering::SeqCst), 0);
}

/// While a tool runs, the request keeps its place, so a stopping server waits for it.
#[test]
fn a_stop_waits_for_a_tool() {
    struct Slow;
    impl ToolHost for Slow {
        fn tools(&self) -> Vec<Tool> {
            vec![Tool::new("clock", None)]
        }

        fn call(&self, _: &str, _: &Map<String, Value>) -> Result<String, String> {
            std::thread::sleep(std::time::Duration::from_millis(300));
            Ok("say:late".into())
        }
    }
    let mut limits = crate::common::limits();
    limits.drain_timeout = std::time::Duration::from_secs(10);
    let config = config()
        .with_limits(limits)
        .with_tools(ServerTools::new(Arc::new(Slow), 8));
    let server = serve_script(&config, Script::writing(HERMES, &[]), |model| model);
    let client = server.client();
    let body = asked(&call("clock", "{}"), &json!({}));
    let open = client.open_json("/v1/chat/completions", &body);
    std::thread::sleep(std::time::Duration::from_millis(150));
    server.stop();
    let reply = crate::common::read(open).expect(200);
    assert_eq!(reply["choices"][0]["message"]["content"], "late");
}
