//! The micro-kernel for AVX2.

use crate::layout::tile::{TileA, TileB, TileC};

use std::arch::x86_64::{
    _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
    _mm256_storeu_ps,
};

/// # Safety
/// As [`crate::simd::microkernel::gemm_tiles`], and the processor must have avx2 and fma.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn tile<const M: usize>(depth: usize, left: TileA, right: TileB, product: TileC) {
    // SAFETY: the caller guarantees avx2 and fma, and the elements of the three operands.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        let (mut a, mut b) = (left.data, right.data);
        for _ in 0..depth {
            let (low, high) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.wrapping_add(8)));
            for (m, sum) in sums.iter_mut().enumerate() {
                let factor = _mm256_broadcast_ss(&*a.wrapping_add(m * left.row_stride));
                sum[0] = _mm256_fmadd_ps(factor, low, sum[0]);
                sum[1] = _mm256_fmadd_ps(factor, high, sum[1]);
            }
            a = a.wrapping_add(left.stride);
            b = b.wrapping_add(right.stride);
        }
        for (m, sum) in sums.into_iter().enumerate() {
            for (half, sum) in sum.into_iter().enumerate() {
                let to = product.data.wrapping_add(m * product.row_stride + 8 * half);
                let sum = if product.accumulate {
                    _mm256_add_ps(_mm256_loadu_ps(to), sum)
                } else {
                    sum
                };
                _mm256_storeu_ps(to, sum);
            }
        }
    }
}
