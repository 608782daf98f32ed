//! Handles a forward pass that runs out of memory: one request fails, the others continue.

use inference::{Error, ErrorKind};
use mlx_rs_core::memory;

use super::{Batch, Member};
use crate::sample::Sampler;

impl Batch {
    /// Frees memory after a pass failed with `error`. Drops the stored caches of earlier requests.
    /// If there are none, the request with the most tokens fails. The other requests of the pass
    /// compute all tokens again, since the pass may have changed their caches. Requests outside the
    /// pass continue.
    ///
    /// Returns `false` and does nothing if the error is not a lack of memory, or if no pass failed.
    pub(super) fn make_room(&mut self, error: &Error) -> bool {
        if error.kind() != ErrorKind::OutOfMemory || self.rows.iter().all(|m| m.before.is_none()) {
            return false;
        }
        if !self.engine.prefixes().drop_all() {
            let computing = self.rows.iter_mut().filter(|m| m.holds_caches());
            if let Some(largest) = computing.max_by_key(|m| m.request.so_far().len()) {
                largest.fail(error);
            }
        }
        for member in &mut self.rows {
            member.compute_again(error);
        }
        // Without this call, MLX keeps the freed memory reserved. A failure here does no harm.
        let _ = memory::clear_cache();
        true
    }
}

impl Member {
    fn holds_caches(&self) -> bool {
        let sequence = self.sequence.as_ref();
        sequence.is_some_and(|s| s.begun || s.next.is_some())
    }

    fn fail(&mut self, error: &Error) {
        self.sequence = None;
        self.before = None;
        self.error.get_or_insert_with(|| error.clone());
    }

    /// Prepares a request of a failed pass to compute all its tokens again.
    fn compute_again(&mut self, error: &Error) {
        let Some(before) = self.before.take() else {
            return;
        };
        let Some(sequence) = &mut self.sequence else {
            return;
        };
        // A grammar cannot undo a token, and a draft model's caches are not restored here.
        let has_drawn = sequence.sampler.step() != before.step();
        if self.draft.is_some() || (has_drawn && Sampler::waits(self.request.options())) {
            self.fail(error);
            return;
        }
        sequence.sampler.restore(before);
        sequence.restart(&self.request);
        if self.request.so_far().len() == self.request.prompt().len() {
            self.request.clock().cached(0);
        }
    }
}
