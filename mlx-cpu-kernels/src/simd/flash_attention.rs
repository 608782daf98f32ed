//! Scores, softmax and weighted values of a panel of queries with a block of keys. The instruction
//! set determines the kernel.
//!
//! With AVX2 and AVX-512, sums have the order of `avx2/decode_attention.rs`, which computes single
//! queries. A score is the sum of eight partial sums: sum `j` has the elements whose index is `j`
//! modulo 8. The exponentials of a block are also added in eight sums, by the key's index modulo 8.
//! Weighted values are added key by key.

use crate::isa::Isa;
use crate::layout::tile::{BlockSoftmax, LANES, TileA, TileB, TileC};
use crate::simd::microkernel;
use crate::simd::portable::softmax::{divide_row, softmax_base};
use crate::simd::portable::vmath;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// Computes the scores `[n, LANES]` of `n` keys with a panel of queries `[d, LANES]`; `d` is a
/// multiple of 8. Keys are rows with this stride.
///
/// # Safety
/// The operands must have these elements. No other thread may use the scores.
pub(crate) unsafe fn scores(
    isa: Isa,
    (n, d): (usize, usize),
    (keys, row_stride): (*const f32, usize),
    queries: *const f32,
    to: *mut f32,
) {
    assert!(d.is_multiple_of(8));
    // SAFETY: only `detect` makes these instruction sets, on processors that have their features.
    // The caller guarantees the operands.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::flash_attention::scores((n, d), (keys, row_stride), queries, to),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                avx512::flash_attention::scores((n, d), (keys, row_stride), queries, to);
            }
            _ => {
                let keys = TileA {
                    data: keys,
                    row_stride,
                    stride: 1,
                };
                let queries = TileB {
                    data: queries,
                    stride: LANES,
                };
                let to = TileC {
                    data: to,
                    row_stride: LANES,
                    accumulate: false,
                };
                microkernel::gemm_tiles(isa, n, d, keys, queries, to);
            }
        }
    }
}

/// Replaces scores by `cap * tanh(score / cap)`, except the scores of hidden keys.
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

/// Multiplies the sums `[queries, d]` by the first factor of their query, and adds the weighted
/// sums of `n` values, times the second factor. `d` is a multiple of `LANES`. `weights` has a row
/// for each query, and `values` a row for each key. `of_block` has `queries * d` elements, whose
/// values are arbitrary.
///
/// # Safety
/// The operands must have these elements. No other thread may use the sums.
pub(crate) unsafe fn add_values(
    isa: Isa,
    (queries, n, d): (usize, usize, usize),
    (weights, values): (TileA, TileB),
    (sums, factors): (TileC, &[[f32; LANES]; 2]),
    of_block: &mut [f32],
) {
    assert!(queries <= LANES && of_block.len() >= queries * d);
    // SAFETY: the caller guarantees the operands. Only `detect` makes the instruction sets, on
    // processors that have their features.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                avx2::flash_attention::add_values(
                    (queries, n, d),
                    (weights, values),
                    (sums, factors),
                );
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                avx512::flash_attention::add_values(
                    (queries, n, d),
                    (weights, values),
                    (sums, factors),
                );
            }
            _ => {
                for lane in (0..d).step_by(LANES) {
                    let values = TileB {
                        data: values.data.wrapping_add(lane),
                        ..values
                    };
                    let to = TileC {
                        data: of_block.as_mut_ptr().wrapping_add(lane),
                        row_stride: d,
                        accumulate: false,
                    };
                    microkernel::gemm_tiles(isa, queries, n, weights, values, to);
                }
                for (i, of_block) in of_block.chunks_exact(d.max(1)).take(queries).enumerate() {
                    let row = sums.data.wrapping_add(i * sums.row_stride);
                    let row = std::slice::from_raw_parts_mut(row, d);
                    for (sum, value) in row.iter_mut().zip(of_block) {
                        *sum = *sum * factors[0][i] + value * factors[1][i];
                    }
                }
            }
        }
    }
}

/// `to = row / total`. Stops at the end of the shorter slice.
pub(crate) fn divide(isa: Isa, row: &[f32], total: f32, to: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: `has_avx2` is true only on processors with avx2.
        return unsafe { avx2::flash_attention::divide(row, total, to) };
    }
    let _ = isa;
    divide_row(row, total, to);
}
