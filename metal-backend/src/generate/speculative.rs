//! Speculative decoding: a drafter proposes tokens, and one forward pass of the model checks all of
//! them (Leviathan et al. 2023, Chen et al. 2023). A proposed token is accepted if the model
//! samples the same token. The first wrong token and all tokens after it are dropped. The reply
//! therefore equals the reply of plain decoding.
//!
//! `draft.rs` proposes tokens. `batch/speculation.rs` checks the proposals of several requests.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::eval;

use super::draft::{Draft, guess, trimmable};
use super::request::Request;
use super::sequence::{Pending, SequenceState, draw_rows, read};
use crate::cache;
use crate::engine::forward::forward;
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::steer::{Edits, hook};

/// One request with speculative decoding.
pub struct SpeculativeDecoder {
    sequence: SequenceState,
    draft: Draft,
    /// All tokens of the prompt and the reply.
    tokens: Vec<u32>,
}

impl SpeculativeDecoder {
    /// Creates the state of `request`, with the longest cached prefix.
    ///
    /// # Errors
    /// The errors of [`SequenceState::new`].
    pub fn new(request: &mut Request, draft: Draft) -> Result<Self> {
        let options = trimmable(request.engine());
        Ok(Self {
            sequence: SequenceState::new(request, &options)?,
            draft,
            tokens: request.prompt().to_vec(),
        })
    }

    /// Stores the caches in the engine, for later prompts with the same prefix.
    pub fn keep(self, request: &Request) {
        self.draft.keep(request, self.tokens);
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
        // A forward pass rotates all its positions as the last one requires. So the pass must end
        // before the position at which the rotation changes.
        let until_switch = self.sequence.caches.until_switch() - 1;
        let most = request
            .options()
            .speculative
            .num_draft_tokens
            .min(request.remaining().saturating_sub(1))
            .min(usize::try_from(until_switch).unwrap_or(0));
        while self.draft.catch_up(&self.tokens, request)? {
            request.options().check_interrupt()?;
        }
        let rows = vec![(&mut self.draft, self.tokens.as_slice(), most)];
        let guesses = guess(rows)?.pop().unwrap_or_default();
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
        // Samples at every position as if all earlier drafts were right. After the first wrong
        // draft, the samples are dropped and the sampler's state is restored.
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
        // The last token is in no cache yet.
        self.draft.trim_to(self.tokens.len() - 1);
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
}
