//! Tiles of multiplication in 8-bit integers with AVX2: `vpmaddubsw`, or `vpdpbusd` of AVX-VNNI.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_add_ps,
    _mm256_cvtepi32_ps, _mm256_dpbusd_avx_epi32, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_sign_epi8, _mm256_storeu_ps,
};

use crate::layout::byte_panel::{
    ByteColumns, ByteColumnsMut, BytePanel, CodeBytes, HALF, MAX_BYTE, TileTask, UNIT,
};
use crate::layout::tile::LANES;
use crate::simd::portable::quantize_bytes::quantize_lanes;
use crate::simd::portable::refine_bytes::refine_lanes;

/// The number of matrix rows per tile. With the two vectors of a panel, integer sums and totals
/// fill the registers.
const TILE_ROWS: usize = 3;

/// The number of vectors per panel.
const VECTORS: usize = LANES / 8;

/// A function that adds products of four bytes. Its arguments are sums, bytes of the matrix, and
/// bytes of the inputs.
trait Add: Fn(__m256i, __m256i, __m256i) -> __m256i + Copy {}
impl<F: Fn(__m256i, __m256i, __m256i) -> __m256i + Copy> Add for F {}

/// A function that widens the sums of a lane (from 16 or 32 bits) and adds them to 32-bit sums.
trait Widen: Fn(__m256i, __m256i) -> __m256i + Copy {}
impl<F: Fn(__m256i, __m256i) -> __m256i + Copy> Widen for F {}

/// See [`crate::simd::byte_tile::quantize`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn quantize(columns: &[f32], to: ByteColumnsMut<'_>) {
    quantize_lanes(columns, to);
}

/// See [`crate::simd::byte_tile::refine`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
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
/// The processor must have avx2 and fma. The matrix, the panels and the sums must have the rows and
/// units of the task.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn multiply(
    rows: usize,
    task: &TileTask,
    matrix: BytePanel<'_>,
    x: &[ByteColumns<'_>],
    sums: (&mut [f32], usize),
) {
    // Closures are used because each is compiled for the instruction set of its function.
    let unsigned = |sum, codes, x| _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
    let signed = |sum, codes, x| {
        let two = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
        _mm256_add_epi16(sum, two)
    };
    let wide = |total, sum| _mm256_add_epi32(total, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    // The maximum number of quads (four codes) whose sums fit 16 bits. A quad adds two products to
    // each sum.
    let quads = i32::from(i16::MAX) / (2 * MAX_BYTE as i32 * i32::from(matrix.largest));
    // SAFETY: the caller guarantees the features, and the rows and units of the task.
    unsafe {
        match (matrix.bytes, quads) {
            (CodeBytes::Signed, _) => tiles::<1>(rows, task, matrix, x, sums, (signed, wide)),
            (_, 8..) => tiles::<8>(rows, task, matrix, x, sums, (unsigned, wide)),
            (_, 4..) => tiles::<4>(rows, task, matrix, x, sums, (unsigned, wide)),
            (_, 2..) => tiles::<2>(rows, task, matrix, x, sums, (unsigned, wide)),
            _ => tiles::<1>(rows, task, matrix, x, sums, (unsigned, wide)),
        }
    }
}

/// [`multiply`] with AVX-VNNI, for unsigned bytes.
///
/// # Safety
/// As [`multiply`], and the processor must have avxvnni.
#[target_feature(enable = "avx2,fma,avxvnni")]
pub(crate) unsafe fn multiply_vnni(
    rows: usize,
    task: &TileTask,
    matrix: BytePanel<'_>,
    x: &[ByteColumns<'_>],
    sums: (&mut [f32], usize),
) {
    assert!(matrix.bytes == CodeBytes::Unsigned);
    let add = |sum, codes, x| _mm256_dpbusd_avx_epi32(sum, codes, x);
    let wide = |total, sum| _mm256_add_epi32(total, sum);
    // SAFETY: the caller guarantees the features, and the rows and units of the task.
    unsafe { tiles::<8>(rows, task, matrix, x, sums, (add, wide)) };
}

/// Computes all tiles. `add` adds products of four bytes to the sums of a lane. After at most
/// `QUADS` quads or at the end of a span, `wide` adds these sums to the exact 32-bit sums.
///
/// # Safety
/// The obligations of [`multiply`].
#[inline(always)]
unsafe fn tiles<const QUADS: usize>(
    rows: usize,
    task: &TileTask,
    matrix: BytePanel<'_>,
    x: &[ByteColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    dot: (impl Add, impl Widen),
) {
    for (p, x) in x.iter().enumerate() {
        for row in (0..rows).step_by(TILE_ROWS) {
            // SAFETY: the caller guarantees the features, and the rows and units of the task.
            unsafe {
                let to = sums.as_mut_ptr().add(p * apart + row * LANES);
                let of = (matrix, row);
                match (rows - row, task.group == HALF) {
                    (1, false) => tile::<1, UNIT, QUADS>(task, of, *x, to, dot),
                    (2, false) => tile::<2, UNIT, QUADS>(task, of, *x, to, dot),
                    (_, false) => tile::<TILE_ROWS, UNIT, QUADS>(task, of, *x, to, dot),
                    (1, true) => tile::<1, HALF, QUADS>(task, of, *x, to, dot),
                    (2, true) => tile::<2, HALF, QUADS>(task, of, *x, to, dot),
                    (_, true) => tile::<TILE_ROWS, HALF, QUADS>(task, of, *x, to, dot),
                }
            }
        }
    }
}

/// Multiplies `M` matrix rows with a panel, and adds to the sums. Sums over `SPAN` columns are
/// exact.
///
/// # Safety
/// The obligations of [`multiply`].
#[inline(always)]
unsafe fn tile<const M: usize, const SPAN: usize, const QUADS: usize>(
    task: &TileTask,
    (matrix, row): (BytePanel<'_>, usize),
    x: ByteColumns<'_>,
    to: *mut f32,
    (add, wide): (impl Add, impl Widen),
) {
    let step = const { if QUADS > SPAN / 4 { SPAN / 4 } else { QUADS } };
    let stride = task.stride;
    // SAFETY: the caller guarantees the features, and the rows and units of the task.
    unsafe {
        let codes = matrix.quads.as_ptr().add(row);
        let (scales, biases) = (
            matrix.scales.as_ptr().add(row),
            matrix.biases.as_ptr().add(row),
        );
        let mut totals: [[__m256; VECTORS]; M] = [[_mm256_set1_ps(0.0); VECTORS]; M];
        for (m, totals) in totals.iter_mut().enumerate() {
            for (v, total) in totals.iter_mut().enumerate() {
                *total = _mm256_loadu_ps(to.add(m * LANES + 8 * v));
            }
        }
        for span in task.units.start * (UNIT / SPAN)..task.units.end * (UNIT / SPAN) {
            let mut exact = [[_mm256_setzero_si256(); VECTORS]; M];
            for first in (span * (SPAN / 4)..(span + 1) * (SPAN / 4)).step_by(step) {
                let mut narrow = [[_mm256_setzero_si256(); VECTORS]; M];
                for quad in first..first + step {
                    let lanes = x.quads.as_ptr().add(quad * LANES);
                    let lanes = [
                        _mm256_loadu_si256(lanes.cast()),
                        _mm256_loadu_si256(lanes.add(8).cast()),
                    ];
                    let quad_codes = codes.add(quad * stride);
                    for (m, narrow) in narrow.iter_mut().enumerate() {
                        let four = _mm256_set1_epi32(*quad_codes.add(m));
                        for (sum, lanes) in narrow.iter_mut().zip(lanes) {
                            *sum = add(*sum, four, lanes);
                        }
                    }
                }
                for (exact, narrow) in exact.iter_mut().zip(narrow) {
                    for (exact, narrow) in exact.iter_mut().zip(narrow) {
                        *exact = wide(*exact, narrow);
                    }
                }
            }
            let group = span * SPAN / task.group * stride;
            for v in 0..VECTORS {
                let scales_x = x.scales.as_ptr().add(span * SPAN / UNIT * LANES + 8 * v);
                let scale = _mm256_loadu_ps(scales_x);
                let sums = x.sums.as_ptr().add(span * (SPAN / HALF) * LANES + 8 * v);
                let mut sum = _mm256_loadu_ps(sums);
                if SPAN == UNIT {
                    sum = _mm256_add_ps(sum, _mm256_loadu_ps(sums.add(LANES)));
                }
                for m in 0..M {
                    let row_scale = _mm256_set1_ps(*scales.add(group + m));
                    let bias = _mm256_set1_ps(*biases.add(group + m));
                    let product = _mm256_mul_ps(_mm256_cvtepi32_ps(exact[m][v]), scale);
                    let total = _mm256_fmadd_ps(product, row_scale, totals[m][v]);
                    totals[m][v] = _mm256_fmadd_ps(bias, sum, total);
                }
            }
        }
        for (m, totals) in totals.into_iter().enumerate() {
            for (v, total) in totals.into_iter().enumerate() {
                _mm256_storeu_ps(to.add(m * LANES + 8 * v), total);
            }
        }
    }
}
