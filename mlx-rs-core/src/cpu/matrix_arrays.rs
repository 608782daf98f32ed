//! The arrays of a quantized matrix, with the addresses of their elements.

use std::fmt;
use std::sync::Arc;

use mlx_cpu_kernels::{Input, MatrixOwner};

use super::host_op::input_of;
use crate::array::Array;
use crate::closure;
use crate::error::{Error, ErrorKind, Result};

/// The arrays of a quantized matrix. Their values may be missing until
/// [`Pending::wait`](super::deferred::Pending::wait) returns.
pub(super) struct MatrixArrays {
    /// Packed codes `[row blocks, words, 8]`, scales and optional biases `[row blocks, groups, 8]`.
    pub arrays: Vec<Array>,
    /// The addresses of the arrays' elements.
    pub inputs: [Input; 3],
}

// SAFETY: the addresses are those of the arrays' elements. They stay valid while the arrays are
// kept. Nothing writes the elements but the job of a `Pending`, which all readers wait for.
unsafe impl Send for MatrixArrays {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for MatrixArrays {}

impl MatrixArrays {
    pub(super) fn new(arrays: Vec<Array>) -> Result<Arc<Self>> {
        let (words, scales, biases) = match arrays.as_slice() {
            [words, scales] => (words, scales, scales),
            [words, scales, biases] => (words, scales, biases),
            _ => {
                let message = format!("{} arrays are no matrix", arrays.len());
                return Err(Error::new(ErrorKind::Mlx, "cpu::QuantizedMatrix", message));
            }
        };
        // SAFETY: `Self` keeps the arrays as long as the inputs.
        let inputs = unsafe { [input_of(words)?, input_of(scales)?, input_of(biases)?] };
        Ok(Arc::new(Self { arrays, inputs }))
    }
}

impl MatrixOwner for MatrixArrays {}

impl fmt::Debug for MatrixArrays {
    /// Never prints values, which may be missing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let described = |a: &Array| format!("{:?} {}", a.shape(), a.dtype());
        f.debug_list()
            .entries(self.arrays.iter().map(described))
            .finish()
    }
}

impl Drop for MatrixArrays {
    /// Drops the arrays through `part_with`, because a thread of MLX may free an operation that
    /// keeps them.
    fn drop(&mut self) {
        closure::part_with(std::mem::take(&mut self.arrays));
    }
}
