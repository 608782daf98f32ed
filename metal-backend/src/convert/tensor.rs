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
        /// How the stored values differ from a directory's values.
        values: Values,
        /// The row of the stored tensor at which this tensor begins.
        first_row: usize,
        /// The rows of each expert that this tensor has, if the file joins two stacks.
        slice: Option<Slice>,
    },
}

/// How a GGUF file's values differ from a directory's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    /// The values are equal.
    Same,
    /// GGUF stores `1 + weight`.
    PlusOne,
    /// GGUF stores `-exp(value)`.
    NegatedExponentials,
}

impl Values {
    /// Converts a stored value to a directory's value.
    pub(super) fn of_directory(self, x: f32) -> f32 {
        match self {
            Self::Same => x,
            Self::PlusOne => x - 1.0,
            Self::NegatedExponentials => (-x).ln(),
        }
    }
}

impl Tensor {
    /// Returns rows (the product of all axes but the last) and columns.
    pub(super) fn rows_and_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        let rows = self.shape.iter().rev().skip(1).product();
        (rows, cols)
    }

    /// Returns the element type as a float type; `None` if the conversion does not compute with it.
    pub(super) fn float(&self) -> Option<FloatType> {
        match self.dtype {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::BF16 => Some(FloatType::BF16),
            _ => None,
        }
    }

    /// Returns the number of rows to read at once, near `wanted`.
    pub(super) fn rows_at_once(&self, wanted: usize) -> usize {
        let (rows, _) = self.rows_and_cols();
        match &self.stored {
            Stored::Gguf {
                permuted: Some(_), ..
            } => rows,
            // Reading any row reads the complete matrix, so whole matrices are converted at once.
            Stored::Slice { slice, .. } if slice.reads_matrices() => {
                wanted.next_multiple_of(slice.count.max(1)).min(rows)
            }
            _ => wanted.clamp(1, rows.max(1)),
        }
    }
}
