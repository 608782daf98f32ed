//! A float32 buffer aligned to cache lines. The allocator guarantees an alignment of only 16 bytes,
//! with which every 64-byte vector could span two cache lines.

use std::ops::{Deref, DerefMut};

use crate::memory::resize;

/// A cache line of float32.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Floats per cache line.
const LINE: usize = 16;

/// A float32 buffer aligned to 64 bytes. Its memory grows and never shrinks.
#[derive(Debug, Default)]
pub(crate) struct AlignedVec {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedVec {
    /// Sets the length to `len`. New elements have arbitrary values.
    pub(crate) fn resize(&mut self, len: usize) {
        let lines = len.div_ceil(LINE).max(self.lines.len());
        resize(&mut self.lines, lines, Line::default());
        self.len = len;
    }
}

impl Deref for AlignedVec {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl DerefMut for AlignedVec {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_begins_a_line_whatever_the_length() {
        let mut numbers = AlignedVec::default();
        assert!(numbers.is_empty());
        for len in [1, 16, 17, 5, 1000, 0] {
            numbers.resize(len);
            assert_eq!(numbers.len(), len);
            assert_eq!(numbers.as_ptr().addr() % 64, 0);
            numbers.fill(1.0);
        }
    }
}
