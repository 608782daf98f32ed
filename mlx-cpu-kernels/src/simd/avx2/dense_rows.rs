//! Multiplication of a few input rows with a dense matrix, for AVX2. Several matrix rows are
//! processed together, so that each input vector is loaded once for all of them.

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_slli_epi32,
};

use crate::layout::dense::DenseView;
use crate::partition::OutputBlock;
use crate::simd::avx2::vmath::horizontal_sum;

/// Generates the functions `multiply`, `rows` and `tile` for `$features`, with vectors of `$lanes`
/// elements. The invoking module defines `load`, `load_some` and `sum` for its instruction set.
/// `$tall` is the number of matrix rows that fit the registers beside `M` inputs.
macro_rules! dense_rows_for {
    ($features:literal, $lanes:literal, $zero:path, $fma:path, $(($m:literal, $tall:literal)),*) => {
        /// See [`crate::simd::dense_rows::multiply`].
        ///
        /// # Safety
        /// The processor must have the features of this instance. The matrix must have one row per
        /// column of `out`, as long as an `x`. `out` must have one row for each `x`, and there may
        /// be at most eight.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn multiply(
            matrix: DenseView<'_>,
            x: &[&[f32]],
            out: &mut OutputBlock<'_>,
        ) {
            // SAFETY: the caller guarantees the features, and the lengths of the matrix and of
            // `out`.
            unsafe {
                match matrix {
                    DenseView::F32(all) => {
                        rows::<{ DenseView::F32_ID }>(all.as_ptr().cast(), x, out);
                    }
                    DenseView::F16(all) => {
                        rows::<{ DenseView::F16_ID }>(all.as_ptr().cast(), x, out);
                    }
                    DenseView::Bf16(all) => {
                        rows::<{ DenseView::BF16_ID }>(all.as_ptr().cast(), x, out);
                    }
                }
            }
        }

        /// [`multiply`] for elements of one type.
        ///
        /// # Safety
        /// As [`multiply`].
        #[target_feature(enable = $features)]
        unsafe fn rows<const TYPE: u32>(
            matrix: *const u8,
            x: &[&[f32]],
            out: &mut OutputBlock<'_>,
        ) {
            let (columns, k) = (out.dims().1, x.first().map_or(0, |x| x.len()));
            let step = k * size::<TYPE>();
            // SAFETY: the caller guarantees that all matrix rows below `columns` exist.
            unsafe {
                match x.len() {
                    $($m => {
                        let vectorized = columns / $tall * $tall;
                        for column in (0..vectorized).step_by($tall) {
                            tile::<$m, $tall, TYPE>(matrix.add(column * step), k, x, column, out);
                        }
                        for column in vectorized..columns {
                            tile::<$m, 1, TYPE>(matrix.add(column * step), k, x, column, out);
                        }
                    })*
                    _ => {}
                }
            }
        }

        /// Multiplies `R` matrix rows with `M` input rows. The outputs begin at `column`.
        ///
        /// # Safety
        /// The obligations of [`multiply`]. There must also be `R` rows and columns, and `M`
        /// inputs.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn tile<const M: usize, const R: usize, const TYPE: u32>(
            matrix: *const u8,
            k: usize,
            x: &[&[f32]],
            column: usize,
            out: &mut OutputBlock<'_>,
        ) {
            let mut sums = [[$zero(); M]; R];
            let step = k * size::<TYPE>();
            let x: [*const f32; M] = std::array::from_fn(|m| x[m].as_ptr());
            let (to, row) = out.raw_parts();
            // SAFETY: offsets are below `k` in rows that the caller guarantees. Prefetched
            // addresses need not be valid.
            unsafe {
                let vectorized = k / $lanes * $lanes;
                for at in (0..vectorized).step_by($lanes) {
                    let from = matrix.add(at * size::<TYPE>());
                    let w: [_; R] = std::array::from_fn(|r| load::<TYPE>(from.add(r * step)));
                    for r in 0..R {
                        // Prefetches the rows of the next tile.
                        let next = from.wrapping_add((R + r) * step);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    }
                    for (m, x) in x.iter().enumerate() {
                        let x = load::<{ DenseView::F32_ID }>(x.add(at).cast());
                        for (sums, w) in sums.iter_mut().zip(w) {
                            sums[m] = $fma(w, x, sums[m]);
                        }
                    }
                }
                if vectorized < k {
                    let from = matrix.add(vectorized * size::<TYPE>());
                    for (m, x) in x.iter().enumerate() {
                        let x = load_some::<{ DenseView::F32_ID }>(x.add(vectorized).cast(), k - vectorized);
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let w = load_some::<TYPE>(from.add(r * step), k - vectorized);
                            sums[m] = $fma(w, x, sums[m]);
                        }
                    }
                }
                for (r, sums) in sums.into_iter().enumerate() {
                    for (m, total) in sums.into_iter().enumerate() {
                        *to.add(m * row + column + r) = sum(total);
                    }
                }
            }
        }

        /// The size of an element in bytes.
        const fn size<const TYPE: u32>() -> usize {
            if TYPE == DenseView::F32_ID { 4 } else { 2 }
        }
    };
}
pub(crate) use dense_rows_for;

dense_rows_for!(
    "avx2,fma,f16c",
    8,
    _mm256_setzero_ps,
    _mm256_fmadd_ps,
    (1, 4),
    (2, 4),
    (3, 3),
    (4, 2),
    (5, 2),
    (6, 2),
    (7, 1),
    (8, 1)
);

/// Loads eight elements as float32.
///
/// # Safety
/// The elements must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<const TYPE: u32>(from: *const u8) -> __m256 {
    // SAFETY: the caller guarantees that the elements exist.
    unsafe {
        match TYPE {
            DenseView::F32_ID => _mm256_loadu_ps(from.cast()),
            DenseView::F16_ID => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _ => {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
        }
    }
}

/// Loads the first `n` elements, at most eight, as float32. The other lanes are zero.
///
/// # Safety
/// The elements must exist.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_some<const TYPE: u32>(from: *const u8, n: usize) -> __m256 {
    let mut all = [0u8; 32];
    // SAFETY: the caller guarantees the elements. `all` has space for eight of the largest
    // elements.
    unsafe {
        from.copy_to_nonoverlapping(all.as_mut_ptr(), n.min(8) * size::<TYPE>());
        load::<TYPE>(all.as_ptr())
    }
}

/// The sum of all lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum(all: __m256) -> f32 {
    horizontal_sum(all)
}
