//! Running reductions along an axis.
//!
//! ```
//! use mlx_rs_core::array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = array!([[1, 2], [3, 4]])?;
//! assert_eq!(a.cumsum(0, false, true)?.to_vec::<i32>()?, [1, 2, 4, 6]);
//! # Ok(()) }
//! ```

use super::{full, where_};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::{call, closure, compat};

/// The value of a running reduction before its first element.
#[derive(Clone, Copy)]
enum Start {
    Zero,
    One,
    Least,
    Greatest,
}

impl Start {
    /// The value as a scalar of `dtype`. Complex numbers have no order; for them, MLX starts from
    /// zero.
    fn of(self, dtype: Dtype) -> Result<Array> {
        let least = matches!(self, Start::Least);
        macro_rules! bound {
            ($t:ty) => {
                Array::scalar(if least { <$t>::MIN } else { <$t>::MAX })
            };
        }
        match (self, dtype) {
            (Start::Zero, _) => Array::scalar(0i32)?.astype(dtype),
            (Start::One, _) => Array::scalar(1i32)?.astype(dtype),
            (_, Dtype::Bool) => Array::scalar(!least),
            (_, Dtype::Uint8) => bound!(u8),
            (_, Dtype::Uint16) => bound!(u16),
            (_, Dtype::Uint32) => bound!(u32),
            (_, Dtype::Uint64) => bound!(u64),
            (_, Dtype::Int8) => bound!(i8),
            (_, Dtype::Int16) => bound!(i16),
            (_, Dtype::Int32) => bound!(i32),
            (_, Dtype::Int64) => bound!(i64),
            (_, Dtype::Complex64) => Array::scalar(0i32)?.astype(dtype),
            (_, _) => Array::scalar(if least {
                f32::NEG_INFINITY
            } else {
                f32::INFINITY
            })?
            .astype(dtype),
        }
    }
}

macro_rules! scans {
    ($($(#[$doc:meta])* example: $(#[$example:meta])* $name:ident = $c:ident from $start:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                /// The reduction runs along `axis`, from the end if `reverse`. Unless `inclusive`,
                /// the element itself is excluded.
                ///
                $(#[$example])*
                ///
                /// # Errors
                /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the
                /// data type does not fit.
                pub fn $name(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
                    let at = self.axis(stringify!($name), axis)?;
                    let scan = |x: &Array| {
                        call::array(stringify!($name), |out, s| {
                            // SAFETY: all handles are live, and the axis exists. If the axis has
                            // one element, the result is not computed. Gradients see no NaN; see
                            // `without_nan`.
                            unsafe { compat::$c(out, x.raw(), axis, reverse, inclusive, s) }
                        })
                        .and_then(|scan| x.unless_single(scan, at, inclusive, Start::$start))
                    };
                    self.without_nan(Start::$start, scan, |nan| nan.cummax(axis, reverse, inclusive))
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
    #[doc(alias("mlx_cumsum", "mlx_cumsum_axis"))]
    cumsum = mlx_cumsum from Zero;
    /// Running products.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([2, 3, 4])?.cumprod(0, false, true)?.to_vec::<i32>()?, [2, 6, 24]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_cumprod", "mlx_cumprod_axis"))]
    cumprod = mlx_cumprod from One;
    /// The greatest value so far.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 3, 2])?.cummax(0, false, true)?.to_vec::<i32>()?, [1, 3, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_cummax", "mlx_cummax_axis"))]
    cummax = mlx_cummax from Least;
    /// The least value so far.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([3, 1, 2])?.cummin(0, false, true)?.to_vec::<i32>()?, [3, 1, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_cummin", "mlx_cummin_axis"))]
    cummin = mlx_cummin from Greatest;
}

impl Array {
    /// Running `log(sum(exp(x)))` along `axis`, from the end if `reverse`, computed without
    /// overflow. Unless `inclusive`, the element itself is excluded. Integers and booleans are
    /// converted to `float32` first, because MLX alone would convert the results to integers.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let y = array!([0.0, 0.0])?.logcumsumexp(0, false, true)?;
    /// assert!(y.all_close(&array!([0.0, 2.0f32.ln()])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the data type
    /// does not fit.
    #[doc(alias("mlx_logcumsumexp", "mlx_logcumsumexp_axis"))]
    pub fn logcumsumexp(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
        let at = self.axis("logcumsumexp", axis)?;
        let inexact = self.inexact()?;
        call::array("logcumsumexp", |out, s| {
            // SAFETY: all handles are live, and the axis exists. If the axis has one element, the
            // result is not computed.
            unsafe { compat::mlx_logcumsumexp(out, inexact.raw(), axis, reverse, inclusive, s) }
        })
        .and_then(|scan| inexact.unless_single(scan, at, inclusive, Start::Least))
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The running maximum or minimum (`scan`) of this array, with correct NaNs. Where MLX handles
    /// NaN wrongly, each NaN is replaced before the scan. After the scan, the result is set to NaN
    /// where `after` is true, which means that the scan has passed a NaN.
    ///
    /// - MLX 0.32 gives the gradient to the element that equals the extreme. NaN equals nothing. If
    ///   no element is found, MLX writes outside of the gradient's memory. Earlier versions have no
    ///   such gradient.
    /// - With 16-bit types, and before MLX 0.32 with all types, a value after a NaN replaces the
    ///   NaN in the result. Here the result stays NaN, as in NumPy.
    fn without_nan(
        &self,
        start: Start,
        scan: impl Fn(&Array) -> Result<Array>,
        after: impl Fn(&Array) -> Result<Array>,
    ) -> Result<Array> {
        let dtype = self.dtype();
        let is_extreme = matches!(start, Start::Least | Start::Greatest);
        let is_mistaken = match dtype {
            Dtype::Float16 | Dtype::Bfloat16 => true,
            Dtype::Float32 | Dtype::Float64 | Dtype::Complex64 => {
                !cfg!(mlx_c_0_7) || closure::inside()
            }
            _ => false,
        };
        if !(is_extreme && is_mistaken) {
            return scan(self);
        }
        if self.size() == 0 {
            return Ok(self.clone());
        }
        let nan = self.is_nan()?;
        let numbers = where_(&nan, &start.of(dtype)?, self)?;
        let undefined = Array::scalar(f32::NAN)?.astype(dtype)?;
        where_(&after(&nan)?, &undefined, &scan(&numbers)?)
    }

    /// Returns `scan`. If `axis` has one element, returns its known result instead, because MLX's
    /// CPU kernel divides by the stride of the axis, which is zero for a broadcast axis and
    /// negative for a reversed one.
    fn unless_single(
        &self,
        scan: Array,
        axis: usize,
        inclusive: bool,
        start: Start,
    ) -> Result<Array> {
        if self.shape()[axis] != 1 {
            return Ok(scan);
        }
        if inclusive {
            return self.astype(scan.dtype());
        }
        full(scan.shape(), &start.of(scan.dtype())?, scan.dtype())
    }
}
