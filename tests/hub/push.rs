//! Tests of `mlx push`, which uploads a directory as one commit to a local hub, without content
//! that the hub already has. Also tests `mlx ps` and `mlx stop` with a minimal server, and `mlx ps`
//! with `mlx serve`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A received request.
#[derive(Debug, Clone)]
struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

type Answer = Box<dyn Fn(&Request, &str) -> (u16, Value) + Send + Sync>;

/// Starts a server that answers each request with `answer`. The function also receives the server's
/// address.
fn server(answer: Answer) -> (String, Arc<Mutex<Vec<Request>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let log = Arc::new(Mutex::new(Vec::new()));
    let (theirs, own_address) = (Arc::clone(&log), address.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = serve(stream, &theirs, &own_address, &answer);
        }
    });
    (address, log)
}

fn serve(
    stream: TcpStream,
    log: &Mutex<Vec<Request>>,
    own_address: &str,
    answer: &Answer,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default(),
    );
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|n| n.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let request = Request {
        method,
        path,
        headers,
        body,
    };
    let (status, value) = answer(&request, own_address);
    log.lock().unwrap().push(request);
    let text = value.to_string();
    let mut out = stream;
    write!(
        out,
        "HTTP/1.1 {status} X\r\nConnection: close\r\nETag: \"part\"\r\nContent-Length: {}\r\n\r\n{text}",
        text.len()
    )?;
    out.flush()
}

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mlx"));
    command
        .args(args)
        .env("NO_PROXY", "127.0.0.1")
        .stdin(Stdio::null());
    for name in [
        "MLX_OFFLINE",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "MLX_API_KEY",
        "MLX_SERVER",
    ] {
        command.env_remove(name);
    }
    command
}

fn push(endpoint: &str, home: &Path, args: &[&str]) -> Output {
    let mut command = program(&[&["push"], args].concat());
    command
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", home)
        .env("HF_TOKEN", "hf_secret");
    command.output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn parse(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

/// A hub with the upload API of `huggingface_hub`. Weights go to the store, which already has the
/// objects `known`. Files above 1000 bytes are uploaded in parts.
fn hub(known: Vec<String>) -> (String, Arc<Mutex<Vec<Request>>>) {
    server(Box::new(move |request, own_address| {
        let path = request.path.split('?').next().unwrap_or_default();
        match (request.method.as_str(), path) {
            ("POST", "/api/repos/create") => (409, json!({"error": "you have it already"})),
            ("POST", "/api/models/own/tiny/preupload/main") => {
                let files = parse(&request.body)["files"].clone();
                let mode = |file: &Value| {
                    let name = file["path"].as_str().unwrap();
                    let large = name.ends_with(".safetensors");
                    json!({"path": name, "uploadMode": if large { "lfs" } else { "regular" },
                        "shouldIgnore": name == "notes.txt"})
                };
                let files: Vec<Value> = files.as_array().unwrap().iter().map(mode).collect();
                (200, json!({"files": files}))
            }
            ("POST", "/own/tiny.git/info/lfs/objects/batch") => {
                let objects = parse(&request.body)["objects"].clone();
                let object = |object: &Value| {
                    let oid = object["oid"].as_str().unwrap();
                    if known.iter().any(|known| known == oid) {
                        return json!({"oid": oid});
                    }
                    let size = object["size"].as_u64().unwrap();
                    let href = format!("{own_address}/store/{oid}");
                    let upload = if size > 1000 {
                        let parts = (0..size.div_ceil(1000))
                            .map(|n| ((n + 1).to_string(), json!(format!("{href}/{}", n + 1))));
                        let mut header: serde_json::Map<_, _> = parts.collect();
                        header.insert("chunk_size".into(), json!("1000"));
                        json!({"href": format!("{href}/complete"), "header": header})
                    } else {
                        json!({"href": href, "header": {"x-kind": "whole"}})
                    };
                    let verify = json!({"href": format!("{own_address}/verify/{oid}")});
                    json!({"oid": oid, "actions": {"upload": upload, "verify": verify}})
                };
                let objects: Vec<Value> = objects.as_array().unwrap().iter().map(object).collect();
                (200, json!({"transfer": "basic", "objects": objects}))
            }
            ("POST", "/api/models/own/tiny/commit/main") => (
                200,
                json!({"commitUrl": format!("{own_address}/own/tiny/commit/abc")}),
            ),
            ("PUT" | "POST", path)
                if path.starts_with("/store/") || path.starts_with("/verify/") =>
            {
                (200, Value::Null)
            }
            _ => (404, json!({"error": "no such thing"})),
        }
    }))
}

#[test]
fn a_directory_becomes_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (small, large, there) = (vec![1u8; 700], vec![2u8; 2500], vec![3u8; 90]);
    for (name, bytes) in [
        ("config.json", b"{}".as_slice()),
        ("model-1.safetensors", &small),
        ("model-2.safetensors", &large),
        ("model-3.safetensors", &there),
        ("notes.txt", b"the hub ignores it"),
        (".hidden", b"x"),
        ("training_state.safetensors", b"x"),
        ("0000100_adapters.safetensors", b"x"),
    ] {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    std::fs::create_dir(dir.path().join("inside")).unwrap();
    let (endpoint, log) = hub(vec![sha(&there)]);
    let path = dir.path().to_str().unwrap();
    let output = push(
        &endpoint,
        dir.path(),
        &[
            "own/tiny",
            "--path",
            path,
            "--private",
            "--message",
            "First",
            "--json",
        ],
    );
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let told = parse(&output.stdout);
    assert_eq!(told["url"], format!("{endpoint}/own/tiny/commit/abc"));
    assert_eq!(
        (&told["files"], &told["sent_bytes"]),
        (&json!(4), &json!(3200))
    );

    let log = log.lock().unwrap().clone();
    let created = parse(&log[0].body);
    assert_eq!(
        (
            &created["name"],
            &created["organization"],
            &created["private"]
        ),
        (&json!("tiny"), &json!("own"), &json!(true))
    );
    let commit = log.last().unwrap();
    let lines: Vec<Value> = commit
        .body
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(parse)
        .collect();
    assert_eq!(lines[0]["value"]["summary"], "First");
    let file = |value: &Value| (value["key"].clone(), value["value"]["path"].clone());
    assert_eq!(file(&lines[1]), (json!("file"), json!("config.json")));
    assert_eq!(lines[1]["value"]["content"], "e30=");
    for (line, (name, bytes)) in lines[2..].iter().zip([
        ("model-1.safetensors", &small),
        ("model-2.safetensors", &large),
        ("model-3.safetensors", &there),
    ]) {
        assert_eq!(file(line), (json!("lfsFile"), json!(name)));
        assert_eq!(line["value"]["oid"], sha(bytes));
        assert_eq!(line["value"]["size"], bytes.len());
    }
    assert_eq!(lines.len(), 5);

    // The store received the bytes, the large file in parts, and never the token.
    let puts: Vec<&Request> = log.iter().filter(|r| r.method == "PUT").collect();
    assert_eq!(puts.len(), 4);
    assert_eq!(puts[0].body, small);
    assert_eq!(puts[0].headers["x-kind"], "whole");
    let parts: Vec<u8> = puts[1..].iter().flat_map(|put| put.body.clone()).collect();
    assert_eq!(parts, large);
    assert!(
        puts.iter()
            .all(|put| !put.headers.contains_key("authorization"))
    );
    assert_eq!(commit.headers["authorization"], "Bearer hf_secret");
    let complete = log.iter().find(|r| r.path.ends_with("/complete")).unwrap();
    let parts = parse(&complete.body)["parts"].clone();
    assert_eq!(parts.as_array().unwrap().len(), 3);
    assert_eq!(parts[0], json!({"partNumber": 1, "etag": "\"part\""}));
    assert_eq!(
        log.iter()
            .filter(|r| r.path.starts_with("/verify/"))
            .count(),
        2
    );
}

#[test]
fn refusals_name_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.gguf");
    std::fs::write(&file, "x").unwrap();
    let file = file.to_str().unwrap();
    let (endpoint, log) = server(Box::new(|_, _| (401, Value::Null)));
    let refused = push(&endpoint, dir.path(), &["own/tiny", "--path", file]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("token"), "{}", stderr(&refused));
    assert_eq!(log.lock().unwrap().len(), 1);

    let without = program(&["push", "own/tiny", "--path", file])
        .env("HF_ENDPOINT", &endpoint)
        .env("HF_HOME", dir.path())
        .output()
        .unwrap();
    assert!(
        stderr(&without).contains("HF_TOKEN"),
        "{}",
        stderr(&without)
    );
    for args in [
        &["tiny", "--path", file][..],
        &[],
        &["own/tiny", "--upload-repo", "a/b"],
    ] {
        let output = push(&endpoint, dir.path(), args);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{args:?}: {}",
            stderr(&output)
        );
    }
    let none = push(
        &endpoint,
        dir.path(),
        &["own/tiny", "--path", "no-such-directory"],
    );
    assert_eq!(none.status.code(), Some(1));
    assert_eq!(log.lock().unwrap().len(), 1);
}

/// A server with two models. It unloads one of them on request.
#[test]
fn models_of_a_server_are_listed_and_stopped() {
    let loaded = Arc::new(Mutex::new(vec!["stays", "goes"]));
    let theirs = Arc::clone(&loaded);
    let (address, log) = server(Box::new(move |request, _| {
        let mut loaded = theirs.lock().unwrap();
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/api/ps") => {
                let model = |name: &&str| {
                    json!({"name": name, "size": 1 << 20, "size_vram": 0, "context_length": 8192,
                        "expires_at": "9999-12-31T23:59:59Z"})
                };
                (
                    200,
                    json!({"models": loaded.iter().map(model).collect::<Vec<_>>()}),
                )
            }
            ("POST", "/api/generate") => {
                let asked = parse(&request.body);
                assert_eq!(asked["keep_alive"], 0);
                loaded.retain(|name| *name != asked["model"] || *name == "stays");
                (200, json!({"done": true}))
            }
            _ => (404, json!({"error": "no such thing"})),
        }
    }));
    let at = |args: &[&str]| {
        let mut command = program(args);
        command
            .env("MLX_SERVER", &address)
            .env("MLX_API_KEY", "key");
        command.output().unwrap()
    };
    let listed = String::from_utf8(at(&["ps"]).stdout).unwrap();
    let rows: Vec<Vec<&str>> = listed
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[1], ["stays", "1.0", "MiB", "CPU", "8192", "forever"]);
    let stopped = at(&["stop", "goes"]);
    assert_eq!(stopped.status.code(), Some(0), "{}", stderr(&stopped));
    assert_eq!(*loaded.lock().unwrap(), ["stays"]);
    let unknown = at(&["stop", "goes"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(
        stderr(&unknown).contains("it holds stays"),
        "{}",
        stderr(&unknown)
    );
    let asked = log.lock().unwrap()[0].clone();
    assert_eq!(asked.headers["authorization"], "Bearer key");

    let nobody = program(&["ps", "--server", "127.0.0.1:1"])
        .output()
        .unwrap();
    assert_eq!(nobody.status.code(), Some(1));
    assert!(stderr(&nobody).contains("mlx serve"), "{}", stderr(&nobody));
    let bad = program(&["ps", "--server", "ftp://x"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(2));
}

#[cfg(feature = "serve")]
#[test]
fn mlx_serve_lists_its_models() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/llama");
    let mut child = program(&[
        "serve",
        model.to_str().unwrap(),
        "--port",
        "0",
        "--backend",
        "cpu",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let output = program(&["ps", "--json", "--server", line.trim()])
        .output()
        .unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let models = parse(&output.stdout);
    assert_eq!(models[0]["name"], "llama");
    assert!(models[0]["size"].as_u64().unwrap() > 0);
}
