//! Multiplication of input rows with a dense matrix, for AVX2. Several matrix rows are processed
//! together, so that each input vector is loaded once for all of them. Sums have the same order for
//! few and for many input rows.

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm_storeu_ps,
    _mm_unpacklo_ps, _mm256_add_ps, _mm256_castps256_ps128, _mm256_castsi256_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_hadd_ps,
    _mm256_loadu_ps, _mm256_mul_ps, _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_storeu_ps,
};

use crate::layout::aligned::AlignedVec;
use crate::layout::dense::{DenseInputs, DenseTile, DenseView};
use crate::layout::tile::LANES;
use crate::partition::OutputBlock;
use crate::simd::avx2::vmath::horizontal_sum;

/// The number of elements of packed inputs that stay in the L1 cache. They fill half of 32 KiB, the
/// smallest usual L1 cache. The other half is for rows of the matrix, which are often a multiple of
/// 4 KiB apart. Elements of the same column then map to the same set, which has few cache lines.
pub(crate) const L1_INPUTS: usize = 4096;

/// Generates the functions `multiply` and `multiply_packed` for `$features`, with vectors of
/// `$lanes` elements. The invoking module defines `load`, `load_some`, `store`, `sum` and
/// `store_sums` for its instruction set. `$few` inputs are read row by row. `$m` inputs are packed
/// and processed in `$parts` parts of `$each` inputs. `$few_tall` and `$tall` are the numbers of
/// matrix rows that fit the registers beside the inputs of a part. A tile of `multiply_packed` has
/// `$many` inputs and `$rows` matrix rows. It adds `$block` vectors before the next tile, so that
/// the vectors of the inputs stay in the L1 cache. It prefetches `$lines` cache lines per vector.
macro_rules! dense_rows_for {
    (
        $features:literal, $vector:ty, $lanes:literal, $zero:path, $fma:path, $mul:path, $set:path,
        many: ($many:literal, $rows:literal, $block:literal, $lines:literal),
        few: $(($few:literal, $few_tall:literal)),*;
        packed: $(($m:literal, $parts:literal x $each:literal, $tall:literal)),*
    ) => {
        type Vector = $vector;

        /// The sizes of packed operands.
        pub(crate) const TILE: DenseTile = DenseTile {
            inputs: $many,
            rows: $rows,
            lanes: $lanes,
        };

        /// The number of places (row slots) in the panel that [`multiply`] reads for `rows` inputs;
        /// `None` if it reads unpacked rows.
        pub(crate) const fn places(rows: usize) -> Option<usize> {
            match rows {
                $($m => Some($parts * $each),)*
                _ => None,
            }
        }

        /// See [`crate::simd::dense_rows::pack_inputs`].
        ///
        /// # Safety
        /// The processor must have the features of this instance. `panel` must have `places` row
        /// slots of whole vectors. `x` must have at most `places` rows, each with the length of the
        /// weight.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn pack_inputs(
            x: &[&[f32]],
            norm: Option<(&[f32], &[f32])>,
            places: usize,
            panel: &mut [f32],
        ) {
            let k = x.first().map_or(0, |x| x.len());
            let whole = k / $lanes;
            let to = panel.as_mut_ptr();
            // SAFETY: the caller guarantees the lengths. The panel has a vector for each step of
            // each row.
            unsafe {
                for (m, x) in x.iter().enumerate() {
                    let x = x.as_ptr().cast::<u8>();
                    for step in 0..k.div_ceil($lanes) {
                        let part = |from: *const u8| {
                            let from = from.add(step * $lanes * 4);
                            if step < whole {
                                load::<{ DenseView::F32_ID }>(from)
                            } else {
                                load_some::<{ DenseView::F32_ID }>(from, k - whole * $lanes)
                            }
                        };
                        let mut all = part(x);
                        if let Some((weight, factors)) = norm {
                            all = $mul($mul(all, $set(factors[m])), part(weight.as_ptr().cast()));
                        }
                        store(to.add((step * places + m) * $lanes), all);
                    }
                }
                for m in x.len()..places {
                    for step in 0..k.div_ceil($lanes) {
                        store(to.add((step * places + m) * $lanes), $zero());
                    }
                }
            }
        }

        /// See [`crate::simd::dense_rows::pack_matrix`].
        ///
        /// # Safety
        /// The processor must have the features of this instance. The matrix must have rows of `k`
        /// elements, and `packed` the length that [`TILE`] gives for them.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn pack_matrix(matrix: DenseView<'_>, k: usize, packed: &mut [f32]) {
            let rows = matrix.len() / k;
            // SAFETY: the caller guarantees the features and the lengths.
            unsafe {
                match matrix {
                    DenseView::F32(all) => {
                        pack_rows::<{ DenseView::F32_ID }>(all.as_ptr().cast(), rows, k, packed);
                    }
                    DenseView::F16(all) => {
                        pack_rows::<{ DenseView::F16_ID }>(all.as_ptr().cast(), rows, k, packed);
                    }
                    DenseView::Bf16(all) => {
                        pack_rows::<{ DenseView::BF16_ID }>(all.as_ptr().cast(), rows, k, packed);
                    }
                }
            }
        }

        /// [`pack_matrix`] for elements of one type.
        ///
        /// # Safety
        /// As [`pack_matrix`].
        #[target_feature(enable = $features)]
        unsafe fn pack_rows<const TYPE: u32>(
            matrix: *const u8,
            rows: usize,
            k: usize,
            packed: &mut [f32],
        ) {
            let (steps, whole) = (k.div_ceil($lanes), k / $lanes);
            let mut to = packed.as_mut_ptr();
            // SAFETY: the caller guarantees the rows, and space for each of their vectors.
            unsafe {
                for from in (0..steps).step_by($block) {
                    for first in (0..rows).step_by($rows) {
                        for step in from..steps.min(from + $block) {
                            for row in first..first + $rows {
                                let at = matrix.wrapping_add((row * k + step * $lanes) * size::<TYPE>());
                                let all = if row >= rows {
                                    $zero()
                                } else if step < whole {
                                    load::<TYPE>(at)
                                } else {
                                    load_some::<TYPE>(at, k - whole * $lanes)
                                };
                                store(to, all);
                                to = to.add($lanes);
                            }
                        }
                    }
                }
            }
        }

        /// See [`crate::simd::dense_rows::multiply_packed`].
        ///
        /// # Safety
        /// The processor must have the features of this instance. The panel and the matrix must
        /// have the lengths that [`TILE`] gives for `k` inputs and `columns` rows. For each row `i`
        /// below `columns`, there must be space for the results of a panel at `tile + i * LANES`.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn multiply_packed(
            panel: &[f32],
            matrix: &[f32],
            (columns, k): (usize, usize),
            sums: &mut AlignedVec,
            tile: *mut f32,
            ahead: &mut std::ops::Range<*const u8>,
        ) {
            const LINE: usize = 64;
            let steps = k.div_ceil($lanes);
            let tiles = columns.div_ceil($rows);
            if steps > $block {
                sums.resize(tiles * $rows * $many * $lanes);
            }
            let mut w = matrix.as_ptr();
            // SAFETY: the caller guarantees the lengths. If there are several blocks, `sums` has
            // space for each tile. Prefetched addresses need not be valid.
            unsafe {
                for from in (0..steps).step_by($block) {
                    let count = $block.min(steps - from);
                    let x = panel.as_ptr().add(from * $many * $lanes);
                    for i in 0..tiles {
                        let kept = sums.as_mut_ptr().wrapping_add(i * $rows * $many * $lanes);
                        let mut all = [[$zero(); $many]; $rows];
                        if from > 0 {
                            for (r, all) in all.iter_mut().enumerate() {
                                for (m, all) in all.iter_mut().enumerate() {
                                    let at = kept.add((r * $many + m) * $lanes);
                                    *all = load::<{ DenseView::F32_ID }>(at.cast());
                                }
                            }
                        }
                        // Prefetches the next lines of `ahead`. If none are left, it prefetches
                        // lines of the panel, which are already in the L1 cache.
                        let next = if ahead.start < ahead.end {
                            let next = ahead.start;
                            ahead.start = next.wrapping_add(count * $lines * LINE);
                            next
                        } else {
                            x.cast()
                        };
                        for step in 0..count {
                            for line in 0..$lines {
                                let next = next.wrapping_add((step * $lines + line) * LINE);
                                _mm_prefetch::<_MM_HINT_T1>(next.cast());
                            }
                            let mut weights = [$zero(); $rows];
                            for (r, weights) in weights.iter_mut().enumerate() {
                                *weights = load::<{ DenseView::F32_ID }>(w.add(r * $lanes).cast());
                            }
                            w = w.add($rows * $lanes);
                            for m in 0..$many {
                                let x = x.add((step * $many + m) * $lanes);
                                let x = load::<{ DenseView::F32_ID }>(x.cast());
                                for r in 0..$rows {
                                    all[r][m] = $fma(weights[r], x, all[r][m]);
                                }
                            }
                        }
                        if from + count < steps {
                            for (r, all) in all.iter().enumerate() {
                                for (m, all) in all.iter().enumerate() {
                                    store(kept.add((r * $many + m) * $lanes), *all);
                                }
                            }
                            continue;
                        }
                        for (r, all) in all.into_iter().enumerate() {
                            let column = i * $rows + r;
                            if column < columns {
                                store_sums(all, tile.add(column * LANES));
                            }
                        }
                    }
                }
            }
        }

        /// See [`crate::simd::dense_rows::multiply`].
        ///
        /// # Safety
        /// The processor must have the features of this instance. The matrix must have one row per
        /// column of `out`, as long as an input. `out` must have one row per input. The inputs must
        /// be packed as [`places`] specifies, or be stored row by row if it returns `None`.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn multiply(
            matrix: DenseView<'_>,
            x: DenseInputs<'_>,
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
            x: DenseInputs<'_>,
            out: &mut OutputBlock<'_>,
        ) {
            // SAFETY: the caller guarantees the rows of the matrix, the inputs and the output.
            unsafe {
                match x.rows {
                    $($few => rows_of::<1, $few, 0, $few_tall, TYPE>(matrix, x, out),)*
                    $($m => {
                        rows_of::<$parts, $each, { $parts * $each }, $tall, TYPE>(matrix, x, out);
                    })*
                    _ => {}
                }
            }
        }

        /// [`multiply`] for at most `P * M` inputs, which are packed in `PLACES` row slots, or
        /// unpacked if `PLACES` is 0. Tiles have `M` inputs and `R` matrix rows.
        ///
        /// # Safety
        /// As [`multiply`].
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn rows_of<
            const P: usize,
            const M: usize,
            const PLACES: usize,
            const R: usize,
            const TYPE: u32,
        >(
            matrix: *const u8,
            x: DenseInputs<'_>,
            out: &mut OutputBlock<'_>,
        ) {
            /// The number of tiles whose sums are kept while a block of columns is added.
            const TILES: usize = 16;
            let (columns, k) = (out.dims().1, x.k);
            let step = k * size::<TYPE>();
            // Unpacked inputs are few, so reading them does not limit the speed.
            let block = match PLACES {
                0 => k,
                _ => L1_INPUTS / PLACES / $lanes * $lanes,
            };
            // The first input of a part.
            let part_at = |first: usize| match PLACES {
                0 => x.values.as_ptr().wrapping_add(first * k),
                _ => x.values.as_ptr().wrapping_add(first * $lanes),
            };
            let vectorized = columns / R * R;
            // SAFETY: the caller guarantees that all matrix rows below `columns` exist, and the
            // inputs.
            unsafe {
                if k <= block {
                    for column in (0..vectorized).step_by(R) {
                        let rows = matrix.add(column * step);
                        for p in 0..P {
                            let mut sums = [[$zero(); M]; R];
                            // The rows of the next tile are prefetched once.
                            let ahead = (p == 0).then_some(R * step);
                            let part = part_at(p * M);
                            tile::<M, R, PLACES, TYPE>(rows, (0..k, k), part, ahead, &mut sums);
                            write(&sums, (p * M, column), out);
                        }
                    }
                } else {
                    for first in (0..vectorized).step_by(R * TILES) {
                        let mut kept = [[[[$zero(); M]; R]; P]; TILES];
                        let tiles = ((vectorized - first) / R).min(TILES);
                        for from in (0..k).step_by(block) {
                            let columns = from..k.min(from + block);
                            for (i, kept) in kept[..tiles].iter_mut().enumerate() {
                                let rows = matrix.add((first + i * R) * step);
                                // After the last tile, the first tile of the next block follows.
                                let next = match i + 1 < tiles || columns.end == k {
                                    true => rows.wrapping_add(R * step),
                                    false => {
                                        let first = matrix.add(first * step);
                                        first.add((columns.end - from) * size::<TYPE>())
                                    }
                                };
                                let ahead = next.addr().wrapping_sub(rows.addr());
                                for (p, kept) in kept.iter_mut().enumerate() {
                                    let ahead = (p == 0).then_some(ahead);
                                    let (columns, part) = (columns.clone(), part_at(p * M));
                                    tile::<M, R, PLACES, TYPE>(rows, (columns, k), part, ahead, kept);
                                }
                            }
                        }
                        for (i, kept) in kept[..tiles].iter().enumerate() {
                            for (p, sums) in kept.iter().enumerate() {
                                write(sums, (p * M, first + i * R), out);
                            }
                        }
                    }
                }
                for column in vectorized..columns {
                    let rows = matrix.add(column * step);
                    for p in 0..P {
                        let mut sums = [[$zero(); M]; 1];
                        let part = part_at(p * M);
                        tile::<M, 1, PLACES, TYPE>(rows, (0..k, k), part, None, &mut sums);
                        write(&sums, (p * M, column), out);
                    }
                }
            }
        }

        /// Adds the products of the columns `part`, of `k`, of `R` matrix rows with `M` inputs,
        /// which begin at `x`. A part that does not end at `k` has whole vectors. If there is
        /// `ahead`, the elements that lie this number of bytes later are prefetched; the number
        /// may wrap around.
        ///
        /// # Safety
        /// The obligations of [`multiply`]. There must also be `R` rows and `M` inputs.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn tile<
            const M: usize,
            const R: usize,
            const PLACES: usize,
            const TYPE: u32,
        >(
            matrix: *const u8,
            (part, k): (std::ops::Range<usize>, usize),
            x: *const f32,
            ahead: Option<usize>,
            kept: &mut [[Vector; M]; R],
        ) {
            const LINE: usize = 64;
            let mut sums = *kept;
            let step = k * size::<TYPE>();
            // The address of the vector with element `at` of input `m`.
            let place = |m: usize, at: usize| match PLACES {
                0 => x.wrapping_add(m * k + at),
                _ => x.wrapping_add(at * PLACES + m * $lanes),
            };
            // SAFETY: offsets are below `k` in rows that the caller guarantees. Prefetched
            // addresses need not be valid.
            unsafe {
                let vectorized = part.end / $lanes * $lanes;
                for at in (part.start..vectorized).step_by($lanes) {
                    let from = matrix.add(at * size::<TYPE>());
                    let w: [_; R] = std::array::from_fn(|r| load::<TYPE>(from.add(r * step)));
                    if let Some(ahead) = ahead
                        && (at * size::<TYPE>()).is_multiple_of(LINE)
                    {
                        for r in 0..R {
                            let next = from.wrapping_add(ahead).wrapping_add(r * step);
                            _mm_prefetch::<_MM_HINT_T0>(next.cast());
                        }
                    }
                    for m in 0..M {
                        let x = load::<{ DenseView::F32_ID }>(place(m, at).cast());
                        for (sums, w) in sums.iter_mut().zip(w) {
                            sums[m] = $fma(w, x, sums[m]);
                        }
                    }
                }
                if vectorized < part.end {
                    let from = matrix.add(vectorized * size::<TYPE>());
                    for m in 0..M {
                        let x = place(m, vectorized).cast();
                        // The rest of a packed vector is zero.
                        let x = match PLACES {
                            0 => load_some::<{ DenseView::F32_ID }>(x, k - vectorized),
                            _ => load::<{ DenseView::F32_ID }>(x),
                        };
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let w = load_some::<TYPE>(from.add(r * step), k - vectorized);
                            sums[m] = $fma(w, x, sums[m]);
                        }
                    }
                }
            }
            *kept = sums;
        }

        /// Writes the outputs of a tile, beginning at `(row, column)`. There may be fewer output
        /// rows than sums.
        ///
        /// # Safety
        /// The processor must have the features of this instance. The columns must exist.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn write<const M: usize, const R: usize>(
            sums: &[[Vector; M]; R],
            (row, column): (usize, usize),
            out: &mut OutputBlock<'_>,
        ) {
            let rows = out.dims().0;
            let (to, step) = out.raw_parts();
            for (r, sums) in sums.iter().enumerate() {
                for (m, total) in sums.iter().enumerate().take(rows - row) {
                    // SAFETY: the row is below the number of rows, and the caller guarantees the
                    // column.
                    unsafe { *to.add((row + m) * step + column + r) = sum(*total) };
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
    __m256,
    8,
    _mm256_setzero_ps,
    _mm256_fmadd_ps,
    _mm256_mul_ps,
    _mm256_set1_ps,
    many: (4, 3, 128, 1),
    few: (1, 4), (2, 4), (3, 3);
    packed: (4, 1 x 4, 3), (5, 1 x 5, 2), (6, 1 x 6, 2), (7, 2 x 4, 3), (8, 2 x 4, 3)
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
    // Returns the sum of the two halves of `a`, and that of `b`.
    let halves = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    let (ab, cd) = (halves(a, b), halves(c, d));
    let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
    let quarters = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
    // The sums of `a` and `c` are in the lower half, and those of `b` and `d` in the upper half.
    let sums = _mm256_hadd_ps(quarters, quarters);
    let (ac, bd) = (
        _mm256_castps256_ps128(sums),
        _mm256_extractf128_ps::<1>(sums),
    );
    // SAFETY: the caller guarantees the space.
    unsafe { _mm_storeu_ps(to, _mm_unpacklo_ps(ac, bd)) };
}
