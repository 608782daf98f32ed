//! Tests of faults in operation: kills, signals, full disks, removed files, and too little memory.
//! The table in docs/serve.md says what clients see; each row has a test here.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::common::fixture;
use crate::served::{Served, agent};
use crate::{command, long_copy};

/// A server whose log goes to a file.
struct Logged {
    server: Served,
    log: PathBuf,
}

impl Logged {
    fn text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn port(&self) -> String {
        self.server.url.rsplit_once(':').unwrap().1.to_owned()
    }
}

impl Drop for Logged {
    /// If the test fails, prints the server's output and, if the server has ended, its exit status.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let ended = self.server.child.try_wait();
            eprintln!("the server wrote:\n{}\nand ended: {ended:?}", self.text());
        }
    }
}

/// Starts a server with these arguments. `shell` runs in the process first, such as a limit.
fn start(dir: &Path, shell: &str, args: &[&str]) -> Logged {
    let log = dir.join("log");
    let mut command = command_after(shell, args);
    command.stderr(File::create(&log).unwrap());
    let server = Served::start(command);
    Logged { server, log }
}

fn command_after(shell: &str, args: &[&str]) -> Command {
    let plain = command();
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("{shell}\nexec \"$@\""), "sh"])
        .arg(plain.get_program())
        .args(plain.get_args())
        .args(args)
        .env_remove("MLX_BACKEND")
        .env_remove("MLX_API_KEY")
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command
}

#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The files of computed prompts in a directory.
fn kept(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).into_iter().flatten();
    let mut all: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    all.retain(|path| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("prefix-")
    });
    all.sort();
    all
}

fn get(server: &Served, path: &str) -> Value {
    let mut answer = agent().get(format!("{}{path}", server.url)).call().unwrap();
    let text = answer.body_mut().read_to_string().unwrap();
    serde_json::from_str(&text).unwrap()
}

fn ask(server: &Served, prompt: &[u32], n: usize) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": true});
    server.json("/v1/completions", &body)
}

fn cached(reply: &Value) -> u64 {
    let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
    cached.as_u64().unwrap()
}

fn ids(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 61) % 260 + 16).collect()
}

/// A streamed reply that does not end soon, after its first piece.
struct Long(ureq::Body);

impl Long {
    fn start(server: &Served) -> Self {
        let body = json!({"prompt": "x", "max_tokens": 8000, "temperature": 0, "ignore_eos": true,
            "stream": true});
        let url = format!("{}/v1/completions", server.url);
        let answer = agent().post(&url).send(body.to_string()).unwrap();
        assert_eq!(answer.status(), 200);
        let mut long = Self(answer.into_body());
        let mut first = [0; 16];
        long.0.as_reader().read_exact(&mut first).unwrap();
        long
    }

    /// The rest of the stream, and whether the connection ended in order.
    fn rest(mut self) -> (String, bool) {
        let (mut text, mut part) = (Vec::new(), [0; 4096]);
        let mut reader = self.0.as_reader();
        loop {
            match reader.read(&mut part) {
                Ok(0) => return (String::from_utf8_lossy(&text).into_owned(), true),
                Ok(n) => text.extend_from_slice(&part[..n]),
                Err(_) => return (String::from_utf8_lossy(&text).into_owned(), false),
            }
        }
    }
}

#[test]
fn a_killed_server_starts_again_on_its_port_and_continues() {
    let model = long_copy("llama");
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts");
    let args = |port: &'static str| -> Vec<String> {
        let parts = ["--cache-dir", prompts.to_str().unwrap(), "--port", port];
        let mut all: Vec<String> = parts.map(String::from).to_vec();
        all.push(model.path().to_str().unwrap().to_owned());
        all
    };
    let borrowed = |args: &[String]| -> Vec<String> { args.to_vec() };
    let run = |args: Vec<String>| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        start(dir.path(), "", &args)
    };
    let mut first = run(borrowed(&args("0")));
    let (one, two) = (ids(1, 60), ids(2, 60));
    ask(&first.server, &one, 12);
    eventually("the first prompt is written", || kept(&prompts).len() == 1);
    let whole = kept(&prompts);
    ask(&first.server, &two, 12);
    eventually("the second prompt is written", || kept(&prompts).len() == 2);
    let reply = Long::start(&first.server);
    first.server.child.kill().unwrap();
    first.server.child.wait().unwrap();
    // The client receives an incomplete stream.
    let (text, _) = reply.rest();
    assert!(!text.contains("[DONE]"), "{text}");

    // Simulates a write that the file system lost: one file is incomplete.
    let torn = kept(&prompts)
        .into_iter()
        .find(|path| !whole.contains(path));
    let torn = torn.unwrap();
    let bytes = std::fs::read(&torn).unwrap();
    std::fs::write(&torn, &bytes[..bytes.len() / 2]).unwrap();
    // Simulates a write that the server did not finish.
    std::fs::write(prompts.join(".unfinished-mlx-0123456789ab"), &bytes[..9]).unwrap();

    let mut again = args("0");
    again[3] = first.port();
    let second = run(again);
    assert_eq!(second.server.url, first.server.url);
    let continued = [&one[..], &[20, 30, 40]].concat();
    let reply = ask(&second.server, &continued, 12);
    assert!(cached(&reply) >= 50, "{reply}");
    let computed = ask(&second.server, &[&two[..], &[20]].concat(), 12);
    assert_eq!(cached(&computed), 0, "{computed}");
    // The server removed the incomplete file with a warning, and stored its prompt in a new file.
    assert!(second.text().contains("is removed"), "{}", second.text());
    eventually("a new file", || kept(&prompts).len() >= 2);
    let plain = run(vec![
        "--port".into(),
        "0".into(),
        model.path().to_str().unwrap().to_owned(),
    ]);
    let expected = ask(&plain.server, &continued, 12);
    assert_eq!(
        reply["choices"][0]["text"], expected["choices"][0]["text"],
        "the reply is that of a server without a directory"
    );
}

#[test]
fn after_a_signal_the_rest_is_told_and_the_exit_code_is_0() {
    let model = long_copy("llama");
    let dir = tempfile::tempdir().unwrap();
    let args = [
        "--port",
        "0",
        "--drain-timeout",
        "1",
        model.path().to_str().unwrap(),
    ];
    let mut logged = start(dir.path(), "", &args);
    let reply = Long::start(&logged.server);
    let signalled = Instant::now();
    logged.server.signal(Signal::TERM);
    let (text, in_order) = reply.rest();
    // The stream ends with an error and its usual mark, not with a broken connection.
    assert!(in_order, "{text}");
    assert!(text.contains("\"code\":\"shutting_down\""), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(logged.server.end().code(), Some(0));
    assert!(signalled.elapsed() < Duration::from_secs(15));
    let url = format!("{}/health", logged.server.url);
    assert!(agent().get(&url).call().is_err(), "nobody listens");
}

/// Limits the size of files that a server may write. A process that ignores the limit's signal gets
/// an error from each write beyond the limit, as from a full disk.
#[cfg(target_os = "linux")]
fn fill_the_disk(server: &Served) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let id = i32::try_from(server.child.id()).unwrap();
    let limit = Rlimit {
        current: Some(4096),
        maximum: Some(4096),
    };
    prlimit(Pid::from_raw(id), Resource::Fsize, limit).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_for_computed_prompts_is_one_warning() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts");
    let model = fixture("tiny/llama");
    let args = [
        "--port",
        "0",
        "--cache-dir",
        prompts.to_str().unwrap(),
        model.to_str().unwrap(),
    ];
    let limited = start(dir.path(), "trap '' XFSZ", &args);
    fill_the_disk(&limited.server);
    let replies: Vec<Value> = (1..5)
        .map(|seed| ask(&limited.server, &ids(seed, 60), 12))
        .collect();
    eventually("a warning", || limited.text().contains("cannot keep"));
    // Within the process, computed prompts are still in memory.
    let again = ask(&limited.server, &[&ids(4, 60)[..], &[20]].concat(), 12);
    assert_eq!(cached(&again), 60);
    assert_eq!(limited.text().matches("cannot keep").count(), 1);
    assert_eq!(kept(&prompts), Vec::<PathBuf>::new());
    drop(limited);
    let left = std::fs::read_dir(&prompts).unwrap().count();
    assert_eq!(left, 0, "no unfinished file stays");

    let free = start(dir.path(), "", &args);
    for (seed, expected) in (1..5).zip(&replies) {
        let reply = ask(&free.server, &ids(seed, 60), 12);
        assert_eq!(reply["choices"], expected["choices"]);
    }
    eventually("files", || kept(&prompts).len() == 4);
}

/// Root may write to any directory, so the test removes the directory.
#[test]
fn a_directory_that_becomes_unwritable_is_one_warning() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts");
    let model = fixture("tiny/llama");
    let args = [
        "--port",
        "0",
        "--cache-dir",
        prompts.to_str().unwrap(),
        model.to_str().unwrap(),
    ];
    let logged = start(dir.path(), "", &args);
    // No user can write to a removed directory.
    std::fs::remove_dir_all(&prompts).unwrap();
    for seed in 1..4 {
        ask(&logged.server, &ids(seed, 60), 12);
    }
    eventually("a warning", || {
        logged.text().contains("requests go on without it")
    });
    let warnings = logged.text().matches("requests go on without it").count();
    assert_eq!(warnings, 1, "{}", logged.text());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_for_the_log_stops_no_request() {
    let model = fixture("tiny/llama");
    let args = [
        "--port",
        "0",
        "--log-level",
        "trace",
        model.to_str().unwrap(),
    ];
    let mut command = command_after("", &args);
    command.stderr(File::options().write(true).open("/dev/full").unwrap());
    let mut server = Served::start(command);
    for seed in 1..4 {
        ask(&server, &ids(seed, 20), 8);
    }
    let (status, text) = server.post("/v1/completions", &json!({"prompt": "x", "temperature": 9}));
    assert_eq!(status, 400, "{text}");
    server.signal(Signal::TERM);
    assert_eq!(server.end().code(), Some(0));
}

#[test]
fn a_model_whose_files_are_removed_answers_until_it_is_unloaded() {
    let models = tempfile::tempdir().unwrap();
    let logs = tempfile::tempdir().unwrap();
    let named = models.path().join("named");
    let by_name = models.path().join("all/by-name");
    std::fs::create_dir_all(by_name.parent().unwrap()).unwrap();
    std::fs::rename(long_copy("llama").keep(), &named).unwrap();
    std::fs::rename(long_copy("llama").keep(), &by_name).unwrap();
    let all = models.path().join("all");
    let args = [
        "--port",
        "0",
        "--models-dir",
        all.to_str().unwrap(),
        "--keep-alive",
        "2s",
        named.to_str().unwrap(),
    ];
    let logged = start(logs.path(), "", &args);
    let server = &logged.server;
    let body = |model: &str| {
        json!({"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0,
            "ignore_eos": true})
    };
    let before = ["named", "by-name"].map(|name| server.json("/v1/completions", &body(name)));
    std::fs::remove_dir_all(&named).unwrap();
    std::fs::remove_dir_all(&by_name).unwrap();
    // Loaded models still reply.
    for (name, before) in ["named", "by-name"].iter().zip(&before) {
        let reply = server.json("/v1/completions", &body(name));
        assert_eq!(reply["choices"], before["choices"], "{name}");
    }
    eventually("the models are unloaded", || {
        get(server, "/api/ps")["models"] == json!([])
    });
    // The directory no longer has the model, so its name is unknown.
    let (status, text) = server.post("/v1/completions", &body("by-name"));
    assert_eq!(status, 404, "{text}");
    assert!(text.contains("by-name"), "{text}");
    // The command line named this model, so it is still listed.
    let (status, text) = server.post("/v1/completions", &body("named"));
    assert_eq!(status, 500, "{text}");
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(error["error"]["code"], "model_not_loaded");
    assert!(logged.text().contains("named"), "{}", logged.text());
    // The paths of the server are in its log only.
    assert!(!text.contains(models.path().to_str().unwrap()), "{text}");
    assert_eq!(get(server, "/health")["status"], "ok");
}

#[test]
fn a_request_beyond_the_memory_of_the_caches_fails_alone() {
    let model = long_copy("llama");
    let dir = tempfile::tempdir().unwrap();
    // A token has keys and values of 3 layers with 32 float32 values each: 768 bytes.
    let budget = (1000 * 768).to_string();
    let args = [
        "--port",
        "0",
        "--kv-budget",
        &budget,
        model.path().to_str().unwrap(),
    ];
    let logged = start(dir.path(), "", &args);
    let server = &logged.server;
    let expected = ask(server, &ids(1, 20), 12)["choices"].clone();
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| ask(server, &ids(1, 20), 700)))
            .collect();
        let body = json!({"prompt": ids(2, 20), "max_tokens": 2000, "temperature": 0});
        let (status, text) = server.post("/v1/completions", &body);
        assert_eq!(status, 400, "{text}");
        assert!(text.contains("keys and values"), "{text}");
        for other in others {
            let reply = other.join().unwrap();
            assert_eq!(reply["usage"]["completion_tokens"], 700);
        }
    });
    assert_eq!(ask(server, &ids(1, 20), 12)["choices"], expected);
    assert_eq!(get(server, "/health")["status"], "ok");
}

/// A tiny model whose caches are large: 64 heads of 128 values, so 192 KiB a token.
fn model_with_large_caches() -> tempfile::TempDir {
    let dir = long_copy("llama");
    let config = dir.path().join("config.json");
    let mut values: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    values["num_attention_heads"] = json!(64);
    values["num_key_value_heads"] = json!(64);
    values["head_dim"] = json!(128);
    std::fs::write(&config, values.to_string()).unwrap();
    let weights = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let wide: Vec<u8> = (0..64 * 128 * 32_u32)
        .flat_map(|i| ((f64::from(i % 97) / 97.0 - 0.5) as f32).to_le_bytes())
        .collect();
    let all = read.iter().map(|(name, view)| {
        let shape = match name.rsplit('.').nth(1) {
            Some("q_proj" | "k_proj" | "v_proj") => vec![64 * 128, 32],
            Some("o_proj") => vec![32, 64 * 128],
            _ => return (name, view.clone()),
        };
        let view = TensorView::new(view.dtype(), shape, &wide).unwrap();
        (name, view)
    });
    let written = safetensors::serialize(all, None).unwrap();
    std::fs::write(&weights, written).unwrap();
    dir
}

/// The size of the process's private writable memory, in bytes. It does not count address space
/// that is only reserved, such as the 64 MiB that glibc reserves for the allocations of a new
/// thread: the number of threads depends on timing.
#[cfg(target_os = "linux")]
fn writable_memory(server: &Served) -> u64 {
    let status = format!("/proc/{}/status", server.child.id());
    let status = std::fs::read_to_string(status).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmData:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Limits the private writable memory of a running server.
#[cfg(target_os = "linux")]
fn limit_writable_memory(server: &Served, bytes: Option<u64>) {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

    let id = Pid::from_raw(i32::try_from(server.child.id()).unwrap());
    let maximum = getrlimit(Resource::Data).maximum;
    let limit = Rlimit {
        current: bytes.or(maximum),
        maximum,
    };
    prlimit(id, Resource::Data, limit).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_request_that_the_machine_has_no_memory_for_fails_alone() {
    let model = model_with_large_caches();
    let dir = tempfile::tempdir().unwrap();
    let path = model.path().to_str().unwrap();
    let logged = start(dir.path(), "", &["--port", "0", path]);
    let server = &logged.server;
    let small = || ask(server, &ids(1, 20), 30)["choices"].clone();
    let expected = small();
    let large = json!({"prompt": ids(2, 1500), "max_tokens": 4, "temperature": 0});
    let mut long = Long::start(server);

    // The caches of the large request need 281 MiB.
    limit_writable_memory(server, Some(writable_memory(server) + (100 << 20)));
    std::thread::scope(|scope| {
        let others = scope.spawn(|| (0..3).for_each(|_| assert_eq!(small(), expected)));
        for _ in 0..2 {
            let (status, text) = server.post("/v1/completions", &large);
            assert_eq!(status, 503, "{text}; {}", logged.text());
            let error: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(error["error"]["code"], "out_of_memory", "{text}");
        }
        others.join().unwrap();
    });
    assert_eq!(small(), expected);
    // The long reply, which started before the fault, continues.
    long.0.as_reader().read_exact(&mut [0; 16]).unwrap();
    drop(long);

    limit_writable_memory(server, None);
    let reply = server.json("/v1/completions", &large);
    assert_eq!(reply["usage"]["prompt_tokens"], 1500);
}
