//! Rows of a quantized matrix by index, as float32: the embedding lookup.

use crate::gemm::product::{Size, StoredMatrix};
use crate::layout::packed::{PackedMatrix, ScaleFormat};
use crate::work::{Input, Work};

/// Returns rows of a quantized matrix by index. The inputs are the 32-bit indices, and the matrix
/// unless the operation stores it. An index out of range selects the nearest row.
pub struct GatherRows {
    /// The number of indices.
    pub count: usize,
    /// Whether the indices are signed.
    pub signed: bool,
    /// The size of the matrix.
    pub size: Size,
    /// Bits per code: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// Groups per row.
    pub groups: usize,
    /// The format of scales and biases.
    pub scales: ScaleFormat,
    /// The matrix, unless it is among the inputs.
    pub stored: Option<StoredMatrix>,
}

impl Work for GatherRows {
    fn outputs(&self) -> usize {
        self.count * self.size.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Some((ids, matrix)) = inputs.split_first() else {
            return;
        };
        let matrix = self.stored.as_ref().map_or(matrix, StoredMatrix::inputs);
        // SAFETY: `take_rows` passes arrays of these types, in this order.
        let (ids, matrix) = unsafe {
            let packing = (self.bits, self.groups, self.scales);
            (
                ids.as_slice::<u32>(),
                PackedMatrix::from_inputs(matrix, packing),
            )
        };
        for (id, out) in ids.iter().zip(output.chunks_exact_mut(self.size.k)) {
            let id = match id.cast_signed() {
                id if self.signed => id.max(0).cast_unsigned(),
                _ => *id,
            };
            let row = usize::try_from(id)
                .unwrap_or(usize::MAX)
                .min(self.size.n - 1);
            matrix.dequantize_row(row, out);
        }
    }
}
