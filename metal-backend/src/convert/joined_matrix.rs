//! Matrices of experts that share a tensor in a checkpoint, as arrays.

use std::path::Path;

use inference::Result;
use mlx_rs_core::Array;

use super::joined;
use super::slice::Slice;
use super::tensor::{Stored, Tensor};
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorNames};
use crate::checkpoint::{Family, ModelConfig};

/// A matrix, or a stack of matrices of all experts, that is a part of a stored tensor.
#[derive(Debug, Clone)]
pub(crate) struct JoinedMatrix {
    /// The name as mlx-lm has it: `model.layers.0.mlp.switch_mlp.gate_proj.weight`.
    pub name: String,
    /// The usual name of the tensor that contains this matrix.
    pub tensor: String,
    slice: Slice,
    /// Whether this is a stack `[experts, out, in]` instead of one matrix `[out, in]`.
    is_stack: bool,
}

impl JoinedMatrix {
    /// Returns all such matrices of a checkpoint at `path`.
    ///
    /// # Errors
    /// If the shapes of the tensors that contain them do not match each other.
    pub(crate) fn all_of(
        (checkpoint, names): (&SafetensorsCheckpoint, &TensorNames),
        family: &Family,
        config: &ModelConfig,
        path: &Path,
    ) -> Result<Vec<Self>> {
        let tensor = |name: &str| {
            let info = checkpoint.info(names.stored(name)?)?;
            Some(Tensor {
                name: name.to_owned(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                stored: Stored::Safetensors,
            })
        };
        let tensors = names.all().filter_map(tensor).collect();
        let width = Some(config.intermediate_size);
        let parts = joined::separate(tensors, family.joined_experts, width, path)?;
        let joined = parts.into_iter().filter_map(|part| match part.stored {
            // Biases of experts have no slots, so that no adapter changes them.
            Stored::Slice { name, slice } if part.name.ends_with(".weight") => Some(Self {
                is_stack: part.shape.len() == 3,
                name: part.name,
                tensor: name,
                slice,
            }),
            _ => None,
        });
        Ok(joined.collect())
    }

    /// Returns the matrix or stack in the stored tensor `stored`.
    ///
    /// # Errors
    /// If `stored` has another shape than the checkpoint's tensor.
    pub(crate) fn read(&self, stored: &Array) -> mlx_rs_core::Result<Array> {
        let [start, stop, strides] = self.bounds(stored)?;
        let part = self.turned(&self.matrices(stored)?)?;
        let part = part.slice(&start, &stop, &strides)?;
        if self.is_stack {
            Ok(part)
        } else {
            part.squeeze_axis(0)
        }
    }

    /// Returns the stored tensor `stored`, with `part` in place of this matrix or stack.
    ///
    /// # Errors
    /// If a shape is not that of the checkpoint's tensor, or of this matrix.
    pub(crate) fn write(&self, stored: &Array, part: &Array) -> mlx_rs_core::Result<Array> {
        let [start, stop, strides] = self.bounds(stored)?;
        let part = match self.is_stack {
            true => part.clone(),
            false => part.expand_dims(0)?,
        };
        let all = self.turned(&self.matrices(stored)?)?;
        let all = all.slice_update(&part, &start, &stop, &strides)?;
        self.turned(&all)?.reshape(stored.shape())
    }

    /// Returns the stored tensor as a stack of matrices of the stored size.
    fn matrices(&self, stored: &Array) -> mlx_rs_core::Result<Array> {
        let (rows, cols) = self.slice.matrix;
        stored.reshape(&[-1, int(rows), int(cols)])
    }

    fn turned(&self, stack: &Array) -> mlx_rs_core::Result<Array> {
        match self.slice.transposed {
            true => stack.swap_axes(-1, -2),
            false => Ok(stack.clone()),
        }
    }

    /// Start, stop and strides of this matrix or stack in the stack of [`Self::turned`] matrices.
    fn bounds(&self, stored: &Array) -> mlx_rs_core::Result<[[i32; 3]; 3]> {
        let Slice {
            first,
            step,
            count,
            first_matrix,
            ..
        } = self.slice;
        let count_of = self.matrices(stored)?.dim(0)?;
        let last = match self.is_stack {
            true => count_of,
            false => int(first_matrix + 1),
        };
        let end = first + step * (count.max(1) - 1) + 1;
        Ok([
            [int(first_matrix), int(first), 0],
            [last, int(end), int(self.slice.width())],
            [1, int(step), 1],
        ])
    }
}

/// A dimension. The tensor was loaded, so that its dimensions are within an `i32`.
fn int(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}
