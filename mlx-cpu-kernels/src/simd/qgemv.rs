//! Products of quantized matrices with a few rows of inputs, up to eight at once, by instruction set. Sums are float32.

use crate::isa::Isa;
use crate::layout::input_panel::{Panel, Prepared, neighbors};
use crate::layout::packed::Bands;
use crate::partition::Columns;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon;
use crate::simd::portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// Neighboring inputs that share a scale with this instruction set.
pub(crate) fn sharing(isa: Isa, bits: u32) -> usize {
    match isa {
        #[cfg(target_arch = "aarch64")]
        Isa::Dot => neon::qgemv_dotprod::NEAR,
        _ => neighbors(bits),
    }
}

/// Whether inputs are prepared as whole numbers.
pub(crate) fn in_whole(isa: Isa) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => true,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => false,
        #[cfg(target_arch = "aarch64")]
        Isa::Dot => true,
        Isa::Portable => false,
    }
}

/// Puts rows of `k` inputs into the form that the kernels read, and sums each group: whole numbers where
/// [`in_whole`] says so.
pub(crate) fn prepare(
    isa: Isa,
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    to: Prepared<'_>,
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            avx2::qgemv::prepare(x, k, (bits, group), to);
        },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => portable::qgemv::prepare_with(x, k, (bits, group), to),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Dot` is made by `detect` only, where the processor has neon and dotprod.
        Isa::Dot => unsafe { neon::qgemv_dotprod::prepare(x, k, (bits, group), to) },
        Isa::Portable => portable::qgemv::prepare_with(x, k, (bits, group), to),
    }
}

/// Products of the rows of bands with rows of inputs: `out` is `[inputs, rows of the bands]`.
pub(crate) fn block(isa: Isa, bands: Bands<'_>, x: Panel<'_>, out: &mut Columns<'_>) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx2` is made by `detect` only, where the processor has avx2, fma and f16c.
        Isa::Avx2 => unsafe { avx2::qgemv::block(bands, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::Avx512` is made by `detect` only, where the processor has all that it names.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::qgemv::block(bands, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Neon` is made by `detect` only, where the processor has neon.
        Isa::Neon => unsafe { neon::kernels::block(bands, x, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::Dot` is made by `detect` only, where the processor has neon and dotprod.
        Isa::Dot => unsafe { neon::qgemv_dotprod::block(bands, x, out) },
        Isa::Portable if bands.bits == 4 => portable::qgemv::block::<4>(bands, x, out),
        Isa::Portable => portable::qgemv::block::<8>(bands, x, out),
    }
}

#[cfg(test)]
#[path = "qgemv_tests.rs"]
pub(crate) mod tests;
