//! Norms of vectors and matrices, and the cross product.

use mlx_sys as sys;

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::Axes;

/// The kind of norm for [`norm`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Norm {
    /// The square root of the sum of squares: the Euclidean norm of vectors, and the Frobenius norm
    /// of matrices.
    #[default]
    L2,
    /// For a vector, `sum(|x|^p)^(1/p)`. For `p` 0 it is the number of nonzero values; for infinite
    /// `p` it is the greatest or least magnitude. For a matrix, `p` must be 1, 2, infinite, or the
    /// negative of one of these. With `p` 2 and -2 it is the greatest and the least singular value.
    /// Otherwise it is the greatest (for negative `p` the least) sum of magnitudes: of columns for
    /// `p` 1 and -1, of rows for infinite `p`.
    P(f64),
    /// Like [`Norm::L2`], for matrices only.
    Frobenius,
    /// The sum of singular values, for matrices only. [`super::singular_values`] computes them.
    Nuclear,
}

/// The norm over `axes`: one axis for vectors, two axes for matrices. Over all axes, [`Norm::L2`]
/// is the norm of the flattened array. With `keepdims`, reduced axes are kept with length one.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[3.0, 4.0], [6.0, 8.0]])?;
/// assert_eq!(linalg::norm(&a, linalg::Norm::L2, -1, false)?.to_vec::<f32>()?, [5.0, 10.0]);
/// assert_eq!(linalg::norm(&a, linalg::Norm::P(1.0), -1, false)?.to_vec::<f32>()?, [7.0, 14.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Index`] for axes that do not exist or are repeated; [`ErrorKind::Shape`] for
/// another number of axes; [`ErrorKind::Value`] for a norm that is not defined for matrices;
/// [`ErrorKind::Dtype`] for a `p`-norm of values that are not floats.
#[doc(alias("mlx_linalg_norm", "mlx_linalg_norm_matrix", "mlx_linalg_norm_l2"))]
pub fn norm<'a>(
    a: &Array,
    which: Norm,
    axes: impl Into<Axes<'a>>,
    keepdims: bool,
) -> Result<Array> {
    let op = "norm";
    let given = axes.into();
    let axes = a.distinct_axes(op, &a.listed(given))?;
    let bad = |kind, why: String| Err(Error::new(kind, op, why).with_inputs(&[a]));
    match which {
        Norm::L2 => {
            if axes.len() > 2 && !matches!(given, Axes::All) {
                return bad(
                    ErrorKind::Shape,
                    format!("{} axes, at most two", axes.len()),
                );
            }
            if axes.len() != 1 && axes.len() != 2 {
                // The norm over all axes, or of a single value.
                let squares = a.abs()?.square()?.sum(&axes[..], keepdims)?;
                return squares.sqrt();
            }
            call::array(op, |out, s| {
                // SAFETY: pointer and length describe the axes, which exist.
                unsafe {
                    sys::mlx_linalg_norm_l2(out, a.raw(), axes.as_ptr(), axes.len(), keepdims, s)
                }
            })
        }
        Norm::P(_) | Norm::Frobenius | Norm::Nuclear if axes.is_empty() || axes.len() > 2 => bad(
            ErrorKind::Shape,
            format!(
                "{} axes were given; a norm of vectors takes one, of matrices two",
                axes.len()
            ),
        ),
        Norm::P(p) => {
            let special = [1.0, -1.0, f64::INFINITY, f64::NEG_INFINITY].contains(&p);
            if axes.len() == 2 && !special {
                return if p == 2.0 || p == -2.0 {
                    spectral(a, &axes, keepdims, p > 0.0)
                } else {
                    bad(ErrorKind::Value, format!("matrices have no {p}-norm"))
                };
            }
            if p.is_nan() {
                return bad(ErrorKind::Value, String::from("p is not a number"));
            }
            call::array(op, |out, s| {
                // SAFETY: pointer and length describe the axes, which exist.
                unsafe {
                    sys::mlx_linalg_norm(out, a.raw(), p, axes.as_ptr(), axes.len(), keepdims, s)
                }
            })
        }
        Norm::Frobenius | Norm::Nuclear if axes.len() != 2 => bad(
            ErrorKind::Shape,
            String::from("this norm is defined for matrices: give two axes"),
        ),
        Norm::Frobenius => call::array(op, |out, s| {
            // SAFETY: pointer and length describe the axes, which exist; the name is a static
            // string.
            unsafe {
                sys::mlx_linalg_norm_matrix(
                    out,
                    a.raw(),
                    c"fro".as_ptr(),
                    axes.as_ptr(),
                    axes.len(),
                    keepdims,
                    s,
                )
            }
        }),
        Norm::Nuclear => {
            let values = of_matrices(a, &axes)?.sum(-1, false)?;
            restored(&values, &axes, keepdims)
        }
    }
    .map_err(|e| e.with_inputs(&[a]))
}

/// The singular values of the matrices over two `axes`, for norms that MLX lacks.
fn of_matrices(a: &Array, axes: &[i32]) -> Result<Array> {
    let mut order: Vec<i32> = (0..a.ndim() as i32).filter(|i| !axes.contains(i)).collect();
    order.extend(axes);
    super::singular_values(&a.transpose_axes(&order)?)
}

fn restored(values: &Array, axes: &[i32], keepdims: bool) -> Result<Array> {
    if keepdims {
        values.expand_dims_axes(axes)
    } else {
        Ok(values.clone())
    }
}

/// The greatest or least singular value.
fn spectral(a: &Array, axes: &[i32], keepdims: bool, greatest: bool) -> Result<Array> {
    let values = of_matrices(a, axes)?;
    let value = if greatest {
        values.max(-1, false)?
    } else {
        values.min(-1, false)?
    };
    restored(&value, axes, keepdims)
}

/// The cross product `a x b` of vectors with two or three values along `axis`. A missing third
/// value counts as zero. If both vectors lack it, the result is the third value alone, without the
/// axis.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let (x, y) = (array!([1.0, 0.0, 0.0])?, array!([0.0, 1.0, 0.0])?);
/// assert_eq!(linalg::cross(&x, &y, -1)?.to_vec::<f32>()?, [0.0, 0.0, 1.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Index`] when the axis does not exist; [`ErrorKind::Shape`] when the axis has
/// another length, or the arrays do not broadcast; [`ErrorKind::Dtype`] for booleans.
#[doc(alias = "mlx_linalg_cross")]
pub fn cross(a: &Array, b: &Array, axis: i32) -> Result<Array> {
    let op = "cross";
    let (la, lb) = (a.shape()[a.axis(op, axis)?], b.shape()[b.axis(op, axis)?]);
    if !(2..=3).contains(&la) || !(2..=3).contains(&lb) {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            "vectors have two or three values along the axis",
        )
        .with_inputs(&[a, b]));
    }
    if a.ndim() != b.ndim() && axis >= 0 {
        // MLX would treat different axes of the two arrays as the same axis.
        return Err(Error::new(
            ErrorKind::Index,
            op,
            "arrays of different numbers of axes need an axis counted from the last",
        )
        .with_inputs(&[a, b]));
    }
    if a.dtype() == Dtype::Bool || b.dtype() == Dtype::Bool {
        return Err(Error::new(
            ErrorKind::Dtype,
            op,
            "booleans have no cross product",
        ));
    }
    // MLX splits both arrays, so they must be contiguous; see `Array::split`.
    let (left, right) = (a.contiguous()?, b.contiguous()?);
    call::array(op, |out, s| {
        // SAFETY: all handles are live. The axis exists in both arrays and has two or three values.
        // No axis has a negative stride.
        unsafe { sys::mlx_linalg_cross(out, left.raw(), right.raw(), axis, s) }
    })
    .map_err(|e| e.with_inputs(&[a, b]))
}
