//! Element-wise functions of two arrays, comparisons and selection.

use super::binary_ops;
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

binary_ops! {
    /// Sum.
    add = mlx_add;
    /// Difference.
    subtract = mlx_subtract;
    /// Product.
    multiply = mlx_multiply;
    /// Quotient; integers are divided as floats.
    divide = mlx_divide;
    /// The greater of both values.
    maximum = mlx_maximum;
    /// The lesser of both values.
    minimum = mlx_minimum;
    /// `log(exp(a) + exp(b))`, stable.
    logaddexp = mlx_logaddexp;
    /// Whether the values are equal.
    equal = mlx_equal;
    /// Whether the values differ.
    not_equal = mlx_not_equal;
    /// `a > b`.
    greater = mlx_greater;
    /// `a >= b`.
    greater_equal = mlx_greater_equal;
    /// `a < b`.
    less = mlx_less;
    /// `a <= b`.
    less_equal = mlx_less_equal;
    /// Logical and.
    logical_and = mlx_logical_and;
    /// Logical or.
    logical_or = mlx_logical_or;
    /// The bits that both integers have.
    bitwise_and = mlx_bitwise_and;
}

impl Array {
    /// Quotient rounded down. For integers the divisor is evaluated and checked first, since the
    /// processor traps on zero.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for an integer divisor that is zero, or -1 for signed integers.
    pub fn floor_divide(&self, other: &Array) -> Result<Array> {
        self.check_divisor("floor_divide", other)?;
        call::array("floor_divide", |out, s| {
            // SAFETY: all handles are live; no integer divisor can trap (checked).
            unsafe { mlx_sys::mlx_floor_divide(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Remainder with the sign of the divisor; integers are checked as in [`Array::floor_divide`].
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for an integer divisor that is zero, or -1 for signed integers.
    pub fn remainder(&self, other: &Array) -> Result<Array> {
        self.check_divisor("remainder", other)?;
        call::array("remainder", |out, s| {
            // SAFETY: all handles are live; no integer divisor can trap (checked).
            unsafe { mlx_sys::mlx_remainder(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// `self` to the power `other`. Integer exponents are evaluated and checked first: MLX loops
    /// forever on negative ones.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] for a negative exponent of an integer power.
    pub fn power(&self, other: &Array) -> Result<Array> {
        let integers = !self.dtype().is_float()
            && other.dtype().is_signed_integer()
            && self.dtype() != Dtype::Complex64;
        if integers
            && other.size() > 0
            && other
                .less(&Array::scalar(0i32)?)?
                .any(super::All, false)?
                .item()?
        {
            return Err(Error::new(
                ErrorKind::Value,
                "power",
                "an integer power has no negative exponents; convert the base to a float type",
            ));
        }
        call::array("power", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_power(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    fn check_divisor(&self, op: &'static str, divisor: &Array) -> Result<()> {
        if self.dtype().is_float() || divisor.dtype().is_float() || divisor.size() == 0 {
            return Ok(());
        }
        let wide = divisor.astype(Dtype::Int64)?;
        let zero = wide.equal(&Array::scalar(0i64)?)?;
        // i32::MIN / -1 overflows, which traps like a division by zero.
        let overflow = wide.equal(&Array::scalar(-1i64)?)?;
        let bad = zero
            .logical_or(&overflow)?
            .any(super::All, false)?
            .item::<bool>()?;
        if !bad {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Value,
            op,
            "the integer divisor holds 0 or -1, on which the processor traps; convert to a float type, \
             or negate instead of dividing by -1",
        ))
    }

    /// Whether both arrays have the same shape and values.
    ///
    /// # Errors
    /// MLX's message when evaluation fails.
    pub fn array_equal(&self, other: &Array) -> Result<bool> {
        call::array("array_equal", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_array_equal(out, self.raw(), other.raw(), false, s) }
        })?
        .item()
    }

    /// Whether all values agree within `atol + rtol * |other|`.
    ///
    /// # Errors
    /// MLX's message when the shapes do not broadcast.
    pub fn all_close(&self, other: &Array, rtol: f64, atol: f64) -> Result<bool> {
        call::array("all_close", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_allclose(out, self.raw(), other.raw(), rtol, atol, false, s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))?
        .item()
    }

    /// The values limited to `[min, max]`; either end may be open.
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when both ends are open; MLX's message when shapes do not broadcast.
    pub fn clip(&self, min: Option<&Array>, max: Option<&Array>) -> Result<Array> {
        if min.is_none() && max.is_none() {
            return Err(Error::new(
                ErrorKind::Value,
                "clip",
                "give a lower or an upper limit",
            ));
        }
        call::array("clip", |out, s| {
            // SAFETY: all handles are live; null stands for an open end.
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

/// Where `condition` holds the value of `yes`, else of `no`; all three broadcast.
///
/// # Errors
/// MLX's message when the shapes do not broadcast.
pub fn where_(condition: &Array, yes: &Array, no: &Array) -> Result<Array> {
    call::array("where", |out, s| {
        // SAFETY: all handles are live for the length of the call.
        unsafe { mlx_sys::mlx_where(out, condition.raw(), yes.raw(), no.raw(), s) }
    })
    .map_err(|e| e.with_inputs(&[condition, yes, no]))
}
