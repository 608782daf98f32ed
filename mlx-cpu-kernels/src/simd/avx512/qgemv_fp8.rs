//! Multiplication of matrices with 8-bit float codes (MXFP8) and few input rows, for AVX-512. It
//! processes two row blocks at a time; otherwise it is like `avx2/qgemv_fp8.rs`.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_ps, _mm_prefetch, _mm256_castps_pd,
    _mm256_loadu_si256, _mm256_storeu_ps, _mm512_add_ps, _mm512_and_si512, _mm512_broadcast_f32x4,
    _mm512_castpd_ps, _mm512_castpd256_pd512, _mm512_castps512_ps256, _mm512_castsi256_si512,
    _mm512_castsi512_si256, _mm512_cvtph_ps, _mm512_extracti64x4_epi64, _mm512_fmadd_ps,
    _mm512_insertf64x4, _mm512_inserti64x4, _mm512_mul_ps, _mm512_permute_ps,
    _mm512_permutex2var_ps, _mm512_set1_epi16, _mm512_set1_ps, _mm512_setr_epi32,
    _mm512_setzero_ps, _mm512_slli_epi16, _mm512_srai_epi16, _mm512_storeu_ps,
};

use crate::layout::float_codes::{Codes, E4M3_OVER_F16};
use crate::layout::input_panel::InputPanel;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix, ScaleFormat};
use crate::partition::OutputBlock;
use crate::simd::avx2::float_codes::e8m0;
use crate::simd::avx2::qgemv::{PREFETCH_BYTES, RowBlock};
use crate::simd::avx2::qgemv_fp8::qgemv_fp8_for_rows;
use crate::simd::avx512::qgemv::ahead_of;

qgemv_fp8_for_rows!("avx2,fma,f16c,avx512f,avx512bw");

/// Multiplies all row blocks with `M` rows.
///
/// # Safety
/// As [`qgemv`], with the lengths that [`RowBlock::first`] asserts.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
unsafe fn row_blocks<const M: usize>(
    first: RowBlock,
    count: usize,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    let (to, step) = out.raw_parts();
    for i in (0..count).step_by(2) {
        // If the number of row blocks is odd, the last one is paired with itself.
        let next = (i + 1).min(count - 1);
        // SAFETY: the row blocks are below `count` and have eight elements each in each row of the
        // output.
        unsafe {
            let two = [i, next].map(|i| first.after::<{ ScaleFormat::E8M0_ID }>(i));
            for (m, sums) in tile::<M>(two, x.values.as_ptr()).into_iter().enumerate() {
                let to = to.add(m * step + i * INTERLEAVED_ROWS);
                if next > i {
                    _mm512_storeu_ps(to, sums);
                } else {
                    _mm256_storeu_ps(to, _mm512_castps512_ps256(sums));
                }
            }
        }
    }
}

/// Multiplies two row blocks with `M` consecutive input rows.
///
/// # Safety
/// The processor must have the features of [`qgemv`]. The row blocks and `x` must have the groups
/// and words that the row blocks state.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
unsafe fn tile<const M: usize>(two: [RowBlock; 2], x: *const f32) -> [__m512; M] {
    let RowBlock { groups, per, .. } = two[0];
    let k = groups * per * 4;
    let evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    let mut totals = [_mm512_setzero_ps(); M];
    for g in 0..groups {
        // Each row has two lanes. The first vector has the first row block, and the second vector
        // the second one.
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        let group = 4 * per * INTERLEAVED_ROWS;
        let ahead = ahead_of(g * group, groups * group, PREFETCH_BYTES);
        // SAFETY: offsets are below the words, groups and inputs that the caller guarantees;
        // prefetched addresses need not be valid.
        unsafe {
            for w in g * per..(g + 1) * per {
                let q = [0, 1].map(|i: usize| {
                    let at = two[i].words.add(w * INTERLEAVED_ROWS);
                    if w % 2 == 0 {
                        _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(ahead));
                    }
                    _mm256_loadu_si256(at.cast())
                });
                let q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(q[0]), q[1]);
                // `even` are codes 0 and 2 of the word; `odd` are codes 1 and 3.
                let (even, odd) = (halves(_mm512_slli_epi16::<8>(q)), halves(q));
                for (m, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_broadcast_f32x4(_mm_loadu_ps(x.add(m * k + w * 4)));
                    let (first, second) = (
                        _mm512_permute_ps::<0b10_00_10_00>(x),
                        _mm512_permute_ps::<0b11_01_11_01>(x),
                    );
                    for (i, sum) in sum.iter_mut().enumerate() {
                        *sum = _mm512_fmadd_ps(even[i], first, *sum);
                        *sum = _mm512_fmadd_ps(odd[i], second, *sum);
                    }
                }
            }
            let scale = |i: usize| {
                let codes = two[i].scales.add(g * INTERLEAVED_ROWS);
                _mm256_castps_pd(e8m0(_mm_loadl_epi64(codes.cast())))
            };
            let both = _mm512_insertf64x4::<1>(_mm512_castpd256_pd512(scale(0)), scale(1));
            let scale = _mm512_mul_ps(_mm512_castpd_ps(both), _mm512_set1_ps(E4M3_OVER_F16));
            for (total, [low, high]) in totals.iter_mut().zip(sums) {
                let sum = _mm512_add_ps(
                    _mm512_permutex2var_ps(low, evens, high),
                    _mm512_permutex2var_ps(low, odds, high),
                );
                *total = _mm512_fmadd_ps(scale, sum, *total);
            }
        }
    }
    totals
}

/// Converts the higher byte of each half lane to float32. The first vector has those of the first
/// eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
fn halves(q: __m512i) -> [__m512; 2] {
    // The shift also copies the sign into the highest exponent bit, so that bit is cleared.
    let mask = _mm512_set1_epi16(0xbf80u16.cast_signed());
    let q = _mm512_and_si512(_mm512_srai_epi16::<1>(q), mask);
    [
        _mm512_cvtph_ps(_mm512_castsi512_si256(q)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(q)),
    ]
}
