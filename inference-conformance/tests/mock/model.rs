//! A model of the mock: it wraps the model of `echo`, and applies the fault to its calls.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use inference::{
    Adapter, AttentionInspector, AttentionSnapshot, BatchResult, BatchSession, ChatPrompt,
    ClassifyResult, EmbeddingModel, Error, ErrorKind, GenerateMetrics, GenerateOptions,
    HiddenStates, Interrupt, LogitsOutput, LoraConfig, Message, ModelInfo, PreparedPrompt, Prompt,
    PromptCacheModel, RerankModel, Result, SteerableModel, TextModel, TokenModel, TokenStream,
    TrainableModel,
};
use inference_conformance::scripted::{ScriptedAdapter, attention};
use parking_lot::Mutex;

use super::Fault;
use super::grammar;
use super::session::Session;
use super::stream::{ORDINARY, Source};

/// State that a model shares with its streams.
#[derive(Default)]
pub struct State {
    /// The number of existing streams.
    pub streams: AtomicUsize,
    /// The memory that all models of the backend report, in bytes.
    pub bytes_in_use: Arc<AtomicU64>,
    /// The memory that dropped streams pretend to leak, in bytes.
    pub leaked: AtomicU64,
    /// Whether the model's handle is dropped.
    pub dropped: AtomicBool,
    /// Whether another model closed this one.
    pub closed: AtomicBool,
    closings: AtomicUsize,
    /// Models that are closed together with this one.
    pub others: Mutex<Vec<Weak<State>>>,
    /// The threads that have a stream.
    pub threads: Mutex<Vec<ThreadId>>,
    requests: AtomicU64,
    adapters: Adapters,
}

/// The names of the adapters that requests can name.
pub type Adapters = Arc<Mutex<BTreeSet<String>>>;

/// Removes the adapter from a request. An unknown adapter is an error.
pub fn without_adapter(
    options: &GenerateOptions,
    adapters: &Adapters,
    fault: Fault,
) -> Result<GenerateOptions> {
    let mut options = options.clone();
    if let Some(name) = options.adapter.take()
        && !adapters.lock().contains(&name)
        && fault != Fault::UnknownAdapterIgnored
    {
        return error(ErrorKind::InvalidOption, "there is no such adapter");
    }
    Ok(options)
}

/// The first prompt of the suite, in the mock's tokens.
const FIRST: [u8; 24] = *b"The capital of France is";

/// The number of bytes that a model reports.
const MODEL_BYTES: u64 = 1 << 20;

pub struct Model {
    inner: Arc<dyn TextModel>,
    pub fault: Fault,
    context_len: Option<usize>,
    pub state: Arc<State>,
}

pub fn error<T>(kind: ErrorKind, message: &str) -> Result<T> {
    Err(Error::new(kind, message))
}

impl Model {
    pub fn new(
        inner: Box<dyn TextModel>,
        fault: Fault,
        bytes_in_use: &Arc<AtomicU64>,
        context_len: Option<usize>,
    ) -> Self {
        bytes_in_use.fetch_add(MODEL_BYTES, Ordering::SeqCst);
        let state = State {
            bytes_in_use: Arc::clone(bytes_in_use),
            ..State::default()
        };
        Self {
            inner: Arc::from(inner),
            fault,
            context_len,
            state: Arc::new(state),
        }
    }

    pub fn tokens(&self) -> &dyn TokenModel {
        self.inner.as_token_model().unwrap()
    }

    fn wrap(&self, inner: TokenStream, options: &GenerateOptions) -> TokenStream {
        TokenStream::new(Source::new(inner, options, self.fault, &self.state))
    }

    /// The options for the wrapped model: `o`, changed by the fault.
    fn bent(&self, o: &GenerateOptions) -> GenerateOptions {
        let mut o = o.clone();
        (o.steering, o.adapter) = (None, None);
        match self.fault {
            Fault::ZeroTokensIsOne => o.max_tokens = o.max_tokens.max(1),
            Fault::StopTokensIgnored => o.stop.stop_tokens.clear(),
            Fault::StopStringsIgnored if !o.stop.stop_strings.iter().any(String::is_empty) => {
                o.stop.stop_strings.clear();
            }
            Fault::SeedMovesGreedy
                if o.sampling.temperature == 0.0 && o.sampling.seed.is_some() =>
            {
                o.sampling.temperature = 1.5;
            }
            Fault::TopKIgnored => o.sampling.top_k = 0,
            Fault::PenaltyIgnored if o.penalties.repeat_penalty > 1.0 => {
                o.penalties.repeat_penalty = 1.0;
            }
            Fault::ContextEndsReply => {
                o.max_tokens = o.max_tokens.min(self.context_len.unwrap_or(usize::MAX));
            }
            Fault::PresenceIgnored if o.validate().is_ok() => o.penalties.presence_penalty = 0.0,
            Fault::FrequencyIgnored if o.validate().is_ok() => o.penalties.frequency_penalty = 0.0,
            Fault::BiasIgnored if o.validate().is_ok() => o.constraints.logit_bias.clear(),
            Fault::BannedComes => o.constraints.banned_tokens.clear(),
            Fault::ForcedNotCounted => o.max_tokens += o.constraints.forced_tokens.len(),
            Fault::MinTokensIgnored if o.validate().is_ok() => o.stop.min_tokens = 0,
            Fault::XtcIgnored if o.validate().is_ok() => o.sampling.xtc_probability = 0.0,
            Fault::ProcessorNotCalled => o.constraints.logits_processors.clear(),
            Fault::LogprobsAlways => o.output.logprobs = o.output.logprobs.or(Some(1)),
            Fault::SeedIgnored if o.max_tokens <= ORDINARY => {
                o.sampling.seed = o
                    .sampling
                    .seed
                    .map(|s| s ^ self.state.requests.fetch_add(1, Ordering::SeqCst));
            }
            Fault::SeedsAllOne => o.sampling.seed = o.sampling.seed.map(|_| 1),
            Fault::UnseededIsSeeded => o.sampling.seed = o.sampling.seed.or(Some(1)),
            Fault::CancelledGivesToken | Fault::CancelIgnored => o.interrupt.cancel = None,
            Fault::DeadlineGivesToken | Fault::DeadlineIgnored => o.interrupt.deadline = None,
            Fault::NanIsGreedy if o.sampling.temperature.is_nan() => o.sampling.temperature = 0.0,
            _ => {}
        }
        if let Some(grammar) = o.constraints.grammar.take()
            && self.fault != Fault::GrammarIgnored
        {
            o.constraints
                .logits_processors
                .push(grammar::follow(&grammar));
        }
        o
    }

    fn bent_prompt(&self, prompt: &Prompt) -> Prompt {
        match (self.fault, prompt) {
            (Fault::ForeignIdsPass, Prompt::Tokens(ids)) => {
                ids.iter().map(|id| id % 257).collect::<Vec<_>>().into()
            }
            (Fault::IdsReversed, Prompt::Tokens(ids)) if ids.len() > 2 => {
                ids.iter().rev().copied().collect::<Vec<_>>().into()
            }
            (Fault::MixesRequests, _) if self.state.streams.load(Ordering::SeqCst) > 0 => {
                Prompt::from("Water is")
            }
            _ => prompt.clone(),
        }
    }

    pub fn check_open(&self) -> Result<()> {
        if self.state.closed.load(Ordering::SeqCst) {
            return error(ErrorKind::Closed, "closed with another model");
        }
        Ok(())
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.state.dropped.store(true, Ordering::SeqCst);
        if self.fault != Fault::ModelsStay {
            self.state
                .bytes_in_use
                .fetch_sub(MODEL_BYTES, Ordering::SeqCst);
        }
    }
}

impl TextModel for Model {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        self.check_open()?;
        let thread = std::thread::current().id();
        match self.fault {
            Fault::EmptyTextPanics if *prompt == Prompt::from("") => panic!("no last token"),
            Fault::BrokenGrammarPasses => {}
            _ if options
                .constraints
                .grammar
                .as_ref()
                .is_some_and(grammar::is_broken) =>
            {
                return error(ErrorKind::InvalidOption, "the expression has no end");
            }
            Fault::OneStreamAThread if self.state.threads.lock().contains(&thread) => {
                return error(ErrorKind::Engine, "one request a thread");
            }
            _ => {}
        }
        without_adapter(options, &self.state.adapters, self.fault)?;
        let mut bent = self.bent_prompt(prompt);
        if let Some(steering) = options.steering.as_ref().filter(|s| !s.edits().is_empty()) {
            steering.check(&self.steering_shape()?)?;
            // The edit removes all influence of the prompt.
            if self.fault != Fault::EditsIgnored {
                bent = Prompt::from([0]);
            }
        }
        let inner = self.inner.generate(&bent, &self.bent(options))?;
        self.state.threads.lock().push(thread);
        Ok(self.wrap(inner, options))
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        self.check_open()?;
        let mut bent = self.bent(options);
        match self.fault {
            Fault::NanIsGreedy => bent = options.clone(),
            Fault::ChatIgnoresMaxTokens if bent.validate().is_ok() => bent.max_tokens = 16,
            Fault::ChatTakesNan if bent.sampling.temperature.is_nan() => {
                bent.sampling.temperature = 0.0;
            }
            _ => {}
        }
        Ok(self.wrap(self.inner.chat(messages, &bent)?, options))
    }

    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        self.check_open()?;
        if self.fault == Fault::ClassifyNothingFails && prompts.is_empty() {
            return error(ErrorKind::InvalidOption, "no prompts");
        }
        let asked = return_logits || self.fault == Fault::ClassifyLogitsAlways;
        let mut bent = options.clone();
        if self.fault == Fault::ClassifyNotCancelled {
            bent.interrupt.cancel = None;
        }
        let answer = self.inner.classify(prompts, &bent, asked);
        let mut results = match answer {
            Err(e) if self.fault == Fault::ClosedIsEngine && e.kind() == ErrorKind::Closed => {
                return error(ErrorKind::Engine, "null pointer");
            }
            answer => answer?,
        };
        match self.fault {
            Fault::ClassifyOutOfOrder => results.reverse(),
            Fault::ClassifyLogitsShort => {
                for logits in results.iter_mut().filter_map(|r| r.logits.as_mut()) {
                    logits.pop();
                }
            }
            _ => {}
        }
        Ok(results)
    }

    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>> {
        options.validate()?;
        self.inner.batch_generate(&[], options)?; // an error when closed
        let mut results = Vec::new();
        let mut bent = options.clone();
        if self.fault == Fault::BatchOutlivesDeadline && bent.interrupt.deadline.take().is_some() {
            bent.max_tokens = ORDINARY; // so that the reply ends
        }
        for prompt in prompts {
            let mut stream = match self.generate(prompt, &bent) {
                Ok(stream) => stream,
                Err(e) if self.fault == Fault::BatchFailsWhole => return Err(e),
                Err(e) => {
                    results.push(BatchResult::failed(Vec::new(), e));
                    continue;
                }
            };
            let tokens = stream.by_ref().collect::<Result<Vec<_>>>()?;
            results.push(BatchResult::new(tokens, stream.finish_reason()));
        }
        if self.fault == Fault::BatchOutOfOrder {
            results.reverse();
        }
        Ok(results)
    }

    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        self.check_open()?;
        // Returns an error if the model is closed.
        self.inner.batch_generate(&[], &GenerateOptions::new())?;
        let adapters = Arc::clone(&self.state.adapters);
        Ok(Box::new(Session::new(
            Arc::clone(&self.inner),
            adapters,
            self.fault,
        )))
    }

    fn add_adapter(&self, name: &str, path: &Path) -> Result<()> {
        self.check_open()?;
        if !path.join(ScriptedAdapter::FILE).is_file() {
            return match self.fault {
                Fault::UndeclaredAdapters => Ok(()),
                _ => error(ErrorKind::ModelNotFound, "there is no adapter here"),
            };
        }
        match !name.is_empty() && self.state.adapters.lock().insert(name.to_owned()) {
            true => Ok(()),
            false => error(ErrorKind::InvalidOption, "the name is empty or taken"),
        }
    }

    fn drop_adapter(&self, name: &str) -> Result<bool> {
        let mut adapters = self.state.adapters.lock();
        Ok(match self.fault {
            Fault::AdapterNotDropped => adapters.contains(name),
            _ => adapters.remove(name),
        })
    }

    fn model_type(&self) -> &str {
        match self.fault {
            Fault::TypeIsNotArchitecture => "other",
            _ => self.inner.model_type(),
        }
    }

    fn info(&self) -> ModelInfo {
        self.inner.info()
    }

    fn metrics(&self) -> GenerateMetrics {
        let mut m = self.inner.metrics();
        match self.fault {
            Fault::ModelFiguresMissing => return GenerateMetrics::default(),
            Fault::CountsOneMore => m.generated_tokens += 1,
            Fault::FiguresGoDown => m.generated_tokens = 20usize.saturating_sub(m.generated_tokens),
            _ => {}
        }
        m
    }

    fn close(&self) -> Result<()> {
        for other in self.state.others.lock().iter().filter_map(Weak::upgrade) {
            other.closed.store(true, Ordering::SeqCst);
        }
        let before = self.state.closings.fetch_add(1, Ordering::SeqCst);
        if self.fault == Fault::CloseTwiceFails && before > 0 {
            return error(ErrorKind::Engine, "double free");
        }
        self.inner.close()
    }

    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        (self.fault != Fault::TraitDeclaredInVain).then_some(self)
    }

    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        Some(self)
    }

    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        Some(self)
    }

    fn as_rerank_model(&self) -> Option<&dyn RerankModel> {
        Some(self)
    }

    fn as_prompt_cache(&self) -> Option<&dyn PromptCacheModel> {
        Some(self)
    }

    fn as_steerable(&self) -> Option<&dyn SteerableModel> {
        Some(self)
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }
}

impl TokenModel for Model {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.tokens().encode(text, add_special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        match self.fault {
            Fault::DecodesAnything => Ok(self.tokens().decode(ids).unwrap_or_default()),
            _ => self.tokens().decode(ids),
        }
    }

    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        let mut prepared = self.tokens().prepare_chat(prompt)?;
        match self.fault {
            Fault::ConversationLost => prepared.text = String::from("! "),
            Fault::ConversationOfOtherIds => prepared.ids.reverse(),
            _ => {}
        }
        Ok(prepared)
    }

    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput> {
        if self.fault != Fault::LogitsOutliveDeadline {
            interrupt.check()?;
        }
        let mut output = self.tokens().logits(prompt, all, &Interrupt::new())?;
        match self.fault {
            Fault::LogitsShapeSwapped => output.shape.reverse(),
            // The check compares log-probabilities for the first prompt only.
            Fault::LogitsNegated if !output.tokens.iter().eq(&FIRST.map(u32::from)) => {
                output.logits.iter_mut().for_each(|l| *l = -*l);
            }
            _ => {}
        }
        Ok(output)
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.tokens().eos_tokens()
    }
}

impl TrainableModel for Model {
    fn apply_lora(&self, config: &LoraConfig) -> Result<Box<dyn Adapter>> {
        if self.fault != Fault::LoraRankZero {
            config.validate()?;
        }
        Ok(Box::new(ScriptedAdapter::new(config)?))
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokens().encode(text, false)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokens().decode(ids)
    }

    fn num_layers(&self) -> usize {
        1
    }
}

impl AttentionInspector for Model {
    fn inspect_attention(
        &self,
        prompt: &Prompt,
        interrupt: &Interrupt,
    ) -> Result<AttentionSnapshot> {
        let mut s = attention(&self.tokens().logits(prompt, false, interrupt)?.tokens);
        if self.fault == Fault::AttentionTooShort {
            s.keys[0][0].pop();
        }
        Ok(s)
    }

    fn hidden_states(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<HiddenStates> {
        self.states(prompt, positions, interrupt)
    }
}
