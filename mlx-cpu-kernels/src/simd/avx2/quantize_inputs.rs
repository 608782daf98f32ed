//! Quantizes input rows to 16-bit integers with AVX2. The inputs of a matrix word share a scale.
//! `qgemv.rs` of AVX2 and of AVX-512 multiply them.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_GT_OQ, _mm_blend_epi16, _mm_cvtss_f32, _mm_packs_epi32, _mm_setr_epi8,
    _mm_shuffle_epi8, _mm_slli_epi32, _mm_storeu_si128, _mm256_add_ps, _mm256_and_ps,
    _mm256_andnot_ps, _mm256_castps256_ps128, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_cvtepi32_ps, _mm256_cvtps_epi32, _mm256_div_ps, _mm256_extractf128_ps,
    _mm256_extracti128_si256, _mm256_fnmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_mul_ps,
    _mm256_permute_ps, _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps,
};

use crate::layout::input_panel::{InputPanelMut, MAX_QUANT, inputs_per_sum};
use crate::simd::avx2::vmath::horizontal_sum;

/// See [`crate::simd::qgemv::prepare_inputs`].
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn prepare_inputs(
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    to: InputPanelMut<'_>,
) {
    let (rows, groups) = (x.len() / k, k / group);
    // All writes below are within these bounds.
    assert!(to.quants.len() == rows * k && groups * group == k && group.is_multiple_of(8));
    assert!(to.scales.len() * inputs_per_sum(bits) == rows * k);
    assert!(to.sums.len() == rows * groups);
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (g, x) in x.chunks_exact(group).enumerate() {
            let (mut sum, mut rest) = (_mm256_setzero_ps(), _mm256_setzero_ps());
            for (i, x) in (g * group / 8..).zip(x.as_chunks::<8>().0) {
                // SAFETY: the caller guarantees the features. A row has `k / 8` vectors, each with
                // a place.
                unsafe {
                    let v = _mm256_loadu_ps(x.as_ptr());
                    sum = _mm256_add_ps(sum, v);
                    let (quants, scales) = (to.quants.as_mut_ptr(), to.scales.as_mut_ptr());
                    let error = if inputs_per_sum(bits) == 8 {
                        let place = i * rows + row;
                        quantize_8(v, quants.add(place * 8), scales.add(place))
                    } else {
                        let place = 2 * i * rows + row;
                        quantize_2x4(v, rows, quants.add(place * 4), scales.add(place))
                    };
                    rest = _mm256_add_ps(rest, error);
                }
            }
            to.sums[row * groups + g] = horizontal_sum(sum) - horizontal_sum(rest);
        }
    }
}

/// The maximum magnitude of each four adjacent elements, in all four lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn max_of_4(v: __m256) -> __m256 {
    // A comparison with NaN is false, so NaN is ignored.
    let size = _mm256_max_ps(
        _mm256_andnot_ps(_mm256_set1_ps(-0.0), v),
        _mm256_setzero_ps(),
    );
    let two = _mm256_max_ps(size, _mm256_permute_ps::<0b10_11_00_01>(size));
    _mm256_max_ps(two, _mm256_permute_ps::<0b01_00_11_10>(two))
}

/// Returns integers for elements with these block maxima, the scales, and the rounding errors.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn quantize(v: __m256, most: __m256) -> (__m256i, __m256, __m256) {
    let largest = _mm256_set1_ps(MAX_QUANT);
    let scale = _mm256_div_ps(most, largest);
    let some = _mm256_cmp_ps::<_CMP_GT_OQ>(most, _mm256_setzero_ps());
    let inverse = _mm256_and_ps(some, _mm256_div_ps(largest, most));
    let quants = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
    let error = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(quants), scale, v);
    (quants, scale, error)
}

/// Quantizes eight elements that share a scale, in the order of
/// [`crate::layout::input_panel::pair_index`]. Returns the rounding errors.
///
/// # Safety
/// The processor must have avx2 and fma. Eight places and one scale must exist.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn quantize_8(v: __m256, to: *mut i16, scales: *mut f32) -> __m256 {
    let four = max_of_4(v);
    let most = _mm256_max_ps(four, _mm256_permute2f128_ps::<1>(four, four));
    let (quants, scale, error) = quantize(v, most);
    let (low, high) = (
        _mm256_castsi256_si128(quants),
        _mm256_extracti128_si256::<1>(quants),
    );
    // A pair is an element and the element four later.
    let pairs = _mm_blend_epi16::<0b1010_1010>(low, _mm_slli_epi32::<16>(high));
    // SAFETY: the caller guarantees eight places and one scale.
    unsafe {
        _mm_storeu_si128(to.cast(), pairs);
        *scales = _mm_cvtss_f32(_mm256_castps256_ps128(scale));
    }
    error
}

/// Quantizes two groups of four elements. Each group has a scale, and the second is written `rows`
/// words after the first. Otherwise it is like [`quantize_8`].
///
/// # Safety
/// The processor must have avx2 and fma. Four places and a scale must exist for each group.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn quantize_2x4(v: __m256, rows: usize, to: *mut i16, scales: *mut f32) -> __m256 {
    let (quants, scale, error) = quantize(v, max_of_4(v));
    let all = _mm_packs_epi32(
        _mm256_castsi256_si128(quants),
        _mm256_extracti128_si256::<1>(quants),
    );
    // A pair is an element and the element two later.
    let order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    let mut two = [0u64; 2];
    // SAFETY: sixteen bytes exist. The caller guarantees the places.
    unsafe {
        _mm_storeu_si128(two.as_mut_ptr().cast(), _mm_shuffle_epi8(all, order));
        to.cast::<u64>().write_unaligned(two[0]);
        to.add(rows * 4).cast::<u64>().write_unaligned(two[1]);
        *scales = _mm_cvtss_f32(_mm256_castps256_ps128(scale));
        *scales.add(rows) = _mm_cvtss_f32(_mm256_extractf128_ps::<1>(scale));
    }
    error
}
