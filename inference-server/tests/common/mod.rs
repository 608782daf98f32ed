//! A scripted model, a server and a client for tests, without an engine or MLX. The client can
//! misbehave in ways that real clients do not.

#![allow(dead_code, reason = "each test binary uses a part")]

mod client;
mod script;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use inference::CancelToken;
use inference_server::{Config, Limits, ServedModel, Server};

#[allow(unused_imports, reason = "each test binary uses a part")]
pub use client::{Client, Reply, events, lines, read};
pub use script::{Script, State, capabilities};

/// A server that runs in its own thread.
pub struct Running {
    pub address: SocketAddr,
    pub state: Arc<State>,
    stop: CancelToken,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    /// Asks the server to stop, without waiting.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    pub fn stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until no request runs or is queued.
    #[track_caller]
    pub fn idle(&self) {
        let state = Arc::clone(&self.state);
        eventually("no rows", || state.running() == 0);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.state.release();
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
    }
}

/// Short time limits, which keep tests fast.
pub fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.header_timeout = Duration::from_millis(500);
    limits.body_timeout = Duration::from_millis(500);
    limits.write_timeout = Duration::from_millis(500);
    limits.drain_timeout = Duration::from_millis(500);
    limits.first_event = Duration::from_millis(200);
    limits.ping = Duration::from_millis(100);
    limits
}

pub fn config() -> Config {
    Config::new()
        .with_address("127.0.0.1:0".parse().unwrap())
        .with_parallel(4)
        .with_max_queue(4)
        .with_limits(limits())
}

pub fn serve(config: &Config) -> Running {
    serve_as(config, |model| model.with_context(1000))
}

/// Serves the scripted model under the name `tiny`. The model's context has a million tokens.
pub fn serve_as(config: &Config, adjust: impl FnOnce(ServedModel) -> ServedModel) -> Running {
    serve_script(config, Script::new(), adjust)
}

pub fn serve_script(
    config: &Config,
    script: Script,
    adjust: impl FnOnce(ServedModel) -> ServedModel,
) -> Running {
    let state = Arc::clone(&script.state);
    let model = script.into_model();
    let model = ServedModel::new("tiny", model, capabilities()).unwrap();
    let server = Server::bind(config, vec![adjust(model)]).unwrap();
    let address = server.address();
    let stop = CancelToken::new();
    let token = stop.clone();
    let thread = std::thread::spawn(move || server.run(&token).unwrap());
    Running {
        address,
        state,
        stop,
        thread: Some(thread),
    }
}

/// Waits until `holds` returns true. Panics after a time limit.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
