//! Configures and runs the suite: each check runs in its own thread, with a time limit.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use inference::kit::panic_text;
use inference::{Backend, Capabilities, LoadOptions};

use crate::check::{Check, Need};
use crate::context::{Context, Stop, Verdict};
use crate::report::{CheckResult, Outcome, Report};

const PROMPTS: [&str; 4] = [
    "The capital of France is",
    "One, two, three,",
    "Once upon a time there was a",
    "Water is made of",
];

/// The checks for one backend and one model.
pub struct Suite {
    backend: Arc<dyn Backend>,
    path: PathBuf,
    load: LoadOptions,
    prompts: Vec<String>,
    timeout: Duration,
    required: BTreeSet<Check>,
    skipped: BTreeMap<Check, String>,
    only: Option<BTreeSet<Check>>,
}

impl Suite {
    /// All checks for `backend`, with the model at `path`. The model should be small, because the
    /// suite loads it about 25 times and generates about five thousand tokens.
    pub fn new(backend: Arc<dyn Backend>, path: impl Into<PathBuf>) -> Self {
        Self {
            backend,
            path: path.into(),
            load: LoadOptions::new(),
            prompts: PROMPTS.map(String::from).to_vec(),
            timeout: Duration::from_secs(120),
            required: BTreeSet::new(),
            skipped: BTreeMap::new(),
            only: None,
        }
    }

    /// All checks on the linked backend with this name.
    ///
    /// # Errors
    /// As [`inference::backend()`].
    pub fn registered(name: &str, path: impl Into<PathBuf>) -> inference::Result<Self> {
        Ok(Self::new(inference::backend(name)?, path))
    }

    /// Loads the model with these options.
    #[must_use]
    pub fn with_load_options(mut self, options: LoadOptions) -> Self {
        self.load = options;
        self
    }

    /// Uses these prompts instead of English phrases. The model should reply to them with some
    /// text. If there are fewer than two different prompts, built-in ones are added.
    #[must_use]
    pub fn with_prompts<S: Into<String>>(mut self, prompts: impl IntoIterator<Item = S>) -> Self {
        self.prompts = Vec::new();
        let builtin = PROMPTS.map(String::from);
        for prompt in prompts.into_iter().map(Into::into) {
            if !self.prompts.contains(&prompt) {
                self.prompts.push(prompt);
            }
        }
        for prompt in builtin {
            if self.prompts.len() < 2 && !self.prompts.contains(&prompt) {
                self.prompts.push(prompt);
            }
        }
        self
    }

    /// Sets the time limit of a check; the default is 120 seconds.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Makes a check required, whatever the backend's capabilities.
    #[must_use]
    pub fn require(mut self, check: Check) -> Self {
        self.required.insert(check);
        self
    }

    /// Skips a check; the report contains the reason. The skip fails the report only if
    /// [`Suite::require`] also names the check.
    #[must_use]
    pub fn skip(mut self, check: Check, reason: impl Into<String>) -> Self {
        self.skipped.insert(check, reason.into());
        self
    }

    /// Runs only these checks; the report does not contain the others.
    #[must_use]
    pub fn only(mut self, checks: impl IntoIterator<Item = Check>) -> Self {
        self.only = Some(checks.into_iter().collect());
        self
    }

    /// Runs the checks, one after another.
    #[must_use]
    pub fn run(self) -> Report {
        let asked = watched(self.timeout, {
            let backend = Arc::clone(&self.backend);
            move || (backend.name().to_owned(), backend.capabilities())
        });
        let (backend, capabilities, silent) = match asked {
            Ok((name, capabilities)) => (name, capabilities, None),
            Err(reason) => (String::from("?"), Capabilities::new(), Some(reason)),
        };
        let context = Arc::new(Context::new(
            self.backend,
            capabilities,
            self.path.clone(),
            self.load,
            self.prompts,
            self.timeout,
        ));
        let mut checks = Vec::new();
        for &check in Check::ALL {
            if self
                .only
                .as_ref()
                .is_some_and(|only| !only.contains(&check))
            {
                continue;
            }
            let asked_for = self.required.contains(&check);
            let left_out = self.skipped.get(&check);
            let required = asked_for || (left_out.is_none() && check.is_required(&capabilities));
            let started = Instant::now();
            let outcome = match (&silent, left_out, check.definition().need) {
                (Some(reason), ..) => {
                    Outcome::Failed(format!("asked for name and capabilities, {reason}"))
                }
                (None, Some(reason), _) => Outcome::Skipped(format!("left out: {reason}")),
                (None, None, Need::Declared(name, declared))
                    if !declared(&capabilities) && !asked_for =>
                {
                    Outcome::Skipped(format!("the backend does not declare `{name}`"))
                }
                (None, None, Need::OnRequest) if !asked_for => {
                    Outcome::Skipped(String::from("not part of the contract; runs when required"))
                }
                _ => run(check, &context),
            };
            checks.push(CheckResult {
                check,
                description: check.description().to_owned(),
                required,
                outcome,
                seconds: started.elapsed().as_secs_f64(),
            });
        }
        context.forget_model();
        Report {
            backend,
            model: self.path,
            capabilities,
            checks,
        }
    }
}

/// Runs one check with a time limit.
fn run(check: Check, context: &Arc<Context>) -> Outcome {
    let inside = Arc::clone(context);
    let verdict: Result<Verdict, String> =
        watched(context.timeout, move || (check.definition().run)(&inside));
    match verdict {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(Stop::Failed(reason))) => Outcome::Failed(reason),
        Ok(Err(Stop::Skipped(reason))) => Outcome::Skipped(reason),
        Err(reason) => {
            context.forget_model();
            Outcome::Failed(reason)
        }
    }
}

/// Runs `f` in a separate thread. A panic, or no result within `timeout`, is an error. A thread
/// that hangs continues, because it cannot be stopped.
fn watched<T: Send + 'static>(
    timeout: Duration,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let spawned = std::thread::Builder::new()
        .name(String::from("conformance"))
        .spawn(move || {
            // Unwind safe, because unfinished state is dropped together with the model.
            let done = catch_unwind(AssertUnwindSafe(f));
            let _ = sender.send(done);
        });
    if let Err(e) = spawned {
        return Err(format!("no thread could be started: {e}"));
    }
    match receiver.recv_timeout(timeout) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(panic)) => Err(match panic_text(panic.as_ref()) {
            Some(message) => format!("the backend panicked: {message}"),
            None => String::from("the backend panicked"),
        }),
        Err(RecvTimeoutError::Timeout) => Err(format!(
            "the backend did not end within {} seconds",
            timeout.as_secs_f64()
        )),
        Err(RecvTimeoutError::Disconnected) => Err(String::from("the thread ended silently")),
    }
}
