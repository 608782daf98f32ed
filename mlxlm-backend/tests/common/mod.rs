//! Helpers for tests with the mock bridge: a model directory, a copy of the mock, and a check
//! whether a process exists.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use inference::{
    Backend, Error, GenerateOptions, LoadOptions, Result, TextModel, Token, TokenStream,
};
use mlxlm_backend::{MlxLmBackend, Settings};
use tempfile::TempDir;

/// A mock bridge and a model for it.
pub struct Mock {
    dir: TempDir,
    pub settings: Settings,
}

impl Mock {
    /// A mock that starts in the mode `start` and loads in the mode `load`.
    pub fn new(start: &str, load: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join(format!("{start}.py"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mock_bridge.py");
        std::fs::copy(source, &script).unwrap();
        let config = format!(r#"{{"model_type": "mock", "mock": "{load}"}}"#);
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let settings = Settings::new()
            .with_python("python3")
            .with_script(script)
            .with_start_timeout(Duration::from_secs(20))
            .with_load_timeout(Duration::from_secs(20))
            .with_silence_timeout(Duration::from_secs(20))
            .with_cancel_grace(Duration::from_secs(20))
            .with_quit_grace(Duration::from_secs(20))
            .with_max_line(100_000);
        Self { dir, settings }
    }

    pub fn good() -> Self {
        Self::new("ok", "ok")
    }

    pub fn with(mut self, change: impl FnOnce(Settings) -> Settings) -> Self {
        self.settings = change(self.settings);
        self
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn backend(&self) -> MlxLmBackend {
        MlxLmBackend::new(self.settings.clone())
    }

    pub fn try_load(&self) -> Result<Box<dyn TextModel>> {
        self.backend().load_model(self.path(), &LoadOptions::new())
    }

    pub fn load(&self) -> Box<dyn TextModel> {
        self.try_load().unwrap()
    }

    /// The number of probes that were run.
    pub fn probes(&self) -> usize {
        let log: PathBuf = self.settings.script.clone().unwrap();
        let log = log.with_extension("py.probes");
        std::fs::read_to_string(log).map_or(0, |text| text.lines().count())
    }
}

pub fn ask(model: &dyn TextModel, prompt: &str) -> Result<TokenStream> {
    model.generate(&prompt.into(), &GenerateOptions::new())
}

/// The words of a stream, and the error that ended it.
pub fn collect(stream: Result<TokenStream>) -> (Vec<String>, Option<Error>) {
    let mut words = Vec::new();
    let stream = match stream {
        Ok(stream) => stream,
        Err(e) => return (words, Some(e)),
    };
    for token in stream {
        match token {
            Ok(token) => words.push(token.text),
            Err(e) => return (words, Some(e)),
        }
    }
    (words, None)
}

pub fn text(token: Option<Result<Token>>) -> String {
    token.unwrap().unwrap().text
}

/// The id of the process that serves `model`.
pub fn pid(model: &dyn TextModel) -> u32 {
    let text = ask(model, "pid").unwrap().text().unwrap();
    text.parse().unwrap()
}

/// Whether a process exists. A process that has ended but was not reaped still exists.
pub fn exists(pid: u32) -> bool {
    Command::new("kill")
        .args(["-0", &pid.to_string()])
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .success()
}

/// Kills a process that the test started.
pub fn kill(pid: u32) {
    let done = Command::new("kill")
        .args(["-9", &pid.to_string()])
        .status()
        .unwrap();
    assert!(done.success());
}

/// Waits until `so` returns true.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
