//! Reductions over axes, and softmax. `scan.rs` has running reductions.
//!
//! ```
//! use mlx_rs_core::{All, Array};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! assert_eq!(a.sum(All, false)?.item::<f32>()?, 10.0);
//! assert_eq!(a.mean(0, false)?.to_vec::<f32>()?, [2.0, 3.0]);
//! assert_eq!(a.max(&[0, 1], true)?.shape(), [1, 1]);
//! # Ok(()) }
//! ```

use crate::array::Array;
use crate::call;
use crate::error::{Error, ErrorKind, Result};

/// The axes of a reduction: one (`-1`), several (`&[0, 1]`), or [`All`].
#[derive(Debug, Clone, Copy)]
pub enum Axes<'a> {
    /// Every axis.
    All,
    /// One axis; negative counts from the last.
    One(i32),
    /// Several axes.
    Many(&'a [i32]),
}

/// Every axis.
#[derive(Debug, Clone, Copy)]
pub struct All;

impl From<All> for Axes<'_> {
    fn from(_: All) -> Self {
        Axes::All
    }
}
impl From<i32> for Axes<'_> {
    fn from(axis: i32) -> Self {
        Axes::One(axis)
    }
}
impl<'a> From<&'a [i32]> for Axes<'a> {
    fn from(axes: &'a [i32]) -> Self {
        Axes::Many(axes)
    }
}
impl<'a, const N: usize> From<&'a [i32; N]> for Axes<'a> {
    fn from(axes: &'a [i32; N]) -> Self {
        Axes::Many(axes)
    }
}

macro_rules! reductions {
    ($($(#[$doc:meta])* example: $(#[$example:meta])* $name:ident = $all:ident, $one:ident, $many:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// Reduced axes are dropped. With `keepdims`, they are kept with length one.
                ///
                $(#[$example])*
                ///
                /// # Errors
                /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the
                /// type is not supported, or there are no elements to reduce.
                pub fn $name<'a>(&self, axes: impl Into<Axes<'a>>, keepdims: bool) -> Result<Array> {
                    let op = stringify!($name);
                    let mut input = std::borrow::Cow::Borrowed(self);
                    if matches!(stringify!($name), "all" | "any") && self.dtype().is_float() {
                        // MLX checks bits, and minus zero has a bit that is set, so the values are
                        // converted first.
                        input = std::borrow::Cow::Owned(input.astype(crate::Dtype::Bool)?);
                    }
                    match axes.into() {
                        Axes::All => call::array(op, |out, s| {
                            // SAFETY: all handles are live for the length of the call.
                            unsafe { mlx_sys::$all(out, input.raw(), keepdims, s) }
                        }),
                        Axes::One(axis) => {
                            self.axis(op, axis)?;
                            call::array(op, |out, s| {
                                // SAFETY: all handles are live; the axis exists.
                                unsafe { mlx_sys::$one(out, input.raw(), axis, keepdims, s) }
                            })
                        }
                        Axes::Many(axes) => {
                            for &axis in axes {
                                self.axis(op, axis)?;
                            }
                            call::array(op, |out, s| {
                                // SAFETY: pointer and length describe the slice; the axes exist.
                                unsafe {
                                    mlx_sys::$many(out, input.raw(), axes.as_ptr(), axes.len(), keepdims, s)
                                }
                            })
                        }
                    }
                    .map_err(|e| e.with_inputs(&[self]))
                }
            )*
        }
    };
}

reductions! {
    /// Whether every value is true.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[true, true], [true, false]])?;
    /// assert_eq!(a.all(1, false)?.to_vec::<bool>()?, [true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_all_axes", "mlx_all_axis", "mlx_all"))]
    all = mlx_all, mlx_all_axis, mlx_all_axes;
    /// Whether any value is true.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[true, false], [false, false]])?;
    /// assert_eq!(a.any(1, false)?.to_vec::<bool>()?, [true, false]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_any_axes", "mlx_any_axis", "mlx_any"))]
    any = mlx_any, mlx_any_axis, mlx_any_axes;
    /// The sum.
    example:
    /// ```
    /// use mlx_rs_core::{All, array};
    /// let a = array!([[1, 2], [3, 4]])?;
    /// assert_eq!(a.sum(All, false)?.item::<i32>()?, 10);
    /// assert_eq!(a.sum(0, false)?.to_vec::<i32>()?, [4, 6]);
    /// assert_eq!(a.sum(&[0, 1], true)?.shape(), [1, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_sum_axes", "mlx_sum_axis", "mlx_sum"))]
    sum = mlx_sum, mlx_sum_axis, mlx_sum_axes;
    /// The product.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [3, 4]])?.prod(-1, false)?.to_vec::<i32>()?, [2, 12]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_prod_axes", "mlx_prod_axis", "mlx_prod"))]
    prod = mlx_prod, mlx_prod_axis, mlx_prod_axes;
    /// The arithmetic mean.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1.0, 2.0], [3.0, 4.0]])?.mean(0, false)?.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_mean_axes", "mlx_mean_axis", "mlx_mean"))]
    mean = mlx_mean, mlx_mean_axis, mlx_mean_axes;
    /// The greatest value.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 5], [3, 4]])?.max(0, false)?.to_vec::<i32>()?, [3, 5]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_max_axes", "mlx_max_axis", "mlx_max"))]
    max = mlx_max, mlx_max_axis, mlx_max_axes;
    /// The least value.
    example:
    /// ```
    /// use mlx_rs_core::{All, array};
    /// assert_eq!(array!([[1, 5], [3, 4]])?.min(All, false)?.item::<i32>()?, 1);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_min_axes", "mlx_min_axis", "mlx_min"))]
    min = mlx_min, mlx_min_axis, mlx_min_axes;
}

impl Array {
    /// `log(sum(exp(x)))` over `axes`, computed without overflow. Integers and booleans are
    /// converted to `float32` first. MLX alone would compute their maximum and differences in their
    /// own type, where differences wrap around.
    ///
    /// Reduced axes are dropped. With `keepdims`, they are kept with length one.
    ///
    /// ```
    /// use mlx_rs_core::{All, array};
    /// let y = array!([1000.0, 1000.0])?.logsumexp(All, false)?; // `exp` alone would overflow
    /// assert!(y.all_close(&array!(1000.0 + 2.0f32.ln())?, 1e-5, 0.0)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when there are no
    /// elements to reduce.
    #[doc(alias("mlx_logsumexp_axes", "mlx_logsumexp"))]
    pub fn logsumexp<'a>(&self, axes: impl Into<Axes<'a>>, keepdims: bool) -> Result<Array> {
        let op = "logsumexp";
        let axes = axes.into();
        let listed = match axes {
            Axes::All => Vec::new(),
            Axes::One(_) | Axes::Many(_) => self.listed(axes),
        };
        for &axis in &listed {
            self.axis(op, axis)?;
        }
        let inexact = self.inexact()?;
        call::array(op, |out, s| match axes {
            // SAFETY: all handles are live for the length of the call.
            Axes::All => unsafe { mlx_sys::mlx_logsumexp(out, inexact.raw(), keepdims, s) },
            // SAFETY: all handles are live. Pointer and length describe the list, whose axes exist.
            Axes::One(_) | Axes::Many(_) => unsafe {
                let (axes, n) = (listed.as_ptr(), listed.len());
                mlx_sys::mlx_logsumexp_axes(out, inexact.raw(), axes, n, keepdims, s)
            },
        })
        .and_then(|sum| {
            // If several of the reduced axes have one element, MLX removes only one of them.
            if keepdims || sum.ndim() + listed.len() == self.ndim() {
                return Ok(sum);
            }
            let reduced = self.distinct_axes(op, &self.listed(axes))?;
            let remaining = self.shape().iter().enumerate();
            let remaining = remaining.filter(|(axis, _)| !reduced.contains(&(*axis as i32)));
            let shape: Vec<i32> = remaining.map(|(_, &length)| length).collect();
            if sum.shape() != shape {
                return sum.reshape(&shape);
            }
            Ok(sum)
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// This array, converted to `float32` if it has integers or booleans.
    pub(super) fn inexact(&self) -> Result<std::borrow::Cow<'_, Array>> {
        if self.dtype().is_float() || self.dtype() == crate::Dtype::Complex64 {
            return Ok(std::borrow::Cow::Borrowed(self));
        }
        Ok(std::borrow::Cow::Owned(self.astype(crate::Dtype::Float32)?))
    }

    /// The index of the greatest value along `axis`, as `uint32`. If several values are the
    /// greatest, it is the first index.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 5], [4, 3]])?.argmax(-1, false)?.to_vec::<u32>()?, [1, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the axis is
    /// empty.
    #[doc(alias = "mlx_argmax_axis")]
    pub fn argmax(&self, axis: i32, keepdims: bool) -> Result<Array> {
        self.axis("argmax", axis)?;
        call::array("argmax", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_argmax_axis(out, self.raw(), axis, keepdims, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The index of the least value along `axis`, as `uint32`. If several values are the least, it
    /// is the first index.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 5], [4, 3]])?.argmin(-1, false)?.to_vec::<u32>()?, [0, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the axis is
    /// empty.
    #[doc(alias = "mlx_argmin_axis")]
    pub fn argmin(&self, axis: i32, keepdims: bool) -> Result<Array> {
        self.axis("argmin", axis)?;
        call::array("argmin", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_argmin_axis(out, self.raw(), axis, keepdims, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// [`Array::argmax`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1, 2], [4, 3]])?.argmax_flat(false)?.item::<u32>()?, 2);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Shape`] for more elements than `i32::MAX`; MLX's message for an empty
    /// array.
    #[doc(alias = "mlx_argmax")]
    pub fn argmax_flat(&self, keepdims: bool) -> Result<Array> {
        self.count("argmax")?;
        let keepdims = keepdims && self.ndim() > 0;
        call::array("argmax", |out, s| {
            // SAFETY: all handles are live. The number of elements fits an `i32`.
            unsafe { mlx_sys::mlx_argmax(out, self.raw(), keepdims, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// [`Array::argmin`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[2, 5], [4, 1]])?.argmin_flat(false)?.item::<u32>()?, 3);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Shape`] for more elements than `i32::MAX`; MLX's message for an empty
    /// array.
    #[doc(alias = "mlx_argmin")]
    pub fn argmin_flat(&self, keepdims: bool) -> Result<Array> {
        self.count("argmin")?;
        let keepdims = keepdims && self.ndim() > 0;
        call::array("argmin", |out, s| {
            // SAFETY: all handles are live. The number of elements fits an `i32`.
            unsafe { mlx_sys::mlx_argmin(out, self.raw(), keepdims, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// `exp(x) / sum(exp(x))` over `axes`, computed without overflow. `precise` accumulates in
    /// float32. Integers and booleans are converted to `float32` first, because MLX alone would
    /// convert some results to integers.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let p = array!([[0.0, 0.0], [0.0, 1e4]])?.softmax(-1, true)?;
    /// assert_eq!(p.to_vec::<f32>()?, [0.5, 0.5, 0.0, 1.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis.
    #[doc(alias("mlx_softmax_axes", "mlx_softmax_axis", "mlx_softmax"))]
    pub fn softmax<'a>(&self, axes: impl Into<Axes<'a>>, precise: bool) -> Result<Array> {
        let op = "softmax";
        let inexact = self.inexact()?;
        match axes.into() {
            Axes::All => call::array(op, |out, s| {
                // SAFETY: all handles are live.
                unsafe { mlx_sys::mlx_softmax(out, inexact.raw(), precise, s) }
            }),
            Axes::One(axis) => {
                self.axis(op, axis)?;
                call::array(op, |out, s| {
                    // SAFETY: all handles are live; the axis exists.
                    unsafe { mlx_sys::mlx_softmax_axis(out, inexact.raw(), axis, precise, s) }
                })
            }
            Axes::Many(axes) => {
                let axes = self.distinct_axes(op, axes)?;
                call::array(op, |out, s| {
                    // SAFETY: pointer and length describe the axes, which exist.
                    unsafe {
                        mlx_sys::mlx_softmax_axes(
                            out,
                            inexact.raw(),
                            axes.as_ptr(),
                            axes.len(),
                            precise,
                            s,
                        )
                    }
                })
            }
        }
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The median over `axes`. For an even number of values, it is the mean of the two middle
    /// values.
    ///
    /// ```
    /// use mlx_rs_core::{All, array};
    /// assert_eq!(array!([3.0, 1.0, 2.0])?.median(All, false)?.item::<f32>()?, 2.0);
    /// assert_eq!(array!([4.0, 1.0])?.median(0, false)?.item::<f32>()?, 2.5);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; [`crate::ErrorKind::Shape`] when
    /// there are no values.
    pub fn median<'a>(&self, axes: impl Into<Axes<'a>>, keepdims: bool) -> Result<Array> {
        let op = "median";
        self.count(op)?;
        let axes = self.distinct_axes(op, &self.listed(axes.into()))?;
        if axes.iter().any(|&i| self.shape()[i as usize] == 0) {
            return Err(
                Error::new(ErrorKind::Shape, op, "an empty axis has no median")
                    .with_inputs(&[self]),
            );
        }
        if axes.is_empty() {
            // Without axes, each value is its own median. MLX would search for an axis to flatten.
            return self.mean(&[] as &[i32], keepdims);
        }
        // This is MLX's algorithm, but with a sort whose gradient is correct.
        let mut order: Vec<i32> = (0..self.ndim() as i32).collect();
        order.retain(|axis| !axes.contains(axis));
        let first = order.len() as i32;
        order.extend(&axes);
        let sorted = self.transpose_axes(&order)?.flatten(first, -1)?.sort(-1)?;
        let (length, at) = (sorted.dim(-1)?, sorted.dim(-1)? / 2);
        let middle = |at: i32| -> Result<Array> {
            let one = sorted.slice_axis(-1, at, at + 1)?.squeeze_axis(-1)?;
            let exact = one.dtype().is_float() || one.dtype() == crate::Dtype::Complex64;
            one.astype(if exact {
                one.dtype()
            } else {
                crate::Dtype::Float32
            })
        };
        let median = if length % 2 == 0 {
            let half = Array::scalar(0.5f32)?.astype(middle(at)?.dtype())?;
            middle(at)?.add(&middle(at - 1)?)?.multiply(&half)?
        } else {
            middle(at)?
        };
        let mut axes = axes;
        axes.sort_unstable();
        if keepdims {
            median.expand_dims_axes(&axes)
        } else {
            Ok(median)
        }
    }

    /// The number of elements along `axes`, as a scalar of `dtype`. With `inverted`, it is one
    /// divided by this number. In a graph that is compiled without shapes, the number is computed
    /// when the graph runs.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, zeros};
    /// let a = zeros(&[2, 3, 4], Dtype::Float32)?;
    /// assert_eq!(a.number_of_elements(&[0, 2], false, Dtype::Int32)?.item::<i32>()?, 8);
    /// assert_eq!(a.number_of_elements(&[0, 2], true, Dtype::Float32)?.item::<f32>()?, 0.125);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; [`crate::ErrorKind::Value`] when
    /// zero would be inverted.
    #[doc(alias = "mlx_number_of_elements")]
    pub fn number_of_elements(
        &self,
        axes: &[i32],
        inverted: bool,
        dtype: crate::Dtype,
    ) -> Result<Array> {
        let op = "number_of_elements";
        let axes = self.distinct_axes(op, axes)?;
        if inverted && (!dtype.is_float() || axes.iter().any(|&i| self.shape()[i as usize] == 0)) {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                "the inverted number needs a float type and at least one element",
            )
            .with_inputs(&[self]));
        }
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the axes, which exist.
            unsafe {
                mlx_sys::mlx_number_of_elements(
                    out,
                    self.raw(),
                    axes.as_ptr(),
                    axes.len(),
                    inverted,
                    dtype.raw(),
                    s,
                )
            }
        })
    }
}

macro_rules! spreads {
    ($($(#[$doc:meta])* example: $(#[$example:meta])* $name:ident = $all:ident, $one:ident, $many:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                /// The statistic is computed over `axes`. With `keepdims`, these are kept with
                /// length one. The divisor is the number of values minus `ddof`, the degrees of
                /// freedom.
                ///
                $(#[$example])*
                ///
                /// # Errors
                /// [`crate::ErrorKind::Index`] when there is no such axis.
                pub fn $name<'a>(
                    &self,
                    axes: impl Into<Axes<'a>>,
                    keepdims: bool,
                    ddof: i32,
                ) -> Result<Array> {
                    let op = stringify!($name);
                    match axes.into() {
                        Axes::All => call::array(op, |out, s| {
                            // SAFETY: all handles are live.
                            unsafe { mlx_sys::$all(out, self.raw(), keepdims, ddof, s) }
                        }),
                        Axes::One(axis) => {
                            self.axis(op, axis)?;
                            call::array(op, |out, s| {
                                // SAFETY: all handles are live; the axis exists.
                                unsafe { mlx_sys::$one(out, self.raw(), axis, keepdims, ddof, s) }
                            })
                        }
                        Axes::Many(axes) => {
                            let axes = self.distinct_axes(op, axes)?;
                            call::array(op, |out, s| {
                                // SAFETY: pointer and length describe the axes, which exist.
                                unsafe {
                                    mlx_sys::$many(
                                        out,
                                        self.raw(),
                                        axes.as_ptr(),
                                        axes.len(),
                                        keepdims,
                                        ddof,
                                        s,
                                    )
                                }
                            })
                        }
                    }
                    .map_err(|e| e.with_inputs(&[self]))
                }
            )*
        }
    };
}

spreads! {
    /// The variance.
    example:
    /// ```
    /// use mlx_rs_core::{All, array};
    /// let a = array!([1.0, 3.0])?;
    /// assert_eq!(a.var(All, false, 0)?.item::<f32>()?, 1.0);
    /// assert_eq!(a.var(All, false, 1)?.item::<f32>()?, 2.0); // of a sample
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_var_axes", "mlx_var_axis", "mlx_var"))]
    var = mlx_var, mlx_var_axis, mlx_var_axes;
    /// The standard deviation.
    example:
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[1.0, 3.0], [2.0, 8.0]])?.std(-1, false, 0)?.to_vec::<f32>()?, [1.0, 3.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[doc(alias("mlx_std_axes", "mlx_std_axis", "mlx_std"))]
    std = mlx_std, mlx_std_axis, mlx_std_axes;
}
