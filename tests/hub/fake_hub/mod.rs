//! A local hub for tests of downloads and uploads. It serves one request per connection, each on
//! its own thread, and can inject every fault that a test needs.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rust_mlx::hub::HfHub;
use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A received request.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: BTreeMap<String, String>,
    /// Whether the request came to the host to which large files are redirected.
    pub at_store: bool,
}

/// A fault in the answer to the next matching request.
#[derive(Debug, Clone)]
pub enum Fault {
    /// The answer has this status and these headers.
    Status(u16, Vec<(&'static str, String)>),
    /// The answer ends after this many bytes of its body.
    DropAfter(usize),
    /// The server ignores range requests and sends the whole file.
    WholeFile,
    /// The `Content-Length` header has this wrong value; the body is complete.
    Length(usize),
    /// The body has the same length but other bytes.
    Garbage,
}

#[derive(Default)]
struct State {
    /// Files by name.
    files: BTreeMap<String, Vec<u8>>,
    /// Names in the file list that have no file.
    claimed: Vec<String>,
    revision: String,
    token: Option<String>,
    /// Method, part of the path, fault, and the number of requests that still get the fault.
    faults: Vec<(&'static str, String, Fault, usize)>,
    etag: Option<String>,
    log: Vec<Request>,
    store: String,
}

/// A local hub. Its thread runs until the test process ends.
pub struct FakeHub {
    pub endpoint: String,
    pub cache: tempfile::TempDir,
    state: Arc<Mutex<State>>,
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// Whether the hub treats this file name as a large file. SHA-256 identifies large files, and git's
/// hash identifies small files.
fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

pub fn etag_of(name: &str, bytes: &[u8]) -> String {
    if is_large(name) {
        return hex(&Sha256::digest(bytes));
    }
    let mut sha = Sha1::new();
    sha.update(format!("blob {}\0", bytes.len()));
    sha.update(bytes);
    hex(&sha.finalize())
}

impl FakeHub {
    /// A hub whose repository `own/tiny` has the files of a directory.
    pub fn of_dir(dir: &Path) -> Self {
        let hub = Self::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            hub.file(name, std::fs::read(&path).unwrap());
        }
        hub
    }

    /// A hub whose repository `own/tiny` is empty.
    pub fn new() -> Self {
        let state = Arc::new(Mutex::new(State {
            revision: "main".to_owned(),
            ..State::default()
        }));
        let listen = |at_store: bool| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("http://{}", listener.local_addr().unwrap());
            let state = Arc::clone(&state);
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    // Errors of a client that disconnects are ignored.
                    std::thread::spawn(move || drop(serve(stream, &state, at_store)));
                }
            });
            address
        };
        let endpoint = listen(false);
        let store = listen(true);
        state.lock().unwrap().store = store;
        Self {
            endpoint,
            cache: tempfile::tempdir().unwrap(),
            state,
        }
    }

    pub fn file(&self, name: &str, bytes: impl Into<Vec<u8>>) -> &Self {
        self.state
            .lock()
            .unwrap()
            .files
            .insert(name.to_owned(), bytes.into());
        self
    }

    /// Lists a name without a file.
    pub fn claim(&self, name: &str) -> &Self {
        self.state.lock().unwrap().claimed.push(name.to_owned());
        self
    }

    /// Adds a fault for the next `times` requests with this method and path.
    pub fn fault(&self, method: &'static str, part: &str, fault: Fault, times: usize) -> &Self {
        let mut state = self.state.lock().unwrap();
        state.faults.push((method, part.to_owned(), fault, times));
        self
    }

    /// Sets the revision, the only one of the repository.
    pub fn revision(&self, revision: &str) -> &Self {
        self.state.lock().unwrap().revision = revision.to_owned();
        self
    }

    pub fn needs_token(&self, token: &str) -> &Self {
        self.state.lock().unwrap().token = Some(token.to_owned());
        self
    }

    /// Sets the ETag of every file.
    pub fn etag(&self, etag: &str) -> &Self {
        self.state.lock().unwrap().etag = Some(etag.to_owned());
        self
    }

    pub fn log(&self) -> Vec<Request> {
        self.state.lock().unwrap().log.clone()
    }

    pub fn forget_log(&self) {
        self.state.lock().unwrap().log.clear();
    }

    /// A hub client with short retry delays.
    pub fn client(&self) -> HfHub {
        HfHub::new(&self.endpoint, self.cache.path())
            .unwrap()
            .with_retry_delay(Duration::from_millis(1))
    }

    /// The `mlx` program with this hub and a separate cache. Other variables are cleared.
    pub fn program(&self, args: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mlx"));
        command
            .args(args)
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.cache.path().join("home"))
            .env("HF_HUB_CACHE", self.cache.path())
            .env("MLX_CACHE_DIR", self.cache.path().join("ours"))
            .env("NO_PROXY", "127.0.0.1")
            .stdin(std::process::Stdio::null());
        for name in [
            "MLX_OFFLINE",
            "HF_HUB_OFFLINE",
            "HF_TOKEN",
            "MLX_BACKEND",
            "RUST_LOG",
        ] {
            command.env_remove(name);
        }
        command
    }

    pub fn repository(&self) -> PathBuf {
        self.cache.path().join("models--own--tiny")
    }

    pub fn snapshot(&self) -> PathBuf {
        self.repository().join("snapshots").join(COMMIT)
    }

    pub fn blob(&self, name: &str, bytes: &[u8]) -> PathBuf {
        self.repository().join("blobs").join(etag_of(name, bytes))
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>, at_store: bool) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let request = Request {
        method: method.to_owned(),
        path: path.to_owned(),
        headers,
        at_store,
    };
    let answer = {
        let mut state = state.lock().unwrap();
        state.log.push(request.clone());
        answer(&mut state, &request)
    };
    let mut out = stream;
    write!(out, "HTTP/1.1 {} X\r\nConnection: close\r\n", answer.status)?;
    for (name, value) in &answer.headers {
        write!(out, "{name}: {value}\r\n")?;
    }
    write!(
        out,
        "Content-Length: {}\r\n\r\n",
        answer.length.unwrap_or(answer.body.len())
    )?;
    if request.method != "HEAD" {
        out.write_all(&answer.body[..answer.cut.unwrap_or(answer.body.len())])?;
    }
    out.flush()
}

#[derive(Default)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of body bytes to send before the connection closes.
    cut: Option<usize>,
    length: Option<usize>,
}

impl Answer {
    fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }

    fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

fn answer(state: &mut State, request: &Request) -> Answer {
    let fault = state.faults.iter_mut().find(|(method, part, _, times)| {
        *times > 0 && *method == request.method && request.path.contains(part.as_str())
    });
    let fault = fault.map(|(_, _, fault, times)| {
        *times -= 1;
        fault.clone()
    });
    if let Some(Fault::Status(status, headers)) = fault {
        let headers = headers
            .into_iter()
            .map(|(n, v)| (n.to_owned(), v))
            .collect();
        return Answer {
            status,
            headers,
            ..Answer::default()
        };
    }
    if !request.at_store
        && let Some(token) = &state.token
        && request.headers.get("authorization") != Some(&format!("Bearer {token}"))
    {
        return Answer::status(401).with("X-Error-Code", "RepoNotFound");
    }
    let mut answer = right_answer(state, request, matches!(fault, Some(Fault::WholeFile)));
    match fault {
        Some(Fault::DropAfter(n)) => answer.cut = Some(n.min(answer.body.len())),
        Some(Fault::Length(n)) => answer.length = Some(n),
        Some(Fault::Garbage) => answer.body.iter_mut().for_each(|b| *b ^= 0x5a),
        _ => {}
    }
    answer
}

fn right_answer(state: &State, request: &Request, ignore_range: bool) -> Answer {
    if let Some(rest) = request.path.strip_prefix("/store/") {
        return match state.files.get(rest) {
            Some(bytes) if request.at_store => content(bytes, request, ignore_range),
            _ => Answer::status(404),
        };
    }
    let Some(rest) = request.path.strip_prefix("/api/models/own/tiny/revision/") else {
        let resolve = request.path.strip_prefix("/own/tiny/resolve/");
        let Some((commit, name)) = resolve.and_then(|r| r.split_once('/')) else {
            return Answer::status(404).with("X-Error-Code", "RepoNotFound");
        };
        let Some(bytes) = state.files.get(name).filter(|_| commit == COMMIT) else {
            return Answer::status(404).with("X-Error-Code", "EntryNotFound");
        };
        let etag = state.etag.clone().unwrap_or_else(|| etag_of(name, bytes));
        if is_large(name) {
            return Answer::status(302)
                .with("Location", format!("{}/store/{name}", state.store))
                .with("X-Repo-Commit", COMMIT)
                .with("X-Linked-Size", bytes.len().to_string())
                .with("X-Linked-Etag", format!("\"{etag}\""));
        }
        return content(bytes, request, ignore_range)
            .with("X-Repo-Commit", COMMIT)
            .with("ETag", format!("\"{etag}\""));
    };
    let revision = rest.split('?').next().unwrap_or("");
    if revision != state.revision && revision != COMMIT {
        return Answer::status(404).with("X-Error-Code", "RevisionNotFound");
    }
    let mut siblings: Vec<_> = state
        .files
        .iter()
        .map(|(name, bytes)| {
            let blob = etag_of(name, bytes);
            serde_json::json!({"rfilename": name, "size": bytes.len(), "blobId": blob})
        })
        .collect();
    siblings.extend(
        state
            .claimed
            .iter()
            .map(|name| serde_json::json!({"rfilename": name})),
    );
    let list = serde_json::json!({"id": "own/tiny", "sha": COMMIT, "siblings": siblings});
    Answer {
        status: 200,
        body: list.to_string().into_bytes(),
        ..Answer::default()
    }
}

/// The content of a file, or the requested range of it.
fn content(bytes: &[u8], request: &Request, ignore_range: bool) -> Answer {
    let range = request.headers.get("range").filter(|_| !ignore_range);
    let from = range.and_then(|r| {
        r.strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse::<usize>()
            .ok()
    });
    match from {
        None => Answer {
            status: 200,
            body: bytes.to_vec(),
            ..Answer::default()
        },
        Some(from) if from < bytes.len() => {
            let of = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
            Answer {
                status: 206,
                body: bytes[from..].to_vec(),
                ..Answer::default()
            }
            .with("Content-Range", of)
        }
        Some(_) => Answer::status(416),
    }
}
