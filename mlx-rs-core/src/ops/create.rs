//! Arrays made by the device: constants and ranges.
//!
//! ```
//! use mlx_rs_core::{Dtype, arange, eye, linspace};
//! # fn main() -> mlx_rs_core::Result<()> {
//! assert_eq!(arange(0.0, 3.0, 1.0, Dtype::Int32)?.to_vec::<i32>()?, [0, 1, 2]);
//! assert_eq!(linspace(0.0, 1.0, 3, Dtype::Float32)?.to_vec::<f32>()?, [0.0, 0.5, 1.0]);
//! assert_eq!(eye(2, 2, 1, Dtype::Float32)?.to_vec::<f32>()?, [0.0, 1.0, 0.0, 0.0]);
//! # Ok(()) }
//! ```

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// Refuses shapes with negative dimensions, with too many elements, or beyond the budget.
pub(super) fn check_shape(op: &'static str, shape: &[i32], dtype: Dtype) -> Result<()> {
    match memory::checked_bytes(shape, dtype.size()) {
        Some(bytes) if bytes <= memory::budget() => Ok(()),
        Some(bytes) => Err(Error::new(
            ErrorKind::OutOfMemory,
            op,
            format!(
                "shape {shape:?} of {dtype} needs {bytes} bytes, more than the budget of {} bytes",
                memory::budget()
            ),
        )),
        None => Err(Error::new(
            ErrorKind::Shape,
            op,
            format!(
                "shape {shape:?} has a negative dimension or more elements than can be counted"
            ),
        )),
    }
}

/// An array of zeros.
///
/// ```
/// use mlx_rs_core::{Dtype, zeros};
/// assert_eq!(zeros(&[2, 2], Dtype::Float32)?.to_vec::<f32>()?, [0.0; 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::OutOfMemory`] when the shape is not possible.
#[doc(alias = "mlx_zeros")]
pub fn zeros(shape: &[i32], dtype: Dtype) -> Result<Array> {
    check_shape("zeros", shape, dtype)?;
    call::array("zeros", |out, s| {
        // SAFETY: the pointer and length describe the slice; the stream is live.
        unsafe { mlx_sys::mlx_zeros(out, shape.as_ptr(), shape.len(), dtype.raw(), s) }
    })
}

/// An array of ones.
///
/// ```
/// use mlx_rs_core::{Dtype, ones};
/// assert_eq!(ones(&[3], Dtype::Int32)?.to_vec::<i32>()?, [1, 1, 1]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::OutOfMemory`] when the shape is not possible.
#[doc(alias = "mlx_ones")]
pub fn ones(shape: &[i32], dtype: Dtype) -> Result<Array> {
    check_shape("ones", shape, dtype)?;
    call::array("ones", |out, s| {
        // SAFETY: the pointer and length describe the slice; the stream is live.
        unsafe { mlx_sys::mlx_ones(out, shape.as_ptr(), shape.len(), dtype.raw(), s) }
    })
}

/// An array filled with `value`, converted to `dtype`. `value` may be any array that broadcasts to
/// `shape`.
///
/// ```
/// use mlx_rs_core::{Dtype, array, full};
/// assert_eq!(full(&[2, 2], &array!(7)?, Dtype::Float32)?.to_vec::<f32>()?, [7.0; 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::OutOfMemory`] when the shape is not possible.
pub fn full(shape: &[i32], value: &Array, dtype: Dtype) -> Result<Array> {
    check_shape("full", shape, dtype)?;
    // MLX's own function is not used, because it multiplies gradients by the value.
    value.astype(dtype)?.broadcast_to(shape)?.contiguous()
}

/// The values `start, start + step, ...` below `stop`.
///
/// ```
/// use mlx_rs_core::{Dtype, arange};
/// assert_eq!(arange(0.0, 6.0, 2.0, Dtype::Int32)?.to_vec::<i32>()?, [0, 2, 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] for a zero step, or for a step or bounds that are not finite;
/// [`ErrorKind::OutOfMemory`] when there are too many values.
#[doc(alias = "mlx_arange")]
pub fn arange(start: f64, stop: f64, step: f64, dtype: Dtype) -> Result<Array> {
    if !(start.is_finite() && stop.is_finite() && step.is_finite() && step != 0.0) {
        return Err(Error::new(
            ErrorKind::Value,
            "arange",
            format!(
                "start {start}, stop {stop} and step {step} must be finite and the step not zero"
            ),
        ));
    }
    let count = ((stop - start) / step).ceil().max(0.0);
    if count > f64::from(i32::MAX) || count * dtype.size() as f64 > memory::budget() as f64 {
        return Err(Error::new(
            ErrorKind::OutOfMemory,
            "arange",
            format!(
                "{count} values of {dtype} are more than an axis or the memory budget can hold"
            ),
        ));
    }
    call::array("arange", |out, s| {
        // SAFETY: the arguments are plain numbers, and the stream is live.
        unsafe { mlx_sys::mlx_arange(out, start, stop, step, dtype.raw(), s) }
    })
}

/// `count` evenly spaced values from `start` to `stop`, both included.
///
/// ```
/// use mlx_rs_core::{Dtype, linspace};
/// assert_eq!(linspace(0.0, 1.0, 5, Dtype::Float32)?.to_vec::<f32>()?, [0.0, 0.25, 0.5, 0.75, 1.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] for a negative count; [`ErrorKind::OutOfMemory`] when there are too many
/// values.
#[doc(alias = "mlx_linspace")]
pub fn linspace(start: f64, stop: f64, count: i32, dtype: Dtype) -> Result<Array> {
    if count < 0 {
        return Err(Error::new(
            ErrorKind::Value,
            "linspace",
            format!("a count of {count} is negative"),
        ));
    }
    check_shape("linspace", &[count], dtype)?;
    #[cfg(not(mlx_c_0_5))]
    if dtype == Dtype::Float64 && count > 1 {
        return linspace_in_double(start, stop, count);
    }
    call::array("linspace", |out, s| {
        // SAFETY: the arguments are plain numbers, and the stream is live.
        unsafe { mlx_sys::mlx_linspace(out, start, stop, count, dtype.raw(), s) }
    })
}

/// Computes `linspace` in double precision, because MLX 0.30.1 computes every type in single
/// precision.
#[cfg(not(mlx_c_0_5))]
fn linspace_in_double(start: f64, stop: f64, count: i32) -> Result<Array> {
    let last = Array::scalar(f64::from(count - 1))?;
    let part = arange(0.0, f64::from(count), 1.0, Dtype::Float64)?.divide(&last)?;
    let rest = Array::scalar(1.0f64)?.subtract(&part)?;
    rest.multiply(&Array::scalar(start)?)?
        .add(&part.multiply(&Array::scalar(stop)?)?)
}

/// A `rows x columns` matrix with ones on the `k`-th diagonal and zeros elsewhere. A positive `k`
/// is above the main diagonal.
///
/// ```
/// use mlx_rs_core::{Dtype, eye};
/// assert_eq!(eye(2, 3, 1, Dtype::Int32)?.to_vec::<i32>()?, [0, 1, 0, 0, 0, 1]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::OutOfMemory`] when the shape is not possible.
#[doc(alias = "mlx_eye")]
pub fn eye(rows: i32, columns: i32, k: i32, dtype: Dtype) -> Result<Array> {
    check_shape("eye", &[rows, columns], dtype)?;
    if rows == 0 || columns == 0 {
        return zeros(&[rows, columns], dtype);
    }
    // MLX negates `k`, so it is limited. Beyond the corners, every diagonal is empty.
    let k = k.clamp(-rows, columns);
    call::array("eye", |out, s| {
        // SAFETY: the numbers are within the matrix, and the stream is live.
        unsafe { mlx_sys::mlx_eye(out, rows, columns, k, dtype.raw(), s) }
    })
}

/// The identity matrix with `n` rows.
///
/// ```
/// use mlx_rs_core::{Dtype, identity};
/// assert_eq!(identity(2, Dtype::Int32)?.to_vec::<i32>()?, [1, 0, 0, 1]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::OutOfMemory`] when the shape is not possible.
#[doc(alias = "mlx_identity")]
pub fn identity(n: i32, dtype: Dtype) -> Result<Array> {
    check_shape("identity", &[n, n], dtype)?;
    if n == 0 {
        return zeros(&[0, 0], dtype);
    }
    call::array("identity", |out, s| {
        // SAFETY: the argument is a plain number, and the stream is live.
        unsafe { mlx_sys::mlx_identity(out, n, dtype.raw(), s) }
    })
}

/// A `rows x columns` matrix with ones on and below the `k`-th diagonal, and zeros elsewhere.
///
/// ```
/// use mlx_rs_core::{Dtype, tri};
/// assert_eq!(tri(2, 3, 0, Dtype::Int32)?.to_vec::<i32>()?, [1, 0, 0, 1, 1, 0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] or [`ErrorKind::OutOfMemory`] when the shape is not possible.
#[doc(alias = "mlx_tri")]
pub fn tri(rows: i32, columns: i32, k: i32, dtype: Dtype) -> Result<Array> {
    check_shape("tri", &[rows, columns], dtype)?;
    let k = k.clamp(-rows, columns);
    call::array("tri", |out, s| {
        // SAFETY: the sums of the numbers fit an i32, and the stream is live.
        unsafe { mlx_sys::mlx_tri(out, rows, columns, k, dtype.raw(), s) }
    })
}

impl Array {
    /// An array of zeros with the shape and type of this one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.zeros_like()?.to_vec::<i32>()?, [0, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when it would not fit the budget.
    #[doc(alias = "mlx_zeros_like")]
    pub fn zeros_like(&self) -> Result<Array> {
        call::array("zeros_like", |out, s| {
            // SAFETY: all handles are live.
            unsafe { mlx_sys::mlx_zeros_like(out, self.raw(), s) }
        })
    }

    /// An array of ones with the shape and type of this one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.5, 2.5])?.ones_like()?.to_vec::<f32>()?, [1.0, 1.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when it would not fit the budget.
    #[doc(alias = "mlx_ones_like")]
    pub fn ones_like(&self) -> Result<Array> {
        call::array("ones_like", |out, s| {
            // SAFETY: all handles are live.
            unsafe { mlx_sys::mlx_ones_like(out, self.raw(), s) }
        })
    }

    /// An array with the shape of this one, filled with `value` as `dtype`. `value` broadcasts to
    /// the shape.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// let a = array!([[1, 2], [3, 4]])?;
    /// assert_eq!(a.full_like(&array!(0.5)?, Dtype::Float32)?.to_vec::<f32>()?, [0.5; 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `value` does not broadcast to the shape.
    pub fn full_like(&self, value: &Array, dtype: Dtype) -> Result<Array> {
        full(self.shape(), value, dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_shapes_are_refused_before_mlx_sees_them() {
        assert_eq!(
            zeros(&[-1], Dtype::Float32).unwrap_err().kind(),
            ErrorKind::Shape
        );
        assert_eq!(
            zeros(&[i32::MAX; 4], Dtype::Float32).unwrap_err().kind(),
            ErrorKind::Shape
        );
        assert_eq!(
            ones(&[i32::MAX, i32::MAX], Dtype::Float32)
                .unwrap_err()
                .kind(),
            ErrorKind::OutOfMemory
        );
        assert!(arange(0.0, f64::NAN, 1.0, Dtype::Float32).is_err());
        assert!(arange(0.0, 1.0, 0.0, Dtype::Float32).is_err());
        assert!(arange(0.0, 1e18, 1.0, Dtype::Float32).is_err());
    }
}
