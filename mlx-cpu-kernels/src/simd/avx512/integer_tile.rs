//! Many-row multiplication in 16-bit integers. It quantizes sixteen input rows and multiplies them
//! with rows of a quantized matrix. One instruction multiplies and adds two columns of sixteen
//! rows, twice as many as with floats.

use std::arch::x86_64::{
    __m512, _mm512_abs_ps, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_cvtepi32_ps,
    _mm512_cvtps_epi32, _mm512_div_ps, _mm512_dpwssd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_max_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_ps,
    _mm512_storeu_si512,
};
use std::ops::Range;

use crate::layout::input_panel::MAX_QUANT;
use crate::layout::integer_panel::{
    CodePanel, InputColumns, InputColumnsMut, STEP, paired_columns,
};
use crate::layout::tile::LANES;

/// The number of matrix rows per tile. With two panels, the integer sums and the group sums take 24
/// of the 32 registers. The others hold inputs and scales.
const TILE_ROWS: usize = 6;

/// Quantizes columns `[columns, LANES]`, with a scale per [`STEP`] columns.
///
/// # Safety
/// The processor must have avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn quantize(columns: &[f32], to: InputColumnsMut<'_>) {
    let steps = columns.len() / (STEP * LANES);
    // All reads and writes below are within these bounds.
    assert!(columns.len() == steps * STEP * LANES && to.pairs.len() == columns.len() / 2);
    assert!(to.scales.len() == steps * LANES && to.sums.len() == steps * LANES);
    let zero = _mm512_setzero_ps();
    for step in 0..steps {
        // SAFETY: columns, pairs, scale and sum of step `step` are within the asserted bounds.
        unsafe {
            let from = columns.as_ptr().add(step * STEP * LANES);
            let x: [__m512; STEP] = std::array::from_fn(|c| _mm512_loadu_ps(from.add(c * LANES)));
            let (mut most, mut no_number) = (zero, zero);
            for x in x {
                most = _mm512_max_ps(most, _mm512_abs_ps(x));
                // Adds zero; if an input is infinite or NaN, it adds NaN.
                no_number = _mm512_fmadd_ps(x, zero, no_number);
            }
            // In a row of zeros, any scale with a finite inverse is correct.
            let most = _mm512_max_ps(most, _mm512_set1_ps(f32::MIN_POSITIVE * MAX_QUANT));
            let inverse = _mm512_div_ps(_mm512_set1_ps(MAX_QUANT), most);
            let scale = _mm512_mul_ps(most, _mm512_set1_ps(1.0 / MAX_QUANT));
            let rounded = x.map(|x| _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
            let mut sum = _mm512_setzero_si512();
            for i in 0..STEP / 2 {
                let two = paired_columns(i).map(|c| rounded[c]);
                let low = _mm512_and_si512(two[0], _mm512_set1_epi32(0xffff));
                let both = _mm512_or_si512(low, _mm512_slli_epi32::<16>(two[1]));
                let place = (step * STEP / 2 + i) * LANES;
                _mm512_storeu_si512(to.pairs.as_mut_ptr().add(place).cast(), both);
                sum = _mm512_add_epi32(sum, _mm512_add_epi32(two[0], two[1]));
            }
            let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, no_number);
            _mm512_storeu_ps(to.scales.as_mut_ptr().add(step * LANES), scale);
            _mm512_storeu_ps(to.sums.as_mut_ptr().add(step * LANES), sum);
        }
    }
}

/// `sums[panel][row][lane] (+)= matrix[row] . x[panel][lane]` over some groups. Only the first
/// `rows` rows of the matrix are used. There are one or two panels, whose sums have the given
/// distance. Without `accumulate`, earlier sums are overwritten.
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn multiply(
    rows: usize,
    groups: Range<usize>,
    matrix: CodePanel<'_>,
    x: &[InputColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    accumulate: bool,
) {
    // All reads and writes below are within these bounds.
    let (columns, stride) = (groups.end * matrix.group, matrix.rows);
    assert!(matrix.group.is_multiple_of(STEP));
    assert!(rows <= stride && columns / 2 * stride <= matrix.pairs.len());
    assert!(groups.end * stride <= matrix.scales.len().min(matrix.biases.len()));
    assert!(apart >= rows * LANES && sums.len() >= (x.len() - 1) * apart + rows * LANES);
    for x in x {
        assert!(columns / 2 * LANES <= x.pairs.len() && columns / STEP * LANES <= x.scales.len());
        assert!(columns / STEP * LANES <= x.sums.len());
    }
    if !accumulate {
        for sums in sums.chunks_mut(apart).take(x.len()) {
            sums[..rows * LANES].fill(0.0);
        }
    }
    let task = Task {
        groups,
        columns: matrix.group,
        stride,
    };
    for row in (0..rows).step_by(TILE_ROWS) {
        // SAFETY: as asserted, matrix and sums have `rows` rows, and matrix and inputs have the
        // groups.
        unsafe {
            let factors = [matrix.scales, matrix.biases].map(|all| all.as_ptr().add(row));
            let matrix = (matrix.pairs.as_ptr().add(row), factors);
            let to = sums.as_mut_ptr().add(row * LANES);
            match *x {
                [one] => {
                    let x = [PanelPtrs::new(one)];
                    tile_of(rows - row, &task, matrix, x, [to]);
                }
                [one, other] => {
                    let x = [PanelPtrs::new(one), PanelPtrs::new(other)];
                    tile_of(rows - row, &task, matrix, x, [to, to.add(apart)]);
                }
                _ => unreachable!("one or two panels"),
            }
        }
    }
}

/// The parameters shared by all tiles of a product.
struct Task {
    groups: Range<usize>,
    /// The number of columns per group.
    columns: usize,
    /// The number of rows in the matrix's panel.
    stride: usize,
}

/// The addresses of pairs, and of scales and biases, beginning at a row of a [`CodePanel`].
type CodePtrs = (*const i32, [*const f32; 2]);

/// The addresses of [`InputColumns`].
#[derive(Clone, Copy)]
struct PanelPtrs {
    pairs: *const i32,
    scales: *const f32,
    sums: *const f32,
}

impl PanelPtrs {
    fn new(x: InputColumns<'_>) -> Self {
        Self {
            pairs: x.pairs.as_ptr(),
            scales: x.scales.as_ptr(),
            sums: x.sums.as_ptr(),
        }
    }
}

/// Calls [`tile`] for the rows that exist, at most [`TILE_ROWS`].
///
/// # Safety
/// The obligations of [`tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile_of<const P: usize>(
    rows: usize,
    task: &Task,
    matrix: CodePtrs,
    x: [PanelPtrs; P],
    sums: [*mut f32; P],
) {
    // SAFETY: the caller guarantees the obligations of `tile` for these rows.
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

/// Multiplies `M` matrix rows with `P` panels, and adds to the sums. A lane sums sixteen
/// products below 2^8 * 2^15 exactly.
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni. All addresses must have the rows and
/// groups of the task.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const M: usize, const P: usize>(
    task: &Task,
    (pairs, [scales, biases]): CodePtrs,
    x: [PanelPtrs; P],
    sums: [*mut f32; P],
) {
    let Task {
        columns, stride, ..
    } = *task;
    // SAFETY: the caller guarantees the features, and the rows and groups of the task.
    unsafe {
        for g in task.groups.clone() {
            let mut group = [[_mm512_setzero_ps(); P]; M];
            for step in g * columns / STEP..(g + 1) * columns / STEP {
                let mut exact = [[_mm512_setzero_si512(); P]; M];
                for pair in step * (STEP / 2)..(step + 1) * (STEP / 2) {
                    let lanes = x.map(|x| _mm512_loadu_si512(x.pairs.add(pair * LANES).cast()));
                    let row = pairs.add(pair * stride);
                    for (m, exact) in exact.iter_mut().enumerate() {
                        let two = _mm512_set1_epi32(*row.add(m));
                        for (exact, lanes) in exact.iter_mut().zip(lanes) {
                            *exact = _mm512_dpwssd_epi32(*exact, lanes, two);
                        }
                    }
                }
                let scale = x.map(|x| _mm512_loadu_ps(x.scales.add(step * LANES)));
                for (group, exact) in group.iter_mut().zip(exact) {
                    for ((group, exact), scale) in group.iter_mut().zip(exact).zip(scale) {
                        *group = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, *group);
                    }
                }
            }
            let mut all = [_mm512_setzero_ps(); P];
            for step in g * columns / STEP..(g + 1) * columns / STEP {
                for (all, x) in all.iter_mut().zip(x) {
                    *all = _mm512_add_ps(*all, _mm512_loadu_ps(x.sums.add(step * LANES)));
                }
            }
            for (m, group) in group.into_iter().enumerate() {
                let scale = _mm512_set1_ps(*scales.add(g * stride + m));
                let bias = _mm512_set1_ps(*biases.add(g * stride + m));
                for ((group, all), to) in group.into_iter().zip(all).zip(sums) {
                    let to = to.add(m * LANES);
                    let total = _mm512_fmadd_ps(group, scale, _mm512_loadu_ps(to));
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(bias, all, total));
                }
            }
        }
    }
}
