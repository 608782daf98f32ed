//! A tensor of the source checkpoint: its name, shape and storage, without its data.

use safetensors::Dtype;

use super::FloatType;
use crate::checkpoint::gguf::GgmlType;

/// A tensor of the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    /// The name in transformers.
    pub name: String,
    /// The type of its elements when read; for GGUF blocks, of their dequantized values.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub stored: Stored,
}

/// The storage of a tensor.
#[derive(Debug, Clone)]
pub(super) enum Stored {
    Safetensors,
    Gguf {
        name: String,
        kind: GgmlType,
        /// The number of heads, if their rows are permuted.
        permuted: Option<usize>,
        /// Whether its values are one too large, because conversion added the one of `1 + weight`.
        minus_one: bool,
    },
}

impl Tensor {
    /// Rows (the product of all axes but the last) and columns.
    pub(super) fn rows_and_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        let rows = self.shape.iter().rev().skip(1).product();
        (rows, cols)
    }

    /// The float type, if we compute with it.
    pub(super) fn float(&self) -> Option<FloatType> {
        match self.dtype {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::BF16 => Some(FloatType::BF16),
            _ => None,
        }
    }

    /// Whether all rows must be read together.
    pub(super) fn is_indivisible(&self) -> bool {
        matches!(
            self.stored,
            Stored::Gguf {
                permuted: Some(_),
                ..
            }
        )
    }
}
