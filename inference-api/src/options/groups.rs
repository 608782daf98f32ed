//! The groups of [`GenerateOptions`](super::GenerateOptions). Each group has defaults, chained
//! setters and a check of its own fields. The parent module checks conditions that concern two
//! groups.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::parameter::{Number, Parameter, ParameterRange};
use super::{GenerateOptions, invalid};
use crate::error::Result;
use crate::sampling::{Grammar, LogitsProcessorFactory};

/// Maximum of [`OutputOptions::logprobs`].
const MAX_LOGPROBS: usize = 1024;

/// Maximum number of tokens that a drafter may propose per step.
const MAX_DRAFT: usize = 64;

/// The order of filters and temperature. At a temperature other than 1, the order changes which
/// tokens top-p and min-p keep.
///
/// In JSON: `"nucleus_first"` or `"temperature_first"`.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerOrder {
    /// Top-n-sigma, typical-p, top-p, min-p, XTC, top-k, temperature. Filters apply to the model's
    /// own distribution, as in mlx-lm.
    #[default]
    NucleusFirst,
    /// Temperature, top-n-sigma, top-k, top-p, min-p, typical-p, XTC. Each filter applies to the
    /// renormalized result of the preceding filter, as in transformers.
    TemperatureFirst,
}

/// Declares a group of options: its fields with defaults, the setters on the group and on
/// [`GenerateOptions`], and the fields that are a [`Parameter`].
macro_rules! group {
    (
        $(#[$meta:meta])*
        $group:ident as $place:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $ty:ty = $default:expr, $with:ident($arg:ty) $({ $($parameter:tt)+ })?;
            )*
        }
    ) => {
        $(#[$meta])*
        #[non_exhaustive]
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $group {
            $($(#[doc = $doc])+ pub $field: $ty,)*
        }

        impl Default for $group {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $group {
            pub(super) const PARAMETERS: &[Option<Parameter>] =
                &[$(parameter!($place $field [$($doc)+] $($($parameter)+)?),)*];

            /// Creates the group with the default values.
            #[must_use]
            pub fn new() -> Self {
                Self::default()
            }

            setters! {
                $(
                    #[doc = concat!("Sets [`", stringify!($group), "::", stringify!($field), "`].")]
                    $with($field: $arg);
                )*
            }
        }

        impl GenerateOptions {
            setters! {
                $(
                    #[doc = concat!("Sets [`", stringify!($group), "::", stringify!($field), "`].")]
                    $with($place.$field: $arg);
                )*
            }
        }
    };
}

macro_rules! parameter {
    ($place:ident $field:ident [$($doc:literal)+]) => { None };
    (
        $place:ident $field:ident [$($doc:literal)+]
        $placeholder:literal, $range:expr $(, aliases $($alias:literal)+)?
    ) => {
        Some(Parameter {
            name: stringify!($field),
            aliases: &[$($($alias),+)?],
            placeholder: $placeholder,
            documentation: concat!($($doc),+),
            range: $range,
            get: |options| Number::value(options.$place.$field),
            put: |options, value| {
                if let Some(value) = Number::from_value(value) {
                    options.$place.$field = value;
                }
            },
        })
    };
}

group! {
    /// How one token is chosen among all tokens of the vocabulary. By default, the filters apply in
    /// this order: top-n-sigma, typical-p, top-p, min-p, XTC, top-k, temperature, draw.
    /// [`SamplerOrder`] selects another order. At temperature 0 the token with the greatest logit
    /// is chosen, and no filter applies.
    ///
    /// Sources: top-n-sigma, Tang et al. 2024 (arXiv 2411.07641); typical-p, Meister et al. 2023
    /// (arXiv 2202.00666).
    ///
    /// ```
    /// use inference::{GenerateOptions, SamplingOptions};
    ///
    /// let creative = SamplingOptions::new().with_temperature(0.8).with_top_p(0.95);
    /// let options = GenerateOptions::new().with_sampling(creative).with_seed(7);
    /// assert_eq!((options.sampling.top_p, options.sampling.seed), (0.95, Some(7)));
    /// ```
    SamplingOptions as sampling {
        /// Randomness: 0 takes the most probable token, 1 draws from the model's distribution.
        temperature: f32 = 0.0, with_temperature(f32) {
            "T", ParameterRange::between(0.0, f32::MAX), aliases "temp"
        };
        /// Draw among this many most probable tokens; 0 is off.
        top_k: usize = 0, with_top_k(usize) { "K", ParameterRange::ANY };
        /// Draw among the most probable tokens that together have at least this probability; 1 is
        /// off.
        top_p: f32 = 1.0, with_top_p(f32) { "P", ParameterRange::above(0.0, 1.0) };
        /// Draw among tokens at least this fraction as probable as the best; 0 is off.
        min_p: f32 = 0.0, with_min_p(f32) { "P", ParameterRange::between(0.0, 1.0) };
        /// Draw among tokens whose logits lie at most this many standard deviations below the
        /// greatest; 0 is off.
        top_n_sigma: f32 = 0.0, with_top_n_sigma(f32) {
            "N", ParameterRange::between(0.0, f32::MAX), aliases "top_nsigma"
        };
        /// Draw among the tokens whose surprise is closest to the entropy, which together have at
        /// least this probability; 1 is off.
        typical_p: f32 = 1.0, with_typical_p(f32) {
            "P", ParameterRange::above(0.0, 1.0), aliases "typ_p" "typical"
        };
        /// How often to leave out the most probable tokens (XTC); 0 is never, 1 at each token.
        xtc_probability: f32 = 0.0, with_xtc_probability(f32) {
            "P", ParameterRange::between(0.0, 1.0)
        };
        /// XTC leaves out tokens with at least this probability, except the least probable of them.
        xtc_threshold: f32 = 0.1, with_xtc_threshold(f32) {
            // At most one token is more probable than one half.
            "P", ParameterRange::between(0.0, 0.5)
        };
        /// The order of temperature and filters.
        sampler_order: SamplerOrder = SamplerOrder::default(), with_sampler_order(SamplerOrder);
        /// Seed of the draws; the same seed gives the same reply. `None` differs from call to call.
        seed: Option<u64> = None, with_seed(impl Into<Option<u64>>);
    }
}

group! {
    /// Penalties against repetition. They apply before all other changes of the logits.
    PenaltyOptions as penalties {
        /// Factor against tokens of the prompt and the reply; 1 is off, above 1 discourages.
        repeat_penalty: f32 = 1.0, with_repeat_penalty(f32) {
            "X", ParameterRange::above(0.0, f32::MAX), aliases "repetition_penalty"
        };
        /// The number of last tokens to which the repetition penalty applies; 0 is all.
        repeat_window: usize = 64, with_repeat_window(usize) {
            "N", ParameterRange::ANY, aliases "repeat_last_n" "repetition_context_size"
        };
        /// Subtracted from the logits of tokens that occur in the reply; 0 is off.
        presence_penalty: f32 = 0.0, with_presence_penalty(f32) { "X", ParameterRange::ANY };
        /// Subtracted from a token's logit for each occurrence in the reply; 0 is off.
        frequency_penalty: f32 = 0.0, with_frequency_penalty(f32) { "X", ParameterRange::ANY };
    }
}

/// Constraints on the reply. They apply after the penalties, in the order of the fields. Before
/// `min_tokens` is reached, tokens that would end the reply are forbidden; this rule applies after
/// `banned_tokens`.
#[non_exhaustive]
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConstraintOptions {
    /// Tokens with which the reply must start, whatever the logits. They count as generated tokens.
    pub forced_tokens: Vec<u32>,
    /// Values that are added to the logits of single tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Functions that change the logits, in this order.
    #[serde(skip)]
    pub logits_processors: Vec<LogitsProcessorFactory>,
    /// Tokens that are never drawn.
    pub banned_tokens: Vec<u32>,
    /// The grammar of the reply.
    pub grammar: Option<Grammar>,
}

impl ConstraintOptions {
    /// Creates the default: no constraints.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets tokens with which the reply begins.
        with_forced_tokens(forced_tokens: impl Into<Vec<u32>>);
        /// Sets values added to the logits of single tokens.
        with_logit_bias(logit_bias: impl Into<BTreeMap<u32, f32>>);
        /// Sets functions that change the logits.
        with_logits_processors(logits_processors: impl Into<Vec<LogitsProcessorFactory>>);
        /// Sets tokens that are never drawn.
        with_banned_tokens(banned_tokens: impl Into<Vec<u32>>);
        /// Sets the grammar of the reply.
        with_grammar(grammar: impl Into<Option<Grammar>>);
    }

    pub(super) fn validate(&self) -> Result<()> {
        if let Some((id, bias)) = self.logit_bias.iter().find(|(_, b)| !b.is_finite()) {
            return invalid(format!(
                "logit_bias of token {id} is {bias}; it must be a number (to forbid a token, use banned_tokens)"
            ));
        }
        match &self.grammar {
            Some(grammar) => grammar.validate().map_err(|e| e.context("grammar")),
            None => Ok(()),
        }
    }
}

/// Conditions that end the reply, besides its length.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StopOptions {
    /// Tokens that end the reply, besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Strings that end the reply. The reply does not contain them.
    pub stop_strings: Vec<String>,
    /// Continue after the model's end-of-text token.
    pub ignore_eos: bool,
    /// Minimum number of tokens. Until it is reached, tokens that would end the reply are not
    /// drawn.
    pub min_tokens: usize,
}

impl StopOptions {
    /// Creates the default: only the model's own end-of-text tokens end a reply.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets tokens that end the reply.
        with_stop_tokens(stop_tokens: impl Into<Vec<u32>>);
        /// Sets strings that end the reply.
        with_stop_strings(stop_strings: impl Into<Vec<String>>);
        /// Sets whether the reply continues after the end-of-text token.
        with_ignore_eos(ignore_eos: bool);
        /// Sets the minimum number of tokens in the reply.
        with_min_tokens(min_tokens: usize);
    }

    pub(super) fn validate(&self) -> Result<()> {
        if let Some(i) = self.stop_strings.iter().position(String::is_empty) {
            return invalid(format!(
                "stop_strings[{i}] is \"\"; a stop string must not be empty, because it would stop at once"
            ));
        }
        Ok(())
    }
}

/// Additional data returned with each token.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OutputOptions {
    /// Return each token's log-probability, and those of this many most probable tokens.
    pub logprobs: Option<usize>,
    /// Return the logits with each token.
    pub logits: bool,
}

impl OutputOptions {
    /// Creates the default: no additional data.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how many alternatives come with each token's log-probability; `None` is off.
        with_logprobs(logprobs: impl Into<Option<usize>>);
        /// Sets whether logits come with each token.
        with_logits(logits: bool);
    }

    pub(super) fn validate(&self) -> Result<()> {
        match self.logprobs {
            Some(n) if n > MAX_LOGPROBS => invalid(format!(
                "logprobs is {n}; at most {MAX_LOGPROBS} alternatives per token are allowed"
            )),
            _ => Ok(()),
        }
    }
}

/// Prefill of the prompt. No option of this group changes the reply.
#[non_exhaustive]
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefillOptions {
    /// Positions of the prompt per forward pass; the request can be cancelled between passes.
    pub prefill_step_size: usize,
    /// Reuse caches of earlier prompts with the same prefix, and keep this prompt's caches.
    /// Concurrent requests may share a prefix in either case.
    pub cache_prompt: bool,
    /// Cached prompt prefixes are shared only between requests with the same salt. Clients with
    /// another salt cannot infer from times or counts that a prompt was seen before.
    pub cache_salt: Option<String>,
    /// The function that receives the prefill progress.
    #[serde(skip)]
    pub progress: Option<Progress>,
}

impl Default for PrefillOptions {
    fn default() -> Self {
        Self {
            prefill_step_size: 512,
            cache_prompt: true,
            cache_salt: None,
            progress: None,
        }
    }
}

impl PrefillOptions {
    /// Creates the defaults: 512 positions per step, with the prompt cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how many positions of the prompt go into one forward pass.
        with_prefill_step_size(prefill_step_size: usize);
        /// Sets whether this request reuses cached prefixes, and whether its own cache is kept.
        with_cache_prompt(cache_prompt: bool);
        /// Sets the group of requests that share cached prompt prefixes.
        with_cache_salt(cache_salt: impl Into<Option<String>>);
        /// Sets the function that receives the prefill progress.
        with_progress(progress: impl Into<Option<Progress>>);
    }

    pub(super) fn validate(&self) -> Result<()> {
        if self.prefill_step_size == 0 {
            return invalid(String::from(
                "prefill_step_size is 0; it must be at least 1",
            ));
        }
        Ok(())
    }
}

/// Speculative decoding: a drafter proposes tokens, and the model verifies several of them in one
/// forward pass. The reply does not depend on these options.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpeculativeOptions {
    /// Number of tokens that the drafter proposes per step; 0 disables drafting. It applies if the
    /// model was loaded with a draft model or `prompt_lookup` is set.
    pub num_draft_tokens: usize,
    /// Length of the n-gram of the prompt lookup, which drafts without a model: it proposes the
    /// tokens that followed the last occurrence of the n-gram. 0 is off.
    pub prompt_lookup: usize,
}

impl Default for SpeculativeOptions {
    fn default() -> Self {
        Self {
            num_draft_tokens: 3,
            prompt_lookup: 0,
        }
    }
}

impl SpeculativeOptions {
    /// Creates the defaults: 3 proposed tokens per step, if there is a draft model.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets how many tokens are proposed per step.
        with_num_draft_tokens(num_draft_tokens: usize);
        /// Sets the length of the n-gram of the prompt lookup.
        with_prompt_lookup(prompt_lookup: usize);
    }

    pub(super) fn validate(&self) -> Result<()> {
        if self.num_draft_tokens > MAX_DRAFT {
            return invalid(format!(
                "num_draft_tokens is {}; it must be at most {MAX_DRAFT}",
                self.num_draft_tokens
            ));
        }
        Ok(())
    }
}

/// A callback that receives the prefill progress: the number of computed positions, and the total.
/// It runs on the generating thread, so it should return quickly.
#[derive(Clone)]
pub struct Progress(Arc<ProgressFn>);

type ProgressFn = dyn Fn(usize, usize) + Send + Sync;

impl Progress {
    /// Calls `f(done, total)`.
    pub fn new(f: impl Fn(usize, usize) + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// Reports that `done` of `total` positions are computed.
    pub fn report(&self, done: usize, total: usize) {
        (self.0)(done, total);
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}
