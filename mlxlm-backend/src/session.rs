//! A process with a loaded model. It starts, loads, answers short requests, and restarts after a
//! loss. `reply.rs` has streamed replies. The thread of `worker.rs` owns the session.

use std::time::{Duration, Instant};

use inference::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::process::Process;
use crate::protocol::{PROTOCOL, Reply};
use crate::settings::Settings;

/// How often a waiting caller checks whether to continue.
pub const POLL: Duration = Duration::from_millis(20);

/// Returns an error if the wait must end.
pub type Watch<'a> = &'a dyn Fn() -> Result<()>;

/// A process, and the data for restarting it.
#[derive(Debug)]
pub struct Session {
    pub(crate) settings: Settings,
    load: Value,
    on_cpu: bool,
    /// `None` after the process was lost.
    pub(crate) process: Option<Process>,
}

/// Asks the interpreter for its versions. Returns its message, which may contain an `error`.
///
/// # Errors
/// If the interpreter cannot be run, does not answer, or sends an invalid answer.
pub fn probe(settings: &Settings) -> Result<Reply> {
    let mut process = Process::start(settings, &["probe"])?;
    let patience = settings.start_timeout;
    let reply = wait(&mut process, patience, "mlx_lm to be imported", &|| Ok(()))?;
    if !reply.ok && reply.error.is_none() {
        return Err(process.fault("the Python process did not report its versions and abilities"));
    }
    Ok(reply)
}

/// Waits at most `patience` for the next message of any kind. `what` describes it in the error.
fn wait(process: &mut Process, patience: Duration, what: &str, watch: Watch<'_>) -> Result<Reply> {
    let since = Instant::now();
    loop {
        watch()?;
        if let Some(reply) = process.receive(POLL)? {
            return Ok(reply);
        }
        if since.elapsed() >= patience {
            let seconds = patience.as_secs_f64();
            return Err(process.fault(&format!(
                "waited {seconds:.1} s for {what} and heard nothing; the Python process was ended"
            )));
        }
    }
}

impl Session {
    /// Starts a process and loads the model that `load` names. Also returns the model's
    /// description.
    ///
    /// # Errors
    /// [`ErrorKind::UnavailableBackend`] if Python does not start; otherwise the error of loading.
    pub fn open(settings: Settings, load: Value, on_cpu: bool) -> Result<(Self, Reply)> {
        let mut session = Self {
            settings,
            load,
            on_cpu,
            process: None,
        };
        let loaded = session.start(&|| Ok(()))?;
        Ok((session, loaded))
    }

    fn start(&mut self, watch: Watch<'_>) -> Result<Reply> {
        let mode: &[&str] = if self.on_cpu {
            &["serve", "cpu"]
        } else {
            &["serve"]
        };
        let mut process = Process::start(&self.settings, mode)?;
        let patience = self.settings.start_timeout;
        let ready = wait(&mut process, patience, "Python to start", watch).map_err(|e| {
            match e.kind() {
                // The process failed during startup. The cause is in Python, such as a missing
                // package.
                ErrorKind::Engine => unavailable(e),
                _ => e,
            }
        })?;
        if !ready.ready || ready.protocol != PROTOCOL {
            return Err(process.fault(&format!(
                "the Python process did not begin with protocol {PROTOCOL}; is something else in its place?"
            )));
        }
        let patience = self.settings.load_timeout;
        let loaded = exchange(
            &mut process,
            self.load.clone(),
            patience,
            "the model to load",
            watch,
        )?;
        let loaded = loaded.map_err(|e| e.context("mlx_lm"))?;
        if !loaded.ok {
            return Err(process.fault("the Python process did not say what it loaded"));
        }
        self.process = Some(process);
        Ok(loaded)
    }

    /// Returns the process. Restarts it if it was lost.
    ///
    /// # Errors
    /// Those of [`Session::open`], and the error of `watch`.
    pub fn ready(&mut self, watch: Watch<'_>) -> Result<&mut Process> {
        if let Some(process) = &mut self.process
            && !process.is_sound()
        {
            tracing::warn!(
                "the Python process of mlx_lm is gone or out of step; starting it again"
            );
            self.process = None;
        }
        if self.process.is_none() {
            self.start(watch).map_err(|e| e.context("restart"))?;
        }
        self.process
            .as_mut()
            .ok_or_else(|| Error::new(ErrorKind::Engine, "the Python process did not start"))
    }

    /// Sends a request with a single answer.
    ///
    /// # Errors
    /// The bridge's error, or the loss of the process.
    pub fn ask(&mut self, request: Value, watch: Watch<'_>) -> Result<Reply> {
        let patience = self.settings.silence_timeout;
        let process = self.ready(watch)?;
        match exchange(process, request, patience, "an answer", watch) {
            Ok(answer) => answer,
            Err(e) => {
                self.process = None;
                Err(lost(e))
            }
        }
    }

    /// Ends the process, if possible without killing it.
    pub fn quit(&mut self) {
        if let Some(process) = self.process.take() {
            process.quit();
        }
    }
}

/// Sends a request and reads its single answer. An outer error means that the process is unusable.
fn exchange(
    process: &mut Process,
    mut request: Value,
    patience: Duration,
    what: &str,
    watch: Watch<'_>,
) -> Result<Result<Reply>> {
    let id = process.new_id();
    request["id"] = id.into();
    process.send(&request);
    let reply = wait(process, patience, what, watch)?;
    if reply.id != Some(id) {
        return Err(wrong_id(process, id, reply.id));
    }
    Ok(match reply.failure() {
        Some(error) => Err(error),
        None => Ok(reply),
    })
}

/// The error for a message that answers another request.
pub fn wrong_id(process: &Process, asked: u64, got: Option<u64>) -> Error {
    let got = got.map_or_else(|| String::from("none"), |id| id.to_string());
    process.fault(&format!(
        "the Python process answered request {got} while {asked} was asked"
    ))
}

/// The error for a request whose process was lost.
pub fn lost(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Engine => error.context("mlx_lm (the next request starts Python again)"),
        _ => error,
    }
}

fn unavailable(error: Error) -> Error {
    Error::new(ErrorKind::UnavailableBackend, error.to_string())
        .with_source(error)
        .context("mlx_lm")
}
