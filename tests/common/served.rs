//! Runs the program as a server, and sends requests to it.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A running server and its address. Dropping it kills the server.
pub struct Served {
    pub child: Child,
    pub url: String,
    /// The server's home directory, if it has a separate one.
    pub home: Option<tempfile::TempDir>,
}

/// The HTTP client. It returns a response with an error status as a response, not as an error.
pub fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .timeout_global(Some(Duration::from_secs(600)))
        .build()
        .into()
}

impl Served {
    /// Starts a server, and returns as soon as the server prints its address.
    pub fn start(mut command: Command) -> Served {
        let mut child = command
            .env_remove("MLX_API_KEY")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        let url = line.trim().to_owned();
        assert!(url.starts_with("http://127.0.0.1:"), "{url:?}");
        Served {
            child,
            url,
            home: None,
        }
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, String) {
        let url = format!("{}{path}", self.url);
        let request = agent()
            .post(&url)
            .header("Content-Type", "application/json");
        let mut answer = request.send(body.to_string()).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (answer.status().as_u16(), text)
    }

    pub fn json(&self, path: &str, body: &Value) -> Value {
        let (status, text) = self.post(path, body);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    /// Waits until the server process exits.
    pub fn end(&mut self) -> ExitStatus {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
