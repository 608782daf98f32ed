//! Parallel loops over the pool, and outputs that several threads write at disjoint indices.

use std::marker::PhantomData;

use crate::pool;

/// The minimum number of multiplications for which a second thread is worthwhile.
pub(crate) const MIN_PARALLEL_WORK: usize = 1 << 15;

/// Parts per thread. With several parts, other threads can run some parts of a slow thread.
const PARTS_PER_THREAD: usize = 4;

/// Divides `0..n` into parts and runs `part(from, to)` on all threads. `multiplications` is the
/// total work.
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

/// Runs `part` on all threads, each with an iterator over some of the indices `0..n`. `part` must
/// exhaust the iterator. `multiplications` is the total work.
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

/// An output that several threads write at disjoint indices.
pub(crate) struct SharedOutput<T = f32> {
    data: *mut T,
    len: usize,
}

// SAFETY: the parts of a job (see `parallel_ranges`) write disjoint elements. Values are written
// by one thread and read by another, so `T` must be `Send`.
unsafe impl<T: Send> Sync for SharedOutput<T> {}

impl<T> SharedOutput<T> {
    /// Wraps an output. Nothing else may use it during the lifetime.
    pub(crate) fn new(output: &mut [T]) -> Self {
        Self {
            data: output.as_mut_ptr(),
            len: output.len(),
        }
    }

    /// Returns the address of element `from`, and checks that `n` elements begin there.
    pub(crate) fn ptr(&self, from: usize, n: usize) -> *mut T {
        assert!(from <= self.len && n <= self.len - from);
        self.data.wrapping_add(from)
    }

    /// Returns a block of `rows` rows of `width` elements, which one part of the job may use. The
    /// first row begins at element `from`, and rows are `step` elements apart.
    ///
    /// # Safety
    /// No other part of the job may use any element of the block.
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
            marker: PhantomData,
        }
    }

    /// Returns the elements `from..from + n`, which one part of the job may use.
    ///
    /// # Safety
    /// No other part of the job may use any of these elements.
    #[allow(clippy::mut_from_ref, reason = "each part has elements of its own")]
    pub(crate) unsafe fn slice_mut(&self, from: usize, n: usize) -> &mut [T] {
        assert!(from <= self.len && n <= self.len - from);
        // SAFETY: the range is within the output. The caller guarantees that no other thread uses
        // these elements.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(from), n) }
    }
}

/// Columns of adjacent rows, used by one thread only.
pub(crate) struct OutputBlock<'a, T = f32> {
    data: *mut T,
    step: usize,
    rows: usize,
    width: usize,
    marker: PhantomData<&'a mut [T]>,
}

impl<'a, T> OutputBlock<'a, T> {
    /// Creates a block of whole rows, which are stored consecutively.
    pub(crate) fn contiguous(data: &'a mut [T], rows: usize) -> Self {
        let width = data.len() / rows.max(1);
        Self {
            data: data.as_mut_ptr(),
            step: width,
            rows,
            width,
            marker: PhantomData,
        }
    }

    /// The numbers of rows and columns.
    pub(crate) fn dims(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    /// The address of the first element, and the stride between rows.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
    pub(crate) fn raw_parts(&mut self) -> (*mut T, usize) {
        (self.data, self.step)
    }

    /// The elements of a row.
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows);
        // SAFETY: the elements exist and nothing else uses them. For a block from `contiguous`, the
        // mutable borrow guarantees this; for other blocks, the contract of `SharedOutput::block`
        // does.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(i * self.step), self.width) }
    }
}
