//! The formats of packed matrices that the kernels support, and the arrays that store a matrix.

use std::sync::Arc;

use mlx_cpu_kernels::{Input, ScaleFormat};

use super::host_op::input_of;
use crate::array::Array;
use crate::closure;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::QuantMode;

/// Whether the kernels support codes of `bits` bits in groups of this size with these scales.
pub(super) fn takes(scales: ScaleFormat, bits: i32, group: i32) -> bool {
    let groups = u32::try_from(bits).map_or(&[][..], |bits| scales.groups(bits));
    usize::try_from(group).is_ok_and(|group| groups.contains(&group))
}

/// The number of words per row of `k` codes in MLX's packing.
pub(super) fn words_of(k: i32, bits: i32) -> i32 {
    (k / 32).saturating_mul(bits)
}

/// The bits and group size of a mode whose codes are floats; `None` for affine mode.
pub(super) fn float_format(mode: QuantMode) -> Option<(i32, i32)> {
    match mode {
        QuantMode::Affine => None,
        QuantMode::Mxfp4 => Some((4, 32)),
        QuantMode::Mxfp8 => Some((8, 32)),
        QuantMode::Nvfp4 => Some((4, 16)),
    }
}

/// The arrays of a quantized matrix.
#[derive(Debug)]
pub(super) struct MatrixArrays {
    /// Packed codes `[row blocks, words, 8]`, scales and optional biases `[row blocks, groups, 8]`.
    pub(super) arrays: Vec<Array>,
    /// The addresses of the arrays' elements.
    pub inputs: [Input; 3],
}

// SAFETY: the addresses are those of the arrays' elements. They stay valid while the arrays are
// kept, and nothing writes the elements.
unsafe impl Send for MatrixArrays {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for MatrixArrays {}

impl MatrixArrays {
    pub(super) fn new(arrays: Vec<Array>) -> Result<Arc<Self>> {
        let (words, scales, biases) = match arrays.as_slice() {
            [words, scales] => (words, scales, scales),
            [words, scales, biases] => (words, scales, biases),
            _ => return Err(lost()),
        };
        // SAFETY: `Self` keeps the arrays as long as the inputs.
        let inputs = unsafe { [input_of(words)?, input_of(scales)?, input_of(biases)?] };
        Ok(Arc::new(Self { arrays, inputs }))
    }
}

impl Drop for MatrixArrays {
    /// Drops the arrays through `part_with`, because a thread of MLX may free an operation that
    /// keeps them.
    fn drop(&mut self) {
        closure::part_with(std::mem::take(&mut self.arrays));
    }
}

/// The error for an array whose shape is not that of a part.
pub(super) fn lost() -> Error {
    Error::new(ErrorKind::Mlx, "cpu::QuantizedMatrix", "an axis was lost")
}
