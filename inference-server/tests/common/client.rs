//! An HTTP client for tests. It is handwritten, so that it can stop at any point of a request.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

#[derive(Debug, Clone)]
pub struct Client {
    address: SocketAddr,
    headers: Vec<(String, String)>,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Reply {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e} in {self:?}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The JSON of an answer. Panics unless the answer has this status.
    #[track_caller]
    pub fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        self.json()
    }
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            headers: Vec::new(),
        }
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.ask("POST", path, body.to_string().as_bytes())
    }

    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> Reply {
        read(self.open(method, path, body))
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        stream
    }

    /// Sends a request. The caller reads the answer from the returned stream.
    pub fn open(&self, method: &str, path: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !self.headers.iter().any(|(n, _)| n == "Host") {
            head.push_str(&format!("Host: {}\r\n", self.address));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if method == "POST" || !body.is_empty() {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        // A server may answer and close before it has read the whole request, so a write error is
        // ignored.
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(body);
        stream
    }

    pub fn open_json(&self, path: &str, body: &Value) -> TcpStream {
        self.open("POST", path, body.to_string().as_bytes())
    }
}

/// Reads an answer to its end.
#[track_caller]
pub fn read(mut stream: TcpStream) -> Reply {
    let mut all = Vec::new();
    let mut part = [0; 4096];
    loop {
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(n) => all.extend_from_slice(&part[..n]),
            // If the server resets the connection, the bytes that arrived before are the answer.
            Err(e) if !all.is_empty() && e.kind() != std::io::ErrorKind::WouldBlock => break,
            Err(e) => panic!("no answer: {e}"),
        }
    }
    let at = all
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .unwrap_or_else(|| panic!("no head: {:?}", String::from_utf8_lossy(&all)));
    let head = String::from_utf8(all[..at].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut reply = Reply {
        status,
        head,
        body: all[at + 4..].to_vec(),
    };
    if reply.header("transfer-encoding") == Some("chunked") {
        reply.body = unchunked(&reply.body);
    }
    reply
}

fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(at) = body.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&body[..at]).unwrap();
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        if size == 0 || body.len() < at + 2 + size {
            break;
        }
        out.extend_from_slice(&body[at + 2..at + 2 + size]);
        body = body.get(at + 2 + size + 2..).unwrap_or_default();
    }
    out
}

/// The events of a stream: their names and data, with `[DONE]` as null.
#[track_caller]
pub fn events(reply: &Reply) -> Vec<(String, Value)> {
    let text = reply.text();
    let mut events = Vec::new();
    for block in text.split("\n\n") {
        let (mut name, mut data) = (String::new(), None);
        for line in block.lines() {
            if let Some(rest) = line.strip_prefix("event: ") {
                name = rest.to_owned();
            } else if let Some(rest) = line.strip_prefix("data: ") {
                data = Some(rest.to_owned());
            } else {
                assert!(line.is_empty() || line.starts_with(':'), "{line:?}");
            }
        }
        match data.as_deref() {
            None => {}
            Some("[DONE]") => events.push((name, Value::Null)),
            Some(data) => events.push((name, serde_json::from_str(data).unwrap())),
        }
    }
    events
}

/// The lines of an answer that is a stream of JSON lines.
#[track_caller]
pub fn lines(reply: &Reply) -> Vec<Value> {
    let text = reply.text();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}
