//! Runs scripted requests: a stream runs one request, a batch session runs several.

use std::collections::{BTreeMap, VecDeque};
use std::iter::Peekable;
use std::sync::Arc;

use inference::kit::{Clock, Released, StopText, Utf8Decoder};
use inference::{
    BatchEvent, BatchSession, FinishReason, GenerateMetrics, GenerateOptions, LogitsProcessor,
    LogitsProcessorFactory, Prompt, RequestId, Result, StopCause, Token, TokenLogprobs,
    TokenSource, TokenStream, TopLogprob,
};

use super::reply::{Reply, Step, Steps};
use super::vocabulary::END;
use super::{Script, Scripted};

/// The log-probability of scripted tokens.
const LOGPROB: f32 = -0.5;

/// A running request. Dropping it cancels the request.
pub(super) struct Run {
    script: Arc<Script>,
    options: GenerateOptions,
    prompt: Arc<[u32]>,
    /// The ids of the reply so far.
    ids: Vec<u32>,
    steps: Peekable<Steps>,
    processors: Vec<Box<dyn LogitsProcessor>>,
    characters: Utf8Decoder,
    text: StopText<Token>,
    ready: VecDeque<Token>,
    finish: Option<FinishReason>,
    stop: Option<StopCause>,
    clock: Clock,
}

impl Run {
    pub(super) fn new(
        script: Arc<Script>,
        reply: Reply,
        prompt: Arc<[u32]>,
        options: GenerateOptions,
    ) -> Self {
        script.control.begin();
        let processors = options.constraints.logits_processors.iter();
        Self {
            script,
            steps: reply.0.peekable(),
            processors: processors.map(LogitsProcessorFactory::make).collect(),
            characters: Utf8Decoder::new(),
            text: StopText::new(&options.stop.stop_strings),
            clock: Clock::start(prompt.len()),
            options,
            prompt,
            ids: Vec::new(),
            ready: VecDeque::new(),
            finish: None,
            stop: None,
        }
    }

    fn check(&self) -> Result<()> {
        self.options.check_interrupt()?;
        self.script.control.check_open()
    }

    fn end(&mut self, reason: FinishReason) {
        if self.finish.is_none() {
            self.finish = Some(reason);
            self.clock.stop();
            self.script.control.publish(self.metrics());
        }
    }

    /// Releases the withheld text, and ends the reply.
    fn flush(&mut self, reason: FinishReason) {
        let rest = self.characters.finish();
        let released = self.text.finish(&rest);
        self.release(released);
        self.end(reason);
    }

    fn release(&mut self, released: Released<Token>) {
        for (mut token, text) in released.ready {
            token.text = text;
            self.ready.push_back(token);
        }
        if let Some(stop) = released.stopped {
            self.stop = Some(StopCause::String(stop));
            self.end(FinishReason::Stop);
        }
    }

    /// Applies the logits processors to logits in which `wanted`, the script's token, has the
    /// greatest value. Returns the token with the greatest logit afterwards.
    fn processed(&mut self, wanted: u32) -> Result<u32> {
        if self.processors.is_empty() {
            return Ok(wanted);
        }
        let size = self.script.vocabulary.len().max(wanted as usize + 1);
        let mut logits = vec![-1.0; size];
        logits[wanted as usize] = 1.0;
        for processor in &mut self.processors {
            processor.process(&self.prompt, &self.ids, &mut logits)?;
        }
        let greatest = (0..).zip(&logits).max_by(|a, b| a.1.total_cmp(b.1));
        Ok(greatest.map_or(wanted, |(id, _)| id))
    }

    /// Runs one step of the script, which returns at most one token.
    fn step(&mut self) -> Result<()> {
        self.script.control.wait();
        self.check()?;
        if self.ids.len() >= self.options.max_tokens {
            self.flush(FinishReason::Length);
            return Ok(());
        }
        match self.steps.next_if(|step| !step.is_token()) {
            Some(Step::Wait(time)) => {
                std::thread::sleep(time);
                return Ok(());
            }
            Some(Step::End) => {
                self.stop = Some(StopCause::Eos(END));
                self.flush(FinishReason::Stop);
                return Ok(());
            }
            Some(Step::Fail(error) | Step::FailAll(error)) => return Err(error),
            Some(Step::Panic(message)) => panic!("{message}"),
            Some(_) => return Ok(()),
            None => {}
        }
        let wanted = match self.steps.peek() {
            Some(Step::Token(token)) => token.id,
            Some(Step::Id(id)) => *id,
            _ => END,
        };
        let chosen = self.processed(wanted)?;
        let step = match chosen == wanted {
            true => self.steps.next().unwrap_or(Step::Id(END)),
            false => Step::Id(chosen),
        };
        self.clock.token();
        let stops = &self.options.stop;
        let eos = matches!(step, Step::Id(END)) && !stops.ignore_eos;
        if (eos || stops.stop_tokens.contains(&chosen)) && self.ids.len() >= stops.min_tokens {
            self.stop = Some(match eos {
                true => StopCause::Eos(END),
                false => StopCause::Token(chosen),
            });
            self.flush(FinishReason::Stop);
            return Ok(());
        }
        self.give(step, chosen);
        Ok(())
    }

    fn give(&mut self, step: Step, id: u32) {
        let (mut token, text) = match step {
            Step::Token(mut token) => {
                let text = std::mem::take(&mut token.text);
                (token, text)
            }
            _ => self.spelled(id),
        };
        if let Some(n) = self.options.output.logprobs {
            let alone = match &token.bytes {
                Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                None => text.clone(),
            };
            let top = (0..n).map(|_| TopLogprob::new(id, alone.clone(), LOGPROB));
            token = token.with_logprobs(TokenLogprobs::new(LOGPROB, top.collect()));
        }
        if let (true, Some(logits)) = (self.options.output.logits, &self.script.logits) {
            token = token.with_logits(logits(&[&*self.prompt, &self.ids].concat()));
        }
        self.ids.push(id);
        self.clock.counts().generated_tokens = self.ids.len();
        let released = self.text.push(token, &text, self.characters.is_open());
        self.release(released);
        if self.ids.len() >= self.options.max_tokens && self.finish.is_none() {
            self.flush(FinishReason::Length);
        }
    }

    /// A token of the vocabulary, and the text that it completes.
    fn spelled(&mut self, id: u32) -> (Token, String) {
        let token = Token::new(id, "");
        match (u8::try_from(id), self.script.vocabulary.special(id)) {
            (Ok(byte), _) => (token.with_bytes([byte]), self.characters.push(&[byte])),
            (Err(_), Some(name)) => {
                let token = token.with_bytes(name.as_bytes()).with_special(true);
                (token, String::new())
            }
            (Err(_), None) => (token.with_special(true), String::new()),
        }
    }

    fn metrics(&self) -> GenerateMetrics {
        let mut metrics = self.clock.metrics();
        (self.script.measured)(&mut metrics);
        metrics
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.end(FinishReason::Cancelled);
        self.script.control.end();
    }
}

/// A request as a stream.
pub(super) struct Stream(pub(super) Run);

impl Stream {
    fn advance(&mut self) -> Result<Option<Token>> {
        let run = &mut self.0;
        loop {
            if run.finish.is_none() {
                run.check()?;
            }
            if let Some(token) = run.ready.pop_front() {
                return Ok(Some(token));
            }
            if run.finish.is_some() {
                return Ok(None);
            }
            std::thread::sleep(run.script.pace);
            run.step()?;
        }
    }
}

impl Reply {
    /// Creates a stream of the reply, without a model.
    #[must_use]
    pub fn into_stream(self) -> TokenStream {
        let model = Scripted::computed(|_| Ok(Reply::ids([END])));
        let options = GenerateOptions::new().with_max_tokens(usize::MAX);
        TokenStream::new(Stream(model.run(self, [END].into(), options)))
    }
}

impl Iterator for Stream {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.advance();
        if let Err(error) = &item {
            self.0.ready.clear();
            self.0.end(FinishReason::of_error(error));
        }
        item.transpose()
    }
}

impl TokenSource for Stream {
    fn finish_reason(&self) -> Option<FinishReason> {
        self.0.finish.filter(|_| self.0.ready.is_empty())
    }

    fn stop_cause(&self) -> Option<StopCause> {
        let stopped = self.finish_reason() == Some(FinishReason::Stop);
        self.0.stop.clone().filter(|_| stopped)
    }

    fn metrics(&self) -> GenerateMetrics {
        self.0.metrics()
    }
}

/// A session of a scripted model.
pub(super) struct Session {
    model: Scripted,
    rows: BTreeMap<RequestId, Run>,
    next: u64,
}

impl Session {
    pub(super) fn new(model: Scripted) -> Self {
        model.control().session();
        Self {
            model,
            rows: BTreeMap::new(),
            next: 0,
        }
    }
}

impl BatchSession for Session {
    fn add(&mut self, prompt: &Prompt, options: &GenerateOptions) -> Result<RequestId> {
        let run = self.model.begin(prompt, options)?;
        let row = RequestId::new(self.next);
        self.next += 1;
        self.rows.insert(row, run);
        Ok(row)
    }

    fn remove(&mut self, row: RequestId) -> bool {
        self.rows.remove(&row).is_some()
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn step(&mut self) -> Result<VecDeque<BatchEvent>> {
        self.model.control().wait();
        std::thread::sleep(self.model.script.pace);
        let mut steps = self.rows.values_mut().map(|run| run.steps.peek());
        let failed = steps.find_map(|step| match step {
            Some(Step::FailAll(error)) => Some(error.clone()),
            _ => None,
        });
        if let Some(error) = failed {
            self.rows.clear();
            return Err(error);
        }
        let mut events = VecDeque::new();
        self.rows.retain(|&row, run| {
            let done = run.step();
            let tokens = run.ready.drain(..);
            events.extend(tokens.map(|token| BatchEvent::Token { row, token }));
            match (done, run.finish) {
                (Err(error), _) => {
                    run.end(FinishReason::of_error(&error));
                    events.push_back(BatchEvent::Failed { row, error });
                    false
                }
                (Ok(()), Some(reason)) => {
                    let (stop, metrics) = (run.stop.take(), Box::new(run.metrics()));
                    events.push_back(BatchEvent::Done {
                        row,
                        reason,
                        stop,
                        metrics,
                    });
                    false
                }
                (Ok(()), None) => true,
            }
        });
        Ok(events)
    }
}
