//! How to load a model and how to generate: plain structs with defaults, chained setters and one
//! validation.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::cancel::{self, CancelToken, Interrupt};
use crate::error::{Error, ErrorKind, Result};
use crate::sampling::{Grammar, LogitsProcessorFactory};

/// Chained setters: `with_x(value)`.
macro_rules! setters {
    ($($(#[$doc:meta])* $with:ident($field:ident: $ty:ty);)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $with(mut self, value: $ty) -> Self {
                self.$field = value.into();
                self
            }
        )*
    };
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

/// The type of number a model computes in.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeType {
    /// Single precision.
    Float32,
    /// Half precision.
    Float16,
    /// Brain float.
    BFloat16,
}

impl ComputeType {
    /// `float32`, `float16` or `bfloat16`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ComputeType::Float32 => "float32",
            ComputeType::Float16 => "float16",
            ComputeType::BFloat16 => "bfloat16",
        }
    }
}

impl std::fmt::Display for ComputeType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ComputeType {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "float32" | "f32" => Ok(ComputeType::Float32),
            "float16" | "f16" => Ok(ComputeType::Float16),
            "bfloat16" | "bf16" => Ok(ComputeType::BFloat16),
            _ => invalid(format!(
                "compute type `{s}` is not one of float32, float16, bfloat16"
            )),
        }
    }
}

/// How to load a model.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadOptions {
    /// The backend's name; `None` lets the registry choose.
    pub backend: Option<String>,
    /// How many positions each layer remembers; `None` remembers all. A longer prompt or reply goes on,
    /// and the oldest positions (but the first few) are forgotten.
    pub context_len: Option<usize>,
    /// Layers to put on the GPU; `None` or -1 means all. A backend with one device ignores it.
    pub gpu_layers: Option<i32>,
    /// Requests to prepare for at a time: what so many of the last ones computed is remembered, for
    /// prompts that begin alike. `None` is one.
    pub parallel_slots: Option<usize>,
    /// A directory with a trained adapter to apply.
    pub adapter_path: Option<PathBuf>,
    /// Bits of each number in the key/value cache, such as 8 or 4; `None` keeps the type of the
    /// computation. Layers that look back a bounded way are not packed.
    pub kv_bits: Option<u32>,
    /// Numbers of the cache that share a scale: 32, 64 or 128.
    pub kv_group_size: u32,
    /// The cache is packed once it holds more than so many positions; 0 packs from the first on.
    pub quantized_kv_start: usize,
    /// A smaller model with the same vocabulary that guesses tokens, which the model then checks
    /// several at a time; not for requests that run together, which fill a forward pass themselves.
    pub draft_model: Option<PathBuf>,
    /// The type to compute in; `None` lets the backend choose for its device.
    pub dtype: Option<ComputeType>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            backend: None,
            context_len: None,
            gpu_layers: None,
            parallel_slots: None,
            adapter_path: None,
            kv_bits: None,
            kv_group_size: 64,
            quantized_kv_start: 0,
            draft_model: None,
            dtype: None,
        }
    }
}

impl LoadOptions {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how many positions each layer remembers.
        with_context_len(context_len: impl Into<Option<usize>>);
        /// Sets the layers to put on the GPU.
        with_gpu_layers(gpu_layers: impl Into<Option<i32>>);
        /// Sets how many requests to prepare for.
        with_parallel_slots(parallel_slots: impl Into<Option<usize>>);
        /// Sets the type to compute in.
        with_dtype(dtype: impl Into<Option<ComputeType>>);
        /// Sets the bits of each number in the cache.
        with_kv_bits(kv_bits: impl Into<Option<u32>>);
        /// Sets how many numbers of the cache share a scale.
        with_kv_group_size(kv_group_size: u32);
        /// Sets how many positions the cache holds before it is packed.
        with_quantized_kv_start(quantized_kv_start: usize);
        /// Sets the model that guesses.
        with_draft_model(draft_model: impl Into<Option<PathBuf>>);
    }

    /// Sets the backend's name.
    #[must_use]
    pub fn with_backend(mut self, name: impl Into<String>) -> Self {
        self.backend = Some(name.into());
        self
    }

    /// Refuses every option that is neither as by default nor in `honored`, by the names of the fields,
    /// as [`GenerateOptions::refuse_all_but`] does. Not the backend's name, and not `gpu_layers`, which a
    /// backend with one device ignores.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] naming `backend` and the option.
    pub fn refuse_all_but(&self, backend: &str, honored: &[&str]) -> Result<()> {
        let others = ["backend", "gpu_layers"];
        refuse(self, &Self::default(), backend, &[honored, &others])
    }

    /// Sets the adapter's directory.
    #[must_use]
    pub fn with_adapter_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.adapter_path = Some(path.into());
        self
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the field, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        if self.context_len == Some(0) {
            return invalid(String::from("context_len is 0; it must be at least 1"));
        }
        if self.parallel_slots == Some(0) {
            return invalid(String::from("parallel_slots is 0; it must be at least 1"));
        }
        if self
            .adapter_path
            .as_ref()
            .is_some_and(|p| p.as_os_str().is_empty())
        {
            return invalid(String::from(
                "adapter_path is empty; it must name a directory, or be left out",
            ));
        }
        if let Some(bits) = self.kv_bits
            && !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8)
        {
            return invalid(format!("kv_bits is {bits}; it must be 2, 3, 4, 5, 6 or 8"));
        }
        if !matches!(self.kv_group_size, 32 | 64 | 128) {
            return invalid(format!(
                "kv_group_size is {}; it must be 32, 64 or 128",
                self.kv_group_size
            ));
        }
        if self.kv_bits.is_some() && self.context_len.is_some() {
            return invalid(String::from(
                "kv_bits and context_len do not go together: a bounded cache is not packed (nor is it by \
                 mlx-lm); leave one of them out",
            ));
        }
        match self.gpu_layers {
            Some(n) if n < -1 => {
                invalid(format!("gpu_layers is {n}; it must be -1 (all), 0 or more"))
            }
            _ => Ok(()),
        }
    }
}

fn unsupported<T>(backend: &str, option: &str) -> Result<T> {
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("backend `{backend}` does not have the option {option}; leave it out"),
    ))
}

/// Refuses the first field of `options` that differs from `usual` and is in none of `known`.
fn refuse<T: Serialize>(options: &T, usual: &T, backend: &str, known: &[&[&str]]) -> Result<()> {
    let fields = |options: &T| match serde_json::to_value(options) {
        Ok(serde_json::Value::Object(fields)) => Ok(fields),
        // A number that JSON does not have, which no valid option is.
        other => invalid(format!("the options cannot be compared: {other:?}")),
    };
    let usual = fields(usual)?;
    for (name, value) in fields(options)? {
        let known = known.iter().any(|names| names.contains(&name.as_str()));
        if !known && usual.get(&name) != Some(&value) {
            return unsupported(backend, &name);
        }
    }
    Ok(())
}

/// The most alternatives that [`GenerateOptions::logprobs`] may ask for.
const MAX_LOGPROBS: usize = 1024;

/// The most tokens guessed at a time.
const MAX_DRAFT: usize = 64;

/// Is told of a prompt's progress: positions done, and of how many. It is called on the thread that
/// generates and should return soon.
#[derive(Clone)]
pub struct Progress(Arc<ProgressFn>);

type ProgressFn = dyn Fn(usize, usize) + Send + Sync;

impl Progress {
    /// Calls `f(done, total)`.
    pub fn new(f: impl Fn(usize, usize) + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// Says that `done` of `total` positions are done.
    pub fn report(&self, done: usize, total: usize) {
        (self.0)(done, total);
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

/// How to generate.
///
/// What changes logits applies in this order: repetition, presence and frequency penalties, logit
/// bias, logits processors, banned tokens, `min_tokens`, grammar. What chooses among tokens follows:
/// top-p, min-p, XTC, top-k, temperature, draw. At temperature 0 the greatest logit is taken and
/// nothing is filtered.
#[non_exhaustive]
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateOptions {
    /// The most tokens to produce; 0 produces none and ends with
    /// [`FinishReason::Length`](crate::FinishReason::Length).
    pub max_tokens: usize,
    /// Randomness: 0 takes the most probable token, 1 draws from the model's distribution.
    pub temperature: f32,
    /// Draw among so many most probable tokens; 0 is off.
    pub top_k: usize,
    /// Draw among the most probable tokens that together exceed this probability; 1 is off.
    pub top_p: f32,
    /// Draw among tokens at least this fraction as probable as the best; 0 is off.
    pub min_p: f32,
    /// Factor against tokens that stand already; 1 is off, above 1 discourages.
    pub repeat_penalty: f32,
    /// How many tokens back the penalty looks; 0 is all.
    pub repeat_window: usize,
    /// Taken off the logits of tokens that the reply holds already; 0 is off.
    pub presence_penalty: f32,
    /// Taken off a token's logit for each time that the reply holds it; 0 is off.
    pub frequency_penalty: f32,
    /// How often to leave out the most probable tokens (XTC); 0 is never, 1 at each token.
    pub xtc_probability: f32,
    /// XTC leaves out all tokens at least this probable, but the least probable of them.
    pub xtc_threshold: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tokens that are never drawn.
    pub banned_tokens: Vec<u32>,
    /// Tokens that the reply begins with, whatever the model holds of them. They count as generated.
    pub forced_tokens: Vec<u32>,
    /// The reply has at least so many tokens: before them, no token is drawn that would end it.
    pub min_tokens: usize,
    /// What the reply must look like.
    pub grammar: Option<Grammar>,
    /// Return with each token its log-probability and those of so many most probable tokens.
    pub logprobs: Option<usize>,
    /// What changes the logits, in this order.
    #[serde(skip)]
    pub logits_processors: Vec<LogitsProcessorFactory>,
    /// Tokens that end the reply, besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the reply; they are not part of it.
    pub stop: Vec<String>,
    /// Go on after the model's end-of-text token.
    pub ignore_eos: bool,
    /// Seed of the draws; the same seed gives the same reply. `None` differs from call to call.
    pub seed: Option<u64>,
    /// Return the logits with each token.
    pub logits: bool,
    /// Positions of the prompt in one forward pass; the request can be cancelled between them.
    pub prefill_step_size: usize,
    /// Reuse what earlier requests computed of the prompt's beginning, and remember this one. Requests that run together
    /// may share what they begin with whatever this says.
    pub cache_prompt: bool,
    /// Tokens to guess at a time, where the model was loaded with a draft model or `prompt_lookup` is
    /// set; 0 guesses none. The reply is the same.
    pub num_draft_tokens: usize,
    /// Without a draft model: guess what followed the last so many tokens where they stood before; 0 is
    /// off.
    pub prompt_lookup: usize,
    /// Told of the prompt's progress.
    #[serde(skip)]
    pub progress: Option<Progress>,
    /// Stops the request from another thread.
    #[serde(skip)]
    pub cancel: Option<CancelToken>,
    /// Stops the request at a time.
    #[serde(skip)]
    pub deadline: Option<Instant>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            logit_bias: BTreeMap::new(),
            banned_tokens: Vec::new(),
            forced_tokens: Vec::new(),
            min_tokens: 0,
            grammar: None,
            logprobs: None,
            logits_processors: Vec::new(),
            stop_tokens: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
            seed: None,
            logits: false,
            prefill_step_size: 512,
            cache_prompt: true,
            num_draft_tokens: 3,
            prompt_lookup: 0,
            progress: None,
            cancel: None,
            deadline: None,
        }
    }
}

impl GenerateOptions {
    /// The defaults: 256 tokens, greedy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets the most tokens to produce.
        with_max_tokens(max_tokens: usize);
        /// Sets the randomness; 0 is greedy.
        with_temperature(temperature: f32);
        /// Sets how many most probable tokens to draw among; 0 is off.
        with_top_k(top_k: usize);
        /// Sets the probability mass to draw among; 1 is off.
        with_top_p(top_p: f32);
        /// Sets the least probability relative to the best; 0 is off.
        with_min_p(min_p: f32);
        /// Sets the factor against repetition; 1 is off.
        with_repeat_penalty(repeat_penalty: f32);
        /// Sets how many tokens back the penalty looks; 0 is all.
        with_repeat_window(repeat_window: usize);
        /// Sets what is taken off the logits of tokens that the reply holds already; 0 is off.
        with_presence_penalty(presence_penalty: f32);
        /// Sets what is taken off a token's logit each time that the reply holds it; 0 is off.
        with_frequency_penalty(frequency_penalty: f32);
        /// Sets how often the most probable tokens are left out; 0 is never.
        with_xtc_probability(xtc_probability: f32);
        /// Sets the probability from which tokens count as most probable for XTC.
        with_xtc_threshold(xtc_threshold: f32);
        /// Sets what is added to the logits of single tokens.
        with_logit_bias(logit_bias: impl Into<BTreeMap<u32, f32>>);
        /// Sets tokens that are never drawn.
        with_banned_tokens(banned_tokens: impl Into<Vec<u32>>);
        /// Sets tokens that the reply begins with.
        with_forced_tokens(forced_tokens: impl Into<Vec<u32>>);
        /// Sets how many tokens the reply has at least.
        with_min_tokens(min_tokens: usize);
        /// Sets what the reply must look like.
        with_grammar(grammar: impl Into<Option<Grammar>>);
        /// Sets how many alternatives come with each token's log-probability; `None` is off.
        with_logprobs(logprobs: impl Into<Option<usize>>);
        /// Sets what changes the logits.
        with_logits_processors(logits_processors: impl Into<Vec<LogitsProcessorFactory>>);
        /// Sets tokens that end the reply.
        with_stop_tokens(stop_tokens: impl Into<Vec<u32>>);
        /// Sets strings that end the reply.
        with_stop(stop: impl Into<Vec<String>>);
        /// Sets whether to go on after the end-of-text token.
        with_ignore_eos(ignore_eos: bool);
        /// Sets the seed of the draws.
        with_seed(seed: impl Into<Option<u64>>);
        /// Sets whether logits come with each token.
        with_logits(logits: bool);
        /// Sets how many positions of the prompt go into one forward pass.
        with_prefill_step_size(prefill_step_size: usize);
        /// Sets whether earlier requests are reused and this one is remembered.
        with_cache_prompt(cache_prompt: bool);
        /// Sets how many tokens are guessed at a time.
        with_num_draft_tokens(num_draft_tokens: usize);
        /// Sets how many tokens are looked up in what stands before.
        with_prompt_lookup(prompt_lookup: usize);
        /// Sets who is told of the prompt's progress.
        with_progress(progress: impl Into<Option<Progress>>);
        /// Sets the flag that stops the request.
        with_cancel(cancel: impl Into<Option<CancelToken>>);
        /// Sets the time that stops the request.
        with_deadline(deadline: impl Into<Option<Instant>>);
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the field, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let Self {
            temperature,
            top_p,
            min_p,
            repeat_penalty,
            ..
        } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return invalid(format!(
                "temperature is {temperature}; it must be 0 (greedy) or a positive number"
            ));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return invalid(format!(
                "top_p is {top_p}; it must be above 0 and at most 1 (off)"
            ));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return invalid(format!(
                "min_p is {min_p}; it must lie between 0 (off) and 1"
            ));
        }
        if !(repeat_penalty.is_finite() && repeat_penalty > 0.0) {
            return invalid(format!(
                "repeat_penalty is {repeat_penalty}; it must be a positive number, 1 is off"
            ));
        }
        for (name, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            if !value.is_finite() {
                return invalid(format!("{name} is {value}; it must be a number, 0 is off"));
            }
        }
        if !(0.0..=1.0).contains(&self.xtc_probability) {
            return invalid(format!(
                "xtc_probability is {}; it must lie between 0 (off) and 1",
                self.xtc_probability
            ));
        }
        if !(0.0..=0.5).contains(&self.xtc_threshold) {
            return invalid(format!(
                "xtc_threshold is {}; it must lie between 0 and 0.5, above which no two tokens are",
                self.xtc_threshold
            ));
        }
        if let Some((id, bias)) = self.logit_bias.iter().find(|(_, b)| !b.is_finite()) {
            return invalid(format!(
                "logit_bias of token {id} is {bias}; it must be a number (banned_tokens forbids one)"
            ));
        }
        if self.min_tokens > self.max_tokens {
            return invalid(format!(
                "min_tokens is {}; it must be at most max_tokens, {}",
                self.min_tokens, self.max_tokens
            ));
        }
        if let Some(n) = self.logprobs.filter(|&n| n > MAX_LOGPROBS) {
            return invalid(format!(
                "logprobs is {n}; at most {MAX_LOGPROBS} alternatives come with a token"
            ));
        }
        if let Some(grammar) = &self.grammar {
            if self.ignore_eos {
                return invalid(String::from(
                    "ignore_eos is set together with a grammar, whose end is the end-of-text token; \
                     set one of them",
                ));
            }
            grammar.validate().map_err(|e| e.context("grammar"))?;
        }
        if self.prefill_step_size == 0 {
            return invalid(String::from(
                "prefill_step_size is 0; it must be at least 1",
            ));
        }
        if self.num_draft_tokens > MAX_DRAFT {
            return invalid(format!(
                "num_draft_tokens is {}; it must be at most {MAX_DRAFT}",
                self.num_draft_tokens
            ));
        }
        if let Some(i) = self.stop.iter().position(String::is_empty) {
            return invalid(format!(
                "stop[{i}] is \"\"; a stop string must not be empty, it would stop at once"
            ));
        }
        Ok(())
    }

    /// Whether the request should end now; engines ask between steps.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] or [`ErrorKind::DeadlineExceeded`].
    pub fn check_interrupt(&self) -> Result<()> {
        cancel::check(self.cancel.as_ref(), self.deadline)
    }

    /// Refuses every option that is neither as by default nor in `honored`, by the names of the fields.
    /// A backend that calls it after [`GenerateOptions::validate`] passes over none of them, those of
    /// later versions included. Options that only change how fast the same reply comes are not refused,
    /// and the cancel token and the deadline are for every backend to honor.
    ///
    /// ```
    /// use inference::{ErrorKind, GenerateOptions};
    ///
    /// let honored = ["max_tokens", "temperature"];
    /// let options = GenerateOptions::new().with_temperature(0.7);
    /// options.refuse_all_but("mine", &honored)?;
    /// let error = options.with_top_k(40).refuse_all_but("mine", &honored).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Unsupported);
    /// # Ok::<(), inference::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] naming `backend` and the option.
    pub fn refuse_all_but(&self, backend: &str, honored: &[&str]) -> Result<()> {
        if !self.logits_processors.is_empty() && !honored.contains(&"logits_processors") {
            return unsupported(backend, "logits_processors");
        }
        const FASTER: [&str; 4] = [
            "prefill_step_size",
            "cache_prompt",
            "num_draft_tokens",
            "prompt_lookup",
        ];
        refuse(self, &Self::default(), backend, &[honored, &FASTER])
    }

    /// What ends the request early, for calls that take no options.
    #[must_use]
    pub fn interrupt(&self) -> Interrupt {
        Interrupt::new()
            .with_cancel(self.cancel.clone())
            .with_deadline(self.deadline)
    }
}

#[cfg(test)]
mod tests;
