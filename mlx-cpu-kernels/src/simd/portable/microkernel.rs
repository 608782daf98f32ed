//! The micro-kernel without vector instructions.

use crate::layout::tile::{LANES, Left, Product, Right};

/// # Safety
/// As [`crate::simd::microkernel::tiles`].
pub(crate) unsafe fn tile<const M: usize>(
    depth: usize,
    left: Left,
    right: Right,
    product: Product,
) {
    let mut sums = [[0.0f32; LANES]; M];
    let (mut a, mut b) = (left.data, right.data);
    for _ in 0..depth {
        // SAFETY: the elements are the caller's promise.
        let lanes = unsafe { b.cast::<[f32; LANES]>().read_unaligned() };
        for (m, sum) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            let factor = unsafe { a.wrapping_add(m * left.row_step).read() };
            for (sum, lane) in sum.iter_mut().zip(lanes) {
                *sum += factor * lane;
            }
        }
        a = a.wrapping_add(left.step);
        b = b.wrapping_add(right.step);
    }
    for (m, sum) in sums.iter().enumerate() {
        for (lane, sum) in sum.iter().enumerate() {
            let to = product.data.wrapping_add(m * product.row_step + lane);
            // SAFETY: as above.
            unsafe {
                *to = if product.adds { *to + sum } else { *sum };
            }
        }
    }
}
