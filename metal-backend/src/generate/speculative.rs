//! Speculative decoding: a drafter proposes tokens, and one forward pass of the model checks all of
//! them (Leviathan et al. 2023, Chen et al. 2023). A proposed token is kept if the model samples
//! the same token. The first wrong token and all tokens after it are dropped. The reply therefore
//! equals that of plain decoding.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, eval};

use super::sequence::{Pending, SequenceState, draw_rows, empty, prepared};
use super::{Request, read};
use crate::arch::Decoder;
use crate::cache::{self, CacheOptions, Caches};
use crate::engine::Engine;
use crate::engine::forward::{forward, forward_prompt};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::sample::Sampler;
use crate::steer::{Edits, hook};

/// The source of proposed tokens.
pub enum Drafter {
    /// A smaller model with the same vocabulary.
    Model(Arc<dyn Decoder>),
    /// Prompt lookup (Saxena 2023): proposes the tokens that followed an earlier occurrence of the
    /// last n-gram. The number is the maximum length of this n-gram.
    Lookup(usize),
}

/// One request with speculative decoding.
pub struct SpeculativeDecoder {
    sequence: SequenceState,
    drafter: Drafter,
    /// The caches of the draft model.
    caches: Caches,
    /// All tokens of the prompt and the reply.
    tokens: Vec<u32>,
}

/// The number of positions that caches must be able to trim: the maximum of `num_draft_tokens`.
const WRONG: i32 = 64;

/// The engine's cache options, with caches that can remove wrong drafts.
fn trimmable(engine: &Engine) -> CacheOptions {
    CacheOptions {
        trimmable: Some(WRONG),
        ..*engine.cache_options()
    }
}

/// The cache options for the draft model. It is not quantized, because quantization groups may not
/// divide its small heads.
fn of_draft(options: CacheOptions) -> CacheOptions {
    CacheOptions {
        packing: None,
        ..options
    }
}

/// Refuses a decoder whose caches cannot remove wrong drafts.
///
/// # Errors
/// [`ErrorKind::Unsupported`], with the reason and an alternative.
pub fn check_rewinds(decoder: &dyn Decoder, what: &str) -> Result<()> {
    if decoder.new_caches(&CacheOptions::default()).rewinds() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "{what} keeps a recurrent state, from which wrong guesses cannot be removed; generate \
             without draft_model and prompt_lookup"
        ),
    ))
}

impl SpeculativeDecoder {
    /// The drafter for `request`. `None` if none is requested, or if each token restricts the next
    /// one.
    pub fn drafter(request: &Request) -> Option<Drafter> {
        let options = request.options();
        if options.speculative.num_draft_tokens == 0 || Sampler::waits(options) {
            return None;
        }
        match (request.engine().draft(), options.speculative.prompt_lookup) {
            (Some(draft), _) => Some(Drafter::Model(draft)),
            (None, 0) => None,
            (None, n) => Some(Drafter::Lookup(n)),
        }
    }

    /// The state of `request`, and the drafter's caches. Both begin with the longest cached prefix.
    ///
    /// # Errors
    /// As [`SequenceState::new`]; [`ErrorKind::Unsupported`] for models with a recurrent state.
    pub fn new(request: &mut Request, drafter: Drafter) -> Result<Self> {
        let engine = Arc::clone(request.engine());
        let options = trimmable(&engine);
        check_rewinds(engine.decoder()?.as_ref(), "the model")?;
        if let Drafter::Model(draft) = &drafter {
            check_rewinds(draft.as_ref(), "draft_model")?;
        }
        let caches = match &drafter {
            Drafter::Model(draft) => {
                let options = of_draft(options);
                // The draft model has no adapter, so its caches always have the same epoch.
                let prefixes = engine.draft_prefixes();
                prepared(
                    draft.as_ref(),
                    &options,
                    prefixes,
                    prefixes.epoch(),
                    request,
                )
                .caches
            }
            Drafter::Lookup(_) => Caches::default(),
        };
        Ok(Self {
            sequence: SequenceState::new(request, &options)?,
            drafter,
            caches,
            tokens: request.prompt().to_vec(),
        })
    }

    /// Stores the caches in the engine, for later prompts with the same prefix.
    pub fn keep(self, request: &Request) {
        if let (Drafter::Model(_), true) = (&self.drafter, request.keeps_prompt()) {
            let mut tokens = self.tokens;
            tokens.truncate(cache::offset(&self.caches).unsigned_abs() as usize);
            let prefixes = request.engine().draft_prefixes();
            let salt = request.salt();
            let of = (prefixes.epoch(), salt.as_deref());
            prefixes.put_salted(of, tokens, self.caches);
        }
        self.sequence.keep(request);
    }

    /// Runs one step, which generates at least one token.
    ///
    /// # Errors
    /// If memory runs out, or the request is interrupted.
    pub fn step(&mut self, request: &mut Request) -> Result<()> {
        if self.sequence.prefilled < request.prompt().len() {
            let first = self.sequence.prefill(request)?;
            self.take(request, &first)?;
            return Ok(());
        }
        if self.sequence.must_restart() {
            self.sequence.restart(request);
            let next = self.sequence.prefill(request)?;
            self.take(request, &next)?;
            return Ok(());
        }
        // All positions of a pass have the rotation of the last position. So no position of the
        // pass may lie beyond a switch.
        let until_switch = self.sequence.caches.until_switch() - 1;
        let most = request
            .options()
            .speculative
            .num_draft_tokens
            .min(request.remaining().saturating_sub(1))
            .min(usize::try_from(until_switch).unwrap_or(0));
        let guesses = self.guess(most, request)?;
        let Some(last) = self.tokens.last().copied() else {
            return Err(Error::new(
                ErrorKind::Engine,
                "there is no token to go on from",
            ));
        };
        let fault = engine("decode");
        let inputs = [&[last], guesses.as_slice()].concat();
        let sequence = &mut self.sequence;
        let mut edits = Edits::new(vec![sequence.edits.clone()]);
        let logits = forward(
            sequence.decoder.as_ref(),
            &inputs,
            (&mut sequence.caches, hook(&mut edits)),
            Positions::All,
        )
        .map_err(&fault)?;
        // Samples at every position, on the assumption that all earlier drafts are right. After the
        // first wrong draft, the samples are dropped and the sampler's state is restored.
        let mut drawn = Vec::with_capacity(inputs.len());
        for at in 0..i32::try_from(inputs.len()).unwrap_or(i32::MAX) {
            let logits = logits
                .slice_axis(1, at, at + 1)
                .and_then(|l| l.squeeze_axis(1))
                .map_err(&fault)?;
            let pending = draw_rows(&mut [&mut sequence.sampler], &logits)?
                .pop()
                .ok_or_else(|| Error::new(ErrorKind::Engine, "no token was drawn"))?;
            drawn.push((pending, sequence.sampler.memory()));
        }
        eval(
            drawn
                .iter()
                .flat_map(|(pending, memory)| pending.arrays().chain(memory.arrays()))
                .chain(sequence.caches.iter().flat_map(|c| c.arrays())),
        )
        .map_err(&fault)?;

        let mut right = 0;
        for (i, (pending, memory)) in drawn.into_iter().enumerate() {
            self.sequence.sampler.restore(memory);
            let id = self.take(request, &pending)?;
            if request.is_over() || guesses.get(i) != Some(&id) {
                break;
            }
            right += 1;
        }
        request.clock().drafted(guesses.len(), right);
        let wrong = i32::try_from(guesses.len() - right).unwrap_or(i32::MAX);
        if !cache::trim(&mut self.sequence.caches, wrong) {
            return Err(Error::new(
                ErrorKind::Engine,
                "a cache cannot remove rejected draft tokens",
            ));
        }
        // The draft model has processed its own drafts, except the last one, so its caches may have
        // too many positions.
        let known = i32::try_from(self.tokens.len()).unwrap_or(i32::MAX) - 1;
        let surplus = cache::offset(&self.caches) - known;
        if surplus > 0 {
            cache::trim(&mut self.caches, surplus);
        }
        Ok(())
    }

    /// Adds a token to the request's reply.
    fn take(&mut self, request: &mut Request, pending: &Pending) -> Result<u32> {
        let read = read(pending, request)?;
        read.check()?;
        let id = read.id;
        request.accept(read);
        self.tokens.push(id);
        Ok(id)
    }

    /// Proposes at most `most` tokens.
    fn guess(&mut self, most: usize, request: &Request) -> Result<Vec<u32>> {
        if most == 0 {
            return Ok(Vec::new());
        }
        match &self.drafter {
            Drafter::Lookup(n) => Ok(look_up(&self.tokens, *n, most)),
            Drafter::Model(draft) => {
                let fault = engine("draft");
                let mut from = cache::offset(&self.caches).unsigned_abs() as usize;
                let new = i32::try_from(self.tokens.len() - from).unwrap_or(i32::MAX);
                if self.caches.until_switch() < new {
                    let options = of_draft(trimmable(request.engine()));
                    self.caches = empty(draft.as_ref(), &options, request);
                    from = 0;
                }
                let mut logits = forward_prompt(
                    draft.as_ref(),
                    &self.tokens[from..],
                    (&mut self.caches, None),
                    request.options().prefill.prefill_step_size,
                    &mut |_| request.options().check_interrupt(),
                )?;
                // The first draft adds no position to the caches; each further draft adds that of
                // the draft before it.
                let storable = usize::try_from(self.caches.until_switch()).unwrap_or(0);
                let most = most.min(storable.saturating_add(1));
                let mut guesses: Vec<Array> = Vec::with_capacity(most);
                loop {
                    let token = logits
                        .reshape(&[1, -1])
                        .and_then(|l| l.argmax(-1, false))
                        .map_err(&fault)?;
                    guesses.push(token);
                    let (Some(token), true) = (guesses.last(), guesses.len() < most) else {
                        break;
                    };
                    let ids = token.reshape(&[1, 1]).map_err(&fault)?;
                    let mut rows = [cache::Row {
                        length: 1,
                        caches: &mut self.caches,
                    }];
                    let watch = &mut crate::nn::hooks::Watch::nothing();
                    logits = draft
                        .forward(&ids, &mut rows, Positions::Last, watch)
                        .map_err(&fault)?;
                }
                let state = self.caches.iter().flat_map(|c| c.arrays());
                eval(guesses.iter().chain(state)).map_err(&fault)?;
                guesses
                    .iter()
                    .map(|token| token.item::<u32>().map_err(&fault))
                    .collect()
            }
        }
    }
}

/// Returns at most `most` tokens that followed the latest earlier occurrence of the last `n`
/// tokens. If these do not occur earlier, shorter n-grams are tried, down to one token.
fn look_up(tokens: &[u32], n: usize, most: usize) -> Vec<u32> {
    for n in (1..=n.min(tokens.len().saturating_sub(1))).rev() {
        let end = tokens.len() - n;
        let key = &tokens[end..];
        let position = (0..end).rev().find(|&at| &tokens[at..at + n] == key);
        if let Some(at) = position {
            return tokens[at + n..].iter().copied().take(most).collect();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::look_up;

    #[test]
    fn the_longest_and_latest_match_is_continued() {
        assert_eq!(look_up(&[1, 2, 3, 9, 2, 3, 4, 2, 3], 3, 2), [4, 2]);
        assert_eq!(
            look_up(&[1, 2, 3, 9, 5, 2, 3, 4, 1, 2, 3], 3, 5),
            [9, 5, 2, 3, 4]
        );
        assert_eq!(look_up(&[7, 7, 7], 2, 4), [7]);
        assert!(look_up(&[1, 2, 3], 3, 4).is_empty());
        assert!(look_up(&[1], 3, 4).is_empty() && look_up(&[], 1, 1).is_empty());
    }
}
