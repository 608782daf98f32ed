//! Computes the prompt of one request in steps. The request can be cancelled between steps.

use inference::Result;

use super::request::Request;
use super::sequence::{Pending, SequenceState};
use crate::cache;
use crate::engine::forward::{forward, forward_prompt, free_unused};
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::steer::{Edits, hook};

impl SequenceState {
    /// Computes the rest of the prompt, and queues the next token. After a restart, computes all
    /// prompt and reply tokens again.
    ///
    /// # Errors
    /// If memory runs out, or the request is interrupted.
    pub fn prefill(&mut self, request: &mut Request) -> Result<Pending> {
        self.refresh(request);
        self.begun = true;
        let tokens = request.so_far();
        let total = tokens.len();
        let step_size = request.options().prefill.prefill_step_size.max(1);
        let mut from = self.prefilled.min(total.saturating_sub(1));
        request.report(from);
        let mut edits = Edits::new(vec![self.edits.clone()]);
        // Checkpoints can be stored only between steps, so this loop ends steps at their positions.
        while self.checkpoints.is_needed() {
            let to = self.checkpoints.end(from, from.saturating_add(step_size));
            if to >= total {
                break;
            }
            let step = (&mut self.caches, hook(&mut edits));
            forward(
                self.decoder.as_ref(),
                &tokens[from..to],
                step,
                Positions::Last,
            )
            .and_then(|_| cache::eval_caches(&self.caches))
            .and_then(|()| free_unused())
            .map_err(engine("prefill"))?;
            self.checkpoints.step(&self.caches, to, 1)?;
            from = to;
            request.report(from);
            request.options().check_interrupt()?;
        }
        let logits = forward_prompt(
            self.decoder.as_ref(),
            &tokens[from..],
            (&mut self.caches, hook(&mut edits)),
            step_size,
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
