//! Makes arrays from host values. This module checks every size, because MLX does not.

use mlx_sys as sys;

use super::Array;
use crate::call;
use crate::dtype::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

impl Array {
    /// An array of `shape` with a copy of `values` in row-major order.
    ///
    /// ```
    /// use mlx_rs_core::Array;
    /// let a = Array::from_slice(&[1u8, 2, 3, 4, 5, 6], &[2, 3])?;
    /// assert_eq!(a.shape(), [2, 3]);
    /// assert!(Array::from_slice(&[1u8, 2, 3], &[2, 2]).is_err());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when a dimension is negative, or the shape does not have exactly
    /// `values.len()` elements.
    #[doc(alias = "mlx_array_new_data")]
    pub fn from_slice<T: Element>(values: &[T], shape: &[i32]) -> Result<Self> {
        let expected = memory::checked_bytes(shape, 1);
        if expected != Some(values.len() as u64) {
            return Err(Error::new(
                ErrorKind::Shape,
                "from_slice",
                format!(
                    "shape {shape:?} does not hold exactly the {} values given",
                    values.len()
                ),
            ));
        }
        let ndim = i32::try_from(shape.len()).map_err(|_| {
            Error::new(
                ErrorKind::Shape,
                "from_slice",
                "more axes than MLX can count",
            )
        })?;
        call::adopt("from_slice", |out| {
            // SAFETY: the shape has `ndim` entries whose product is `values.len()`, so MLX reads
            // exactly the slice. `T` is the Rust type of the passed dtype. MLX copies the values.
            let raw = unsafe {
                sys::mlx_array_new_data(
                    values.as_ptr().cast(),
                    shape.as_ptr(),
                    ndim,
                    T::DTYPE.raw(),
                )
            };
            // SAFETY: `out` is writable; ownership of the new handle moves into it.
            unsafe { *out = raw };
            i32::from(raw.ctx.is_null())
        })
    }

    /// An array without axes, with a single value.
    ///
    /// ```
    /// let a = mlx_rs_core::Array::scalar(2.5f32)?;
    /// assert_eq!((a.ndim(), a.size()), (0, 1));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot allocate it.
    pub fn scalar<T: Element>(value: T) -> Result<Self> {
        Self::from_slice(&[value], &[])
    }

    /// An array with one axis.
    ///
    /// ```
    /// let a = mlx_rs_core::Array::vector(&[1i64, 2, 3])?;
    /// assert_eq!(a.shape(), [3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when there are more values than `i32::MAX`.
    pub fn vector<T: Element>(values: &[T]) -> Result<Self> {
        let n = i32::try_from(values.len()).map_err(|_| {
            Error::new(
                ErrorKind::Shape,
                "vector",
                "more values than one axis can count",
            )
        })?;
        Self::from_slice(values, &[n])
    }
}
