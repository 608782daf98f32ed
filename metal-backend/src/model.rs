//! A loaded model: the engine that requests share, and its face to the contract.

mod adapters;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inference::{
    AttentionInspector, BatchEvent, BatchResult, BatchSession, ChatPrompt, ClassifyResult,
    EmbeddingModel, Error, ErrorKind, GenerateMetrics, GenerateOptions, Interrupt, LogitsOutput,
    Message, ModelInfo, Prompt, PromptCacheModel, Result, TextModel, Token, TokenLogprobs,
    TokenModel, TokenStream, TopLogprob, TrainableModel,
};
use mlx_rs_core::{DeviceKind, Stream, concatenate, eval};

use crate::adapter::LoraAdapter;
use crate::arch::Decoder;
use crate::cache::{self, CacheOptions, Prefixes};
use crate::error::engine as engine_error;
use crate::generate::prefill::{forward, forward_prompt};
use crate::generate::{Batch, Generation};
use crate::nn::adapter::{Passes, Site};
use crate::nn::attention::Positions;
use crate::sample::{Compiler, Context, Sampler};
use crate::text::{Detokenizer, TextPipeline};
use adapters::Adapted;

/// Requests of one call that run at the same time.
const TOGETHER: usize = 32;

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
    caches: CacheOptions,
    prefixes: Prefixes,
    /// The same for the model that guesses.
    draft_prefixes: Prefixes,
    /// Guesses tokens; taken away by `close`.
    draft: Mutex<Option<Arc<dyn Decoder>>>,
    identity: String,
    /// Tells this engine from all others, for files that no other can use.
    nonce: u64,
    /// Where adapters can stand; taken away by `close`, as they hold the weights.
    sites: Mutex<Vec<Arc<Site>>>,
    /// The adapter there is.
    adapter: Mutex<Option<LoraAdapter>>,
    passes: Arc<Passes>,
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
    /// Which caches requests get.
    pub caches: CacheOptions,
    /// How many finished requests are remembered.
    pub slots: usize,
    /// A smaller model that guesses tokens.
    pub draft: Option<Box<dyn Decoder>>,
    /// Tells this model from others.
    pub identity: String,
    /// Where adapters can stand.
    pub sites: Vec<Arc<Site>>,
}

/// A mutex of plain data is usable even after a panic elsewhere.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Puts an engine together.
    pub fn new(parts: Parts) -> Self {
        let tokenizer = Arc::clone(parts.text.tokenizer());
        let passes = Arc::new(Passes::default());
        let decoder = Adapted {
            decoder: parts.decoder,
            passes: Arc::clone(&passes),
        };
        Self {
            grammars: Compiler::new(tokenizer, &parts.eos, parts.info.vocab_size),
            decoder: Mutex::new(Some(Arc::new(decoder))),
            closed: AtomicBool::new(false),
            text: parts.text,
            stream: parts.stream,
            info: parts.info,
            eos: parts.eos,
            caches: parts.caches,
            prefixes: Prefixes::new(parts.slots),
            draft_prefixes: Prefixes::new(parts.slots),
            draft: Mutex::new(parts.draft.map(Arc::from)),
            identity: parts.identity,
            // Differs between processes, which may have the same id, and between calls.
            nonce: RandomState::new().hash_one(()),
            sites: Mutex::new(parts.sites),
            adapter: Mutex::new(None),
            passes,
            metrics: Mutex::new(GenerateMetrics::default()),
        }
    }

    /// Runs `f` on this model's device.
    pub fn scope<R>(&self, f: impl FnOnce() -> R) -> R {
        self.stream.scope(f)
    }

    /// Whether it computes on the CPU.
    pub fn is_on_cpu(&self) -> bool {
        self.stream.device().kind() == DeviceKind::Cpu
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

    /// What the model is.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Tokens that end a reply.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.eos
    }

    /// Which caches requests get.
    pub fn cache_options(&self) -> &CacheOptions {
        &self.caches
    }

    /// What finished requests have computed.
    pub fn prefixes(&self) -> &Prefixes {
        &self.prefixes
    }

    /// What the model that guesses has computed in finished requests.
    pub fn draft_prefixes(&self) -> &Prefixes {
        &self.draft_prefixes
    }

    /// The model that guesses, where there is one.
    pub fn draft(&self) -> Option<Arc<dyn Decoder>> {
        locked(&self.draft).clone()
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &TextPipeline {
        &self.text
    }

    /// Tells what this model computes from what others do, for files, and the adapter's epoch.
    /// Adapters in memory have no name, so that files of one are only for this engine, and only
    /// until it changes.
    fn identity(&self) -> (String, u64) {
        // Held, so that no change comes in between.
        let adapter = locked(&self.adapter);
        let epoch = self.prefixes.epoch();
        let identity = match &*adapter {
            None => self.identity.clone(),
            Some(_) => format!("{}+{:016x}.{epoch}", self.identity, self.nonce),
        };
        (identity, epoch)
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
            let tokenizer = self.text.tokenizer();
            let mut ids = tokenizer.encode_plain("\n")?;
            // A vocabulary without a new line gives the token for what is unknown.
            ids.retain(|&id| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                bytes.contains(&b'\n')
            });
            ids
        } else {
            Vec::new()
        };
        let context = Context {
            vocabulary: self.info.vocab_size,
            eos: &self.eos,
            newline: &newline,
            grammars: Some(&self.grammars),
            on_cpu: self.is_on_cpu(),
        };
        self.scope(|| Sampler::new(options, prompt, &context))
    }

    /// Log-probabilities of one token as the contract has them.
    pub fn logprobs(&self, chosen: f32, top: Vec<(u32, f32)>) -> TokenLogprobs {
        let tokenizer = self.text.tokenizer();
        let top = top
            .into_iter()
            .map(|(id, logprob)| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                let text = String::from_utf8_lossy(&bytes).into_owned();
                TopLogprob::new(id, text, logprob.max(IMPOSSIBLE)).with_bytes(bytes)
            })
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
        // Positions are counted in 32 bits by MLX; the configured context is advice, not a limit.
        if i32::try_from(ids.len()).is_err() {
            return bad(format!("the prompt has {} tokens; shorten it", ids.len()));
        }
        Ok(())
    }

    /// The ids of a prompt.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
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

    /// What its requests share.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    fn start(&self, ids: Vec<u32>, options: &GenerateOptions) -> Result<Generation> {
        // Before they are cloned, which recurses over a schema.
        options.validate()?;
        Generation::new(Arc::clone(&self.engine), ids, options.clone())
    }

    /// Runs requests together, at most [`TOGETHER`] at a time, and returns what came of each.
    fn run_batch(&self, prompts: &[Prompt], options: &GenerateOptions) -> Result<Vec<BatchResult>> {
        options.validate()?;
        let mut batch = Batch::new(Arc::clone(&self.engine));
        let mut results: Vec<Option<BatchResult>> = vec![None; prompts.len()];
        let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); prompts.len()];
        // Which prompt a row is.
        let mut places = BTreeMap::new();
        let mut encoded: Vec<(usize, Result<Vec<u32>>)> = prompts
            .iter()
            .map(|prompt| self.engine.encode_prompt(prompt))
            .enumerate()
            .collect();
        // Like lengths go together; results are put back in their places.
        encoded.sort_by_key(|(_, ids)| ids.as_ref().map_or(0, Vec::len));
        let mut waiting = encoded.into_iter();
        loop {
            while batch.len() < TOGETHER
                && let Some((i, ids)) = waiting.next()
            {
                match ids.and_then(|ids| batch.add_ids(ids, options)) {
                    Ok(row) => {
                        places.insert(row, i);
                    }
                    Err(e) if e.kind() == ErrorKind::Closed => return Err(e),
                    Err(e) => results[i] = Some(BatchResult::failed(Vec::new(), e)),
                }
            }
            if batch.is_empty() {
                break;
            }
            for event in batch.step()? {
                let Some(&i) = places.get(&event.row()) else {
                    continue;
                };
                match event {
                    BatchEvent::Token { token, .. } => tokens[i].push(token),
                    BatchEvent::Done { reason, .. } => {
                        let tokens = std::mem::take(&mut tokens[i]);
                        results[i] = Some(BatchResult::new(tokens, Some(reason)));
                    }
                    BatchEvent::Failed { error, .. } => {
                        let tokens = std::mem::take(&mut tokens[i]);
                        results[i] = Some(BatchResult::failed(tokens, error));
                    }
                    _ => {}
                }
            }
        }
        let lost = || Error::new(ErrorKind::Engine, "the request was lost");
        Ok(results
            .into_iter()
            .map(|r| r.unwrap_or_else(|| BatchResult::failed(Vec::new(), lost())))
            .collect())
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

    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        // Before they are changed: what the caller asked for must make sense.
        options.validate()?;
        self.engine.check_open()?;
        let options = options
            .clone()
            .with_max_tokens(1)
            .with_min_tokens(0)
            .with_stop(Vec::new())
            .with_stop_tokens(Vec::new())
            .with_ignore_eos(true)
            .with_cache_prompt(false)
            .with_logits(return_logits);
        self.run_batch(prompts, &options)?
            .into_iter()
            .map(|result| {
                if let Some(error) = result.error {
                    return Err(error);
                }
                let mut token = result
                    .tokens
                    .into_iter()
                    .next()
                    .ok_or_else(|| Error::new(ErrorKind::Engine, "the model gave no token"))?;
                let logits = token.logits.take().map(|l| l.to_vec());
                Ok(ClassifyResult::new(token, logits))
            })
            .collect()
    }

    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>> {
        self.engine.check_open()?;
        self.run_batch(prompts, options)
    }

    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        self.engine.check_open()?;
        Ok(Box::new(Batch::new(Arc::clone(&self.engine))))
    }

    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        Some(self)
    }

    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        Some(self)
    }

    fn as_prompt_cache(&self) -> Option<&dyn PromptCacheModel> {
        Some(self)
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
        locked(&self.engine.draft).take();
        // It stays where it is: steps that run must not go on without it. It goes with the weights.
        locked(&self.engine.adapter).take();
        locked(&self.engine.sites).clear();
        self.engine.prefixes.close();
        self.engine.draft_prefixes.close();
        mlx_rs_core::memory::clear_cache().map_err(engine_error("close"))
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }

    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        Some(self)
    }
}

impl PromptCacheModel for MlxModel {
    fn save_prompt_cache(&self, prompt: &Prompt, path: &Path) -> Result<usize> {
        self.save_prompt_cache_until(prompt, path, &Interrupt::new())
    }

    fn save_prompt_cache_until(
        &self,
        prompt: &Prompt,
        path: &Path,
        interrupt: &Interrupt,
    ) -> Result<usize> {
        let engine = &self.engine;
        let ids = engine.encode_prompt(prompt)?;
        engine.check_prompt(&ids)?;
        let decoder = engine.decoder()?;
        let (identity, epoch) = engine.identity();
        engine.scope(|| {
            let caches = decoder.new_caches(engine.cache_options());
            let mut caches = caches.for_sequence(ids.len());
            let step = GenerateOptions::default().prefill_step_size;
            let check = || engine.check_open().and_then(|()| interrupt.check());
            check()?;
            forward_prompt(decoder.as_ref(), &ids, &mut caches, step, &mut |_| check())?;
            cache::settle(&caches).map_err(engine_error("prefill"))?;
            check()?;
            if engine.prefixes.epoch() != epoch {
                return Err(Error::new(
                    ErrorKind::Engine,
                    "the adapter changed while the prompt was computed; nothing was saved, call again",
                ));
            }
            cache::file::save(path, &identity, &ids, &caches)?;
            let n = ids.len();
            engine.prefixes.put(epoch, ids, caches);
            Ok(n)
        })
    }

    fn load_prompt_cache(&self, path: &Path) -> Result<Vec<u32>> {
        let engine = &self.engine;
        let decoder = engine.decoder()?;
        engine.scope(|| {
            let (identity, epoch) = engine.identity();
            let empty = decoder.new_caches(engine.cache_options());
            let (tokens, caches) = cache::file::load(path, &identity, empty)?;
            engine.check_prompt(&tokens)?;
            engine.prefixes.put(epoch, tokens.clone(), caches);
            Ok(tokens)
        })
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

    fn encode_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Vec<u32>> {
        self.engine
            .text
            .encode_chat(messages, add_generation_prompt)
    }

    fn encode_chat_with(&self, prompt: &ChatPrompt) -> Result<Vec<u32>> {
        self.engine.text.encode_chat_prompt(prompt)
    }

    fn render_chat_with(&self, prompt: &ChatPrompt) -> Result<String> {
        self.engine.text.render_chat_prompt(prompt)
    }

    fn logits(&self, prompt: &Prompt, all: bool) -> Result<LogitsOutput> {
        self.logits_until(prompt, all, &Interrupt::new())
    }

    fn logits_until(
        &self,
        prompt: &Prompt,
        all: bool,
        interrupt: &Interrupt,
    ) -> Result<LogitsOutput> {
        let engine = &self.engine;
        let ids = engine.encode_prompt(prompt)?;
        engine.check_prompt(&ids)?;
        let decoder = engine.decoder()?;
        let logits = engine.scope(|| {
            let caches = decoder.new_caches(engine.cache_options());
            let mut caches = caches.for_sequence(ids.len());
            let mut parts = Vec::new();
            let step = GenerateOptions::default().prefill_step_size;
            let check = || engine.check_open().and_then(|()| interrupt.check());
            check()?;
            if all {
                for tokens in ids.chunks(step) {
                    check()?;
                    let part = forward(decoder.as_ref(), tokens, &mut caches, Positions::All)
                        .and_then(|part| eval([&part]).map(|()| part))
                        .map_err(engine_error("logits"))?;
                    parts.push(part);
                }
            } else {
                parts.push(forward_prompt(
                    decoder.as_ref(),
                    &ids,
                    &mut caches,
                    step,
                    &mut |_| check(),
                )?);
            }
            concatenate(&parts.iter().collect::<Vec<_>>(), 1)
                .and_then(|logits| logits.to_f32_vec())
                .map_err(engine_error("logits"))
        })?;
        let shape = vec![if all { ids.len() } else { 1 }, engine.info.vocab_size];
        Ok(LogitsOutput::new(ids, shape, logits))
    }

    fn token_logprobs(&self, prompt: &Prompt) -> Result<Vec<f32>> {
        self.token_logprobs_until(prompt, &Interrupt::new())
    }

    fn token_logprobs_until(&self, prompt: &Prompt, interrupt: &Interrupt) -> Result<Vec<f32>> {
        let ids = self.engine.encode_prompt(prompt)?;
        self.engine.check_prompt(&ids)?;
        crate::inspect::token_logprobs(&self.engine, &ids, interrupt)
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.engine.eos.clone()
    }
}
