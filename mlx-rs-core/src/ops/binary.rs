//! Element-wise functions of two arrays, comparisons, and selection. Shapes broadcast as in NumPy,
//! and types promote as in MLX.
//!
//! ```
//! use mlx_rs_core::{Array, where_};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::vector(&[7i32, -7])?;
//! let b = Array::scalar(2i32)?;
//! assert_eq!(a.remainder(&b)?.to_vec::<i32>()?, [1, 1]);
//! let positive = where_(&a.greater(&Array::scalar(0)?)?, &a, &b)?;
//! assert_eq!(positive.to_vec::<i32>()?, [7, 2]);
//! # Ok(()) }
//! ```

use super::methods::binary_ops;
use super::select::where_;
use crate::array::Array;
use crate::call;
use crate::device::DeviceKind;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;
use crate::stream::Stream;

binary_ops! {
    /// The angle of the point `(other, self)`, in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0])?.arctan2(&array!([0.0])?)?.all_close(&array!([PI / 2.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arctan2")]
    arctan2 = mlx_arctan2;
    /// Bitwise and, of integers or booleans.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([6])?.bitwise_and(&array!([3])?)?.to_vec::<i32>()?, [2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_bitwise_and")]
    bitwise_and = mlx_bitwise_and;
    /// Bitwise or, of integers or booleans.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([6])?.bitwise_or(&array!([3])?)?.to_vec::<i32>()?, [7]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_bitwise_or")]
    bitwise_or = mlx_bitwise_or;
    /// Bitwise exclusive or, of integers or booleans.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([6])?.bitwise_xor(&array!([3])?)?.to_vec::<i32>()?, [5]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_bitwise_xor")]
    bitwise_xor = mlx_bitwise_xor;
    /// Shifts bits to the left by `other`, which must be below the number of bits of the type.
    /// Otherwise the value is unspecified.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 3])?.left_shift(&array!(2)?)?.to_vec::<i32>()?, [4, 12]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_left_shift")]
    left_shift = mlx_left_shift;
    /// Shifts bits to the right by `other`, which must be below the number of bits of the type.
    /// Otherwise the value is unspecified.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([4, 13])?.right_shift(&array!(2)?)?.to_vec::<i32>()?, [1, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_right_shift")]
    right_shift = mlx_right_shift;
    /// Sum.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (column, row) = (array!([[10.0], [20.0]])?, array!([1.0, 2.0])?);
    /// assert_eq!(column.add(&row)?.to_vec::<f32>()?, [11.0, 12.0, 21.0, 22.0]); // [2, 1] + [2] -> [2, 2]
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_add")]
    add = mlx_add;
    /// Difference.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([5, 7])?.subtract(&array!([2, 9])?)?.to_vec::<i32>()?, [3, -2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_subtract")]
    subtract = mlx_subtract;
    /// Product.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([2, 3])?.multiply(&array!(4)?)?.to_vec::<i32>()?, [8, 12]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_multiply")]
    multiply = mlx_multiply;
    /// Quotient. Integers are converted to floats first.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 3])?.divide(&array!(2)?)?.to_vec::<f32>()?, [0.5, 1.5]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_divide")]
    divide = mlx_divide;
    /// The greater of the two values.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 5])?.maximum(&array!([3, 2])?)?.to_vec::<i32>()?, [3, 5]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_maximum")]
    maximum = mlx_maximum;
    /// The lesser of the two values.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 5])?.minimum(&array!([3, 2])?)?.to_vec::<i32>()?, [1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_minimum")]
    minimum = mlx_minimum;
    /// `log(exp(a) + exp(b))`, computed without overflow.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let y = array!([0.0, 1000.0])?.logaddexp(&array!([0.0, 0.0])?)?;
    /// assert!(y.all_close(&array!([2.0f32.ln(), 1000.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_logaddexp")]
    logaddexp = mlx_logaddexp;
    /// Whether the values are equal.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.equal(&array!([1, 3])?)?.to_vec::<bool>()?, [true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_equal")]
    equal = mlx_equal;
    /// Whether the values differ.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2])?.not_equal(&array!([1, 3])?)?.to_vec::<bool>()?, [false, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_not_equal")]
    not_equal = mlx_not_equal;
    /// `a > b`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2, 3])?.greater(&array!(2)?)?.to_vec::<bool>()?, [false, false, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_greater")]
    greater = mlx_greater;
    /// `a >= b`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2, 3])?.greater_equal(&array!(2)?)?.to_vec::<bool>()?, [false, true, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_greater_equal")]
    greater_equal = mlx_greater_equal;
    /// `a < b`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2, 3])?.less(&array!(2)?)?.to_vec::<bool>()?, [true, false, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_less")]
    less = mlx_less;
    /// `a <= b`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, 2, 3])?.less_equal(&array!(2)?)?.to_vec::<bool>()?, [true, true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_less_equal")]
    less_equal = mlx_less_equal;
    /// Logical and.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, b) = (array!([true, true, false])?, array!([true, false, false])?);
    /// assert_eq!(a.logical_and(&b)?.to_vec::<bool>()?, [true, false, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_logical_and")]
    logical_and = mlx_logical_and;
    /// Logical or.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, b) = (array!([true, true, false])?, array!([true, false, false])?);
    /// assert_eq!(a.logical_or(&b)?.to_vec::<bool>()?, [true, true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_logical_or")]
    logical_or = mlx_logical_or;
}

impl Array {
    /// Quotient without remainder. The quotient of floats is rounded down. The quotient of integers
    /// is rounded towards zero, as in MLX. An integer divided by zero is 0, as in NumPy; the
    /// processor would trap.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([7.5, -7.5])?.floor_divide(&array!(2.0)?)?.to_vec::<f32>()?, [3.0, -4.0]);
    /// assert_eq!(array!([7, 7])?.floor_divide(&array!([2, 0])?)?.to_vec::<i32>()?, [3, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast or the types do not fit.
    #[doc(alias = "mlx_floor_divide")]
    pub fn floor_divide(&self, other: &Array) -> Result<Array> {
        if self.floats(other) {
            return self.floor_divide_raw(other);
        }
        let Divisor { safe, minus, zero } = Divisor::new(self, other)?;
        let quotient = self.floor_divide_raw(&safe)?;
        let quotient = match minus {
            Some(minus) => where_(&minus, &quotient.negative()?, &quotient)?,
            None => quotient,
        };
        quotient.zero_where(&zero)
    }

    /// Remainder with the sign of the divisor. For an integer divided by zero it is 0, as in NumPy.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([7, -7])?.remainder(&array!(2)?)?.to_vec::<i32>()?, [1, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast or the types do not fit.
    #[doc(alias = "mlx_remainder")]
    pub fn remainder(&self, other: &Array) -> Result<Array> {
        if self.floats(other) {
            return self.remainder_raw(other);
        }
        // The safe divisor is 1 instead of -1. The remainder is 0 in both cases.
        let divisor = Divisor::new(self, other)?;
        self.remainder_raw(&divisor.safe)?.zero_where(&divisor.zero)
    }

    /// Returns [`Array::floor_divide`] and [`Array::remainder`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (quotient, remainder) = array!([7, 9])?.divmod(&array!(2)?)?;
    /// assert_eq!(quotient.to_vec::<i32>()?, [3, 4]);
    /// assert_eq!(remainder.to_vec::<i32>()?, [1, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast or the types do not fit.
    pub fn divmod(&self, other: &Array) -> Result<(Array, Array)> {
        // MLX's own `divmod` rounds float quotients towards zero, so it is not used.
        Ok((self.floor_divide(other)?, self.remainder(other)?))
    }

    /// Computes an operation on two booleans that MLX's CPU kernels run twice in succession. If
    /// memory is reused, the second run reads results of the first. `None` for other operations.
    #[inline]
    pub(crate) fn of_booleans(&self, name: &str, other: &Array) -> Option<Result<Array>> {
        let twice = matches!(name, "bitwise_xor" | "right_shift");
        if !twice || self.dtype() != Dtype::Bool || other.dtype() != Dtype::Bool {
            return None;
        }
        Some(if name == "bitwise_xor" {
            self.not_equal(other)
        } else {
            other.logical_not().and_then(|zero| self.logical_and(&zero))
        })
    }

    fn floor_divide_raw(&self, other: &Array) -> Result<Array> {
        let quotient = call::array("floor_divide", |out, s| {
            // SAFETY: all handles are live. The callers ensure that no integer divisor traps.
            unsafe { mlx_sys::mlx_floor_divide(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))?;
        if !mapped::inside() || self.floats(other) {
            return Ok(quotient);
        }
        // Under `vmap`, MLX divides integers as floats, and returns floats.
        if quotient.dtype().size() > 4 || Stream::current()?.device().kind() != DeviceKind::Cpu {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "floor_divide",
                "integers of 64 bits, or of any size on a GPU, cannot be divided inside vmap; convert \
                 to a float type first",
            )
            .with_inputs(&[self, other]));
        }
        let wide = |a: &Array| a.astype(Dtype::Float64);
        let exact = wide(self)?.divide(&wide(other)?)?;
        // Rounds towards zero, as integer division does.
        where_(
            &exact.less(&Array::scalar(0.0f64)?)?,
            &exact.ceil()?,
            &exact.floor()?,
        )?
        .astype(quotient.dtype())
    }

    fn remainder_raw(&self, other: &Array) -> Result<Array> {
        call::array("remainder", |out, s| {
            // SAFETY: all handles are live. The callers ensure that no integer divisor traps.
            unsafe { mlx_sys::mlx_remainder(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Whether an operation on both arrays computes in floats. Complex arrays, which are refused
    /// later, also return true.
    fn floats(&self, other: &Array) -> bool {
        let inexact = |d: Dtype| d.is_float() || d == Dtype::Complex64;
        inexact(self.dtype()) || inexact(other.dtype())
            // A signed and a 64-bit unsigned integer promote to a float.
            || (self.dtype() == Dtype::Uint64) && other.dtype().is_signed_integer()
            || (other.dtype() == Dtype::Uint64) && self.dtype().is_signed_integer()
    }

    fn zero_where(&self, zero: &Array) -> Result<Array> {
        where_(zero, &Array::scalar(false)?.astype(self.dtype())?, self)
    }

    /// `self` to the power `other`. A negative exponent of an integer results in the power rounded
    /// towards zero: 0, except for the bases 1 and -1. For base 0 it is also 0. MLX alone would
    /// loop forever for a negative exponent.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([2, 3])?.power(&array!(3)?)?.to_vec::<i32>()?, [8, 27]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast or the types do not fit.
    #[doc(alias = "mlx_power")]
    pub fn power(&self, other: &Array) -> Result<Array> {
        let endless = !self.floats(other) && other.dtype().is_signed_integer();
        if !endless {
            return self.power_raw(other);
        }
        let negative = other.less(&Array::scalar(false)?.astype(other.dtype())?)?;
        let one = Array::scalar(true)?.astype(other.dtype())?;
        // For the bases 1 and -1, only the parity of the exponent matters.
        let exponent = where_(&negative, &other.bitwise_and(&one)?, other)?;
        let power = self.power_raw(&exponent)?;
        let unit = self
            .square()?
            .equal(&Array::scalar(true)?.astype(self.dtype())?)?;
        power.zero_where(&negative.logical_and(&unit.logical_not()?)?)
    }

    fn power_raw(&self, other: &Array) -> Result<Array> {
        call::array("power", |out, s| {
            // SAFETY: all handles are live. The callers ensure that no integer exponent is
            // negative.
            unsafe { mlx_sys::mlx_power(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Whether both arrays have the same shape and values.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1, 2])?.array_equal(&array!([1, 2])?)?);
    /// assert!(!array!([1, 2])?.array_equal(&array!([[1, 2]])?)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when evaluation fails.
    #[doc(alias = "mlx_array_equal")]
    pub fn array_equal(&self, other: &Array) -> Result<bool> {
        call::array("array_equal", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_array_equal(out, self.raw(), other.raw(), false, s) }
        })?
        .item()
    }

    /// Whether all values are equal within `atol + rtol * |other|`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, b) = (array!([1.0, 2.0])?, array!([1.0, 2.001])?);
    /// assert!(a.all_close(&b, 1e-2, 0.0)?);
    /// assert!(!a.all_close(&b, 1e-5, 0.0)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast.
    #[doc(alias = "mlx_allclose")]
    pub fn all_close(&self, other: &Array, rtol: f64, atol: f64) -> Result<bool> {
        call::array("all_close", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_allclose(out, self.raw(), other.raw(), rtol, atol, false, s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))?
        .item()
    }

    /// For each element, whether the values are equal within `atol + rtol * |other|`. With
    /// `equal_nan`, NaN equals NaN.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, b) = (array!([1.0, 2.0, f32::NAN])?, array!([1.0, 2.1, f32::NAN])?);
    /// assert_eq!(a.is_close(&b, 1e-5, 0.0, true)?.to_vec::<bool>()?, [true, false, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast.
    #[doc(alias = "mlx_isclose")]
    pub fn is_close(&self, other: &Array, rtol: f64, atol: f64, equal_nan: bool) -> Result<Array> {
        call::array("is_close", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_isclose(out, self.raw(), other.raw(), rtol, atol, equal_nan, s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Limits the values to `[min, max]`. One of the limits may be absent.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([-1, 5, 12])?;
    /// assert_eq!(x.clip(Some(&array!(0)?), Some(&array!(10)?))?.to_vec::<i32>()?, [0, 5, 10]);
    /// assert_eq!(x.clip(None, Some(&array!(10)?))?.to_vec::<i32>()?, [-1, 5, 10]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when both limits are absent; MLX's message when shapes do not
    /// broadcast.
    #[doc(alias = "mlx_clip")]
    pub fn clip(&self, min: Option<&Array>, max: Option<&Array>) -> Result<Array> {
        if min.is_none() && max.is_none() {
            return Err(Error::new(
                ErrorKind::Value,
                "clip",
                "give a lower or an upper limit",
            ));
        }
        call::array("clip", |out, s| {
            // SAFETY: all handles are live. Null means an absent limit.
            unsafe {
                mlx_sys::mlx_clip(
                    out,
                    self.raw(),
                    Array::raw_or_null(min),
                    Array::raw_or_null(max),
                    s,
                )
            }
        })
    }
}

/// An integer divisor in which 0 and -1 are replaced by 1, so that division does not trap.
struct Divisor {
    safe: Array,
    /// The positions of the divisors -1, for signed types. The minimum integer divided by -1 would
    /// trap.
    minus: Option<Array>,
    zero: Array,
}

impl Divisor {
    /// Makes a safe divisor from `by`, in the common type of `a` and `by`.
    fn new(a: &Array, by: &Array) -> Result<Self> {
        let wide = by.add(&Array::scalar(false)?.astype(a.dtype())?)?;
        let constant = |v: i32| Array::scalar(v)?.astype(wide.dtype());
        let (none, one) = (constant(0)?, constant(1)?);
        let zero = wide.equal(&none)?;
        let safe = where_(&zero, &one, &wide)?;
        if !wide.dtype().is_signed_integer() {
            return Ok(Self {
                safe,
                minus: None,
                zero,
            });
        }
        let minus = wide.equal(&constant(-1)?)?;
        Ok(Self {
            safe: where_(&minus, &one, &safe)?,
            minus: Some(minus),
            zero,
        })
    }
}
