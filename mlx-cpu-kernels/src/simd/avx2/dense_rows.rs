//! Multiplication of input rows with a dense matrix, for AVX2. Several matrix rows are processed
//! together, so that each input vector is loaded once for all of them. Sums have the same order for
//! few and for many input rows.

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_storeu_ps, _mm_unpacklo_ps,
    _mm256_add_ps, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_hadd_ps, _mm256_loadu_ps,
    _mm256_permute2f128_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_slli_epi32,
    _mm256_storeu_ps,
};

use crate::layout::aligned::AlignedVec;
use crate::layout::dense::DenseView;
use crate::layout::tile::LANES;
use crate::partition::OutputBlock;
use crate::simd::avx2::vmath::horizontal_sum;

/// The number of columns that are added for all tiles of a block before the next columns. Those of
/// some input rows fit the L1 cache.
pub(crate) const BLOCK_K: usize = 512;

/// Generates the functions `multiply` and `multiply_many` for `$features`, with vectors of `$lanes`
/// elements. The invoking module defines `load`, `load_some`, `store`, `sum` and `store_sums` for
/// its instruction set. `$tall` is the number of matrix rows that fit the registers beside `M`
/// inputs, and `($many, $rows)` the number of inputs and of matrix rows of a tile of
/// `multiply_many`.
macro_rules! dense_rows_for {
    (
        $features:literal, $lanes:literal, $zero:path, $fma:path,
        many: ($many:literal, $rows:literal), $(($m:literal, $tall:literal)),*
    ) => {
        /// See [`crate::simd::dense_rows::multiply_many`].
        ///
        /// # Safety
        /// The processor must have the features of this instance.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn multiply_many(
            matrix: &[f32],
            x: &[f32],
            k: usize,
            sums: &mut AlignedVec,
            tile: &mut [f32],
        ) {
            let (columns, rows) = (matrix.len() / k, x.len() / k);
            // All reads and writes below are within these bounds.
            assert!(matrix.len() == columns * k && x.len() == rows * k && rows > 0);
            assert!(rows <= LANES && tile.len() == columns * LANES && LANES.is_multiple_of($many));
            sums.resize(columns * $many * $lanes);
            for first in (0..rows).step_by($many) {
                // A row that does not exist is replaced by the last one.
                let rows: [&[f32]; $many] = std::array::from_fn(|m| {
                    let row = (first + m).min(rows - 1);
                    &x[row * k..(row + 1) * k]
                });
                sums.fill(0.0);
                for from in (0..k).step_by($crate::simd::avx2::dense_rows::BLOCK_K) {
                    let to = k.min(from + $crate::simd::avx2::dense_rows::BLOCK_K);
                    let whole = columns / $rows * $rows;
                    // SAFETY: the columns are below `k`, and matrix rows and sums exist for the
                    // columns of the tile. The caller guarantees the features.
                    unsafe {
                        for column in (0..whole).step_by($rows) {
                            add_tile::<$rows>((column, k), matrix, rows, from..to, sums);
                        }
                        for column in whole..columns {
                            add_tile::<1>((column, k), matrix, rows, from..to, sums);
                        }
                    }
                }
                let vectors = sums.chunks_exact($many * $lanes);
                for (vectors, to) in vectors.zip(tile.chunks_exact_mut(LANES)) {
                    let to = &mut to[first..first + $many];
                    // SAFETY: there are the lanes of `$many` vectors, and as many places.
                    unsafe {
                        let at = |m: usize| vectors.as_ptr().add(m * $lanes).cast();
                        let all = std::array::from_fn(|m| load::<{ DenseView::F32_ID }>(at(m)));
                        store_sums(all, to.as_mut_ptr());
                    }
                }
            }
        }

        /// Adds the products of some columns of `R` matrix rows, from row `first` on, with the
        /// input rows to the vectors of sums `[matrix rows, input rows, lanes]`.
        ///
        /// # Safety
        /// The processor must have the features of this instance. All of these elements must exist.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn add_tile<const R: usize>(
            (first, k): (usize, usize),
            matrix: &[f32],
            x: [&[f32]; $many],
            columns: std::ops::Range<usize>,
            sums: &mut [f32],
        ) {
            // SAFETY: the caller guarantees the rows, the columns and the sums.
            unsafe {
                let place = |r: usize, m: usize| ((first + r) * $many + m) * $lanes;
                let at = sums.as_mut_ptr();
                let row = |r: usize| matrix.as_ptr().add((first + r) * k);
                let mut all: [[_; $many]; R] = std::array::from_fn(|r| {
                    std::array::from_fn(|m| load::<{ DenseView::F32_ID }>(at.add(place(r, m)).cast()))
                });
                let whole = columns.start + columns.len() / $lanes * $lanes;
                for i in (columns.start..whole).step_by($lanes) {
                    let w: [_; R] =
                        std::array::from_fn(|r| load::<{ DenseView::F32_ID }>(row(r).add(i).cast()));
                    for (m, x) in x.iter().enumerate() {
                        let x = load::<{ DenseView::F32_ID }>(x.as_ptr().add(i).cast());
                        for (all, w) in all.iter_mut().zip(w) {
                            all[m] = $fma(w, x, all[m]);
                        }
                    }
                }
                if whole < columns.end {
                    let rest = columns.end - whole;
                    for (r, all) in all.iter_mut().enumerate() {
                        let w = load_some::<{ DenseView::F32_ID }>(row(r).add(whole).cast(), rest);
                        for (all, x) in all.iter_mut().zip(x) {
                            let x = x.as_ptr().add(whole).cast();
                            *all = $fma(w, load_some::<{ DenseView::F32_ID }>(x, rest), *all);
                        }
                    }
                }
                for (r, all) in all.into_iter().enumerate() {
                    for (m, all) in all.into_iter().enumerate() {
                        store(at.add(place(r, m)), all);
                    }
                }
            }
        }

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
    many: (4, 3),
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

/// # Safety
/// There must be space for eight elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(to: *mut f32, all: __m256) {
    // SAFETY: the caller guarantees the space.
    unsafe { _mm256_storeu_ps(to, all) };
}

/// The sum of all lanes: first those of both halves, then those of both quarters.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum(all: __m256) -> f32 {
    horizontal_sum(all)
}

/// Stores [`sum`] of four vectors, with the same bits.
///
/// # Safety
/// There must be space for four elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_sums([a, b, c, d]: [__m256; 4], to: *mut f32) {
    // The four sums of halves of `a` and `b`, and of `c` and `d`.
    let halves = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    let (ab, cd) = (halves(a, b), halves(c, d));
    let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
    let quarters = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
    // `a` and `c` in the lower half, `b` and `d` in the upper one.
    let sums = _mm256_hadd_ps(quarters, quarters);
    let (ac, bd) = (
        _mm256_castps256_ps128(sums),
        _mm256_extractf128_ps::<1>(sums),
    );
    // SAFETY: the caller guarantees the space.
    unsafe { _mm_storeu_ps(to, _mm_unpacklo_ps(ac, bd)) };
}
