//! Several tokens a step: some are guessed cheaply, and one forward pass of the model checks all of
//! them (Leviathan et al. 2023, Chen et al. 2023). What the model itself would have drawn is kept, the
//! first wrong guess and all after it are forgotten; so the reply is the plain one, token for token.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, eval};

use super::lane::{Lane, Pending, draw_rows, empty, prepared};
use super::{Request, read};
use crate::arch::Decoder;
use crate::cache::{self, CacheOptions, Caches};
use crate::engine::Engine;
use crate::engine::forward::{forward, forward_prompt};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::sample::Sampler;

/// Who guesses.
pub enum Guesser {
    /// A smaller model with the same vocabulary.
    Model(Arc<dyn Decoder>),
    /// What followed the last so many tokens where they stood before (Saxena 2023).
    Lookup(usize),
}

/// One request whose tokens are guessed first.
pub struct Drafting {
    lane: Lane,
    guesser: Guesser,
    /// Of the guessing model.
    caches: Caches,
    /// Everything so far, prompt and reply.
    tokens: Vec<u32>,
}

/// Positions that caches can be cut back at any time: as many as `num_draft_tokens` may be.
const WRONG: i32 = 64;

/// As the engine's caches are, but such that wrong guesses can be taken away.
fn trimmable(engine: &Engine) -> CacheOptions {
    CacheOptions {
        trimmable: Some(WRONG),
        ..*engine.cache_options()
    }
}

/// Small models have small heads, which groups may not divide.
fn of_draft(options: CacheOptions) -> CacheOptions {
    CacheOptions {
        packing: None,
        ..options
    }
}

impl Drafting {
    /// Who guesses for `request`; `None` where nobody shall, or where each token changes what the next
    /// may be.
    pub fn wanted(request: &Request) -> Option<Guesser> {
        let options = request.options();
        if options.num_draft_tokens == 0 || Sampler::waits(options) {
            return None;
        }
        match (request.engine().draft(), options.prompt_lookup) {
            (Some(draft), _) => Some(Guesser::Model(draft)),
            (None, 0) => None,
            (None, n) => Some(Guesser::Lookup(n)),
        }
    }

    /// A lane for `request`, and one for who guesses, each with what is remembered of the prompt.
    ///
    /// # Errors
    /// As [`Lane::new`].
    pub fn new(request: &mut Request, guesser: Guesser) -> Result<Self> {
        let engine = Arc::clone(request.engine());
        let options = trimmable(&engine);
        let caches = match &guesser {
            Guesser::Model(draft) => {
                let options = of_draft(options);
                // No adapter stands on the draft model, so its caches are all of one epoch.
                let prefixes = engine.draft_prefixes();
                prepared(
                    draft.as_ref(),
                    &options,
                    prefixes,
                    prefixes.epoch(),
                    request,
                )
                .0
            }
            Guesser::Lookup(_) => Caches::default(),
        };
        Ok(Self {
            lane: Lane::new(request, &options)?,
            guesser,
            caches,
            tokens: request.prompt().to_vec(),
        })
    }

    /// Gives the caches to the engine, for a later prompt that begins as this request did.
    pub fn keep(self, request: &Request) {
        if let (Guesser::Model(_), true) = (&self.guesser, request.options().cache_prompt) {
            let mut tokens = self.tokens;
            tokens.truncate(cache::offset(&self.caches).unsigned_abs() as usize);
            let prefixes = request.engine().draft_prefixes();
            prefixes.put(prefixes.epoch(), tokens, self.caches);
        }
        self.lane.keep(request);
    }

    /// One step: at least one token.
    ///
    /// # Errors
    /// When memory runs out, or the request may not go on.
    pub fn step(&mut self, request: &mut Request) -> Result<()> {
        if self.lane.fed < request.prompt().len() {
            let first = self.lane.prefill(request)?;
            self.take(request, &first)?;
            return Ok(());
        }
        if self.lane.must_restart() {
            self.lane.restart(request);
            let next = self.lane.prefill(request)?;
            self.take(request, &next)?;
            return Ok(());
        }
        // All places of a pass have one rotation, that of the last; so none of them is beyond a
        // switch.
        let until_switch = self.lane.caches.until_switch() - 1;
        let most = request
            .options()
            .num_draft_tokens
            .min(request.room().saturating_sub(1))
            .min(usize::try_from(until_switch).unwrap_or(0));
        let guesses = self.guess(most, request)?;
        let Some(last) = self.tokens.last().copied() else {
            return Err(Error::new(
                ErrorKind::Engine,
                "there is no token to go on from",
            ));
        };
        let fault = engine("decode");
        let fed = [&[last], guesses.as_slice()].concat();
        let lane = &mut self.lane;
        let logits = forward(
            lane.decoder.as_ref(),
            &fed,
            &mut lane.caches,
            Positions::All,
        )
        .map_err(&fault)?;
        // Draw at every place, as if all guesses before it were right. What follows a wrong one is
        // thrown away, with the state of the sampler.
        let mut drawn = Vec::with_capacity(fed.len());
        for at in 0..i32::try_from(fed.len()).unwrap_or(i32::MAX) {
            let logits = logits
                .slice_axis(1, at, at + 1)
                .and_then(|l| l.squeeze_axis(1))
                .map_err(&fault)?;
            let pending = draw_rows(&mut [&mut lane.sampler], &logits)?
                .pop()
                .ok_or_else(|| Error::new(ErrorKind::Engine, "no token was drawn"))?;
            drawn.push((pending, lane.sampler.memory()));
        }
        eval(
            drawn
                .iter()
                .flat_map(|(pending, memory)| pending.arrays().chain(memory.arrays()))
                .chain(lane.caches.iter().flat_map(|c| c.state())),
        )
        .map_err(&fault)?;

        let mut right = 0;
        for (i, (pending, memory)) in drawn.into_iter().enumerate() {
            self.lane.sampler.remind(memory);
            let id = self.take(request, &pending)?;
            if request.is_over() || guesses.get(i) != Some(&id) {
                break;
            }
            right += 1;
        }
        request.clock().drafted(guesses.len(), right);
        let wrong = i32::try_from(guesses.len() - right).unwrap_or(i32::MAX);
        if !cache::trim(&mut self.lane.caches, wrong) {
            return Err(Error::new(ErrorKind::Engine, "a cache cannot be cut back"));
        }
        // The guessing model has seen its own guesses, up to the last but one.
        let known = i32::try_from(self.tokens.len()).unwrap_or(i32::MAX) - 1;
        let surplus = cache::offset(&self.caches) - known;
        if surplus > 0 {
            cache::trim(&mut self.caches, surplus);
        }
        Ok(())
    }

    /// Hands a token to the request.
    fn take(&mut self, request: &mut Request, pending: &Pending) -> Result<u32> {
        let read = read(pending, request)?;
        let id = read.id;
        request.accept(read);
        self.tokens.push(id);
        Ok(id)
    }

    /// At most `most` guesses.
    fn guess(&mut self, most: usize, request: &Request) -> Result<Vec<u32>> {
        if most == 0 {
            return Ok(Vec::new());
        }
        match &self.guesser {
            Guesser::Lookup(n) => Ok(look_up(&self.tokens, *n, most)),
            Guesser::Model(draft) => {
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
                    &mut self.caches,
                    request.options().prefill_step_size,
                    &mut |_| request.options().check_interrupt(),
                )?;
                // The first guess stores nothing, each further one the guess before it.
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
                let state = self.caches.iter().flat_map(|c| c.state());
                eval(guesses.iter().chain(state)).map_err(&fault)?;
                guesses
                    .iter()
                    .map(|token| token.item::<u32>().map_err(&fault))
                    .collect()
            }
        }
    }
}

/// What followed the last `n` tokens (or fewer, down to one) where they stood last, at most `most`.
fn look_up(tokens: &[u32], n: usize, most: usize) -> Vec<u32> {
    for n in (1..=n.min(tokens.len().saturating_sub(1))).rev() {
        let end = tokens.len() - n;
        let key = &tokens[end..];
        let found = (0..end).rev().find(|&at| &tokens[at..at + n] == key);
        if let Some(at) = found {
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
