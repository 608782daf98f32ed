//! A tensor of the checkpoint that is converted: its name, shape and storage, without its numbers.

use safetensors::Dtype;

use super::FloatType;
use crate::checkpoint::gguf::GgmlType;

/// A tensor of the checkpoint.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    /// As transformers names it.
    pub name: String,
    /// Of its elements as they are read; for GGUF blocks that of their numbers.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub stored: Stored,
}

/// How a tensor is stored.
#[derive(Debug, Clone)]
pub(super) enum Stored {
    Safetensors,
    Gguf {
        name: String,
        kind: GgmlType,
        /// Heads whose rows are in another order.
        permuted: Option<usize>,
        /// Its numbers are one too large: converters add the one of `1 + weight`.
        minus_one: bool,
    },
}

impl Tensor {
    /// Rows (all axes but the last together) and columns.
    pub(super) fn rows_and_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        let rows = self.shape.iter().rev().skip(1).product();
        (rows, cols)
    }

    /// Its float type, if it has one that we compute with.
    pub(super) fn float(&self) -> Option<FloatType> {
        match self.dtype {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::BF16 => Some(FloatType::BF16),
            _ => None,
        }
    }

    /// Whether rows can only be read all together.
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
