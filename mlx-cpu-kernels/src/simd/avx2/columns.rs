//! Products of input rows with a micro-panel of a dense matrix, for AVX2. Each lane is an output.
//! An output is a single sum over the columns in order, for any number of rows of a tile.

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_add_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use crate::layout::tile::{Ahead, ColumnOutput, TileA};

/// Generates `multiply` for `$features`, with vectors `$vector` of `$lanes` elements, `$count` in a
/// row of a panel, and for the given numbers of input rows. The last number is the maximum.
macro_rules! columns_for {
    (
        $features:literal, $vector:ty, $lanes:literal, $count:literal,
        $zero:path, $fma:path, $add:path, $set:path, $load:path, $store:path,
        most: $most:literal, $($rows:literal),*
    ) => {
        /// The number of outputs of a panel.
        pub(crate) const WIDTH: usize = $lanes * $count;

        /// The maximum number of input rows of a tile.
        pub(crate) const ROWS: usize = $most;

        /// See [`crate::simd::columns::multiply`].
        ///
        /// # Safety
        /// The obligations of that function. The processor must also have the features of this
        /// instance.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn multiply(
            (rows, k): (usize, usize),
            x: TileA,
            (panel, ahead): (*const f32, Ahead),
            to: &ColumnOutput,
        ) {
            // SAFETY: the caller guarantees the operands for these rows.
            unsafe {
                match rows {
                    $($rows => tile::<$rows>(k, x, (panel, ahead), to),)*
                    _ => {}
                }
            }
        }

        /// A tile of `M` input rows.
        ///
        /// # Safety
        /// The obligations of [`multiply`], for `M` rows.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn tile<const M: usize>(
            k: usize,
            x: TileA,
            (panel, ahead): (*const f32, Ahead),
            to: &ColumnOutput,
        ) {
            /// Columns of the panel that are prefetched ahead.
            const AHEAD: usize = 16;
            const LINE: usize = 16;
            /// Few tiles share the next panel, so a tile may prefetch several lines per column.
            const PARTS: usize = WIDTH / LINE;
            let spacing = ahead.step.div_ceil(PARTS);
            // SAFETY: the caller guarantees `M` rows of `k` elements, `k` columns of the panel, and
            // space for the outputs. Prefetched addresses need not be valid.
            unsafe {
                let mut sums = [[$zero(); $count]; M];
                let rows: [*const f32; M] =
                    std::array::from_fn(|m| x.data.wrapping_add(m * x.row_stride));
                for i in 0..k {
                    let column = panel.add(i * WIDTH);
                    for line in 0..WIDTH / LINE {
                        let next = column.wrapping_add(AHEAD * WIDTH + line * LINE);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    }
                    for part in 0..PARTS {
                        let next = ahead.data.wrapping_add(i * ahead.step + part * spacing);
                        _mm_prefetch::<_MM_HINT_T1>(next.cast());
                    }
                    let lanes: [$vector; $count] =
                        std::array::from_fn(|v| $load(column.add(v * $lanes)));
                    for (row, sums) in rows.iter().zip(&mut sums) {
                        let x = $set(*row.add(i));
                        for (sum, lanes) in sums.iter_mut().zip(lanes) {
                            *sum = $fma(x, lanes, *sum);
                        }
                    }
                }
                for (m, sums) in sums.into_iter().enumerate() {
                    for (v, mut sum) in sums.into_iter().enumerate() {
                        if let Some(bias) = to.bias {
                            sum = $add(sum, $load(bias.add(v * $lanes)));
                        }
                        let at = m * to.row_stride + v * $lanes;
                        if let Some(residual) = to.residual {
                            sum = $add(sum, $load(residual.add(at)));
                        }
                        $store(to.data.add(at), sum);
                    }
                }
            }
        }
    };
}
pub(crate) use columns_for;

columns_for!(
    "avx2,fma", __m256, 8, 2,
    _mm256_setzero_ps, _mm256_fmadd_ps, _mm256_add_ps, _mm256_set1_ps, _mm256_loadu_ps,
    _mm256_storeu_ps,
    most: 6, 1, 2, 3, 4, 5, 6
);
