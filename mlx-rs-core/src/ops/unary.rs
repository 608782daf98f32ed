//! Element-wise functions of one array, and conversion between types.

use super::unary_ops;
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::Result;

unary_ops! {
    /// Absolute value.
    abs = mlx_abs;
    /// Smallest integer not below the value.
    ceil = mlx_ceil;
    /// Cosine, in radians.
    cos = mlx_cos;
    /// Gauss error function.
    erf = mlx_erf;
    /// Exponential.
    exp = mlx_exp;
    /// `exp(x) - 1`, exact near zero.
    expm1 = mlx_expm1;
    /// Largest integer not above the value.
    floor = mlx_floor;
    /// Whether the value is neither infinite nor NaN.
    is_finite = mlx_isfinite;
    /// Whether the value is NaN.
    is_nan = mlx_isnan;
    /// Natural logarithm.
    log = mlx_log;
    /// `log(1 + x)`, exact near zero.
    log1p = mlx_log1p;
    /// Logical negation.
    logical_not = mlx_logical_not;
    /// Sign change.
    negative = mlx_negative;
    /// `1 / x`.
    reciprocal = mlx_reciprocal;
    /// `1 / sqrt(x)`.
    rsqrt = mlx_rsqrt;
    /// Logistic function `1 / (1 + exp(-x))`.
    sigmoid = mlx_sigmoid;
    /// -1, 0 or 1 by the sign.
    sign = mlx_sign;
    /// Sine, in radians.
    sin = mlx_sin;
    /// Square root.
    sqrt = mlx_sqrt;
    /// `x * x`.
    square = mlx_square;
    /// Hyperbolic tangent.
    tanh = mlx_tanh;
    /// The same values with no gradient flowing through.
    stop_gradient = mlx_stop_gradient;
}

impl Array {
    /// The values converted to `dtype`; the same array when it already has that type.
    ///
    /// # Errors
    /// MLX's message when the device lacks the type.
    pub fn astype(&self, dtype: Dtype) -> Result<Array> {
        call::array("astype", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_astype(out, self.raw(), dtype.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// `x * sigmoid(x)` (Elfwing et al. 2018, also called swish).
    ///
    /// # Errors
    /// MLX's message when the data type does not fit.
    pub fn silu(&self) -> Result<Array> {
        self.multiply(&self.sigmoid()?)
    }
}
