//! The scheduler. Any thread may submit requests; one thread runs them in the models' batch
//! sessions.
//!
//! Each request has a place in the queue from its arrival to its end. So the number of waiting and
//! running requests is bounded before any tokenization. `scheduler.rs` implements the engine's
//! thread. `ahead.rs` implements a second thread for slow work before a request starts.

mod ahead;
mod scheduler;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc as std_mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use inference::{
    CancelToken, EmbedOptions, Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions,
    Interrupt, Prepared, Ranking, RerankOptions, Result, StopCause, Token,
};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::metrics::Metrics;
use crate::models::{Lease, Unload};

/// An event of a request.
#[derive(Debug)]
pub(crate) enum Event {
    /// The request left the queue and runs.
    Started {
        /// Time that the request spent in the queue.
        queued: Duration,
    },
    Token(Box<Token>),
    Done {
        reason: FinishReason,
        stop: Option<StopCause>,
        metrics: Box<GenerateMetrics>,
    },
    Failed(Error),
}

/// Memory reserved for a request's body and its parsed values. The reservation ends when the last
/// clone is dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct BodyMemory(
    #[allow(dead_code, reason = "held alone")] Option<Arc<OwnedSemaphorePermit>>,
);

/// Reserved places in the queue. Dropping the value releases them.
#[derive(Debug)]
pub(crate) struct Places {
    permit: OwnedSemaphorePermit,
    body: BodyMemory,
}

impl Places {
    /// Removes one place from the reserved ones and returns it, for one of several requests.
    pub(crate) fn one(&mut self) -> Option<Places> {
        let body = self.body();
        self.permit.split(1).map(|permit| Places { permit, body })
    }

    /// Attaches the memory reservation of the request's body. Both are released together.
    pub(crate) fn holding(mut self, body: Option<OwnedSemaphorePermit>) -> Places {
        self.body = BodyMemory(body.map(Arc::new));
        self
    }

    /// The reservation of memory for the request's body.
    pub(crate) fn body(&self) -> BodyMemory {
        self.body.clone()
    }

    /// The number of reserved places.
    pub(crate) fn len(&self) -> usize {
        self.permit.num_permits()
    }

    pub(crate) fn add(&mut self, more: Places) {
        self.permit.merge(more.permit);
    }
}

/// The reason why no place in the queue is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    Full,
    Stopping,
}

/// A request to generate.
pub(crate) struct Job {
    /// The model. The lease keeps it loaded until the request ends.
    pub(crate) model: Lease,
    pub(crate) prompt: Vec<u32>,
    /// Maximum size of the request's KV cache in bytes.
    pub(crate) kv_bytes: u64,
    pub(crate) options: GenerateOptions,
    /// Arrival time of the request.
    pub(crate) arrived: Instant,
    pub(crate) place: Arc<Places>,
}

/// A request after its preparation, with the data that the model prepared.
struct Ready {
    job: Box<Job>,
    prepared: Prepared,
}

impl From<Job> for Ready {
    fn from(job: Job) -> Self {
        Self {
            job: Box::new(job),
            prepared: Prepared::default(),
        }
    }
}

/// A request for embeddings.
pub(crate) struct EmbedJob {
    pub(crate) model: Lease,
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) options: EmbedOptions,
    pub(crate) interrupt: Interrupt,
    pub(crate) _place: Places,
}

/// A request for the scores of documents.
pub(crate) struct RerankJob {
    pub(crate) model: Lease,
    pub(crate) query: String,
    pub(crate) documents: Vec<String>,
    pub(crate) options: RerankOptions,
    pub(crate) interrupt: Interrupt,
    pub(crate) _place: Places,
}

/// A request for the logits after a prompt, to a model with a feed-forward plan.
pub(crate) struct LogitsJob {
    pub(crate) model: Lease,
    pub(crate) prompt: Vec<u32>,
    /// Whether to ignore the plan and compute the model as trained.
    pub(crate) dense: bool,
    pub(crate) interrupt: Interrupt,
    pub(crate) _place: Places,
}

enum Command {
    Generate(Ready, mpsc::Sender<Event>),
    Embed(Box<EmbedJob>, oneshot::Sender<Result<Vec<Vec<f32>>>>),
    Rerank(Box<RerankJob>, oneshot::Sender<Result<Ranking>>),
    Logits(Box<LogitsJob>, oneshot::Sender<Result<Vec<f32>>>),
    /// Drops the session of a model without requests.
    Unload(u64, oneshot::Sender<()>),
    Stop,
}

/// A running request. Dropping it cancels the request.
#[derive(Debug)]
pub(crate) struct Running {
    events: mpsc::Receiver<Event>,
    cancel: CancelToken,
}

impl Running {
    /// Waits for the next event. Returns `None` after the last event, or if the reader was too slow
    /// and lost events.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// The state of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Good,
    /// The current step exceeds the stall limit.
    Stalled,
    /// Several steps in a row failed.
    Failing,
    /// The engine's thread has ended.
    Dead,
}

/// State that the engine's thread shares with its callers.
struct Shared {
    metrics: Arc<Metrics>,
    /// Start of the current step in milliseconds after `born`, plus one; 0 while idle.
    busy_since: AtomicU64,
    born: Instant,
    alive: AtomicBool,
    /// Number of consecutive failed steps.
    failures: AtomicUsize,
    draining: AtomicBool,
    cancel_all: AtomicBool,
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }
}

/// After this number of consecutive failed steps, the engine counts as broken.
const FAILURES: usize = 3;

/// The callers' handle of the scheduler.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    commands: std_mpsc::Sender<Command>,
    /// Sends requests that need preparation to the thread of `ahead.rs`.
    ahead: std_mpsc::Sender<ahead::Waiting>,
    places: Arc<Semaphore>,
    capacity: usize,
    stall: Duration,
    buffered: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

pub(crate) struct EngineOptions {
    pub(crate) parallel: usize,
    pub(crate) max_queue: usize,
    pub(crate) kv_budget: Option<u64>,
    /// Maximum number of events that a slow reader may leave unread.
    pub(crate) buffered: usize,
    pub(crate) stall: Duration,
}

impl Engine {
    /// Starts the scheduler's thread.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub(crate) fn start(options: &EngineOptions, metrics: Arc<Metrics>) -> Result<Self> {
        let (commands, receiver) = std_mpsc::channel();
        let shared = Arc::new(Shared {
            metrics,
            busy_since: AtomicU64::new(0),
            born: Instant::now(),
            alive: AtomicBool::new(true),
            failures: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            cancel_all: AtomicBool::new(false),
        });
        let scheduler = scheduler::Scheduler::new(options, receiver, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name(String::from("engine"))
            .spawn(move || scheduler.run())
            .map_err(|e| {
                Error::new(ErrorKind::Engine, "no thread for the engine").with_source(e)
            })?;
        let ahead = ahead::start(commands.clone(), Arc::clone(&shared))?;
        let capacity = options.parallel + options.max_queue;
        Ok(Self {
            shared,
            commands,
            ahead,
            places: Arc::new(Semaphore::new(capacity)),
            capacity,
            stall: options.stall,
            buffered: options.buffered.max(4),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Reserves `n` places, or returns why that is impossible.
    pub(crate) fn reserve(&self, n: usize) -> std::result::Result<Places, Refused> {
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(Refused::Stopping);
        }
        let n = u32::try_from(n).unwrap_or(u32::MAX);
        match Arc::clone(&self.places).try_acquire_many_owned(n) {
            Ok(permit) => Ok(Places {
                permit,
                body: BodyMemory::default(),
            }),
            Err(_) => {
                self.shared.metrics.refused.inc();
                Err(Refused::Full)
            }
        }
    }

    /// The number of places that requests hold.
    pub(crate) fn in_flight(&self) -> usize {
        self.capacity - self.places.available_permits().min(self.capacity)
    }

    /// The maximum number of requests that can hold a place.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Queues a request. The engine replaces its cancel token.
    pub(crate) fn submit(&self, mut job: Job) -> Running {
        let cancel = CancelToken::new();
        job.options.interrupt.cancel = Some(cancel.clone());
        let (sender, events) = mpsc::channel(self.buffered);
        // If the thread has ended, the sender is dropped and the reader sees the end of events.
        if job.options.constraints.grammar.is_some() {
            let _ = self.ahead.send((Box::new(job), sender));
        } else {
            let job = Ready::from(job);
            let _ = self.commands.send(Command::Generate(job, sender));
        }
        Running { events, cancel }
    }

    /// Queues a request for embeddings. Dropping the receiver cancels it.
    pub(crate) fn embed(&self, job: EmbedJob) -> oneshot::Receiver<Result<Vec<Vec<f32>>>> {
        let (sender, receiver) = oneshot::channel();
        let _ = self.commands.send(Command::Embed(Box::new(job), sender));
        receiver
    }

    /// Queues a request for scores. Dropping the receiver cancels it.
    pub(crate) fn rerank(&self, job: RerankJob) -> oneshot::Receiver<Result<Ranking>> {
        let (sender, receiver) = oneshot::channel();
        let _ = self.commands.send(Command::Rerank(Box::new(job), sender));
        receiver
    }

    /// Queues a request for logits. Dropping the receiver cancels it.
    pub(crate) fn logits(&self, job: LogitsJob) -> oneshot::Receiver<Result<Vec<f32>>> {
        let (sender, receiver) = oneshot::channel();
        let _ = self.commands.send(Command::Logits(Box::new(job), sender));
        receiver
    }

    /// The state of the engine.
    pub(crate) fn health(&self) -> Health {
        let shared = &self.shared;
        if !shared.alive.load(Ordering::Acquire) {
            return Health::Dead;
        }
        let since = shared.busy_since.load(Ordering::Acquire);
        let busy = match since {
            0 => Duration::ZERO,
            since => Duration::from_millis(shared.now().saturating_sub(since)),
        };
        if busy > self.stall {
            Health::Stalled
        } else if shared.failures.load(Ordering::Acquire) >= FAILURES {
            Health::Failing
        } else {
            Health::Good
        }
    }

    /// Whether the server is stopping and therefore refuses new requests.
    pub(crate) fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Acquire)
    }

    /// Refuses new requests from now on.
    pub(crate) fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Ends all requests, including those that wait.
    pub(crate) fn cancel_all(&self) {
        self.drain();
        self.shared.cancel_all.store(true, Ordering::Release);
    }

    /// Stops the thread after its current step. Waits at most `wait` for its end.
    pub(crate) fn stop(&self, wait: Duration) {
        self.cancel_all();
        let _ = self.commands.send(Command::Stop);
        let thread = self.thread.lock().take();
        let until = Instant::now() + wait;
        if let Some(thread) = thread {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            if thread.is_finished() {
                // The thread catches and logs its own panics, so a join error adds nothing.
                let _ = thread.join();
            } else {
                tracing::warn!("the engine's step did not end in time; it is left behind");
            }
        }
    }
}

impl Unload for Engine {
    fn unload(&self, model: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            let _ = self.commands.send(Command::Unload(model, sender));
            // If the thread has ended, this returns an error, and no session remains.
            let _ = receiver.await;
        })
    }
}
