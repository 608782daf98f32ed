//! The tiles of `avx512/integer_tile.rs` with AVX2: `vpmaddwd` multiplies two columns of eight rows
//! and adds them, twice as many as with floats.

use std::arch::x86_64::{
    __m256, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_andnot_ps,
    _mm256_cvtepi32_ps, _mm256_cvtps_epi32, _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_ps, _mm256_mul_ps, _mm256_or_si256,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm256_storeu_si256,
};

use crate::layout::input_panel::MAX_QUANT;
use crate::layout::integer_panel::{
    CodePanel, InputColumns, InputColumnsMut, IntegerTask, STEP, SUM,
};
use crate::layout::tile::LANES;

/// Rows of the matrix in a tile: with two vectors for each, sums of integers and sums of a group
/// fill the registers.
const TILE_ROWS: usize = 3;

/// Lanes of a vector, and vectors of a panel.
const WIDTH: usize = 8;
const VECTORS: usize = LANES / WIDTH;

/// See [`crate::simd::integer_tile::quantize`].
///
/// # Safety
/// The processor must have avx2 and fma. The columns, pairs, scales and sums must fit each other.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn quantize(columns: &[f32], to: InputColumnsMut<'_>) {
    let zero = _mm256_setzero_ps();
    for s in 0..columns.len() / (SUM * LANES) {
        for at in (0..LANES).step_by(WIDTH) {
            let mut total = zero;
            for step in s * (SUM / STEP)..(s + 1) * (SUM / STEP) {
                // SAFETY: columns, pairs and the scale of step `step`: the caller's promise.
                unsafe {
                    let own = columns.as_ptr().add(step * STEP * LANES + at);
                    let x: [__m256; STEP] =
                        std::array::from_fn(|c| _mm256_loadu_ps(own.add(c * LANES)));
                    let mut most = zero;
                    for x in x {
                        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0), x));
                        // Nothing, or NaN where an input is infinite or NaN.
                        total = _mm256_fmadd_ps(x, zero, total);
                    }
                    // Of a row of zeros alone any scale is right, if its inverse is finite.
                    let most = _mm256_max_ps(most, _mm256_set1_ps(f32::MIN_POSITIVE * MAX_QUANT));
                    let inverse = _mm256_div_ps(_mm256_set1_ps(MAX_QUANT), most);
                    let scale = _mm256_mul_ps(most, _mm256_set1_ps(1.0 / MAX_QUANT));
                    let whole = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
                    let mut sum = _mm256_setzero_si256();
                    for (i, two) in whole.as_chunks::<2>().0.iter().enumerate() {
                        let low = _mm256_and_si256(two[0], _mm256_set1_epi32(0xffff));
                        let both = _mm256_or_si256(low, _mm256_slli_epi32::<16>(two[1]));
                        let place = (step * STEP / 2 + i) * LANES + at;
                        _mm256_storeu_si256(to.pairs.as_mut_ptr().add(place).cast(), both);
                        sum = _mm256_add_epi32(sum, _mm256_add_epi32(two[0], two[1]));
                    }
                    _mm256_storeu_ps(to.scales.as_mut_ptr().add(step * LANES + at), scale);
                    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, total);
                }
            }
            // SAFETY: sum `s`: the caller's promise.
            unsafe { _mm256_storeu_ps(to.sums.as_mut_ptr().add(s * LANES + at), total) };
        }
    }
}

/// See [`crate::simd::integer_tile::multiply`]; the sums are added to.
///
/// # Safety
/// The processor must have avx2 and fma. The matrix, the panels and the sums must have the rows
/// and groups of the task.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn multiply(
    rows: usize,
    task: &IntegerTask,
    matrix: CodePanel<'_>,
    x: &[InputColumns<'_>],
    (sums, apart): (&mut [f32], usize),
) {
    for (p, x) in x.iter().enumerate() {
        for row in (0..rows).step_by(TILE_ROWS) {
            // SAFETY: the caller's promise.
            unsafe {
                let to = sums.as_mut_ptr().add(p * apart + row * LANES);
                match rows - row {
                    1 => tile::<1>(task, (matrix, row), *x, to),
                    2 => tile::<2>(task, (matrix, row), *x, to),
                    _ => tile::<TILE_ROWS>(task, (matrix, row), *x, to),
                }
            }
        }
    }
}

/// `M` rows of the matrix, from a row of it on, with a panel, added to the sums. A lane sums eight
/// products below 2^8 * 2^15 exactly.
///
/// # Safety
/// As of [`multiply`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize>(
    task: &IntegerTask,
    (matrix, row): (CodePanel<'_>, usize),
    x: InputColumns<'_>,
    sums: *mut f32,
) {
    let IntegerTask {
        columns, stride, ..
    } = *task;
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = matrix.pairs.as_ptr().add(row);
        let (scales, biases) = (
            matrix.scales.as_ptr().add(row),
            matrix.biases.as_ptr().add(row),
        );
        for g in task.groups.clone() {
            let mut group = [[_mm256_setzero_ps(); VECTORS]; M];
            for step in g * columns / STEP..(g + 1) * columns / STEP {
                let mut exact = [[_mm256_setzero_si256(); VECTORS]; M];
                for pair in step * (STEP / 2)..(step + 1) * (STEP / 2) {
                    let lanes = x.pairs.as_ptr().add(pair * LANES);
                    let lanes = [
                        _mm256_loadu_si256(lanes.cast()),
                        _mm256_loadu_si256(lanes.add(WIDTH).cast()),
                    ];
                    let own = pairs.add(pair * stride);
                    for (m, exact) in exact.iter_mut().enumerate() {
                        let two = _mm256_set1_epi32(*own.add(m));
                        for (exact, lanes) in exact.iter_mut().zip(lanes) {
                            *exact = _mm256_add_epi32(*exact, _mm256_madd_epi16(lanes, two));
                        }
                    }
                }
                for v in 0..VECTORS {
                    let scale = x.scales.as_ptr().add(step * LANES + v * WIDTH);
                    let scale = _mm256_loadu_ps(scale);
                    for (group, exact) in group.iter_mut().zip(exact) {
                        group[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact[v]), scale, group[v]);
                    }
                }
            }
            for v in 0..VECTORS {
                let mut all = _mm256_setzero_ps();
                for s in g * columns / SUM..(g + 1) * columns / SUM {
                    let sum = x.sums.as_ptr().add(s * LANES + v * WIDTH);
                    all = _mm256_add_ps(all, _mm256_loadu_ps(sum));
                }
                for (m, group) in group.iter().enumerate() {
                    let scale = _mm256_set1_ps(*scales.add(g * stride + m));
                    let bias = _mm256_set1_ps(*biases.add(g * stride + m));
                    let to = sums.add(m * LANES + v * WIDTH);
                    let total = _mm256_fmadd_ps(group[v], scale, _mm256_loadu_ps(to));
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(bias, all, total));
                }
            }
        }
    }
}
