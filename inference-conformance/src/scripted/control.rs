//! The state of a scripted model that a test can read, and a switch to pause the model.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use inference::{Error, ErrorKind, GenerateMetrics, GenerateOptions, Message, Result};
use parking_lot::Mutex;

/// Number of requests that a model remembers. The limit bounds the memory of long runs.
const REMEMBERED: usize = 64;

/// The prompt of a request, as the caller gave it. If the model computed the ids from a text or a
/// conversation, it is this text or conversation.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Arc<[u32]>),
    /// A conversation.
    Chat(Vec<Message>),
}

/// Prints as `text hi`, `tokens [7, 8]` or `chat system:Be brief.|user:hi`.
impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "text {text}"),
            Self::Tokens(ids) => write!(f, "tokens {ids:?}"),
            Self::Chat(messages) => {
                let said = messages.iter().map(|m| format!("{}:{}", m.role, m.content));
                write!(f, "chat {}", said.collect::<Vec<_>>().join("|"))
            }
        }
    }
}

/// A request, as input of a script.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The prompt as the caller gave it.
    pub input: Input,
    /// The ids of the prompt.
    pub ids: Arc<[u32]>,
    /// The text of the ids. Special tokens have their names.
    pub text: String,
    /// The options.
    pub options: GenerateOptions,
}

/// The state of a model. All its requests and sessions share it.
#[derive(Default)]
pub struct Control {
    running: AtomicUsize,
    peak: AtomicUsize,
    started: AtomicUsize,
    sessions: AtomicUsize,
    closed: AtomicBool,
    paused: AtomicBool,
    asked: Mutex<VecDeque<Asked>>,
    /// The latest ids that the model computed, each with its input.
    prepared: Mutex<VecDeque<(Vec<u32>, Input)>>,
    metrics: Mutex<GenerateMetrics>,
    adapters: Mutex<BTreeSet<String>>,
}

impl Control {
    /// The number of running requests.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Maximum number of concurrent requests so far.
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::SeqCst)
    }

    /// The number of requests that were not refused.
    pub fn started(&self) -> usize {
        self.started.load(Ordering::SeqCst)
    }

    /// The number of sessions that were opened.
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::SeqCst)
    }

    /// Whether the model was closed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// The names of the adapters that requests can name.
    pub fn adapters(&self) -> Vec<String> {
        self.adapters.lock().iter().cloned().collect()
    }

    /// Adds an adapter. Returns whether its name was free.
    pub(super) fn add_adapter(&self, name: &str) -> bool {
        self.adapters.lock().insert(name.to_owned())
    }

    /// Removes an adapter. Returns whether there was one of this name.
    pub(super) fn drop_adapter(&self, name: &str) -> bool {
        self.adapters.lock().remove(name)
    }

    /// Pauses all steps until [`Control::release`] is called.
    pub fn hold(&self) {
        self.paused.store(true, Ordering::SeqCst);
    }

    /// Ends the pause of [`Control::hold`].
    pub fn release(&self) {
        self.paused.store(false, Ordering::SeqCst);
    }

    /// The latest requests that were not refused, oldest first, at most 64.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().iter().cloned().collect()
    }

    /// The latest request that was not refused.
    pub fn last(&self) -> Option<Asked> {
        self.asked.lock().back().cloned()
    }

    pub(super) fn wait(&self) {
        while self.paused.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match self.is_closed() {
            true => Err(Error::new(
                ErrorKind::Closed,
                "the model was closed; load it again",
            )),
            false => Ok(()),
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(super) fn session(&self) {
        self.sessions.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn ask(&self, asked: Asked) {
        self.started.fetch_add(1, Ordering::SeqCst);
        let mut list = self.asked.lock();
        if list.len() == REMEMBERED {
            list.pop_front();
        }
        list.push_back(asked);
    }

    /// Records that `ids` were computed from `input`.
    pub(super) fn prepare(&self, ids: &[u32], input: Input) {
        let mut list = self.prepared.lock();
        if list.len() == REMEMBERED {
            list.pop_front();
        }
        list.push_back((ids.to_vec(), input));
    }

    /// The latest input from which the model computed `ids`.
    pub(super) fn made_of(&self, ids: &[u32]) -> Option<Input> {
        let list = self.prepared.lock();
        let made = list.iter().rev().find(|(made, _)| made == ids);
        made.map(|(_, input)| input.clone())
    }

    pub(super) fn begin(&self) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(running, Ordering::SeqCst);
    }

    pub(super) fn end(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn publish(&self, metrics: GenerateMetrics) {
        *self.metrics.lock() = metrics;
    }

    pub(super) fn metrics(&self) -> GenerateMetrics {
        self.metrics.lock().clone()
    }
}
