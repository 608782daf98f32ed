//! Rows of a matrix by index, as float32: the embedding lookup.

use crate::gemm::dense::{DenseType, DenseView};
use crate::gemm::product::{Size, StoredMatrix};
use crate::isa::Isa;
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
        for (row, out) in rows_of(ids, self.signed, self.size).zip(rows_mut(output, self.size)) {
            matrix.dequantize_row(row, out);
        }
    }
}

/// Returns rows of a stored dense matrix by index. The input is the array of 32-bit indices. An
/// index out of range selects the nearest row.
pub struct GatherDenseRows {
    /// The number of indices.
    pub count: usize,
    /// Whether the indices are signed.
    pub signed: bool,
    /// The size of the matrix.
    pub size: Size,
    /// The type of the elements.
    pub number: DenseType,
    /// The matrix.
    pub stored: StoredMatrix,
    /// The instruction set.
    pub isa: Isa,
}

impl Work for GatherDenseRows {
    fn outputs(&self) -> usize {
        self.count * self.size.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let Some(ids) = inputs.first() else {
            return;
        };
        // SAFETY: the caller passes indices, and stores a matrix of this type.
        let (ids, matrix) = unsafe {
            let matrix = DenseView::new(self.number, self.stored.inputs().first());
            (ids.as_slice::<u32>(), matrix)
        };
        for (row, out) in rows_of(ids, self.signed, self.size).zip(rows_mut(output, self.size)) {
            matrix.to_f32(self.isa, row * self.size.k, out);
        }
        if !self.stored.is_intact() {
            output.fill(f32::NAN);
        }
    }
}

/// The rows of the indices.
fn rows_of(ids: &[u32], signed: bool, size: Size) -> impl Iterator<Item = usize> {
    ids.iter().map(move |id| {
        let id = match id.cast_signed() {
            id if signed => id.max(0).cast_unsigned(),
            _ => *id,
        };
        usize::try_from(id).unwrap_or(usize::MAX).min(size.n - 1)
    })
}

fn rows_mut(output: &mut [f32], size: Size) -> impl Iterator<Item = &mut [f32]> {
    output.chunks_exact_mut(size.k)
}
