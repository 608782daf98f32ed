//! Attention of single queries, as in token generation (Dao et al. 2023, "Flash-Decoding"). Heads
//! that share keys are computed together. The blocks of keys (`key_blocks.rs`) may be computed by
//! several threads. `flash_attention.rs` handles many queries of one sequence, and adds in the same
//! order.

use std::ops::Range;

use crate::attention::attend::KvRows;
use crate::attention::key_blocks::{self, BLOCK_KEYS, Running, VisibleKeys};
#[cfg(target_arch = "x86_64")]
use crate::attention::kv_type::KvType;
use crate::isa::Isa;
use crate::layout::tile::{self, LANES, TileA, TileB};
use crate::memory::resize;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2::decode_attention::{
    self, CacheElement, VALUE_LANES, accumulate_values, scores,
};
use crate::simd::prefetch::KeyPrefetch;
use crate::simd::{microkernel, portable, vmath};

/// The number of heads computed together. Their sums fit the registers.
const HEADS_TOGETHER: usize = 3;

/// The number of partial sums of a block's exponentials.
const SCORE_LANES: usize = 8;

/// The query heads that share a key head, and their keys and values.
pub(crate) struct DecodeTask<'a> {
    pub isa: Isa,
    pub d: usize,
    pub softcap: Option<f32>,
    /// The slope of each head, and the position of the query. Without a distance bias, the slopes
    /// are empty.
    pub distances: (&'a [f32], f32),
    pub keys: KvRows<'a>,
    pub values: KvRows<'a>,
    /// The key head.
    pub group: usize,
    /// The visible keys.
    pub visible: VisibleKeys,
    /// The address of the keys that are probably read after these; null if unknown.
    pub after: *const u8,
}

/// Keys or values of a block, as the kernels read them.
enum BlockRows<'a> {
    Float32(&'a [f32]),
    /// float16, which AVX2 kernels convert in registers.
    #[cfg(target_arch = "x86_64")]
    Float16(&'a [u16]),
}

/// Scratch memory of [`DecodeTask::run_block`].
#[derive(Default)]
pub(crate) struct BlockScratch {
    scores: Vec<f32>,
    /// Converted keys or values of a block.
    wide: Vec<f32>,
}

/// The partial results of heads for a block of keys.
pub(crate) struct PartialSoftmax<'a> {
    /// `[heads, D]`: sums of values, weighted by their exponentials.
    pub sums: &'a mut [f32],
    /// For each head the maximum score, and the sum of exponentials relative to it.
    pub states: &'a mut [(f32, f32)],
}

impl DecodeTask<'_> {
    /// Returns the keys or values at the positions in `part`, and the stride from one position to
    /// the next, in elements. `wide` is scratch memory for converted elements.
    fn rows<'s>(
        &self,
        rows: &'s KvRows<'s>,
        part: &Range<usize>,
        wide: &'s mut Vec<f32>,
    ) -> (BlockRows<'s>, usize) {
        let (part, d) = ((part.start, part.end), self.d);
        #[cfg(target_arch = "x86_64")]
        if rows.kv_type == KvType::Float16 && self.isa.has_avx2() && d.is_multiple_of(LANES) {
            let span = rows.span(self.group, part, d);
            return (BlockRows::Float16(span), rows.position);
        }
        let (rows, position) = rows.widened(self.isa, self.group, part, (d, wide));
        (BlockRows::Float32(rows), position)
    }

    /// Computes block `number` of the visible keys. `queries` is `[heads, D]`, scaled.
    pub(crate) fn run_block(
        &self,
        number: usize,
        queries: &[f32],
        BlockScratch { scores, wide }: &mut BlockScratch,
        partial: PartialSoftmax<'_>,
    ) {
        let d = self.d;
        let heads = queries.len() / d;
        let block = self.visible.block(number);
        let n = block.len();
        if n == 0 {
            partial.states.fill((f32::NEG_INFINITY, 0.0));
            partial.sums.fill(0.0);
            return;
        }
        // A key's lane is its position modulo 8. So the lanes before the first key may be unused.
        let (first, step) = (block.position % SCORE_LANES, BLOCK_KEYS + SCORE_LANES);
        scores.clear();
        resize(scores, heads * step, f32::NEG_INFINITY);
        // The parts of the block, and the indices of their first scores.
        let [one, other] = block.parts;
        let parts = [(one.clone(), first), (other, first + one.len())];
        for (part, place) in parts.iter().filter(|(part, _)| !part.is_empty()) {
            let (keys, position) = self.rows(&self.keys, part, wide);
            for h in (0..heads).step_by(HEADS_TOGETHER) {
                let some = HEADS_TOGETHER.min(heads - h);
                let queries = &queries[h * d..(h + some) * d];
                let to = (&mut scores[h * step + place..], step);
                let next = next(&self.values, (self.group, part.start), h == 0);
                let size = (part.len(), d);
                match keys {
                    BlockRows::Float32(keys) => {
                        scores_of(self.isa, queries, (keys, position), size, to, next);
                    }
                    #[cfg(target_arch = "x86_64")]
                    BlockRows::Float16(keys) => {
                        scores_avx2(queries, (keys, position), size, to, next);
                    }
                }
            }
        }
        let each = scores.chunks_exact_mut(step).zip(partial.states.iter_mut());
        for (h, (scores, state)) in each.enumerate() {
            if let Some(cap) = self.softcap {
                for score in &mut scores[first..first + n] {
                    *score = portable::vmath::tanh(*score / cap) * cap;
                }
            }
            let (slopes, query) = self.distances;
            if let Some(slope) = slopes.get(h) {
                for (key, score) in (block.position..).zip(&mut scores[first..first + n]) {
                    *score -= key_blocks::distance_bias(*slope, query, key);
                }
            }
            let lanes = (first + n).next_multiple_of(SCORE_LANES);
            *state = softmax_block(self.isa, &mut scores[..lanes]);
        }
        partial.sums.fill(0.0);
        let last = number + 1 == self.visible.blocks();
        for (part, place) in parts.iter().filter(|(part, _)| !part.is_empty()) {
            let (values, position) = self.rows(&self.values, part, wide);
            // The next block's keys are probably read next, so they are prefetched.
            let mut next = next(&self.keys, (self.group, part.end), true);
            if last {
                next.data = self.after;
            }
            let (shares, n) = ((&scores[*place..], step), part.len());
            match values {
                BlockRows::Float32(values) => {
                    self.accumulate_values(shares, (values, position), n, partial.sums, next);
                }
                #[cfg(target_arch = "x86_64")]
                BlockRows::Float16(values) => {
                    let done = self.accumulate_values_avx2(
                        shares,
                        (values, position),
                        n,
                        partial.sums,
                        next,
                    );
                    debug_assert_eq!(done, d);
                }
            }
        }
    }

    /// Adds values weighted by `shares`, which is `[heads, ..]` with a row stride of `step`.
    fn accumulate_values(
        &self,
        (shares, step): (&[f32], usize),
        (values, position): (&[f32], usize),
        n: usize,
        sums: &mut [f32],
        next: KeyPrefetch,
    ) {
        let d = self.d;
        let heads = sums.len() / d;
        assert!(shares.len() >= (heads - 1) * step + n);
        assert!(values.len() >= (n - 1) * position + d);
        #[cfg(target_arch = "x86_64")]
        let wide = match self.isa.has_avx2() {
            true => self.accumulate_values_avx2((shares, step), (values, position), n, sums, next),
            false => 0,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (wide, _) = (0, next);
        let vectorized = d / LANES * LANES;
        for at in (wide..vectorized).step_by(LANES) {
            let left = TileA {
                data: shares.as_ptr(),
                row_stride: step,
                stride: 1,
            };
            let right = TileB {
                data: values[at..].as_ptr(),
                stride: position,
            };
            let product = tile::TileC {
                data: sums[at..].as_mut_ptr(),
                row_stride: d,
                accumulate: true,
            };
            // SAFETY: there are `n` shares of each head and `n` rows of values with `d` elements,
            // as asserted. `at` plus the tile's lanes is at most `d`, and the sums have `heads`
            // rows of `d` elements.
            unsafe { microkernel::gemm_tiles(self.isa, heads, n, left, right, product) };
        }
        for h in 0..heads {
            for (i, share) in shares[h * step..h * step + n].iter().enumerate() {
                let row = &values[i * position..][vectorized..d];
                for (sum, value) in sums[h * d + vectorized..(h + 1) * d].iter_mut().zip(row) {
                    *sum += share * value;
                }
            }
        }
    }

    /// [`Self::accumulate_values`] with more lanes per iteration, for processors with AVX2. A tile
    /// with few rows has few independent additions, so the latency of additions would limit a
    /// single lane. Returns the number of finished lanes of `d`.
    #[cfg(target_arch = "x86_64")]
    fn accumulate_values_avx2<T: CacheElement>(
        &self,
        (shares, step): (&[f32], usize),
        (values, position): (&[T], usize),
        n: usize,
        sums: &mut [f32],
        next: KeyPrefetch,
    ) -> usize {
        let d = self.d;
        let (heads, vectorized) = (sums.len() / d, d / LANES * LANES);
        assert!(self.isa.has_avx2());
        assert!(shares.len() >= (heads - 1) * step + n);
        assert!(values.len() >= (n - 1) * position + d);
        for h in (0..heads).step_by(HEADS_TOGETHER) {
            for at in (0..vectorized).step_by(VALUE_LANES) {
                let shares = (shares[h * step..].as_ptr(), step);
                let next = next.bytes(at * size_of::<T>(), h == 0);
                let values = (values[at..].as_ptr(), position);
                let sums = (sums[h * d + at..].as_mut_ptr(), d);
                let whole = at + VALUE_LANES <= vectorized;
                // SAFETY: only `detect` makes instruction sets with avx2, fma and f16c. The lengths
                // are asserted above, and heads and lanes are within them. Half of the lanes are
                // left at the end of some heads.
                unsafe {
                    match (heads - h, whole) {
                        (1, true) => accumulate_values::<T, 1, 4>(shares, values, n, sums, next),
                        (2, true) => accumulate_values::<T, 2, 4>(shares, values, n, sums, next),
                        (_, true) => accumulate_values::<T, 3, 4>(shares, values, n, sums, next),
                        (1, false) => accumulate_values::<T, 1, 2>(shares, values, n, sums, next),
                        (2, false) => accumulate_values::<T, 2, 2>(shares, values, n, sums, next),
                        (_, false) => accumulate_values::<T, 3, 2>(shares, values, n, sums, next),
                    }
                }
            }
        }
        vectorized
    }
}

/// The address of position `at` in head `h` if `wanted`; otherwise null.
fn next(rows: &KvRows<'_>, (h, at): (usize, usize), wanted: bool) -> KeyPrefetch {
    KeyPrefetch {
        data: if wanted {
            rows.ptr(h, at)
        } else {
            std::ptr::null()
        },
        position: rows.position_bytes(),
    }
}

/// Adds the blocks of one head. `sums` is `[blocks, D]`; `sink` is a score without a value.
pub(crate) fn add_blocks<'a>(
    isa: Isa,
    parts: impl Iterator<Item = (&'a [f32], (f32, f32))>,
    sink: Option<f32>,
    out: &mut [f32],
) {
    out.fill(0.0);
    let mut state = Running::new(sink);
    for (sums, block) in parts {
        key_blocks::add_block(isa, &mut state, block, out, sums);
    }
    out.iter_mut().for_each(|v| *v /= state.total);
}

/// Replaces scores by their exponentials relative to the maximum. Returns the maximum, and the sum
/// of the exponentials. The number of scores is a multiple of [`SCORE_LANES`]; hidden ones are
/// minus infinity.
fn softmax_block(isa: Isa, scores: &mut [f32]) -> (f32, f32) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { decode_attention::softmax(scores) },
        // Every aarch64 processor has neon.
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot => portable::softmax::softmax(scores),
        Isa::Portable => portable::softmax::softmax(scores),
    }
}

/// Computes the dot products of a few queries `[heads, d]` with `n` keys at a stride of `step`
/// elements. The results of head `h` begin at `h * row`.
fn scores_of(
    isa: Isa,
    queries: &[f32],
    (keys, step): (&[f32], usize),
    (n, d): (usize, usize),
    (to, row): (&mut [f32], usize),
    next: KeyPrefetch,
) {
    let heads = queries.len() / d;
    assert!(heads <= HEADS_TOGETHER && keys.len() >= (n - 1) * step + d);
    assert!(to.len() >= (heads - 1) * row + n);
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() && d.is_multiple_of(8) {
        return scores_avx2(queries, (keys, step), (n, d), (to, row), next);
    }
    let _ = next;
    for (h, query) in queries.chunks_exact(d).enumerate() {
        for i in 0..n {
            to[h * row + i] = vmath::dot(isa, query, &keys[i * step..][..d]);
        }
    }
}

/// [`scores_of`] for processors with AVX2; `d` is a multiple of 8.
#[cfg(target_arch = "x86_64")]
fn scores_avx2<T: CacheElement>(
    queries: &[f32],
    (keys, step): (&[T], usize),
    (n, d): (usize, usize),
    (to, row): (&mut [f32], usize),
    next: KeyPrefetch,
) {
    let heads = queries.len() / d;
    assert!(d.is_multiple_of(8) && heads <= HEADS_TOGETHER && keys.len() >= (n - 1) * step + d);
    assert!(to.len() >= (heads - 1) * row + n);
    let (queries, keys) = (queries.as_ptr(), (keys.as_ptr(), step));
    let to = (to.as_mut_ptr(), row);
    // SAFETY: callers check that the instruction set has avx2, fma and f16c. The lengths are
    // asserted.
    unsafe {
        match heads {
            3 => scores::<T, 3>(queries, keys, (n, d), to, next),
            2 => scores::<T, 2>(queries, keys, (n, d), to, next),
            _ => scores::<T, 1>(queries, keys, (n, d), to, next),
        }
    }
}
