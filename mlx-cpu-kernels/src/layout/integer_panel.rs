//! Operands of products of many rows in 16-bit integers: rows of inputs and rows of a matrix, in
//! the order in which the kernel reads them. Types and index functions only.

use crate::layout::tile::LANES;

/// The most columns that share an input scale. A matrix with smaller groups has fewer.
pub(crate) const MAX_STEP: usize = 32;

/// The fewest: the smallest group.
pub(crate) const MIN_STEP: usize = 16;

/// Numbers of a panel for each step: scales, outliers and sums, each for [`LANES`] rows.
pub(crate) const FACTORS: usize = 3 * LANES;

/// [`LANES`] rows of inputs. The columns of a step share a scale for each row, without one of them:
/// the column with the largest input is the step's outlier. It stays float32, so it does not make
/// the others coarse.
#[derive(Clone, Copy)]
pub(crate) struct InputColumns<'a> {
    /// Two columns in each number, `[columns / 2, LANES]`; zeros for an outlier.
    pub pairs: &'a [i32],
    /// `[steps, 3, LANES]`: the scale of the integers, the outlier, and the sum of all of them.
    pub factors: &'a [f32],
    /// The outlier's column in its step.
    pub outliers: &'a [u32],
}

/// [`InputColumns`] while they are made.
pub(crate) struct InputColumnsMut<'a> {
    pub pairs: &'a mut [i32],
    pub factors: &'a mut [f32],
    pub outliers: &'a mut [u32],
}

/// Some rows of a quantized matrix: `w = scale * q + bias`, step after step.
#[derive(Clone, Copy)]
pub(crate) struct CodePanel<'a> {
    /// Two codes of a row in each number, `[columns / 2, rows]`.
    pub pairs: &'a [i32],
    /// `[steps, rows]`.
    pub scales: &'a [f32],
    /// `[steps, rows]`.
    pub biases: &'a [f32],
    /// Rows.
    pub rows: usize,
}

/// [`CodePanel`] while it is made.
pub(crate) struct CodePanelMut<'a> {
    pub pairs: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub biases: &'a mut [f32],
}
