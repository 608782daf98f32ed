//! Multiplication of quantized matrices with up to eight input rows; up to sixteen with AVX-512.
//! Sums are float32. The instruction set determines the kernel.

use crate::isa::Isa;
use crate::layout::formats::with_codes;
use crate::layout::input_panel::{INPUTS_PER_SCALE, InputPanel, InputPanelMut};
use crate::layout::packed::{FLOAT_INPUTS, PackedMatrix};
use crate::partition::OutputBlock;
#[cfg(any(target_arch = "aarch64", test))]
use crate::simd::neon;
use crate::simd::portable;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

/// The number of adjacent inputs that share a scale with this instruction set.
pub(crate) fn inputs_per_scale(isa: Isa) -> usize {
    match isa {
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Dot => neon::qgemv_dotprod::INPUTS_PER_SCALE,
        _ => INPUTS_PER_SCALE,
    }
}

/// Whether inputs for a matrix of this width are quantized.
pub(crate) fn quantizes_inputs(isa: Isa, bits: u32) -> bool {
    match isa {
        _ if bits == FLOAT_INPUTS => false,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => true,
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon => false,
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Dot => dot_has(bits),
        Isa::Portable => false,
    }
}

/// Prepares rows of `k` inputs in the form that the kernels read, and sums each group. The prepared
/// inputs are integers if [`quantizes_inputs`] returns true.
pub(crate) fn prepare_inputs(
    isa: Isa,
    x: &[f32],
    k: usize,
    (bits, group): (u32, usize),
    to: InputPanelMut<'_>,
) {
    if !quantizes_inputs(isa, bits) {
        return portable::qgemv::prepare_inputs(x, k, (bits, group), to);
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes these, on processors with avx2 and fma.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe {
            avx2::quantize_inputs::prepare_inputs(x, k, (bits, group), to);
        },
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon => portable::qgemv::prepare_inputs(x, k, (bits, group), to),
        #[cfg(any(target_arch = "aarch64", test))]
        // SAFETY: the processor has neon and dotprod, or they are emulated; see `Isa::Dot`.
        Isa::Dot => unsafe { neon::qgemv_dotprod::prepare_inputs(x, k, (bits, group), to) },
        Isa::Portable => portable::qgemv::prepare_inputs(x, k, (bits, group), to),
    }
}

/// Multiplies each matrix row with each input row. `out` is `[input rows, matrix rows]`; the matrix
/// rows are those of whole row blocks.
pub(crate) fn qgemv(
    isa: Isa,
    matrix: PackedMatrix<'_>,
    x: InputPanel<'_>,
    out: &mut OutputBlock<'_>,
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2, fma and f16c.
        Isa::Avx2 if !matrix.kernels().integers => unsafe {
            avx2::qgemv_fp8::qgemv(matrix, x, out);
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2, fma and f16c.
        Isa::Avx2 => unsafe { avx2::qgemv::qgemv(matrix, x, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx512`, on processors with all of its features.
        Isa::Avx512 | Isa::Amx if !matrix.kernels().integers => unsafe {
            avx512::qgemv_fp8::qgemv(matrix, x, out);
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `detect` makes `Isa::Avx512`, on processors with all of its features.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::qgemv::qgemv(matrix, x, out) },
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon | Isa::Dot if !matrix.kernels().neon => portable_qgemv(matrix, x, out),
        // SAFETY: the processor has neon, or neon is emulated; see `Isa::Neon`.
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Neon => unsafe {
            match matrix.bits {
                4 => neon::f32::qgemv::<4>(matrix, x, out),
                _ => neon::f32::qgemv::<8>(matrix, x, out),
            }
        },
        // SAFETY: the processor has neon and dotprod, or they are emulated; see `Isa::Dot`.
        #[cfg(any(target_arch = "aarch64", test))]
        Isa::Dot => unsafe {
            match matrix.bits {
                4 => neon::qgemv_dotprod::qgemv::<4>(matrix, x, out),
                _ => neon::qgemv_dotprod::qgemv::<8>(matrix, x, out),
            }
        },
        Isa::Portable => portable_qgemv(matrix, x, out),
    }
}

fn portable_qgemv(matrix: PackedMatrix<'_>, x: InputPanel<'_>, out: &mut OutputBlock<'_>) {
    use portable::qgemv::qgemv;
    with_codes!(qgemv(matrix, x, out));
}

/// Whether the dotprod kernels support this width. For other widths, [`qgemv`] runs portable code,
/// which reads floats.
#[cfg(any(target_arch = "aarch64", test))]
fn dot_has(bits: u32) -> bool {
    matches!(bits, 4 | 8)
}

#[cfg(test)]
#[path = "qgemv_tests.rs"]
pub(crate) mod tests;
