//! Many-row multiplication in 16-bit integers. The instruction set determines the kernel. All
//! kernels give the same bits.

use std::ops::Range;

use crate::isa::Isa;
use crate::layout::integer_panel::{CodePanel, InputColumns, InputColumnsMut};
use crate::simd::{avx2, avx512};

/// The maximum number of input panels per pass over a matrix.
pub(crate) const PANELS: usize = 3;

/// The number of panels of the next pass if `left` are left. Two passes of two are faster than one
/// of three and one of one.
pub(crate) const fn panels_at_once(left: usize) -> usize {
    match left {
        4 => 2,
        1 | 2 => left,
        _ => PANELS,
    }
}

/// Whether there is a kernel for this instruction set.
pub(crate) fn supports(isa: Isa) -> bool {
    isa.has_avx2()
}

/// Quantizes columns `[columns, LANES]`.
///
/// # Panics
/// If no kernel supports the instruction set, or the lengths do not match.
pub(crate) fn quantize(isa: Isa, columns: &[f32], to: InputColumnsMut<'_>) {
    match isa {
        // SAFETY: only `detect` makes these, on processors with all features of the kernels.
        Isa::Avx512 | Isa::Amx => unsafe { avx512::integer_tile::quantize(columns, to) },
        // SAFETY: only `detect` makes it, on processors with avx2 and fma.
        Isa::Avx2 => unsafe { avx2::integer_tile::quantize(columns, to) },
        _ => unreachable!("a product of `fits_integers`"),
    }
}

/// `sums[panel][row][lane] (+)= matrix[row] . x[panel][lane]` over some groups, for the first
/// `rows` rows of the matrix. The sums of up to three further rows may be overwritten. There are at
/// most [`PANELS`] panels, whose sums have the given distance. Without `accumulate`, earlier sums
/// are overwritten.
///
/// # Panics
/// If no kernel supports the instruction set, or the lengths do not match.
pub(crate) fn multiply(
    isa: Isa,
    (rows, groups): (usize, Range<usize>),
    matrix: CodePanel<'_>,
    x: &[InputColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    accumulate: bool,
) {
    match isa {
        // SAFETY: only `detect` makes these, on processors with all features of the kernels.
        Isa::Avx512 | Isa::Amx => unsafe {
            let sums = (sums, apart);
            avx512::integer_tile::multiply(rows, groups, matrix, x, sums, accumulate);
        },
        Isa::Avx2 => {
            for (x, sums) in x.iter().zip(sums.chunks_mut(apart)) {
                let part = (rows, groups.clone());
                if is_x86_feature_detected!("avxvnni") {
                    use avx2::integer_tile::multiply_vnni;
                    // SAFETY: only `detect` makes it, on processors with avx2 and fma. The
                    // processor has avxvnni.
                    unsafe { multiply_vnni(part, matrix, *x, sums, accumulate) };
                } else {
                    // SAFETY: only `detect` makes it, on processors with avx2 and fma.
                    unsafe { avx2::integer_tile::multiply(part, matrix, *x, sums, accumulate) };
                }
            }
        }
        _ => unreachable!("a product of `fits_integers`"),
    }
}
