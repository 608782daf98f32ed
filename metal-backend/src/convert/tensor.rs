//! A tensor of the source checkpoint: name, shape and storage, without data.

use safetensors::Dtype;

use super::FloatType;
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
    Gguf {
        name: String,
        kind: GgmlType,
        /// The number of heads whose rows GGUF permutes; `None` if the rows are not permuted.
        permuted: Option<usize>,
        /// Whether the stored values are too large by one: conversion to GGUF adds the 1 of `1 +
        /// weight`.
        minus_one: bool,
        /// The half of each expert's rows that this tensor has, if the file joins two stacks.
        half: Option<Half>,
    },
}

/// A half of the rows of each matrix of a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    First,
    Second,
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

    /// Whether all rows must be read at once.
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
