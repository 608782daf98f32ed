//! The engine's thread. It receives requests, steps the sessions and sends events.
//!
//! Backends are foreign code, so each call into a model catches panics. If a step fails or panics,
//! its session is dropped and its requests get the error. The next request starts a new session.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use inference::kit::panic_text;
use inference::{
    BatchEvent, BatchSession, Error, ErrorKind, FinishReason, Prompt, Ranking, RequestId, Result,
    TextModel,
};
use tokio::sync::{mpsc, oneshot};

use crate::models::Lease;

use super::{
    Command, EmbedJob, EngineOptions, Event, Job, LogitsJob, Places, Ready, RerankJob, Shared,
};

/// A model and its requests.
struct Slot {
    model: Arc<dyn TextModel>,
    session: Option<Box<dyn BatchSession>>,
    rows: HashMap<RequestId, Row>,
}

/// A running request.
struct Row {
    out: mpsc::Sender<Event>,
    arrived: Instant,
    _place: Arc<Places>,
    _model: Lease,
    kv_bytes: u64,
}

/// A request for embeddings, with the vectors computed so far.
struct Embedding {
    job: EmbedJob,
    done: Vec<Vec<f32>>,
    out: oneshot::Sender<Result<Vec<Vec<f32>>>>,
}

/// A request for scores, with the scores computed so far.
struct Reranking {
    job: RerankJob,
    done: Ranking,
    out: oneshot::Sender<Result<Ranking>>,
}

/// Maximum number of tokens that one turn embeds. A longer text gets a turn of its own.
const TURN_TOKENS: usize = 1024;

/// Maximum number of documents that one turn scores.
const TURN_DOCUMENTS: usize = 8;

pub(super) struct Scheduler {
    /// The slots, by the key of the model's lease.
    slots: BTreeMap<u64, Slot>,
    parallel: usize,
    kv_budget: Option<u64>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    queue: VecDeque<(Ready, mpsc::Sender<Event>)>,
    embeddings: VecDeque<Embedding>,
    rerankings: VecDeque<Reranking>,
    logits: VecDeque<(LogitsJob, oneshot::Sender<Result<Vec<f32>>>)>,
    stopped: bool,
}

/// On drop, records that the thread has ended, whatever the cause.
struct Alive(Arc<Shared>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

/// Runs code of a model, and converts a panic to an error.
pub(super) fn shielded<T>(doing: &str, run: impl FnOnce() -> T) -> Result<T> {
    // This is unwind safe, because callers drop all state that a panic may leave inconsistent.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let said = panic_text(panic.as_ref()).unwrap_or("without a message");
        tracing::error!("the engine panicked in {doing}: {said}");
        Error::new(ErrorKind::Engine, format!("the engine panicked in {doing}"))
    })
}

/// Like [`shielded`]. While `run` executes, the engine counts as busy.
fn work<T>(shared: &Shared, doing: &str, run: impl FnOnce() -> T) -> Result<T> {
    let started = Instant::now();
    shared.busy_since.store(shared.now(), Ordering::Release);
    let done = shielded(doing, run);
    shared.busy_since.store(0, Ordering::Release);
    shared.metrics.worked(started.elapsed());
    done
}

impl Scheduler {
    pub(super) fn new(
        options: &EngineOptions,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            slots: BTreeMap::new(),
            parallel: options.parallel,
            kv_budget: options.kv_budget,
            commands,
            shared,
            queue: VecDeque::new(),
            embeddings: VecDeque::new(),
            rerankings: VecDeque::new(),
            logits: VecDeque::new(),
            stopped: false,
        }
    }

    /// Runs until a command stops it, or until all senders of commands are dropped.
    pub(super) fn run(mut self) {
        let _alive = Alive(Arc::clone(&self.shared));
        while !self.stopped {
            let pass = catch_unwind(AssertUnwindSafe(|| self.pass()));
            if pass.is_err() {
                // A panic here is a bug of the scheduler. It must not leave requests without an
                // answer.
                tracing::error!("the scheduler panicked; its requests are lost");
                self.fail_all(&Error::new(ErrorKind::Engine, "the scheduler failed"));
            }
        }
        self.fail_all(&Error::new(ErrorKind::Cancelled, "the server stops"));
        self.slots.values_mut().for_each(drop_session);
    }

    /// One turn of the scheduler. It accepts new requests, steps each session, computes some
    /// embeddings and scores, and computes the logits after one prompt.
    fn pass(&mut self) {
        self.receive();
        if self.shared.cancel_all.load(Ordering::Acquire) {
            self.fail_all(&Error::new(ErrorKind::Cancelled, "the server stops"));
        }
        self.sweep();
        self.admit();
        let keys: Vec<u64> = self.slots.keys().copied().collect();
        for key in keys {
            self.step(key);
        }
        self.embed();
        self.rerank();
        self.logits();
        self.gauge();
    }

    fn gauge(&self) {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let metrics = &self.shared.metrics;
        metrics.running.set(count(self.running()));
        let kv_bytes = i64::try_from(self.kv_bytes()).unwrap_or(i64::MAX);
        metrics.kv_reserved.set(kv_bytes);
        metrics.queued.set(count(self.waiting()));
    }

    /// Number of requests that wait to start.
    fn waiting(&self) -> usize {
        let vectors = self.embeddings.len() + self.rerankings.len();
        self.queue.len() + vectors + self.logits.len()
    }

    fn running(&self) -> usize {
        self.slots.values().map(|slot| slot.rows.len()).sum()
    }

    /// Sum of the maximum KV cache sizes of running requests, in bytes.
    fn kv_bytes(&self) -> u64 {
        let rows = self.slots.values().flat_map(|slot| slot.rows.values());
        rows.map(|row| row.kv_bytes).sum()
    }

    /// Whether a request fits into the KV budget beside the running ones. Also true for a request
    /// above the whole budget, because a later check refuses it.
    fn fits(&self, kv_bytes: u64) -> bool {
        self.kv_budget
            .is_none_or(|most| kv_bytes > most || self.kv_bytes() + kv_bytes <= most)
    }

    fn is_idle(&self) -> bool {
        self.waiting() + self.running() == 0
    }

    fn receive(&mut self) {
        if self.is_idle() {
            self.gauge();
            match self.commands.recv() {
                Ok(command) => self.take(command),
                Err(_) => self.stopped = true,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.stopped = true;
                    return;
                }
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Generate(job, out) => self.queue.push_back((job, out)),
            Command::Embed(job, out) => self.embeddings.push_back(Embedding {
                job: *job,
                done: Vec::new(),
                out,
            }),
            Command::Rerank(job, out) => self.rerankings.push_back(Reranking {
                job: *job,
                done: Ranking::default(),
                out,
            }),
            Command::Logits(job, out) => self.logits.push_back((*job, out)),
            Command::Unload(key, done) => {
                if let Some(mut slot) = self.slots.remove(&key) {
                    // Each row owns a lease, and a leased model is never unloaded.
                    debug_assert!(slot.rows.is_empty(), "unloaded in use");
                    drop_session(&mut slot);
                    let _ = shielded("dropping a model", || drop(slot));
                }
                let _ = done.send(());
            }
            Command::Stop => self.stopped = true,
        }
    }

    /// Drops all requests whose client disconnected or whose deadline passed, in every stage.
    fn sweep(&mut self) {
        let metrics = &self.shared.metrics;
        self.queue.retain(|(Ready { job, .. }, out)| {
            if out.is_closed() {
                metrics.ended("cancelled", job.arrived.elapsed());
                return false;
            }
            match job.options.check_interrupt() {
                Ok(()) => true,
                Err(e) => {
                    metrics.ended(FinishReason::of_error(&e).as_str(), job.arrived.elapsed());
                    let _ = out.try_send(Event::Failed(e));
                    false
                }
            }
        });
        self.embeddings.retain(|e| !e.out.is_closed());
        self.rerankings.retain(|r| !r.out.is_closed());
        self.logits.retain(|(_, out)| !out.is_closed());
        for slot in self.slots.values_mut() {
            let gone: Vec<RequestId> = slot
                .rows
                .iter()
                .filter(|(_, row)| row.out.is_closed())
                .map(|(id, _)| *id)
                .collect();
            for id in gone {
                if let Some(row) = slot.rows.remove(&id) {
                    metrics.ended("cancelled", row.arrived.elapsed());
                }
                remove(slot, id);
            }
        }
    }

    /// Starts queued requests while fewer than `parallel` run and the KV budget allows it.
    fn admit(&mut self) {
        while self.running() < self.parallel
            && let Some((first, _)) = self.queue.front()
            && self.fits(first.job.kv_bytes)
            && let Some((Ready { job, prepared }, out)) = self.queue.pop_front()
        {
            if let Some(budget) = self.kv_budget.filter(|most| job.kv_bytes > *most) {
                let message = format!(
                    "the request may need {} bytes for keys and values, and this server has {budget}; \
                     shorten the prompt or ask for fewer tokens",
                    job.kv_bytes
                );
                let error = Error::new(ErrorKind::InvalidOption, message);
                self.shared.metrics.ended("error", job.arrived.elapsed());
                let _ = out.try_send(Event::Failed(error));
                continue;
            }
            let Job {
                kv_bytes,
                model,
                prompt,
                options,
                arrived,
                place,
            } = *job;
            let key = model.session();
            let slot = self.slots.entry(key).or_insert_with(|| Slot {
                model: Arc::clone(model.model()),
                session: None,
                rows: HashMap::new(),
            });
            let prompt = Prompt::Tokens(prompt);
            let added = work(&self.shared, "adding a request", || {
                let session = match &mut slot.session {
                    Some(session) => session,
                    None => slot.session.insert(slot.model.batch_session()?),
                };
                session.add(&prompt, &options)
            });
            drop(prepared);
            let error = match &added {
                Ok(Ok(id)) => {
                    let queued = arrived.elapsed();
                    self.shared.metrics.waited(queued);
                    let _ = out.try_send(Event::Started { queued });
                    let row = Row {
                        out,
                        arrived,
                        _place: place,
                        _model: model,
                        kv_bytes,
                    };
                    slot.rows.insert(*id, row);
                    continue;
                }
                Ok(Err(error)) | Err(error) => error.clone(),
            };
            let reason = FinishReason::of_error(&error).as_str();
            self.shared.metrics.ended(reason, arrived.elapsed());
            let _ = out.try_send(Event::Failed(error.clone()));
            if added.is_err() {
                // The model panicked, so the session's state is unknown.
                self.failed();
                self.lose(key, &error);
            }
        }
    }

    /// One step of a model's session.
    fn step(&mut self, key: u64) {
        let Some(slot) = self.slots.get_mut(&key) else {
            return;
        };
        if slot.rows.is_empty() {
            return;
        }
        let Some(session) = &mut slot.session else {
            return;
        };
        let events = work(&self.shared, "a step", || session.step());
        match events.flatten() {
            Ok(events) => {
                let mut good = true;
                for event in events {
                    good &= !matches!(
                        &event,
                        BatchEvent::Failed { error, .. } if error.kind() == ErrorKind::Engine
                    );
                    dispatch(slot, event, &self.shared);
                }
                // Without an error, a request that the session has lost would wait forever.
                let empty = slot.session.as_ref().is_none_or(|s| s.is_empty());
                let lost = empty && !slot.rows.is_empty();
                if good {
                    self.shared.failures.store(0, Ordering::Release);
                } else {
                    self.failed();
                }
                if lost {
                    self.lose(
                        key,
                        &Error::new(ErrorKind::Engine, "the engine lost the request"),
                    );
                }
            }
            Err(error) => {
                self.failed();
                self.lose(key, &error);
            }
        }
    }

    fn failed(&self) {
        self.shared.metrics.engine_failures.inc();
        self.shared.failures.fetch_add(1, Ordering::AcqRel);
    }

    /// Drops a session, and sends the error to its requests.
    fn lose(&mut self, key: u64, error: &Error) {
        let Some(slot) = self.slots.get_mut(&key) else {
            return;
        };
        for (_, row) in slot.rows.drain() {
            self.shared.metrics.ended("error", row.arrived.elapsed());
            let _ = row.out.try_send(Event::Failed(error.clone()));
        }
        drop_session(slot);
    }

    fn fail_all(&mut self, error: &Error) {
        let reason = FinishReason::of_error(error).as_str();
        let metrics = &self.shared.metrics;
        for (Ready { job, .. }, out) in self.queue.drain(..) {
            metrics.ended(reason, job.arrived.elapsed());
            let _ = out.try_send(Event::Failed(error.clone()));
        }
        for embedding in self.embeddings.drain(..) {
            let _ = embedding.out.send(Err(error.clone()));
        }
        for reranking in self.rerankings.drain(..) {
            let _ = reranking.out.send(Err(error.clone()));
        }
        for (_, out) in self.logits.drain(..) {
            let _ = out.send(Err(error.clone()));
        }
        for slot in self.slots.values_mut() {
            let rows: Vec<(RequestId, Row)> = slot.rows.drain().collect();
            for (id, row) in rows {
                metrics.ended(reason, row.arrived.elapsed());
                let _ = row.out.try_send(Event::Failed(error.clone()));
                remove(slot, id);
            }
        }
    }

    /// Computes the logits after one prompt.
    fn logits(&mut self) {
        let Some((job, out)) = self.logits.pop_front() else {
            return;
        };
        let logits = work(&self.shared, "a prediction", || {
            let model = job.model.model().as_routed().ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, "no layer of this model walks")
            })?;
            let prompt = Prompt::Tokens(job.prompt.clone());
            let routed = model.routed_logits(&prompt, job.dense, &job.interrupt)?;
            Ok(routed.logits)
        });
        let _ = out.send(logits.flatten());
    }

    /// Embeds a few texts per turn, so that replies continue between turns.
    fn embed(&mut self) {
        let Some(mut embedding) = self.embeddings.pop_front() else {
            return;
        };
        let job = &embedding.job;
        let rest = job.prompts.get(embedding.done.len()..).unwrap_or_default();
        if rest.is_empty() {
            let _ = embedding.out.send(Ok(embedding.done));
            return;
        }
        let mut tokens = 0;
        let fitting = rest.iter().take_while(|prompt| {
            tokens += prompt.len();
            tokens <= TURN_TOKENS
        });
        let now = &rest[..fitting.count().max(1)];
        let count = now.len();
        let vector = work(&self.shared, "an embedding", || {
            let model = job.model.model().as_embedding_model();
            let model = model.ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, "this model makes no embeddings")
            })?;
            let prompts: Vec<Prompt> = now.iter().cloned().map(Prompt::Tokens).collect();
            model.embed(&prompts, &job.options, &job.interrupt)
        });
        match vector.flatten() {
            Err(error) => {
                let _ = embedding.out.send(Err(error));
            }
            Ok(vectors) => {
                embedding.done.extend(vectors.into_iter().take(count));
                if embedding.done.len() == embedding.job.prompts.len() {
                    let _ = embedding.out.send(Ok(embedding.done));
                } else {
                    // The next turn serves another request first.
                    self.embeddings.push_back(embedding);
                }
            }
        }
    }
}

impl Scheduler {
    /// Scores a few documents.
    fn rerank(&mut self) {
        let Some(mut reranking) = self.rerankings.pop_front() else {
            return;
        };
        let job = &reranking.job;
        let done = reranking.done.scores.len();
        let rest = job.documents.get(done..).unwrap_or_default();
        let now = &rest[..rest.len().min(TURN_DOCUMENTS)];
        let count = now.len();
        let ranking = work(&self.shared, "a ranking", || {
            let model = job.model.model().as_rerank_model();
            let model = model.ok_or_else(|| {
                Error::new(
                    ErrorKind::Unsupported,
                    "this model does not score documents",
                )
            })?;
            model.rerank(&job.query, now, &job.options, &job.interrupt)
        });
        match ranking.flatten() {
            Err(error) => {
                let _ = reranking.out.send(Err(error));
            }
            Ok(ranking) => {
                reranking.done.tokens += ranking.tokens;
                let scores = ranking.scores.into_iter().take(count);
                reranking.done.scores.extend(scores);
                if reranking.done.scores.len() == reranking.job.documents.len() || count == 0 {
                    let _ = reranking.out.send(Ok(reranking.done));
                } else {
                    self.rerankings.push_back(reranking);
                }
            }
        }
    }
}

/// Removes a request from its session. A session that panics is dropped.
fn remove(slot: &mut Slot, id: RequestId) {
    if let Some(session) = &mut slot.session
        && shielded("removing a request", || session.remove(id)).is_err()
    {
        drop_session(slot);
    }
}

fn drop_session(slot: &mut Slot) {
    let session = slot.session.take();
    // The panic was logged, and the session is dropped in any case.
    let _ = shielded("dropping a session", || drop(session));
}

/// Sends an event to the request's reader.
fn dispatch(slot: &mut Slot, event: BatchEvent, shared: &Shared) {
    let id = event.row();
    let Some(row) = slot.rows.get(&id) else {
        return;
    };
    let (event, end) = match event {
        BatchEvent::Token { token, .. } => (Event::Token(Box::new(token)), None),
        BatchEvent::Done {
            reason,
            stop,
            metrics,
            ..
        } => {
            shared.metrics.generated(&metrics);
            let event = Event::Done {
                reason,
                stop,
                metrics,
            };
            (event, Some(reason.as_str()))
        }
        BatchEvent::Failed { error, .. } => {
            let reason = FinishReason::of_error(&error).as_str();
            (Event::Failed(error), Some(reason))
        }
        _ => return,
    };
    let behind = matches!(
        row.out.try_send(event),
        Err(mpsc::error::TrySendError::Full(_))
    );
    if let Some(reason) = end {
        shared.metrics.ended(reason, row.arrived.elapsed());
        slot.rows.remove(&id);
    } else if behind {
        // Event buffers are bounded, and a full one must not delay other requests. So the slow
        // reader's stream ends without an end event.
        shared.metrics.slow_readers.inc();
        shared.metrics.ended("slow_reader", row.arrived.elapsed());
        slot.rows.remove(&id);
        remove(slot, id);
    }
}
