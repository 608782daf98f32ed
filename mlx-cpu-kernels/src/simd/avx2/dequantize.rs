//! Quantized matrices as floats, for AVX2.

use crate::layout::packed::{BAND, Bands, Factors, QuantizedRow};
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
pub(crate) unsafe fn unpack(row: QuantizedRow<'_>, bits: u32, out: &mut [f32]) {
    portable::dequantize::unpack(row, bits, out);
}

/// See [`Bands::unpack_columns`].
///
/// # Safety
/// The processor must have avx2, fma and f16c.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn unpack_columns(bands: Bands<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if bands.bits == 4 {
            columns_of::<4>(bands, out);
        } else {
            columns_of::<8>(bands, out);
        }
    }
}

/// [`unpack_columns`] of numbers of so many bits.
///
/// # Safety
/// As [`unpack_columns`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn columns_of<const BITS: i32>(bands: Bands<'_>, out: &mut [f32]) {
    let (count, groups, per) = (bands.count(), bands.groups, bands.group_words());
    let (width, near) = (count * BAND, 32 / BITS as usize);
    // The reads and writes below stay within these.
    assert!(bands.words.len() == groups * per * width && bands.bits == BITS as u32);
    assert!(bands.scales.len() == groups * width && bands.biases.len() == groups * width);
    assert!(out.len() == groups * per * near * width);
    let mask = _mm256_set1_epi32((1 << BITS) - 1);
    for i in 0..count {
        for g in 0..groups {
            // SAFETY: group `g` of band `i`, words `g * per` and on of `groups * per`, and their columns: all asserted.
            unsafe {
                let at = i * groups + g;
                let (scale, bias) = (eight(bands.scales, at), eight(bands.biases, at));
                for w in g * per..(g + 1) * per {
                    let words = bands.words.as_ptr().add((i * groups * per + w) * BAND);
                    let mut q = _mm256_loadu_si256(words.cast());
                    for j in 0..near {
                        let n = _mm256_cvtepi32_ps(_mm256_and_si256(q, mask));
                        let n = _mm256_add_ps(_mm256_mul_ps(n, scale), bias);
                        let to = out.as_mut_ptr().add((w * near + j) * width + i * BAND);
                        _mm256_storeu_ps(to, n);
                        q = _mm256_srli_epi32::<BITS>(q);
                    }
                }
            }
        }
    }
}

/// The scales or biases of a group of a band.
///
/// # Safety
/// The processor must have avx2 and f16c; there must be as many groups.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn eight(factors: Factors<'_>, group: usize) -> __m256 {
    // SAFETY: the caller's promises.
    unsafe {
        match factors {
            Factors::Single(all) => _mm256_loadu_ps(all.as_ptr().add(group * BAND)),
            Factors::Half(all) => {
                _mm256_cvtph_ps(_mm_loadu_si128(all.as_ptr().add(group * BAND).cast()))
            }
        }
    }
}
