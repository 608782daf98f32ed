//! Rewards of generated replies: a trait, and a command that exchanges lines with the run.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use inference::{Error, ErrorKind, Result};
use serde_json::{Map, Value};

/// A reply that the model generated.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The line of the data with the prompt, with all its fields.
    pub line: Map<String, Value>,
    /// The text of the reply.
    pub text: String,
    /// The token ids of the reply, including the token that ended it.
    pub ids: Vec<u32>,
    /// Whether the reply reached the maximum number of tokens.
    pub is_truncated: bool,
}

/// Judges replies. A function or closure can be used as a reward.
pub trait Reward: Send {
    /// One finite reward per reply; a greater reward is better.
    ///
    /// # Errors
    /// If the replies cannot be judged. The run then ends.
    fn rewards(&mut self, completions: &[Completion]) -> Result<Vec<f32>>;
}

impl<F: FnMut(&[Completion]) -> Result<Vec<f32>> + Send> Reward for F {
    fn rewards(&mut self, completions: &[Completion]) -> Result<Vec<f32>> {
        self(completions)
    }
}

/// A program that judges replies. It reads one JSON object per line: the fields of the data's line,
/// and `completion`. It writes one number per line, in the same order. The process lives as long as
/// the run, so it must flush each line.
pub struct RewardCommand {
    command: String,
    child: Child,
    input: Option<ChildStdin>,
    answers: Receiver<std::io::Result<String>>,
}

impl RewardCommand {
    /// Starts the program in the system's shell.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if it cannot be started.
    pub fn start(command: &str) -> Result<Self> {
        let mut child = Command::new("sh")
            .args(["-c", command])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| failed(command, "it cannot be started").with_source(e))?;
        let (sender, answers) = channel();
        if let Some(output) = child.stdout.take() {
            // A separate thread reads, so that the program can answer while it still receives
            // lines.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines() {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            command: command.to_owned(),
            input: child.stdin.take(),
            child,
            answers,
        })
    }

    fn failed(&self, message: &str) -> Error {
        failed(&self.command, message)
    }

    /// Returns the error for a program that ended too early.
    fn ended(&mut self) -> Error {
        // Closing its input makes the program end, so that `wait` returns.
        self.input = None;
        match self.child.wait() {
            Ok(status) => self.failed(&format!("it ended with {status} before all its rewards")),
            Err(e) => self.failed("it ended too early").with_source(e),
        }
    }
}

/// The number of 10 ms waits for the program to end before it is killed.
const GRACE: u32 = 100;

fn failed(command: &str, message: &str) -> Error {
    Error::new(
        ErrorKind::Io,
        format!("the reward command `{command}`: {message}"),
    )
}

impl Reward for RewardCommand {
    fn rewards(&mut self, completions: &[Completion]) -> Result<Vec<f32>> {
        let mut text = String::new();
        for completion in completions {
            let mut line = completion.line.clone();
            line.insert(String::from("completion"), completion.text.clone().into());
            text.push_str(&format!("{}\n", Value::Object(line)));
        }
        let sent = match &mut self.input {
            Some(input) => input
                .write_all(text.as_bytes())
                .and_then(|()| input.flush())
                .is_ok(),
            None => false,
        };
        if !sent {
            return Err(self.ended());
        }
        let mut rewards = Vec::with_capacity(completions.len());
        for _ in completions {
            let line = match self.answers.recv() {
                Ok(Ok(line)) => line,
                Ok(Err(e)) => return Err(self.failed("its output is no text").with_source(e)),
                Err(_) => return Err(self.ended()),
            };
            let reward = line.trim().parse::<f32>().ok().filter(|r| r.is_finite());
            rewards.push(reward.ok_or_else(|| {
                self.failed(&format!("it wrote {line:?}, which is no finite number"))
            })?);
        }
        Ok(rewards)
    }
}

impl Drop for RewardCommand {
    fn drop(&mut self) {
        self.input = None;
        // Closing its input should end the program. Otherwise it is killed, so that it does not
        // outlive the run.
        for _ in 0..GRACE {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use serde_json::json;

    use super::*;

    fn completions() -> Vec<Completion> {
        let one = |text: &str| Completion {
            line: json!({"prompt": "hi", "answer": 3})
                .as_object()
                .unwrap()
                .clone(),
            text: text.to_owned(),
            ids: vec![1],
            is_truncated: false,
        };
        vec![one("a\n\"b\""), one("cc")]
    }

    #[test]
    fn a_command_answers_line_by_line() {
        let command =
            "while read -r line; do case \"$line\" in *cc*) echo 2.5;; *) echo -1;; esac; done";
        let mut reward = RewardCommand::start(command).unwrap();
        for _ in 0..3 {
            assert_eq!(reward.rewards(&completions()).unwrap(), [-1.0, 2.5]);
        }
        // The program must receive the fields of the line.
        let command = "while read -r line; do case \"$line\" in *'\"answer\":3'*) echo 1;; *) echo 0;; esac; done";
        let mut reward = RewardCommand::start(command).unwrap();
        assert_eq!(reward.rewards(&completions()).unwrap(), [1.0, 1.0]);
    }

    #[test]
    fn a_command_can_finish_its_work_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("end");
        let command = format!(
            "while read -r line; do echo 1; done; sleep 0.1; echo done > {}",
            file.display()
        );
        let mut reward = RewardCommand::start(&command).unwrap();
        assert_eq!(reward.rewards(&completions()).unwrap(), [1.0, 1.0]);
        drop(reward);
        assert_eq!(std::fs::read_to_string(file).unwrap(), "done\n");
    }

    #[test]
    fn faults_of_a_command_are_told() {
        for (command, what) in [
            ("cat", "no finite number"),
            ("while read -r line; do echo nan; done", "no finite number"),
            ("read -r line; echo 1; exit 3", "exit status: 3"),
            ("exit 4", "exit status: 4"),
            ("this-program-does-not-exist", "127"),
        ] {
            let mut reward = RewardCommand::start(command).unwrap();
            let error = reward.rewards(&completions()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            let told = error.to_string();
            assert!(told.contains(what) && told.contains(command), "{told}");
        }
    }
}
