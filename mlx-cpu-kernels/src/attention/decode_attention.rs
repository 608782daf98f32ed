//! Attention of single queries, as in token generation (Dao et al. 2023, "Flash-Decoding"). Heads
//! that share keys are computed together. The blocks of keys (`key_blocks.rs`) may be computed by
//! several threads. `flash_attention.rs` handles many queries of one sequence, and adds in the same
//! order.

use crate::attention::attend::KvRows;
use crate::attention::key_blocks::{self, BLOCK_KEYS, Running, VisibleKeys};
use crate::isa::Isa;
use crate::layout::tile::{self, LANES, TileA, TileB};
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2;
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
    /// The slopes of the heads, and the position of the query; no slopes without a distance bias.
    pub distances: (&'a [f32], f32),
    pub keys: KvRows<'a>,
    pub values: KvRows<'a>,
    /// The key head.
    pub group: usize,
    /// The visible keys.
    pub visible: VisibleKeys,
    /// The address of the keys that are probably read after these; null if unknown.
    pub after: *const f32,
}

/// The partial results of heads for a block of keys.
pub(crate) struct PartialSoftmax<'a> {
    /// `[heads, D]`: sums of values, weighted by their exponentials.
    pub sums: &'a mut [f32],
    /// For each head the maximum score, and the sum of exponentials relative to it.
    pub states: &'a mut [(f32, f32)],
}

impl DecodeTask<'_> {
    /// Computes block `number` of the visible keys. `queries` is `[heads, D]`, scaled; `scores` is
    /// scratch memory.
    pub(crate) fn run_block(
        &self,
        number: usize,
        queries: &[f32],
        scores: &mut Vec<f32>,
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
        // A key's position modulo 8 is its lane, so the first lanes may be hidden.
        let (first, step) = (block.position % SCORE_LANES, BLOCK_KEYS + SCORE_LANES);
        scores.clear();
        scores.resize(heads * step, f32::NEG_INFINITY);
        // The parts of the block, and the places of their first scores.
        let [one, other] = block.parts;
        let parts = [(one.clone(), first), (other, first + one.len())];
        for (part, place) in parts.iter().filter(|(part, _)| !part.is_empty()) {
            let keys = self.keys.span(self.group, part.start, part.end, d);
            for h in (0..heads).step_by(HEADS_TOGETHER) {
                let some = HEADS_TOGETHER.min(heads - h);
                let queries = &queries[h * d..(h + some) * d];
                let to = (&mut scores[h * step + place..], step);
                let next = next(&self.values, (self.group, part.start), h == 0);
                let keys = (keys, self.keys.position);
                scores_of(self.isa, queries, keys, (part.len(), d), to, next);
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
            let values = self.values.span(self.group, part.start, part.end, d);
            // The next block's keys are probably read next, so they are prefetched.
            let mut next = next(&self.keys, (self.group, part.end), true);
            if last {
                next.data = self.after;
            }
            self.accumulate_values(
                (&scores[*place..], step),
                values,
                part.len(),
                partial.sums,
                next,
            );
        }
    }

    /// Adds values weighted by `shares`, which is `[heads, ..]` with a row stride of `step`.
    fn accumulate_values(
        &self,
        (shares, step): (&[f32], usize),
        values: &[f32],
        n: usize,
        sums: &mut [f32],
        next: KeyPrefetch,
    ) {
        let d = self.d;
        let heads = sums.len() / d;
        assert!(shares.len() >= (heads - 1) * step + n);
        assert!(values.len() >= (n - 1) * self.values.position + d);
        let wide = self.accumulate_values_avx2((shares, step), values, n, sums, next);
        let vectorized = d / LANES * LANES;
        for at in (wide..vectorized).step_by(LANES) {
            let left = TileA {
                data: shares.as_ptr(),
                row_stride: step,
                stride: 1,
            };
            let right = TileB {
                data: values[at..].as_ptr(),
                stride: self.values.position,
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
                let row = &values[i * self.values.position..][vectorized..d];
                for (sum, value) in sums[h * d + vectorized..(h + 1) * d].iter_mut().zip(row) {
                    *sum += share * value;
                }
            }
        }
    }

    /// [`Self::accumulate_values`] with more lanes per iteration. A tile with few rows has few
    /// independent additions, so the latency of additions would limit a single lane. Returns the
    /// number of finished lanes of `d`.
    fn accumulate_values_avx2(
        &self,
        (shares, step): (&[f32], usize),
        values: &[f32],
        n: usize,
        sums: &mut [f32],
        next: KeyPrefetch,
    ) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_avx2() {
            use avx2::decode_attention::{VALUE_LANES, accumulate_values};

            let d = self.d;
            let (heads, vectorized) = (sums.len() / d, d / LANES * LANES);
            for h in (0..heads).step_by(HEADS_TOGETHER) {
                for at in (0..vectorized).step_by(VALUE_LANES) {
                    let shares = (shares[h * step..].as_ptr(), step);
                    let next = next.lanes(at, h == 0);
                    let values = (values[at..].as_ptr(), self.values.position);
                    let sums = (sums[h * d + at..].as_mut_ptr(), d);
                    let whole = at + VALUE_LANES <= vectorized;
                    // SAFETY: only `detect` makes `Isa::Avx2`; `accumulate_values` asserts the
                    // lengths, and heads and lanes are within them. Half of the lanes are left at
                    // the end of some heads.
                    unsafe {
                        match (heads - h, whole) {
                            (1, true) => accumulate_values::<1, 4>(shares, values, n, sums, next),
                            (2, true) => accumulate_values::<2, 4>(shares, values, n, sums, next),
                            (_, true) => accumulate_values::<3, 4>(shares, values, n, sums, next),
                            (1, false) => accumulate_values::<1, 2>(shares, values, n, sums, next),
                            (2, false) => accumulate_values::<2, 2>(shares, values, n, sums, next),
                            (_, false) => accumulate_values::<3, 2>(shares, values, n, sums, next),
                        }
                    }
                }
            }
            return vectorized;
        }
        let _ = (shares, step, values, n, sums, next);
        0
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
        position: rows.position,
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
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::decode_attention::softmax(scores) },
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
        let keys = (keys.as_ptr(), step);
        let to = (to.as_mut_ptr(), row);
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2. The lengths are
        // asserted.
        return unsafe {
            match heads {
                3 => avx2::decode_attention::scores::<3>(queries.as_ptr(), keys, (n, d), to, next),
                2 => avx2::decode_attention::scores::<2>(queries.as_ptr(), keys, (n, d), to, next),
                _ => avx2::decode_attention::scores::<1>(queries.as_ptr(), keys, (n, d), to, next),
            }
        };
    }
    let _ = next;
    for (h, query) in queries.chunks_exact(d).enumerate() {
        for i in 0..n {
            to[h * row + i] = vmath::dot(isa, query, &keys[i * step..][..d]);
        }
    }
}
