//! Products of matrices and triangular parts.

use super::binary_ops;
use crate::array::Array;
use crate::call;
use crate::error::Result;

binary_ops! {
    /// Matrix product over the last two axes, broadcast over the others: `[.., m, k] x [.., k, n] ->
    /// [.., m, n]`.
    matmul = mlx_matmul;
    /// Sum of products over the last axes of both.
    inner = mlx_inner;
    /// All products of the flattened arrays: `[m] x [n] -> [m, n]`.
    outer = mlx_outer;
}

impl Array {
    /// `beta * self + alpha * (a x b)`.
    ///
    /// # Errors
    /// MLX's message when the shapes do not fit.
    pub fn addmm(&self, a: &Array, b: &Array, alpha: f32, beta: f32) -> Result<Array> {
        call::array("addmm", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_addmm(out, self.raw(), a.raw(), b.raw(), alpha, beta, s) }
        })
        .map_err(|e| e.with_inputs(&[self, a, b]))
    }

    /// The values on and below the `k`-th diagonal of the last two axes, zeros elsewhere.
    ///
    /// # Errors
    /// MLX's message for fewer than two axes.
    pub fn tril(&self, k: i32) -> Result<Array> {
        call::array("tril", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_tril(out, self.raw(), k, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The values on and above the `k`-th diagonal of the last two axes, zeros elsewhere.
    ///
    /// # Errors
    /// MLX's message for fewer than two axes.
    pub fn triu(&self, k: i32) -> Result<Array> {
        call::array("triu", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_triu(out, self.raw(), k, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }
}
