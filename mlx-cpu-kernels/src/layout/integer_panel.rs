//! Operands of products of many rows in 16-bit integers: rows of inputs and rows of a matrix, in
//! the order in which the kernel reads them. Types and index functions only.

/// Columns of inputs that share a scale in each row: a large input leaves others precise.
pub(crate) const STEP: usize = 8;

/// Columns of inputs that are summed: the smallest group of a matrix.
pub(crate) const SUM: usize = 16;

/// Rows of inputs, as many as a tile has lanes.
#[derive(Clone, Copy)]
pub(crate) struct InputColumns<'a> {
    /// Two columns in each number, `[columns / 2, LANES]`.
    pub pairs: &'a [i32],
    /// Scales of the integers, `[columns / STEP, LANES]`.
    pub scales: &'a [f32],
    /// Sums of the rounded inputs, `[columns / SUM, LANES]`.
    pub sums: &'a [f32],
}

/// [`InputColumns`] while they are made.
pub(crate) struct InputColumnsMut<'a> {
    pub pairs: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

/// Some rows of a quantized matrix: `w = scale * q + bias`, group after group.
#[derive(Clone, Copy)]
pub(crate) struct CodePanel<'a> {
    /// Two codes of a row in each number, `[columns / 2, rows]`.
    pub pairs: &'a [i32],
    /// `[groups, rows]`.
    pub scales: &'a [f32],
    /// `[groups, rows]`.
    pub biases: &'a [f32],
    /// Rows.
    pub rows: usize,
    /// Columns of a group, a multiple of [`SUM`].
    pub group: usize,
}

/// [`CodePanel`] while it is made.
pub(crate) struct CodePanelMut<'a> {
    pub pairs: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub biases: &'a mut [f32],
}
