//! Scores, softmax and weighted values of a panel of queries with a block of keys. Chooses the
//! kernel by instruction set.
//!
//! With AVX2 and AVX-512, sums have the order of `avx2/decode_attention.rs`, which computes single
//! queries. A score is the sum of eight partial sums: sum `j` has the elements whose index is `j`
//! modulo 8. The exponentials of a block are also added in eight sums, by the key's index modulo 8.
//! Weighted values are added key by key.

use crate::isa::Isa;
use crate::layout::tile::{BlockSoftmax, LANES, TileA, TileB, TileC};
use crate::simd::microkernel;
use crate::simd::portable::softmax::softmax_base;
use crate::simd::portable::vmath;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// Computes the scores `[n, LANES]` of `n` keys with a panel of queries `[d, LANES]`; `d` is a
/// multiple of 8.
///
/// # Safety
/// The operands must have these elements. No other thread may use the scores.
pub(crate) unsafe fn scores(
    isa: Isa,
    (n, d): (usize, usize),
    keys: TileA,
    queries: TileB,
    to: TileC,
) {
    assert!(d.is_multiple_of(8));
    // SAFETY: only `detect` makes these instruction sets, on processors that have their features.
    // The caller guarantees the operands.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::flash_attention::scores((n, d), keys, queries, to),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => avx512::flash_attention::scores((n, d), keys, queries, to),
            _ => microkernel::gemm_tiles(isa, n, d, keys, queries, to),
        }
    }
}

/// Limits scores to `-cap..cap`, except those of hidden keys.
pub(crate) fn cap(scores: &mut [[f32; LANES]], cap: f32) {
    for score in scores.as_flattened_mut() {
        if *score != f32::NEG_INFINITY {
            *score = vmath::tanh(*score / cap) * cap;
        }
    }
}

/// Replaces scores by their exponentials relative to the maximum of their query. The first key has
/// the index `first`. A score of minus infinity hides a key.
pub(crate) fn softmax(isa: Isa, scores: &mut [[f32; LANES]], first: usize) -> BlockSoftmax {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2 and fma.
        Isa::Avx2 => unsafe { avx2::flash_attention::softmax(scores, first) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx512f.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::flash_attention::softmax(scores, first) },
        _ => {
            let _ = first;
            softmax_with(scores)
        }
    }
}

fn softmax_with(scores: &mut [[f32; LANES]]) -> BlockSoftmax {
    let mut greatest = [f32::NEG_INFINITY; LANES];
    for lanes in scores.iter() {
        for (greatest, score) in greatest.iter_mut().zip(lanes) {
            *greatest = if *score > *greatest {
                *score
            } else {
                *greatest
            };
        }
    }
    let base = greatest.map(softmax_base);
    let mut sums = [0.0; LANES];
    for lanes in scores {
        for i in 0..LANES {
            lanes[i] = vmath::exp(lanes[i] - base[i]);
            sums[i] += lanes[i];
        }
    }
    (greatest, sums)
}

/// Computes the weighted sums `[queries, d]` of `n` values; `d` is a multiple of `LANES`. `weights`
/// has a row for each query, and `values` a row for each key.
///
/// # Safety
/// The operands must have these elements. No other thread may use the sums.
pub(crate) unsafe fn weighted_values(
    isa: Isa,
    (queries, n, d): (usize, usize, usize),
    weights: TileA,
    values: TileB,
    to: TileC,
) {
    let at = |lane: usize| {
        let values = TileB {
            data: values.data.wrapping_add(lane),
            ..values
        };
        let to = TileC {
            data: to.data.wrapping_add(lane),
            ..to
        };
        (values, to)
    };
    // SAFETY: the caller guarantees the operands. Only `detect` makes the instruction sets, on
    // processors that have their features.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if matches!(isa, Isa::Avx512 | Isa::Amx) {
            let wide = d / (2 * LANES) * 2 * LANES;
            for lane in (0..wide).step_by(2 * LANES) {
                let (values, to) = at(lane);
                avx512::flash_attention::weighted_values::<2>((queries, n), weights, values, to);
            }
            for lane in (wide..d).step_by(LANES) {
                let (values, to) = at(lane);
                avx512::flash_attention::weighted_values::<1>((queries, n), weights, values, to);
            }
            return;
        }
        for lane in (0..d).step_by(LANES) {
            let (values, to) = at(lane);
            microkernel::gemm_tiles(isa, queries, n, weights, values, to);
        }
    }
}
