//! Requests that are answered by many messages: streamed replies, and rows of logits. `session.rs`
//! has requests with a single answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use inference::kit::{Released, StopText};
use inference::{Error, ErrorKind, FinishReason, Result, Token, TokenLogprobs, TopLogprob};
use serde_json::{Value, json};

use crate::process::Process;
use crate::protocol::{Reply, Rows, floats};
use crate::request::{Core, Request};
use crate::session::{POLL, Session, Watch, lost, wrong_id};

/// While no other request waits, this number of tokens may be computed ahead of a slow caller.
const AHEAD: usize = 16;

/// A token whose text may still change: its id, its logits, and its log-probabilities.
type Drawn = (u32, Option<Vec<f32>>, Option<TokenLogprobs>);

/// How a reply ended in the bridge.
enum Over {
    /// The reply has ended, and the process is ready for the next request.
    Done(Result<FinishReason>),
    /// This side stopped the reply, but the process is still running it.
    Stopped(Result<FinishReason>),
    /// The process is unusable.
    Lost(Error),
}

/// Runs a streaming request to its end.
pub fn stream(session: &mut Session, request: &Arc<Request>, core: &Core) {
    request.begin();
    let wanted = || {
        request.check()?;
        if request.is_abandoned() {
            // The caller has dropped the stream, so nothing reads this error.
            return Err(Error::new(ErrorKind::Cancelled, "the stream was dropped"));
        }
        Ok(())
    };
    let (silence, grace) = (
        session.settings.silence_timeout,
        session.settings.cancel_grace,
    );
    let process = match wanted().and_then(|()| session.ready(&wanted)) {
        Ok(process) => process,
        Err(e) => return request.end(Err(e)),
    };
    let id = process.new_id();
    let mut message = request.message.clone();
    message["id"] = id.into();
    process.send(&message);

    let mut reader = Reader::new(request, id);
    let mut heard = Instant::now();
    let over = loop {
        if let Err(e) = wanted() {
            break Over::Stopped(Err(e));
        }
        if !core.is_wanted() && request.is_ahead(AHEAD) {
            heard = Instant::now();
            continue;
        }
        match process.receive(POLL) {
            Ok(Some(reply)) => {
                heard = Instant::now();
                if let Some(over) = reader.take(process, reply) {
                    break over;
                }
            }
            Ok(None) if heard.elapsed() > silence => {
                break Over::Lost(process.fault(&format!(
                    "the Python process said nothing for {:.1} s and was ended",
                    silence.as_secs_f64()
                )));
            }
            Ok(None) => {}
            Err(e) => break Over::Lost(e),
        }
    };
    match over {
        Over::Done(how) => request.end(how),
        Over::Lost(e) => {
            session.process = None;
            request.end(Err(lost(e)));
        }
        Over::Stopped(how) => {
            // A caller that cancelled does not wait for the bridge. A caller that gets a complete
            // reply also gets its metrics.
            let failed = how.is_err();
            if failed {
                request.end(how.clone());
            }
            process.send(&json!({"op": "cancel", "id": id}));
            match drain(process, id, grace, core) {
                Ok(done) => request.took(done.peak_memory, done.active_memory),
                // The process ends in any case, so nothing remains to be done.
                Err(e) if e.kind() == ErrorKind::Closed => {}
                Err(e) => {
                    tracing::warn!("a cancelled request did not end ({e}); Python was ended");
                    session.process = None;
                }
            }
            if !failed {
                request.end(how);
            }
        }
    }
}

/// Reads the remaining messages of a cancelled request.
fn drain(process: &mut Process, id: u64, grace: Duration, core: &Core) -> Result<Reply> {
    let since = Instant::now();
    loop {
        core.check_open()?;
        if let Some(reply) = process.receive(POLL)? {
            if reply.id != Some(id) {
                return Err(wrong_id(process, id, reply.id));
            }
            if reply.done || reply.error.is_some() {
                return Ok(reply);
            }
        } else if since.elapsed() >= grace {
            return Err(process.fault("it did not stop in time"));
        }
    }
}

/// Converts the messages about one request to tokens.
struct Reader<'a> {
    request: &'a Request,
    id: u64,
    started: bool,
    text: StopText<Drawn>,
}

impl<'a> Reader<'a> {
    fn new(request: &'a Request, id: u64) -> Self {
        Self {
            request,
            id,
            started: false,
            text: StopText::new(&request.options.stop.stop_strings),
        }
    }

    /// Reads one message. Returns the end of the request, if this is it.
    fn take(&mut self, process: &Process, reply: Reply) -> Option<Over> {
        if reply.id != Some(self.id) {
            return Some(Over::Lost(wrong_id(process, self.id, reply.id)));
        }
        if let Some(error) = reply.failure() {
            return Some(Over::Done(Err(error)));
        }
        if !self.started {
            if !reply.started {
                return Some(Over::Lost(
                    process.fault("the Python process sent a reply that had not started"),
                ));
            }
            self.started = true;
            self.request.accepted(reply.prompt_tokens);
            return None;
        }
        if let Some(done) = reply.progress {
            let told = self.request.progressed(done);
            return told.err().map(|e| Over::Stopped(Err(e)));
        }
        if reply.done {
            let Some(reason) = reply.finish_reason else {
                return Some(Over::Lost(
                    process.fault("the Python process ended a reply without a reason"),
                ));
            };
            let released = self.text.finish(reply.text.as_deref().unwrap_or_default());
            let stopped = self.deliver(released);
            self.request.took(reply.peak_memory, reply.active_memory);
            let reason = if stopped { FinishReason::Stop } else { reason };
            return Some(Over::Done(Ok(reason)));
        }
        let (Some(text), Some(token)) = (reply.token, reply.token_id) else {
            return Some(Over::Lost(process.fault(
                "the Python process sent a message that cannot be part of a reply",
            )));
        };
        let numbers = reply.logits.as_deref().map(floats).transpose();
        let seen = numbers.and_then(|logits| Ok((logits, probable(reply.logprob, reply.top)?)));
        let (logits, logprobs) = match seen {
            Ok(seen) => seen,
            Err(reason) => {
                let what = format!("the Python process sent bad logits: {reason}");
                return Some(Over::Lost(process.fault(&what)));
            }
        };
        self.request.produced();
        let released = self
            .text
            .push((token, logits, logprobs), &text, reply.pending);
        self.deliver(released)
            .then_some(Over::Stopped(Ok(FinishReason::Stop)))
    }

    /// Delivers final text to the caller. Returns whether the stop string was found.
    fn deliver(&self, released: Released<Drawn>) -> bool {
        let tokens = released.ready.into_iter().map(|(drawn, text)| {
            let (id, logits, logprobs) = drawn;
            let mut token = Token::new(id, text);
            token.logits = logits.map(Into::into);
            token.logprobs = logprobs;
            token
        });
        self.request.deliver(tokens);
        released.stopped.is_some()
    }
}

/// The log-probability of a token (the first of `values`), and those of the tokens in `top`, in
/// order.
fn probable(
    values: Option<String>,
    top: Vec<(u32, String)>,
) -> Result<Option<TokenLogprobs>, String> {
    let Some(values) = values else {
        return Ok(None);
    };
    let values = floats(&values)?;
    let Some((chosen, rest)) = values.split_first().filter(|(_, r)| r.len() == top.len()) else {
        return Err(format!(
            "{} log-probabilities for {} tokens",
            values.len(),
            top.len()
        ));
    };
    let top = top.into_iter().zip(rest);
    let top = top.map(|((id, text), &logprob)| TopLogprob::new(id, text, logprob));
    Ok(Some(TokenLogprobs::new(*chosen, top.collect())))
}

/// Requests the logits of a prompt's positions.
///
/// # Errors
/// The bridge's error, the loss of the process, or the error of `watch`.
pub fn rows(session: &mut Session, message: &Value, watch: Watch<'_>) -> Result<Rows> {
    let silence = session.settings.silence_timeout;
    let process = session.ready(watch)?;
    let id = process.new_id();
    let mut message = message.clone();
    message["id"] = id.into();
    process.send(&message);
    match read_rows(process, id, silence, watch) {
        Ok(answer) => answer,
        Err(e) => {
            session.process = None;
            Err(lost(e))
        }
    }
}

/// Reads the rows. An outer error means that the process is unusable.
fn read_rows(
    process: &mut Process,
    id: u64,
    silence: Duration,
    watch: Watch<'_>,
) -> Result<Result<Rows>> {
    let mut rows = Rows::default();
    let mut heard = Instant::now();
    loop {
        watch()?;
        let Some(reply) = process.receive(POLL)? else {
            if heard.elapsed() > silence {
                return Err(process.fault("the Python process said nothing and was ended"));
            }
            continue;
        };
        heard = Instant::now();
        if reply.id != Some(id) {
            return Err(wrong_id(process, id, reply.id));
        }
        if let Some(error) = reply.failure() {
            return Ok(Err(error));
        }
        if reply.done {
            return Ok(Ok(rows));
        }
        if let Some(tokens) = reply.tokens {
            rows.tokens = tokens;
        } else if let Some(row) = &reply.row {
            let values = floats(row).map_err(|reason| {
                process.fault(&format!("the Python process sent bad logits: {reason}"))
            })?;
            rows.count += 1;
            rows.values.extend(values);
        } else {
            return Err(process.fault(
                "the Python process sent a message that cannot be part of an answer with logits",
            ));
        }
    }
}
