//! Transposes 8 by 8 float32 in registers.

use crate::layout::tile::{LANES, ScaledRow};

use std::arch::x86_64::{
    __m256, _mm256_add_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_permute2f128_ps, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

/// Packs the first `vectorized` elements of eight rows. The rows become `lane` and the next seven
/// lanes of the panel.
///
/// # Safety
/// The processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn pack_rows(
    rows: &[ScaledRow<'_>; 8],
    weight: Option<&[f32]>,
    vectorized: usize,
    (lane, panel): (usize, &mut [f32]),
) {
    assert!(vectorized.is_multiple_of(8) && lane + 8 <= LANES && panel.len() >= vectorized * LANES);
    assert!(rows.iter().all(|(row, _)| row.len() >= vectorized));
    assert!(weight.is_none_or(|w| w.len() >= vectorized));
    for at in (0..vectorized).step_by(8) {
        // SAFETY: eight elements from `at` on are below `vectorized`, so rows, weight and panel
        // have them. The caller guarantees the features.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (block, (row, factor)) in block.iter_mut().zip(rows) {
                let x = _mm256_loadu_ps(row.as_ptr().add(at));
                *block = _mm256_mul_ps(x, _mm256_set1_ps(*factor));
                if let Some(weight) = weight {
                    *block = _mm256_mul_ps(*block, _mm256_loadu_ps(weight.as_ptr().add(at)));
                }
            }
            for (i, column) in (at..).zip(transposed(block)) {
                let to = panel.as_mut_ptr().add(i * LANES + lane);
                _mm256_storeu_ps(to, column);
            }
        }
    }
}

/// # Safety
/// The obligations of [`crate::simd::transpose::store_rows`]. The processor must also have avx2 and
/// fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn store_rows(
    sums: &[f32],
    lane: usize,
    (to, step): (*mut f32, usize),
    before: Option<*const f32>,
) -> usize {
    assert!(lane + 8 <= LANES);
    let vectorized = sums.len() / LANES / 8 * 8;
    for at in (0..vectorized).step_by(8) {
        // SAFETY: `at + 8 <= vectorized`, so `sums` has these columns. The caller guarantees eight
        // rows at `to` and `before`, and the processor's features.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (i, block) in block.iter_mut().enumerate() {
                *block = _mm256_loadu_ps(sums.as_ptr().add((at + i) * LANES + lane));
            }
            for (i, mut row) in transposed(block).into_iter().enumerate() {
                if let Some(before) = before {
                    row = _mm256_add_ps(row, _mm256_loadu_ps(before.add(i * step + at)));
                }
                _mm256_storeu_ps(to.add(i * step + at), row);
            }
        }
    }
    vectorized
}

/// Transposes `[n, 8]` to `[8, n]`, for any element type of 32 bits. Returns the number of finished
/// elements of `n`.
///
/// # Safety
/// The processor must have avx2 and fma. Both slices must have the same length.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn transpose_8(from: &[f32], to: &mut [f32]) -> usize {
    let n = from.len() / 8;
    let vectorized = n / 8 * 8;
    for at in (0..vectorized).step_by(8) {
        // SAFETY: eight vectors from `at` on exist, and the eight rows of `n` elements have space
        // for them.
        unsafe {
            let mut block = [_mm256_setzero_ps(); 8];
            for (i, block) in block.iter_mut().enumerate() {
                *block = _mm256_loadu_ps(from.as_ptr().add((at + i) * 8));
            }
            for (i, row) in transposed(block).into_iter().enumerate() {
                _mm256_storeu_ps(to.as_mut_ptr().add(i * n + at), row);
            }
        }
    }
    vectorized
}

/// Transposes 4 by 4 elements in each 128 bits, of the first four vectors and of the last four. The
/// intrinsics determine the vector width: a zero vector, both ways to interleave, and a shuffle.
macro_rules! transpose_fours {
    ($rows:expr, $zero:ident, [$low:ident, $high:ident], $shuffle:ident) => {{
        let (rows, mut pairs, mut fours) = ($rows, [$zero(); 8], [$zero(); 8]);
        for i in 0..4 {
            pairs[2 * i] = $low(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = $high(rows[2 * i], rows[2 * i + 1]);
        }
        for half in 0..2 {
            let p = &pairs[4 * half..4 * half + 4];
            fours[4 * half] = $shuffle::<0x44>(p[0], p[2]);
            fours[4 * half + 1] = $shuffle::<0xee>(p[0], p[2]);
            fours[4 * half + 2] = $shuffle::<0x44>(p[1], p[3]);
            fours[4 * half + 3] = $shuffle::<0xee>(p[1], p[3]);
        }
        fours
    }};
}
pub(crate) use transpose_fours;

/// Transposes eight rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transposed(r: [__m256; 8]) -> [__m256; 8] {
    let fours = transpose_fours!(
        r,
        _mm256_setzero_ps,
        [_mm256_unpacklo_ps, _mm256_unpackhi_ps],
        _mm256_shuffle_ps
    );
    let mut columns = [_mm256_setzero_ps(); 8];
    for i in 0..4 {
        columns[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
        columns[4 + i] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
    }
    columns
}
