//! Tests of `mlx serve` on a tiny model. Replies over HTTP must equal the engine's replies, and
//! signals must stop the server.
#![cfg(unix)]

mod agents;
#[path = "../common/mod.rs"]
mod common;
mod drafts;
mod nginx;
mod operation;
#[path = "../common/served.rs"]
mod served;
mod turns;

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{fixture, greedy, tiny};
use inference::{
    ChatPrompt, EmbedOptions, GenerateOptions, Interrupt, LoadOptions, Message, Prompt,
};
use serde_json::{Value, json};
use served::{Served, agent};

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(["serve", "--backend", "cpu"])
        .env_remove("MLX_BACKEND")
        .env_remove("MLX_API_KEY")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

/// The program as a server of the tiny Llama.
fn serve(more: &[&str]) -> Served {
    let model = fixture("tiny/llama");
    serve_args(&[more, &[model.to_str().unwrap()]].concat())
}

fn serve_args(args: &[&str]) -> Served {
    let mut command = command();
    command
        .args(["--port", "0"])
        .args(args)
        .stderr(Stdio::piped());
    Served::start(command)
}

/// A copy of a tiny checkpoint that allows 8192 tokens instead of 256.
fn long_copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("tiny").join(name)).unwrap() {
        let from = file.unwrap().path();
        let to = dir.path().join(from.file_name().unwrap());
        if from.ends_with("config.json") {
            let config = std::fs::read_to_string(&from).unwrap();
            let config = config.replace(
                "\"max_position_embeddings\": 256",
                "\"max_position_embeddings\": 8192",
            );
            std::fs::write(to, config).unwrap();
        } else {
            std::fs::copy(&from, to).unwrap();
        }
    }
    dir
}

#[test]
fn replies_are_those_of_the_engine() {
    let server = serve(&[]);
    let model = tiny("llama");
    let tokens = model.as_token_model().unwrap();
    let prompts = ["hello", "The capital", "one two three", "x"];
    let alone: Vec<String> = prompts
        .iter()
        .map(|p| {
            model
                .generate(&Prompt::from(*p), &greedy(24))
                .unwrap()
                .text()
                .unwrap()
        })
        .collect();
    // The requests run concurrently, in one batch.
    std::thread::scope(|scope| {
        for (prompt, expected) in prompts.iter().zip(&alone) {
            let server = &server;
            scope.spawn(move || {
                let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": true});
                let reply = server.json("/v1/completions", &body);
                assert_eq!(reply["choices"][0]["text"], expected.as_str(), "{prompt}");
                assert_eq!(reply["usage"]["completion_tokens"], 24);
            });
        }
    });
    let chat = ChatPrompt::new([Message::user("hello")]);
    let ids = tokens.prepare_chat(&chat).unwrap().ids;
    let n = ids.len();
    let expected = model
        .generate(&Prompt::Tokens(ids), &greedy(24))
        .unwrap()
        .text()
        .unwrap();
    let body = json!({
        "model": "llama", "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": true, "top_logprobs": 2,
    });
    let reply = server.json("/v1/chat/completions", &body);
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["content"], expected.as_str());
    assert_eq!(reply["usage"]["prompt_tokens"], n);
    let logprobs = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(logprobs.len(), 24);
    let bytes: Vec<u8> = logprobs
        .iter()
        .flat_map(|l| l["bytes"].as_array().unwrap())
        .map(|b| u8::try_from(b.as_u64().unwrap()).unwrap())
        .collect();
    assert_eq!(String::from_utf8_lossy(&bytes), expected);
    assert_eq!(
        logprobs[0]["top_logprobs"][0]["logprob"],
        logprobs[0]["logprob"]
    );

    // The streamed text must equal the text of the whole reply.
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let (status, text) = server.post("/v1/chat/completions", &streamed);
    assert_eq!(status, 200);
    let content: String = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter(|data| *data != "[DONE]")
        .filter_map(|data| {
            let chunk: Value = serde_json::from_str(data).unwrap();
            chunk["choices"][0]["delta"]["content"]
                .as_str()
                .map(str::to_owned)
        })
        .collect();
    assert_eq!(content, expected);
    let anthropic = json!({"max_tokens": 24, "messages": [{"role": "user", "content": "hello"}], "temperature": 0});
    let reply = server.json("/v1/messages", &anthropic);
    assert!(reply["usage"]["output_tokens"].as_u64().unwrap() > 0);
    let count = server.json("/v1/messages/count_tokens", &anthropic);
    assert_eq!(count["input_tokens"], n);
    let ollama = json!({"model": "llama", "messages": [{"role": "user", "content": "hello"}], "stream": false,
        "options": {"temperature": 0, "repeat_penalty": 1, "num_predict": 8}});
    let reply = server.json("/api/chat", &ollama);
    let said = reply["message"]["content"].as_str().unwrap();
    assert!(expected.starts_with(said), "{said:?} in {expected:?}");

    let vectors = model.as_embedding_model().unwrap();
    let (hello, none) = ([Prompt::from("hello")], Interrupt::new());
    let expected = vectors.embed(&hello, &EmbedOptions::new(), &none).unwrap();
    let reply = server.json("/v1/embeddings", &json!({"input": "hello"}));
    for (i, value) in expected[0].iter().enumerate() {
        let got = reply["data"][0]["embedding"][i].as_f64().unwrap();
        assert!(
            (got - f64::from(*value)).abs() < 1e-5,
            "{i}: {got} and {value}"
        );
    }
}

#[test]
fn thinking_is_cut_at_its_budget() {
    // In this copy, the tiny Llama's template starts each reply with reasoning.
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("tiny/llama")).unwrap() {
        let from = file.unwrap().path();
        std::fs::copy(&from, dir.path().join(from.file_name().unwrap())).unwrap();
    }
    let path = dir.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let template = config["chat_template"].as_str().unwrap();
    let thinks = template.replace("assistant\n' }}", "assistant\n<think>\n' }}{# </think> #}");
    assert_ne!(thinks, template);
    config["chat_template"] = thinks.into();
    std::fs::write(&path, config.to_string()).unwrap();

    let server = serve_args(&[dir.path().to_str().unwrap()]);
    let model = common::load(dir.path());
    let tokens = model.as_token_model().unwrap();
    let chat = ChatPrompt::new([Message::user("hello")]);
    let prompt = tokens.prepare_chat(&chat).unwrap().ids;
    let continued = |prompt: &[u32], n: usize| {
        let options = GenerateOptions::new().with_max_tokens(n);
        let reply = model.generate(&Prompt::Tokens(prompt.to_vec()), &options);
        let tokens: Vec<_> = reply.unwrap().map(Result::unwrap).collect();
        let text: String = tokens.iter().map(|t| t.text.as_str()).collect();
        let ids: Vec<u32> = tokens.iter().map(|t| t.id).collect();
        (ids, text)
    };
    let (free, _) = continued(&prompt, 40);
    for budget in [5, 12] {
        assert!(free.len() > budget, "the model ends by itself: {free:?}");
        let (thought, thinking) = continued(&prompt, budget);
        // After the forced end of the reasoning, the reply must continue.
        let ending = tokens.encode("</think>\n\n", false).unwrap();
        let so_far = [prompt.as_slice(), &thought, &ending].concat();
        let (_, answer) = continued(&so_far, 40 - budget - ending.len());
        let body = json!({"max_tokens": 40, "temperature": 0,
            "thinking": {"type": "enabled", "budget_tokens": budget},
            "messages": [{"role": "user", "content": "hello"}]});
        let reply = server.json("/v1/messages", &body);
        let blocks = reply["content"].as_array().unwrap();
        assert_eq!(
            blocks[0]["thinking"].as_str().unwrap().trim(),
            thinking.trim()
        );
        assert_eq!(blocks[1]["text"].as_str().unwrap().trim(), answer.trim());
    }
}

#[test]
fn models_are_loaded_by_name() {
    let dir = fixture("tiny");
    let trained = [("law", "llama-1"), ("tax", "llama-4")];
    let trained = trained.map(|(name, dir)| (name, fixture("training").join(dir)));
    let [law, tax] = trained
        .each_ref()
        .map(|(name, dir)| format!("{name}={}", dir.display()));
    let models = ["--models-dir", dir.to_str().unwrap()];
    let adapters = ["--adapter", &law, "--adapter", &tax];
    let server = serve_args(&[&models[..], &adapters].concat());
    let get = |path: &str| get(&server, path);
    let listed_in = |answer: &Value, list: &str, name: &str| -> Vec<String> {
        let all = answer[list].as_array().unwrap().iter();
        all.map(|m| m[name].as_str().unwrap().to_owned()).collect()
    };
    let listed = listed_in(&get("/v1/models"), "data", "id");
    for name in ["llama", "qwen2", "gemma3-text"] {
        assert!(listed.iter().any(|n| n == name), "{name} in {listed:?}");
    }
    assert_eq!(get("/api/ps")["models"], json!([]));
    let names = ["qwen2", "llama:law", "llama", "llama:tax"];
    let expected = names.map(|name| {
        let (base, adapter) = match name.split_once(':') {
            Some((base, adapter)) => (base, trained.iter().find(|(name, _)| *name == adapter)),
            None => (name, None),
        };
        let mut options = LoadOptions::new().with_backend("cpu");
        options.adapter_path = adapter.map(|(_, dir)| dir.clone());
        let model = inference::load_model(dir.join(base), &options).unwrap();
        let stream = model.generate(&Prompt::from("hello"), &greedy(8));
        stream.unwrap().text().unwrap()
    });
    assert_ne!(expected[1], expected[3]);
    let ask = |name: &str, expected: &str| {
        let body = json!({"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0,
            "ignore_eos": true});
        let reply = server.json("/v1/completions", &body);
        assert_eq!(reply["choices"][0]["text"], expected, "{name}");
        assert_eq!(reply["model"], name);
    };
    for (name, expected) in names.iter().zip(&expected) {
        ask(name, expected);
    }
    let loaded = listed_in(&get("/api/ps"), "models", "name");
    assert_eq!(loaded.len(), 4, "{loaded:?}");
    std::thread::scope(|scope| {
        for (name, expected) in names.iter().zip(&expected) {
            scope.spawn(|| (0..4).for_each(|_| ask(name, expected)));
        }
    });
    for name in ["../tiny/llama", "nothing", dir.to_str().unwrap()] {
        let body = json!({"model": name, "prompt": "hello"});
        let (status, text) = server.post("/v1/completions", &body);
        assert_eq!(status, 404, "{name}: {text}");
    }
}

/// The answer of a server to a `GET` request.
fn get(server: &Served, path: &str) -> Value {
    let url = format!("{}{path}", server.url);
    let mut answer = agent().get(&url).call().unwrap();
    let text = answer.body_mut().read_to_string().unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn an_idle_model_is_unloaded() {
    let dir = fixture("tiny");
    let models = ["--models-dir", dir.to_str().unwrap()];
    let server = serve_args(&[&models[..], &["--keep-alive", "1s"]].concat());
    let body = json!({"model": "llama", "prompt": "hello", "max_tokens": 1});
    server.json("/v1/completions", &body);
    let until = Instant::now() + Duration::from_secs(120);
    while get(&server, "/api/ps")["models"] != json!([]) {
        assert!(Instant::now() < until, "a model stays");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn schemas_and_bad_requests() {
    let server = serve(&["--ctx-size", "40"]);
    let schema = json!({"enum": ["yes", "no"]});
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    });
    let reply = server.json("/v1/chat/completions", &body);
    let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(["\"yes\"", "\"no\""].contains(&text), "{text}");
    for (path, body, says) in [
        (
            "/v1/completions",
            json!({"prompt": "hello ".repeat(100)}),
            "context holds 40",
        ),
        (
            "/v1/completions",
            json!({"prompt": "x", "temperature": 9}),
            "temperature",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "hi"}],
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}}}),
            "",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "hi"}],
                "chat_template_kwargs": {"messages": []}}),
            "messages",
        ),
    ] {
        let (status, text) = server.post(path, &body);
        assert_eq!(status, 400, "{text}");
        assert!(text.contains(says), "{text}");
    }
    server.json("/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
}

#[test]
fn a_signal_lets_replies_end() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let mut server = serve(&[]);
        let url = format!("{}/v1/completions", server.url);
        let body = json!({"prompt": "x", "max_tokens": 250, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true}});
        let mut answer = agent().post(&url).send(body.to_string()).unwrap();
        server.signal(signal);
        let mut text = String::new();
        answer
            .body_mut()
            .as_reader()
            .read_to_string(&mut text)
            .unwrap();
        assert!(text.contains("\"completion_tokens\":250"), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!(server.end().code(), Some(0));
    }
}

/// A restarted server continues a conversation from the computed prompts that it finds on disk.
#[test]
fn a_restarted_server_continues_a_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompts");
    let flags = [
        "--cache-dir",
        path.to_str().unwrap(),
        "--cache-dir-size",
        "64MiB",
    ];
    let ask = |server: &Served, prompt: &[u32]| {
        let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0,
            "ignore_eos": true, "logprobs": 1, "return_tokens_as_token_ids": true});
        server.json("/v1/completions", &body)
    };
    let first: Vec<u32> = (0..40).map(|i| (i * 37) % 260 + 16).collect();
    // The second prompt continues the first prompt, but differs from the first reply.
    let second = [&first[..], &[20, 30, 40]].concat();
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();

    let mut server = serve(&flags);
    assert_eq!(cached(&ask(&server, &first)), 0);
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(server.end().code(), Some(0));

    let server = serve(&flags);
    let reply = ask(&server, &second);
    assert_eq!(cached(&reply), 40);
    // A server that was not restarted replies the same, with the same log-probabilities.
    let plain = serve(&[]);
    let uncached = ask(&plain, &second);
    assert_eq!(cached(&uncached), 0);
    assert_eq!(reply["choices"][0]["text"], uncached["choices"][0]["text"]);
    let plain = serve(&[]);
    ask(&plain, &first);
    let expected = ask(&plain, &second);
    assert_eq!(cached(&expected), 40);
    assert_eq!(reply["choices"], expected["choices"]);

    // If the directory cannot be created, the server reports this at its start.
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let model = fixture("tiny/llama");
    let args = [
        "--cache-dir",
        file.to_str().unwrap(),
        model.to_str().unwrap(),
    ];
    let output = command().args(["--port", "0"]).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("--cache-dir"), "{text}");
}

#[test]
fn what_cannot_be_served_is_told_before_anything_is_loaded() {
    let model = fixture("tiny/llama");
    let model = model.to_str().unwrap();
    for (args, says) in [
        (&["--host", "0.0.0.0", model][..], "API key"),
        (&["--host", "example.com", model], "IP address"),
        (&["--api-key", " ", model], "API key"),
        (&["--parallel", "0", model], "parallel"),
        (&["--allow-origin", "chat.example", model], "chat.example"),
        (&["--adapter-path", "x", model, "other"], "one model"),
        (&["--adapter", "law", model], "NAME=DIR"),
        (&["--keep-alive", "soon", model], "duration"),
    ] {
        let output = command().args(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(says), "{args:?}: {text}");
    }
    let output = command()
        .args(["--port", "0", model, model])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("two models"), "{text}");
}

#[test]
fn flags_hold_for_requests_that_do_not_say_it() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "secret\nmore\n").unwrap();
    let server = serve(&[
        "--temp",
        "0",
        "--max-tokens",
        "3",
        "--chat-template-args",
        r#"{"mark": "!"}"#,
        "--chat-template",
        "{% for m in messages %}[{{ m.content }}{{ mark }}]{% endfor %}",
        "--alias",
        "other",
        "--log-level",
        "ERROR",
    ]);
    let body = json!({"prompt": "hello", "ignore_eos": true});
    let first = server.json("/v1/completions", &body);
    assert_eq!(first["model"], "other");
    assert_eq!(first["usage"]["completion_tokens"], 3);
    let greedy = json!({"prompt": "hello", "ignore_eos": true, "temperature": 0, "max_tokens": 5});
    let greedy = server.json("/v1/completions", &greedy);
    assert_eq!(greedy["usage"]["completion_tokens"], 5);
    let [first, greedy] = [&first, &greedy].map(|r| r["choices"][0]["text"].as_str().unwrap());
    assert!(greedy.starts_with(first), "{first:?} {greedy:?}");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(server.json("/apply-template", &chat)["prompt"], "[hi!]");

    // Heads have 32 elements, which allows a quantized cache. It is quantized from the first
    // position.
    let model = fixture("tiny/qwen3-q8");
    let bits = [
        "--kv-bits",
        "4",
        "--kv-group-size",
        "32",
        "--quantized-kv-start",
        "0",
    ];
    let packed = serve_args(&[&bits[..], &[model.to_str().unwrap()]].concat());
    let body =
        json!({"prompt": "hello there", "max_tokens": 20, "temperature": 0, "ignore_eos": true});
    let actual = packed.json("/v1/completions", &body);
    let options = LoadOptions::new().with_kv_bits(4).with_kv_group_size(32);
    let model = inference::load_model(model, &options.with_backend("cpu")).unwrap();
    let expected = model
        .generate(&Prompt::from("hello there"), &common::greedy(20))
        .unwrap();
    assert_eq!(actual["choices"][0]["text"], expected.text().unwrap());

    let key = key.to_str().unwrap();
    let locked = serve(&[
        "--api-key-file",
        key,
        "-m",
        fixture("tiny/gpt2").to_str().unwrap(),
    ]);
    let (status, reply) = locked.post("/v1/completions", &body);
    assert_eq!(status, 401, "{reply}");
    for (flags, says) in [
        (&["--top-p", "2"][..], "top_p"),
        (&["--alias", "a", "-m", "x"][..], "--alias"),
        (&["--api-key-file", "no-such"][..], "no-such"),
        (&["--chat-template", "{% if %}"][..], "--chat-template"),
    ] {
        let model = fixture("tiny/llama");
        let output = command().args(flags).arg(model).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(says), "{text}");
    }
}

/// Edited requests over HTTP must equal edited requests to the engine, also in a batch with plain
/// ones. The server must allow edits.
#[test]
fn requests_edit_the_model_where_they_may() {
    let steering = json!({"edits": [
        {"layers": 0, "hook": "resid_post", "op": "scale", "factor": -2},
        {"layers": 1, "hook": "mlp_post", "neurons": [3, 5], "positions": "reply", "op": "zero"}]});
    let body = |steering: &Value| {
        json!({"prompt": "The capital", "max_tokens": 12, "temperature": 0, "ignore_eos": true,
               "steering": steering})
    };
    let closed = serve(&[]);
    for path in ["/v1/completions", "/v1/infer"] {
        let (status, reply) = closed.post(path, &body(&steering));
        assert_eq!(status, 400, "{path}: {reply}");
        assert!(reply.contains("--allow-steering"), "{path}: {reply}");
    }
    let server = serve(&["--allow-steering"]);
    let model = tiny("llama");
    let options = greedy(12).with_ignore_eos(true);
    let edits: inference::Steering = serde_json::from_value(steering.clone()).unwrap();
    let prompt = Prompt::from("The capital");
    let text = |options| model.generate(&prompt, options).unwrap().text().unwrap();
    let plain = text(&options);
    let edited = text(&options.clone().with_steering(edits));
    assert_ne!(plain, edited);
    // The requests run concurrently, in one batch.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            for (steering, expected) in [(&Value::Null, &plain), (&steering, &edited)] {
                let (server, body) = (&server, body(steering));
                scope.spawn(move || {
                    let reply = server.json("/v1/completions", &body);
                    assert_eq!(reply["choices"][0]["text"], expected.as_str());
                });
            }
        }
    });
    let chat = |steering: &Value| {
        let reply = server.json(
            "/v1/chat/completions",
            &json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12,
                    "temperature": 0, "ignore_eos": true, "steering": steering}),
        );
        reply["choices"][0]["message"].clone()
    };
    assert_ne!(chat(&Value::Null), chat(&steering));
    let infer = |steering: &Value| {
        let body = json!({"prompt": "The capital", "top": 3, "steering": steering});
        server.json("/v1/infer", &body)["predictions"].clone()
    };
    assert_ne!(infer(&Value::Null), infer(&steering));
    // An impossible edit is a client error, which must name the field.
    let zero = |layer: usize| json!({"layers": layer, "hook": "z", "op": "zero"});
    for (steering, wanted) in [
        (json!({"edits": [zero(9)]}), "edits[0].layers names layer 9"),
        (json!({"edits": []}), "edits is empty"),
        (json!({"edits": vec![zero(0); 257]}), "at most 256"),
        (json!({"edits": [zero(0)], "more": 1}), "more"),
        (
            json!({"edits": [{"layers": 0, "hook": "resid_pre", "op": "add",
                              "vector": {"file": "/etc/passwd"}}]}),
            "cannot be read here",
        ),
        (
            json!({"edits": [{"layers": 0, "hook": "resid_pre", "op": "patch",
                              "tokens": vec![5; 4097]}]}),
            "at most 4096",
        ),
    ] {
        let (status, reply) = server.post("/v1/completions", &body(&steering));
        assert_eq!(status, 400, "{reply}");
        assert!(reply.contains(wanted), "{reply}");
    }
}
