//! Tests with an MCP server in Python: `mlx serve` as its client, with a scripted model over HTTP.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use inference::{CancelToken, Capabilities, ChatPrompt, TextModel};
use inference_conformance::scripted::{Reply, Scripted, Vocabulary};
use inference_server::{Config, ServedModel, Server, ServerTools};
use serde_json::{Map, Value, json};

use super::config::{Spec, read};
use super::{Host, McpArgs};
use crate::cli::terminal::failure::Failure;

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mcp_server.py")
}

/// A file of `--mcp` with servers of these names, which log their calls.
fn file(dir: &Path, names: &[&str]) -> PathBuf {
    let servers: Map<String, Value> = names
        .iter()
        .map(|name| {
            let args = json!([script(), dir.join(format!("{name}.log"))]);
            let server = json!({"command": "python3", "args": args});
            ((*name).to_owned(), server)
        })
        .collect();
    let path = dir.join("mcp.json");
    std::fs::write(&path, json!({"mcpServers": servers}).to_string()).unwrap();
    path
}

fn start(path: &Path) -> Host {
    Host::start(read(path).unwrap(), Duration::from_secs(60)).unwrap()
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other}"),
    }
}

#[test]
fn tools_are_listed_and_called() {
    let dir = tempfile::tempdir().unwrap();
    let host = start(&file(dir.path(), &["one"]));
    let tools = host.tools();
    let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["add", "fail"]);
    assert_eq!(tools[0].description.as_deref(), Some("Adds two numbers"));
    let schema = tools[0].parameters.as_ref().unwrap();
    assert_eq!(schema["properties"]["a"]["type"], "number");
    let sum = host.call("add", &object(json!({"a": 2, "b": 3})));
    assert_eq!(sum.unwrap(), "say:the sum is 5");
    let error = host.call("fail", &Map::new()).unwrap_err();
    assert_eq!(error, "say:no luck");
    assert!(host.call("other", &Map::new()).is_err());
    let log = std::fs::read_to_string(dir.path().join("one.log")).unwrap();
    assert_eq!(log, "[\"add\", {\"a\": 2, \"b\": 3}]\n[\"fail\", {}]\n");
}

#[test]
fn tools_of_one_name_get_their_servers_as_prefixes() {
    let dir = tempfile::tempdir().unwrap();
    let host = start(&file(dir.path(), &["a b", "two"]));
    let names: Vec<String> = host.tools().into_iter().map(|tool| tool.name).collect();
    assert_eq!(names, ["a_b_add", "a_b_fail", "two_add", "two_fail"]);
    let sum = host.call("two_add", &object(json!({"a": 1, "b": 1})));
    assert_eq!(sum.unwrap(), "say:the sum is 2");
    assert!(dir.path().join("two.log").exists());
    assert!(!dir.path().join("a b.log").exists());
}

#[test]
fn a_server_that_does_not_start_is_named_with_its_error_output() {
    let spec = |command: &str, args: &[&str]| Spec {
        name: "bad".into(),
        command: command.into(),
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        env: std::collections::BTreeMap::new(),
        cwd: None,
    };
    let script = script();
    let script = script.to_str().unwrap();
    for (spec, seconds, says) in [
        (spec("no-such-program", &[]), 60, "cannot be started"),
        (
            spec("python3", &[script, "broken"]),
            60,
            "broken on purpose",
        ),
        (spec("sleep", &["600"]), 1, "does not answer within 1 s"),
    ] {
        let started = Host::start(vec![spec], Duration::from_secs(seconds));
        let error = started.err().unwrap();
        assert!(error.contains("\"bad\"") && error.contains(says), "{error}");
    }
    let error = match (McpArgs {
        mcp: Some("no-such-file.json".into()),
        mcp_max_rounds: 8,
        mcp_timeout: 60,
    })
    .start()
    {
        Err(Failure::Usage(message)) => message,
        _ => panic!("a missing file is an error of the command line"),
    };
    assert!(error.contains("no-such-file.json"), "{error}");
}

/// The text of a conversation, from which the scripted model reads its reply.
fn render(prompt: &ChatPrompt) -> inference::Result<String> {
    let mut text = String::new();
    for tool in &prompt.tools {
        text.push_str(&format!("tool {}\n", tool.name));
    }
    for message in &prompt.messages {
        text.push_str(&format!("{}: {}\n", message.role, message.content));
    }
    Ok(text)
}

/// A model whose reply is the rest of the line after the last `say:`.
fn scripted() -> Arc<dyn TextModel> {
    let vocabulary = Vocabulary::new();
    let spelling = vocabulary.clone();
    let model = Scripted::computed(move |asked| {
        let said = asked
            .text
            .rsplit_once("say:")
            .map_or("nothing", |(_, rest)| rest);
        let line = said.lines().next().unwrap_or_default();
        Ok(Reply::ids(spelling.encode(line)))
    });
    let model = model
        .with_vocabulary(vocabulary)
        .with_rendering(render)
        .with_template("<tool_call>{{ tools }}</tool_call>")
        .with_info(|info| {
            info.has_chat_template = true;
            info.context_length = Some(10_000);
        });
    Arc::new(model)
}

#[test]
fn a_server_runs_calls_of_a_model_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let host = Arc::new(start(&file(dir.path(), &["one"])));
    let config = Config::new()
        .with_address("127.0.0.1:0".parse().unwrap())
        .with_tools(ServerTools::new(host, 8));
    let capabilities = Capabilities::new()
        .with_streaming()
        .with_chat()
        .with_batch_sessions();
    let model = ServedModel::new("tiny", scripted(), capabilities).unwrap();
    let server = Server::bind(&config, vec![model]).unwrap();
    let url = format!("http://{}/v1/chat/completions", server.address());
    let stop = CancelToken::new();
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || server.run(&stopped));
    let ask = |said: &str| -> Value {
        let body = json!({"messages": [{"role": "user", "content": format!("say:{said}")}]});
        let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
        let answer = agent
            .post(&url)
            .header("Content-Type", "application/json")
            .send(body.to_string());
        let text = answer.unwrap().body_mut().read_to_string().unwrap();
        serde_json::from_str(&text).unwrap()
    };
    for (said, content) in [
        (
            r#"<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>"#,
            "the sum is 42",
        ),
        (
            r#"<tool_call>{"name": "fail", "arguments": {}}</tool_call>"#,
            "no luck",
        ),
    ] {
        let reply = ask(said);
        let choice = &reply["choices"][0];
        assert_eq!(choice["message"]["content"], content, "{reply}");
        assert_eq!(choice["message"].get("tool_calls"), None, "{reply}");
        assert_eq!(choice["finish_reason"], "stop");
    }
    stop.cancel();
    thread.join().unwrap().unwrap();
}
