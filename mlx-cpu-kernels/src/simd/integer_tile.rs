//! Products of many rows in 16-bit integers, by instruction set. The tiles are in `avx2` and
//! `avx512`.

use std::ops::Range;

use crate::isa::Isa;
use crate::layout::integer_panel::{
    CodePanel, InputColumns, InputColumnsMut, IntegerTask, STEP, SUM,
};
use crate::layout::tile::LANES;
use crate::simd::{avx2, avx512};

/// Panels of inputs that one pass over a matrix meets.
pub(crate) const PANELS: usize = 2;

/// Columns `[columns, LANES]` as integers with a scale for each [`STEP`] of them. The set has AVX2.
pub(crate) fn quantize(isa: Isa, columns: &[f32], to: InputColumnsMut<'_>) {
    let sums = columns.len() / (SUM * LANES);
    // The reads and writes of the kernels stay within these.
    assert!(columns.len() == sums * SUM * LANES && to.pairs.len() == columns.len() / 2);
    assert!(to.scales.len() == columns.len() / STEP && to.sums.len() == sums * LANES);
    assert!(isa.has_avx2());
    // SAFETY: `detect` makes these only where the processor has their instructions; the lengths
    // are asserted.
    unsafe {
        match isa {
            Isa::Avx512 | Isa::Amx => avx512::integer_tile::quantize(columns, to),
            _ => avx2::integer_tile::quantize(columns, to),
        }
    }
}

/// `sums[panel][row][lane] (+)= matrix[row] . x[panel][lane]` over some groups. The rows are the
/// first `rows` of the matrix; there are one or two panels, whose sums are `apart` numbers apart.
/// Without `accumulate`, the sums before count as zeros. The set has AVX2.
pub(crate) fn multiply(
    isa: Isa,
    (rows, groups): (usize, Range<usize>),
    matrix: CodePanel<'_>,
    x: &[InputColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    accumulate: bool,
) {
    // The reads and writes of the kernels stay within these.
    let (columns, stride) = (groups.end * matrix.group, matrix.rows);
    assert!(isa.has_avx2() && matrix.group.is_multiple_of(SUM));
    assert!(rows <= stride && columns / 2 * stride <= matrix.pairs.len());
    assert!(groups.end * stride <= matrix.scales.len().min(matrix.biases.len()));
    assert!((1..=PANELS).contains(&x.len()) && apart >= rows * LANES);
    assert!(sums.len() >= (x.len() - 1) * apart + rows * LANES);
    for x in x {
        assert!(columns / 2 * LANES <= x.pairs.len() && columns / STEP * LANES <= x.scales.len());
        assert!(columns / SUM * LANES <= x.sums.len());
    }
    if !accumulate {
        for sums in sums.chunks_mut(apart).take(x.len()) {
            sums[..rows * LANES].fill(0.0);
        }
    }
    let task = IntegerTask {
        groups,
        columns: matrix.group,
        stride,
    };
    // SAFETY: `detect` makes these only where the processor has their instructions; rows and groups
    // are asserted.
    unsafe {
        match isa {
            Isa::Avx512 | Isa::Amx => {
                avx512::integer_tile::multiply(rows, &task, matrix, x, (sums, apart));
            }
            _ => avx2::integer_tile::multiply(rows, &task, matrix, x, (sums, apart)),
        }
    }
}
