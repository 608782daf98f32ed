//! Prefetches the first rows of the next product's matrices at the barrier before it. The hardware
//! prefetcher stops at the end of a matrix.

use std::ops::Range;

use crate::gemm::product::{MatrixFormat, MatrixPart, Product};
use crate::layout::packed::PackedMatrix;
use crate::pool;
use crate::simd::prefetch::lines;

/// The maximum number of rows for which reading the matrices limits the speed of a product.
const FEW: usize = 16;

/// The number of row blocks that a thread reads at the same time: the outputs of two tiles.
const ROW_BLOCKS: usize = 4;

/// The number of bytes to prefetch of a row block's words. From there on, the hardware prefetcher
/// reads ahead.
const BYTES: usize = 4096;

impl Product {
    /// Prefetches the first words of stored matrices that thread `me` of the pool reads.
    ///
    /// # Safety
    /// Each stored matrix must have its part's format and size, and `k` must be the number of
    /// columns, as for [`crate::Work::run`].
    pub unsafe fn fetch(&self, me: usize) {
        if self.rows > FEW {
            return;
        }
        let Some((matrices, blocks)) =
            self.first_row_blocks(|places| pool::pool().first_part(places, me))
        else {
            return;
        };
        for part in &self.parts[matrices] {
            if let (
                MatrixFormat::Quantized {
                    bits,
                    group,
                    scales,
                },
                Some(stored),
            ) = (part.kind, &part.stored)
            {
                // SAFETY: the caller guarantees format and size.
                let matrix = unsafe {
                    PackedMatrix::from_inputs(stored.inputs(), (bits, self.k / group, scales))
                };
                matrix.block_range(blocks.clone()).fetch();
            }
        }
    }

    /// The matrices and row blocks that a thread reads first if it starts at place `first`. With a
    /// gate, there are row blocks of both matrices.
    fn first_row_blocks(
        &self,
        first: impl Fn(usize) -> usize,
    ) -> Option<(Range<usize>, Range<usize>)> {
        let (parts, each) = match self.gate {
            Some(_) => (&self.parts[..1], ROW_BLOCKS / 2),
            None => (&self.parts[..], ROW_BLOCKS),
        };
        let places = |part: &MatrixPart| part.row_blocks().div_ceil(each);
        let mut place = first(parts.iter().map(places).sum());
        for (i, part) in parts.iter().enumerate() {
            if place < places(part) {
                let matrices = if self.gate.is_some() { 0..2 } else { i..i + 1 };
                let begin = place * each;
                return Some((matrices, begin..part.row_blocks().min(begin + each)));
            }
            place -= places(part);
        }
        None
    }
}

impl PackedMatrix<'_> {
    /// Prefetches the first elements of each of these row blocks.
    fn fetch(self) {
        for block in 0..self.row_blocks() {
            let packed = self.block_range(block..block + 1);
            let words = packed.words.as_ptr_range();
            lines(words.start.cast(), (packed.words.len() * 4).min(BYTES));
            for factors in [packed.scales, packed.biases] {
                let (at, bytes) = factors.raw_bytes();
                lines(at, bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::gemm::product::{MatrixOwner, Size, StoredMatrix};
    use crate::isa::Isa;
    use crate::layout::packed::INTERLEAVED_ROWS;
    use crate::layout::packed::ScaleFormat;
    use crate::prefill_inputs::PrefillInputs;
    use crate::simd::portable::vmath::Gate;
    use crate::work::Input;

    impl MatrixOwner for (Vec<u32>, Vec<f32>) {}

    /// A stored matrix `[n, 64]` of zeros, with 4-bit codes in groups of 32.
    fn part(n: usize) -> MatrixPart {
        let matrix = n.div_ceil(INTERLEAVED_ROWS);
        let owner = Arc::new((
            vec![0u32; matrix * 8 * INTERLEAVED_ROWS],
            vec![0.0f32; matrix * 2 * INTERLEAVED_ROWS],
        ));
        let (words, factors) = &*owner;
        // SAFETY: `owner` keeps the elements alive, and nothing writes them.
        let stored = unsafe {
            let words = Input::from_raw(words.as_ptr().cast(), words.len());
            let factors = Input::from_raw(factors.as_ptr().cast(), factors.len());
            StoredMatrix::new([words, factors, factors], owner)
        };
        MatrixPart {
            kind: MatrixFormat::Quantized {
                bits: 4,
                group: 32,
                scales: ScaleFormat::F32,
            },
            size: Size { n, k: 64 },
            bias: false,
            stored: Some(stored),
        }
    }

    fn product(sizes: &[usize], gate: Option<Gate>) -> Product {
        let n = sizes.iter().sum::<usize>() / if gate.is_some() { 2 } else { 1 };
        Product {
            parts: sizes.iter().map(|&n| part(n)).collect(),
            rows: 3,
            k: 64,
            n,
            eps: None,
            gate,
            activation: None,
            residual: false,
            float_inputs: false,
            prefill_inputs: PrefillInputs::Float32,
            isa: Isa::detect(),
        }
    }

    /// A thread begins at a multiple of 32 outputs; with a gate, at a multiple of 16 outputs of
    /// each matrix.
    #[test]
    fn bands_are_where_a_thread_begins() {
        let work = product(&[64, 40, 9], None);
        for (place, wanted) in [
            (0, Some((0..1, 0..4))),
            (1, Some((0..1, 4..8))),
            (2, Some((1..2, 0..4))),
            // The matrix ends within this thread's outputs.
            (3, Some((1..2, 4..5))),
            (4, Some((2..3, 0..2))),
            (5, None),
        ] {
            let first = |places: usize| {
                assert_eq!(places, 5);
                place
            };
            assert_eq!(work.first_row_blocks(first), wanted, "{place}");
        }
        let gate = product(&[40, 40], Some(Gate::Silu));
        assert_eq!(gate.first_row_blocks(|_| 1), Some((0..2, 2..4)));
        assert_eq!(gate.first_row_blocks(|_| 2), Some((0..2, 4..5)));
        // With this many threads, some threads have no row blocks.
        for work in [&work, &gate] {
            for me in 0..=pool::pool().threads() {
                // SAFETY: `part` makes matrices of this format with 64 columns.
                unsafe { work.fetch(me) };
            }
        }
    }
}
