//! Tests of requests that do not end normally: the client disconnects, the queue is full, the
//! request fails, or the server stops.

use std::io::Read;
use std::time::{Duration, Instant};

use crate::common::{Running, config, events, eventually, limits, read, serve, serve_as};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn ask(text: &str, stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "stream": stream})
}

/// The value of a metric in `/metrics`.
fn figure(server: &Running, name: &str) -> f64 {
    let text = server.client().get("/metrics").text();
    let line = text.lines().find(|l| l.starts_with(&format!("{name} ")));
    line.map_or(0.0, |l| l.rsplit(' ').next().unwrap().parse().unwrap())
}

/// Checks that all queue places are free.
#[track_caller]
fn free(server: &Running) {
    server.idle();
    let client = server.client();
    eventually("free places", || {
        client.get("/ready").json()["requests"] == 0
    });
}

#[test]
fn requests_whose_keys_do_not_fit_wait_for_others_to_end() {
    let config = config().with_kv_budget(1000 * 8);
    let server = serve_as(&config, |model| model.with_context(10_000));
    let client = server.client();
    let ask = |most: usize| json!({"prompt": "!long", "max_tokens": most});
    let replies: Vec<_> = (0..4)
        .map(|_| client.open_json("/v1/completions", &ask(400)))
        .collect();
    for reply in replies {
        read(reply).expect(200);
    }
    // Each request needs the KV cache of 405 tokens, so the budget allows two.
    assert_eq!(server.state.peak(), 2);
    let error = client.post("/v1/completions", &ask(2000)).expect(400);
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("keys and values"), "{message}");
    // The refused request must not block later requests.
    client.post("/v1/completions", &ask(5)).expect(200);
    // The server sends the end of a reply before it releases the reply's memory.
    eventually("no keys and values are reserved", || {
        let text = client.get("/metrics").text();
        text.contains("inference_kv_reserved_bytes 0\n")
    });
}

/// A request with a JSON schema of this title. The scripted model reads commands from the title.
fn structured(title: &str) -> Value {
    let schema = json!({"type": "object", "title": title});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let mut body = ask("x", false);
    body["response_format"] = format;
    body
}

#[test]
fn a_schema_that_compiles_slowly_stalls_no_other_reply() {
    let server = serve(&config());
    let client = server.client();
    server.state.hold_grammars(true);
    let mut talker = client.open_json(CHAT, &ask("!long", true));
    let waiting = client.open_json(CHAT, &structured("slow"));
    eventually("both", || client.get("/ready").json()["requests"] == 2);
    eventually("a compilation", || server.state.compiling() == 1);
    // While the grammar is compiled, the running reply must receive about a hundred tokens.
    let mut some = [0; 20_000];
    talker.read_exact(&mut some).unwrap();
    assert_eq!(server.state.running(), 1);
    server.state.hold_grammars(false);
    let reply = read(waiting).expect(200);
    assert_eq!(reply["choices"][0]["message"]["content"], "{\"a\":1}");
    drop(talker);
    free(&server);
    // Clients that disconnect during compilation must free their places.
    server.state.hold_grammars(true);
    let first = client.open_json(CHAT, &structured("first"));
    eventually("a compilation", || server.state.compiling() == 1);
    let second = client.open_json(CHAT, &structured("second"));
    eventually("both", || client.get("/ready").json()["requests"] == 2);
    drop((first, second));
    server.state.hold_grammars(false);
    free(&server);
    // A compilation inside the session would block other requests.
    assert_eq!(server.state.compiled_in_session(), 0);
}

#[test]
fn a_grammar_that_cannot_be_prepared_fails_alone() {
    let server = serve(&config());
    let client = server.client();
    for _ in 0..2 {
        let error = client.post(CHAT, &structured("!badgrammar")).expect(400);
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("no grammar"), "{message}");
        client.post(CHAT, &structured("!preparepanic")).expect(500);
        client.post(CHAT, &structured("good")).expect(200);
        client.post(CHAT, &ask("x", false)).expect(200);
    }
    free(&server);
}

#[test]
fn a_client_that_leaves_frees_its_row_in_decode() {
    let server = serve(&config());
    for stream in [true, false] {
        let mut connection = server.client().open_json(CHAT, &ask("!long", stream));
        if stream {
            // The read proves that the reply has started.
            let mut some = [0; 400];
            connection.read_exact(&mut some).unwrap();
        }
        eventually("a row", || server.state.running() == 1);
        drop(connection);
        free(&server);
    }
}

#[test]
fn a_client_that_leaves_frees_its_row_in_prefill() {
    let server = serve(&config());
    for stream in [true, false] {
        let connection = server.client().open_json(CHAT, &ask("!prefill", stream));
        eventually("a row", || server.state.running() == 1);
        drop(connection);
        free(&server);
    }
}

#[test]
fn a_client_that_leaves_the_queue_is_never_run() {
    let server = serve(&config().with_parallel(1));
    for stream in [true, false] {
        let running = server.client().open_json(CHAT, &ask("!prefill", true));
        eventually("a row", || server.state.running() == 1);
        let added = server.state.started();
        let waiting = server.client().open_json(CHAT, &ask("say:never", stream));
        eventually("a queue", || {
            figure(&server, "inference_requests_queued") == 1.0
        });
        drop(waiting);
        eventually("no queue", || {
            figure(&server, "inference_requests_queued") == 0.0
        });
        drop(running);
        free(&server);
        assert_eq!(server.state.started(), added);
    }
}

#[test]
fn what_is_too_much_is_refused_before_it_costs_anything() {
    let server = serve(&config().with_parallel(2).with_max_queue(1));
    let running: Vec<_> = (0..3)
        .map(|_| server.client().open_json(CHAT, &ask("!prefill", true)))
        .collect();
    eventually("a queue", || {
        figure(&server, "inference_requests_queued") == 1.0
    });
    assert_eq!(server.state.running(), 2);
    let client = server.client();
    for path in [
        CHAT,
        "/v1/completions",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
    ] {
        let body =
            json!({"max_tokens": 4, "prompt": "x", "messages": [{"role": "user", "content": "x"}]});
        let reply = client.post(path, &body);
        assert_eq!(reply.status, 429, "{path}: {}", reply.text());
        assert_eq!(reply.header("retry-after"), Some("1"));
    }
    client
        .post("/v1/embeddings", &json!({"input": "x"}))
        .expect(429);
    assert_eq!(client.get("/ready").expect(503)["ready"], false);
    assert_eq!(client.get("/health").expect(200)["status"], "ok");
    assert_eq!(figure(&server, "inference_refused_total"), 6.0);
    drop(running);
    free(&server);
    client.post(CHAT, &ask("say:ok", false)).expect(200);
    // A request for more choices than free places is refused, too.
    let body = json!({"messages": [{"role": "user", "content": "x"}], "n": 4});
    client.post(CHAT, &body).expect(429);
}

#[test]
fn no_more_run_together_than_may() {
    let server = serve(&config().with_parallel(2).with_max_queue(8));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let client = server.client();
            std::thread::spawn(move || client.post(CHAT, &ask("say:together", false)))
        })
        .collect();
    for client in clients {
        let reply = client.join().unwrap().expect(200);
        assert_eq!(reply["choices"][0]["message"]["content"], "together");
    }
    assert_eq!(server.state.peak(), 2);
    assert_eq!(figure(&server, "inference_queue_time_seconds_count"), 8.0);
}

#[test]
fn a_reader_that_is_too_slow_is_given_up() {
    let mut limits = limits();
    limits.buffered_tokens = 16;
    let server = serve_as(&config().with_limits(limits), |model| model);
    // The reply exceeds the system's socket buffers, which the client leaves full.
    let body = json!({"prompt": "!long", "max_tokens": 1_000_000, "stream": true, "n": 4});
    let connection = server.client().open_json("/v1/completions", &body);
    eventually("rows", || server.state.running() == 4);
    eventually("an end", || server.state.running() == 0);
    assert!(figure(&server, "inference_slow_readers_total") >= 1.0);
    // Only the connection of the request to `/metrics` may remain. The server must have closed the
    // other one, although its client is still connected.
    eventually("a closed connection", || {
        figure(&server, "inference_connections") == 1.0
    });
    free(&server);
    drop(connection);
}

#[test]
fn a_stream_begins_at_once_and_stays_alive_in_the_queue() {
    let server = serve(&config().with_parallel(1));
    let running = server.client().open_json(CHAT, &ask("!prefill", true));
    eventually("a row", || server.state.running() == 1);
    let mut waiting = server.client().open_json(CHAT, &ask("say:late", true));
    let mut text = String::new();
    let until = Instant::now() + Duration::from_secs(60);
    while text.matches(": ping").count() < 2 {
        assert!(Instant::now() < until, "{text}");
        let mut part = [0; 256];
        let n = waiting.read(&mut part).unwrap();
        text.push_str(&String::from_utf8_lossy(&part[..n]));
    }
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    drop(running);
    let mut rest = String::new();
    waiting.read_to_string(&mut rest).unwrap();
    assert!(
        rest.contains("\"content\":\"e\"") && rest.contains("[DONE]"),
        "{rest}"
    );
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let mut limits = limits();
    limits.request_timeout = Duration::from_millis(300);
    let server = serve(&config().with_parallel(1).with_limits(limits));
    let client = server.client();
    let slow = client.open_json(CHAT, &ask("!prefill", false));
    eventually("a row", || server.state.running() == 1);
    let queued = client.open_json(CHAT, &ask("!prefill", true));
    let error = read(slow).expect(504);
    assert_eq!(error["error"]["type"], "timeout_error");
    let events = events(&read(queued));
    let [.., (_, error), (_, done)] = events.as_slice() else {
        panic!("{events:?}")
    };
    assert_eq!(error["error"]["code"], "timeout");
    assert_eq!(*done, Value::Null);
    free(&server);
}

#[test]
fn one_row_fails_alone() {
    let server = serve(&config());
    let other = server.client().open_json(CHAT, &ask("!prefill", true));
    eventually("a row", || server.state.running() == 1);
    server
        .client()
        .post(CHAT, &ask("say:hello !fail", false))
        .expect(500);
    let streamed = server.client().post(CHAT, &ask("say:hello !fail", true));
    let events = events(&streamed);
    let (last, before) = events.split_last().unwrap();
    assert_eq!(last.1, Value::Null);
    assert_eq!(before.last().unwrap().1["error"]["code"], "internal_error");
    assert_eq!(server.state.running(), 1, "the other goes on");
    assert_eq!(server.state.sessions(), 1);
    drop(other);
    free(&server);
}

#[test]
fn a_request_without_memory_fails_alone() {
    let server = serve(&config());
    let client = server.client();
    let other = client.open_json(CHAT, &ask("!prefill", true));
    eventually("a row", || server.state.running() == 1);
    let body = ask("say:hello !memory", false);
    let error = client.post(CHAT, &body).expect(503);
    assert_eq!(error["error"]["code"], "out_of_memory");
    let streamed = events(&client.post(CHAT, &ask("say:hello !memory", true)));
    let [.., (_, error), (_, done)] = streamed.as_slice() else {
        panic!("{streamed:?}")
    };
    assert_eq!(error["error"]["code"], "out_of_memory");
    assert_eq!(*done, Value::Null);
    assert_eq!(server.state.running(), 1, "the other goes on");
    assert_eq!(server.state.sessions(), 1);
    assert_eq!(client.get("/health").expect(200)["status"], "ok");
    drop(other);
    free(&server);
}

#[test]
fn a_panic_or_a_failing_step_is_survived() {
    let server = serve(&config());
    let client = server.client();
    for (n, bad) in ["!panic", "!error", "!addpanic"].into_iter().enumerate() {
        let other = client.open_json(CHAT, &ask("!prefill", false));
        eventually("a row", || server.state.running() == 1);
        let error = client.post(CHAT, &ask(bad, false)).expect(500);
        let text = error.to_string();
        assert!(
            !text.contains("secret") && !text.contains("asked to"),
            "{text}"
        );
        // The other request was in the failed forward pass. The pass's state is unknown, so that
        // request must fail, too.
        read(other).expect(500);
        let reply = client.post(CHAT, &ask("say:well", false)).expect(200);
        assert_eq!(reply["choices"][0]["message"]["content"], "well");
        assert_eq!(server.state.sessions(), n + 2);
        assert_eq!(client.get("/health").status, 200);
    }
    assert_eq!(figure(&server, "inference_engine_failures_total"), 3.0);
    free(&server);
}

#[test]
fn health_tells_the_truth() {
    let mut limits = limits();
    limits.stall = Duration::from_millis(200);
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    assert_eq!(client.get("/health").expect(200)["status"], "ok");
    server.state.hold();
    let stuck = client.open_json(CHAT, &ask("say:x", false));
    eventually("a stall", || client.get("/health").status == 503);
    assert_eq!(client.get("/health").json()["status"], "stalled");
    assert_eq!(client.get("/ready").status, 503);
    server.state.release();
    read(stuck).expect(200);
    assert_eq!(client.get("/health").expect(200)["status"], "ok");
    for _ in 0..3 {
        client.post(CHAT, &ask("!panic", false)).expect(500);
    }
    assert_eq!(client.get("/health").expect(503)["status"], "failing");
    client.post(CHAT, &ask("say:x", false)).expect(200);
    assert_eq!(client.get("/health").expect(200)["status"], "ok");
}

#[test]
fn a_stop_lets_replies_end() {
    let mut limits = limits();
    limits.drain_timeout = Duration::from_secs(10);
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    server.state.hold();
    let streamed = client.open_json(CHAT, &ask("say:to the end", true));
    let open = client.open_json(CHAT, &ask("say:me too", false));
    // One client is idle, and one client sends its request only after the stop.
    let idle = client.connect();
    // `hold` blocks the engine in its first step, so it may not admit the second row. Therefore the
    // test waits for requests, not for rows.
    eventually("requests", || client.get("/ready").json()["requests"] == 2);
    server.stop();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!server.stopped());
    server.state.release();
    let reply = read(open).expect(200);
    assert_eq!(reply["choices"][0]["message"]["content"], "me too");
    let text = read(streamed).text();
    assert!(
        text.contains("\"finish_reason\":\"stop\"") && text.ends_with("[DONE]\n\n"),
        "{text}"
    );
    eventually("the end", || server.stopped());
    assert!(server.state.is_closed());
    assert!(std::net::TcpStream::connect(server.address).is_err());
    drop(idle);
}

#[test]
fn a_stop_does_not_wait_forever() {
    let server = serve(&config().with_parallel(1));
    let client = server.client();
    let running = client.open_json(CHAT, &ask("!prefill", false));
    eventually("a row", || server.state.running() == 1);
    let queued = client.open_json(CHAT, &ask("say:x", false));
    eventually("a queue", || {
        figure(&server, "inference_requests_queued") == 1.0
    });
    server.stop();
    for connection in [running, queued] {
        let error = read(connection).expect(503);
        assert_eq!(error["error"]["code"], "shutting_down");
    }
    eventually("the end", || server.stopped());
}

#[test]
fn nothing_is_made_of_a_body_before_there_is_a_place() {
    let server = serve(&config().with_parallel(1).with_max_queue(0));
    let client = server.client();
    let running = client.open_json(CHAT, &ask("!long", true));
    eventually("it runs", || server.state.running() == 1);
    // The body is malformed, but the server must refuse the request before it parses the body.
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/infer",
        "/completion",
        "/infill",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/embedding",
        "/rerank",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
    ] {
        assert_eq!(client.ask("POST", path, b"{").status, 429, "{path}");
    }
    drop(running);
    eventually("the place is free", || {
        client.ask("POST", "/v1/completions", b"{").status == 400
    });
}

#[test]
fn values_of_a_body_take_memory_until_the_request_ends() {
    let mut limits = limits();
    limits.body_bytes = 100_000;
    limits.all_bodies_bytes = 400_000;
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    // A few kilobytes of text that need several hundred kilobytes as parsed values.
    let wide = |text: &str| {
        let mut body = ask(text, true);
        body["x"] = vec![json!({}); 300].into();
        body
    };
    let running = client.open_json(CHAT, &wide("!long"));
    eventually("it runs", || server.state.running() == 1);
    client.post(CHAT, &wide("say:x")).expect(429);
    client.post(CHAT, &ask("say:x", false)).expect(200);
    drop(running);
    eventually("its memory is free", || {
        client.post(CHAT, &wide("say:x")).status == 200
    });
    // A body that exceeds the limit even alone is refused as too large.
    let mut body = ask("say:x", true);
    body["x"] = vec![json!({}); 1000].into();
    client.post(CHAT, &body).expect(413);
}
