//! Checks of batch sessions: requests are added, finish, fail, and are cancelled.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use inference::{
    BatchEvent, BatchSession, CancelToken, Error, ErrorKind, FinishReason, GenerateOptions,
    LogitsProcessorFactory, Prompt, RequestId, TextModel,
};

use super::errors::{bad_options, interrupted};
use crate::context::{Context, Stop, Verdict, ensure, fail};
use crate::probe::{LONG, N, Reply, greedy, refused, reply, same, usable};

/// More steps than any check's session needs.
const MANY: usize = 1_000_000;

/// The result of one request.
#[derive(Default)]
struct Row {
    ids: Vec<u32>,
    texts: Vec<String>,
    finish: Option<FinishReason>,
    error: Option<Error>,
}

impl Row {
    fn is_over(&self) -> bool {
        self.finish.is_some() || self.error.is_some()
    }

    fn reply(&self) -> Result<Reply, Stop> {
        if let Some(e) = &self.error {
            return fail(format!("a good request of a session failed: {e}"));
        }
        Ok(Reply {
            ids: self.ids.clone(),
            texts: self.texts.clone(),
            finish: self.finish,
        })
    }
}

/// A session and the results of its requests.
pub(super) struct Driver {
    session: Box<dyn BatchSession>,
    rows: BTreeMap<RequestId, Row>,
}

impl Driver {
    fn new(context: &Context) -> Result<Self, Stop> {
        Self::of(context.model()?.as_ref())
    }

    pub(super) fn of(model: &dyn TextModel) -> Result<Self, Stop> {
        let session = match model.batch_session() {
            Ok(session) => session,
            Err(e) => return fail(format!("batch_session: {e}")),
        };
        ensure!(
            session.is_empty(),
            "a new session has {} requests",
            session.len()
        );
        Ok(Self {
            session,
            rows: BTreeMap::new(),
        })
    }

    pub(super) fn add(
        &mut self,
        prompt: &Prompt,
        options: &GenerateOptions,
    ) -> Result<RequestId, Stop> {
        match self.try_add(prompt, options) {
            Ok(row) => row,
            Err(e) => fail(format!("a good request was refused: {e}")),
        }
    }

    pub(super) fn try_add(
        &mut self,
        prompt: &Prompt,
        options: &GenerateOptions,
    ) -> inference::Result<Result<RequestId, Stop>> {
        let before = self.session.len();
        let row = self.session.add(prompt, options)?;
        let after = self.session.len();
        if after != before + 1 {
            let what = format!("adding to {before} requests gave {after}");
            return Ok(fail(what));
        }
        if self.rows.insert(row, Row::default()).is_some() {
            return Ok(fail(format!("two requests have the number {row:?}")));
        }
        Ok(Ok(row))
    }

    /// The reply to a request that has ended.
    pub(super) fn reply(&self, row: RequestId) -> Result<Reply, Stop> {
        self.row(row)?.reply()
    }

    fn row(&self, row: RequestId) -> Result<&Row, Stop> {
        match self.rows.get(&row) {
            Some(row) => Ok(row),
            None => fail(format!("the request {row:?} is gone")),
        }
    }

    /// Runs one step and records its results.
    fn step(&mut self) -> Result<(), Stop> {
        let events: VecDeque<BatchEvent> = match self.session.step() {
            Ok(events) => events,
            Err(e) => return fail(format!("a step failed: {e}")),
        };
        for event in events {
            let number = event.row();
            let Some(row) = self.rows.get_mut(&number) else {
                return fail(format!(
                    "an event of {number:?}, which is not in the session"
                ));
            };
            ensure!(
                !row.is_over(),
                "an event of {number:?}, which ended before: {event:?}"
            );
            match event {
                BatchEvent::Token { token, .. } => {
                    row.ids.push(token.id);
                    row.texts.push(token.text);
                }
                BatchEvent::Done {
                    reason, metrics, ..
                } => {
                    ensure!(
                        metrics.prompt_tokens > 0 && metrics.generated_tokens == row.ids.len(),
                        "the figures of a reply of {} tokens say {} of {} prompt tokens",
                        row.ids.len(),
                        metrics.generated_tokens,
                        metrics.prompt_tokens
                    );
                    row.finish = Some(reason);
                }
                BatchEvent::Failed { error, .. } => row.error = Some(error),
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn finish(&mut self) -> Verdict {
        for _ in 0..MANY {
            if self.session.is_empty() {
                let open = self.rows.values().filter(|row| !row.is_over()).count();
                ensure!(open == 0, "{open} requests left the session without an end");
                let idle = self.session.step();
                ensure!(
                    matches!(&idle, Ok(events) if events.is_empty()),
                    "a step without requests gave {idle:?}"
                );
                return Ok(());
            }
            self.step()?;
        }
        fail(format!("the session did not end within {MANY} steps"))
    }
}

pub(crate) fn replies(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompts = context.all_prompts();
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(reply(model.as_ref(), prompt, &greedy(N))?);
    }
    let mut driver = Driver::new(context)?;
    // The requests are added one after another while earlier ones run. The first prompt is added
    // twice.
    let mut rows = Vec::new();
    for (i, prompt) in prompts.iter().chain([&prompts[0]]).enumerate() {
        rows.push((i % prompts.len(), driver.add(prompt, &greedy(N))?));
        driver.step()?;
        driver.step()?;
    }
    let none = driver.add(&prompts[0], &greedy(0))?;
    driver.finish()?;
    for (i, row) in rows {
        let got = driver.row(row)?.reply()?;
        same(&format!("reply {i} of a session"), &got, &alone[i])?;
    }
    let got = driver.row(none)?.reply()?;
    ensure!(
        got.ids.is_empty() && got.finish == Some(FinishReason::Length),
        "max_tokens 0 gave {:?} and ended with {:?}",
        got.ids,
        got.finish
    );
    Ok(())
}

pub(crate) fn removed(context: &Context) -> Verdict {
    let model = context.model()?;
    let prompts = context.all_prompts();
    let (first, second) = (&prompts[0], &prompts[1]);
    let before = reply(model.as_ref(), first, &greedy(N))?;
    let other = reply(model.as_ref(), second, &greedy(N))?;
    let mut driver = Driver::new(context)?;
    // One request has not started, one is cancelled while running, and one continues.
    let new = driver.add(first, &greedy(LONG))?;
    ensure!(
        driver.session.remove(new),
        "a new request could not be removed"
    );
    let long = driver.add(first, &greedy(LONG))?;
    let stays = driver.add(second, &greedy(N))?;
    for _ in 0..3 {
        driver.step()?;
    }
    ensure!(
        driver.session.remove(long) && driver.session.len() == 1,
        "after a request was removed, of two, there are {}",
        driver.session.len()
    );
    for gone in [new, long, RequestId::new(u64::MAX)] {
        ensure!(
            !driver.session.remove(gone),
            "{gone:?} was removed, though it is not there"
        );
        driver.rows.remove(&gone);
    }
    let again = driver.add(first, &greedy(N))?;
    driver.finish()?;
    let stayed = driver.row(stays)?.reply()?;
    same("the reply beside one that was removed", &stayed, &other)?;
    let repeated = driver.row(again)?.reply()?;
    same("the reply after one that was removed", &repeated, &before)?;
    usable(model.as_ref(), first, &before)
}

pub(crate) fn errors(context: &Context) -> Verdict {
    let model = context.model()?;
    let good = context.prompt();
    let before = reply(model.as_ref(), &good, &greedy(N))?;
    let mut driver = Driver::new(context)?;
    let row = driver.add(&good, &greedy(N))?;
    driver.step()?;
    let mut refusals = Vec::new();
    for (what, options) in bad_options() {
        let added = driver.session.add(&good, &options);
        refused(
            &format!("a session's request with {what}"),
            added,
            &[ErrorKind::InvalidOption],
        )?;
        refusals.push(what);
    }
    let empty = driver.session.add(&Prompt::Tokens(Vec::new()), &greedy(N));
    refused(
        "a session's request without tokens",
        empty,
        &[ErrorKind::InvalidOption, ErrorKind::Unsupported],
    )?;
    ensure!(
        driver.session.len() == 1,
        "after {} refusals there are {} requests, expected 1",
        refusals.len() + 1,
        driver.session.len()
    );
    // A request that fails while running must not affect the others.
    let failing = LogitsProcessorFactory::new(|| {
        |_: &[u32], reply: &[u32], _: &mut [f32]| match reply.len() {
            3 => Err(Error::new(ErrorKind::Engine, "the processor had enough")),
            _ => Ok(()),
        }
    });
    let options = greedy(N).with_logits_processors([failing]);
    let fails = match driver.try_add(&good, &options) {
        Ok(added) => Some(added?),
        Err(e) if e.kind() == ErrorKind::Unsupported => None,
        Err(e) => return fail(format!("a request with a processor was refused: {e}")),
    };
    driver.finish()?;
    if let Some(fails) = fails {
        let error = &driver.row(fails)?.error;
        ensure!(
            error.as_ref().is_some_and(
                |e| e.kind() == ErrorKind::Engine && e.message().contains("had enough")
            ),
            "a request whose processor fails ended with {error:?}"
        );
    }
    let got = driver.row(row)?.reply()?;
    same("the reply beside one that failed", &got, &before)?;
    usable(model.as_ref(), &good, &before)
}

pub(crate) fn stopped(context: &Context) -> Verdict {
    let model = context.model()?;
    let good = context.prompt();
    let before = reply(model.as_ref(), &good, &greedy(N))?;
    let mut driver = Driver::new(context)?;
    let mut ended = Vec::new();
    for (what, kind, options) in interrupted(LONG) {
        match driver.try_add(&good, &options) {
            Ok(row) => ended.push((what, kind, row?)),
            Err(e) => {
                refused::<()>(&format!("a request that is {what}"), Err(e), &[kind])?;
            }
        }
    }
    let cancel = CancelToken::new();
    let cancelled = driver.add(&good, &greedy(LONG).with_cancel(cancel.clone()))?;
    let deadline = Instant::now() + Duration::from_millis(300);
    let late = driver.add(&good, &greedy(LONG).with_deadline(deadline))?;
    let stays = driver.add(&good, &greedy(N))?;
    driver.step()?;
    driver.step()?;
    cancel.cancel();
    // The cancelled request must end soon. Otherwise the check's time limit ends the check.
    driver.finish()?;
    ended.push(("cancelled as it runs", ErrorKind::Cancelled, cancelled));
    ended.push(("out of time", ErrorKind::DeadlineExceeded, late));
    for (what, kind, row) in ended {
        let row = driver.row(row)?;
        let error = row.error.as_ref().map(Error::kind);
        ensure!(
            error == Some(kind),
            "a request that is {what} has {} tokens, ended with {:?} and the error {error:?}, \
             expected one of kind {kind}",
            row.ids.len(),
            row.finish
        );
    }
    let got = driver.row(stays)?.reply()?;
    same("the reply beside some that were stopped", &got, &before)?;
    usable(model.as_ref(), &good, &before)
}
