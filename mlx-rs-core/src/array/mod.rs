//! The array handle: ownership, shape and type. `create.rs`, `filled.rs`, `managed.rs` and
//! `convert.rs` create arrays, `data.rs`, `display.rs` and `iter.rs` read them, and `ops/`
//! computes.

mod convert;
mod create;
mod data;
mod display;
mod filled;
mod iter;
mod managed;
#[cfg(feature = "ndarray")]
mod ndarray;

pub use convert::Nested;
pub use data::Data;
pub use filled::{ChunkedArray, fill_arrays};
pub(crate) use filled::{Region, fill_regions, unfilled_arrays};
pub use iter::{Iter, Values};

use mlx_sys as sys;

use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// A lazily evaluated, immutable, n-dimensional array.
///
/// Operations return a new array that records how to compute itself. Nothing is computed until a
/// value is needed. Dropping the last handle frees the memory.
pub struct Array {
    raw: sys::mlx_array,
}

// SAFETY: MLX's reference counts are atomic. Only calls that hold the process-wide lock of
// `call.rs` use its other shared state (graph, status, events), on any thread.
unsafe impl Send for Array {}
// SAFETY: see the note for `Send`. Shape and type are read without the lock, but written only at
// construction. Data is read only after evaluation. While a handle exists, MLX no longer writes
// that data.
unsafe impl Sync for Array {}

impl Array {
    /// Takes ownership of a non-null handle.
    pub(crate) fn from_owned(raw: sys::mlx_array) -> Self {
        debug_assert!(!raw.ctx.is_null());
        Self { raw }
    }

    pub(crate) fn raw(&self) -> sys::mlx_array {
        self.raw
    }

    /// A raw handle for an optional argument. Null means none.
    pub(crate) fn raw_or_null(array: Option<&Array>) -> sys::mlx_array {
        array.map_or(
            sys::mlx_array {
                ctx: std::ptr::null_mut(),
            },
            |a| a.raw,
        )
    }

    /// The length of each axis.
    ///
    /// ```
    /// assert_eq!(mlx_rs_core::array!([[1, 2, 3]])?.shape(), [1, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_array_shape")]
    #[must_use]
    pub fn shape(&self) -> &[i32] {
        let n = self.ndim();
        if n == 0 {
            return &[];
        }
        // SAFETY: the handle is live. The shape has `ndim` entries, and is written only when the
        // array is made. It lives as long as the handle, which `&self` keeps alive.
        unsafe { std::slice::from_raw_parts(sys::mlx_array_shape(self.raw), n) }
    }

    /// The length of axis `axis`; a negative one counts from the end.
    ///
    /// ```
    /// let a = mlx_rs_core::array!([[1, 2, 3]])?;
    /// assert_eq!((a.dim(0)?, a.dim(-1)?), (1, 3));
    /// assert!(a.dim(2).is_err());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis does not exist.
    pub fn dim(&self, axis: i32) -> Result<i32> {
        Ok(self.shape()[self.axis("dim", axis)?])
    }

    /// The number of axes.
    ///
    /// ```
    /// assert_eq!(mlx_rs_core::array!([[1, 2, 3]])?.ndim(), 2);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_array_ndim")]
    #[must_use]
    pub fn ndim(&self) -> usize {
        // SAFETY: the handle is live. The number is written only when the array is made.
        unsafe { sys::mlx_array_ndim(self.raw) }
    }

    /// The number of elements.
    ///
    /// ```
    /// assert_eq!(mlx_rs_core::array!([[1, 2, 3], [4, 5, 6]])?.size(), 6);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_array_size")]
    #[must_use]
    pub fn size(&self) -> usize {
        // SAFETY: the handle is live; the size is written only when the array is made.
        unsafe { sys::mlx_array_size(self.raw) }
    }

    /// The size of the array's elements in bytes, without gaps.
    ///
    /// ```
    /// assert_eq!(mlx_rs_core::array!([1, 2, 3]; u16)?.nbytes(), 6);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.size() * self.dtype().size()
    }

    /// The type of the array's elements.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array};
    /// assert_eq!(array!([1.5])?.dtype(), Dtype::Float32);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_array_dtype")]
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        // SAFETY: the handle is live; the type is written only when the array is made.
        let raw = unsafe { sys::mlx_array_dtype(self.raw) };
        // `Dtype` has all types of MLX, because the build pins MLX's version.
        Dtype::from_raw(raw).unwrap_or(Dtype::Bool)
    }

    /// Resolves an axis that may count from the end.
    pub(crate) fn axis(&self, op: &'static str, axis: i32) -> Result<usize> {
        axis_of(op, axis, self.ndim())
    }

    /// Computes this array and waits for it.
    ///
    /// ```
    /// let a = mlx_rs_core::array!([1.0, 4.0])?.sqrt()?;
    /// a.eval()?; // now it is computed
    /// assert_eq!(a.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's own message when an operation of its graph fails.
    #[doc(alias = "mlx_array_eval")]
    pub fn eval(&self) -> Result<()> {
        let _guard = call::enter("eval")?;
        crate::stalled::before_waiting([self])?;
        // SAFETY: the handle is live.
        call::evaluation("eval", || unsafe { sys::mlx_array_eval(self.raw) })
    }
}

/// Resolves `axis` among `ndim` axes.
pub(crate) fn axis_of(op: &'static str, axis: i32, ndim: usize) -> Result<usize> {
    let n = i64::try_from(ndim).unwrap_or(i64::MAX);
    let resolved = if axis < 0 {
        i64::from(axis) + n
    } else {
        i64::from(axis)
    };
    if (0..n).contains(&resolved) {
        // The check above ensures that the value is in range for `usize`.
        Ok(resolved as usize)
    } else {
        Err(Error::new(
            ErrorKind::Index,
            op,
            format!("axis {axis} is out of range for an array of {ndim} axes"),
        ))
    }
}

impl Clone for Array {
    /// Another handle to the same array; no data is copied.
    ///
    /// # Panics
    /// When the system has no memory for the handle itself.
    fn clone(&self) -> Self {
        call::alias("clone", |out| {
            // SAFETY: `out` is a writable null handle, the source handle is live.
            unsafe { sys::mlx_array_set(out, self.raw) }
        })
        .unwrap_or_else(|e| panic!("cannot clone an array handle: {e}"))
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        call::free(self.raw);
    }
}
