//! Tests of `--tools FILE`: the tools in the prompt, and the calls in the reply. The tiny model is
//! random, so a regular expression forces a call.

use std::path::PathBuf;

use crate::common::fixture;
use crate::program::{mlx, piped, refused, stdout, text};
use serde_json::{Value, json};

/// A template in Hermes's format, with tool definitions, calls and results.
const TEMPLATE: &str = "{# <think></think> #}{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}\
    {% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\
    {% for c in m.tool_calls or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}\
    {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
/// A reply with reasoning, text and a tool call.
const REPLY: &str = r#"<think>hm</think>So:<tool_call>\{"name": "time", "arguments": \{"zone": "(UTC|CET)"\}\}</tool_call>"#;

struct Home {
    dir: tempfile::TempDir,
    tools: String,
}

fn home() -> Home {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tools.json");
    let tools = json!([{"type": "function", "function": {"name": "time", "description": "The time of day",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}}]);
    std::fs::write(&path, tools.to_string()).unwrap();
    let tools = path.to_str().unwrap().to_owned();
    Home { dir, tools }
}

fn model() -> String {
    let path: PathBuf = fixture("tiny/llama");
    path.to_str().unwrap().to_owned()
}

impl Home {
    fn command(&self, command: &str, more: &[&str]) -> std::process::Command {
        let model = model();
        let named: &[&str] = match command {
            "run" => &[&model],
            _ => &["-m", &model],
        };
        let template = ["--backend", "cpu", "--chat-template", TEMPLATE, "--tools"];
        let all = [&[command], named, &template, &[&self.tools], more].concat();
        mlx(self.dir.path(), &all)
    }

    fn runs(&self, command: &str, more: &[&str]) -> String {
        stdout(&self.command(command, more).output().unwrap())
    }
}

#[track_caller]
fn check(call: &str) {
    let call: Value = serde_json::from_str(call).unwrap_or_else(|e| panic!("{call}: {e}"));
    assert_eq!(call["name"], "time");
    assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
    let zone = call["arguments"]["zone"].as_str().unwrap();
    assert!(["UTC", "CET"].contains(&zone), "{call}");
}

#[test]
fn calls_are_lines_of_json() {
    let home = home();
    for command in ["generate", "run"] {
        let said = home.runs(command, &["hi", "--regex", REPLY, "-n", "200"]);
        let lines: Vec<&str> = said.lines().collect();
        let [words, call] = lines[..] else {
            panic!("{said}")
        };
        assert_eq!(words, "So:");
        check(call);
    }
    let said = home.runs("generate", &["hi", "--regex", REPLY, "-n", "200", "--json"]);
    let object: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        (&object["text"], &object["reasoning"]),
        (&json!("So:"), &json!("hm"))
    );
    assert_eq!(object["tool_calls"].as_array().unwrap().len(), 1);
    check(&object["tool_calls"][0].to_string());
}

#[test]
fn the_model_is_told_of_tools() {
    let home = home();
    let count = |said: String| -> u64 {
        let object: Value = serde_json::from_str(&said).unwrap();
        object["prompt_tokens"].as_u64().unwrap()
    };
    let with = count(home.runs("generate", &["hi", "-n", "1", "--json"]));
    let model = model();
    let args = [
        "generate",
        "-m",
        &model,
        "--backend",
        "cpu",
        "--raw",
        "[time]<user>hi<assistant>",
    ];
    let raw = [&args[..], &["-n", "1", "--json"]].concat();
    let raw = mlx(home.dir.path(), &raw).output().unwrap();
    assert_eq!(with, count(stdout(&raw)));
}

/// The chat prints the call, `/tool` sends its result, and the model continues. The prompt must
/// contain both the call and the result.
#[test]
fn a_chat_answers_calls() {
    let home = home();
    // The context is larger than the tiny model supports. That is safe, because the grammar
    // determines the reply.
    let chat = home.command("chat", &["--regex", REPLY, "-n", "200", "-c", "4096"]);
    let output = piped(
        chat,
        "/tool too early\nhi\n/tool 12:00\n/stats\n/tool two\n/tool three\n",
    );
    let said = stdout(&output);
    let calls: Vec<&str> = said.lines().filter(|line| line.starts_with('{')).collect();
    assert_eq!(calls.len(), 4, "{said}");
    calls.into_iter().for_each(check);
    let told = text(&output.stderr);
    assert!(
        told.contains("the model is not waiting for the result of a tool"),
        "{told}"
    );
    // The four messages: the question, the call, the tool's result, and the next call.
    assert!(told.contains("chat: 4 messages, 2 replies"), "{told}");
}

#[test]
fn what_cannot_be_is_told() {
    let home = home();
    let path = home.dir.path().join("bad.json");
    std::fs::write(&path, "{}").unwrap();
    let model = model();
    let fails = |tools: &str, more: &[&str], code| {
        let args = [
            "generate",
            "-m",
            &model,
            "--backend",
            "cpu",
            "hi",
            "--tools",
            tools,
        ];
        let args = [&args[..], more].concat();
        refused(&mlx(home.dir.path(), &args).output().unwrap(), code)
    };
    assert!(fails(path.to_str().unwrap(), &[], 2).contains("list of tools"));
    assert!(fails("no-such.json", &[], 2).contains("no-such.json"));
    fails(&home.tools, &["--raw"], 2);
}

#[test]
fn a_template_without_calls_gets_tools_in_the_conversation() {
    let home = home();
    let model = model();
    let args = |more: &[&'static str]| {
        let mut args = vec![
            "generate",
            "-m",
            &model,
            "--backend",
            "cpu",
            "hi",
            "-n",
            "4",
            "--ctx-size",
            "1024",
        ];
        args.extend(more);
        args.push("--json");
        let output = mlx(home.dir.path(), &args).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let tools: &'static str = home.tools.clone().leak();
    let (plain, with) = (args(&[]), args(&["--tools", tools]));
    let tokens = |reply: &Value| reply["metrics"]["prompt_tokens"].as_u64().unwrap();
    // The description of the tools is part of the prompt.
    assert!(tokens(&with) > tokens(&plain) + 100, "{plain} {with}");
    assert_eq!(with["tool_calls"], serde_json::json!([]));
}

/// The chat runs calls of an MCP server's tools, up to the bound on rounds. The random model calls
/// the tool in each round, because a regular expression forces the call.
#[cfg(feature = "mcp")]
#[test]
fn a_chat_runs_the_tools_of_mcp_servers() {
    let dir = tempfile::tempdir().unwrap();
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = script.join("tests/fixtures/mcp_server.py");
    let log = dir.path().join("log");
    let file = dir.path().join("mcp.json");
    let config = |args: Value| {
        let server = json!({"command": "python3", "args": args});
        std::fs::write(&file, json!({"mcpServers": {"one": server}}).to_string()).unwrap();
    };
    config(json!([script, log]));
    let call = r#"<tool_call>\{"name": "add", "arguments": \{"a": 1, "b": 2\}\}</tool_call>"#;
    let model = model();
    let file = file.to_str().unwrap();
    let args = |rounds: &'static str| {
        let all = [
            "chat",
            "-m",
            &model,
            "--backend",
            "cpu",
            "--chat-template",
            TEMPLATE,
            "--regex",
            call,
            "-n",
            "200",
            "-c",
            "4096",
            "--mcp",
            file,
            "--mcp-max-rounds",
            rounds,
        ];
        mlx(dir.path(), &all)
    };
    let output = piped(args("2"), "hi\n/stats\n");
    let said = stdout(&output);
    // After the last round, the model is not offered the tool, so its call is text.
    assert_eq!(said.matches("<tool_call>").count(), 1, "{said}");
    let told = text(&output.stderr);
    let noted = r#"(calls add {"a":1,"b":2})"#;
    assert_eq!(told.matches(noted).count(), 2, "{told}");
    assert!(told.contains("--mcp-max-rounds"), "{told}");
    // The question, two calls with their results, and the answer.
    assert!(told.contains("chat: 6 messages"), "{told}");
    let calls = std::fs::read_to_string(&log).unwrap();
    assert_eq!(calls.lines().count(), 2, "{calls}");

    config(json!([script, "broken"]));
    let failed = refused(&args("2").output().unwrap(), 1);
    for part in ["\"one\"", "broken on purpose"] {
        assert!(failed.contains(part), "{failed}");
    }
    // The bound alone has no effect, so it is refused.
    let alone = ["chat", "-m", &model, "--mcp-max-rounds", "2"];
    refused(&mlx(dir.path(), &alone).output().unwrap(), 2);
}
