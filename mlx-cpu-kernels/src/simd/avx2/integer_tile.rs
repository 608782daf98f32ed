//! Many-row multiplication in 16-bit integers, for AVX2: `vpmaddwd`, or `vpdpwssd` of AVX-VNNI.
//! Results equal those of `avx512/integer_tile.rs` bit by bit.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_andnot_ps,
    _mm256_broadcast_ss, _mm256_cvtepi32_ps, _mm256_cvtps_epi32, _mm256_div_ps,
    _mm256_dpwssd_avx_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_max_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_slli_epi32, _mm256_storeu_ps,
    _mm256_storeu_si256,
};
use std::ops::Range;

use crate::layout::input_panel::MAX_QUANT;
use crate::layout::integer_panel::{
    CodePanel, InputColumns, InputColumnsMut, STEP, paired_columns,
};
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::layout::tile::LANES;

/// The number of vectors of a panel.
const VECTORS: usize = LANES / 8;

/// The number of matrix rows per tile, half of a row block. Their integer sums take 8 of the 16
/// registers. The sums of a group are in memory.
const TILE_ROWS: usize = 4;

/// Quantizes columns `[columns, LANES]`, with a scale per [`STEP`] columns.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn quantize(columns: &[f32], to: InputColumnsMut<'_>) {
    let steps = columns.len() / (STEP * LANES);
    // All reads and writes below are within these bounds.
    assert!(columns.len() == steps * STEP * LANES && to.pairs.len() == columns.len() / 2);
    assert!(to.scales.len() == steps * LANES && to.sums.len() == steps * LANES);
    let zero = _mm256_setzero_ps();
    for (step, lane) in (0..steps).flat_map(|s| (0..LANES).step_by(8).map(move |l| (s, l))) {
        // SAFETY: columns, pairs, scale and sum of step `step` are within the asserted bounds.
        unsafe {
            let from = columns.as_ptr().add(step * STEP * LANES + lane);
            let x: [__m256; STEP] = std::array::from_fn(|c| _mm256_loadu_ps(from.add(c * LANES)));
            let (mut most, mut no_number) = (zero, zero);
            for x in x {
                most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0), x));
                // Adds zero; if an input is infinite or NaN, it adds NaN.
                no_number = _mm256_fmadd_ps(x, zero, no_number);
            }
            // In a row of zeros, any scale with a finite inverse is correct.
            let most = _mm256_max_ps(most, _mm256_set1_ps(f32::MIN_POSITIVE * MAX_QUANT));
            let inverse = _mm256_div_ps(_mm256_set1_ps(MAX_QUANT), most);
            let scale = _mm256_mul_ps(most, _mm256_set1_ps(1.0 / MAX_QUANT));
            let mut sum = _mm256_setzero_si256();
            for i in 0..STEP / 2 {
                let two =
                    paired_columns(i).map(|c| _mm256_cvtps_epi32(_mm256_mul_ps(x[c], inverse)));
                let low = _mm256_and_si256(two[0], _mm256_set1_epi32(0xffff));
                let both = _mm256_or_si256(low, _mm256_slli_epi32::<16>(two[1]));
                let place = (step * STEP / 2 + i) * LANES + lane;
                _mm256_storeu_si256(to.pairs.as_mut_ptr().add(place).cast(), both);
                sum = _mm256_add_epi32(sum, _mm256_add_epi32(two[0], two[1]));
            }
            let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, no_number);
            // No integer represents NaN, so the scale does.
            let scale = _mm256_add_ps(scale, no_number);
            _mm256_storeu_ps(to.scales.as_mut_ptr().add(step * LANES + lane), scale);
            _mm256_storeu_ps(to.sums.as_mut_ptr().add(step * LANES + lane), sum);
        }
    }
}

/// A function that adds products of two integers. Its arguments are sums, integers of the inputs,
/// and integers of the matrix.
trait Add: Fn(__m256i, __m256i, __m256i) -> __m256i + Copy {}
impl<F: Fn(__m256i, __m256i, __m256i) -> __m256i + Copy> Add for F {}

/// `sums[row][lane] (+)= matrix[row] . x[lane]` over some groups. Only the first `rows` rows of the
/// matrix are used. Without `accumulate`, earlier sums are overwritten.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn multiply(
    (rows, groups): (usize, Range<usize>),
    matrix: CodePanel<'_>,
    x: InputColumns<'_>,
    sums: &mut [f32],
    accumulate: bool,
) {
    // A closure is used because it is compiled for the instruction set of its function.
    let add = |sum, x, two| _mm256_add_epi32(sum, _mm256_madd_epi16(x, two));
    // SAFETY: the caller guarantees the features.
    unsafe { tiles((rows, groups), matrix, x, sums, accumulate, add) };
}

/// [`multiply`] with AVX-VNNI.
///
/// # Safety
/// The processor must have avx2, fma and avxvnni.
#[target_feature(enable = "avx2,fma,avxvnni")]
pub(crate) unsafe fn multiply_vnni(
    (rows, groups): (usize, Range<usize>),
    matrix: CodePanel<'_>,
    x: InputColumns<'_>,
    sums: &mut [f32],
    accumulate: bool,
) {
    let add = |sum, x, two| _mm256_dpwssd_avx_epi32(sum, x, two);
    // SAFETY: the caller guarantees the features.
    unsafe { tiles((rows, groups), matrix, x, sums, accumulate, add) };
}

/// Computes all tiles.
///
/// # Safety
/// The processor must have avx2 and fma, and the features of `add`.
#[inline(always)]
unsafe fn tiles(
    (rows, groups): (usize, Range<usize>),
    matrix: CodePanel<'_>,
    x: InputColumns<'_>,
    sums: &mut [f32],
    accumulate: bool,
    add: impl Add,
) {
    // All reads and writes below are within these bounds.
    let (columns, stride) = (groups.end * matrix.group, matrix.rows);
    assert!(matrix.group.is_multiple_of(STEP) && columns <= matrix.columns);
    assert!(rows <= stride && matrix.columns / 2 * stride <= matrix.pairs.len());
    assert!(stride.is_multiple_of(INTERLEAVED_ROWS));
    matrix.assert_groups(groups.end);
    assert!(columns / 2 * LANES <= x.pairs.len() && columns / STEP * LANES <= x.scales.len());
    assert!(columns / STEP * LANES <= x.sums.len() && sums.len() >= rows * LANES);
    if !accumulate {
        sums[..rows * LANES].fill(0.0);
    }
    for row in (0..rows).step_by(TILE_ROWS) {
        // SAFETY: as asserted, matrix and sums have `rows` rows, and matrix and inputs have the
        // groups.
        unsafe {
            let to = sums.as_mut_ptr().add(row * LANES);
            match rows - row {
                1 => tile::<1>((row, groups.clone()), matrix, x, to, add),
                2 => tile::<2>((row, groups.clone()), matrix, x, to, add),
                3 => tile::<3>((row, groups.clone()), matrix, x, to, add),
                _ => tile::<TILE_ROWS>((row, groups.clone()), matrix, x, to, add),
            }
        }
    }
}

/// Multiplies `M` matrix rows from `first` on with a panel, and adds to the sums. A lane sums
/// sixteen products exactly. A product is at most 2^12 * (2^15 - 1); see
/// [`crate::layout::packed::MAX_SCALED_CODE`].
///
/// # Safety
/// The processor must have avx2 and fma, and the features of `add`. Matrix and sums must have these
/// rows, and matrix and inputs the groups.
#[inline(always)]
unsafe fn tile<const M: usize>(
    (first, groups): (usize, Range<usize>),
    matrix: CodePanel<'_>,
    x: InputColumns<'_>,
    sums: *mut f32,
    add: impl Add,
) {
    let (columns, stride, biases_per_group) = (matrix.group, matrix.rows, matrix.biases_per_scale);
    let lanes = x.pairs.as_ptr();
    // A tile never extends beyond a row block.
    let block = first / INTERLEAVED_ROWS * (matrix.columns / 2) * INTERLEAVED_ROWS;
    let pairs = matrix
        .pairs
        .as_ptr()
        .wrapping_add(block + first % INTERLEAVED_ROWS);
    let scales_of = |all: &[f32], group: usize| all.as_ptr().wrapping_add(group * stride + first);
    // The number of steps per bias.
    let steps = columns / STEP / biases_per_group.max(1);
    for g in groups {
        // SAFETY: the caller guarantees the features, and the rows and groups.
        unsafe {
            let mut group = [[_mm256_setzero_ps(); VECTORS]; M];
            for step in g * columns / STEP..(g + 1) * columns / STEP {
                let mut exact = [[_mm256_setzero_si256(); VECTORS]; M];
                for pair in step * (STEP / 2)..(step + 1) * (STEP / 2) {
                    let x: [_; VECTORS] = std::array::from_fn(|v| {
                        _mm256_loadu_si256(lanes.add(pair * LANES + 8 * v).cast())
                    });
                    let row = pairs.add(pair * INTERLEAVED_ROWS);
                    for (m, exact) in exact.iter_mut().enumerate() {
                        let two = _mm256_set1_epi32(*row.add(m));
                        for (exact, x) in exact.iter_mut().zip(x) {
                            *exact = add(*exact, x, two);
                        }
                    }
                }
                let scales = x.scales.as_ptr().add(step * LANES);
                for (group, exact) in group.iter_mut().zip(exact) {
                    for (v, (group, exact)) in group.iter_mut().zip(exact).enumerate() {
                        let scale = _mm256_loadu_ps(scales.add(8 * v));
                        *group = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), scale, *group);
                    }
                }
            }
            let sum_of = |part: usize| {
                let mut all = [_mm256_setzero_ps(); VECTORS];
                for step in part * steps..(part + 1) * steps {
                    let sums = x.sums.as_ptr().add(step * LANES);
                    for (v, all) in all.iter_mut().enumerate() {
                        *all = _mm256_add_ps(*all, _mm256_loadu_ps(sums.add(8 * v)));
                    }
                }
                all
            };
            let scales = scales_of(matrix.scales, g);
            if biases_per_group == 1 {
                let (all, biases) = (sum_of(g), scales_of(matrix.biases, g));
                for (m, group) in group.into_iter().enumerate() {
                    let scale = _mm256_broadcast_ss(&*scales.add(m));
                    let bias = _mm256_broadcast_ss(&*biases.add(m));
                    for (v, (group, all)) in group.into_iter().zip(all).enumerate() {
                        let to = sums.add(m * LANES + 8 * v);
                        let total = _mm256_fmadd_ps(group, scale, _mm256_loadu_ps(to));
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(bias, all, total));
                    }
                }
                continue;
            }
            for part in g * biases_per_group..(g + 1) * biases_per_group {
                let (all, biases) = (sum_of(part), scales_of(matrix.biases, part));
                for m in 0..M {
                    let bias = _mm256_broadcast_ss(&*biases.add(m));
                    for (v, all) in all.into_iter().enumerate() {
                        let to = sums.add(m * LANES + 8 * v);
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(bias, all, _mm256_loadu_ps(to)));
                    }
                }
            }
            for (m, group) in group.into_iter().enumerate() {
                let scale = _mm256_broadcast_ss(&*scales.add(m));
                for (v, group) in group.into_iter().enumerate() {
                    let to = sums.add(m * LANES + 8 * v);
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(group, scale, _mm256_loadu_ps(to)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::noise;

    /// The instruction's sums are exact integers, so both kernels give the same bits.
    #[test]
    fn both_instructions_give_the_same_bits() {
        let wanted = ["avx2", "fma", "avxvnni"];
        if !(is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("avxvnni"))
        {
            println!("ignored: the processor lacks one of {wanted:?}");
            return;
        }
        for (rows, group, groups) in [(1usize, 16, 3), (6, 32, 2), (11, 64, 4)] {
            let columns = group * groups;
            let codes = |from: &[f32], to: f32| -> Vec<i32> {
                (from.iter())
                    .map(|v| ((v * to) as i32 & 0xffff) | ((v * -0.7 * to) as i32) << 16)
                    .collect()
            };
            // Integers up to the greatest ones of codes and inputs, positive and negative.
            let wide = rows.next_multiple_of(INTERLEAVED_ROWS);
            let pairs = codes(&noise(columns / 2 * wide, 1), 510.0);
            let inputs = codes(&noise(columns / 2 * LANES, 2), 2.0 * MAX_QUANT);
            let [scales, biases] = [3, 4].map(|seed| noise(groups * wide, seed));
            let [x_scales, x_sums] = [5, 6].map(|seed| noise(columns / STEP * LANES, seed));
            let matrix = CodePanel {
                pairs: &pairs,
                scales: &scales,
                biases: &biases,
                rows: wide,
                columns,
                group,
                biases_per_scale: 1,
            };
            let x = InputColumns {
                pairs: &inputs,
                scales: &x_scales,
                sums: &x_sums,
            };
            for (some, accumulate) in [(0..groups, false), (1..groups, true)] {
                let mut sums = [noise(rows * LANES, 7), noise(rows * LANES, 7)];
                let [one, other] = &mut sums;
                // SAFETY: the processor has these features, as checked above.
                unsafe {
                    multiply((rows, some.clone()), matrix, x, one, accumulate);
                    multiply_vnni((rows, some), matrix, x, other, accumulate);
                }
                let bits = |sums: &[f32]| sums.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&sums[0]),
                    bits(&sums[1]),
                    "{rows} rows, groups of {group}"
                );
            }
        }
    }
}
