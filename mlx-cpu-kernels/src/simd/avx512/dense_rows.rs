//! Multiplication of input rows with a dense matrix, for AVX-512. `avx2/dense_rows.rs`
//! generates the functions. They need AVX-512 VL: without it, the loads of 16-bit elements
//! leave the compiler only sixteen registers for the sums of eight inputs.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_add_ps, _mm256_loadu_si256,
    _mm256_storeu_ps, _mm512_add_ps, _mm512_castps512_ps256, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps,
    _mm512_permutexvar_ps, _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_shuffle_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use crate::layout::aligned::AlignedVec;
use crate::layout::dense::{DenseInputs, DenseTile, DenseView};
use crate::layout::tile::LANES;
use crate::partition::OutputBlock;
use crate::simd::avx2::dense_rows::{L1_INPUTS, dense_rows_for};
use crate::simd::avx2::vmath::horizontal_sum;

dense_rows_for!(
    "avx2,fma,f16c,avx512f,avx512vl",
    __m512,
    16,
    _mm512_setzero_ps,
    _mm512_fmadd_ps,
    _mm512_mul_ps,
    _mm512_set1_ps,
    many: (8, 3, 48, 2),
    few: (1, 4), (2, 4), (3, 4);
    packed: (4, 1 x 4, 4), (5, 1 x 5, 4), (6, 1 x 6, 3), (7, 1 x 7, 3), (8, 1 x 8, 3)
);

/// Loads sixteen elements as float32.
///
/// # Safety
/// The elements must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl")]
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
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl")]
unsafe fn load_some<const TYPE: u32>(from: *const u8, n: usize) -> __m512 {
    let mut all = [0u8; 64];
    // SAFETY: the caller guarantees the elements. `all` has space for sixteen of the largest
    // elements.
    unsafe {
        from.copy_to_nonoverlapping(all.as_mut_ptr(), n.min(16) * size::<TYPE>());
        load::<TYPE>(all.as_ptr())
    }
}

/// # Safety
/// There must be space for sixteen elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl")]
unsafe fn store(to: *mut f32, all: __m512) {
    // SAFETY: the caller guarantees the space.
    unsafe { _mm512_storeu_ps(to, all) };
}

/// The sum of all lanes: first those of both halves, then those of both quarters, and so on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl")]
fn sum(all: __m512) -> f32 {
    let high = _mm512_castps512_ps256(_mm512_shuffle_f32x4::<0b11_10_11_10>(all, all));
    horizontal_sum(_mm256_add_ps(_mm512_castps512_ps256(all), high))
}

/// Stores [`sum`] of eight vectors, with the same bits.
///
/// # Safety
/// There must be space for eight elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl")]
unsafe fn store_sums(all: [__m512; 8], to: *mut f32) {
    // Each step adds parts of each of two vectors, and joins the sums in one vector.
    let halves = |a, b| {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
    };
    let quarters = |a, b| {
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    };
    let [a, b, c, d, e, f, g, h] = all;
    // `first` has four partial sums of each of `a` to `d`, and `second` those of `e` to `h`.
    let first = quarters(halves(a, b), halves(c, d));
    let second = quarters(halves(e, f), halves(g, h));
    let low = _mm512_shuffle_ps::<0b01_00_01_00>(first, second);
    let two = _mm512_add_ps(low, _mm512_shuffle_ps::<0b11_10_11_10>(first, second));
    let even = _mm512_shuffle_ps::<0b10_00_10_00>(two, two);
    let sums = _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(two, two));
    // Lanes `4 * i` and `4 * i + 1` have the sums of vectors `i` and `i + 4`.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    let sums = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums));
    // SAFETY: the caller guarantees the space.
    unsafe { _mm256_storeu_ps(to, sums) };
}
