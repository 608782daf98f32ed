//! The computation of one request: caches, sampler and the pending token.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, async_eval};

use super::checkpoints::Recorder;
use super::prefix_sharing::Kin;
use super::request::{Read, Request};
use crate::adapter::NamedAdapter;
use crate::arch::Decoder;
use crate::cache::prefix::Found;
use crate::cache::{self, CacheOptions, Caches, Checkpoints, Prefixes, Row};
use crate::error::engine;
use crate::nn::adapter::Pass;
use crate::nn::attention::Positions;
use crate::sample::{Logprobs, Sampler, sample};
use crate::steer::{Edits, RequestEdits, watch};

/// A sampled token that is queued on the device and perhaps not computed yet.
#[derive(Clone)]
pub struct Pending {
    /// The token's id, `uint32 [1]`.
    pub token: Array,
    /// The logits from which the token is sampled, `[1, vocab]`.
    pub logits: Array,
    /// The greatest logit, `[1]`, for [`check_greatest`](crate::sample::check_greatest).
    pub greatest: Array,
    /// The token's number in the reply; the first token is 1.
    pub step: u64,
    /// Log-probabilities of the step, and the index of this token's row in them.
    pub logprobs: Option<(Arc<Logprobs>, i32)>,
}

impl Pending {
    /// The arrays to evaluate in this step.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let logprobs = self.logprobs.iter().flat_map(|(l, _)| l.arrays());
        [&self.token, &self.logits, &self.greatest]
            .into_iter()
            .chain(logprobs)
    }
}

/// Samples a token for each row of `logits` `[B, vocab]` with that row's sampler.
///
/// # Errors
/// Errors of a grammar or a logits processor, and if memory runs out.
pub fn draw_rows(samplers: &mut [&mut Sampler], logits: &Array) -> Result<Vec<Pending>> {
    let drawn = sample(samplers, logits)?;
    let logprobs = drawn.logprobs.map(Arc::new);
    (0i32..)
        .zip(samplers.iter())
        .map(|(row, sampler)| {
            let of_row = |a: &Array| match samplers.len() {
                1 => Ok(a.clone()),
                _ => a.slice_axis(0, row, row + 1).map_err(engine("sampling")),
            };
            Ok(Pending {
                token: of_row(&drawn.tokens)?,
                logits: of_row(logits)?,
                greatest: of_row(&drawn.greatest)?,
                step: sampler.step(),
                logprobs: logprobs
                    .as_ref()
                    .filter(|_| sampler.logprobs().is_some())
                    .map(|l| (Arc::clone(l), row)),
            })
        })
        .collect()
}

/// Identifies rows that can share a forward pass. Rows with edits cannot use fused blocks, and
/// unfused blocks give results that differ in the last bits. Adapters also determine which layers
/// are fused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PassGroup {
    is_edited: bool,
    adapters: u64,
}

impl PassGroup {
    /// Whether both groups have edits, or neither has.
    pub fn is_like(self, other: Self) -> bool {
        self.is_edited == other.is_edited
    }
}

/// A forward pass for rows of one group.
#[derive(Default)]
pub(super) struct SharedPass {
    network: Option<Arc<dyn Decoder>>,
    adapters: Pass,
}

impl SharedPass {
    /// Adds a row with `tokens` tokens.
    pub fn push(&mut self, sequence: &SequenceState, tokens: i32) {
        self.network
            .get_or_insert_with(|| Arc::clone(&sequence.shared));
        if let Some(adapter) = &sequence.adapter {
            self.adapters.push(Arc::clone(adapter.deltas()), tokens);
        }
    }

    /// Runs `forward` with the network and applies each row's adapter. Returns `None` if there are
    /// no rows.
    pub fn run<R>(self, forward: impl FnOnce(&dyn Decoder) -> R) -> Option<R> {
        let network = self.network?;
        Some(match self.adapters.is_empty() {
            true => forward(network.as_ref()),
            false => Arc::new(self.adapters).run(|| forward(network.as_ref())),
        })
    }
}

/// The state of a request that changes with its steps.
pub struct SequenceState {
    /// The network with the request's named adapter. This reference keeps the network alive if the
    /// model is closed during a step.
    pub decoder: Arc<dyn Decoder>,
    /// The network without the named adapter.
    pub(super) shared: Arc<dyn Decoder>,
    /// The adapter that the request selects by name.
    pub(super) adapter: Option<Arc<NamedAdapter>>,
    /// Keys and values of all computed tokens.
    pub caches: Caches,
    /// The request's sampler.
    pub sampler: Sampler,
    /// The pending token; `None` before the prefill.
    pub next: Option<Pending>,
    /// The number of tokens of [`Request::so_far`] that are in the caches. Valid until the next
    /// token is sampled.
    pub prefilled: usize,
    /// Whether any part of the request has been computed.
    pub begun: bool,
    /// The value of [`Prefixes::epoch`] in which the caches were computed.
    epoch: u64,
    options: CacheOptions,
    /// The request's edits of activations.
    pub(super) edits: Option<RequestEdits>,
    /// Checkpoints from which later prompts can continue.
    pub(super) checkpoints: Recorder,
}

impl SequenceState {
    /// Creates the state of `request`. Its caches follow `options`, and begin with the longest
    /// cached prefix of the prompt.
    ///
    /// # Errors
    /// If the model is closed, or the sampler cannot be created.
    pub fn new(request: &mut Request, options: &CacheOptions) -> Result<Self> {
        let model = Arc::clone(request.engine());
        let shared = model.decoder()?;
        let adapter = request.adapter().cloned();
        let decoder = match &adapter {
            Some(adapter) => adapter.on(Arc::clone(&shared)),
            None => Arc::clone(&shared),
        };
        let sampler = model.sampler(request.options(), request.prompt())?;
        let epoch = model.prefixes().epoch();
        let edits = match &request.options().steering {
            Some(steering) => Some(RequestEdits::new(
                (&model, decoder.as_ref()),
                steering,
                request.prompt().len(),
                &request.options().interrupt,
            )?),
            None => None,
        };
        let found = match from_disk(decoder.as_ref(), options, epoch, request) {
            Some(found) => found,
            None => prepared(decoder.as_ref(), options, model.prefixes(), epoch, request),
        };
        let (caches, prefilled) = (found.caches, found.tokens);
        let checkpoints = Recorder::new(request, &caches, found.checkpoints)?;
        request.clock().cached(prefilled);
        Ok(Self {
            decoder,
            shared,
            adapter,
            caches,
            sampler,
            next: None,
            prefilled,
            begun: false,
            epoch,
            options: *options,
            edits,
            checkpoints,
        })
    }

    /// Creates the state of `request`, which continues `caches` that were computed in `epoch`.
    ///
    /// # Errors
    /// The errors of [`SequenceState::new`].
    pub fn continuing(request: &Request, caches: Caches, epoch: u64) -> Result<Self> {
        for (given, what, option) in [
            (request.options().steering.is_some(), "edits", "steering"),
            (request.adapter().is_some(), "this adapter", "adapter"),
        ] {
            if given {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "the kept caches were computed without {what}; give the whole prompt, or \
                         leave {option} out"
                    ),
                ));
            }
        }
        let model = request.engine();
        let decoder = model.decoder()?;
        let cached = cache::offset(&caches).unsigned_abs() as usize;
        let caches = caches.for_sequence(cached + request.prompt().len());
        Ok(Self {
            shared: Arc::clone(&decoder),
            decoder,
            adapter: None,
            caches: expecting(caches, request, cached),
            sampler: model.sampler(request.options(), request.prompt())?,
            next: None,
            prefilled: 0,
            // The tokens of the caches are unknown, so the sequence cannot restart.
            begun: true,
            epoch,
            options: *model.cache_options(),
            edits: None,
            checkpoints: Recorder::default(),
        })
    }

    /// Drops reused caches if the adapter changed after the request was created. Call it before the
    /// first computation.
    pub fn refresh(&mut self, request: &mut Request) {
        let epoch = request.engine().prefixes().epoch();
        if !self.begun && self.epoch != epoch {
            self.epoch = epoch;
            self.restart(request);
            request.clock().cached(0);
        }
    }

    /// Whether the next token changes the rotation of earlier keys, so that all tokens must be
    /// computed again.
    pub fn must_restart(&self) -> bool {
        self.caches.until_switch() < 1
    }

    /// Drops all results. The next prefill then computes all prompt and reply tokens again.
    pub fn restart(&mut self, request: &Request) {
        self.caches = empty(self.decoder.as_ref(), &self.options, request);
        self.prefilled = 0;
        self.next = None;
        self.checkpoints.clear();
    }

    /// Returns the group of rows with which this row can share a forward pass: equal presence of
    /// edits, and equal adapter groups (0 without an adapter).
    pub(super) fn group(&self) -> PassGroup {
        PassGroup {
            is_edited: self.edits.is_some(),
            adapters: self.adapter.as_ref().map_or(0, |adapter| adapter.group()),
        }
    }

    /// Returns the sort key of rows in a group. It makes rows with the same adapter adjacent.
    pub(super) fn order(&self) -> Option<&str> {
        self.adapter.as_ref().map(|adapter| adapter.hash())
    }

    /// Returns the properties that must be equal if rows share caches.
    pub fn kin(&self) -> Kin {
        Kin {
            epoch: self.epoch,
            stretch: self.caches.stretch(),
            trimmable: self.options.trimmable,
        }
    }

    /// Queues the step after `token`. Returns the next token and its logits, not yet evaluated.
    ///
    /// # Errors
    /// The errors of [`Self::draw`].
    pub fn decode(&mut self, token: &Array) -> Result<Pending> {
        let logits = token
            .reshape(&[1, 1])
            .and_then(|ids| {
                let mut rows = [Row {
                    length: 1,
                    caches: &mut self.caches,
                }];
                let mut edits = Edits::new(vec![self.edits.clone()]);
                let watch = &mut watch(&mut edits);
                self.decoder
                    .forward(&ids, &mut rows, Positions::Last, watch)
            })
            .map_err(engine("decode"))?;
        self.draw(&logits)
    }

    /// Samples from logits `[1, 1, vocab]`, and starts the computation. Also evaluates the caches,
    /// so that no graph of earlier steps is retained.
    ///
    /// # Errors
    /// Errors of a grammar or a logits processor, and if memory runs out.
    pub fn draw(&mut self, logits: &Array) -> Result<Pending> {
        let logits = logits.squeeze_axis(1).map_err(engine("sampling"))?; // [1, 1, V] -> [1, V]
        let pending = draw_rows(&mut [&mut self.sampler], &logits)?
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Engine, "no token was drawn"))?;
        async_eval(
            pending
                .arrays()
                .chain(self.sampler.state())
                .chain(self.caches.iter().flat_map(|c| c.arrays())),
        )
        .map_err(engine("sampling"))?;
        Ok(pending)
    }

    /// Stores the caches in the engine, for later prompts with the same prefix.
    pub fn keep(self, request: &Request) {
        if request.keeps_prompt() {
            let mut tokens = request.tokens();
            tokens.truncate(cache::offset(&self.caches).unsigned_abs() as usize);
            let engine = request.engine();
            let salt = request.salt();
            let of = (self.epoch, salt.as_deref());
            if keeps_on_disk(request) {
                engine.keep_on_disk(of, &tokens, &self.caches);
            }
            let checkpoints = self.checkpoints.into_checkpoints();
            (engine.prefixes()).put_with(of, tokens, self.caches, checkpoints);
        }
    }
}

/// Whether the caches of `request` may be stored on disk. False with activation edits, because
/// edits can refer to files that change later.
fn keeps_on_disk(request: &Request) -> bool {
    request.keeps_prompt() && request.options().steering.is_none()
}

/// Returns caches for `request` from disk, and the number of prompt tokens in them.
fn from_disk(
    decoder: &dyn Decoder,
    options: &CacheOptions,
    epoch: u64,
    request: &Request,
) -> Option<Found> {
    // `empty` allocates caches, so this check avoids an allocation for each request.
    if !request.engine().has_tier() || !keeps_on_disk(request) {
        return None;
    }
    let (salt, like) = (request.salt(), empty(decoder, options, request));
    let of = (epoch, salt.as_deref());
    let engine = request.engine();
    let (caches, n) = engine.take_from_disk((decoder, options), of, request.prompt(), &like)?;
    Some(Found {
        caches: expecting(caches, request, 0),
        tokens: n,
        checkpoints: Checkpoints::default(),
    })
}

/// Returns caches for `request`: from `prefixes` in `epoch` if the request may reuse caches,
/// otherwise empty caches.
pub fn prepared(
    decoder: &dyn Decoder,
    options: &CacheOptions,
    prefixes: &Prefixes,
    epoch: u64,
    request: &Request,
) -> Found {
    let empty = empty(decoder, options, request);
    let salt = request.salt();
    let of = (epoch, salt.as_deref());
    let found = (request.keeps_prompt())
        .then(|| prefixes.take_salted(of, request.prompt(), &empty))
        .flatten();
    match found {
        Some(found) => Found {
            caches: expecting(found.caches, request, 0),
            ..found
        },
        None => Found {
            caches: empty,
            tokens: 0,
            checkpoints: Checkpoints::default(),
        },
    }
}

/// Empty caches, sized for the tokens that `request` has and may still generate.
pub fn empty(decoder: &dyn Decoder, options: &CacheOptions, request: &Request) -> Caches {
    let caches = decoder.new_caches(options);
    expecting(caches.for_sequence(request.so_far().len()), request, 0)
}

/// Tells `caches` the expected number of positions. Their first `before` positions are not from
/// `request`.
fn expecting(mut caches: Caches, request: &Request, before: usize) -> Caches {
    let all = request
        .prompt()
        .len()
        .saturating_add(request.options().max_tokens)
        .saturating_add(before);
    let all = i32::try_from(all).unwrap_or(i32::MAX);
    caches.iter_mut().for_each(|cache| cache.expect(all));
    caches
}

/// Waits for a pending token.
pub(super) fn read(pending: &Pending, request: &Request) -> Result<Read> {
    let options = request.options();
    let id: u32 = pending.token.item().map_err(engine("decode"))?;
    // The maximum was evaluated together with the token, so reading it does not wait.
    let greatest = pending.greatest.item().map_err(engine("decode"))?;
    let logits = if options.output.logits {
        let values = pending.logits.to_f32_vec();
        Some(values.map_err(engine("logits"))?.into())
    } else {
        None
    };
    let logprobs = match (&pending.logprobs, options.output.logprobs) {
        (Some((logprobs, row)), Some(n)) => {
            let (chosen, top) = logprobs.row(*row, n).map_err(engine("logprobs"))?;
            Some(request.engine().logprobs(chosen, top))
        }
        _ => None,
    };
    Ok(Read {
        id,
        greatest,
        step: pending.step,
        logits,
        logprobs,
    })
}
