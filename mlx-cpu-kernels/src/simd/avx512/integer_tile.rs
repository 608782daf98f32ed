//! Products of many rows in 16-bit integers: the inputs of sixteen rows as integers, and their
//! products with rows of a quantized matrix. One instruction multiplies and adds two columns of
//! sixteen rows, twice as many as with floats.

use std::arch::x86_64::{
    __m512, _mm512_abs_ps, _mm512_add_epi32, _mm512_and_si512, _mm512_cvtepi32_ps,
    _mm512_cvtps_epi32, _mm512_div_ps, _mm512_dpwssd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_max_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_reduce_max_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_storeu_si512,
};
use std::ops::Range;

use crate::layout::input_panel::MAX_QUANT;
use crate::layout::integer_panel::{CodePanel, FACTORS, InputColumns, InputColumnsMut};
use crate::layout::tile::LANES;

/// Panels of inputs that one pass over a matrix meets.
pub(crate) const PANELS: usize = 2;

/// Rows of the matrix in a tile: with [`PANELS`] vectors for each, sums of integers and totals fill
/// the registers.
const TILE_ROWS: usize = 6;

/// Columns `[columns, LANES]` as integers with a scale for each `step` of them.
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn quantize(columns: &[f32], step: usize, to: InputColumnsMut<'_>) {
    let steps = columns.len() / (step * LANES);
    // The reads and writes below stay within these.
    assert!(step.is_multiple_of(2) && columns.len() == steps * step * LANES);
    assert!(to.pairs.len() == columns.len() / 2 && to.factors.len() == steps * FACTORS);
    assert!(to.outliers.len() == steps);
    let zero = _mm512_setzero_ps();
    for s in 0..steps {
        // SAFETY: step `s` of `steps`, whose columns, pairs and factors are asserted.
        unsafe {
            let own = columns.as_ptr().add(s * step * LANES);
            let column = |c: usize| _mm512_loadu_ps(own.add(c * LANES));
            let (mut outlier, mut largest) = (0, -1.0);
            // Zero, or NaN where an input is infinite or NaN.
            let mut check = zero;
            for c in 0..step {
                let x = column(c);
                check = _mm512_fmadd_ps(x, zero, check);
                let most = _mm512_reduce_max_ps(_mm512_abs_ps(x));
                if most > largest {
                    (outlier, largest) = (c, most);
                }
            }
            let mut most = zero;
            for c in (0..step).filter(|c| *c != outlier) {
                most = _mm512_max_ps(most, _mm512_abs_ps(column(c)));
            }
            // Of a row of zeros alone any scale is right, if its inverse is finite.
            let most = _mm512_max_ps(most, _mm512_set1_ps(f32::MIN_POSITIVE * MAX_QUANT));
            let inverse = _mm512_div_ps(_mm512_set1_ps(MAX_QUANT), most);
            let scale = _mm512_mul_ps(most, _mm512_set1_ps(1.0 / MAX_QUANT));
            let mut sum = _mm512_setzero_si512();
            let mut whole = |c: usize| {
                if c == outlier {
                    return _mm512_setzero_si512();
                }
                let whole = _mm512_cvtps_epi32(_mm512_mul_ps(column(c), inverse));
                sum = _mm512_add_epi32(sum, whole);
                whole
            };
            let low = _mm512_set1_epi32(0xffff);
            for pair in 0..step / 2 {
                let (first, second) = (whole(2 * pair), whole(2 * pair + 1));
                let both = _mm512_or_si512(
                    _mm512_and_si512(first, low),
                    _mm512_slli_epi32::<16>(second),
                );
                let place = (s * step / 2 + pair) * LANES;
                _mm512_storeu_si512(to.pairs.as_mut_ptr().add(place).cast(), both);
            }
            let alone = column(outlier);
            let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, alone);
            let factors = to.factors.as_mut_ptr().add(s * FACTORS);
            _mm512_storeu_ps(factors, scale);
            _mm512_storeu_ps(factors.add(LANES), alone);
            _mm512_storeu_ps(factors.add(2 * LANES), _mm512_fmadd_ps(check, sum, sum));
            to.outliers[s] = outlier as u32;
        }
    }
}

/// `sums[panel][row][lane] (+)= matrix[row] . x[panel][lane]` over some steps of `step` columns.
/// The rows are the first `rows` of the matrix; there are one or two panels, whose sums are so far
/// apart as the number beside them says.
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn multiply(
    rows: usize,
    (steps, step): (Range<usize>, usize),
    matrix: CodePanel<'_>,
    x: &[InputColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    accumulate: bool,
) {
    // The reads and writes below stay within these.
    let (pairs, stride) = (steps.end * step / 2, matrix.rows);
    assert!(rows <= stride && pairs * stride <= matrix.pairs.len());
    assert!(steps.end * stride <= matrix.scales.len().min(matrix.biases.len()));
    assert!(apart >= rows * LANES && sums.len() >= (x.len() - 1) * apart + rows * LANES);
    for x in x {
        assert!(pairs * LANES <= x.pairs.len() && steps.end * FACTORS <= x.factors.len());
        assert!(steps.end <= x.outliers.len());
        assert!(x.outliers[..steps.end].iter().all(|c| (*c as usize) < step));
    }
    let task = Task {
        steps,
        half: step / 2,
        stride,
        accumulate,
    };
    for row in (0..rows).step_by(TILE_ROWS) {
        // SAFETY: rows below `rows` of the matrix and of the sums, and steps of both: asserted.
        unsafe {
            let factors = [matrix.scales, matrix.biases].map(|all| all.as_ptr().add(row));
            let matrix = (matrix.pairs.as_ptr().add(row), factors);
            let to = sums.as_mut_ptr().add(row * LANES);
            match *x {
                [one] => {
                    let x = [PanelPtrs::of(one)];
                    tile_of(rows - row, &task, matrix, x, [to]);
                }
                [one, other] => {
                    let x = [PanelPtrs::of(one), PanelPtrs::of(other)];
                    tile_of(rows - row, &task, matrix, x, [to, to.add(apart)]);
                }
                _ => unreachable!("one or two panels"),
            }
        }
    }
}

/// What all tiles of a product have in common.
struct Task {
    steps: Range<usize>,
    /// Pairs of columns of a step.
    half: usize,
    /// Rows of the matrix's panel.
    stride: usize,
    accumulate: bool,
}

/// Pairs, and scales and biases, from a row of a [`CodePanel`] on.
type CodePtrs = (*const i32, [*const f32; 2]);

/// The addresses of [`InputColumns`].
#[derive(Clone, Copy)]
struct PanelPtrs {
    pairs: *const i32,
    factors: *const f32,
    outliers: *const u32,
}

impl PanelPtrs {
    fn of(x: InputColumns<'_>) -> Self {
        Self {
            pairs: x.pairs.as_ptr(),
            factors: x.factors.as_ptr(),
            outliers: x.outliers.as_ptr(),
        }
    }
}

/// [`tile`] of as many rows as there are, at most [`TILE_ROWS`].
///
/// # Safety
/// As of [`tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile_of<const P: usize>(
    rows: usize,
    task: &Task,
    matrix: CodePtrs,
    x: [PanelPtrs; P],
    sums: [*mut f32; P],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            1 => tile::<1, P>(task, matrix, x, sums),
            2 => tile::<2, P>(task, matrix, x, sums),
            3 => tile::<3, P>(task, matrix, x, sums),
            4 => tile::<4, P>(task, matrix, x, sums),
            5 => tile::<5, P>(task, matrix, x, sums),
            _ => tile::<TILE_ROWS, P>(task, matrix, x, sums),
        }
    }
}

/// `M` rows of the matrix (pairs, scales and biases) with `P` panels. A lane sums products below
/// 2^8 * 2^15 of at most 32 columns.
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni. All addresses must have the rows and
/// steps of the task.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const M: usize, const P: usize>(
    task: &Task,
    (pairs, [scales, biases]): CodePtrs,
    x: [PanelPtrs; P],
    sums: [*mut f32; P],
) {
    let Task { half, stride, .. } = *task;
    let mut totals: [[__m512; P]; M] = [[_mm512_setzero_ps(); P]; M];
    // SAFETY: the caller's promise.
    unsafe {
        if task.accumulate {
            for (m, totals) in totals.iter_mut().enumerate() {
                for (total, from) in totals.iter_mut().zip(sums) {
                    *total = _mm512_loadu_ps(from.add(m * LANES));
                }
            }
        }
        for s in task.steps.clone() {
            let mut exact = [[_mm512_setzero_si512(); P]; M];
            for pair in s * half..(s + 1) * half {
                let lanes = x.map(|x| _mm512_loadu_si512(x.pairs.add(pair * LANES).cast()));
                let own = pairs.add(pair * stride);
                for (m, exact) in exact.iter_mut().enumerate() {
                    let two = _mm512_set1_epi32(*own.add(m));
                    for (exact, lanes) in exact.iter_mut().zip(lanes) {
                        *exact = _mm512_dpwssd_epi32(*exact, lanes, two);
                    }
                }
            }
            for (p, x) in x.into_iter().enumerate() {
                let factors = x.factors.add(s * FACTORS);
                let scale = _mm512_loadu_ps(factors);
                let outlier = _mm512_loadu_ps(factors.add(LANES));
                let sum = _mm512_loadu_ps(factors.add(2 * LANES));
                let column = *x.outliers.add(s) as usize;
                let code = pairs.add((s * half + column / 2) * stride).cast::<i16>();
                let code = code.add(column % 2);
                for m in 0..M {
                    let code = _mm512_set1_ps(f32::from(*code.add(2 * m)));
                    let alone = _mm512_mul_ps(code, outlier);
                    let all = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact[m][p]), scale, alone);
                    let factor = _mm512_set1_ps(*scales.add(s * stride + m));
                    let bias = _mm512_set1_ps(*biases.add(s * stride + m));
                    let total = _mm512_fmadd_ps(all, factor, totals[m][p]);
                    totals[m][p] = _mm512_fmadd_ps(bias, sum, total);
                }
            }
        }
        for (m, totals) in totals.into_iter().enumerate() {
            for (total, to) in totals.into_iter().zip(sums) {
                _mm512_storeu_ps(to.add(m * LANES), total);
            }
        }
    }
}
