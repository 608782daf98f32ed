//! A tensor of the source checkpoint: name, shape and storage, without data.

use safetensors::Dtype;

use super::float_type::FloatType;
use super::slice::Slice;
use crate::checkpoint::gguf::GgmlType;

/// A tensor of the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    /// The name in transformers.
    pub name: String,
    /// The type of the elements as read. For GGUF blocks, this is the type of the dequantized
    /// values.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub stored: Stored,
}

/// How a tensor is stored.
#[derive(Debug, Clone)]
pub(super) enum Stored {
    Safetensors,
    /// Rows of a stored stack in safetensors.
    Slice {
        name: String,
        slice: Slice,
    },
    Gguf {
        name: String,
        kind: GgmlType,
        /// The number of heads whose rows GGUF permutes; `None` if the rows are not permuted.
        permuted: Option<usize>,
        /// How the values differ from those of a directory.
        values: Values,
        /// The row of the stored tensor at which this one begins.
        first_row: usize,
        /// The rows of each expert that this tensor has, if the file joins two stacks.
        slice: Option<Slice>,
    },
}

/// How the values of a GGUF file differ from those of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// The values are equal.
    Same,
    /// The values in GGUF are greater by one: the conversion adds the 1 of `1 + weight`.
    PlusOne,
    /// The values in GGUF are `-exp(value)`.
    NegatedExponentials,
}

impl Values {
    /// The value of a directory.
    pub(super) fn of_directory(self, x: f32) -> f32 {
        match self {
            Self::Same => x,
            Self::PlusOne => x - 1.0,
            Self::NegatedExponentials => (-x).ln(),
        }
    }
}

impl Tensor {
    /// Rows (the product of all axes but the last) and columns.
    pub(super) fn rows_and_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        let rows = self.shape.iter().rev().skip(1).product();
        (rows, cols)
    }

    /// The element type as a float type; `None` if the conversion does not compute with this type.
    pub(super) fn float(&self) -> Option<FloatType> {
        match self.dtype {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::BF16 => Some(FloatType::BF16),
            _ => None,
        }
    }

    /// The number of rows to read at once, of which about `wanted` are wanted.
    pub(super) fn rows_at_once(&self, wanted: usize) -> usize {
        let (rows, _) = self.rows_and_cols();
        match &self.stored {
            Stored::Gguf {
                permuted: Some(_), ..
            } => rows,
            // Each part of a matrix is read with the whole matrix.
            Stored::Slice { slice, .. } if slice.reads_matrices() => {
                wanted.next_multiple_of(slice.count.max(1)).min(rows)
            }
            _ => wanted.clamp(1, rows.max(1)),
        }
    }
}
