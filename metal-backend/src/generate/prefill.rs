//! The prefill of one request, split into steps so that the request can be cancelled between steps.

use inference::Result;

use super::request::Request;
use super::sequence::{Pending, SequenceState};
use crate::engine::forward::forward_prompt;
use crate::steer::{Edits, hook};

impl SequenceState {
    /// Computes the rest of the prompt, and queues the next token. After a restart, computes all
    /// tokens up to now.
    ///
    /// # Errors
    /// If memory runs out, or the request is interrupted.
    pub fn prefill(&mut self, request: &mut Request) -> Result<Pending> {
        self.refresh(request);
        self.begun = true;
        let tokens = request.so_far();
        let total = tokens.len();
        let from = self.prefilled.min(total.saturating_sub(1));
        request.report(from);
        let mut edits = Edits::new(vec![self.edits.clone()]);
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
