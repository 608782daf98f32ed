//! The micro-kernel without vector instructions.

use crate::layout::tile::{LANES, TileA, TileB, TileC};

/// # Safety
/// As [`crate::simd::microkernel::gemm_tiles`].
pub(crate) unsafe fn tile<const M: usize>(depth: usize, left: TileA, right: TileB, product: TileC) {
    let mut sums = [[0.0f32; LANES]; M];
    let (mut a, mut b) = (left.data, right.data);
    for _ in 0..depth {
        // SAFETY: the caller guarantees `LANES` elements of `right` for each of `depth` steps.
        let lanes = unsafe { b.cast::<[f32; LANES]>().read_unaligned() };
        for (m, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the caller guarantees an element of `left` for each of `M` rows and `depth`
            // steps.
            let factor = unsafe { a.wrapping_add(m * left.row_stride).read() };
            for (sum, lane) in sum.iter_mut().zip(lanes) {
                *sum += factor * lane;
            }
        }
        a = a.wrapping_add(left.stride);
        b = b.wrapping_add(right.stride);
    }
    for (m, sum) in sums.iter().enumerate() {
        for (lane, sum) in sum.iter().enumerate() {
            let to = product.data.wrapping_add(m * product.row_stride + lane);
            // SAFETY: the caller guarantees `LANES` elements of the product in each of `M` rows.
            unsafe {
                *to = if product.accumulate { *to + sum } else { *sum };
            }
        }
    }
}
