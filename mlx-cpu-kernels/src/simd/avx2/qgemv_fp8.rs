//! Multiplication of matrices with 8-bit float codes (MXFP8) and few input rows, for AVX2. Inputs
//! are floats. Two adjacent codes of a row become float16 in the halves of a lane. Then they become
//! float32 in two lanes, whose sums are added at the end.

use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_ps, _mm_prefetch, _mm256_broadcast_ps,
    _mm256_castpd_ps, _mm256_castps_pd, _mm256_castsi256_si128, _mm256_cvtph_ps,
    _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_hadd_ps, _mm256_loadu_si256, _mm256_mul_ps,
    _mm256_permute_ps, _mm256_permute4x64_pd, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi16,
    _mm256_storeu_ps,
};

use crate::layout::float_codes::{Codes, E4M3_OVER_F16};
use crate::layout::input_panel::InputPanel;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix, ScaleFormat};
use crate::partition::OutputBlock;
use crate::simd::avx2::float_codes::{e4m3_halves, e8m0};
use crate::simd::avx2::qgemv::{PREFETCH_BYTES, RowBlock};

/// Generates `qgemv` for `$features`. The generated function calls `row_blocks` of the invoking
/// module, and passes the number of input rows as a constant.
macro_rules! qgemv_fp8_for_rows {
    ($features:literal) => {
        /// Multiplies row blocks with each of the inputs; see [`crate::simd::qgemv::qgemv`].
        ///
        /// # Safety
        /// The processor must have the features of this instance.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn qgemv(
            matrix: PackedMatrix<'_>,
            x: InputPanel<'_>,
            out: &mut OutputBlock<'_>,
        ) {
            assert!(matrix.codes() == Codes::E4m3);
            let (first, format) = RowBlock::first(matrix, x, out);
            assert!(format == ScaleFormat::E8m0);
            // SAFETY: the caller guarantees the features. `RowBlock::first` asserted the lengths.
            unsafe {
                match x.rows {
                    1 => row_blocks::<1>(first, matrix.row_blocks(), x, out),
                    2 => row_blocks::<2>(first, matrix.row_blocks(), x, out),
                    3 => row_blocks::<3>(first, matrix.row_blocks(), x, out),
                    4 => row_blocks::<4>(first, matrix.row_blocks(), x, out),
                    5 => row_blocks::<5>(first, matrix.row_blocks(), x, out),
                    6 => row_blocks::<6>(first, matrix.row_blocks(), x, out),
                    7 => row_blocks::<7>(first, matrix.row_blocks(), x, out),
                    8 => row_blocks::<8>(first, matrix.row_blocks(), x, out),
                    _ => unreachable!("at most eight rows"),
                }
            }
        }
    };
}
pub(crate) use qgemv_fp8_for_rows;

qgemv_fp8_for_rows!("avx2,fma,f16c");

/// Multiplies all row blocks with `M` rows.
///
/// # Safety
/// As [`qgemv`], with the lengths that [`RowBlock::first`] asserts.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn row_blocks<const M: usize>(
    first: RowBlock,
    count: usize,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    let (to, step) = out.raw_parts();
    for i in 0..count {
        // SAFETY: row block `i` is below `count` and has eight elements in each row of the output.
        unsafe {
            let block = first.after::<{ ScaleFormat::E8M0_ID }>(i);
            for (m, sums) in tile::<M>(block, x.values.as_ptr()).into_iter().enumerate() {
                _mm256_storeu_ps(to.add(m * step + i * INTERLEAVED_ROWS), sums);
            }
        }
    }
}

/// Multiplies a row block with `M` consecutive input rows.
///
/// # Safety
/// The processor must have avx2, fma and f16c. `block` and `x` must have the groups and words that
/// `block` states.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const M: usize>(block: RowBlock, x: *const f32) -> [__m256; M] {
    let k = block.groups * block.per * 4;
    let mut totals = [_mm256_setzero_ps(); M];
    for g in 0..block.groups {
        // Each row has two lanes. The first vector has rows 0 to 3, and the second has rows 4 to 7.
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        // SAFETY: offsets are below the words, groups and inputs that the caller guarantees;
        // prefetched addresses need not be valid.
        unsafe {
            for w in g * block.per..(g + 1) * block.per {
                let at = block.words.add(w * INTERLEAVED_ROWS);
                if w % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(PREFETCH_BYTES));
                }
                let q = _mm256_loadu_si256(at.cast());
                // `even` are codes 0 and 2 of the word; `odd` are codes 1 and 3.
                let even = halves(e4m3_halves(_mm256_slli_epi16::<8>(q)));
                let odd = halves(e4m3_halves(q));
                for (m, sum) in sums.iter_mut().enumerate() {
                    let x = _mm_loadu_ps(x.add(m * k + w * 4));
                    let x = _mm256_broadcast_ps(&x);
                    let (first, second) = (
                        _mm256_permute_ps::<0b10_00_10_00>(x),
                        _mm256_permute_ps::<0b11_01_11_01>(x),
                    );
                    for (i, sum) in sum.iter_mut().enumerate() {
                        *sum = _mm256_fmadd_ps(even[i], first, *sum);
                        *sum = _mm256_fmadd_ps(odd[i], second, *sum);
                    }
                }
            }
            let codes = _mm_loadl_epi64(block.scales.add(g * INTERLEAVED_ROWS).cast());
            let scale = _mm256_mul_ps(e8m0(codes), _mm256_set1_ps(E4M3_OVER_F16));
            for (total, [low, high]) in totals.iter_mut().zip(sums) {
                // The sums are in the order of rows 0, 1, 4, 5, 2, 3, 6, 7.
                let sum = _mm256_castps_pd(_mm256_hadd_ps(low, high));
                let sum = _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(sum));
                *total = _mm256_fmadd_ps(scale, sum, *total);
            }
        }
    }
    totals
}

/// Converts two float16 in each lane to float32. The first vector has those of the first four
/// lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves(q: __m256i) -> [__m256; 2] {
    [
        _mm256_cvtph_ps(_mm256_castsi256_si128(q)),
        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(q)),
    ]
}
