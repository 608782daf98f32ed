//! Reductions over axes, cumulative sums and softmax.

use crate::array::Array;
use crate::call;
use crate::error::Result;

/// Which axes a reduction covers: one (`-1`), several (`&[0, 1]`), or [`All`].
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
    ($($(#[$doc:meta])* $name:ident = $all:ident, $one:ident, $many:ident;)*) => {
        impl Array {
            $(
                $(#[$doc])*
                ///
                /// Reduced axes are dropped, or kept with length one when `keepdims`.
                ///
                /// # Errors
                /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when the
                /// type does not fit or nothing is left to reduce.
                pub fn $name<'a>(&self, axes: impl Into<Axes<'a>>, keepdims: bool) -> Result<Array> {
                    let op = stringify!($name);
                    match axes.into() {
                        Axes::All => call::array(op, |out, s| {
                            // SAFETY: all handles are live for the length of the call.
                            unsafe { mlx_sys::$all(out, self.raw(), keepdims, s) }
                        }),
                        Axes::One(axis) => {
                            self.axis(op, axis)?;
                            call::array(op, |out, s| {
                                // SAFETY: all handles are live; the axis exists.
                                unsafe { mlx_sys::$one(out, self.raw(), axis, keepdims, s) }
                            })
                        }
                        Axes::Many(axes) => {
                            for &axis in axes {
                                self.axis(op, axis)?;
                            }
                            call::array(op, |out, s| {
                                // SAFETY: pointer and length describe the slice; the axes exist.
                                unsafe {
                                    mlx_sys::$many(out, self.raw(), axes.as_ptr(), axes.len(), keepdims, s)
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
    all = mlx_all, mlx_all_axis, mlx_all_axes;
    /// Whether some value is true.
    any = mlx_any, mlx_any_axis, mlx_any_axes;
    /// The sum.
    sum = mlx_sum, mlx_sum_axis, mlx_sum_axes;
    /// The product.
    prod = mlx_prod, mlx_prod_axis, mlx_prod_axes;
    /// The arithmetic mean.
    mean = mlx_mean, mlx_mean_axis, mlx_mean_axes;
    /// The greatest value.
    max = mlx_max, mlx_max_axis, mlx_max_axes;
    /// The least value.
    min = mlx_min, mlx_min_axis, mlx_min_axes;
    /// `log(sum(exp(x)))`, stable.
    logsumexp = mlx_logsumexp, mlx_logsumexp_axis, mlx_logsumexp_axes;
}

impl Array {
    /// The variance with `ddof` degrees of freedom taken off the count.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis.
    pub fn var(&self, axis: i32, keepdims: bool, ddof: i32) -> Result<Array> {
        self.axis("var", axis)?;
        call::array("var", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_var_axis(out, self.raw(), axis, keepdims, ddof, s) }
        })
    }

    /// The index of the greatest value along `axis` (the first of equals), as `uint32`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when it is empty.
    pub fn argmax(&self, axis: i32, keepdims: bool) -> Result<Array> {
        self.axis("argmax", axis)?;
        call::array("argmax", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_argmax_axis(out, self.raw(), axis, keepdims, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// The index of the least value along `axis` (the first of equals), as `uint32`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis; MLX's message when it is empty.
    pub fn argmin(&self, axis: i32, keepdims: bool) -> Result<Array> {
        self.axis("argmin", axis)?;
        call::array("argmin", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_argmin_axis(out, self.raw(), axis, keepdims, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// Running sums along `axis`, from the end when `reverse`, without the value itself unless
    /// `inclusive`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis.
    pub fn cumsum(&self, axis: i32, reverse: bool, inclusive: bool) -> Result<Array> {
        self.axis("cumsum", axis)?;
        call::array("cumsum", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_cumsum(out, self.raw(), axis, reverse, inclusive, s) }
        })
    }

    /// `exp(x) / sum(exp(x))` along `axis`, stable; `precise` accumulates in float32.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Index`] when there is no such axis.
    pub fn softmax(&self, axis: i32, precise: bool) -> Result<Array> {
        self.axis("softmax", axis)?;
        call::array("softmax", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_softmax_axis(out, self.raw(), axis, precise, s) }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }
}
