//! Tests of how much memory a request can use. They read the peak memory of this process, so they
//! have their own binary.

#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

mod common;

use std::io::Read;

use common::{config, serve};
use parking_lot::Mutex;
use serde_json::json;

/// Serializes the tests, because they all measure this process.
static ALONE: Mutex<()> = Mutex::new(());

/// A field of the process's status, in KiB.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs `run`, and returns how much the peak of resident memory grew, in KiB.
fn grown<T>(run: impl FnOnce() -> T) -> (T, u64) {
    // Writing 5 to this file resets the peak to the current resident memory.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmHWM:");
    let done = run();
    (done, status("VmHWM:") - before)
}

#[test]
fn pieces_of_a_long_text_are_not_all_in_memory() {
    let _alone = ALONE.lock();
    let server = serve(&config());
    let client = server.client();
    let short = json!({"content": "a".repeat(5000), "with_pieces": true});
    // The answer is sent in several parts, and must be valid JSON.
    let reply = client.post("/tokenize", &short);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let tokens = reply.expect(200);
    let tokens = tokens["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 5000);
    assert!(tokens.iter().all(|t| *t == json!({"id": 97, "piece": "a"})));

    let request = json!({"content": "a".repeat(2 << 20), "with_pieces": true}).to_string();
    // The clients discard what they read, so the peak is the server's memory.
    let read = || {
        let mut stream = client.open("POST", "/tokenize", request.as_bytes());
        let mut part = vec![0; 64 << 10];
        let mut bytes = 0;
        loop {
            match stream.read(&mut part).unwrap() {
                0 => return bytes,
                n => bytes += n,
            }
        }
    };
    let run = || {
        std::thread::scope(|scope| {
            let clients = [(); 3].map(|()| scope.spawn(read));
            for client in clients {
                let bytes = client.join().unwrap();
                assert!(bytes > 20 * (2 << 20), "only {bytes} bytes");
            }
        });
    };
    let ((), grown) = grown(run);
    let grown = grown >> 10;
    // Bodies, texts and ids of the three requests need 36 MiB. Growing lists are reallocated, which
    // doubles that. The answers have 132 MiB, and JSON values for all tokens would need 3 GiB.
    assert!(grown < 120, "the peak grew by {grown} MiB");
}

/// Sends a body. Returns the answer, and how much the peak grew in KiB.
fn cost(server: &common::Running, path: &str, body: &str) -> (common::Reply, u64) {
    let client = server.client();
    grown(|| client.ask("POST", path, body.as_bytes()))
}

/// Tool results that contain nested arrays, `levels` deep, in `bytes` bytes in total.
fn nested_results(levels: usize, bytes: usize) -> String {
    let open = r#"{"type":"tool_result","tool_use_id":"x","content":["#;
    let small = "[],".repeat(bytes / 3);
    let inner = format!("{}{small}[]{}", open.repeat(levels), "]}".repeat(levels));
    format!(r#"{{"max_tokens":1,"messages":[{{"role":"user","content":[{inner}]}}]}}"#)
}

#[test]
fn the_memory_of_parsing_is_bounded_by_the_body() {
    let _alone = ALONE.lock();
    // This test measures the deserializers, so the limits on values are disabled.
    let mut all = common::limits();
    all.json_values = 10_000_000;
    all.json_containers = 10_000_000;
    all.all_bodies_bytes = 1 << 31;
    all.body_timeout = std::time::Duration::from_secs(30);
    let server = serve(&config().with_limits(all));
    let small = "[],".repeat(1_800_000);
    let image = format!(r#"{{"type":"image","x":[{small}[]]}}"#);
    for (path, body) in [
        ("/v1/messages", nested_results(29, 5_400_000)),
        (
            "/v1/messages",
            format!(r#"{{"max_tokens":1,"messages":[{{"role":"user","content":[{image}]}}]}}"#),
        ),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages":[{{"role":"user","content":[{image}]}}]}}"#),
        ),
        (
            "/v1/responses",
            format!(r#"{{"input":[{{"role":"user","content":[{image}]}}]}}"#),
        ),
        (
            "/v1/completions",
            format!(r#"{{"prompt":[[{}]]}}"#, &"{\"a\":0},".repeat(600_000)[1..]),
        ),
    ] {
        let kibibytes = body.len() as u64 >> 10;
        let (reply, grown) = cost(&server, path, &body);
        assert_eq!(reply.status, 400, "{}", reply.text());
        println!("{path}: {grown} KiB for {kibibytes} KiB");
        // A growing body needs up to three times its size, and a parsed value needs a few times the
        // size of its text.
        assert!(
            grown <= 12 * kibibytes,
            "{path}: {grown} KiB for {kibibytes} KiB"
        );
    }
}

#[test]
fn wide_bodies_are_refused_before_values_are_made_of_them() {
    let _alone = ALONE.lock();
    let server = serve(&config());
    let wide = format!(r#"[{}0]"#, r#"{"":0},"#.repeat(800_000));
    let text = serde_json::Value::from(format!(r#"{{"x":{wide}}}"#)).to_string();
    let message = r#""messages":[{"role":"user","content":"say:x"}]"#;
    let call = r#""type":"function","id":"1","function":{"name":"f","arguments""#;
    for (path, body) in [
        (
            "/v1/chat/completions",
            format!(r#"{{{message},"chat_template_kwargs":{{"x":{wide}}}}}"#),
        ),
        (
            "/v1/chat/completions",
            format!(r#"{{{message},"json_schema":{{"enum":{wide}}}}}"#),
        ),
        (
            "/v1/chat/completions",
            format!(
                r#"{{{message},"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"enum":{wide}}}}}}}]}}"#
            ),
        ),
        (
            "/v1/chat/completions",
            format!(
                r#"{{"messages":[{{"role":"assistant","tool_calls":[{{{call}:{text}}}}}]}}]}}"#
            ),
        ),
        (
            "/v1/responses",
            format!(r#"{{"input":"say:x","metadata":{{"x":{wide}}}}}"#),
        ),
        (
            "/v1/responses",
            format!(
                r#"{{"input":[{{"type":"function_call","call_id":"1","name":"f","arguments":{text}}}]}}"#
            ),
        ),
        (
            "/api/chat",
            format!(r#"{{{message},"format":{{"enum":{wide}}}}}"#),
        ),
        (
            "/completion",
            format!(r#"{{"prompt":"say:x","logit_bias":{wide}}}"#),
        ),
        (
            "/apply-template",
            format!(r#"{{{message},"chat_template_kwargs":{{"x":{wide}}}}}"#),
        ),
    ] {
        let (reply, grown) = cost(&server, path, &body);
        assert_eq!(reply.status, 400, "{path}: {}", reply.text());
        assert!(reply.text().contains("more than"), "{}", reply.text());
        println!("{path}: {grown} KiB");
        assert!(grown < 64 << 10, "{path}: the peak grew by {grown} KiB");
    }
}

#[test]
fn whole_log_probabilities_take_little_more_than_their_text() {
    let _alone = ALONE.lock();
    let mut limits = common::limits();
    limits.choices = 16;
    let server = serve(&config().with_parallel(16).with_limits(limits));
    let body = json!({"messages": [{"role": "user", "content": "!long"}], "n": 14,
        "logprobs": true, "top_logprobs": 20, "max_tokens": 890});
    let (reply, grown) = cost(&server, "/v1/chat/completions", &body.to_string());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = reply.body.len() as u64 >> 10;
    println!("{grown} KiB for {text} KiB");
    // The client stores the text twice and the server once. Each alternative needs about 100 bytes.
    assert!(grown < 8 * text, "{grown} KiB for {text} KiB");
}
