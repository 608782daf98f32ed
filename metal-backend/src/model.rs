//! A loaded model: the engine that requests share, and its face to the contract.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inference::{
    BatchResult, ClassifyResult, Error, ErrorKind, GenerateMetrics, GenerateOptions, LogitsOutput,
    Message, ModelInfo, Prompt, Result, TextModel, TokenLogprobs, TokenModel, TokenStream,
    TopLogprob,
};
use mlx_rs_core::{DeviceKind, Stream, concatenate, eval};

use crate::arch::Decoder;
use crate::error::engine as engine_error;
use crate::generate::Generation;
use crate::generate::prefill::{self, PREFILL_STEP};
use crate::nn::attention::Positions;
use crate::sample::{Compiler, Context, Sampler};
use crate::text::{Detokenizer, TextPipeline};

/// The log-probability of what cannot be, as OpenAI has it: JSON has no infinity.
const IMPOSSIBLE: f32 = -9999.0;

/// What all requests of one model share.
pub struct Engine {
    /// Taken away by `close`, which frees the weights once no request runs.
    decoder: Mutex<Option<Arc<dyn Decoder>>>,
    closed: AtomicBool,
    text: TextPipeline,
    stream: Stream,
    info: ModelInfo,
    eos: Vec<u32>,
    context_len: Option<usize>,
    metrics: Mutex<GenerateMetrics>,
    grammars: Compiler,
}

/// What [`Engine::new`] puts together.
pub struct Parts {
    /// The network.
    pub decoder: Box<dyn Decoder>,
    /// Tokenizer and chat template.
    pub text: TextPipeline,
    /// Where it runs.
    pub stream: Stream,
    /// What it is.
    pub info: ModelInfo,
    /// Tokens that end a reply.
    pub eos: Vec<u32>,
    /// The bound the caller set on prompt and reply together, in tokens.
    pub context_len: Option<usize>,
}

/// A mutex of plain data is usable even after a panic elsewhere.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Puts an engine together.
    pub fn new(parts: Parts) -> Self {
        let tokenizer = Arc::clone(parts.text.tokenizer());
        Self {
            grammars: Compiler::new(tokenizer, &parts.eos, parts.info.vocab_size),
            decoder: Mutex::new(Some(Arc::from(parts.decoder))),
            closed: AtomicBool::new(false),
            text: parts.text,
            stream: parts.stream,
            info: parts.info,
            eos: parts.eos,
            context_len: parts.context_len,
            metrics: Mutex::new(GenerateMetrics::default()),
        }
    }

    /// Runs `f` on this model's device.
    pub fn scope<R>(&self, f: impl FnOnce() -> R) -> R {
        self.stream.scope(f)
    }

    /// An error once the model was closed.
    pub fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Closed,
                "the model was closed; load it again",
            ));
        }
        Ok(())
    }

    /// The network, while the model is open.
    pub fn decoder(&self) -> Result<Arc<dyn Decoder>> {
        self.check_open()?;
        locked(&self.decoder)
            .clone()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "the model was closed; load it again"))
    }

    /// Tokens that end a reply.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.eos
    }

    /// How many positions a request may take.
    pub fn context_limit(&self) -> usize {
        // Positions are counted in 32 bits by MLX; the configured context is advice, not a limit.
        self.context_len.unwrap_or(i32::MAX as usize - 1)
    }

    /// Remembers the figures of the request that ended last.
    pub fn publish(&self, metrics: GenerateMetrics) {
        *locked(&self.metrics) = metrics;
    }

    /// A decoder of one request's ids to text.
    pub fn detokenizer(&self, stop: &[String]) -> Detokenizer {
        self.text.detokenizer(stop)
    }

    /// The sampling that a request's options describe.
    pub fn sampler(&self, options: &GenerateOptions, prompt: &[u32]) -> Result<Sampler> {
        let newline = if options.xtc_probability > 0.0 {
            self.text.tokenizer().encode_plain("\n")?
        } else {
            Vec::new()
        };
        let context = Context {
            vocabulary: self.info.vocab_size,
            eos: &self.eos,
            newline: &newline,
            grammars: Some(&self.grammars),
            on_cpu: self.stream.device().kind() == DeviceKind::Cpu,
        };
        self.scope(|| Sampler::new(options, prompt, &context))
    }

    /// Log-probabilities of one token as the contract has them.
    pub fn logprobs(&self, chosen: f32, top: Vec<(u32, f32)>) -> TokenLogprobs {
        let tokenizer = self.text.tokenizer();
        let spelled = |id| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let top = top
            .into_iter()
            .map(|(id, logprob)| TopLogprob::new(id, spelled(id), logprob.max(IMPOSSIBLE)))
            .collect();
        TokenLogprobs::new(chosen.max(IMPOSSIBLE), top)
    }

    /// Refuses prompts that cannot be run.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if ids.is_empty() {
            return bad(String::from("the prompt is empty; give at least one token"));
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.info.vocab_size) {
            return bad(format!(
                "token {id} is outside the vocabulary of {} tokens",
                self.info.vocab_size
            ));
        }
        let limit = self.context_limit();
        if ids.len() > limit {
            return bad(format!(
                "the prompt has {} tokens, more than the context of {limit}; shorten it or raise \
                 context_len",
                ids.len()
            ));
        }
        Ok(())
    }

    fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Text(text) => self.text.encode_prompt(text),
            Prompt::Tokens(ids) => Ok(ids.clone()),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                "this kind of prompt is not supported",
            )),
        }
    }
}

/// A model as the contract sees it.
pub struct MlxModel {
    engine: Arc<Engine>,
}

impl MlxModel {
    /// The face of `engine`.
    pub fn new(engine: Engine) -> Self {
        Self {
            engine: Arc::new(engine),
        }
    }

    fn start(&self, ids: Vec<u32>, options: &GenerateOptions) -> Result<Generation> {
        Generation::new(Arc::clone(&self.engine), ids, options.clone())
    }

    fn classify_one(
        &self,
        prompt: &Prompt,
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<ClassifyResult> {
        let options = options
            .clone()
            .with_max_tokens(1)
            .with_min_tokens(0)
            .with_stop(Vec::new())
            .with_stop_tokens(Vec::new())
            .with_ignore_eos(true)
            .with_logits(return_logits);
        let mut stream = self.start(self.engine.encode_prompt(prompt)?, &options)?;
        let mut token = stream
            .next()
            .unwrap_or_else(|| Err(Error::new(ErrorKind::Engine, "the model gave no token")))?;
        let logits = token.logits.take().map(|l| l.to_vec());
        Ok(ClassifyResult::new(token, logits))
    }
}

impl TextModel for MlxModel {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        let ids = self.engine.encode_prompt(prompt)?;
        Ok(TokenStream::new(self.start(ids, options)?))
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        let ids = self.engine.text.encode_chat(messages, true)?;
        Ok(TokenStream::new(self.start(ids, options)?))
    }

    /// One prompt after another; the results are what a padded batch would give.
    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        prompts
            .iter()
            .map(|p| self.classify_one(p, options, return_logits))
            .collect()
    }

    /// One prompt after another. A prompt that fails does not stop the others.
    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>> {
        options.validate()?;
        self.engine.check_open()?;
        Ok(prompts
            .iter()
            .map(|prompt| {
                let started = self
                    .engine
                    .encode_prompt(prompt)
                    .and_then(|ids| self.start(ids, options));
                let mut stream = match started {
                    Ok(stream) => stream,
                    Err(e) => return BatchResult::failed(Vec::new(), e),
                };
                let mut tokens = Vec::new();
                for token in stream.by_ref() {
                    match token {
                        Ok(token) => tokens.push(token),
                        Err(e) => return BatchResult::failed(tokens, e),
                    }
                }
                BatchResult::new(tokens, inference::TokenSource::finish_reason(&stream))
            })
            .collect())
    }

    fn model_type(&self) -> &str {
        &self.engine.info.architecture
    }

    fn info(&self) -> ModelInfo {
        self.engine.info.clone()
    }

    fn metrics(&self) -> GenerateMetrics {
        locked(&self.engine.metrics).clone()
    }

    fn close(&self) -> Result<()> {
        self.engine.closed.store(true, Ordering::Release);
        locked(&self.engine.decoder).take();
        mlx_rs_core::memory::clear_cache().map_err(engine_error("close"))
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }
}

impl TokenModel for MlxModel {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.engine.text.tokenizer().encode(text, add_special)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        let tokenizer = self.engine.text.tokenizer();
        if let Some(id) = ids.iter().find(|&&id| tokenizer.token_text(id).is_none()) {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("token {id} is not in the tokenizer's vocabulary"),
            ));
        }
        tokenizer.decode(ids)
    }

    fn render_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.engine
            .text
            .render_chat(messages, add_generation_prompt)
    }

    fn logits(&self, prompt: &Prompt, all: bool) -> Result<LogitsOutput> {
        let engine = &self.engine;
        let ids = engine.encode_prompt(prompt)?;
        engine.check_prompt(&ids)?;
        let decoder = engine.decoder()?;
        let logits = engine.scope(|| {
            let mut caches = decoder.new_caches();
            let mut parts = Vec::new();
            if all {
                for step in ids.chunks(PREFILL_STEP) {
                    let part = prefill::ids(step)
                        .and_then(|ids| decoder.forward(&ids, &mut caches, Positions::All))
                        .and_then(|part| eval([&part]).map(|()| part))
                        .map_err(engine_error("logits"))?;
                    parts.push(part);
                }
            } else {
                parts.push(prefill::forward_prompt(
                    decoder.as_ref(),
                    &ids,
                    &mut caches,
                    Positions::Last,
                    &mut |_| engine.check_open(),
                )?);
            }
            concatenate(&parts.iter().collect::<Vec<_>>(), 1)
                .and_then(|logits| logits.to_f32_vec())
                .map_err(engine_error("logits"))
        })?;
        let shape = vec![if all { ids.len() } else { 1 }, engine.info.vocab_size];
        Ok(LogitsOutput::new(ids, shape, logits))
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.engine.eos.clone()
    }
}
