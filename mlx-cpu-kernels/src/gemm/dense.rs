//! Dense matrices: float32, float16 or bfloat16. 16-bit elements are converted exactly to float32,
//! a few at a time. So results equal those of a float32 matrix with the same values.

use std::ops::Range;

use crate::isa::Isa;
pub use crate::layout::dense::DenseType;
pub(crate) use crate::layout::dense::DenseView;
use crate::partition::OutputBlock;
use crate::simd::{dense_rows, portable, vmath};

impl DenseView<'_> {
    /// Converts elements to float32, beginning with element `from`, until `to` is full.
    pub(crate) fn to_f32(self, isa: Isa, from: usize, to: &mut [f32]) {
        let all = from..from + to.len();
        match self {
            Self::F32(elements) => to.copy_from_slice(&elements[all]),
            Self::F16(elements) => vmath::f16_to_f32(isa, &elements[all], to),
            Self::Bf16(elements) => portable::vmath::bf16_to_f32(&elements[all], to),
        }
    }

    /// The dot products of matrix rows `rows`, with `k` elements each, with each `x`: `out[i][row]
    /// = matrix[row] . x[i]`.
    pub(crate) fn multiply_rows(
        self,
        isa: Isa,
        rows: Range<usize>,
        x: &[&[f32]],
        out: &mut OutputBlock<'_>,
    ) {
        let k = x.first().map_or(0, |x| x.len());
        let matrix = self.slice(rows.start * k..rows.end * k);
        dense_rows::multiply(isa, matrix, x, out);
    }
}
