//! What all requests of one model share: weights, caches, prefixes and the adapter. It answers no
//! contract; that is `model.rs`'s part.

mod adapters;
pub mod forward;

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inference::{
    Error, ErrorKind, FeedForwardPlan, GenerateMetrics, GenerateOptions, ModelInfo, Prepared,
    Prompt, Result, TokenLogprobs, TopLogprob,
};
use mlx_rs_core::{DeviceKind, Stream};

use crate::adapter::{Adapted, LoraAdapter};
use crate::arch::Decoder;
use crate::cache::{CacheOptions, Prefixes};
use crate::error::engine as engine_error;
use crate::nn::adapter::{ParamSlot, Passes};
use crate::sample::{Compiler, Context, Sampler};
use crate::sentence::Sentence;
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
    caches: CacheOptions,
    prefixes: Prefixes,
    /// The same for the model that guesses.
    draft_prefixes: Prefixes,
    /// Guesses tokens; taken away by `close`.
    draft: Mutex<Option<Arc<dyn Decoder>>>,
    identity: String,
    source: PathBuf,
    /// Tells this engine from all others, for files that no other can use.
    nonce: u64,
    /// Where adapters can stand; taken away by `close`, as they hold the weights.
    param_slots: Mutex<Vec<Arc<ParamSlot>>>,
    /// The adapter there is.
    adapter: Mutex<Option<LoraAdapter>>,
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
    /// Where it was loaded from.
    pub source: PathBuf,
    /// Where adapters can stand.
    pub param_slots: Vec<Arc<ParamSlot>>,
    /// Whether this process has a part of the model only.
    pub is_part: bool,
    /// Whether requests go on from what others have computed. The stages of a pipeline do not:
    /// their caches differ in how they can be cut, and all must start at the same token.
    pub shares_prefixes: bool,
    /// How feed-forward parts are computed.
    pub feed_forward: FeedForwardPlan,
    /// Whether any of them is computed another way than it was trained.
    pub is_routed: bool,
    /// Whether all of them as they were trained are in memory.
    pub has_dense: bool,
    /// How vectors of texts are made.
    pub sentence: Sentence,
}

/// A mutex of plain data is usable even after a panic elsewhere.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
            source: parts.source,
            // Differs between processes, which may have the same id, and between calls.
            nonce: RandomState::new().hash_one(()),
            param_slots: Mutex::new(parts.param_slots),
            adapter: Mutex::new(None),
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

    /// Whether this process has a part of the model only, and others the rest. Heads and keys are
    /// not all here then.
    pub fn is_part(&self) -> bool {
        self.is_part
    }

    /// Whether requests may go on from what others of a batch have computed.
    pub fn shares_prefixes(&self) -> bool {
        self.shares_prefixes
    }

    /// Whether it computes on the CPU.
    pub fn is_on_cpu(&self) -> bool {
        self.stream.device().kind() == DeviceKind::Cpu
    }

    /// How feed-forward parts are computed.
    pub fn feed_forward(&self) -> &FeedForwardPlan {
        &self.feed_forward
    }

    /// Whether any feed-forward part is computed another way than it was trained.
    pub fn is_routed(&self) -> bool {
        self.is_routed
    }

    /// Whether all feed-forward parts as they were trained are in memory.
    pub fn has_dense(&self) -> bool {
        self.has_dense
    }

    /// How vectors of texts are made.
    pub fn sentence(&self) -> &Sentence {
        &self.sentence
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

    /// Where it was loaded from.
    pub fn source(&self) -> &Path {
        &self.source
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
    pub fn identity(&self) -> (String, u64) {
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

    /// Compiles the grammar that `options` may have, beside what runs: it uses no array.
    ///
    /// # Errors
    /// As [`Compiler::prepare`].
    pub fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        Ok(match &options.constraints.grammar {
            Some(grammar) => Prepared::new(self.grammars.prepare(grammar)?),
            None => Prepared::default(),
        })
    }

    /// The sampling that a request's options describe.
    pub fn sampler(&self, options: &GenerateOptions, prompt: &[u32]) -> Result<Sampler> {
        let newline = if options.sampling.xtc_probability > 0.0 {
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
        self.scope(|| Sampler::of_valid(options, prompt, &context))
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

    /// The figures of the request that ended last.
    pub fn metrics(&self) -> GenerateMetrics {
        locked(&self.metrics).clone()
    }

    /// Frees the weights once no request runs, and what finished requests left.
    ///
    /// # Errors
    /// When memory cannot be returned.
    pub fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        locked(&self.decoder).take();
        locked(&self.draft).take();
        // It stays where it is: steps that run must not go on without it. It goes with the weights.
        locked(&self.adapter).take();
        locked(&self.param_slots).clear();
        self.prefixes.close();
        self.draft_prefixes.close();
        mlx_rs_core::memory::clear_cache().map_err(engine_error("close"))
    }
}
