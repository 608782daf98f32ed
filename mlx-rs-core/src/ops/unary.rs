//! Element-wise functions of one array. Conversion between types is in `types.rs`.
//!
//! Integers and booleans are converted to `float32` if the function does not support them. Floats
//! keep their type.
//!
//! ```
//! use mlx_rs_core::Array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let x = Array::vector(&[0.0f32, 1.0])?;
//! assert_eq!(x.exp()?.log()?.round(3)?.to_vec::<f32>()?, [0.0, 1.0]);
//! # Ok(()) }
//! ```

use super::methods::unary_ops;
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

unary_ops! {
    /// Inverse cosine, in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// let x = array!([0.0, 1.0])?.arccos()?;
    /// assert!(x.all_close(&array!([PI / 2.0, 0.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arccos")]
    arccos = mlx_arccos;
    /// Inverse hyperbolic cosine.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0f32.cosh()])?.arccosh()?.all_close(&array!([1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arccosh")]
    arccosh = mlx_arccosh;
    /// Inverse sine, in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 1.0])?.arcsin()?.all_close(&array!([0.0, PI / 2.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arcsin")]
    arcsin = mlx_arcsin;
    /// Inverse hyperbolic sine.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0f32.sinh()])?.arcsinh()?.all_close(&array!([1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arcsinh")]
    arcsinh = mlx_arcsinh;
    /// Inverse tangent, in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 1.0])?.arctan()?.all_close(&array!([0.0, PI / 4.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arctan")]
    arctan = mlx_arctan;
    /// Inverse hyperbolic tangent.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0f32.tanh()])?.arctanh()?.all_close(&array!([1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_arctanh")]
    arctanh = mlx_arctanh;
    /// Flips every bit. Booleans are negated.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([0, -1, 5])?.bitwise_invert()?.to_vec::<i32>()?, [-1, 0, -6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_bitwise_invert")]
    bitwise_invert = mlx_bitwise_invert;
    /// The complex conjugate. Real values are unchanged.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Complex32};
    /// let z = Array::scalar(Complex32::new(1.0, 2.0))?;
    /// assert_eq!(z.conjugate()?.item::<Complex32>()?, Complex32::new(1.0, -2.0));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_conjugate")]
    conjugate = mlx_conjugate;
    /// Hyperbolic cosine.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 1.0])?.cosh()?.all_close(&array!([1.0, 1.0f32.cosh()])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_cosh")]
    cosh = mlx_cosh;
    /// Converts radians to degrees.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, PI])?.degrees()?.all_close(&array!([0.0, 180.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_degrees")]
    degrees = mlx_degrees;
    /// The imaginary part; zero for real values.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Complex32};
    /// let z = Array::scalar(Complex32::new(1.0, 2.0))?;
    /// assert_eq!(z.imag()?.item::<f32>()?, 2.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_imag")]
    imag = mlx_imag;
    /// Whether the value is infinite.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([1.0, f32::NEG_INFINITY, f32::NAN])?;
    /// assert_eq!(x.is_inf()?.to_vec::<bool>()?, [false, true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_isinf")]
    is_inf = mlx_isinf;
    /// Whether the value is negative infinity.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([f32::INFINITY, f32::NEG_INFINITY])?;
    /// assert_eq!(x.is_neg_inf()?.to_vec::<bool>()?, [false, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_isneginf")]
    is_neg_inf = mlx_isneginf;
    /// Whether the value is positive infinity.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([f32::INFINITY, f32::NEG_INFINITY])?;
    /// assert_eq!(x.is_pos_inf()?.to_vec::<bool>()?, [true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_isposinf")]
    is_pos_inf = mlx_isposinf;
    /// Logarithm to base 10.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0, 1000.0])?.log10()?.all_close(&array!([0.0, 3.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_log10")]
    log10 = mlx_log10;
    /// Logarithm to base 2.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0, 8.0])?.log2()?.all_close(&array!([0.0, 3.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_log2")]
    log2 = mlx_log2;
    /// Converts degrees to radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 180.0])?.radians()?.all_close(&array!([0.0, PI])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_radians")]
    radians = mlx_radians;
    /// The real part.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Complex32};
    /// let z = Array::scalar(Complex32::new(1.0, 2.0))?;
    /// assert_eq!(z.real()?.item::<f32>()?, 1.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_real")]
    real = mlx_real;
    /// Hyperbolic sine.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 1.0])?.sinh()?.all_close(&array!([0.0, 1.0f32.sinh()])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_sinh")]
    sinh = mlx_sinh;
    /// Tangent of each element, an angle in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, PI / 4.0])?.tan()?.all_close(&array!([0.0, 1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_tan")]
    tan = mlx_tan;
    /// Adds axes until there is at least one.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!(1.0)?.at_least_1d()?.shape(), [1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_atleast_1d")]
    at_least_1d = mlx_atleast_1d;
    /// Adds axes at the front until there are at least two.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.0, 2.0])?.at_least_2d()?.shape(), [1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_atleast_2d")]
    at_least_2d = mlx_atleast_2d;
    /// Adds axes until there are at least three: `[n]` becomes `[1, n, 1]`, and `[m, n]` becomes
    /// `[m, n, 1]`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.0, 2.0])?.at_least_3d()?.shape(), [1, 2, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_atleast_3d")]
    at_least_3d = mlx_atleast_3d;
    /// Absolute value.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([-2, 0, 3])?.abs()?.to_vec::<i32>()?, [2, 0, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_abs")]
    abs = mlx_abs;
    /// The smallest integer that is not below the value.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.2, -1.2])?.ceil()?.to_vec::<f32>()?, [2.0, -1.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_ceil")]
    ceil = mlx_ceil;
    /// Cosine, in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, PI])?.cos()?.all_close(&array!([1.0, -1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_cos")]
    cos = mlx_cos;
    /// Exponential.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 1.0])?.exp()?.all_close(&array!([1.0, 1.0f32.exp()])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_exp")]
    exp = mlx_exp;
    /// `exp(x) - 1`, precise near zero.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// // `exp(x) - 1` would be zero here.
    /// assert!(array!([1e-10])?.expm1()?.all_close(&array!([1e-10])?, 1e-5, 0.0)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_expm1")]
    expm1 = mlx_expm1;
    /// The largest integer that is not above the value.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.2, -1.2])?.floor()?.to_vec::<f32>()?, [1.0, -2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_floor")]
    floor = mlx_floor;
    /// Whether the value is neither infinite nor NaN.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([1.0, f32::INFINITY, f32::NAN])?;
    /// assert_eq!(x.is_finite()?.to_vec::<bool>()?, [true, false, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_isfinite")]
    is_finite = mlx_isfinite;
    /// Whether the value is NaN.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([1.0, f32::INFINITY, f32::NAN])?;
    /// assert_eq!(x.is_nan()?.to_vec::<bool>()?, [false, false, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_isnan")]
    is_nan = mlx_isnan;
    /// Natural logarithm.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([1.0, 10.0])?.log()?.all_close(&array!([0.0, 10.0f32.ln()])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_log")]
    log = mlx_log;
    /// `log(1 + x)`, precise near zero.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// // `log(1 + x)` would be zero here.
    /// assert!(array!([1e-10])?.log1p()?.all_close(&array!([1e-10])?, 1e-5, 0.0)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_log1p")]
    log1p = mlx_log1p;
    /// Logical negation.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([true, false])?.logical_not()?.to_vec::<bool>()?, [false, true]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_logical_not")]
    logical_not = mlx_logical_not;
    /// The value with the opposite sign.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1, -2])?.negative()?.to_vec::<i32>()?, [-1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_negative")]
    negative = mlx_negative;
    /// `1 / x`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([2.0, -4.0])?.reciprocal()?.to_vec::<f32>()?, [0.5, -0.25]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_reciprocal")]
    reciprocal = mlx_reciprocal;
    /// `1 / sqrt(x)`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([4.0, 16.0])?.rsqrt()?.all_close(&array!([0.5, 0.25])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_rsqrt")]
    rsqrt = mlx_rsqrt;
    /// Logistic function `1 / (1 + exp(-x))`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 100.0])?.sigmoid()?.all_close(&array!([0.5, 1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_sigmoid")]
    sigmoid = mlx_sigmoid;
    /// The sign of the value: -1, 0 or 1.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([-7, 0, 7])?.sign()?.to_vec::<i32>()?, [-1, 0, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_sign")]
    sign = mlx_sign;
    /// Sine, in radians.
    ///
    /// ```
    /// use std::f32::consts::PI;
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, PI / 2.0])?.sin()?.all_close(&array!([0.0, 1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_sin")]
    sin = mlx_sin;
    /// Square root.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([4.0, 9.0])?.sqrt()?.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_sqrt")]
    sqrt = mlx_sqrt;
    /// `x * x`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([-2, 3])?.square()?.to_vec::<i32>()?, [4, 9]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_square")]
    square = mlx_square;
    /// Hyperbolic tangent.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 100.0])?.tanh()?.all_close(&array!([0.0, 1.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_tanh")]
    tanh = mlx_tanh;
    /// The same values. Gradients do not pass through.
    ///
    /// ```
    /// use mlx_rs_core::{Array, array};
    /// use mlx_rs_core::{Result, transforms::grad};
    /// let f = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].multiply(&x[0].stop_gradient()?)?]) };
    /// // The second factor counts as a constant.
    /// assert_eq!(grad(f, &[0])(&[array!(3.0)?])?[0].item::<f32>()?, 3.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_stop_gradient")]
    stop_gradient = mlx_stop_gradient;
}

/// Declares functions that MLX supports only for real types. For complex types, MLX aborts the
/// process during evaluation.
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
                        // SAFETY: all handles are live, and the type is real.
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
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 1.0])?.erf()?.all_close(&array!([0.0, 0.842_700_8])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_erf")]
    erf = mlx_erf;
    /// The inverse of the error function.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.842_700_8])?.erfinv()?.all_close(&array!([1.0])?, 1e-4, 1e-4)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_erfinv")]
    erfinv = mlx_erfinv;
}

impl Array {
    /// `x * sigmoid(x)` (Elfwing et al. 2018, also called swish).
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert!(array!([0.0, 100.0])?.silu()?.all_close(&array!([0.0, 100.0])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the data type does not fit.
    pub fn silu(&self) -> Result<Array> {
        self.multiply(&self.sigmoid()?)
    }

    /// Rounds to the nearest value with `decimals` digits after the decimal point. Halves are
    /// rounded to even.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([0.5, 1.5, 2.4])?.round(0)?.to_vec::<f32>()?, [0.0, 2.0, 2.0]);
    /// assert!(array!([2.345])?.round(1)?.all_close(&array!([2.3])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the data type does not fit.
    #[doc(alias = "mlx_round")]
    pub fn round(&self, decimals: i32) -> Result<Array> {
        if decimals >= 0 && (self.dtype().is_integer() || self.dtype() == crate::Dtype::Bool) {
            // Integers are returned unchanged, because MLX would convert them to floats, which do
            // not represent every integer.
            return Ok(self.clone());
        }
        call::array("round", |out, s| {
            // SAFETY: all handles are live for the length of the call.
            unsafe { mlx_sys::mlx_round(out, self.raw(), decimals, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Replaces NaN by `nan`. Infinities are replaced by `posinf` and `neginf`, or by default by
    /// the greatest and least finite values of the type. Types without NaN and infinities are
    /// unchanged.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let x = array!([f32::NAN, f32::INFINITY, 1.0])?;
    /// assert_eq!(x.nan_to_num(0.0, Some(9.0), None)?.to_vec::<f32>()?, [0.0, 9.0, 1.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message for `float64` and complex types.
    #[doc(alias = "mlx_nan_to_num")]
    pub fn nan_to_num(&self, nan: f32, posinf: Option<f32>, neginf: Option<f32>) -> Result<Array> {
        // MLX's default for the greatest value of half types is 0, so the value is passed.
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
}
