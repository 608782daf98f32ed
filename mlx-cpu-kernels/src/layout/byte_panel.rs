//! Operands of many-row multiplications in 8-bit integers: input rows and matrix rows, in the order
//! in which kernels read them. This file has only types and index functions.

use std::ops::Range;

/// The number of input columns that share a scale in each row.
pub(crate) const UNIT: usize = 32;

/// The number of input columns per sum. It equals the smallest group size.
pub(crate) const HALF: usize = UNIT / 2;

/// The maximum magnitude of an input as an integer.
pub(crate) const MAX_BYTE: f32 = 127.0;

/// Input rows, one per lane of a tile.
#[derive(Clone, Copy)]
pub(crate) struct ByteColumns<'a> {
    /// Integers of four columns per element, `[columns / 4, LANES]`.
    pub quads: &'a [i32],
    /// Scales of the integers, `[columns / UNIT, LANES]`.
    pub scales: &'a [f32],
    /// Sums of the rounded inputs, `[columns / HALF, LANES]`.
    pub sums: &'a [f32],
}

/// [`ByteColumns`] during preparation.
pub(crate) struct ByteColumnsMut<'a> {
    pub quads: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

impl ByteColumnsMut<'_> {
    /// Reborrows for a shorter lifetime.
    pub fn reborrow(&mut self) -> ByteColumnsMut<'_> {
        ByteColumnsMut {
            quads: self.quads,
            scales: self.scales,
            sums: self.sums,
        }
    }

    /// Borrows the panel for reading.
    pub fn as_ref(&self) -> ByteColumns<'_> {
        ByteColumns {
            quads: self.quads,
            scales: self.scales,
            sums: self.sums,
        }
    }
}

/// How codes are represented as bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeBytes {
    /// From 0 to 255.
    Unsigned,
    /// From -128 to 127: the code minus 128, or an integer from a table.
    Signed,
}

/// Rows of a quantized matrix: `w = scale * byte + bias`, with a scale and bias per group.
#[derive(Clone, Copy)]
pub(crate) struct BytePanel<'a> {
    /// The codes, `[columns / 4, rows]`. An element holds four adjacent codes of a row.
    pub quads: &'a [i32],
    /// The scales, `[groups, rows]`.
    pub scales: &'a [f32],
    /// The biases, `[groups, rows]`.
    pub biases: &'a [f32],
    /// The number of rows.
    pub rows: usize,
    /// The group size: [`HALF`], or a multiple of [`UNIT`].
    pub group: usize,
    /// The representation of codes.
    pub bytes: CodeBytes,
    /// The maximum magnitude of a byte.
    pub largest: u8,
}

/// [`BytePanel`] during preparation.
pub(crate) struct BytePanelMut<'a> {
    pub quads: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub biases: &'a mut [f32],
}

/// The parameters shared by all tiles of a product.
pub(crate) struct TileTask {
    /// The range of units, with [`UNIT`] columns each.
    pub units: Range<usize>,
    /// The group size of the matrix.
    pub group: usize,
    /// The number of rows in the matrix's panel.
    pub stride: usize,
}
