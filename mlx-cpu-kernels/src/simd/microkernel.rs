//! Register tiles: a few rows of one matrix with sixteen columns of another, the core of products with many
//! rows and of attention over many queries; and exponentials in vectors.

use crate::simd::dispatch::Isa;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _mm256_add_ps, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
    _mm256_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps,
};

/// Columns of a tile, and rows of inputs in a panel.
pub const LANES: usize = 16;

/// The most rows of a tile: with two vectors of eight each, twelve sums fill the registers of AVX2.
pub(crate) const TALL: usize = 6;

/// One factor of a tile: element `(row, i)` stands at `data + row * row_step + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    pub data: *const f32,
    pub row_step: usize,
    pub step: usize,
}

/// The other one: `LANES` neighbors for each `i`, at `data + i * step`.
#[derive(Clone, Copy)]
pub(crate) struct Right {
    pub data: *const f32,
    pub step: usize,
}

/// The product: `LANES` neighbors for each row, at `data + row * row_step`.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub data: *mut f32,
    pub row_step: usize,
    /// What is there is added to, rather than replaced.
    pub adds: bool,
}

/// `product[row][lane] (+)= sum over i < depth of left[row][i] * right[i][lane]`, for `rows` rows.
///
/// # Safety
/// All elements that the three name for these rows and `depth` must be there, and nobody else may use those
/// of the product.
pub(crate) unsafe fn tiles(
    isa: Isa,
    rows: usize,
    depth: usize,
    mut left: Left,
    right: Right,
    mut product: Product,
) {
    let mut rest = rows;
    while rest > 0 {
        let tall = rest.min(TALL);
        // SAFETY: `tall` of the rows that the caller promises; `Isa::Avx2` is made by `detect` only, where
        // the processor has avx2 and fma, `Isa::Avx512` where it has avx512f as well, `Isa::Neon` and `Isa::Dot` where it
        // has neon.
        unsafe {
            match (isa, tall) {
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 6) => tile_avx2::<6>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 5) => tile_avx2::<5>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 4) => tile_avx2::<4>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 3) => tile_avx2::<3>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, 2) => tile_avx2::<2>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx2, _) => tile_avx2::<1>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512 | Isa::Amx, 6) => tile_avx512::<6>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512 | Isa::Amx, 5) => tile_avx512::<5>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512 | Isa::Amx, 4) => tile_avx512::<4>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512 | Isa::Amx, 3) => tile_avx512::<3>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512 | Isa::Amx, 2) => tile_avx512::<2>(depth, left, right, product),
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512 | Isa::Amx, _) => tile_avx512::<1>(depth, left, right, product),
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon | Isa::Dot, 6) => {
                    crate::simd::neon::kernels::tile::<6>(depth, left, right, product)
                }
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon | Isa::Dot, 5) => {
                    crate::simd::neon::kernels::tile::<5>(depth, left, right, product)
                }
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon | Isa::Dot, 4) => {
                    crate::simd::neon::kernels::tile::<4>(depth, left, right, product)
                }
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon | Isa::Dot, 3) => {
                    crate::simd::neon::kernels::tile::<3>(depth, left, right, product)
                }
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon | Isa::Dot, 2) => {
                    crate::simd::neon::kernels::tile::<2>(depth, left, right, product)
                }
                #[cfg(target_arch = "aarch64")]
                (Isa::Neon | Isa::Dot, _) => {
                    crate::simd::neon::kernels::tile::<1>(depth, left, right, product)
                }
                (Isa::Portable, 6) => tile_portable::<6>(depth, left, right, product),
                (Isa::Portable, 5) => tile_portable::<5>(depth, left, right, product),
                (Isa::Portable, 4) => tile_portable::<4>(depth, left, right, product),
                (Isa::Portable, 3) => tile_portable::<3>(depth, left, right, product),
                (Isa::Portable, 2) => tile_portable::<2>(depth, left, right, product),
                (Isa::Portable, _) => tile_portable::<1>(depth, left, right, product),
            }
        }
        left.data = left.data.wrapping_add(tall * left.row_step);
        product.data = product.data.wrapping_add(tall * product.row_step);
        rest -= tall;
    }
}

/// # Safety
/// As [`tiles`], and the processor must have avx2 and fma.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2<const M: usize>(depth: usize, left: Left, right: Right, product: Product) {
    // SAFETY: the elements are the caller's promise.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        let (mut a, mut b) = (left.data, right.data);
        for _ in 0..depth {
            let (low, high) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.wrapping_add(8)));
            for (m, sum) in sums.iter_mut().enumerate() {
                let factor = _mm256_broadcast_ss(&*a.wrapping_add(m * left.row_step));
                sum[0] = _mm256_fmadd_ps(factor, low, sum[0]);
                sum[1] = _mm256_fmadd_ps(factor, high, sum[1]);
            }
            a = a.wrapping_add(left.step);
            b = b.wrapping_add(right.step);
        }
        for (m, sum) in sums.into_iter().enumerate() {
            for (half, sum) in sum.into_iter().enumerate() {
                let to = product.data.wrapping_add(m * product.row_step + 8 * half);
                let sum = if product.adds {
                    _mm256_add_ps(_mm256_loadu_ps(to), sum)
                } else {
                    sum
                };
                _mm256_storeu_ps(to, sum);
            }
        }
    }
}

/// Two sums for each row, so that one need not wait for the other.
///
/// # Safety
/// As [`tiles`], and the processor must have avx512f.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn tile_avx512<const M: usize>(depth: usize, left: Left, right: Right, product: Product) {
    // SAFETY: the elements are the caller's promise.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        let (mut a, mut b) = (left.data, right.data);
        for _ in 0..depth / 2 {
            let lanes = [
                _mm512_loadu_ps(b),
                _mm512_loadu_ps(b.wrapping_add(right.step)),
            ];
            for (m, sum) in sums.iter_mut().enumerate() {
                let at = a.wrapping_add(m * left.row_step);
                let next = at.wrapping_add(left.step);
                sum[0] = _mm512_fmadd_ps(_mm512_set1_ps(*at), lanes[0], sum[0]);
                sum[1] = _mm512_fmadd_ps(_mm512_set1_ps(*next), lanes[1], sum[1]);
            }
            a = a.wrapping_add(2 * left.step);
            b = b.wrapping_add(2 * right.step);
        }
        if depth % 2 == 1 {
            let lanes = _mm512_loadu_ps(b);
            for (m, sum) in sums.iter_mut().enumerate() {
                let factor = _mm512_set1_ps(*a.wrapping_add(m * left.row_step));
                sum[0] = _mm512_fmadd_ps(factor, lanes, sum[0]);
            }
        }
        for (m, sum) in sums.into_iter().enumerate() {
            let to = product.data.wrapping_add(m * product.row_step);
            let mut sum = _mm512_add_ps(sum[0], sum[1]);
            if product.adds {
                sum = _mm512_add_ps(_mm512_loadu_ps(to), sum);
            }
            _mm512_storeu_ps(to, sum);
        }
    }
}

/// # Safety
/// As [`tiles`].
unsafe fn tile_portable<const M: usize>(depth: usize, left: Left, right: Right, product: Product) {
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

/// Below this, `exp` is zero here: what would be no normal number.
pub(crate) const LEAST: f32 = -87.33;

/// Above this, `exp` is what it is here.
pub(crate) const MOST: f32 = 88.37;

/// Adding 1.5 * 2^23 rounds to a whole number, which is then in the lowest bits.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// The logarithm of 2, in two parts, so that a whole number times the first is exact.
pub(crate) const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// That of Cephes' `expf` (S. Moshier), from the highest power on.
pub(crate) const POLYNOMIAL: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];

/// `exp(x)` to about two units in the last place, in operations that every vector unit has. What is no
/// number stays so.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let high = if x > MOST { MOST } else { x };
    let bounded = if high < LEAST { LEAST } else { high };
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = bounded - n * LN_2[0];
    let r = r - n * LN_2[1];
    let mut p = POLYNOMIAL[0];
    for factor in &POLYNOMIAL[1..] {
        p = p * r + factor;
    }
    let value = p * (r * r) + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    // Not by the bounded value, which is a number always.
    if x < LEAST { 0.0 } else { value * power }
}

/// `2 / (1 + exp(-2x)) - 1`: the hyperbolic tangent, to about 1e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    2.0 / (1.0 + exp(-2.0 * x)) - 1.0
}

#[cfg(test)]
mod tests {
    #[test]
    fn exponentials_and_tangents() {
        for i in -2000..2000 {
            let x = i as f32 * 0.0435;
            let (got, exact) = (f64::from(super::exp(x)), f64::from(x).exp());
            assert!((got - exact).abs() <= 4e-7 * exact, "{x}: {got} {exact}");
            let difference = (f64::from(super::tanh(x)) - f64::from(x).tanh()).abs();
            assert!(difference < 4e-7, "{x}");
        }
        assert_eq!(super::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(super::exp(-1000.0), 0.0);
        assert!(super::exp(f32::NAN).is_nan());
        assert!(super::exp(1000.0).is_finite() && super::exp(0.0) == 1.0);
    }
}
