//! Attention of many queries of one sequence, as in a prompt. Panels of sixteen queries pass over
//! blocks of keys with a running softmax, in register tiles (Milakov and Gimelshein 2018; Dao et
//! al. 2022). `decode_attention.rs` handles single queries.

use std::cell::RefCell;

use crate::attention::attend::{Attention, KvRows};
use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::{LANES, ScaledRow, TileA, TileB, TileC};
use crate::simd::portable::vmath;
use crate::simd::{microkernel, transpose};

/// The number of keys per block. Their scores, and the keys and values of a typical head, fit the
/// L2 cache together. The scores alone fit the L1 cache. The number is a multiple of a tile's rows.
const BLOCK_KEYS: usize = 192;

/// The minimum number of queries per row for this kernel.
pub(crate) const MIN_PANEL_QUERIES: usize = 4;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    /// The panel's queries, `[D, LANES]`.
    queries: AlignedVec,
    /// Scores, `[BLOCK_KEYS, LANES]`.
    scores: AlignedVec,
    /// Weighted sums of values, `[LANES, D]`.
    sums: AlignedVec,
}

/// The keys that a query attends to: a prefix of this length, and a range.
type VisibleKeys = (usize, std::ops::Range<usize>);

/// The inputs of a panel of queries.
pub(crate) struct FlashPanel<'a> {
    pub attend: &'a Attention,
    /// Keys and values of the panel's batch row.
    pub keys: KvRows<'a>,
    pub values: KvRows<'a>,
    /// The key head.
    pub group: usize,
    /// The sink score of the query head.
    pub sink: Option<f32>,
    /// The visible keys of each query, at most `LANES`.
    pub visible_keys: &'a [VisibleKeys],
}

/// Whether flash attention supports this head size.
pub(crate) fn fits(d: usize) -> bool {
    d.is_multiple_of(LANES)
}

impl FlashPanel<'_> {
    /// Computes the panel. `query(i, place)` writes the scaled query `i` to `place`. `found(i,
    /// values)` receives the output of query `i`.
    pub(crate) fn run(
        &self,
        mut query: impl FnMut(usize, &mut [f32]),
        mut store_row: impl FnMut(usize, &[f32]),
    ) {
        let d = self.attend.head_dim;
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch {
                queries,
                scores,
                sums,
            } = scratch;
            let n = self.visible_keys.len();
            queries.resize(d * LANES);
            scores.resize(BLOCK_KEYS * LANES);
            // First, the queries are written as rows; then they are transposed.
            sums.resize(LANES * d);
            for (i, place) in sums.chunks_exact_mut(d).take(n).enumerate() {
                query(i, place);
            }
            let mut rows: [ScaledRow<'_>; LANES] = [(&[], 1.0); LANES];
            for (row, sum) in rows.iter_mut().zip(sums.chunks_exact(d)) {
                row.0 = sum;
            }
            transpose::pack_rows(self.attend.isa, &rows[..n], None, queries);
            sums.fill(0.0);
            let mut state = State {
                greatest: [self.sink.unwrap_or(f32::NEG_INFINITY); LANES],
                total: [if self.sink.is_some() { 1.0 } else { 0.0 }; LANES],
            };
            // First the kept keys, then the other keys that any query of the panel attends to.
            let sink_tokens = self.visible_keys.iter().map(|s| s.0).max().unwrap_or(0);
            let begin = self
                .visible_keys
                .iter()
                .map(|s| s.1.start)
                .min()
                .unwrap_or(0);
            let end = self.visible_keys.iter().map(|s| s.1.end).max().unwrap_or(0);
            for (from, to, is_kept) in [(0, sink_tokens, true), (begin, end, false)] {
                for at in (from..to).step_by(BLOCK_KEYS) {
                    let next = (at + BLOCK_KEYS).min(to);
                    self.block((at, next, is_kept), queries, scores, sums, &mut state);
                }
            }
            for (i, place) in sums.chunks_exact_mut(d).take(n).enumerate() {
                let inverse = 1.0 / state.total[i];
                place.iter_mut().for_each(|v| *v *= inverse);
                store_row(i, place);
            }
        });
    }

    fn block(
        &self,
        (from, to, is_kept): (usize, usize, bool),
        queries: &[f32],
        scores: &mut [f32],
        sums: &mut [f32],
        state: &mut State,
    ) {
        let (isa, d, n) = (self.attend.isa, self.attend.head_dim, to - from);
        let keys = &self.keys.span(self.group, from, to, d);
        let scores = &mut scores[..n * LANES];
        let left = TileA {
            data: keys.as_ptr(),
            row_stride: self.keys.position,
            stride: 1,
        };
        let right = TileB {
            data: queries.as_ptr(),
            stride: LANES,
        };
        let product = TileC {
            data: scores.as_mut_ptr(),
            row_stride: LANES,
            accumulate: false,
        };
        assert!(queries.len() >= d * LANES && sums.len() >= LANES * d);
        // SAFETY: `keys` spans `n` rows of `d` elements. The queries have `d` times `LANES`
        // elements and the scores `n` times `LANES`. The assertion and the slice guarantee it.
        unsafe { microkernel::gemm_tiles(isa, n, d, left, right, product) };
        let lanes = scores.as_chunks_mut::<LANES>().0;
        for (i, (sink_tokens, range)) in self.visible_keys.iter().enumerate() {
            let sees = if is_kept {
                0..*sink_tokens
            } else {
                range.clone()
            };
            if sees.start <= from && sees.end >= to {
                continue;
            }
            for (key, lanes) in (from..).zip(lanes.iter_mut()) {
                if !sees.contains(&key) {
                    lanes[i] = f32::NEG_INFINITY;
                }
            }
        }
        let factors = softmax_block(isa, self.attend.softcap, lanes, state);
        for (row, factor) in sums.chunks_exact_mut(d).zip(factors) {
            if factor != 1.0 {
                row.iter_mut().for_each(|v| *v *= factor);
            }
        }
        let values = &self.values.span(self.group, from, to, d);
        for at in (0..d).step_by(LANES) {
            let left = TileA {
                data: scores.as_ptr(),
                row_stride: 1,
                stride: LANES,
            };
            let right = TileB {
                data: values[at..].as_ptr(),
                stride: self.values.position,
            };
            let product = TileC {
                data: sums[at..].as_mut_ptr(),
                row_stride: d,
                accumulate: true,
            };
            // SAFETY: the scores have `n` times `LANES` elements. `values` spans `n` rows of `d`
            // elements, and `d` is a multiple of `LANES` (see `fits`). The sums have `LANES` rows
            // of `d` elements.
            unsafe {
                microkernel::gemm_tiles(isa, self.visible_keys.len(), n, left, right, product);
            };
        }
    }
}

/// For each query, the maximum score until now, and the sum of exponentials relative to it.
struct State {
    greatest: [f32; LANES],
    total: [f32; LANES],
}

/// Replaces scores by their exponentials relative to the running maximum. Returns the factors that
/// rescale the earlier sums.
fn softmax_block(
    isa: Isa,
    cap: Option<f32>,
    scores: &mut [[f32; LANES]],
    state: &mut State,
) -> [f32; LANES] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2.
        Isa::Avx2 => unsafe { softmax_block_avx2(cap, scores, state) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Avx512` and `Amx`, on processors with avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { softmax_block_avx512(cap, scores, state) },
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot => softmax_block_with(cap, scores, state),
        Isa::Portable => softmax_block_with(cap, scores, state),
    }
}

/// # Safety
/// The processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn softmax_block_avx2(
    cap: Option<f32>,
    scores: &mut [[f32; LANES]],
    state: &mut State,
) -> [f32; LANES] {
    softmax_block_with(cap, scores, state)
}

/// # Safety
/// The processor must have avx2, fma and avx512f.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f")]
unsafe fn softmax_block_avx512(
    cap: Option<f32>,
    scores: &mut [[f32; LANES]],
    state: &mut State,
) -> [f32; LANES] {
    softmax_block_with(cap, scores, state)
}

#[inline(always)]
fn softmax_block_with(
    cap: Option<f32>,
    scores: &mut [[f32; LANES]],
    state: &mut State,
) -> [f32; LANES] {
    if let Some(cap) = cap {
        for lanes in scores.iter_mut() {
            for score in lanes {
                // Masked keys keep a score of minus infinity; the cap must not change it.
                *score = if *score == f32::NEG_INFINITY {
                    *score
                } else {
                    vmath::tanh(*score / cap) * cap
                };
            }
        }
    }
    let before = state.greatest;
    for lanes in scores.iter() {
        for (greatest, score) in state.greatest.iter_mut().zip(lanes) {
            *greatest = if *score > *greatest {
                *score
            } else {
                *greatest
            };
        }
    }
    // For a query without visible keys, the maximum is minus infinity. Subtracting it from a score
    // of minus infinity would produce NaN.
    let base: [f32; LANES] = std::array::from_fn(|i| {
        let greatest = state.greatest[i];
        if greatest == f32::NEG_INFINITY {
            0.0
        } else {
            greatest
        }
    });
    let factors: [f32; LANES] = std::array::from_fn(|i| vmath::exp(before[i] - base[i]));
    let mut sums = [0.0f32; LANES];
    for lanes in scores.iter_mut() {
        for i in 0..LANES {
            let weight = vmath::exp(lanes[i] - base[i]);
            lanes[i] = weight;
            sums[i] += weight;
        }
    }
    for i in 0..LANES {
        state.total[i] = state.total[i] * factors[i] + sums[i];
    }
    factors
}
