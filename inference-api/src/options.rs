//! Generation options: plain structs in groups, with defaults, chained setters and one validation.
//! `options/load.rs` has the options for loading a model.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::cancel::{CancelToken, Interrupt};
use crate::error::{Error, ErrorKind, Result};
use crate::sampling::{Grammar, LogitsProcessorFactory};
use crate::steering::Steering;

/// Defines chained setters, `with_x(value)`, for fields and for fields of groups.
macro_rules! setters {
    ($($(#[$doc:meta])* $with:ident($($field:ident).+: $ty:ty);)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $with(mut self, value: $ty) -> Self {
                self.$($field).+ = value.into();
                self
            }
        )*
    };
}

mod feed_forward;
mod groups;
mod load;
mod parameter;
mod parameters;

pub use feed_forward::{FeedForwardPlan, FeedForwardStrategy};
pub use groups::{
    ConstraintOptions, OutputOptions, PenaltyOptions, PrefillOptions, Progress, SamplerOrder,
    SamplingOptions, SpeculativeOptions, StopOptions,
};
pub use load::{AttentionSums, ComputeType, LoadOptions, Precision, Split};
pub use parameter::{Parameter, ParameterRange, ParameterValue};
pub use parameters::ParameterValues;

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

fn unsupported<T>(backend: &str, option: &str) -> Result<T> {
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("backend `{backend}` does not have the option {option}; leave it out"),
    ))
}

/// The first field of `options` or of its groups that differs from `usual` and is not in `known`.
fn first_changed<T: Serialize>(
    options: &T,
    usual: &T,
    known: impl Fn(&str) -> bool,
) -> Result<Option<String>> {
    let usual = fields(usual)?;
    Ok(fields(options)?
        .into_iter()
        .find(|(name, value)| !known(name) && usual.get(name) != Some(value))
        .map(|(name, _)| name))
}

/// The names of the groups in JSON.
pub(crate) const GROUPS: [&str; 7] = [
    "sampling",
    "penalties",
    "constraints",
    "stop",
    "output",
    "prefill",
    "speculative",
];

/// The options as JSON, with the fields of groups moved to the top level.
fn fields<T: Serialize>(options: &T) -> Result<serde_json::Map<String, serde_json::Value>> {
    use serde_json::Value;
    let all = match serde_json::to_value(options) {
        Ok(Value::Object(all)) => all,
        // JSON cannot represent NaN or infinity, and valid options contain neither.
        other => return invalid(format!("the options cannot be written as JSON: {other:?}")),
    };
    let mut fields = serde_json::Map::new();
    for (name, value) in all {
        match value {
            Value::Object(group) if GROUPS.contains(&name.as_str()) => fields.extend(group),
            value => drop(fields.insert(name, value)),
        }
    }
    Ok(fields)
}

/// Generation options.
///
/// There are setters for groups, and for the fields of all groups:
///
/// ```
/// use inference::{GenerateOptions, StopOptions};
///
/// let options = GenerateOptions::new()
///     .with_max_tokens(64)
///     .with_temperature(0.7)
///     .with_stop_options(StopOptions::new().with_stop_tokens([2]).with_min_tokens(8));
/// options.validate()?;
/// assert_eq!(options.sampling.temperature, 0.7);
///
/// // The same, read from JSON.
/// let json = r#"{"max_tokens": 64, "sampling": {"temperature": 0.7},
///                "stop": {"stop_tokens": [2], "min_tokens": 8}}"#;
/// let read: GenerateOptions = serde_json::from_str(json).unwrap();
/// assert_eq!((read.sampling, read.stop), (options.sampling, options.stop));
/// # Ok::<(), inference::Error>(())
/// ```
///
/// Changes of logits apply in this order: repetition, presence and frequency penalties, logit bias,
/// logits processors, banned tokens, `min_tokens`, grammar. Then [`SamplingOptions`] choose a
/// token.
#[non_exhaustive]
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateOptions {
    /// Maximum number of tokens to generate. With 0, the reply is empty and ends with
    /// [`FinishReason::Length`](crate::FinishReason::Length).
    pub max_tokens: usize,
    /// How a token is chosen.
    pub sampling: SamplingOptions,
    /// Penalties for repetition.
    pub penalties: PenaltyOptions,
    /// Constraints on the reply.
    pub constraints: ConstraintOptions,
    /// Conditions that end the reply, besides its length.
    pub stop: StopOptions,
    /// Additional data returned with each token.
    pub output: OutputOptions,
    /// Prefill of the prompt.
    pub prefill: PrefillOptions,
    /// Speculative decoding.
    pub speculative: SpeculativeOptions,
    /// Edits of activations for this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steering: Option<Steering>,
    /// The name of an adapter of [`TextModel::add_adapter`](crate::TextModel::add_adapter), which
    /// replaces the model's own adapter for this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Conditions that end the request early.
    #[serde(skip)]
    pub interrupt: Interrupt,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: SamplingOptions::default(),
            penalties: PenaltyOptions::default(),
            constraints: ConstraintOptions::default(),
            stop: StopOptions::default(),
            output: OutputOptions::default(),
            prefill: PrefillOptions::default(),
            speculative: SpeculativeOptions::default(),
            steering: None,
            adapter: None,
            interrupt: Interrupt::default(),
        }
    }
}

impl GenerateOptions {
    /// Creates options with the defaults: at most 256 tokens, greedy decoding.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets the maximum number of tokens to generate.
        with_max_tokens(max_tokens: usize);

        /// Sets how tokens are chosen.
        with_sampling(sampling: SamplingOptions);

        /// Sets the penalties for repetition.
        with_penalties(penalties: PenaltyOptions);

        /// Sets the constraints on the reply.
        with_constraints(constraints: ConstraintOptions);
        /// Sets tokens with which the reply begins.
        with_forced_tokens(constraints.forced_tokens: impl Into<Vec<u32>>);
        /// Sets values added to the logits of single tokens.
        with_logit_bias(constraints.logit_bias: impl Into<BTreeMap<u32, f32>>);
        /// Sets functions that change the logits.
        with_logits_processors(constraints.logits_processors: impl Into<Vec<LogitsProcessorFactory>>);
        /// Sets tokens that are never drawn.
        with_banned_tokens(constraints.banned_tokens: impl Into<Vec<u32>>);
        /// Sets the grammar of the reply.
        with_grammar(constraints.grammar: impl Into<Option<Grammar>>);

        /// Sets the stop conditions.
        with_stop_options(stop: StopOptions);
        /// Sets strings that end the reply.
        with_stop(stop.stop_strings: impl Into<Vec<String>>);
        /// Sets tokens that end the reply.
        with_stop_tokens(stop.stop_tokens: impl Into<Vec<u32>>);
        /// Sets whether the reply continues after the end-of-text token.
        with_ignore_eos(stop.ignore_eos: bool);
        /// Sets the minimum number of tokens in the reply.
        with_min_tokens(stop.min_tokens: usize);

        /// Sets the data returned with each token.
        with_output(output: OutputOptions);
        /// Sets how many alternatives come with each token's log-probability; `None` is off.
        with_logprobs(output.logprobs: impl Into<Option<usize>>);
        /// Sets whether logits come with each token.
        with_logits(output.logits: bool);

        /// Sets how the prompt is computed.
        with_prefill(prefill: PrefillOptions);
        /// Sets how many positions of the prompt go into one forward pass.
        with_prefill_step_size(prefill.prefill_step_size: usize);
        /// Sets whether this request reuses cached prefixes, and whether its own cache is kept.
        with_cache_prompt(prefill.cache_prompt: bool);
        /// Sets the group of requests that share cached prompt prefixes.
        with_cache_salt(prefill.cache_salt: impl Into<Option<String>>);
        /// Sets the function that receives the prefill progress.
        with_progress(prefill.progress: impl Into<Option<Progress>>);

        /// Sets speculative decoding.
        with_speculative(speculative: SpeculativeOptions);
        /// Sets how many tokens are proposed per step.
        with_num_draft_tokens(speculative.num_draft_tokens: usize);
        /// Sets the length of the n-gram of the prompt lookup.
        with_prompt_lookup(speculative.prompt_lookup: usize);

        /// Sets the edits of activations.
        with_steering(steering: impl Into<Option<Steering>>);

        /// Sets the name of the request's adapter.
        with_adapter(adapter: impl Into<Option<String>>);

        /// Sets the conditions that end the request early.
        with_interrupt(interrupt: Interrupt);
        /// Sets the flag that cancels the request.
        with_cancel(interrupt.cancel: impl Into<Option<CancelToken>>);
        /// Sets the deadline of the request.
        with_deadline(interrupt.deadline: impl Into<Option<Instant>>);
    }

    /// Checks each field of each group. A backend calls it once, when a request arrives.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the field, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        Parameter::all().try_for_each(|parameter| parameter.check(parameter.of(self)))?;
        self.stop.validate()?;
        self.output.validate()?;
        self.prefill.validate()?;
        self.speculative.validate()?;
        if self.stop.min_tokens > self.max_tokens {
            return invalid(format!(
                "min_tokens is {}; it must be at most max_tokens, {}",
                self.stop.min_tokens, self.max_tokens
            ));
        }
        if self.constraints.grammar.is_some() && self.stop.ignore_eos {
            return invalid(String::from(
                "ignore_eos is set together with a grammar, whose end is the end-of-text token; \
                 set one of them",
            ));
        }
        // The constraints come last, because checking a long grammar takes time.
        self.constraints.validate()
    }

    /// Checks whether the request must end now. Engines call it between steps.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] or [`ErrorKind::DeadlineExceeded`].
    pub fn check_interrupt(&self) -> Result<()> {
        self.interrupt.check()
    }

    /// Refuses each option that differs from its default and is not in `honored`. Options are named
    /// by field, without the group. A backend that calls this after [`GenerateOptions::validate`]
    /// never ignores an option silently, even an option of a later version. Options that change
    /// only the speed are not refused. Every backend must honor the cancel token and the deadline.
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
        match self.first_not_of(honored)? {
            Some(name) => unsupported(backend, &name),
            None => Ok(()),
        }
    }

    /// The first option that [`GenerateOptions::refuse_all_but`] would refuse, for backends with
    /// their own message.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a number that JSON cannot represent. Valid options have
    /// none.
    pub fn first_not_of(&self, honored: &[&str]) -> Result<Option<String>> {
        const FASTER: [&str; 4] = [
            "prefill_step_size",
            "cache_prompt",
            "num_draft_tokens",
            "prompt_lookup",
        ];
        let known = |name: &str| honored.contains(&name) || FASTER.contains(&name);
        // Functions cannot be represented in JSON, so they are checked separately.
        if !self.constraints.logits_processors.is_empty() && !known("logits_processors") {
            return Ok(Some(String::from("logits_processors")));
        }
        first_changed(self, &Self::default(), known)
    }

    /// The fields of all groups by name, as in [`GenerateOptions::refuse_all_but`]. Backends use it
    /// to send options to another process.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a number that JSON cannot represent. Valid options have
    /// none.
    pub fn to_flat_json(&self) -> Result<serde_json::Map<String, serde_json::Value>> {
        fields(self)
    }
}

#[cfg(test)]
mod tests;
