//! Element-wise functions of one array, and conversion between types.
//!
//! Integers and booleans are converted to `float32` where the function is not theirs; floats keep
//! their type.
//!
//! ```
//! use mlx_rs_core::Array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let x = Array::vector(&[0.0f32, 1.0])?;
//! assert_eq!(x.exp()?.log()?.round(3)?.to_vec::<f32>()?, [0.0, 1.0]);
//! # Ok(()) }
//! ```

use super::unary_ops;
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

unary_ops! {
    /// Inverse cosine, in radians.
    arccos = mlx_arccos;
    /// Inverse hyperbolic cosine.
    arccosh = mlx_arccosh;
    /// Inverse sine, in radians.
    arcsin = mlx_arcsin;
    /// Inverse hyperbolic sine.
    arcsinh = mlx_arcsinh;
    /// Inverse tangent, in radians.
    arctan = mlx_arctan;
    /// Inverse hyperbolic tangent.
    arctanh = mlx_arctanh;
    /// Every bit flipped; booleans are negated.
    bitwise_invert = mlx_bitwise_invert;
    /// The complex conjugate; real values stay.
    conjugate = mlx_conjugate;
    /// Hyperbolic cosine.
    cosh = mlx_cosh;
    /// Radians to degrees.
    degrees = mlx_degrees;
    /// The imaginary part; zero for real values.
    imag = mlx_imag;
    /// Whether the value is infinite.
    is_inf = mlx_isinf;
    /// Whether the value is negative infinity.
    is_neg_inf = mlx_isneginf;
    /// Whether the value is positive infinity.
    is_pos_inf = mlx_isposinf;
    /// Logarithm to base 10.
    log10 = mlx_log10;
    /// Logarithm to base 2.
    log2 = mlx_log2;
    /// Degrees to radians.
    radians = mlx_radians;
    /// The real part.
    real = mlx_real;
    /// Hyperbolic sine.
    sinh = mlx_sinh;
    /// Tangent, in radians.
    tan = mlx_tan;
    /// With at least one axis.
    at_least_1d = mlx_atleast_1d;
    /// With at least two axes, added at the front.
    at_least_2d = mlx_atleast_2d;
    /// With at least three axes: `[n]` becomes `[1, n, 1]`, `[m, n]` becomes `[m, n, 1]`.
    at_least_3d = mlx_atleast_3d;
    /// The values as 8-bit floats (E4M3) in `uint8`.
    to_fp8 = mlx_to_fp8;
    /// Absolute value.
    abs = mlx_abs;
    /// Smallest integer not below the value.
    ceil = mlx_ceil;
    /// Cosine, in radians.
    cos = mlx_cos;
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

/// Functions that MLX has for real types only; for complex ones it ends the process when it computes.
macro_rules! real_ops {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// [`ErrorKind::Dtype`] for complex types.
                pub fn $name(&self) -> Result<Array> {
                    if self.dtype() == Dtype::Complex64 {
                        return Err(Error::new(
                            ErrorKind::Dtype,
                            stringify!($name),
                            "is a function of real types only",
                        ));
                    }
                    call::array(stringify!($name), |out, s| {
                        // SAFETY: all handles are live; the type is a real one.
                        unsafe { mlx_sys::$c(out, self.raw(), s) }
                    })
                    .map_err(|e| e.with_inputs(&[self]))
                }
            )*
        }
    };
}

real_ops! {
    /// Gauss error function.
    erf = mlx_erf;
    /// The inverse of the error function.
    erfinv = mlx_erfinv;
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

    /// The nearest value with `decimals` digits after the point; halves go to the even one.
    ///
    /// # Errors
    /// MLX's message when the data type does not fit.
    pub fn round(&self, decimals: i32) -> Result<Array> {
        call::array("round", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_round(out, self.raw(), decimals, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// NaN replaced by `nan`, infinities by the values given or else by the greatest and least finite
    /// values of the type. Types without them stay.
    ///
    /// # Errors
    /// MLX's message for `float64` and complex types.
    pub fn nan_to_num(&self, nan: f32, posinf: Option<f32>, neginf: Option<f32>) -> Result<Array> {
        // MLX takes 0 for the greatest value of half types.
        let greatest = match self.dtype() {
            Dtype::Float16 => Some(half::f16::MAX.to_f32()),
            Dtype::Bfloat16 => Some(half::bf16::MAX.to_f32()),
            _ => None,
        };
        let posinf = posinf.or(greatest);
        let neginf = neginf.or(greatest.map(|v| -v));
        let optional = |v: Option<f32>| mlx_sys::mlx_optional_float {
            value: v.unwrap_or(0.0),
            has_value: v.is_some(),
        };
        call::array("nan_to_num", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe {
                mlx_sys::mlx_nan_to_num(out, self.raw(), nan, optional(posinf), optional(neginf), s)
            }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// 8-bit floats (E4M3) in `uint8` as `dtype`.
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] when this is not `uint8` or `dtype` is no float.
    pub fn from_fp8(&self, dtype: Dtype) -> Result<Array> {
        if self.dtype() != Dtype::Uint8 || !dtype.is_float() {
            return Err(Error::new(
                ErrorKind::Dtype,
                "from_fp8",
                format!(
                    "reads uint8 as a float type, not {} as {dtype}",
                    self.dtype()
                ),
            ));
        }
        call::array("from_fp8", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_from_fp8(out, self.raw(), dtype.raw(), s) }
        })
    }

    /// The bytes of the array read as another type; when its size differs the last axis grows or
    /// shrinks.
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] for a view as `bool`, which not every byte is; [`ErrorKind::Shape`] when
    /// the last axis is missing, too long, or does not divide.
    pub fn view(&self, dtype: Dtype) -> Result<Array> {
        let op = "view";
        if dtype == Dtype::Bool && self.dtype() != Dtype::Bool {
            return Err(Error::new(
                ErrorKind::Dtype,
                op,
                "bytes cannot be viewed as bool; compare them with zero",
            ));
        }
        let (from, to) = (self.dtype().size() as i64, dtype.size() as i64);
        let fits = from == to
            || self.shape().last().is_some_and(|&n| {
                let bytes = i64::from(n) * from;
                bytes % to == 0 && bytes / to <= i64::from(i32::MAX)
            });
        if !fits {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "the last axis of {} cannot be counted in elements of {dtype}",
                    self.dtype()
                ),
            )
            .with_inputs(&[self]));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live; the last axis divides.
            unsafe { mlx_sys::mlx_view(out, self.raw(), dtype.raw(), s) }
        })
    }
}
