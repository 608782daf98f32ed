//! Stores tiles as rows, sixteen columns at a time: a cache line per store.

use std::arch::x86_64::{
    __m512, _mm256_castps_pd, _mm256_loadu_ps, _mm512_add_ps, _mm512_castpd_ps,
    _mm512_castpd256_pd512, _mm512_insertf64x4, _mm512_loadu_ps, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_shuffle_ps, _mm512_storeu_ps, _mm512_unpackhi_ps,
    _mm512_unpacklo_ps,
};

use crate::layout::tile::LANES;
use crate::simd::avx2;
use crate::simd::avx2::transpose::transpose_fours;

/// The number of columns of a step.
const COLUMNS: usize = 16;

/// # Safety
/// The obligations of [`crate::simd::transpose::store_rows`]. The processor must also have avx2,
/// fma and avx512f.
#[target_feature(enable = "avx2,fma,avx512f")]
pub(crate) unsafe fn store_rows(
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    assert!(lane + 8 <= LANES);
    let vectorized = sums.len() / LANES / COLUMNS * COLUMNS;
    for at in (0..vectorized).step_by(COLUMNS) {
        // SAFETY: `at + COLUMNS <= vectorized`, so `sums` has these columns. The caller guarantees
        // eight rows at `to` and `before`, and the processor's features.
        unsafe {
            let mut block = [_mm512_setzero_ps(); 8];
            for (i, block) in block.iter_mut().enumerate() {
                // Columns 0 to 3 and 8 to 11, each with the column four later.
                let column = at + i / 4 * 8 + i % 4;
                let from = sums.as_ptr().add(column * LANES + lane);
                *block = two(from, from.add(4 * LANES));
            }
            for (i, mut row) in transposed(block).into_iter().enumerate() {
                if let Some(before) = before {
                    row = _mm512_add_ps(row, _mm512_loadu_ps(before.add(i * step + at)));
                }
                _mm512_storeu_ps(to.add(i * step + at), row);
            }
        }
    }
    // SAFETY: the remaining columns of the same rows.
    unsafe {
        let to = (to.add(vectorized), step);
        let before = before.map(|before| before.add(vectorized));
        vectorized + avx2::transpose::store_rows(&sums[vectorized * LANES..], lane, to, before)
    }
}

/// Eight elements at each of two addresses.
///
/// # Safety
/// The processor must have avx512f. The elements must exist.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f")]
unsafe fn two(low: *const f32, high: *const f32) -> __m512 {
    // SAFETY: the caller guarantees the elements.
    unsafe {
        let low = _mm512_castpd256_pd512(_mm256_castps_pd(_mm256_loadu_ps(low)));
        let high = _mm256_castps_pd(_mm256_loadu_ps(high));
        _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, high))
    }
}

/// Transposes eight lanes of sixteen columns to eight rows. Vector `i` has columns `c` and `c + 4`,
/// where `c` is `i` for the first four vectors, and `4 + i` for the others.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f")]
fn transposed(r: [__m512; 8]) -> [__m512; 8] {
    // Vector `j` has rows `j` and `j + 4` of columns 0 to 3, and then of columns 4 to 7. Vector
    // `4 + j` has those of columns 8 to 15.
    let fours = transpose_fours!(
        r,
        _mm512_setzero_ps,
        [_mm512_unpacklo_ps, _mm512_unpackhi_ps],
        _mm512_shuffle_ps
    );
    let mut rows = [_mm512_setzero_ps(); 8];
    for j in 0..4 {
        rows[j] = _mm512_shuffle_f32x4::<0x88>(fours[j], fours[4 + j]);
        rows[4 + j] = _mm512_shuffle_f32x4::<0xdd>(fours[j], fours[4 + j]);
    }
    rows
}
