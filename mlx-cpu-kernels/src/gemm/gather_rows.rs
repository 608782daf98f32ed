//! Rows of a quantized matrix by their numbers, as float32.

use crate::gemm::product::{Held, Size};
use crate::layout::packed::Bands;
use crate::work::{Input, Work};

/// Rows of a quantized matrix by their numbers. Its inputs are the numbers, of 32 bits, and the matrix
/// unless it is held. A number beyond the matrix takes the row at that end.
pub struct Taken {
    /// How many.
    pub count: usize,
    /// Whether the numbers are signed.
    pub signed: bool,
    /// Of the matrix.
    pub size: Size,
    /// Of a number: 4 or 8.
    pub bits: u32,
    /// Of a row.
    pub groups: usize,
    /// Whether scales and biases are float16.
    pub half: bool,
    /// The matrix, unless it is among the inputs.
    pub held: Option<Held>,
}

impl Work for Taken {
    fn outputs(&self) -> usize {
        self.count * self.size.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Some((ids, matrix)) = inputs.split_first() else {
            return;
        };
        let matrix = self.held.as_ref().map_or(matrix, Held::inputs);
        // SAFETY: `take_rows` gave arrays of these types, in this order.
        let (ids, bands) = unsafe {
            let packing = (self.bits, self.groups, self.half);
            (ids.as_slice::<u32>(), Bands::of(matrix, packing))
        };
        for (id, out) in ids.iter().zip(output.chunks_exact_mut(self.size.k)) {
            let id = match id.cast_signed() {
                id if self.signed => id.max(0).cast_unsigned(),
                _ => *id,
            };
            let row = usize::try_from(id)
                .unwrap_or(usize::MAX)
                .min(self.size.n - 1);
            bands.row(row, out);
        }
    }
}
