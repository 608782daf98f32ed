//! The state that all requests of one model share: weights, caches, computed prompts and the
//! adapter. `model.rs` implements the public traits on top of it.

mod adapters;
pub mod forward;
mod tier;

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use inference::{
    Error, ErrorKind, FeedForwardPlan, GenerateMetrics, GenerateOptions, ModelInfo, Prepared,
    Prompt, Result, TokenLogprobs, TopLogprob,
};
use mlx_rs_core::{DeviceKind, Stream};
use parking_lot::Mutex;

use crate::adapter::{Adapted, LoraAdapter, NamedAdapters, Seen};
use crate::arch::Decoder;
use crate::cache::tier::Tier;
use crate::cache::{CacheOptions, Prefixes};
use crate::error::engine as engine_error;
use crate::nn::adapter::{ParamSlot, Passes};
use crate::sample::{Compiler, Context, Sampler};
use crate::sentence::Sentence;
use crate::text::{Detokenizer, TextPipeline};

/// The log-probability reported for an impossible token, as in OpenAI's API. JSON has no infinity.
const IMPOSSIBLE: f32 = -9999.0;

/// State shared by all requests of one model.
pub struct Engine {
    /// `close` removes the decoder, so its weights are freed when the last request ends.
    decoder: Mutex<Option<Arc<dyn Decoder>>>,
    closed: AtomicBool,
    text: TextPipeline,
    stream: Stream,
    info: ModelInfo,
    eos: Vec<u32>,
    caches: CacheOptions,
    prefixes: Prefixes,
    /// Caches of the draft model's finished requests.
    draft_prefixes: Prefixes,
    /// The draft model; `close` removes it.
    draft: Mutex<Option<Arc<dyn Decoder>>>,
    identity: String,
    source: PathBuf,
    /// A random id of this engine. Files with this id are valid only for this engine.
    nonce: u64,
    /// The slots for adapters. They reference the weights, so `close` removes them.
    param_slots: Mutex<Vec<Arc<ParamSlot>>>,
    /// The current adapter.
    adapter: Mutex<Option<LoraAdapter>>,
    /// The hash of the adapter's files, and the epoch that began when they were loaded.
    adapter_files: Mutex<Option<(u64, String)>>,
    /// The adapters that requests select by name.
    named_adapters: Mutex<NamedAdapters>,
    /// The caches of computed prompts on disk.
    tier: Option<Tier>,
    passes: Arc<Passes>,
    metrics: Mutex<GenerateMetrics>,
    grammars: Compiler,
    is_part: bool,
    shares_prefixes: bool,
    feed_forward: FeedForwardPlan,
    is_routed: bool,
    has_dense: bool,
    sentence: Sentence,
}

/// The arguments of [`Engine::new`].
pub struct Parts {
    /// The network.
    pub decoder: Box<dyn Decoder>,
    /// Tokenizer and chat template.
    pub text: TextPipeline,
    /// The stream on which the model computes.
    pub stream: Stream,
    /// The model's properties.
    pub info: ModelInfo,
    /// Tokens that end a reply.
    pub eos: Vec<u32>,
    /// The options of the caches of requests.
    pub caches: CacheOptions,
    /// The number of finished requests whose caches are kept.
    pub slots: usize,
    /// The memory limit of these caches in bytes; `None` for the default.
    pub prompt_cache_bytes: Option<u64>,
    /// The draft model.
    pub draft: Option<Box<dyn Decoder>>,
    /// The identity of this model.
    pub identity: String,
    /// The path from which the model was loaded.
    pub source: PathBuf,
    /// The slots for adapters.
    pub param_slots: Vec<Arc<ParamSlot>>,
    /// Whether this process has only a share of the model.
    pub is_part: bool,
    /// Whether requests reuse caches of other requests. False for pipeline stages: all stages must
    /// start at the same token, but not all of their caches can be truncated to the same position.
    pub shares_prefixes: bool,
    /// How the feed-forward blocks are computed.
    pub feed_forward: FeedForwardPlan,
    /// Whether any feed-forward block is not dense.
    pub is_routed: bool,
    /// Whether all feed-forward weights are in memory, so that dense computation is possible.
    pub has_dense: bool,
    /// How the model embeds texts.
    pub sentence: Sentence,
}

impl Engine {
    /// Creates an engine.
    pub fn new(parts: Parts) -> Self {
        let tokenizer = Arc::clone(parts.text.tokenizer());
        let passes = Arc::new(Passes::default());
        let decoder = Adapted {
            decoder: Arc::from(parts.decoder),
            seen: Seen::Own(Arc::clone(&passes)),
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
            prefixes: Prefixes::new(parts.slots, parts.prompt_cache_bytes),
            draft_prefixes: Prefixes::new(parts.slots, parts.prompt_cache_bytes),
            draft: Mutex::new(parts.draft.map(Arc::from)),
            identity: parts.identity,
            source: parts.source,
            // Processes may have equal ids, so the nonce is random for each call.
            nonce: RandomState::new().hash_one(()),
            param_slots: Mutex::new(parts.param_slots),
            adapter: Mutex::new(None),
            adapter_files: Mutex::new(None),
            named_adapters: Mutex::default(),
            tier: None,
            passes,
            metrics: Mutex::new(GenerateMetrics::default()),
            is_part: parts.is_part,
            shares_prefixes: parts.shares_prefixes,
            feed_forward: parts.feed_forward,
            is_routed: parts.is_routed,
            has_dense: parts.has_dense,
            sentence: parts.sentence,
        }
    }

    /// Runs `f` on this model's device.
    pub fn scope<R>(&self, f: impl FnOnce() -> R) -> R {
        self.stream.scope(f)
    }

    /// Whether this process has only a share of the model. Its layers then have only some of the
    /// heads and keys.
    pub fn is_part(&self) -> bool {
        self.is_part
    }

    /// Whether requests may reuse caches of other requests.
    pub fn shares_prefixes(&self) -> bool {
        self.shares_prefixes
    }

    /// Whether the engine computes on the CPU.
    pub fn is_on_cpu(&self) -> bool {
        self.stream.device().kind() == DeviceKind::Cpu
    }

    /// How the feed-forward blocks are computed.
    pub fn feed_forward(&self) -> &FeedForwardPlan {
        &self.feed_forward
    }

    /// Whether any feed-forward block is not dense.
    pub fn is_routed(&self) -> bool {
        self.is_routed
    }

    /// Whether all feed-forward weights are in memory, so that dense computation is possible.
    pub fn has_dense(&self) -> bool {
        self.has_dense
    }

    /// How the model embeds texts.
    pub fn sentence(&self) -> &Sentence {
        &self.sentence
    }

    /// Fails if the model is closed.
    pub fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Closed,
                "the model was closed; load it again",
            ));
        }
        Ok(())
    }

    /// Returns the network; an error if the model is closed.
    pub fn decoder(&self) -> Result<Arc<dyn Decoder>> {
        self.check_open()?;
        self.decoder
            .lock()
            .clone()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "the model was closed; load it again"))
    }

    /// Whether the network is an encoder, which predicts no next token.
    ///
    /// # Errors
    /// If the model is closed.
    pub fn is_encoder(&self) -> Result<bool> {
        Ok(self.decoder()?.encoder().is_some())
    }

    /// The model's properties.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Tokens that end a reply.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.eos
    }

    /// The path from which the model was loaded.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// The options of the caches of requests.
    pub fn cache_options(&self) -> &CacheOptions {
        &self.caches
    }

    /// Caches of finished requests.
    pub fn prefixes(&self) -> &Prefixes {
        &self.prefixes
    }

    /// The draft model's caches of finished requests.
    pub fn draft_prefixes(&self) -> &Prefixes {
        &self.draft_prefixes
    }

    /// The draft model, if there is one.
    pub fn draft(&self) -> Option<Arc<dyn Decoder>> {
        self.draft.lock().clone()
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &TextPipeline {
        &self.text
    }

    /// Returns the identity of the model's computation and the adapter's epoch. The identity is
    /// written to files. An adapter in memory has no name, so files made with it are valid only for
    /// this engine and until the adapter changes.
    pub fn identity(&self) -> (String, u64) {
        // The lock keeps the adapter from changing between the two reads.
        let adapter = self.adapter.lock();
        let epoch = self.prefixes.epoch();
        let identity = match &*adapter {
            None => self.identity.clone(),
            Some(_) => format!("{}+{:016x}.{epoch}", self.identity, self.nonce),
        };
        (identity, epoch)
    }

    /// Stores the metrics of the last finished request.
    pub fn publish(&self, metrics: GenerateMetrics) {
        *self.metrics.lock() = metrics;
    }

    /// A new detokenizer for one request.
    pub fn detokenizer(&self, stop: &[String]) -> Detokenizer {
        self.text.detokenizer(stop)
    }

    /// Compiles the grammar of `options`, if any. Uses no arrays, so it may run during forward
    /// passes.
    ///
    /// # Errors
    /// The errors of [`Compiler::prepare`].
    pub fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        Ok(match &options.constraints.grammar {
            Some(grammar) => Prepared::new(self.grammars.prepare(grammar)?),
            None => Prepared::default(),
        })
    }

    /// Creates the sampler for a request's options.
    pub fn sampler(&self, options: &GenerateOptions, prompt: &[u32]) -> Result<Sampler> {
        let newline = if options.sampling.xtc_probability > 0.0 {
            let tokenizer = self.text.tokenizer();
            let mut ids = tokenizer.encode_plain("\n")?;
            // In a vocabulary without a newline token, encoding a newline returns the unknown
            // token.
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
        self.scope(|| Sampler::of_valid(options, prompt, &context))
    }

    /// Converts the log-probabilities of one token to the public type.
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

    /// Refuses invalid prompts.
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
        // MLX counts positions in 32 bits. The configured context length is only a recommendation,
        // so longer prompts are accepted.
        if i32::try_from(ids.len()).is_err() {
            return bad(format!("the prompt has {} tokens; shorten it", ids.len()));
        }
        Ok(())
    }

    /// The token ids of a prompt.
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

    /// The metrics of the last finished request.
    pub fn metrics(&self) -> GenerateMetrics {
        self.metrics.lock().clone()
    }

    /// Closes the model: drops kept caches, and frees the weights once no request runs. Waits until
    /// all pending caches are written to disk.
    ///
    /// # Errors
    /// If memory cannot be returned.
    pub fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        self.decoder.lock().take();
        self.draft.lock().take();
        // The model keeps the adapter's values, because running steps need them. They are freed
        // together with the weights.
        self.adapter.lock().take();
        self.named_adapters.lock().clear();
        self.param_slots.lock().clear();
        self.prefixes.close();
        self.draft_prefixes.close();
        if let Some(tier) = &self.tier {
            tier.close();
        }
        mlx_rs_core::memory::clear_cache().map_err(engine_error("close"))
    }
}
