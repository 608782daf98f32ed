//! A buffer of float32 that begins at a cache line. The allocator gives 16 bytes only, where each
//! vector of 64 bytes would be in two lines.

use std::ops::{Deref, DerefMut};

/// A cache line of float32.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Numbers in a line.
const LINE: usize = 16;

/// Float32 numbers, the first one at a multiple of 64 bytes. It grows and never shrinks.
#[derive(Debug, Default)]
pub(crate) struct AlignedVec {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedVec {
    /// Makes it `len` numbers long. The new ones have any value.
    pub(crate) fn resize(&mut self, len: usize) {
        let lines = len.div_ceil(LINE).max(self.lines.len());
        self.lines.resize(lines, Line::default());
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
