//! Tiles of multiplication in 8-bit integers with AVX-512 VNNI. One instruction multiplies and adds
//! four columns of sixteen rows, four times as many as with floats.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_si512, _mm512_storeu_ps,
};

use crate::layout::byte_panel::{ByteColumns, ByteColumnsMut, BytePanel, HALF, TileTask, UNIT};
use crate::layout::tile::LANES;
use crate::simd::portable::quantize_bytes::quantize_lanes;
use crate::simd::portable::refine_bytes::refine_lanes;

/// The number of matrix rows per tile. With two panels, integer sums and totals fill the registers.
const TILE_ROWS: usize = 6;

/// See [`crate::simd::byte_tile::quantize`].
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn quantize(columns: &[f32], to: ByteColumnsMut<'_>) {
    quantize_lanes(columns, to);
}

/// See [`crate::simd::byte_tile::refine`].
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn refine(
    columns: &[f32],
    coarse: ByteColumns<'_>,
    fine: ByteColumnsMut<'_>,
    refined: &mut Vec<usize>,
) {
    refine_lanes(columns, coarse, fine, refined);
}

/// See [`crate::simd::byte_tile::multiply`]. This function adds to the sums.
///
/// # Safety
/// The processor must have avx512f, avx512bw and avx512vnni. The matrix, the panels and the sums
/// must have the rows and units of the task.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(crate) unsafe fn multiply(
    rows: usize,
    task: &TileTask,
    matrix: BytePanel<'_>,
    x: &[ByteColumns<'_>],
    (sums, apart): (&mut [f32], usize),
) {
    for row in (0..rows).step_by(TILE_ROWS) {
        // SAFETY: the caller guarantees the features, and the rows and units of the task.
        unsafe {
            let to = sums.as_mut_ptr().add(row * LANES);
            match *x {
                [one] => tile_of(rows - row, task, (matrix, row), [one], [to]),
                [one, other] => {
                    let to = [to, to.add(apart)];
                    tile_of(rows - row, task, (matrix, row), [one, other], to);
                }
                _ => unreachable!("one or two panels"),
            }
        }
    }
}

/// Calls [`tile`] for `rows` rows, at most [`TILE_ROWS`].
///
/// # Safety
/// The obligations of [`tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile_of<const P: usize>(
    rows: usize,
    task: &TileTask,
    matrix: (BytePanel<'_>, usize),
    x: [ByteColumns<'_>; P],
    to: [*mut f32; P],
) {
    // SAFETY: the caller guarantees the obligations of `tile` for these rows.
    unsafe {
        match (rows, task.group == HALF) {
            (1, false) => tile::<1, P, UNIT>(task, matrix, x, to),
            (2, false) => tile::<2, P, UNIT>(task, matrix, x, to),
            (3, false) => tile::<3, P, UNIT>(task, matrix, x, to),
            (4, false) => tile::<4, P, UNIT>(task, matrix, x, to),
            (5, false) => tile::<5, P, UNIT>(task, matrix, x, to),
            (_, false) => tile::<TILE_ROWS, P, UNIT>(task, matrix, x, to),
            (1, true) => tile::<1, P, HALF>(task, matrix, x, to),
            (2, true) => tile::<2, P, HALF>(task, matrix, x, to),
            (3, true) => tile::<3, P, HALF>(task, matrix, x, to),
            (4, true) => tile::<4, P, HALF>(task, matrix, x, to),
            (5, true) => tile::<5, P, HALF>(task, matrix, x, to),
            (_, true) => tile::<TILE_ROWS, P, HALF>(task, matrix, x, to),
        }
    }
}

/// Multiplies `M` adjacent rows of the matrix with `P` panels, and adds to the sums. Sums of `SPAN`
/// columns are exact: at most 32 products below 2^8 * 2^7.
///
/// # Safety
/// The obligations of [`multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const M: usize, const P: usize, const SPAN: usize>(
    task: &TileTask,
    (matrix, row): (BytePanel<'_>, usize),
    x: [ByteColumns<'_>; P],
    to: [*mut f32; P],
) {
    let stride = task.stride;
    // SAFETY: the caller guarantees that the rows and units exist.
    unsafe {
        let codes = matrix.quads.as_ptr().add(row);
        let (scales, biases) = (
            matrix.scales.as_ptr().add(row),
            matrix.biases.as_ptr().add(row),
        );
        let mut totals: [[__m512; P]; M] =
            std::array::from_fn(|m| std::array::from_fn(|p| _mm512_loadu_ps(to[p].add(m * LANES))));
        for span in task.units.start * (UNIT / SPAN)..task.units.end * (UNIT / SPAN) {
            let mut exact = [[_mm512_setzero_si512(); P]; M];
            for quad in span * (SPAN / 4)..(span + 1) * (SPAN / 4) {
                let lanes: [_; P] = std::array::from_fn(|p| {
                    _mm512_loadu_si512(x[p].quads.as_ptr().add(quad * LANES).cast())
                });
                let quad_codes = codes.add(quad * stride);
                for (m, exact) in exact.iter_mut().enumerate() {
                    let four = _mm512_set1_epi32(*quad_codes.add(m));
                    for (exact, lanes) in exact.iter_mut().zip(lanes) {
                        *exact = _mm512_dpbusd_epi32(*exact, four, lanes);
                    }
                }
            }
            let scale: [_; P] = std::array::from_fn(|p| {
                _mm512_loadu_ps(x[p].scales.as_ptr().add(span * SPAN / UNIT * LANES))
            });
            let sums: [_; P] = std::array::from_fn(|p| {
                let sums = x[p].sums.as_ptr().add(span * (SPAN / HALF) * LANES);
                let first = _mm512_loadu_ps(sums);
                match SPAN {
                    HALF => first,
                    _ => _mm512_add_ps(first, _mm512_loadu_ps(sums.add(LANES))),
                }
            });
            let group = span * SPAN / task.group * stride;
            for (m, (exact, totals)) in exact.into_iter().zip(&mut totals).enumerate() {
                let row_scale = _mm512_set1_ps(*scales.add(group + m));
                let bias = _mm512_set1_ps(*biases.add(group + m));
                for p in 0..P {
                    let product = _mm512_mul_ps(_mm512_cvtepi32_ps(exact[p]), scale[p]);
                    let total = _mm512_fmadd_ps(product, row_scale, totals[p]);
                    totals[p] = _mm512_fmadd_ps(bias, sums[p], total);
                }
            }
        }
        for (m, totals) in totals.into_iter().enumerate() {
            for (total, to) in totals.into_iter().zip(to) {
                _mm512_storeu_ps(to.add(m * LANES), total);
            }
        }
    }
}
