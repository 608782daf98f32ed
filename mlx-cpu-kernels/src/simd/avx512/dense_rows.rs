//! Multiplication of a few input rows with a dense matrix, for AVX-512. `avx2/dense_rows.rs`
//! generates the functions.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_reduce_add_ps,
    _mm512_setzero_ps, _mm512_slli_epi32,
};

use crate::layout::dense::DenseView;
use crate::partition::OutputBlock;
use crate::simd::avx2::dense_rows::dense_rows_for;

dense_rows_for!(
    "avx2,fma,f16c,avx512f",
    16,
    _mm512_setzero_ps,
    _mm512_fmadd_ps,
    (1, 4),
    (2, 4),
    (3, 4),
    (4, 4),
    (5, 4),
    (6, 3),
    (7, 3),
    (8, 3)
);

/// Loads sixteen elements as float32.
///
/// # Safety
/// The elements must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn load<const TYPE: u32>(from: *const u8) -> __m512 {
    // SAFETY: the caller guarantees that the elements exist.
    unsafe {
        match TYPE {
            DenseView::F32_ID => _mm512_loadu_ps(from.cast()),
            DenseView::F16_ID => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
            _ => {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
    }
}

/// Loads the first `n` elements, at most sixteen, as float32. The other lanes are zero.
///
/// # Safety
/// The elements must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
unsafe fn load_some<const TYPE: u32>(from: *const u8, n: usize) -> __m512 {
    let mut all = [0u8; 64];
    // SAFETY: the caller guarantees the elements. `all` has space for sixteen of the largest
    // elements.
    unsafe {
        from.copy_to_nonoverlapping(all.as_mut_ptr(), n.min(16) * size::<TYPE>());
        load::<TYPE>(all.as_ptr())
    }
}

/// The sum of all lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f")]
fn sum(all: __m512) -> f32 {
    _mm512_reduce_add_ps(all)
}
