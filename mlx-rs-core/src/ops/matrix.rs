//! Products of matrices, diagonals and triangular parts.
//!
//! ```
//! use mlx_rs_core::Array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! assert_eq!(a.matmul(&a)?.to_vec::<f32>()?, [7.0, 10.0, 15.0, 22.0]);
//! assert_eq!(a.diag(0)?.to_vec::<f32>()?, [1.0, 4.0]);
//! assert_eq!(a.tril(0)?.to_vec::<f32>()?, [1.0, 0.0, 3.0, 4.0]);
//! # Ok(()) }
//! ```

use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::{call, compat};

impl Array {
    /// Matrix multiplication over the last two axes, broadcast over the others: `[.., m, k] x [..,
    /// k, n] -> [.., m, n]`. The result is zeros where `k` is 0.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1.0, 2.0], [3.0, 4.0]])?;
    /// assert_eq!(a.matmul(&array!([[1.0], [10.0]])?)?.to_vec::<f32>()?, [21.0, 43.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast or the types do not fit.
    #[doc(alias = "mlx_matmul")]
    pub fn matmul(&self, other: &Array) -> Result<Array> {
        call::array("matmul", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_matmul(out, self.raw(), other.raw(), s) }
        })
        .and_then(|product| product.unless_of_nothing(&[self, other]))
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// The sums of products over the last axis of each array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.0, 2.0])?.inner(&array!([3.0, 4.0])?)?.item::<f32>()?, 11.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the lengths differ.
    #[doc(alias = "mlx_inner")]
    pub fn inner(&self, other: &Array) -> Result<Array> {
        call::array("inner", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_inner(out, self.raw(), other.raw(), s) }
        })
        .and_then(|product| product.unless_of_nothing(&[self, other]))
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Returns `self`, or zeros if an operand is empty. MLX must not compute such a product. On the
    /// CPU, MLX copies a matrix with an uncommon layout. For an empty product, it frees the copy
    /// while its own thread still writes it. For packed matrices, it divides by the number of rows.
    pub(crate) fn unless_of_nothing(self, operands: &[&Array]) -> Result<Array> {
        if self.size() > 0 && operands.iter().all(|a| a.size() > 0) {
            return Ok(self);
        }
        super::zeros(self.shape(), self.dtype())
    }

    /// `beta * self + alpha * (a x b)`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (c, a, b) = (array!([[1.0]])?, array!([[2.0, 3.0]])?, array!([[4.0], [5.0]])?);
    /// assert_eq!(c.addmm(&a, &b, 2.0, 10.0)?.item::<f32>()?, 56.0); // 10 * 1 + 2 * 23
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not fit.
    #[doc(alias = "mlx_addmm")]
    pub fn addmm(&self, a: &Array, b: &Array, alpha: f32, beta: f32) -> Result<Array> {
        call::array("addmm", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_addmm(out, self.raw(), a.raw(), b.raw(), alpha, beta, s) }
        })
        .and_then(|sum| {
            if a.size() > 0 && b.size() > 0 {
                return Ok(sum);
            }
            // Multiplication of empty arrays, as in `unless_of_nothing`. Only the addend remains.
            let beta = Array::scalar(beta)?.astype(sum.dtype())?;
            let scaled = self.astype(sum.dtype())?.multiply(&beta)?;
            scaled.broadcast_to(sum.shape())
        })
        .map_err(|e| e.with_inputs(&[self, a, b]))
    }

    /// The values on and below the `k`-th diagonal of the last two axes. Other values become zero.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.tril(0)?.to_vec::<i32>()?, [1, 0, 3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message for fewer than two axes.
    #[doc(alias = "mlx_tril")]
    pub fn tril(&self, k: i32) -> Result<Array> {
        let k = self.short_diagonal(k);
        call::array("tril", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_tril(out, self.raw(), k, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The values on and above the `k`-th diagonal of the last two axes. Other values become zero.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.triu(1)?.to_vec::<i32>()?, [0, 2, 0, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message for fewer than two axes.
    #[doc(alias = "mlx_triu")]
    pub fn triu(&self, k: i32) -> Result<Array> {
        let k = self.short_diagonal(k);
        call::array("triu", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_triu(out, self.raw(), k, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// An equivalent diagonal that is at most one beyond the corners, because MLX adds the number
    /// to lengths.
    fn short_diagonal(&self, k: i32) -> i32 {
        let mut lengths = self.shape().iter().rev();
        let columns = lengths.next().copied().unwrap_or(0);
        let rows = lengths.next().copied().unwrap_or(0);
        k.clamp(-rows.max(1), columns.max(1))
    }

    /// All products of the flattened arrays: `[m] x [n] -> [m, n]`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.outer(&array!([10, 20])?)?.to_vec::<i32>()?, [10, 20, 20, 40]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for more elements than `i32::MAX`.
    #[doc(alias = "mlx_outer")]
    pub fn outer(&self, other: &Array) -> Result<Array> {
        self.count("outer")?;
        other.count("outer")?;
        call::array("outer", |out, s| {
            // SAFETY: all handles are live. The number of elements of each array fits an `i32`.
            unsafe { mlx_sys::mlx_outer(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// The `offset`-th diagonal of `axis1` and `axis2`, as the last axis of the result.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2, 3], [4, 5, 6]])?;
    /// assert_eq!(a.diagonal(0, 0, 1)?.to_vec::<i32>()?, [1, 5]);
    /// assert_eq!(a.diagonal(1, 0, 1)?.to_vec::<i32>()?, [2, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist or are the same; [`ErrorKind::Shape`] for an
    /// empty array.
    #[doc(alias = "mlx_diagonal")]
    pub fn diagonal(&self, offset: i32, axis1: i32, axis2: i32) -> Result<Array> {
        let op = "diagonal";
        let (axes, offset) = self.check_diagonal(op, offset, axis1, axis2)?;
        if self.ndim() > 2 {
            // MLX gathers blocks of a view here. This fails if the view is column-major.
            let rest = (0..self.ndim() as i32).filter(|axis| !axes.contains(axis));
            let order: Vec<i32> = axes.iter().copied().chain(rest).collect();
            let moved = self.transpose_axes(&order)?;
            let (rows, columns) = (-offset.min(0), offset.max(0));
            let length = (moved.dim(0)? - rows).min(moved.dim(1)? - columns).max(0);
            let steps = |from: i32| {
                let (first, end) = (f64::from(from), f64::from(from + length));
                super::arange(first, end, 1.0, Dtype::Int32)
            };
            let sizes = [&[1, 1], &moved.shape()[2..]].concat();
            let blocks = moved.gather(&[&steps(rows)?, &steps(columns)?], &[0, 1], &sizes)?;
            return blocks.squeeze_axes(&[1, 2])?.move_axis(0, -1);
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. The axes exist, and the offset is within them.
            unsafe { mlx_sys::mlx_diagonal(out, self.raw(), offset, axes[0], axes[1], s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    fn check_diagonal(
        &self,
        op: &'static str,
        offset: i32,
        axis1: i32,
        axis2: i32,
    ) -> Result<(Vec<i32>, i32)> {
        let axes = self.distinct_axes(op, &[axis1, axis2])?;
        if self.size() == 0 {
            return Err(
                Error::new(ErrorKind::Shape, op, "an empty array has no diagonal")
                    .with_inputs(&[self]),
            );
        }
        let length = |i: usize| self.shape()[axes[i] as usize]; // resolved above
        let offset = offset.clamp(-length(0), length(1));
        Ok((axes, offset))
    }

    /// The sum of the `offset`-th diagonal of `axis1` and `axis2`, as `dtype`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// assert_eq!(array!([[1, 2], [3, 4]])?.trace(0, 0, 1, Dtype::Int32)?.item::<i32>()?, 5);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::diagonal`].
    #[doc(alias("mlx_trace", "mlx_trace_axes"))]
    pub fn trace(&self, offset: i32, axis1: i32, axis2: i32, dtype: Dtype) -> Result<Array> {
        let op = "trace";
        let (axes, offset) = self.check_diagonal(op, offset, axis1, axis2)?;
        let diagonal = self.diagonal(offset, axes[0], axes[1])?;
        if diagonal.size() == 0 {
            // The diagonal is empty, and MLX would loop forever.
            let lead = &diagonal.shape()[..diagonal.ndim() - 1];
            return super::zeros(lead, dtype);
        }
        if self.ndim() > 2 {
            // `diagonal` explains this case.
            return diagonal.astype(dtype)?.sum(-1, false)?.astype(dtype);
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. The axes exist, and the offset is within them.
            unsafe { compat::mlx_trace(out, self.raw(), offset, axes[0], axes[1], dtype.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))?
        // MLX sums small integers in 32 bits, and does not convert the result back.
        .astype(dtype)
    }

    /// For a vector, the matrix with the vector on the `k`-th diagonal. For a matrix, its `k`-th
    /// diagonal.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.diag(0)?.to_vec::<i32>()?, [1, 0, 0, 2]);
    /// assert_eq!(array!([[1, 2], [3, 4]])?.diag(0)?.to_vec::<i32>()?, [1, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for other arrays, or a matrix with more than `i32::MAX` rows.
    #[doc(alias = "mlx_diag")]
    pub fn diag(&self, k: i32) -> Result<Array> {
        let op = "diag";
        match self.shape() {
            [n] => {
                let side = k.checked_abs().and_then(|k| n.checked_add(k));
                let Some(side) = side else {
                    return Err(Error::new(
                        ErrorKind::Shape,
                        op,
                        format!("a matrix with a {k}-th diagonal cannot be counted"),
                    )
                    .with_inputs(&[self]));
                };
                if *n == 0 {
                    return super::zeros(&[side, side], self.dtype());
                }
                call::array(op, |out, s| {
                    // SAFETY: all handles are live. The numbers of rows and columns fit an `i32`.
                    unsafe { mlx_sys::mlx_diag(out, self.raw(), k, s) }
                })
                .map_err(|e| e.with_inputs(&[self]))
            }
            [_, _] => self.diagonal(k, 0, 1),
            _ => Err(
                Error::new(ErrorKind::Shape, op, "needs a vector or a matrix").with_inputs(&[self]),
            ),
        }
    }
}
