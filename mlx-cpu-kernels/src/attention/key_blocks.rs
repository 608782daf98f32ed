//! The order in which attention adds keys: by position, in blocks whose borders depend only on the
//! position of a key. Single queries and panels of queries add the same keys in the same order. So
//! the attention of a query is bitwise the same, whether it is computed alone or among others, and
//! with any number of threads.
//!
//! In a block, scores become exponentials relative to the block's maximum. Blocks are then added
//! one after the other, relative to the maximum so far (Milakov and Gimelshein 2018).

use std::ops::Range;

use crate::isa::Isa;
use crate::layout::tile::{BlockSoftmax, LANES};
use crate::simd::portable::softmax::softmax_base;
use crate::simd::portable::vmath;

/// The number of keys per block. With 64, short caches have enough blocks for several threads, and
/// adding the blocks costs little.
pub(crate) const BLOCK_KEYS: usize = 64;

/// The keys that a query attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VisibleKeys {
    /// The number of kept keys, which are the first keys in memory and in the sequence.
    pub kept: usize,
    /// The keys after the kept ones, in the order of their positions. The second range is empty,
    /// unless these keys are in a ring buffer.
    pub ranges: [Range<usize>; 2],
    /// The position of the first key of `ranges`.
    pub position: usize,
}

/// A block of visible keys, whose softmax and weighted sum of values are computed together.
#[derive(Debug, Clone)]
pub(crate) struct KeyBlock {
    /// The keys, as ranges in memory. The second range may be empty.
    pub parts: [Range<usize>; 2],
    /// The position of the first key.
    pub position: usize,
}

impl KeyBlock {
    /// The number of keys.
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(Range::len).sum()
    }
}

impl VisibleKeys {
    /// Creates visible keys that are consecutive in memory.
    pub(crate) fn run(keys: Range<usize>, position: usize) -> Self {
        Self {
            kept: 0,
            ranges: [keys, 0..0],
            position,
        }
    }

    /// The number of keys.
    pub(crate) fn len(&self) -> usize {
        self.kept + self.ranges.iter().map(Range::len).sum::<usize>()
    }

    /// The number of blocks, at least one.
    pub(crate) fn blocks(&self) -> usize {
        let end = self.position + self.len() - self.kept;
        let others = match end > self.position {
            true => end.div_ceil(BLOCK_KEYS) - self.position / BLOCK_KEYS,
            false => 0,
        };
        (self.kept.div_ceil(BLOCK_KEYS) + others).max(1)
    }

    /// Returns block `number`, which must be less than [`Self::blocks`].
    pub(crate) fn block(&self, number: usize) -> KeyBlock {
        let of_kept = self.kept.div_ceil(BLOCK_KEYS);
        if number < of_kept {
            let from = number * BLOCK_KEYS;
            return KeyBlock {
                parts: [from..self.kept.min(from + BLOCK_KEYS), 0..0],
                position: from,
            };
        }
        let [first, second] = &self.ranges;
        let (all, begin) = (first.len() + second.len(), self.position);
        let block = (begin / BLOCK_KEYS + number - of_kept) * BLOCK_KEYS;
        // The indices of the block's keys, counted from the first key after the kept ones.
        let from = block.max(begin) - begin;
        let to = (block + BLOCK_KEYS - begin).min(all).max(from);
        let cut = |range: &Range<usize>, before: usize| {
            let at =
                |place: usize| range.start + place.clamp(before, before + range.len()) - before;
            at(from)..at(to)
        };
        KeyBlock {
            parts: [cut(first, 0), cut(second, first.len())],
            position: begin + from,
        }
    }
}

/// The maximum score so far, and the sum of exponentials relative to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub greatest: f32,
    pub total: f32,
}

impl Running {
    /// The state before the first block. A sink is a score without a value.
    pub(crate) fn new(sink: Option<f32>) -> Self {
        Self {
            greatest: sink.unwrap_or(f32::NEG_INFINITY),
            total: if sink.is_some() { 1.0 } else { 0.0 },
        }
    }

    /// Adds the maximum and the sum of exponentials of a block. Returns the factors of the earlier
    /// weighted sums and of the block's.
    #[inline(always)]
    fn add(&mut self, (greatest, total): (f32, f32)) -> [f32; 2] {
        // The comparison ignores a NaN, but the block's sum contains it.
        let most = if greatest > self.greatest {
            greatest
        } else {
            self.greatest
        };
        let base = softmax_base(most);
        let factors = [
            vmath::exp(self.greatest - base),
            vmath::exp(greatest - base),
        ];
        self.greatest = most;
        self.total = self.total * factors[0] + total * factors[1];
        factors
    }
}

/// Returns the value that is subtracted from a score because of the distance between the query's
/// and the key's position.
#[inline(always)]
pub(crate) fn distance_bias(slope: f32, query: f32, key: usize) -> f32 {
    slope * (query - key as f32).abs()
}

/// [`Running`] of the queries of a panel, each in its lane.
#[derive(Debug, Clone)]
pub(crate) struct PanelRunning {
    pub greatest: [f32; LANES],
    pub total: [f32; LANES],
}

impl PanelRunning {
    /// The states before the first block, with the sink of [`Running::new`].
    pub(crate) fn new(sink: Option<f32>) -> Self {
        let Running { greatest, total } = Running::new(sink);
        Self {
            greatest: [greatest; LANES],
            total: [total; LANES],
        }
    }

    /// As [`Running::add`] of each query.
    pub(crate) fn add(&mut self, isa: Isa, block: &BlockSoftmax) -> [[f32; LANES]; 2] {
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx2() {
            // SAFETY: `has_avx2` is true only on processors with avx2.
            return unsafe { self.add_avx2(block) };
        }
        let _ = isa;
        self.add_with(block)
    }

    /// [`Self::add_with`] for AVX2. The function does not enable fma, so each sum and product is
    /// rounded as in [`Running::add`].
    ///
    /// # Safety
    /// The processor must have avx2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn add_avx2(&mut self, block: &BlockSoftmax) -> [[f32; LANES]; 2] {
        self.add_with(block)
    }

    #[inline(always)]
    fn add_with(&mut self, (greatest, total): &BlockSoftmax) -> [[f32; LANES]; 2] {
        let mut factors = [[0.0; LANES]; 2];
        for i in 0..LANES {
            let mut state = Running {
                greatest: self.greatest[i],
                total: self.total[i],
            };
            [factors[0][i], factors[1][i]] = state.add((greatest[i], total[i]));
            (self.greatest[i], self.total[i]) = (state.greatest, state.total);
        }
        factors
    }
}

/// Adds a block to the weighted sums of a query.
pub(crate) fn add_block(
    isa: Isa,
    state: &mut Running,
    block: (f32, f32),
    sums: &mut [f32],
    of_block: &[f32],
) {
    let factors = state.add(block);
    add_row(isa, sums, of_block, factors);
}

/// `sums = sums * factors[0] + of_block * factors[1]`.
fn add_row(isa: Isa, sums: &mut [f32], of_block: &[f32], factors: [f32; 2]) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: `has_avx2` is true only on processors with avx2.
        return unsafe { add_row_avx2(sums, of_block, factors) };
    }
    let _ = isa;
    add_row_with(sums, of_block, factors);
}

/// [`add_row_with`] for AVX2.
///
/// # Safety
/// The processor must have avx2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_row_avx2(sums: &mut [f32], of_block: &[f32], factors: [f32; 2]) {
    add_row_with(sums, of_block, factors);
}

#[inline(always)]
fn add_row_with(sums: &mut [f32], of_block: &[f32], [before, block]: [f32; 2]) {
    for (sum, value) in sums.iter_mut().zip(of_block) {
        *sum = *sum * before + value * block;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_all_visible_keys_in_order() {
        let of = |kept, ranges, position| VisibleKeys {
            kept,
            ranges,
            position,
        };
        for visible in [
            of(0, [0..1, 0..0], 0),
            of(0, [5..5, 0..0], 5),
            of(4, [4..200, 0..0], 4),
            of(70, [100..300, 0..0], 333),
            of(0, [63..65, 0..0], 63),
            of(0, [64..128, 0..0], 1),
            of(3, [9..9, 0..0], 9),
            of(4, [40..100, 4..40], 1000),
            of(0, [99..100, 0..99], 127),
            of(0, [0..100, 0..0], 128),
        ] {
            let blocks: Vec<_> = (0..visible.blocks()).map(|i| visible.block(i)).collect();
            let keys: Vec<usize> = blocks
                .iter()
                .flat_map(|b| b.parts.clone())
                .flatten()
                .collect();
            let [first, second] = visible.ranges.clone();
            let wanted: Vec<usize> = (0..visible.kept).chain(first).chain(second).collect();
            assert_eq!(keys, wanted, "{visible:?}");
            assert_eq!(visible.len(), wanted.len());
            for block in blocks {
                let (from, n) = (block.position, block.len());
                assert!(
                    n == 0 || from / BLOCK_KEYS == (from + n - 1) / BLOCK_KEYS,
                    "{block:?}"
                );
            }
        }
    }

    #[test]
    fn a_block_without_keys_changes_nothing() {
        let mut state = Running::new(None);
        let mut sums = [0.0, 0.0];
        add_block(
            Isa::Portable,
            &mut state,
            (f32::NEG_INFINITY, 0.0),
            &mut sums,
            &[0.0, 0.0],
        );
        assert_eq!((sums, state.total), ([0.0, 0.0], 0.0));
        add_block(
            Isa::Portable,
            &mut state,
            (2.0, 1.5),
            &mut sums,
            &[0.3, -7.0],
        );
        assert_eq!((sums, state.total), ([0.3, -7.0], 1.5));
        add_block(
            Isa::Portable,
            &mut state,
            (f32::NEG_INFINITY, 0.0),
            &mut sums,
            &[0.0, 0.0],
        );
        assert_eq!((sums, state.total, state.greatest), ([0.3, -7.0], 1.5, 2.0));
    }
}
