//! Multiplication of many rows in 8-bit integers, and the choice of instructions. `avx2` and
//! `avx512` have the tiles.

use crate::isa::Isa;
use crate::layout::byte_panel::{
    ByteColumns, ByteColumnsMut, BytePanel, CodeBytes, HALF, TileTask, UNIT,
};
use crate::layout::float_codes::{Codes, FP4_CODES};
use crate::layout::table::Table;
use crate::layout::tile::LANES;
use crate::simd::{avx2, avx512};
use std::ops::Range;

/// The number of input panels per pass over a matrix.
pub(crate) const PANELS: usize = 2;

/// The instruction that multiplies bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dot {
    /// `vpmaddubsw` of AVX2, which adds two products in 16 bits.
    Maddubs,
    /// `vpdpbusd` of AVX-VNNI, with 256 bits.
    Vnni256,
    /// `vpdpbusd` of AVX-512 VNNI.
    Vnni512,
}

impl Dot {
    /// The fastest instruction for `isa` on this processor; `None` for NEON and portable code.
    pub(crate) fn for_isa(isa: Isa) -> Option<Self> {
        match isa {
            Isa::Avx512 | Isa::Amx => Some(Self::Vnni512),
            Isa::Avx2 if is_x86_feature_detected!("avxvnni") => Some(Self::Vnni256),
            Isa::Avx2 => Some(Self::Maddubs),
            _ => None,
        }
    }

    /// The byte representation of codes that the instruction needs. `vpmaddubsw` saturates on the
    /// sum of two products of 255 and 127. So with this instruction, codes that can exceed 127 are
    /// signed.
    pub(crate) fn bytes(self, bits: u32, codes: Codes) -> CodeBytes {
        let wide = match codes {
            Codes::Table(table) => table == Table::Iq4,
            _ => bits == 8,
        };
        match self {
            Self::Maddubs if wide => CodeBytes::Signed,
            _ => CodeBytes::Unsigned,
        }
    }

    /// The maximum magnitude of these bytes.
    pub(crate) fn largest(self, bits: u32, codes: Codes) -> u8 {
        let signed = self.bytes(bits, codes) == CodeBytes::Signed;
        match codes {
            Codes::Integers if signed => 128,
            Codes::Integers => u8::MAX >> (8 - bits),
            Codes::Table(table) => {
                let offset = if signed { 0 } else { i16::from(table.offset()) };
                let bytes = table.integers().iter().map(|n| i16::from(*n) + offset);
                bytes.map(i16::unsigned_abs).max().unwrap_or(0) as u8
            }
            _ => FP4_CODES.into_iter().max().unwrap_or(u8::MAX),
        }
    }
}

/// Quantizes columns `[columns, LANES]`, with a scale per [`UNIT`] columns.
pub(crate) fn quantize(dot: Dot, columns: &[f32], to: ByteColumnsMut<'_>) {
    match dot {
        // SAFETY: only `Dot::for_isa` returns these, on processors with avx2 and fma.
        Dot::Maddubs | Dot::Vnni256 => unsafe { avx2::byte_tile::quantize(columns, to) },
        // SAFETY: only `Dot::for_isa` returns it, on processors with avx512f, avx512bw and
        // avx512vnni.
        Dot::Vnni512 => unsafe { avx512::byte_tile::quantize(columns, to) },
    }
}

/// Quantizes the residuals of `coarse` in units with large inputs, for columns `[columns, LANES]`.
/// Replaces the content of `refined` by the indices of those units. In `fine`, only those units are
/// written.
pub(crate) fn refine(
    dot: Dot,
    columns: &[f32],
    coarse: ByteColumns<'_>,
    fine: ByteColumnsMut<'_>,
    refined: &mut Vec<usize>,
) {
    match dot {
        // SAFETY: only `Dot::for_isa` returns these, on processors with avx2 and fma.
        Dot::Maddubs | Dot::Vnni256 => unsafe {
            avx2::byte_tile::refine(columns, coarse, fine, refined);
        },
        // SAFETY: only `Dot::for_isa` returns it, on processors with avx512f, avx512bw and
        // avx512vnni.
        Dot::Vnni512 => unsafe { avx512::byte_tile::refine(columns, coarse, fine, refined) },
    }
}

/// `sums[panel][row][lane] (+)= matrix[row] . x[panel][lane]` over some units of columns. Only the
/// first `rows` rows of the matrix are used. There are one or two panels, whose sums are `apart`
/// elements apart. Without `accumulate`, earlier sums are overwritten.
pub(crate) fn multiply(
    dot: Dot,
    rows: usize,
    units: Range<usize>,
    matrix: BytePanel<'_>,
    x: &[ByteColumns<'_>],
    (sums, apart): (&mut [f32], usize),
    accumulate: bool,
) {
    // All reads and writes of the tiles are within these bounds.
    let (columns, stride) = (units.end * UNIT, matrix.rows);
    let groups = columns.div_ceil(matrix.group);
    assert!(matrix.group == HALF || matrix.group.is_multiple_of(UNIT));
    assert!(rows <= stride && columns / 4 * stride <= matrix.quads.len());
    assert!(groups * stride <= matrix.scales.len().min(matrix.biases.len()));
    assert!((1..=PANELS).contains(&x.len()) && apart >= rows * LANES);
    assert!(sums.len() >= (x.len() - 1) * apart + rows * LANES);
    for x in x {
        assert!(columns / 4 * LANES <= x.quads.len() && columns / UNIT * LANES <= x.scales.len());
        assert!(columns / HALF * LANES <= x.sums.len());
    }
    if !accumulate {
        for sums in sums.chunks_mut(apart).take(x.len()) {
            sums[..rows * LANES].fill(0.0);
        }
    }
    let task = TileTask {
        units,
        group: matrix.group,
        stride,
    };
    // SAFETY: all bounds are asserted; `Dot::for_isa` checked the instruction set.
    unsafe {
        match dot {
            Dot::Vnni512 => avx512::byte_tile::multiply(rows, &task, matrix, x, (sums, apart)),
            Dot::Vnni256 => avx2::byte_tile::multiply_vnni(rows, &task, matrix, x, (sums, apart)),
            Dot::Maddubs => avx2::byte_tile::multiply(rows, &task, matrix, x, (sums, apart)),
        }
    }
}
