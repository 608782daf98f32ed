//! Memory that a request can take. The tests read the peak of this process, so they are few and
//! have a binary of their own.

#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

mod common;

use std::io::Read;

use common::{config, serve};
use serde_json::json;

/// The process's peak of resident memory, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        >> 10
}

#[test]
fn pieces_of_a_long_text_are_not_all_in_memory() {
    let server = serve(&config());
    let client = server.client();
    let short = json!({"content": "a".repeat(5000), "with_pieces": true});
    // An answer of more than one part is whole JSON.
    let reply = client.post("/tokenize", &short);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let tokens = reply.expect(200);
    let tokens = tokens["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 5000);
    assert!(tokens.iter().all(|t| *t == json!({"id": 97, "piece": "a"})));

    let request = json!({"content": "a".repeat(2 << 20), "with_pieces": true}).to_string();
    let before = peak();
    // The clients keep nothing, so that the peak is the server's.
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
    std::thread::scope(|scope| {
        let clients = [(); 3].map(|()| scope.spawn(read));
        for client in clients {
            let bytes = client.join().unwrap();
            assert!(bytes > 20 * (2 << 20), "only {bytes} bytes");
        }
    });
    let grown = peak() - before;
    // Bodies, texts and ids of the three are 36 MiB, with what a growing list leaves behind about
    // twice that. The answers are 132 MiB, and a JSON value for each token is 3 GiB.
    assert!(grown < 120, "the peak grew by {grown} MiB");
}
