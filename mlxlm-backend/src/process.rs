//! One Python process: starts it, exchanges messages with it, and guarantees its end. This module
//! does not interpret messages; `worker.rs` restarts the process.
//!
//! The child always ends with this program: the program's end of the child's standard input then
//! closes, and a thread of the bridge waits for that. `PR_SET_PDEATHSIG` is not used, because it
//! would fire when the *thread* that started the child ends, and because setting it before exec
//! needs unsafe code.

use std::ffi::OsString;
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use inference::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::libraries::keep_apart;
use crate::pipes::{Line, Tail, keep_tail, read_lines, write_messages};
use crate::protocol::Reply;
use crate::script::Script;
use crate::settings::{PYTHON_VARIABLE, Settings};

/// Polling interval while a process ends.
const POLL: Duration = Duration::from_millis(5);
/// How long a process may continue after its output has ended.
const LAST_BREATH: Duration = Duration::from_secs(2);
/// Number of characters of standard error in an error message.
const LAST_WORDS: usize = 400;

/// A running bridge. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// `None` after the end of messages was signaled to the process.
    input: Option<Sender<Vec<u8>>>,
    output: Receiver<Line>,
    tail: Tail,
    tail_thread: JoinHandle<()>,
    quit_grace: Duration,
    next_id: u64,
    /// The script that the process runs. It must exist while the process may read it.
    _script: Arc<Script>,
}

impl Process {
    /// Starts the bridge in this mode.
    ///
    /// # Errors
    /// [`ErrorKind::UnavailableBackend`] if the interpreter cannot be run.
    pub fn start(settings: &Settings, mode: &[&str]) -> Result<Self> {
        let script = Script::get(settings.script.as_deref())?;
        let python = settings.interpreter();
        let mut command = Command::new(&python);
        command
            .arg(script.path())
            .args(mode)
            // Python must not use the network: loading a model reads only the model's directory.
            .env("HF_HUB_OFFLINE", "1")
            .env("TRANSFORMERS_OFFLINE", "1")
            .env("TOKENIZERS_PARALLELISM", "false")
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        keep_apart(&mut command, |name| std::env::var_os(name));
        #[cfg(unix)]
        {
            use std::os::unix::process::CommandExt;
            // In a separate process group, Ctrl-C of a terminal reaches only this program, which
            // cancels the requests.
            command.process_group(0);
        }
        let child = command.spawn().map_err(|e| cannot_run(&python, e))?;
        // From here on, dropping this value on an error kills the child.
        let mut child = Reaped(Some(child));
        let pipes = child.0.as_mut().and_then(|c| {
            let (input, output) = (c.stdin.take()?, c.stdout.take()?);
            Some((input, output, c.stderr.take()?))
        });
        let (input, output, errors) =
            pipes.ok_or_else(|| Error::new(ErrorKind::Io, "the Python process has no pipes"))?;
        let threads = |e: io::Error| {
            Error::new(
                ErrorKind::Io,
                format!("cannot start a thread for Python: {e}"),
            )
            .with_source(e)
        };
        let input = write_messages(input).map_err(threads)?;
        let output = read_lines(output, settings.max_line).map_err(threads)?;
        let (tail, tail_thread) = keep_tail(errors).map_err(threads)?;
        let child = child
            .0
            .take()
            .ok_or_else(|| Error::new(ErrorKind::Io, "the Python process is gone"))?;
        Ok(Self {
            child,
            input: Some(input),
            output,
            tail,
            tail_thread,
            quit_grace: settings.quit_grace,
            next_id: 1,
            _script: script,
        })
    }

    /// An id that no earlier request of this process had.
    pub fn new_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Sends one message. If the process has ended, the wait for the answer reports it.
    pub fn send(&self, message: &Value) {
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        if let Some(input) = &self.input {
            let _ = input.send(line);
        }
    }

    /// The next message; `None` if none arrives within `patience`. After an error, the process is
    /// unusable.
    ///
    /// # Errors
    /// [`ErrorKind::Engine`] if the process has ended, or for an invalid message.
    pub fn receive(&mut self, patience: Duration) -> Result<Option<Reply>> {
        match self.output.recv_timeout(patience) {
            Ok(line) => self.understand(line).map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended(b"")),
        }
    }

    /// Whether the process is running and has sent no unexpected message.
    pub fn is_sound(&mut self) -> bool {
        matches!(self.output.try_recv(), Err(TryRecvError::Empty))
            && matches!(self.child.try_wait(), Ok(None))
    }

    fn understand(&mut self, line: Line) -> Result<Reply> {
        match line {
            Line::Whole(bytes) => Reply::parse(&bytes).map_err(|reason| {
                self.fault(&format!(
                    "the Python process sent an invalid message ({reason})"
                ))
            }),
            Line::TooLong => {
                Err(self.fault("the Python process sent a line longer than a message may be"))
            }
            Line::End(rest) => Err(self.ended(&rest)),
            Line::Failed(e) => Err(self
                .fault(&format!("cannot read from the Python process: {e}"))
                .with_source(e)),
        }
    }

    /// An error of the process, with the end of its standard error.
    pub fn fault(&self, what: &str) -> Error {
        let tail = self.tail.text();
        let words = last_words(&tail);
        let error = if words.is_empty() {
            Error::new(ErrorKind::Engine, what)
        } else {
            let message = format!("{what}; it last said: {words}");
            Error::new(ErrorKind::Engine, message)
        };
        if tail.trim().is_empty() {
            error
        } else {
            error.with_source(Said(tail))
        }
    }

    /// The error for an output that has ended.
    fn ended(&mut self, rest: &[u8]) -> Error {
        let status = self.wait(LAST_BREATH);
        // The rest of standard error may arrive later. The wait is limited, because a grandchild
        // may keep the pipe open forever.
        let until = Instant::now() + Duration::from_millis(500);
        while !self.tail_thread.is_finished() && Instant::now() < until {
            sleep(POLL);
        }
        let half = if rest.is_empty() {
            ""
        } else {
            " in the middle of a message"
        };
        let how = match status {
            Some(status) => format!("the Python process ended{half} ({status})"),
            None => format!("the Python process closed its output{half}"),
        };
        self.fault(&how)
    }

    /// Waits for the end of the process, but at most `patience`.
    fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let since = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if since.elapsed() < patience => sleep(POLL),
                _ => return None,
            }
        }
    }

    /// Lets the process end on its own. After a grace period, kills it.
    pub fn quit(mut self) {
        self.send(&serde_json::json!({"op": "quit"}));
        self.input = None;
        self.wait(self.quit_grace);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail without harm if the child has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills and reaps the child on drop, unless the child was taken out.
struct Reaped(Option<Child>);

impl Drop for Reaped {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The standard error of a process, as the source of an error.
#[derive(Debug)]
struct Said(String);

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "on its standard error: {}", self.0.trim_end())
    }
}

impl std::error::Error for Said {}

/// The last lines, at most [`LAST_WORDS`] printable characters.
fn last_words(tail: &str) -> String {
    let lines: Vec<&str> = tail
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    let last = &lines[lines.len().saturating_sub(3)..];
    let text: Vec<char> = last
        .join(" | ")
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    let start = text.len().saturating_sub(LAST_WORDS);
    text[start..].iter().collect()
}

fn cannot_run(python: &OsString, e: io::Error) -> Error {
    let python = python.to_string_lossy();
    Error::new(
        ErrorKind::UnavailableBackend,
        format!(
            "cannot run the Python interpreter `{python}`: {e}; install Python 3 with mlx-lm, or set \
             {PYTHON_VARIABLE} to an interpreter that has it"
        ),
    )
    .with_source(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_short_and_printable() {
        assert_eq!(last_words(""), "");
        let text = "one\ntwo\n\nthree\u{1b}[31m\nfour\n";
        assert_eq!(last_words(text), "two | three[31m | four");
        assert_eq!(last_words(&"x".repeat(10_000)).chars().count(), LAST_WORDS);
    }
}
