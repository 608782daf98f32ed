//! Hostile clients disconnect at any point and send arbitrary bytes. The server must keep answering
//! other clients, and must free all resources of hostile ones. The test takes a few seconds;
//! HOSTILE_SECONDS=1800 extends it to half an hour.

#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Client, config, eventually, limits, serve};
use serde_json::{Value, json};

/// Resources that this process uses.
#[derive(Debug, Clone, Copy)]
struct Held {
    files: usize,
    threads: usize,
    kilobytes: usize,
}

fn resources() -> Held {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| -> usize {
        let line = status.lines().find(|l| l.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    Held {
        files: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        threads: field("Threads:"),
        kilobytes: field("VmRSS:"),
    }
}

/// A pseudo-random generator with a fixed seed (a linear congruential generator with Knuth's
/// constants).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A JSON schema with a long chain of references.
fn chain(length: usize) -> Value {
    let mut all = serde_json::Map::new();
    for i in 0..length {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        all.insert(format!("d{i}"), next);
    }
    all.insert(format!("d{length}"), json!({"type": "string"}));
    json!({"$defs": all, "$ref": "#/$defs/d0"})
}

/// Bodies that no client should send, with the paths to which they go.
fn bodies() -> Vec<(&'static str, Vec<u8>)> {
    let chat = |fields: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "say:x"}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body.to_string().into_bytes()
    };
    let schema = |schema: Value| {
        chat(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}))
    };
    let mut nested = json!({"type": "string"});
    for _ in 0..50 {
        nested = json!({"type": "object", "properties": {"a": nested}});
    }
    vec![
        ("/v1/chat/completions", b"{".to_vec()),
        ("/v1/chat/completions", vec![0xFF; 1000]),
        ("/v1/chat/completions", "[".repeat(200_000).into_bytes()),
        ("/v1/chat/completions", schema(chain(2000))),
        ("/v1/chat/completions", schema(nested)),
        (
            "/v1/chat/completions",
            schema(json!({"pattern": "(".repeat(1000) + &")*".repeat(1000)})),
        ),
        ("/v1/chat/completions", chat(json!({"n": 1_000_000}))),
        ("/v1/chat/completions", chat(json!({"n": -1}))),
        ("/v1/chat/completions", chat(json!({"max_tokens": u64::MAX}))),
        ("/v1/chat/completions", chat(json!({"temperature": 1e300}))),
        (
            "/v1/chat/completions",
            chat(json!({"stop": vec!["x"; 10_000]})),
        ),
        (
            "/v1/completions",
            json!({"prompt": vec![vec![u32::MAX; 10]; 10]}).to_string().into_bytes(),
        ),
        (
            "/v1/completions",
            json!({"prompt": "x".repeat(500_000)}).to_string().into_bytes(),
        ),
        (
            "/v1/embeddings",
            json!({"input": vec!["x"; 5000]}).to_string().into_bytes(),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]})
                .to_string()
                .into_bytes(),
        ),
        ("/api/chat", b"{\"model\": \"../../etc/passwd\"}".to_vec()),
        ("/api/pull", b"{\"model\": \"http://127.0.0.1/x\"}".to_vec()),
        (
            "/v1/responses",
            json!({"input": vec![json!({"role": "user", "content": "x"}); 5000]})
                .to_string()
                .into_bytes(),
        ),
        (
            "/completion",
            json!({"prompt": "x", "logit_bias": vec![[1, 2]; 5000]}).to_string().into_bytes(),
        ),
        ("/detokenize", b"{\"tokens\": [4294967295]}".to_vec()),
    ]
}

const RAW: &[&[u8]] = &[
    b"",
    b"G",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"prompt\": ",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"a",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

/// One action of a hostile client.
fn attack(client: &Client, bodies: &[(&str, Vec<u8>)], dice: &mut Dice) {
    match dice.below(8) {
        // Sends a part of a header or a body, then stays silent or disconnects.
        0 => {
            let raw = RAW[dice.below(RAW.len())];
            let mut stream = client.connect();
            let _ = stream.write_all(raw);
            if dice.below(2) == 0 {
                finish(stream);
            }
        }
        1 => {
            let (path, body) = &bodies[dice.below(bodies.len())];
            finish(client.open("POST", path, body));
        }
        // Sends a truncated request.
        2 => {
            let (path, body) = &bodies[dice.below(bodies.len())];
            let head = format!(
                "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            let all = [head.as_bytes(), body].concat();
            let mut stream = client.connect();
            let _ = stream.write_all(&all[..dice.below(all.len())]);
        }
        // Reads some bytes of a stream, then disconnects.
        3 | 4 => {
            let what = ["!long", "!prefill", "say:hello", "!fail"][dice.below(4)];
            let (path, body) = [
                (
                    "/v1/chat/completions",
                    json!({"messages": [{"role": "user", "content": what}], "stream": true}),
                ),
                (
                    "/v1/completions",
                    json!({"prompt": what, "stream": true, "n": 2}),
                ),
                (
                    "/v1/messages",
                    json!({"max_tokens": 500, "messages": [{"role": "user", "content": what}],
                        "stream": true}),
                ),
                ("/v1/responses", json!({"input": what, "stream": true})),
                ("/api/generate", json!({"model": "tiny", "prompt": what})),
                ("/completion", json!({"prompt": what, "stream": true})),
            ][dice.below(6)]
            .clone();
            let mut stream = client.open_json(path, &body);
            let mut part = vec![0; dice.below(4000) + 1];
            let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
            let _ = stream.read(&mut part);
        }
        // Requests an unstreamed reply, and disconnects without reading it.
        5 => {
            let body = json!({"prompt": "!long", "max_tokens": 900, "n": 3});
            let stream = client.open_json("/v1/completions", &body);
            std::thread::sleep(Duration::from_millis(dice.below(20) as u64));
            drop(stream);
        }
        // Sends headers without end.
        6 => {
            let mut stream = client.connect();
            let _ = stream.write_all(b"GET / HTTP/1.1\r\n");
            for i in 0..300 {
                let line = format!("x-{i}: {}\r\n", "y".repeat(dice.below(500)));
                if stream.write_all(line.as_bytes()).is_err() {
                    break;
                }
            }
            finish(stream);
        }
        // Starts a stream and never reads it.
        _ => {
            let body = json!({"prompt": "!long", "max_tokens": 900, "stream": true});
            let stream = client.open_json("/v1/completions", &body);
            std::thread::sleep(Duration::from_millis(dice.below(100) as u64));
            drop(stream);
        }
    }
}

/// Reads a few bytes of the answer, if the server sends one.
fn finish(mut stream: TcpStream) {
    let _ = stream.set_read_timeout(Some(Duration::from_millis(100)));
    let mut part = [0; 4096];
    while matches!(stream.read(&mut part), Ok(n) if n > 0) {}
}

#[test]
fn nothing_of_hostile_clients_stays() {
    let seconds = std::env::var("HOSTILE_SECONDS").ok();
    let seconds: u64 = seconds.map_or(4, |s| s.parse().unwrap());
    let mut limits = limits();
    limits.connections = 64;
    limits.body_bytes = 1 << 20;
    limits.all_bodies_bytes = 8 << 20;
    let server = serve(&config().with_limits(limits));
    let bodies = bodies();
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let run = |seconds: Duration| {
        let until = Instant::now() + seconds;
        std::thread::scope(|scope| {
            for seed in 0..6 {
                let (client, bodies) = (server.client(), &bodies);
                scope.spawn(move || {
                    let mut dice = Dice(seed);
                    while Instant::now() < until {
                        attack(&client, bodies, &mut dice);
                    }
                });
            }
            // During the attacks, the server must serve well-behaved clients or report a full
            // queue.
            let client = server.client();
            let (stop, answered) = (&stop, &answered);
            scope.spawn(move || {
                while Instant::now() < until && !stop.load(Ordering::Relaxed) {
                    let body = json!({"prompt": "say:still here"});
                    let reply = client.post("/v1/completions", &body);
                    match reply.status {
                        200 => {
                            assert_eq!(reply.json()["choices"][0]["text"], "still here");
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        429 => std::thread::sleep(Duration::from_millis(5)),
                        status => panic!("{status}: {}", reply.text()),
                    }
                }
            });
        });
        eventually("all requests are gone", || {
            let ready = server.client().get("/ready").json();
            server.state.running() == 0 && ready["requests"] == 0
        });
        // The header timeout closes silent connections.
        eventually("all connections are gone", || {
            let text = server.client().get("/metrics").text();
            text.contains("inference_connections 1\n")
        });
    };
    // The first run makes all allocations that happen once per process.
    run(Duration::from_secs(1));
    let before = resources();
    run(Duration::from_secs(seconds));
    assert!(answered.load(Ordering::Relaxed) > 0, "nobody was served");
    eventually("files and threads are as before", || {
        let now = resources();
        now.files <= before.files + 2 && now.threads <= before.threads + 6
    });
    let after = resources();
    let grown = after.kilobytes.saturating_sub(before.kilobytes);
    assert!(grown < 64 << 10, "{before:?} became {after:?}");
    let reply = server
        .client()
        .post("/v1/completions", &json!({"prompt": "say:well"}));
    assert_eq!(reply.expect(200)["choices"][0]["text"], "well");
}

#[test]
fn more_connections_than_are_served_wait_and_are_served_then() {
    let mut limits = limits();
    limits.connections = 16;
    let server = serve(&config().with_limits(limits));
    let idle: Vec<TcpStream> = (0..200).map(|_| server.client().connect()).collect();
    // The earlier connections are silent, so the header timeout closes them.
    let reply = server
        .client()
        .post("/v1/completions", &json!({"prompt": "say:in time"}));
    assert_eq!(reply.expect(200)["choices"][0]["text"], "in time");
    drop(idle);
    server.idle();
}
