//! Products of input rows with a micro-panel of a dense matrix. The instruction set determines the
//! kernel.

use crate::isa::Isa;
use crate::layout::tile::{Ahead, ColumnOutput, TileA};
use crate::simd::{avx2, avx512};

/// The number of outputs of a panel and the maximum number of input rows of a tile; `None` if
/// there is no kernel for this instruction set.
pub(crate) fn sizes(isa: Isa) -> Option<(usize, usize)> {
    match isa {
        Isa::Avx2 => Some((avx2::columns::WIDTH, avx2::columns::ROWS)),
        Isa::Avx512 | Isa::Amx => Some((avx512::columns::WIDTH, avx512::columns::ROWS)),
        _ => None,
    }
}

/// Computes `to[row][i] = sum over c < k of x[row][c] * panel[c][i]`, plus bias and residual, for
/// `rows` rows. The result of a row does not depend on the number of rows.
///
/// # Panics
/// If there is no kernel for the instruction set, or there are more rows than [`sizes`] allows.
///
/// # Safety
/// These elements must exist: the rows of `x`, which are contiguous; the panel `[k, width]`; and
/// `width` elements of each output row, of the bias, and of each row of the residual. No other
/// thread may use the output.
pub(crate) unsafe fn multiply(
    isa: Isa,
    (rows, k): (usize, usize),
    x: TileA,
    (panel, ahead): (*const f32, Ahead),
    to: &ColumnOutput,
) {
    assert!(sizes(isa).is_some_and(|(_, most)| rows <= most));
    // SAFETY: only `detect` makes these instruction sets, on processors that have their features.
    // The caller guarantees the operands.
    unsafe {
        match isa {
            Isa::Avx2 => avx2::columns::multiply((rows, k), x, (panel, ahead), to),
            Isa::Avx512 | Isa::Amx => avx512::columns::multiply((rows, k), x, (panel, ahead), to),
            _ => {}
        }
    }
}
