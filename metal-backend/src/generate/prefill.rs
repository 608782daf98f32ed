//! Prefill: the prompt goes through the model in steps, so that a request can be cancelled between
//! them.

use inference::Result;

use super::request::Request;
use super::sequence::{Pending, SequenceState};
use crate::engine::forward::forward_prompt;
use crate::steer::{Edits, hook};

impl SequenceState {
    /// Runs what is left of the prompt, or after a restart of all tokens so far, and queues the
    /// next token.
    ///
    /// # Errors
    /// When memory runs out, or the request may not go on.
    pub fn prefill(&mut self, request: &mut Request) -> Result<Pending> {
        self.refresh(request);
        self.begun = true;
        let tokens = request.so_far();
        let total = tokens.len();
        let from = self.prefilled.min(total.saturating_sub(1));
        request.report(from);
        let mut edits = Edits::of(vec![self.edits.clone()]);
        let logits = forward_prompt(
            self.decoder.as_ref(),
            &tokens[from..],
            (&mut self.caches, hook(&mut edits)),
            request.options().prefill.prefill_step_size,
            &mut |done| {
                request.report(from + done);
                request.options().check_interrupt()
            },
        )?;
        self.prefilled = total;
        let first = self.draw(&logits)?;
        request.report(total);
        Ok(first)
    }
}
