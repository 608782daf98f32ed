//! Tests of access control, and of requests that hostile clients send.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::common::{config, limits, read, serve};
use inference::ErrorKind;
use inference_server::{Config, Server};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn ask() -> Value {
    json!({"messages": [{"role": "user", "content": "say:yes"}]})
}

#[test]
fn a_key_is_asked_for_everywhere_but_for_signs_of_life() {
    let server = serve(&config().with_api_key(String::from("sesame")));
    for client in [
        server.client(),
        server.client().with("Authorization", "Bearer wrong"),
        server.client().with("Authorization", "Basic sesame"),
        server.client().with("Authorization", "Bearer"),
        server.client().with("x-api-key", "sesam"),
        server.client().with("x-api-key", ""),
    ] {
        let mut bodies = Vec::new();
        for path in [
            "/v1/models",
            "/metrics",
            "/openapi.json",
            "/api/tags",
            "/v1/models/tiny",
        ] {
            bodies.push(client.get(path));
        }
        for path in [
            CHAT,
            "/v1/completions",
            "/v1/embeddings",
            "/v1/messages",
            "/api/chat",
        ] {
            bodies.push(client.post(path, &ask()));
        }
        for reply in &bodies {
            assert_eq!(reply.status, 401, "{}", reply.text());
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
        assert_eq!(bodies[0].body, bodies[5].body, "one answer for all");
        for path in ["/", "/health", "/v1/health", "/ready"] {
            assert_eq!(client.get(path).status, 200, "{path}");
        }
        // No spelling of a path may bypass the check.
        for path in [
            "//v1/models",
            "/v1/models/",
            "/V1/models",
            "/v1/%6dodels",
            "/./v1/models",
        ] {
            let status = client.get(path).status;
            assert!(status == 401 || status == 404, "{path}: {status}");
        }
    }
    assert_eq!(server.state.started(), 0);
    for client in [
        server.client().with("Authorization", "Bearer sesame"),
        server.client().with("authorization", "bearer sesame"),
        server.client().with("X-Api-Key", "sesame"),
    ] {
        client.post(CHAT, &ask()).expect(200);
    }
}

#[test]
fn other_clients_do_not_wait_while_a_large_body_is_read() {
    let mut limits = limits();
    limits.body_timeout = Duration::from_secs(30);
    // The limits on values are disabled, so that parsing takes long.
    limits.json_values = 10_000_000;
    limits.json_containers = 10_000_000;
    limits.all_bodies_bytes = 4_000_000_000;
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    // The parser stores all these values before the request is refused.
    let wide = "[],".repeat((8 << 20) / 3 - 100);
    let message = r#"{"role":"user","content":"x"}"#;
    let body = format!(r#"{{"messages":[{message}],"chat_template_kwargs":{{"x":[{wide}[]]}}}}"#);
    assert!(body.len() > (8 << 20) - 400 && body.len() <= 8 << 20);
    let sent = client.open("POST", CHAT, body.as_bytes());
    let begun = Instant::now();
    let reading = std::thread::spawn(move || (read(sent), begun.elapsed()));
    let (mut worst, mut answers) = (Duration::ZERO, 0);
    while !reading.is_finished() {
        let asked = Instant::now();
        client.get("/health").expect(200);
        worst = worst.max(asked.elapsed());
        answers += 1;
    }
    let (reply, took) = reading.join().unwrap();
    assert_eq!(reply.status, 400, "{}", reply.text());
    println!("{answers} answers in {took:?}, the slowest after {worst:?}");
    assert!(
        answers >= 4 && worst < took / 2,
        "{answers} answers in {took:?}, the slowest after {worst:?}"
    );
}

#[test]
fn requests_that_need_no_place_are_small() {
    const MOST: usize = 64 << 10;
    let server = serve(&config());
    let client = server.client();
    let of = |bytes: usize| {
        let body = r#"{"model":"tiny","x":""}"#;
        body.replace(
            r#""x":""#,
            &format!(r#""x":"{}"#, "a".repeat(bytes - body.len())),
        )
    };
    // This server may not download models, so it refuses `/api/pull`.
    for (path, status) in [("/api/show", 200), ("/api/pull", 403)] {
        let body = of(MOST);
        assert_eq!(body.len(), MOST);
        let reply = client.ask("POST", path, body.as_bytes());
        assert_eq!(reply.status, status, "{}", reply.text());
        let reply = client.ask("POST", path, of(MOST + 1).as_bytes());
        let error = reply.expect(413);
        let message = error["error"].as_str().unwrap();
        assert!(message.contains("larger than 65536 bytes"), "{message}");
    }
    // Requests for replies need a queue place, and may have larger bodies.
    let body = of(MOST + 1).replace(r#""model""#, r#""prompt":"say:x","model""#);
    let reply = client.ask("POST", "/v1/completions", body.as_bytes());
    reply.expect(200);
}

#[test]
fn web_pages_may_not_ask() {
    let server = serve(&config());
    let client = server.client();
    for (name, value) in [
        ("Host", "evil.example"),
        ("Host", "localhost.evil.example:8080"),
        ("Origin", "https://evil.example"),
        ("Origin", "http://localhost:3000"),
        ("Origin", "null"),
    ] {
        let reply = client.clone().with(name, value).post(CHAT, &ask());
        assert_eq!(reply.status, 403, "{name}: {value}");
        assert_eq!(reply.header("access-control-allow-origin"), None);
    }
    let origin = format!("http://{}", server.address);
    client
        .clone()
        .with("Origin", &origin)
        .post(CHAT, &ask())
        .expect(200);
    client
        .clone()
        .with("Host", "localhost")
        .post(CHAT, &ask())
        .expect(200);
    // CORS preflight requests are refused.
    let preflight = client
        .clone()
        .with("Origin", "https://evil.example")
        .with("Access-Control-Request-Method", "POST")
        .ask("OPTIONS", CHAT, b"");
    assert_eq!(preflight.status, 403);
}

#[test]
fn listed_origins_may_ask() {
    let origin = "https://chat.example";
    let server = serve(&config().with_allowed_origins([String::from(origin)]));
    let client = server.client().with("Origin", origin);
    let reply = client.post(CHAT, &ask());
    reply.expect(200);
    assert_eq!(reply.header("access-control-allow-origin"), Some(origin));
    assert_eq!(reply.header("access-control-allow-credentials"), None);
    let preflight = client
        .with("Access-Control-Request-Method", "POST")
        .with(
            "Access-Control-Request-Headers",
            "authorization,content-type",
        )
        .ask("OPTIONS", CHAT, b"");
    assert_eq!(preflight.status, 200);
    assert_eq!(
        preflight.header("access-control-allow-origin"),
        Some(origin)
    );
    let other = server.client().with("Origin", "https://evil.example");
    assert_eq!(other.post(CHAT, &ask()).status, 403);
}

#[test]
fn other_machines_need_a_key() {
    let open = Config::new().with_address("0.0.0.0:0".parse().unwrap());
    let error = Server::bind(&open, Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    let error = Server::bind(&config(), Vec::new()).unwrap_err();
    assert!(error.message().contains("no model"), "{error}");
}

#[test]
fn large_and_odd_bodies_are_refused() {
    let mut limits = limits();
    limits.body_bytes = 100_000;
    limits.json_depth = 16;
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    // If the announced size is too large, the server must not read the body.
    let mut announced = client.connect();
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n");
    announced.write_all(head.as_bytes()).unwrap();
    let mut start = [0; 12];
    announced.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 413");
    // The size is not announced, and the chunks have no end.
    let mut chunked = client.connect();
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    chunked.write_all(head.as_bytes()).unwrap();
    let chunk = format!("4000\r\n{}\r\n", " ".repeat(0x4000));
    for _ in 0..20 {
        if chunked.write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    let mut start = [0; 12];
    chunked.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 413");

    let large = json!({"messages": [{"role": "user", "content": "x".repeat(200_000)}]});
    for (path, place) in [
        (CHAT, "/error/code"),
        ("/v1/messages", "/error/type"),
        ("/api/chat", "/error"),
    ] {
        let error = client.post(path, &large).expect(413);
        assert!(
            error.pointer(place).is_some_and(Value::is_string),
            "{path}: {error}"
        );
    }
    for body in [
        "[".repeat(50_000),
        "{\"a\":".repeat(10_000),
        format!("{{\"messages\": {}{}}}", "[".repeat(3000), "]".repeat(3000)),
    ] {
        client.ask("POST", CHAT, body.as_bytes()).expect(400);
    }
    let zipped = client.clone().with("Content-Encoding", "gzip");
    assert_eq!(zipped.post(CHAT, &ask()).status, 415);
    client.post(CHAT, &ask()).expect(200);
}

#[test]
fn bodies_are_bounded_together() {
    let mut limits = limits();
    limits.body_bytes = 100_000;
    limits.all_bodies_bytes = 150_000;
    limits.body_timeout = Duration::from_secs(2);
    let server = serve(&config().with_limits(limits));
    let client = server.client();
    let mut slow = client.connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000\r\n\r\n");
    slow.write_all(head.as_bytes()).unwrap();
    slow.write_all(" ".repeat(90_000).as_bytes()).unwrap();
    let mut large = ask();
    large["user"] = "x".repeat(80_000).into();
    crate::common::eventually("a refusal", || client.post(CHAT, &large).status == 429);
    // Afterwards small bodies pass, and later large ones pass, too.
    client.post(CHAT, &ask()).expect(200);
    drop(slow);
    crate::common::eventually("room", || client.post(CHAT, &large).status == 200);
    // Error messages quote only a short part of a body.
    let mut odd = ask();
    odd["temperature"] = "x".repeat(80_000).into();
    // The previous request's memory is freed shortly after its answer, when its row ends.
    let mut error = client.post(CHAT, &odd);
    crate::common::eventually("room", || {
        error = client.post(CHAT, &odd);
        error.status != 429
    });
    assert_eq!(error.status, 400);
    assert!(error.body.len() < 2000, "{}", error.body.len());
}

#[test]
fn hostile_schemas_are_refused() {
    let server = serve(&config());
    let client = server.client();
    let mut chain = json!({});
    for i in 0..1500 {
        chain[format!("d{i}")] = json!({"$ref": format!("#/$defs/d{}", i + 1)});
    }
    for schema in [
        json!({"$defs": chain, "$ref": "#/$defs/d0"}),
        json!({"type": "array", "maxItems": 1e18 as u64}),
        json!({"enum": vec!["x".repeat(100); 1000]}),
        json!({"pattern": "x".repeat(5000)}),
        json!(true),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        let mut body = ask();
        body["response_format"] = format;
        let reply = client.post(CHAT, &body);
        let fine = schema == json!(true);
        assert_eq!(
            reply.status,
            if fine { 200 } else { 400 },
            "{}",
            reply.text()
        );
    }
    let ollama = json!({"messages": [{"role": "user", "content": "x"}], "format": {"pattern": "x".repeat(5000)}});
    assert!(client.post("/api/chat", &ollama).expect(400)["error"].is_string());
}

/// Reads until the server closes the connection, which must happen within `most`.
fn closes_within(mut stream: std::net::TcpStream, most: Duration) -> Vec<u8> {
    let started = Instant::now();
    let mut all = Vec::new();
    // A reset also counts as the end of the connection.
    let _ = stream.read_to_end(&mut all);
    assert!(started.elapsed() < most, "{:?}", started.elapsed());
    all
}

#[test]
fn slow_clients_lose_their_connection() {
    let server = serve(&config());
    let most = Duration::from_secs(20);
    let silent = server.client().connect();
    let mut half = server.client().connect();
    half.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
        .unwrap();
    let mut body = server.client().connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{");
    body.write_all(head.as_bytes()).unwrap();
    let mut dripping = server.client().connect();
    dripping.write_all(b"GET /health HTTP/1.1\r\n").unwrap();
    let drip = std::thread::spawn(move || {
        for i in 0..100 {
            let header = format!("X-{i}: y\r\n");
            if dripping.write_all(header.as_bytes()).is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        false
    });
    closes_within(silent, most);
    closes_within(half, most);
    let answer = String::from_utf8(closes_within(body, most)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(drip.join().unwrap(), "a header may take forever");
    server.client().post(CHAT, &ask()).expect(200);
}

#[test]
fn connections_are_bounded_and_the_next_waits() {
    let mut limits = limits();
    limits.connections = 4;
    let server = serve(&config().with_limits(limits));
    let idle: Vec<_> = (0..4).map(|_| server.client().connect()).collect();
    // The request is served after the server has closed the idle connections.
    server.client().post(CHAT, &ask()).expect(200);
    drop(idle);
}

#[test]
fn nonsense_is_answered_or_closed() {
    let server = serve(&config());
    let client = server.client();
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut stream = client.connect();
        stream.write_all(bytes).unwrap();
        closes_within(stream, Duration::from_secs(20));
    }
    let headers = "X-A: b\r\n".repeat(200);
    let mut stream = client.connect();
    let _ =
        stream.write_all(format!("GET / HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").as_bytes());
    let answer = closes_within(stream, Duration::from_secs(20));
    assert!(answer.starts_with(b"HTTP/1.1 431"));
    let mut stream = client.connect();
    let _ = stream.write_all(format!("GET /{} HTTP/1.1\r\n", "a".repeat(200_000)).as_bytes());
    closes_within(stream, Duration::from_secs(20));
    client.post(CHAT, &ask()).expect(200);
}

#[test]
fn unknown_paths_and_methods_have_the_shape_of_their_family() {
    let server = serve(&config());
    let client = server.client();
    let error = client.get("/v1/nothing").expect(404);
    assert_eq!(error["error"]["code"], "not_found");
    assert!(client.get("/api/nothing").expect(404)["error"].is_string());
    assert_eq!(client.get("/v1/messages/x").expect(404)["type"], "error");
    let error = client.get(CHAT).expect(405);
    assert_eq!(error["error"]["code"], "method_not_allowed");
    let error = client.ask("DELETE", "/v1/models", b"").expect(405);
    assert!(
        error["error"]["message"]
            .as_str()
            .unwrap()
            .contains("DELETE")
    );
    let id = "a".repeat(500);
    let reply = client.clone().with("X-Request-Id", &id).get("/health");
    assert_ne!(reply.header("x-request-id"), Some(id.as_str()));
    let reply = client.clone().with("X-Request-Id", "mine-1").get("/health");
    assert_eq!(reply.header("x-request-id"), Some("mine-1"));
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
    let description = client.get("/openapi.json").expect(200);
    assert!(description["paths"][CHAT]["post"].is_object());
    assert!(client.get("/metrics").text().ends_with("# EOF\n"));
    let _ = read;
}

#[test]
fn wrong_keys_are_answered_one_after_another() {
    let mut limits = limits();
    limits.wrong_key_pause = Duration::from_millis(150);
    let config = config().with_api_key(String::from("sesame"));
    let server = serve(&config.with_limits(limits));
    let with = |key: &str| server.client().with("x-api-key", key);
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        let guesses = [(); 6].map(|()| scope.spawn(|| with("sesam").get("/v1/models").status));
        // Requests with the right key or without a key must not be delayed.
        while !guesses
            .iter()
            .any(std::thread::ScopedJoinHandle::is_finished)
        {
            assert_eq!(with("sesame").get("/v1/models").status, 200);
            assert_eq!(server.client().get("/v1/models").status, 401);
        }
        for guess in guesses {
            assert_eq!(guess.join().unwrap(), 401);
        }
    });
    let took = started.elapsed();
    assert!(took >= 6 * Duration::from_millis(150), "{took:?}");
}
