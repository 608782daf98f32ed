//! Tests of infilling, predictions of one token, aliases of routes, and very long texts.

use std::io::Read;

use super::{MARKS, coder};
use crate::common::{config, serve};
use serde_json::json;

#[test]
fn text_is_filled_in_where_the_model_has_tokens_for_it() {
    let server = coder(MARKS);
    let client = server.client();
    let body = json!({"input_prefix": "fn a() {", "input_suffix": "}", "n_predict": 5});
    let reply = client.post("/infill", &body).expect(200);
    assert_eq!(reply["content"], "hello");
    assert_eq!(
        server.state.last_prompt(),
        "<|fim_prefix|>fn a() {<|fim_suffix|>}<|fim_middle|>"
    );
    let body = json!({"input_prefix": "a", "input_suffix": "b", "prompt": "c",
        "input_extra": [{"filename": "x.rs", "text": "X"}]});
    client.post("/infill", &body).expect(200);
    assert_eq!(
        server.state.last_prompt(),
        "<|file_sep|>x.rs\nX<|file_sep|>filename\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c"
    );
    let body = json!({"prompt": "a", "suffix": "b"});
    client.post("/v1/completions", &body).expect(200);
    assert_eq!(
        server.state.last_prompt(),
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    );
    // Text of a file must not become the special token that ends a part.
    let body = json!({"input_prefix": "a<|fim_middle|>", "input_suffix": "b"});
    let error = client.post("/infill", &body).expect(400);
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("special token")
    );
    let body = json!({"prompt": ["a", "b"], "suffix": "c"});
    let error = client.post("/v1/completions", &body).expect(400);
    assert_eq!(error["error"]["param"], "suffix");

    let server = coder(&["[PREFIX]", "[SUFFIX]"]);
    let body = json!({"input_prefix": "a", "input_suffix": "b"});
    server.client().post("/infill", &body).expect(200);
    assert_eq!(server.state.last_prompt(), "[SUFFIX]b[PREFIX]a");

    let server = serve(&config());
    for (path, body) in [
        ("/infill", body),
        ("/v1/completions", json!({"prompt": "a", "suffix": "b"})),
    ] {
        let error = server.client().post(path, &body).expect(400);
        assert_eq!(error["error"]["code"], "unsupported_parameter");
    }
}

#[test]
fn the_next_token_is_predicted() {
    let server = serve(&config());
    let client = server.client();
    let body = json!({"prompt": "say:hello", "top": 3});
    let reply = client.post("/v1/infer", &body).expect(200);
    assert_eq!(reply["mode"], "dense");
    assert_eq!(reply["prompt"], "say:hello");
    let all = reply["predictions"].as_array().unwrap();
    assert_eq!(all.len(), 3);
    // The scripted model gives each token the log-probability -0.5.
    assert_eq!(all[0], json!({"token": "h", "probability": 0.6065}));
    assert!(reply["latency_ms"].is_number());
    let options = server.state.last_options();
    assert_eq!((options.max_tokens, options.output.logprobs), (1, Some(3)));
    for (body, param) in [
        (json!({"prompt": " "}), "prompt"),
        (json!({}), "prompt"),
        (json!({"prompt": "x", "top": 0}), "top"),
        (json!({"prompt": "x", "top": 10_000}), "top"),
        (json!({"prompt": "x", "mode": "walk"}), "mode"),
        (json!({"prompt": "x", "mode": "compare"}), "mode"),
    ] {
        let error = client.post("/v1/infer", &body).expect(400);
        assert_eq!(error["error"]["param"], param);
    }
}

/// llama.cpp's clients and tests use these aliases.
#[test]
fn second_names_of_routes_answer_alike() {
    let server = serve(&config());
    let client = server.client();
    let chat = json!({"messages": [{"role": "user", "content": "say:yes"}]});
    for path in ["/v1/chat/completions", "/chat/completions"] {
        let reply = client.post(path, &chat).expect(200);
        assert_eq!(reply["choices"][0]["message"]["content"], "yes", "{path}");
        let count = client.post(&format!("{path}/input_tokens"), &chat);
        let tokens = reply["usage"]["prompt_tokens"].clone();
        assert_eq!(count.expect(200)["input_tokens"], tokens, "{path}");
    }
    for path in ["/completion", "/completions"] {
        let reply = client.post(path, &json!({"prompt": "say:yes"}));
        assert_eq!(reply.expect(200)["content"], "yes", "{path}");
    }
    for path in ["/embedding", "/embeddings"] {
        let reply = client.post(path, &json!({"content": "abc"})).expect(200);
        assert!(reply[0]["embedding"][0].is_array(), "{path}: {reply}");
    }
    let response = client.post("/responses", &json!({"input": "say:yes"}));
    assert_eq!(response.expect(200)["object"], "response");
    assert_eq!(client.get("/models").expect(200)["data"][0]["id"], "tiny");
}

#[test]
fn a_list_mixes_texts_ids_and_objects() {
    let server = serve(&config());
    let ids: Vec<u32> = "say:two".bytes().map(u32::from).collect();
    let prompts = json!(["say:one", ids, {"prompt_string": "say:three"}]);
    let reply = server
        .client()
        .post("/completion", &json!({"prompt": prompts}));
    let reply = reply.expect(200);
    let said: Vec<_> = reply
        .as_array()
        .unwrap()
        .iter()
        .map(|r| &r["content"])
        .collect();
    assert_eq!(said, ["one", "two", "three"]);
    let client = server.client();
    let image = json!({"prompt_string": "a", "multimodal_data": ["AAAA"]});
    // A list must not be accepted as an object with its fields in order.
    for prompt in [image, json!([["AAA"]]), json!({})] {
        client
            .post("/completion", &json!({"prompt": prompt}))
            .expect(400);
    }
    let body = client
        .post("/completion", &json!(["tiny", "say:a"]))
        .expect(400);
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("not a list"), "{message}");
}

/// A server that accepts requests with long token lists, and the body of such a request.
fn long_texts(
    adjust: impl FnOnce(&mut inference_server::Limits),
) -> (crate::common::Running, Vec<u8>) {
    let mut limits = crate::common::limits();
    limits.prompt_bytes = 64 << 20;
    limits.body_bytes = 32 << 20;
    limits.all_bodies_bytes = 4 << 30;
    limits.json_values = 10_000_000;
    limits.body_timeout = std::time::Duration::from_secs(30);
    limits.write_timeout = std::time::Duration::from_secs(30);
    adjust(&mut limits);
    let server = serve(&config().with_limits(limits));
    let body = format!("{{\"tokens\":[{}1]}}", "1,".repeat(LONG - 1));
    (server, body.into_bytes())
}

/// The number of tokens. The answer writes six bytes per token, so its text exceeds the system's
/// socket buffers.
const LONG: usize = 4_000_000;

#[test]
fn a_text_of_tokens_holds_its_place_until_it_is_read() {
    let (server, body) = long_texts(|_| {});
    let client = server.client();
    let mut stream = client.open("POST", "/detokenize", &body);
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    assert_eq!(client.get("/ready").json()["requests"], 1);
    let mut bytes = 0;
    let mut part = vec![0; 1 << 20];
    loop {
        match stream.read(&mut part).unwrap() {
            0 => break,
            n => bytes += n,
        }
    }
    assert!(bytes > 6 * LONG, "{bytes}");
    crate::common::eventually("the place is free", || {
        client.get("/ready").json()["requests"] == 0
    });
    // The text must be valid JSON, both in several parts and when it is empty.
    let text = "é\"\n".repeat(20_000);
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    for (ids, text) in [(ids, text), (Vec::new(), String::new())] {
        let reply = client.post("/detokenize", &json!({"tokens": ids}));
        assert_eq!(reply.expect(200), json!({"content": text}));
    }
    // The decoded text is limited, however long the text of a token is.
    let small = serve(&config().with_limits({
        let mut limits = crate::common::limits();
        limits.prompt_bytes = 80;
        limits
    }));
    let many = json!({"tokens": vec![97; 11]});
    let error = small.client().post("/detokenize", &many).expect(400);
    assert_eq!(error["error"]["param"], "tokens");
}

#[test]
fn a_client_that_reads_an_answer_slowly_is_left() {
    let (server, body) = long_texts(|limits| {
        limits.answer_timeout = std::time::Duration::from_millis(300);
    });
    let mut stream = server.client().open("POST", "/detokenize", &body);
    let (mut bytes, mut part) = (0, vec![0; 64 << 10]);
    // The client reads slowly, but each write succeeds in time. The whole answer would need eight
    // seconds, so the total limit must end it.
    while let Ok(n @ 1..) = stream.read(&mut part) {
        bytes += n;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(bytes < 6 * LONG, "all {bytes} bytes came");
    crate::common::eventually("the place is free", || {
        server.client().get("/ready").json()["requests"] == 0
    });
    // The limit applies separately to each answer of a connection, and to a stream.
    let reply = server
        .client()
        .post("/v1/completions", &json!({"prompt": "say:well"}));
    assert_eq!(reply.expect(200)["choices"][0]["text"], "well");
}
