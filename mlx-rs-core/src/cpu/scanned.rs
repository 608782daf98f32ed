//! The output of a recurrence's kernel: the outputs of all positions, then the state after them.

use crate::array::Array;
use crate::error::Result;

/// The shapes of outputs and of a state that are stored in one array.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scanned<'a> {
    /// The shape of the outputs.
    pub outputs: &'a [i32],
    /// The shape of the state.
    pub state: &'a [i32],
}

impl Scanned<'_> {
    /// The number of elements of the outputs, and of outputs and state together. `None` if an array
    /// cannot hold them.
    pub(super) fn sizes(&self) -> Option<(i32, i32)> {
        let count = |shape: &[i32]| shape.iter().fold(1i64, |n, &d| n.saturating_mul(d.into()));
        let outputs = count(self.outputs);
        let total = outputs.saturating_add(count(self.state));
        Some((i32::try_from(outputs).ok()?, i32::try_from(total).ok()?))
    }

    /// Divides the array. `outputs` and `total` are those of [`Scanned::sizes`].
    pub(super) fn divide(
        &self,
        all: &Array,
        (outputs, total): (i32, i32),
        length: i32,
    ) -> Result<(Array, Array)> {
        let y = all.slice_axis(0, 0, outputs)?.reshape(self.outputs)?;
        let after = all.slice_axis(0, outputs, total)?.reshape(self.state)?;
        // With several positions the state is copied, because a view would keep the outputs of all
        // positions in memory.
        match length {
            1 => Ok((y, after)),
            _ => Ok((y, after.contiguous()?)),
        }
    }
}
