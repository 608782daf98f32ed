//! Prefetches of cache lines. Addresses need not be valid.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

/// The number of bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const ROW_BYTES: usize = 64;

/// Prefetches elements that will be read soon.
pub(crate) fn read(elements: &[f32]) {
    lines(elements.as_ptr().cast(), size_of_val(elements));
}

/// Prefetches `bytes` bytes, which need not exist.
#[cfg(target_arch = "x86_64")]
pub(crate) fn lines(at: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(ROW_BYTES) {
        // SAFETY: every x86-64 processor has this instruction, and it reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(offset).cast()) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn lines(_: *const u8, _: usize) {}

/// The elements to prefetch during other computation. Attention of single queries is memory-bound,
/// and the hardware prefetcher stops at the end of each page and segment.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "only the kernels for x86-64 prefetch keys")
)]
pub(crate) struct KeyPrefetch {
    /// The address of the first of several adjacent positions. There need not be memory at these
    /// addresses. With null, nothing is prefetched.
    pub data: *const u8,
    /// The stride between positions, in bytes.
    pub position: usize,
}

impl KeyPrefetch {
    /// Returns a prefetch of the same positions, from byte `at` on. If not `wanted`, it prefetches
    /// nothing.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn bytes(self, at: usize, wanted: bool) -> Self {
        let data = if wanted && !self.data.is_null() {
            self.data.wrapping_add(at)
        } else {
            std::ptr::null()
        };
        Self { data, ..self }
    }

    /// Prefetches `n` bytes of position `i`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(crate) fn fetch(self, i: usize, n: usize) {
        if self.data.is_null() {
            return;
        }
        for at in (0..n).step_by(ROW_BYTES) {
            let place = self.data.wrapping_add(i * self.position + at);
            // SAFETY: a prefetch of an invalid address has no effect, and all x86-64 processors
            // have sse.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
        }
    }
}
