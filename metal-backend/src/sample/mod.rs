//! Samples tokens from logits on the device, without a copy of the logits to the host. There are
//! two exceptions. A request with logits processors in Rust copies its row to the host. A request
//! with a grammar copies its previous token to the host, and one bit per token of the vocabulary to
//! the device.
//!
//! Each request has a [`Sampler`]. [`sample`] processes one sampler for each row of a batch, and
//! rows may join and leave between steps. A row's token depends only on its logits, options and
//! step, so a request gets the same reply alone and in a batch.
//!
//! `penalties` changes logits, in this order: repetition, presence and frequency, bias, logits
//! processors, banned tokens, minimum length, grammar. `filters` implements the filters, and
//! `chain` applies them in one of two orders. On the CPU, one fused kernel computes all stages
//! (`exec::sampling`), except changes that must precede logits processors.

mod chain;
mod draw;
mod filters;
mod finite;
mod grammar;
mod host;
mod logprobs;
mod penalties;
mod random;

pub use draw::{Drawn, sample};
// These imports cover new filters, too.
pub use filters::*;
pub use finite::check_greatest;
pub use grammar::{Compiler, Matcher};
pub use logprobs::Logprobs;
pub use penalties::{add_bias, allow, count, count_penalty, forbid, repeat_penalty};
pub use random::agree_on_entropy;

use std::sync::Arc;

use inference::{Error, ErrorKind, GenerateOptions, Result, SamplingOptions};
use mlx_rs_core::{Array, Dtype, concatenate, zeros};

use crate::error::engine;
use crate::exec::sampling::{self, Pick, SampleParams, SampleRow};
use chain::{Choice, Draw};
use host::Host;
use random::Seed;

/// The properties of the model that a sampler needs.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The number of logits.
    pub vocabulary: usize,
    /// Tokens that end a reply.
    pub eos: &'a [u32],
    /// Newline tokens. XTC never removes newline tokens and `eos`.
    pub newline: &'a [u32],
    /// Compiles grammars. If `None`, an option with a grammar is an error.
    pub grammars: Option<&'a Compiler>,
    /// Whether sampling runs on the CPU.
    pub on_cpu: bool,
}

/// The sampling state of one request.
pub struct Sampler {
    sampling: SamplingOptions,
    spared: Arc<[u32]>,
    seed: Seed,
    /// The number of tokens drawn.
    step: u64,
    forced: Vec<u32>,
    repeat_penalty: f32,
    /// The number of tokens that the repetition penalty covers; 0 means all.
    window: usize,
    /// Ids of recent tokens on the device; `None` while empty or not needed. The shape is `[1, n]`,
    /// or `[n]` for the CPU kernel, which derives the reply's token counts from it.
    history: Option<Array>,
    presence: f32,
    frequency: f32,
    /// The count of each token in the reply, float32 `[1, V]`; `None` if not needed.
    counts: Option<Array>,
    biases: Arc<[(u32, f32)]>,
    /// Ids and biases on the device, `[1, n]` each.
    bias: Option<(Array, Array)>,
    banned: Arc<[u32]>,
    /// Banned tokens and tokens that end the reply. All are forbidden in the first `min_tokens`
    /// tokens.
    banned_yet: Arc<[u32]>,
    min_tokens: u64,
    /// Tokens that end the reply.
    enders: Vec<u32>,
    /// Banned tokens on the device, `[1, n]`. `never_yet` also contains the tokens that end the
    /// reply.
    never: Option<Array>,
    never_yet: Option<Array>,
    logprobs: Option<usize>,
    host: Option<Host>,
    on_cpu: bool,
    /// Whether the CPU kernel also changes the logits. The device then needs only the history.
    in_kernel: bool,
}

/// A snapshot of a sampler's state; see [`Sampler::memory`].
#[derive(Debug, Clone)]
pub struct Memory {
    step: u64,
    history: Option<Array>,
    counts: Option<Array>,
}

impl Memory {
    /// The number of tokens drawn.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The arrays to evaluate.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.history.iter().chain(&self.counts)
    }
}

/// Ids as `[1, n]`; `None` if there are no ids.
fn ids(values: &[u32]) -> mlx_rs_core::Result<Option<Array>> {
    if values.is_empty() {
        return Ok(None);
    }
    Array::vector(values)?.expand_dims(0).map(Some)
}

impl Sampler {
    /// Creates the sampler for `options`. The repetition penalty's history begins with `prompt`.
    /// Without a seed, each sampler draws differently.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for options out of range, tokens outside the vocabulary, bans
    /// that leave no token, or an invalid grammar; [`ErrorKind::Unsupported`] for a grammar without
    /// a compiler.
    pub fn new(options: &GenerateOptions, prompt: &[u32], context: &Context<'_>) -> Result<Self> {
        options.validate()?;
        Self::of_valid(options, prompt, context)
    }

    /// Creates a sampler as [`Self::new`], for options that were already validated.
    pub(crate) fn of_valid(
        options: &GenerateOptions,
        prompt: &[u32],
        context: &Context<'_>,
    ) -> Result<Self> {
        let GenerateOptions {
            sampling,
            penalties,
            constraints,
            stop,
            output,
            ..
        } = options;
        check_ids(options, context.vocabulary)?;
        let grammar = match (&constraints.grammar, context.grammars) {
            (None, _) => None,
            (Some(grammar), Some(compiler)) => Some(compiler.compile(grammar)?),
            (Some(_), None) => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "this model has no tokenizer to follow a grammar with",
                ));
            }
        };
        let processors: Vec<_> = constraints
            .logits_processors
            .iter()
            .map(inference::LogitsProcessorFactory::make)
            .collect();
        let on_cpu = sampling::by_kernel(context.on_cpu, context.vocabulary);
        let in_kernel = on_cpu && processors.is_empty();
        let enders: Vec<u32> = context
            .eos
            .iter()
            .chain(&stop.stop_tokens)
            .copied()
            .filter(|&id| (id as usize) < context.vocabulary)
            .collect();
        let host = (grammar.is_some() || !processors.is_empty()).then(|| Host {
            processors,
            grammar,
            prompt: prompt.to_vec(),
            reply: Vec::new(),
            pending: None,
        });
        let mut sampler = Self {
            sampling: sampling.clone(),
            spared: context.eos.iter().chain(context.newline).copied().collect(),
            seed: Seed::new(sampling.seed),
            step: 0,
            forced: constraints.forced_tokens.clone(),
            repeat_penalty: penalties.repeat_penalty,
            window: penalties.repeat_window,
            history: None,
            presence: penalties.presence_penalty,
            frequency: penalties.frequency_penalty,
            counts: None,
            biases: constraints
                .logit_bias
                .iter()
                .map(|(&t, &b)| (t, b))
                .collect(),
            bias: None,
            banned: constraints.banned_tokens.as_slice().into(),
            banned_yet: [constraints.banned_tokens.as_slice(), &enders]
                .concat()
                .into(),
            min_tokens: stop.min_tokens as u64,
            enders,
            never: None,
            never_yet: None,
            logprobs: output.logprobs,
            host,
            on_cpu,
            in_kernel,
        };
        sampler
            .prepare(options, prompt, context.vocabulary)
            .map_err(engine("sampler"))?;
        Ok(sampler)
    }

    /// Copies constant arrays to the device.
    fn prepare(
        &mut self,
        options: &GenerateOptions,
        prompt: &[u32],
        vocabulary: usize,
    ) -> mlx_rs_core::Result<()> {
        if self.repeat_penalty != 1.0 {
            let tail = match self.window {
                0 => prompt,
                n => &prompt[prompt.len().saturating_sub(n)..],
            };
            self.history = match self.in_kernel {
                true if tail.is_empty() => None,
                true => Some(Array::vector(tail)?),
                false => ids(tail)?,
            };
        }
        if self.in_kernel {
            return Ok(());
        }
        if self.counts_tokens() {
            let n = i32::try_from(vocabulary).unwrap_or(i32::MAX);
            self.counts = Some(zeros(&[1, n], Dtype::Float32)?);
        }
        let (tokens, biases): (Vec<u32>, Vec<f32>) = options.constraints.logit_bias.iter().unzip();
        if let Some(tokens) = ids(&tokens)? {
            self.bias = Some((tokens, Array::vector(&biases)?.expand_dims(0)?));
        }
        self.never = ids(&self.banned)?;
        if self.min_tokens > 0 {
            self.never_yet = ids(&self.banned_yet)?;
        }
        Ok(())
    }

    /// Returns how many alternatives are reported with each token's log-probability; `None` if the
    /// request needs no log-probabilities.
    #[must_use]
    pub fn logprobs(&self) -> Option<usize> {
        self.logprobs
    }

    /// Returns the arrays that the next step needs. They are evaluated together with this step.
    pub fn state(&self) -> impl Iterator<Item = &Array> {
        self.history.iter().chain(&self.counts)
    }

    /// Whether each token must be on the host before the next token can be drawn.
    #[must_use]
    pub fn waits(options: &GenerateOptions) -> bool {
        options.constraints.grammar.is_some() || !options.constraints.logits_processors.is_empty()
    }

    /// Returns a snapshot of the state after the tokens drawn so far. The state of processors and
    /// grammars is not included, so a sampler that waits for each token ([`Self::waits`]) cannot be
    /// restored.
    #[must_use]
    pub fn memory(&self) -> Memory {
        Memory {
            step: self.step,
            history: self.history.clone(),
            counts: self.counts.clone(),
        }
    }

    /// Restores the state of a snapshot.
    pub fn restore(&mut self, memory: Memory) {
        self.step = memory.step;
        self.history = memory.history;
        self.counts = memory.counts;
    }

    /// The forced token of this step.
    fn forced(&self) -> Option<u32> {
        let step = usize::try_from(self.step).ok()?;
        self.forced.get(step).copied()
    }

    /// The tokens that are forbidden in this step.
    fn forbidden(&self) -> Option<&Array> {
        if self.step < self.min_tokens {
            self.never_yet.as_ref()
        } else {
            self.never.as_ref()
        }
    }

    fn changes_logits(&self) -> bool {
        !self.in_kernel
            && self.forced().is_none()
            && (self.history.is_some()
                || self.counts.is_some()
                || self.bias.is_some()
                || self.host.is_some()
                || self.forbidden().is_some())
    }

    /// Returns the logits after all changes, `[1, V]` in float32.
    fn changed(&mut self, logits: &Array) -> Result<Array> {
        let mut x = self.penalized(logits).map_err(engine("sampling"))?;
        if let Some(host) = &mut self.host
            && !host.processors.is_empty()
        {
            x = host.process(&x)?;
        }
        match (self.allowed()?, self.forbidden()) {
            (Some(words), _) => allow(&x, &words).map_err(engine("sampling")),
            (None, Some(tokens)) => forbid(&x, tokens).map_err(engine("sampling")),
            (None, None) => Ok(x),
        }
    }

    /// Returns the tokens that grammar and bans allow in this step; `None` without a grammar.
    fn allowed(&mut self) -> Result<Option<Vec<u32>>> {
        let too_early = match self.step < self.min_tokens {
            true => self.enders.as_slice(),
            false => &[],
        };
        match &mut self.host {
            Some(host) => host.allowed(&self.banned, too_early),
            None => Ok(None),
        }
    }

    /// Returns the CPU kernel's parameters for this row.
    fn row(&mut self) -> Result<SampleRow> {
        let pick = self.choice().pick();
        if !self.in_kernel || matches!(pick, Pick::Forced(_)) {
            return Ok(SampleParams::new(pick).into());
        }
        let allowed = self.allowed()?;
        let banned = match allowed {
            Some(_) => Arc::default(), // the grammar's mask already excludes these tokens
            None if self.step < self.min_tokens => Arc::clone(&self.banned_yet),
            None => Arc::clone(&self.banned),
        };
        let params = SampleParams {
            repeat: (self.repeat_penalty != 1.0).then_some(sampling::RepetitionPenalty {
                last: match self.window {
                    0 => usize::MAX,
                    n => n,
                },
                penalty: self.repeat_penalty,
            }),
            count: self.counts_tokens().then(|| sampling::CountPenalties {
                last: usize::try_from(self.step).unwrap_or(usize::MAX),
                presence: self.presence,
                frequency: self.frequency,
            }),
            bias: Arc::clone(&self.biases),
            banned,
            allowed,
            pick,
        };
        Ok(SampleRow {
            seen: self.history.clone(),
            params,
        })
    }

    fn counts_tokens(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    fn penalized(&self, logits: &Array) -> mlx_rs_core::Result<Array> {
        let mut x = logits.clone();
        if let Some(history) = &self.history {
            x = repeat_penalty(&x, history, self.repeat_penalty)?;
        }
        if let Some(counts) = &self.counts {
            x = count_penalty(&x, counts, self.presence, self.frequency)?;
        }
        if let Some((ids, bias)) = &self.bias {
            x = add_bias(&x, ids, bias)?;
        }
        Ok(x)
    }

    fn choice(&self) -> Choice {
        if let Some(id) = self.forced() {
            return Choice::Forced(id);
        }
        if self.sampling.temperature == 0.0 {
            return Choice::Greedy;
        }
        let probability = self.sampling.xtc_probability;
        let excludes = probability > 0.0 && self.seed.coin(self.step) < probability;
        Choice::Draw(Draw {
            options: self.sampling.clone(),
            xtc: excludes.then_some(self.sampling.xtc_threshold),
            spared: self.spared.clone(),
            seed: self.seed,
            step: self.step,
        })
    }

    /// The number of tokens drawn.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Records the sampled token `[1]` and the greatest logit `[1]` of its row.
    fn remember(&mut self, token: &Array, greatest: Array) -> mlx_rs_core::Result<()> {
        self.step += 1;
        if let Some(host) = &mut self.host {
            host.pending = Some((token.clone(), greatest));
        }
        if self.in_kernel {
            return self.append(token);
        }
        if let Some(counts) = &self.counts {
            self.counts = Some(count(counts, token)?);
        }
        if self.repeat_penalty == 1.0 {
            return Ok(());
        }
        let token = token.reshape(&[1, 1])?;
        self.history = Some(match &self.history {
            None => token,
            Some(history) => {
                let joined = concatenate(&[history, &token], 1)?;
                let n = joined.dim(1)?;
                match i32::try_from(self.window) {
                    Ok(window) if window > 0 && n > window => {
                        joined.slice_axis(1, n - window, n)?
                    }
                    _ => joined,
                }
            }
        });
        Ok(())
    }

    /// Appends a token `[1]` to the kernel's history. If the kernel counts the reply's tokens, the
    /// history must stay complete. Otherwise the kernel reads only its end, and it is trimmed
    /// occasionally.
    fn append(&mut self, token: &Array) -> mlx_rs_core::Result<()> {
        const SURPLUS: usize = 64;
        let counts = self.counts_tokens();
        if self.repeat_penalty == 1.0 && !counts {
            return Ok(());
        }
        let mut history = match &self.history {
            None => token.clone(),
            Some(history) => concatenate(&[history, token], 0)?,
        };
        let n = history.dim(0)?;
        let most = self.window.saturating_add(SURPLUS);
        if self.window > 0 && !counts && n.unsigned_abs() as usize > most {
            let window = i32::try_from(self.window).unwrap_or(n);
            history = history.slice_axis(0, n - window, n)?;
        }
        self.history = Some(history);
        Ok(())
    }
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sampler")
            .field("sampling", &self.sampling)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

/// Returns an error for tokens outside the vocabulary.
fn check_ids(options: &GenerateOptions, vocabulary: usize) -> Result<()> {
    let invalid = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
    let bias: Vec<u32> = options.constraints.logit_bias.keys().copied().collect();
    for (name, ids) in [
        ("logit_bias", &bias),
        ("banned_tokens", &options.constraints.banned_tokens),
        ("forced_tokens", &options.constraints.forced_tokens),
    ] {
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return invalid(format!(
                "{name} names token {id}, outside the vocabulary of {vocabulary} tokens"
            ));
        }
    }
    let mut banned = options.constraints.banned_tokens.clone();
    banned.sort_unstable();
    banned.dedup();
    if banned.len() >= vocabulary {
        return invalid(String::from(
            "banned_tokens holds the whole vocabulary; leave at least one token",
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
