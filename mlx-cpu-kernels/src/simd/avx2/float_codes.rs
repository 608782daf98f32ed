//! Decoders with AVX2 for codes that index a table, for codes and scales that are 8-bit floats, and
//! for scales that are bytes times float16.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_packus_epi16,
    _mm_packus_epi32, _mm_set1_epi16, _mm_setzero_si128, _mm_srai_epi16, _mm_unpacklo_epi8,
    _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtph_ps,
    _mm256_extracti128_si256, _mm256_mul_ps, _mm256_set1_epi16, _mm256_set1_ps, _mm256_slli_epi32,
    _mm256_srai_epi16, _mm256_xor_ps,
};

use crate::layout::float_codes::{Codes, E4M3_OVER_F16, FP4_CODES};
use crate::layout::packed::INTERLEAVED_ROWS;

/// Decodes the eight lowest bytes as powers of two; see [`crate::layout::float_codes`]. A zero byte
/// becomes 0.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn e8m0(codes: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(codes)))
}

/// Decodes the eight lowest bytes as E4M3 floats; see [`crate::layout::float_codes`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn e4m3(codes: __m128i) -> __m256 {
    let halves = _mm_srai_epi16::<1>(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
    // The shift also copies the sign into the highest exponent bit, so that bit is cleared.
    let halves = _mm_and_si128(halves, _mm_set1_epi16(0xbf80u16.cast_signed()));
    _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(E4M3_OVER_F16))
}

/// Decodes the lowest byte of each lane as an E4M3 float. All other bytes must be zero.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn e4m3_lanes(codes: __m256i) -> __m256 {
    let (low, high) = (
        _mm256_castsi256_si128(codes),
        _mm256_extracti128_si256::<1>(codes),
    );
    let halves = _mm_packus_epi32(low, high);
    e4m3(_mm_packus_epi16(halves, halves))
}

/// Converts the higher byte of each half lane to float16. The result is the value divided by
/// [`E4M3_OVER_F16`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn e4m3_halves(codes: __m256i) -> __m256i {
    // The shift also copies the sign into the highest exponent bit, so that bit is cleared.
    let mask = _mm256_set1_epi16(0xbf80u16.cast_signed());
    _mm256_and_si256(_mm256_srai_epi16::<1>(codes), mask)
}

/// [`FP4_CODES`] in both halves of a vector.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn fp4_codes() -> __m256i {
    // SAFETY: sixteen bytes exist.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(FP4_CODES.as_ptr().cast()) })
}

/// The lookup table of 4-bit codes as bytes, in both halves of a vector: [`FP4_CODES`], or the
/// integers of a table. For other codes, the result is not used.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn integers(codes: Codes) -> __m256i {
    match codes {
        Codes::Table(table) => {
            // SAFETY: sixteen bytes exist.
            let sixteen = unsafe { _mm_loadu_si128(table.integers().as_ptr().cast()) };
            _mm256_broadcastsi128_si256(sixteen)
        }
        _ => fp4_codes(),
    }
}

/// The scales and biases of a group of [`crate::layout::packed::ScaleFormat::SuperAffine`].
///
/// # Safety
/// The processor must have avx2 and f16c. At the two addresses, sixteen bytes and sixteen float16
/// must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn super_affine(codes: *const i8, supers: *const u16) -> [__m256; 2] {
    // SAFETY: the caller guarantees the features, sixteen bytes and sixteen float16.
    unsafe {
        let [scales, biases] = [0, INTERLEAVED_ROWS].map(|at| {
            let codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(codes.add(at).cast()));
            let supers = _mm256_cvtph_ps(_mm_loadu_si128(supers.add(at).cast()));
            _mm256_mul_ps(_mm256_cvtepi32_ps(codes), supers)
        });
        [scales, _mm256_xor_ps(biases, _mm256_set1_ps(-0.0))]
    }
}
