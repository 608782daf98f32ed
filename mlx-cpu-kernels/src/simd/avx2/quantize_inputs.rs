//! Quantizes input rows to 16-bit integers with AVX2. Sixteen adjacent inputs share a scale.
//! `qgemv.rs` of AVX2 and of AVX-512 multiply them.
//!
//! Integers, scales and sums of a row equal those that `avx512/integer_tile.rs` computes for many
//! rows, bit by bit.

use std::arch::x86_64::{
    __m128i, __m256, _mm_add_epi32, _mm_blend_epi16, _mm_cvtsi128_si32, _mm_cvtss_f32,
    _mm_madd_epi16, _mm_packs_epi32, _mm_set1_epi16, _mm_setr_epi8, _mm_shuffle_epi8,
    _mm_shuffle_epi32, _mm_slli_epi32, _mm_storeu_si128, _mm256_andnot_ps, _mm256_castps256_ps128,
    _mm256_castsi256_si128, _mm256_cvtps_epi32, _mm256_div_ps, _mm256_extracti128_si256,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_mul_ps, _mm256_permute_ps,
    _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps,
};

use crate::layout::input_panel::{INPUTS_PER_SCALE, InputPanelMut, MAX_QUANT, RUN};
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
    assert!(
        to.quants.len() == rows * k
            && groups * group == k
            && group.is_multiple_of(INPUTS_PER_SCALE)
    );
    assert!(to.scales.len() * INPUTS_PER_SCALE == rows * k);
    assert!(to.sums.len() == rows * groups);
    let zero = _mm256_setzero_ps();
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (g, x) in x.chunks_exact(group).enumerate() {
            let (mut all, mut no_number) = (0.0f32, zero);
            let first = g * group / INPUTS_PER_SCALE;
            for (i, x) in x.as_chunks::<INPUTS_PER_SCALE>().0.iter().enumerate() {
                let place = first + i;
                // SAFETY: the caller guarantees the features. A row has `k / 16` scales, each with
                // two runs of eight integers.
                unsafe {
                    let v = [0, RUN].map(|at| _mm256_loadu_ps(x.as_ptr().add(at)));
                    let mut sum = 0;
                    let (inverse, scale) = scale_of(v);
                    for (run, v) in v.into_iter().enumerate() {
                        // Adds zero; if an input is infinite or NaN, it adds NaN.
                        no_number = _mm256_fmadd_ps(v, zero, no_number);
                        let pairs = quantize(v, inverse, bits);
                        let to = to.quants.as_mut_ptr();
                        _mm_storeu_si128(
                            to.add(((2 * place + run) * rows + row) * RUN).cast(),
                            pairs,
                        );
                        sum += total(pairs);
                    }
                    *to.scales.as_mut_ptr().add(place * rows + row) = scale;
                    all += sum as f32 * scale;
                }
            }
            let no_number = horizontal_sum(no_number);
            to.sums[row * groups + g] = all + no_number;
            // No integer represents NaN, so a scale does.
            to.scales[first * rows + row] += no_number;
        }
    }
}

/// The maximum magnitude of the elements, in all lanes. NaN is ignored.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn greatest(v: __m256) -> __m256 {
    // The instruction returns the second operand if either is NaN.
    let size = _mm256_max_ps(
        _mm256_andnot_ps(_mm256_set1_ps(-0.0), v),
        _mm256_setzero_ps(),
    );
    let two = _mm256_max_ps(size, _mm256_permute_ps::<0b10_11_00_01>(size));
    let four = _mm256_max_ps(two, _mm256_permute_ps::<0b01_00_11_10>(two));
    _mm256_max_ps(four, _mm256_permute2f128_ps::<1>(four, four))
}

/// The scale of sixteen elements, and its inverse in all lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scale_of(v: [__m256; 2]) -> (__m256, f32) {
    // Among zeros, any scale with a finite inverse is correct.
    let least = _mm256_set1_ps(f32::MIN_POSITIVE * MAX_QUANT);
    let most = _mm256_max_ps(_mm256_max_ps(greatest(v[0]), greatest(v[1])), least);
    let inverse = _mm256_div_ps(_mm256_set1_ps(MAX_QUANT), most);
    let scale = _mm256_mul_ps(most, _mm256_set1_ps(1.0 / MAX_QUANT));
    (inverse, _mm_cvtss_f32(_mm256_castps256_ps128(scale)))
}

/// Quantizes eight elements. Returns integers in the order of
/// [`crate::layout::input_panel::integer_index`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn quantize(v: __m256, inverse: __m256, bits: u32) -> __m128i {
    let quants = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
    let (low, high) = (
        _mm256_castsi256_si128(quants),
        _mm256_extracti128_si256::<1>(quants),
    );
    if bits == 8 {
        // A pair is an element and the element two later.
        let order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        _mm_shuffle_epi8(_mm_packs_epi32(low, high), order)
    } else {
        // A pair is an element and the element four later.
        _mm_blend_epi16::<0b1010_1010>(low, _mm_slli_epi32::<16>(high))
    }
}

/// The sum of eight integers.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn total(pairs: __m128i) -> i32 {
    let four = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
}
