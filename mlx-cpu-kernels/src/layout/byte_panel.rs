//! Operands of products of many rows in 8-bit integers: rows of inputs and rows of a matrix, in
//! the order in which the kernels read them. Types and index functions only.

use std::ops::Range;

/// Columns of inputs that share a scale in each row.
pub(crate) const UNIT: usize = 32;

/// Columns of inputs that are summed: the smallest group of a matrix.
pub(crate) const HALF: usize = UNIT / 2;

/// The largest integer of an input.
pub(crate) const MAX_BYTE: f32 = 127.0;

/// Rows of inputs, as many as a tile has lanes.
#[derive(Clone, Copy)]
pub(crate) struct ByteColumns<'a> {
    /// Four columns in each number, `[columns / 4, LANES]`.
    pub quads: &'a [i32],
    /// Scales of the integers, `[columns / UNIT, LANES]`.
    pub scales: &'a [f32],
    /// Sums of the rounded inputs, `[columns / HALF, LANES]`.
    pub sums: &'a [f32],
}

/// [`ByteColumns`] while they are made.
pub(crate) struct ByteColumnsMut<'a> {
    pub quads: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

impl ByteColumnsMut<'_> {
    /// The same, for a while.
    pub fn reborrow(&mut self) -> ByteColumnsMut<'_> {
        ByteColumnsMut {
            quads: self.quads,
            scales: self.scales,
            sums: self.sums,
        }
    }

    /// The same, to read.
    pub fn as_ref(&self) -> ByteColumns<'_> {
        ByteColumns {
            quads: self.quads,
            scales: self.scales,
            sums: self.sums,
        }
    }
}

/// How the codes of a matrix become bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodeBytes {
    /// From 0 to 255.
    Unsigned,
    /// From -128 to 127: the code less 128, or the integer of a table.
    Signed,
}

/// Some rows of a quantized matrix: `w = scale * byte + bias`, group after group.
#[derive(Clone, Copy)]
pub(crate) struct BytePanel<'a> {
    /// Four codes of a row in each number, `[columns / 4, rows]`.
    pub quads: &'a [i32],
    /// `[groups, rows]`.
    pub scales: &'a [f32],
    /// `[groups, rows]`.
    pub biases: &'a [f32],
    /// Rows.
    pub rows: usize,
    /// Columns of a group: [`HALF`], or a multiple of [`UNIT`].
    pub group: usize,
    /// What the bytes are.
    pub bytes: CodeBytes,
    /// The largest magnitude of a byte.
    pub largest: u8,
}

/// [`BytePanel`] while it is made.
pub(crate) struct BytePanelMut<'a> {
    pub quads: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub biases: &'a mut [f32],
}

/// What all tiles of a product have in common.
pub(crate) struct TileTask {
    /// Units of [`UNIT`] columns.
    pub units: Range<usize>,
    /// Columns of a group of the matrix.
    pub group: usize,
    /// Rows of the matrix's panel.
    pub stride: usize,
}
