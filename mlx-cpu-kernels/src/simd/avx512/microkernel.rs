//! The micro-kernel for AVX-512.

use crate::layout::tile::{TileA, TileB, TileC};

use std::arch::x86_64::{
    _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps,
};

/// Computes [`crate::simd::microkernel::gemm_tiles`] for `M` rows. Each row has two independent
/// sums, which hides the latency of additions.
///
/// # Safety
/// The obligations of [`crate::simd::microkernel::gemm_tiles`]. The processor must also have
/// avx512f.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn tile<const M: usize>(depth: usize, left: TileA, right: TileB, product: TileC) {
    // SAFETY: the caller guarantees avx512f, and the elements of the three operands.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        let (mut a, mut b) = (left.data, right.data);
        for _ in 0..depth / 2 {
            let lanes = [
                _mm512_loadu_ps(b),
                _mm512_loadu_ps(b.wrapping_add(right.stride)),
            ];
            for (m, sum) in sums.iter_mut().enumerate() {
                let at = a.wrapping_add(m * left.row_stride);
                let next = at.wrapping_add(left.stride);
                sum[0] = _mm512_fmadd_ps(_mm512_set1_ps(*at), lanes[0], sum[0]);
                sum[1] = _mm512_fmadd_ps(_mm512_set1_ps(*next), lanes[1], sum[1]);
            }
            a = a.wrapping_add(2 * left.stride);
            b = b.wrapping_add(2 * right.stride);
        }
        if depth % 2 == 1 {
            let lanes = _mm512_loadu_ps(b);
            for (m, sum) in sums.iter_mut().enumerate() {
                let factor = _mm512_set1_ps(*a.wrapping_add(m * left.row_stride));
                sum[0] = _mm512_fmadd_ps(factor, lanes, sum[0]);
            }
        }
        for (m, sum) in sums.into_iter().enumerate() {
            let to = product.data.wrapping_add(m * product.row_stride);
            let mut sum = _mm512_add_ps(sum[0], sum[1]);
            if product.accumulate {
                sum = _mm512_add_ps(_mm512_loadu_ps(to), sum);
            }
            _mm512_storeu_ps(to, sum);
        }
    }
}
