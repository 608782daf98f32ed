//! Operands of many-row multiplications in 16-bit integers: input rows and matrix rows, in the
//! order in which the kernel reads them. This file has only types and index functions.

use crate::layout::input_panel::INPUTS_PER_SCALE;

/// The number of input columns of a row that share a scale, and the smallest group size of a
/// matrix. It is small, so that a large input affects the precision of few other inputs.
pub(crate) const STEP: usize = INPUTS_PER_SCALE;

/// The two columns of element `i` of the pairs of a step: a column and the column four later. A
/// shift of a word moves such a pair of codes into 16-bit lanes.
pub(crate) const fn paired_columns(i: usize) -> [usize; 2] {
    let first = i / 4 * 8 + i % 4;
    [first, first + 4]
}

/// Input rows, one per lane of a tile.
#[derive(Clone, Copy)]
pub(crate) struct InputColumns<'a> {
    /// Integers of two columns per element, `[columns / 2, LANES]`; see [`paired_columns`].
    pub pairs: &'a [i32],
    /// Scales of the integers, `[columns / STEP, LANES]`.
    pub scales: &'a [f32],
    /// Sums of the rounded inputs, `[columns / STEP, LANES]`.
    pub sums: &'a [f32],
}

/// [`InputColumns`] during preparation.
pub(crate) struct InputColumnsMut<'a> {
    pub pairs: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub sums: &'a mut [f32],
}

/// Rows of a quantized matrix: `w = scale * q + bias`, with a scale and a bias per group. If scales
/// are bytes times a float, the integers are codes times bytes, and a float is the scale of the
/// groups that share it.
#[derive(Clone, Copy)]
pub(crate) struct CodePanel<'a> {
    /// Two integers of a row per element, `[row blocks, columns / 2, INTERLEAVED_ROWS]`; see
    /// [`paired_columns`]. So a tile reads memory sequentially.
    pub pairs: &'a [i32],
    /// The scales, `[columns / group, rows]`.
    pub scales: &'a [f32],
    /// The biases, `[columns / group * biases_per_scale, rows]`.
    pub biases: &'a [f32],
    /// The number of rows, in whole row blocks.
    pub rows: usize,
    /// The number of columns of `pairs`.
    pub columns: usize,
    /// The number of columns per scale, a multiple of [`STEP`].
    pub group: usize,
    /// The number of biases per scale. They apply to equal parts of the group; 0 if there are none.
    /// One bias is added after the product of scale and integers, several are added before it.
    pub biases_per_scale: usize,
}

impl CodePanel<'_> {
    /// Asserts that the panel has scales and biases of its first `groups` groups, and that each
    /// bias applies to whole steps.
    pub(crate) fn assert_groups(&self, groups: usize) {
        assert!(groups * self.rows <= self.scales.len());
        assert!(groups * self.rows * self.biases_per_scale <= self.biases.len());
        assert!(
            self.group
                .is_multiple_of(STEP * self.biases_per_scale.max(1))
        );
    }
}

/// [`CodePanel`] during preparation.
pub(crate) struct CodePanelMut<'a> {
    pub pairs: &'a mut [i32],
    pub scales: &'a mut [f32],
    pub biases: &'a mut [f32],
}

impl CodePanelMut<'_> {
    /// Reborrows for a shorter lifetime.
    pub(crate) fn reborrow(&mut self) -> CodePanelMut<'_> {
        CodePanelMut {
            pairs: self.pairs,
            scales: self.scales,
            biases: self.biases,
        }
    }
}
