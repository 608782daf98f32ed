//! A reply of the mock: the stream of the wrapped model, changed by the fault.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::ThreadId;
use std::time::Duration;

use inference::{
    Error, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Result, StopCause, Token,
    TokenSource, TokenStream,
};

use super::Fault;
use super::model::State;

/// Length of the replies in the checks of streaming and cancellation.
const LONG: usize = 10_000;
/// Length of the replies in most checks. A fault that depends on this length does not affect other
/// checks.
pub const ORDINARY: usize = 16;

pub struct Source {
    inner: TokenStream,
    /// The caller's options. The inner stream may have other options.
    options: GenerateOptions,
    fault: Fault,
    state: Arc<State>,
    thread: ThreadId,
    ahead: VecDeque<Result<Token>>,
    given: usize,
    eos_given: bool,
    ended: bool,
}

impl Source {
    pub fn new(
        inner: TokenStream,
        options: &GenerateOptions,
        fault: Fault,
        state: &Arc<State>,
    ) -> Self {
        state.streams.fetch_add(1, Ordering::SeqCst);
        Self {
            inner,
            options: options.clone(),
            fault,
            state: Arc::clone(state),
            thread: std::thread::current().id(),
            ahead: VecDeque::new(),
            given: 0,
            eos_given: false,
            ended: false,
        }
    }

    fn read_ahead(&mut self, n: usize) {
        while self.ahead.len() < n {
            match self.inner.next() {
                Some(item) => self.ahead.push_back(item),
                None => return,
            }
        }
    }

    fn step(&mut self) -> Option<Result<Token>> {
        match self.fault {
            Fault::WholeReplyFirst
                if self.options.max_tokens > LONG && self.options.interrupt.deadline.is_some() =>
            {
                if self.given == 0 {
                    self.read_ahead(2000);
                }
                if let Err(e) = self.options.check_interrupt() {
                    return Some(Err(e));
                }
            }
            Fault::HeldBackLost
                if !self.options.stop.stop_strings.is_empty() && self.given == 0 =>
            {
                self.read_ahead(usize::MAX);
                if self.inner.finish_reason() == Some(FinishReason::Length)
                    && let Some(Ok(last)) = self.ahead.back_mut()
                {
                    last.text.clear();
                }
            }
            Fault::GivesUpEarly
                if self.given == 40
                    && self.options.stop.min_tokens == 0
                    && (41..=100).contains(&self.options.max_tokens) =>
            {
                return None;
            }
            // The wrapped stream has neither a cancel token nor a deadline.
            Fault::CancelledGivesToken | Fault::DeadlineGivesToken if self.given > 0 => {
                if let Err(e) = self.options.check_interrupt() {
                    return Some(Err(e));
                }
            }
            Fault::CancelIgnored | Fault::DeadlineIgnored if self.given == 0 => {
                if let Err(e) = self.options.check_interrupt() {
                    return Some(Err(e));
                }
            }
            Fault::MixesRequests => std::thread::sleep(Duration::from_millis(1)),
            Fault::BoundToThread if self.thread != std::thread::current().id() => {
                return Some(Err(Error::new(
                    ErrorKind::Engine,
                    "no stream in this thread",
                )));
            }
            Fault::DropEndsSilently if self.state.dropped.load(Ordering::SeqCst) => return None,
            _ => {}
        }
        let item = self.ahead.pop_front().or_else(|| self.inner.next());
        match (self.fault, item) {
            (Fault::CloseEndsSilently, Some(Err(e))) if e.kind() == ErrorKind::Closed => None,
            (Fault::EosInReply, None)
                if self.inner.finish_reason() == Some(FinishReason::Stop)
                    && self.options.stop.stop_strings.is_empty()
                    && self.options.stop.stop_tokens.is_empty()
                    && !self.eos_given =>
            {
                self.eos_given = true;
                Some(Ok(Token::new(256, "")))
            }
            (Fault::OtherText, Some(Ok(mut token))) if self.options.max_tokens == ORDINARY => {
                token.text = token.text.to_uppercase();
                Some(Ok(token))
            }
            (Fault::ProcessorErrorLost, Some(Err(e)))
                if !self.options.constraints.logits_processors.is_empty()
                    && e.message().contains("had enough") =>
            {
                None
            }
            (Fault::GrammarCutShort, Some(Ok(_)))
                if self.options.constraints.grammar.is_some() && self.given == 2 =>
            {
                None
            }
            (Fault::LogprobsUnsorted, Some(Ok(mut token))) => {
                if let Some(l) = &mut token.logprobs {
                    l.top.reverse();
                }
                Some(Ok(token))
            }
            (Fault::LogprobsOfTemperature, Some(Ok(mut token))) => {
                if let Some(l) = &mut token.logprobs {
                    l.logprob *= 0.9;
                    l.top.iter_mut().for_each(|t| t.logprob *= 0.9);
                }
                Some(Ok(token))
            }
            (Fault::TokenLogitsMissing, Some(Ok(mut token))) => {
                token.logits = None;
                Some(Ok(token))
            }
            (_, item) => item,
        }
    }
}

impl Iterator for Source {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        let item = self.step();
        match &item {
            Some(Ok(_)) => self.given += 1,
            _ => self.ended = true,
        }
        item
    }
}

impl TokenSource for Source {
    fn finish_reason(&self) -> Option<FinishReason> {
        match self.fault {
            Fault::EndKnownTooEarly => self.inner.finish_reason().or(Some(FinishReason::Length)),
            Fault::GivesUpEarly | Fault::GrammarCutShort if self.ended => {
                self.inner.finish_reason().or(Some(FinishReason::Stop))
            }
            _ if self.ahead.is_empty() => self.inner.finish_reason(),
            _ => None,
        }
    }

    fn stop_cause(&self) -> Option<StopCause> {
        let stopped = self.finish_reason() == Some(FinishReason::Stop);
        let o = &self.options;
        let cause = match (o.stop.stop_strings.first(), o.stop.stop_tokens.first()) {
            _ if self.fault == Fault::StopCauseWrong => StopCause::Eos(256),
            (Some(text), _) => StopCause::String(text.clone()),
            (None, Some(id)) => StopCause::Token(*id),
            (None, None) => StopCause::Eos(256),
        };
        stopped.then_some(cause)
    }

    fn metrics(&self) -> GenerateMetrics {
        let mut m = self.inner.metrics();
        match self.fault {
            Fault::DecodeTakesTooLong => m.decode_time += Duration::from_secs(3600),
            Fault::CountsOneMore => m.generated_tokens += 1,
            Fault::FiguresGoDown => m.generated_tokens = 20usize.saturating_sub(self.given),
            _ => {}
        }
        m.active_memory_bytes = self.state.bytes_in_use.load(Ordering::SeqCst)
            + match self.fault {
                Fault::DropLeaks => self.state.leaked.load(Ordering::SeqCst),
                _ => 0,
            };
        m.peak_memory_bytes = m.active_memory_bytes;
        m
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.state.streams.fetch_sub(1, Ordering::SeqCst);
        if !self.ended {
            self.state.leaked.fetch_add(1 << 20, Ordering::SeqCst);
        }
        let mut threads = self.state.threads.lock();
        threads.retain(|t| *t != self.thread);
    }
}
