//! Tests of `mlx launch -- serve`, a server with one model that several processes compute.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{model, run};
use crate::program::{mlx, refused};
use crate::served::{Served, agent};

fn serve(launcher: &[&str], name: &str) -> Served {
    let path = model(name);
    // On a busy machine a reply may take long, especially with several processes.
    let patient = ["--drain-timeout", "600"];
    let asked = [
        &["serve", "--backend", "cpu", "--port", "0"],
        &patient[..],
        &[&path],
    ]
    .concat();
    let home = tempfile::tempdir().unwrap();
    let mut command = mlx(home.path(), &[launcher, &asked].concat());
    command.stderr(Stdio::null());
    let mut served = Served::start(command);
    served.home = Some(home);
    served
}

/// The replies to several kinds of requests. The completion requests run concurrently.
fn replies(server: &Served) -> Vec<Value> {
    let completions = [
        json!({"prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": true}),
        json!({"prompt": "The capital", "max_tokens": 12, "temperature": 0, "ignore_eos": true}),
        json!({"prompt": "one two three", "max_tokens": 24, "temperature": 0.8, "seed": 7}),
        json!({"prompt": "one two three", "max_tokens": 24, "temperature": 0,
            "ignore_eos": true, "presence_penalty": 0.5}),
    ];
    let mut all: Vec<Value> = std::thread::scope(|scope| {
        let running: Vec<_> = completions
            .iter()
            .map(|body| scope.spawn(|| server.json("/v1/completions", body)))
            .collect();
        let done = running.into_iter().map(|one| one.join().unwrap());
        done.map(|reply| reply["choices"][0]["text"].clone())
            .collect()
    });
    // The second request reuses the first request's cached prefix.
    for text in ["hello", "hello there"] {
        let body = json!({"messages": [{"role": "user", "content": text}],
            "max_tokens": 12, "temperature": 0,
            "response_format": {"type": "json_object"}});
        let reply = server.json("/v1/chat/completions", &body);
        all.push(reply["choices"][0]["message"]["content"].clone());
    }
    all
}

/// Starts a long reply, and disconnects before it ends.
fn leave(server: &Served) {
    let url = format!("{}/v1/completions", server.url);
    let body = json!({"prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": true,
        "stream": true});
    let mut answer = agent().post(&url).send(body.to_string()).unwrap();
    let mut some = [0; 64];
    answer.body_mut().as_reader().read_exact(&mut some).unwrap();
}

#[test]
fn clients_get_from_several_processes_what_one_gives() {
    for (launcher, name) in [
        (&["launch", "-n", "2", "--"][..], "llama"),
        (&["launch", "-n", "3", "--pipeline", "--"], "gemma3-text-q4"),
    ] {
        let expected = replies(&serve(&[], name));
        let mut server = serve(launcher, name);
        assert_eq!(replies(&server), expected, "{name}");
        leave(&server);
        assert_eq!(replies(&server), expected, "{name}");
        // All processes must sample equal tokens, even if the request has no seed.
        let body = json!({"prompt": "hello", "max_tokens": 16, "temperature": 1.0});
        server.json("/v1/completions", &body);
        server.signal(Signal::TERM);
        assert_eq!(server.end().code(), Some(0));
    }
}

#[test]
fn vectors_come_from_several_processes() {
    let body = json!({"input": ["hello", "one two three"]});
    let vectors = |server: &Served| -> Vec<f64> {
        let reply = server.json("/v1/embeddings", &body);
        let data = reply["data"].as_array().unwrap().iter();
        let numbers = data.flat_map(|one| one["embedding"].as_array().unwrap());
        numbers.map(|x| x.as_f64().unwrap()).collect()
    };
    let alone = vectors(&serve(&[], "llama"));
    let together = vectors(&serve(&["launch", "-n", "2", "--"], "llama"));
    assert_eq!(alone.len(), together.len());
    let off = alone.iter().zip(&together).map(|(a, b)| (a - b).abs());
    assert!(off.fold(0.0, f64::max) < 1e-4);
}

#[test]
fn a_signal_lets_replies_of_several_processes_end() {
    let mut server = serve(&["launch", "-n", "2", "--"], "llama");
    let url = format!("{}/v1/completions", server.url);
    let body = json!({"prompt": "x", "max_tokens": 250, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}});
    let mut answer = agent().post(&url).send(body.to_string()).unwrap();
    server.signal(Signal::INT);
    let mut text = String::new();
    let mut body = answer.body_mut().as_reader();
    body.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"completion_tokens\":250"), "{text}");
    assert_eq!(server.end().code(), Some(0));
}

#[test]
fn what_several_processes_do_not_serve_is_told() {
    let path = model("llama");
    let dir = Path::new(&path).parent().unwrap().to_str().unwrap();
    let asked = ["launch", "-n", "2", "--", "serve", "--port", "0"];
    for more in [&["--models-dir", dir][..], &["--keep-alive", "5m", &path]] {
        let err = refused(&run(&[&asked[..], more].concat()), 2);
        assert!(err.contains("--models-dir"), "{err}");
    }
    let adapter = format!("name={dir}");
    let more = ["--adapter", &adapter, &path];
    let err = refused(&run(&[&asked[..], &more].concat()), 2);
    assert!(err.contains("--adapter"), "{err}");
}
