//! Discrete Fourier transforms (Cooley and Tukey 1965), as in `mlx.core.fft`: transforms of complex
//! values, transforms of real values, and shifts of the zero frequency. Input is converted to
//! `complex64` (for transforms of real values to `float32`), which limits the precision.
//!
//! ```
//! use mlx_rs_core::{Array, fft};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let x = Array::vector(&[1.0f32, 0.0, 0.0, 0.0])?;
//! let spectrum = fft::rfft(&x, None, -1)?; // all ones
//! assert_eq!(spectrum.shape(), [3]);
//! assert_eq!(fft::irfft(&spectrum, None, -1)?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 0.0]);
//! # Ok(()) }
//! ```

use mlx_sys as sys;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;
use crate::ops::{self, Axes};
use crate::{call, compat};

/// Whether the input or the output of a transform is real.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Complex,
    /// Real input. The last axis of the output has the `n / 2 + 1` frequencies that are not
    /// redundant.
    FromReal,
    /// Real output.
    ToReal,
}

/// Checks axes and lengths, and adds the default lengths.
fn plan(
    op: &'static str,
    x: &Array,
    lengths: Option<&[i32]>,
    axes: &[i32],
    kind: Kind,
) -> Result<(Vec<i32>, Vec<i32>)> {
    let axes = x.distinct_axes(op, axes)?;
    let bad = |kind, why: String| Err(Error::new(kind, op, why).with_inputs(&[x]));
    if axes.is_empty() {
        return bad(ErrorKind::Value, String::from("give at least one axis"));
    }
    let lengths = match lengths {
        Some(lengths) if lengths.len() == axes.len() => lengths.to_vec(),
        Some(lengths) => {
            return bad(
                ErrorKind::Shape,
                format!(
                    "{} lengths were given for {} axes; give one for each",
                    lengths.len(),
                    axes.len()
                ),
            );
        }
        None => {
            // The axes were resolved above, so they are not negative.
            let mut lengths: Vec<i32> = axes.iter().map(|&i| x.shape()[i as usize]).collect();
            if let (Kind::ToReal, Some(last)) = (kind, lengths.last_mut()) {
                *last = (i64::from(*last) * 2 - 2).min(i64::from(i32::MAX)) as i32;
            }
            lengths
        }
    };
    if let Some(n) = lengths.iter().find(|&&n| n <= 0) {
        return bad(
            ErrorKind::Value,
            format!("the length {n} of a transform must be at least 1"),
        );
    }
    // MLX allocates the padded input in addition to the result, so it must also fit the budget.
    let mut padded = x.shape().to_vec();
    for (&axis, &n) in axes.iter().zip(&lengths) {
        padded[axis as usize] = n;
    }
    if crate::memory::checked_bytes(&padded, 8).is_none_or(|b| b > crate::memory::budget()) {
        return bad(
            ErrorKind::OutOfMemory,
            format!("a transform of shape {padded:?} exceeds the memory budget"),
        );
    }
    Ok((lengths, axes))
}

/// Under `vmap`, computes a transform between real and complex values over several axes in two
/// parts: over the last axis, and over the others. MLX's own rule for the batch shortens all axes
/// and writes out of bounds.
fn in_parts(x: &Array, n: &[i32], axes: &[i32], kind: Kind) -> Option<Result<Array>> {
    let ((&length, lengths), (&last, others)) = (n.split_last()?, axes.split_last()?);
    if !mapped::inside() || others.is_empty() {
        return None;
    }
    match kind {
        Kind::Complex => None,
        Kind::FromReal => {
            let half = rfft(x, Some(length), last);
            Some(half.and_then(|half| fftn(&half, Some(lengths), others)))
        }
        Kind::ToReal => {
            let half = ifftn(x, Some(lengths), others);
            Some(half.and_then(|half| irfft(&half, Some(length), last)))
        }
    }
}

macro_rules! transforms {
    (
        $($(#[$doc:meta])*
        example: $(#[$ex1:meta])*
        example: $(#[$ex2:meta])*
        example: $(#[$exn:meta])*
        $one:ident, $two:ident, $many:ident = $c1:ident, $c2:ident, $cn:ident, $kind:ident;)*
    ) => {
        $(
            $(#[$doc])*
            /// Transforms along `axis`, which is first truncated or zero-padded to `n` (by default
            /// its length).
            ///
            $(#[$ex1])*
            ///
            /// # Errors
            /// [`ErrorKind::Index`] when there is no such axis; [`ErrorKind::Value`] for a length
            /// that is not positive; [`ErrorKind::OutOfMemory`] beyond the budget.
            pub fn $one(x: &Array, n: Option<i32>, axis: i32) -> Result<Array> {
                let op = stringify!($one);
                let n = n.map(|n| [n]);
                let (n, axes) = plan(op, x, n.as_ref().map(|n| &n[..]), &[axis], Kind::$kind)?;
                call::array(op, |out, s| {
                    // SAFETY: all handles are live; the axis exists and the length is positive.
                    unsafe { compat::$c1(out, x.raw(), n[0], axes[0], s) }
                })
                .map_err(|e| e.with_inputs(&[x]))
            }

            $(#[$doc])*
            /// Transforms over two axes, which are usually `[-2, -1]`.
            ///
            $(#[$ex2])*
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($many), "`].")]
            pub fn $two(x: &Array, n: Option<[i32; 2]>, axes: [i32; 2]) -> Result<Array> {
                let op = stringify!($two);
                let (n, axes) = plan(op, x, n.as_ref().map(|n| &n[..]), &axes, Kind::$kind)?;
                if let Some(parts) = in_parts(x, &n, &axes, Kind::$kind) {
                    return parts;
                }
                call::array(op, |out, s| {
                    // SAFETY: pointers and lengths describe the slices; the axes exist and the
                    // lengths are positive.
                    unsafe {
                        compat::$c2(out, x.raw(), n.as_ptr(), n.len(), axes.as_ptr(), axes.len(), s)
                    }
                })
                .map_err(|e| e.with_inputs(&[x]))
            }

            $(#[$doc])*
            /// Transforms over `axes`. Each axis is first truncated or zero-padded to its entry of
            /// `n` (by default its length).
            ///
            $(#[$exn])*
            ///
            /// # Errors
            /// [`ErrorKind::Index`] for axes that do not exist or are named twice;
            /// [`ErrorKind::Shape`] when there is not one length per axis; [`ErrorKind::Value`] for
            /// no axes or a length that is not positive; [`ErrorKind::OutOfMemory`] beyond the
            /// budget.
            pub fn $many<'a>(
                x: &Array,
                n: Option<&[i32]>,
                axes: impl Into<Axes<'a>>,
            ) -> Result<Array> {
                let op = stringify!($many);
                let axes = x.listed(axes.into());
                let (n, axes) = plan(op, x, n, &axes, Kind::$kind)?;
                if let Some(parts) = in_parts(x, &n, &axes, Kind::$kind) {
                    return parts;
                }
                call::array(op, |out, s| {
                    // SAFETY: pointers and lengths describe the slices; the axes exist and the
                    // lengths are positive.
                    unsafe {
                        compat::$cn(out, x.raw(), n.as_ptr(), n.len(), axes.as_ptr(), axes.len(), s)
                    }
                })
                .map_err(|e| e.with_inputs(&[x]))
            }
        )*
    };
}

/// The frequencies of [`fft`] for `n` points at distance `d`, `float32` `[n]`: zero and positive
/// frequencies, then negative ones.
///
/// ```
/// use mlx_rs_core::fft;
/// assert_eq!(fft::fftfreq(4, 0.5)?.to_vec::<f32>()?, [0.0, 0.5, -1.0, -0.5]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without points.
pub fn fftfreq(n: i32, d: f64) -> Result<Array> {
    ops::frequencies(n, d, false)
}

/// The frequencies of [`rfft`] for `n` points at distance `d`, `float32` `[n / 2 + 1]`.
///
/// ```
/// use mlx_rs_core::fft;
/// assert_eq!(fft::rfftfreq(4, 0.5)?.to_vec::<f32>()?, [0.0, 0.5, 1.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] without points.
pub fn rfftfreq(n: i32, d: f64) -> Result<Array> {
    ops::frequencies(n, d, true)
}

transforms! {
    /// Fourier transform, `complex64`.
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([1.0, 1.0, 1.0, 1.0])?;
    /// assert_eq!(fft::fft(&x, None, -1)?.abs()?.to_vec::<f32>()?, [4.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_fft")]
    example:
    /// ```
    /// use mlx_rs_core::{Dtype, fft, ones};
    /// let y = fft::fft2(&ones(&[2, 2], Dtype::Float32)?, None, [-2, -1])?;
    /// assert_eq!(y.abs()?.to_vec::<f32>()?, [4.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_fft2")]
    example:
    /// ```
    /// use mlx_rs_core::{All, Dtype, fft, ones};
    /// let y = fft::fftn(&ones(&[2, 2, 2], Dtype::Float32)?, None, All)?;
    /// assert_eq!(y.abs()?.at::<f32>(&[0, 0, 0])?, 8.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_fftn")]
    fft, fft2, fftn = mlx_fft_fft, mlx_fft_fft2, mlx_fft_fftn, Complex;
    /// Inverse Fourier transform, `complex64`, divided by the length.
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([1.0, 2.0, 3.0])?;
    /// let back = fft::ifft(&fft::fft(&x, None, -1)?, None, -1)?;
    /// assert!(back.real()?.all_close(&x, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_ifft")]
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([[1.0, 2.0], [3.0, 4.0]])?;
    /// let back = fft::ifft2(&fft::fft2(&x, None, [0, 1])?, None, [0, 1])?;
    /// assert!(back.real()?.all_close(&x, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_ifft2")]
    example:
    /// ```
    /// use mlx_rs_core::{All, array, fft};
    /// let x = array!([[1.0, 2.0], [3.0, 4.0]])?;
    /// let back = fft::ifftn(&fft::fftn(&x, None, All)?, None, All)?;
    /// assert!(back.real()?.all_close(&x, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_ifftn")]
    ifft, ifft2, ifftn = mlx_fft_ifft, mlx_fft_ifft2, mlx_fft_ifftn, Complex;
    /// Fourier transform of real values: the last axis keeps `n / 2 + 1` frequencies.
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([1.0, 0.0, 0.0, 0.0, 0.0])?;
    /// assert_eq!(fft::rfft(&x, None, -1)?.shape(), [3]);
    /// assert_eq!(fft::rfft(&x, Some(8), -1)?.shape(), [5]); // filled with zeros to 8
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_rfft")]
    example:
    /// ```
    /// use mlx_rs_core::{Dtype, fft, ones};
    /// let y = fft::rfft2(&ones(&[4, 6], Dtype::Float32)?, None, [-2, -1])?;
    /// assert_eq!((y.shape(), y.dtype()), (&[4, 4][..], Dtype::Complex64));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_rfft2")]
    example:
    /// ```
    /// use mlx_rs_core::{Dtype, fft, ones};
    /// let y = fft::rfftn(&ones(&[2, 4, 6], Dtype::Float32)?, None, &[1, 2])?;
    /// assert_eq!(y.shape(), [2, 4, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_rfftn")]
    rfft, rfft2, rfftn = mlx_fft_rfft, mlx_fft_rfft2, mlx_fft_rfftn, FromReal;
    /// Inverse of the transform of real values, `float32`; `n` is the number of real values on the
    /// last axis, by default `2 * (length - 1)`.
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([1.0, 2.0, 3.0, 4.0])?;
    /// assert!(fft::irfft(&fft::rfft(&x, None, -1)?, None, -1)?.all_close(&x, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_irfft")]
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([[1.0, 2.0], [3.0, 4.0]])?;
    /// let back = fft::irfft2(&fft::rfft2(&x, None, [0, 1])?, None, [0, 1])?;
    /// assert!(back.all_close(&x, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_irfft2")]
    example:
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// let x = array!([[1.0, 2.0, 3.0]])?;
    /// let back = fft::irfftn(&fft::rfftn(&x, None, &[1])?, Some(&[3]), &[1])?; // odd: say how long
    /// assert!(back.all_close(&x, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_irfftn")]
    irfft, irfft2, irfftn = mlx_fft_irfft, mlx_fft_irfft2, mlx_fft_irfftn, ToReal;
}

macro_rules! shifts {
    ($($(#[$doc:meta])* $name:ident = $c:ident;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Errors
            /// [`ErrorKind::Index`] for axes that do not exist or are named twice.
            pub fn $name<'a>(x: &Array, axes: impl Into<Axes<'a>>) -> Result<Array> {
                let op = stringify!($name);
                let axes = x.distinct_axes(op, &x.listed(axes.into()))?;
                if axes.is_empty() || x.size() == 0 {
                    return Ok(x.clone());
                }
                call::array(op, |out, s| {
                    // SAFETY: pointer and length describe the axes, which exist.
                    unsafe { sys::$c(out, x.raw(), axes.as_ptr(), axes.len(), s) }
                })
                .map_err(|e| e.with_inputs(&[x]))
            }
        )*
    };
}

shifts! {
    /// Moves the zero frequency to the middle of `axes`.
    ///
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// assert_eq!(fft::fftshift(&array!([0, 1, 2, -2, -1])?, 0)?.to_vec::<i32>()?, [-2, -1, 0, 1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_fftshift")]
    fftshift = mlx_fft_fftshift;
    /// The inverse of [`fftshift`].
    ///
    /// ```
    /// use mlx_rs_core::{array, fft};
    /// assert_eq!(fft::ifftshift(&array!([-2, -1, 0, 1, 2])?, 0)?.to_vec::<i32>()?, [0, 1, 2, -2, -1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias = "mlx_fft_ifftshift")]
    ifftshift = mlx_fft_ifftshift;
}
