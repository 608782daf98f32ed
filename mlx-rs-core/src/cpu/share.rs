//! Cutting work into parts for the pool, and outputs that several threads write.

use super::pool;

/// Work smaller than this (multiplications) is not worth a second thread.
pub(super) const WORTH_SHARING: usize = 1 << 15;

/// Parts that each thread gets, so that a late one does not keep the others waiting.
const PARTS_PER_THREAD: usize = 4;

/// Cuts `0..n` into parts and runs `part(from, to)` on all threads; so many multiplications in all.
pub(super) fn share(n: usize, multiplications: usize, part: &(dyn Fn(usize, usize) + Sync)) {
    let pool = pool::pool();
    if multiplications < WORTH_SHARING || pool.width() == 1 {
        part(0, n);
        return;
    }
    let size = n.div_ceil(pool.width() * PARTS_PER_THREAD).max(1);
    pool.run(n.div_ceil(size), &|i| {
        part(i * size, ((i + 1) * size).min(n));
    });
}

/// An output, written by several threads in places of their own.
pub(super) struct Output<T = f32> {
    data: *mut T,
    len: usize,
}

// SAFETY: each part writes places of its own; see `share`. What is written is sent to the thread that reads it.
unsafe impl<T: Send> Sync for Output<T> {}

impl<T> Output<T> {
    /// The output, which must not be used otherwise while this is.
    pub(super) fn new(output: &mut [T]) -> Self {
        Self {
            data: output.as_mut_ptr(),
            len: output.len(),
        }
    }

    /// The address of element `from`, with at least `n` elements from there on.
    pub(super) fn address(&self, from: usize, n: usize) -> *mut T {
        assert!(from <= self.len && n <= self.len - from);
        self.data.wrapping_add(from)
    }

    /// The elements `from..from + n`, for one part alone.
    ///
    /// # Safety
    /// No other part may use any of them.
    #[allow(clippy::mut_from_ref, reason = "each part has elements of its own")]
    pub(super) unsafe fn part(&self, from: usize, n: usize) -> &mut [T] {
        assert!(from <= self.len && n <= self.len - from);
        // SAFETY: within the output; that nobody else uses them is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(from), n) }
    }
}
