//! Parallel loops over the pool, and outputs that several threads write in disjoint places.

use std::marker::PhantomData;

use crate::pool;

/// Work smaller than this (multiplications) is not worth a second thread.
pub(crate) const MIN_PARALLEL_WORK: usize = 1 << 15;

/// Parts that each thread gets, so that a late one does not keep the others waiting.
const PARTS_PER_THREAD: usize = 4;

/// Cuts `0..n` into parts and runs `part(from, to)` on all threads. `multiplications` is the work
/// in all.
pub(crate) fn parallel_ranges(
    n: usize,
    multiplications: usize,
    part: &(dyn Fn(usize, usize) + Sync),
) {
    let pool = pool::pool();
    if multiplications < MIN_PARALLEL_WORK || pool.threads() == 1 {
        part(0, n);
        return;
    }
    let size = n.div_ceil(pool.threads() * PARTS_PER_THREAD).max(1);
    pool.run(n.div_ceil(size), &|i| {
        part(i * size, ((i + 1) * size).min(n));
    });
}

/// Runs `part` on all threads, each with an iterator over the numbers of `0..n` that it must do. It
/// must take all of them. `multiplications` is the work in all.
pub(crate) fn parallel_parts(
    n: usize,
    multiplications: usize,
    part: &(dyn Fn(&mut dyn Iterator<Item = usize>) + Sync),
) {
    if multiplications < MIN_PARALLEL_WORK {
        part(&mut (0..n));
        return;
    }
    pool::pool().run_iter(n, part);
}

/// An output, written by several threads in places of their own.
pub(crate) struct SharedOutput<T = f32> {
    data: *mut T,
    len: usize,
}

// SAFETY: each part writes places of its own; see `parallel_ranges`. A write is sent to the thread
// that reads it.
unsafe impl<T: Send> Sync for SharedOutput<T> {}

impl<T> SharedOutput<T> {
    /// The output, which must not be used otherwise while this is.
    pub(crate) fn new(output: &mut [T]) -> Self {
        Self {
            data: output.as_mut_ptr(),
            len: output.len(),
        }
    }

    /// The address of element `from`, with at least `n` elements from there on.
    pub(crate) fn ptr(&self, from: usize, n: usize) -> *mut T {
        assert!(from <= self.len && n <= self.len - from);
        self.data.wrapping_add(from)
    }

    /// A block of `rows` rows of `width` elements for one part alone. The first begins at element
    /// `from`, each `step` after the one before.
    ///
    /// # Safety
    /// No other part may use any of them.
    pub(crate) unsafe fn block(
        &self,
        from: usize,
        step: usize,
        (rows, width): (usize, usize),
    ) -> OutputBlock<'_, T> {
        assert!(rows > 0 && width <= step);
        OutputBlock {
            data: self.ptr(from, (rows - 1) * step + width),
            step,
            rows,
            width,
            own: PhantomData,
        }
    }

    /// The elements `from..from + n`, for one part alone.
    ///
    /// # Safety
    /// No other part may use any of them.
    #[allow(clippy::mut_from_ref, reason = "each part has elements of its own")]
    pub(crate) unsafe fn slice_mut(&self, from: usize, n: usize) -> &mut [T] {
        assert!(from <= self.len && n <= self.len - from);
        // SAFETY: within the output; that no other thread uses them is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(from), n) }
    }
}

/// Columns of adjacent rows, which no other thread uses meanwhile.
pub(crate) struct OutputBlock<'a, T = f32> {
    data: *mut T,
    step: usize,
    rows: usize,
    width: usize,
    own: PhantomData<&'a mut [T]>,
}

impl<'a, T> OutputBlock<'a, T> {
    /// All of some rows that stand one after another.
    pub(crate) fn contiguous(data: &'a mut [T], rows: usize) -> Self {
        let width = data.len() / rows.max(1);
        Self {
            data: data.as_mut_ptr(),
            step: width,
            rows,
            width,
            own: PhantomData,
        }
    }

    /// Rows, and columns.
    pub(crate) fn dims(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    /// The address of the first one, and how far the first ones of rows are apart.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
    pub(crate) fn raw_parts(&mut self) -> (*mut T, usize) {
        (self.data, self.step)
    }

    /// The elements of a row.
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows);
        // SAFETY: they exist and have no other user. `all` was given so, and the caller of
        // `SharedOutput::columns` promised it.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(i * self.step), self.width) }
    }
}
