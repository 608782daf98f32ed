//! Dequantization for AVX2.

use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix, PackedRow};
use crate::simd::portable;

use std::arch::x86_64::{
    __m256, _mm_loadu_si128, _mm256_add_ps, _mm256_and_si256, _mm256_cvtepi32_ps, _mm256_cvtph_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_mul_ps, _mm256_set1_epi32, _mm256_srli_epi32,
    _mm256_storeu_ps,
};

/// See [`crate::simd::dequantize::unpack_row`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn dequantize_row(row: PackedRow<'_>, bits: u32, out: &mut [f32]) {
    portable::dequantize::dequantize_row(row, bits, out);
}

/// See [`PackedMatrix::dequantize_transposed`].
///
/// # Safety
/// The processor must have avx2, fma and f16c.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn dequantize_transposed(matrix: PackedMatrix<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if matrix.bits == 4 {
            dequantize_transposed_bits::<4>(matrix, out);
        } else {
            dequantize_transposed_bits::<8>(matrix, out);
        }
    }
}

/// [`dequantize_transposed`] of numbers of this bit width.
///
/// # Safety
/// As [`dequantize_transposed`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dequantize_transposed_bits<const BITS: i32>(matrix: PackedMatrix<'_>, out: &mut [f32]) {
    let (count, groups, per) = (matrix.row_blocks(), matrix.groups, matrix.words_per_group());
    let (width, near) = (count * INTERLEAVED_ROWS, 32 / BITS as usize);
    // The reads and writes below stay within these.
    assert!(matrix.words.len() == groups * per * width && matrix.bits == BITS as u32);
    assert!(matrix.scales.len() == groups * width && matrix.biases.len() == groups * width);
    assert!(out.len() == groups * per * near * width);
    let mask = _mm256_set1_epi32((1 << BITS) - 1);
    for i in 0..count {
        for g in 0..groups {
            // SAFETY: group `g` of row block `i`, words `g * per` and on of `groups * per`, and
            // their columns: all asserted.
            unsafe {
                let at = i * groups + g;
                let (scale, bias) = (
                    group_params(matrix.scales, at),
                    group_params(matrix.biases, at),
                );
                for w in g * per..(g + 1) * per {
                    let words = matrix
                        .words
                        .as_ptr()
                        .add((i * groups * per + w) * INTERLEAVED_ROWS);
                    let mut q = _mm256_loadu_si256(words.cast());
                    for j in 0..near {
                        let n = _mm256_cvtepi32_ps(_mm256_and_si256(q, mask));
                        let n = _mm256_add_ps(_mm256_mul_ps(n, scale), bias);
                        let to = out
                            .as_mut_ptr()
                            .add((w * near + j) * width + i * INTERLEAVED_ROWS);
                        _mm256_storeu_ps(to, n);
                        q = _mm256_srli_epi32::<BITS>(q);
                    }
                }
            }
        }
    }
}

/// The scales or biases of a group of a row block.
///
/// # Safety
/// The processor must have avx2 and f16c; there must be as many groups.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group_params(factors: GroupParams<'_>, group: usize) -> __m256 {
    // SAFETY: the caller's promises.
    unsafe {
        match factors {
            GroupParams::F32(all) => _mm256_loadu_ps(all.as_ptr().add(group * INTERLEAVED_ROWS)),
            GroupParams::F16(all) => _mm256_cvtph_ps(_mm_loadu_si128(
                all.as_ptr().add(group * INTERLEAVED_ROWS).cast(),
            )),
        }
    }
}
