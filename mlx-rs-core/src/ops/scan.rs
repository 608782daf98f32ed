//! Running reductions along an axis.
//!
//! ```
//! use mlx_rs_core::array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = array!([[1, 2], [3, 4]])?;
//! assert_eq!(a.cumsum(0, false, true)?.to_vec::<i32>()?, [1, 2, 4, 6]);
//! # Ok(()) }
//! ```

use crate::array::Array;
use crate::call;
use crate::error::Result;

macro_rules! scans {
    ($($(#[$doc:meta])* example: $(#[$example:meta])* $name:ident = $c:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                /// Along `axis`, from the end when `reverse`, without the value itself unless
                /// `inclusive`.
                ///
                $(#[$example])*
                ///
                /// # Errors
                /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the data
                /// type does not fit.
                pub fn $name(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
                    self.axis(stringify!($name), axis)?;
                    call::array(stringify!($name), |out, s| {
                        // SAFETY: all handles are live; the axis exists.
                        unsafe { mlx_sys::$c(out, self.raw(), axis, reverse, inclusive, s) }
                    })
                    .and_then(Array::unless_empty)
                    .map_err(|e| e.with_inputs(&[self]))
                }
            )*
        }
    };
}

scans! {
    /// Running sums.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([1, 2, 3])?;
    /// assert_eq!(a.cumsum(0, false, true)?.to_vec::<i32>()?, [1, 3, 6]);
    /// assert_eq!(a.cumsum(0, false, false)?.to_vec::<i32>()?, [0, 1, 3]);
    /// assert_eq!(a.cumsum(0, true, true)?.to_vec::<i32>()?, [6, 5, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    cumsum = mlx_cumsum;
    /// Running products.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([2, 3, 4])?.cumprod(0, false, true)?.to_vec::<i32>()?, [2, 6, 24]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    cumprod = mlx_cumprod;
    /// The greatest value so far.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 3, 2])?.cummax(0, false, true)?.to_vec::<i32>()?, [1, 3, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    cummax = mlx_cummax;
    /// The least value so far.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([3, 1, 2])?.cummin(0, false, true)?.to_vec::<i32>()?, [3, 1, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    cummin = mlx_cummin;
}

impl Array {
    /// Running `log(sum(exp(x)))`, stable, along `axis`, from the end when `reverse`, without the value
    /// itself unless `inclusive`. Integers and booleans are converted to `float32` first (MLX would cut the
    /// results to integers).
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let y = array!([0.0, 0.0])?.logcumsumexp(0, false, true)?;
    /// assert!(y.all_close(&array!([0.0, 2.0f32.ln()])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the data type does
    /// not fit.
    pub fn logcumsumexp(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
        self.axis("logcumsumexp", axis)?;
        let this = self.inexact()?;
        call::array("logcumsumexp", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_logcumsumexp(out, this.raw(), axis, reverse, inclusive, s) }
        })
        .and_then(Array::unless_empty)
        .map_err(|e| e.with_inputs(&[self]))
    }
}
