//! The register-tile micro-kernel: a few rows of one matrix times sixteen columns of another.
//! Products of many rows and flash attention spend most of their time in it. The instruction set
//! determines the kernel.

use crate::isa::Isa;
use crate::layout::tile::{TileA, TileB, TileC};
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2::microkernel::tile as tile_avx2;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx512::microkernel::tile as tile_avx512;
#[cfg(any(target_arch = "aarch64", test))]
use crate::simd::neon::f32::tile as tile_neon;
use crate::simd::portable::microkernel::tile as tile_portable;

/// The maximum number of rows of a tile. A row has two vectors of eight sums each, so the twelve
/// vectors of six rows fill the registers of AVX2.
pub(crate) const MAX_TILE_ROWS: usize = 6;

/// `product[row][lane] (+)= sum over i < depth of left[row][i] * right[i][lane]`, for `rows` rows.
///
/// # Safety
/// All elements of the three operands for these rows and `depth` must exist. No other thread may
/// use the elements of the product.
pub(crate) unsafe fn gemm_tiles(
    isa: Isa,
    rows: usize,
    depth: usize,
    mut left: TileA,
    right: TileB,
    mut product: TileC,
) {
    let mut rest = rows;
    while rest > 0 {
        let tall = rest.min(MAX_TILE_ROWS);
        // SAFETY: these `tall` rows are among the rows that the caller guarantees. `detect` returns
        // `Isa::Avx2` only on processors with avx2 and fma, `Isa::Avx512` and `Isa::Amx` only if
        // avx512f is also there, and `Isa::Neon` and `Isa::Dot` only with neon. Tests use the last
        // two where neon is emulated.
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
                #[cfg(any(target_arch = "aarch64", test))]
                (Isa::Neon | Isa::Dot, 6) => tile_neon::<6>(depth, left, right, product),
                #[cfg(any(target_arch = "aarch64", test))]
                (Isa::Neon | Isa::Dot, 5) => tile_neon::<5>(depth, left, right, product),
                #[cfg(any(target_arch = "aarch64", test))]
                (Isa::Neon | Isa::Dot, 4) => tile_neon::<4>(depth, left, right, product),
                #[cfg(any(target_arch = "aarch64", test))]
                (Isa::Neon | Isa::Dot, 3) => tile_neon::<3>(depth, left, right, product),
                #[cfg(any(target_arch = "aarch64", test))]
                (Isa::Neon | Isa::Dot, 2) => tile_neon::<2>(depth, left, right, product),
                #[cfg(any(target_arch = "aarch64", test))]
                (Isa::Neon | Isa::Dot, _) => tile_neon::<1>(depth, left, right, product),
                (Isa::Portable, 6) => tile_portable::<6>(depth, left, right, product),
                (Isa::Portable, 5) => tile_portable::<5>(depth, left, right, product),
                (Isa::Portable, 4) => tile_portable::<4>(depth, left, right, product),
                (Isa::Portable, 3) => tile_portable::<3>(depth, left, right, product),
                (Isa::Portable, 2) => tile_portable::<2>(depth, left, right, product),
                (Isa::Portable, _) => tile_portable::<1>(depth, left, right, product),
            }
        }
        left.data = left.data.wrapping_add(tall * left.row_stride);
        product.data = product.data.wrapping_add(tall * product.row_stride);
        rest -= tall;
    }
}
