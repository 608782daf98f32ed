//! Linear algebra, as in `mlx.core.linalg`: norms, factorizations, inverses and solutions.
//!
//! Matrices are the last two axes; leading axes are a batch. MLX supports these functions only on
//! CPUs. If the current stream is on another device, they run on the CPU, and the result can be
//! used anywhere. Types are `float32` and `float64`, unless documented otherwise.
//!
//! When a factorization fails, MLX itself aborts the process, because the exception is on a thread
//! where it cannot be caught. This crate prevents that. A matrix may be singular (to the precision
//! of its type), not positive definite, or not finite. Then the result for that matrix of the batch
//! is **NaN** when evaluated. Other matrices of the batch are not affected.
//!
//! ```
//! use mlx_rs_core::{Array, linalg};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::from_slice(&[2.0f32, 0.0, 0.0, 4.0], &[2, 2])?;
//! assert_eq!(linalg::inv(&a)?.to_vec::<f32>()?, [0.5, 0.0, 0.0, 0.25]);
//! let b = Array::vector(&[2.0f32, 8.0])?;
//! assert_eq!(linalg::solve(&a, &b)?.to_vec::<f32>()?, [1.0, 2.0]);
//! # Ok(()) }
//! ```

mod eigen;
mod norm;
mod solve;

pub use eigen::{eig, eigh, eigvals, eigvalsh, pinv, singular_values, svd};
pub use norm::{Norm, cross, norm};
pub use solve::{
    cholesky, cholesky_inv, det, inv, lu, lu_factor, qr, slogdet, solve, solve_triangular, tri_inv,
};

use crate::array::Array;
use crate::device::{Device, DeviceKind};
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{eye, where_};
use crate::stream::Stream;

/// The triangle of a symmetric matrix that a function reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Triangle {
    /// On and below the diagonal.
    #[default]
    Lower,
    /// On and above the diagonal.
    Upper,
}

/// The largest size for single precision. Above it, LAPACK's workspace size, which it reports in a
/// `float32`, is rounded, and MLX would allocate too little. In double precision the size is exact.
pub(crate) const LARGEST_SINGLE: i32 = 2048;

/// Runs `f` on the current stream if that is on a CPU; otherwise on the CPU's default stream.
fn on_cpu<R>(f: impl FnOnce() -> Result<R>) -> Result<R> {
    if Stream::current()?.device().kind() == DeviceKind::Cpu {
        return f();
    }
    Stream::default_of(Device::cpu())?.scope(f)
}

/// Checks that matrices have a type that LAPACK supports, are not empty, and do not have more
/// elements than MLX can count.
fn matrices(op: &'static str, a: &Array, complex: bool) -> Result<(i32, i32)> {
    let bad = |kind, why: String| Err(Error::new(kind, op, why).with_inputs(&[a]));
    let fits = matches!(a.dtype(), Dtype::Float32 | Dtype::Float64)
        || (complex && a.dtype() == Dtype::Complex64);
    if !fits {
        let more = if complex { " or complex64" } else { "" };
        return bad(
            ErrorKind::Dtype,
            format!(
                "takes float32 or float64{more}, not {}; convert it with astype",
                a.dtype()
            ),
        );
    }
    let &[.., rows, columns] = a.shape() else {
        return bad(ErrorKind::Shape, String::from("needs at least two axes"));
    };
    if a.size() == 0 {
        return bad(
            ErrorKind::Shape,
            String::from("an empty array has no matrices"),
        );
    }
    let side = rows.max(columns);
    if side.checked_mul(side).is_none() {
        return bad(
            ErrorKind::Shape,
            format!("a side of {side} is more than LAPACK can count here"),
        );
    }
    Ok((rows, columns))
}

/// [`matrices`] for square matrices; returns their size.
fn square(op: &'static str, a: &Array, complex: bool) -> Result<i32> {
    let (rows, columns) = matrices(op, a, complex)?;
    if rows == columns {
        return Ok(rows);
    }
    Err(Error::new(ErrorKind::Shape, op, "needs square matrices").with_inputs(&[a]))
}

/// `a`, where `by` replaces every matrix of the batch for which `bad` (`[.., 1, 1]`) is true.
fn replaced(a: &Array, bad: &Array, by: &Array) -> Result<Array> {
    where_(bad, by, a)
}

/// The identity, which replaces a matrix that would fail.
fn stand_in(a: &Array, rows: i32, columns: i32) -> Result<Array> {
    eye(rows, columns, 0, Dtype::Float32)?.astype(a.dtype())
}

/// `a`, where NaN replaces every matrix for which `bad` (`[.., 1, 1]`) is true.
fn marked(a: &Array, bad: &Array) -> Result<Array> {
    let nan = Array::scalar(f32::NAN)?.astype(a.dtype())?;
    replaced(a, bad, &nan)
}

/// For each matrix, whether any value is not finite: `[.., 1, 1]`.
fn not_finite(a: &Array) -> Result<Array> {
    a.stop_gradient()?
        .is_finite()?
        .all(&[-2, -1], true)?
        .logical_not()
}

/// For each matrix, whether the diagonal contains zero or NaN: `[.., 1, 1]`.
fn zero_on_diagonal(a: &Array) -> Result<Array> {
    let diagonal = a.stop_gradient()?.diagonal(0, -2, -1)?;
    let zero = Array::scalar(0.0f32)?.astype(a.dtype())?;
    let sound = diagonal.abs()?.greater(&zero)?.all(-1, true)?;
    sound.expand_dims(-1)?.logical_not()
}

/// Runs `f` on the CPU with matrices of size `n`, for a result `[.., n]`. The identity replaces
/// matrices that are not finite, and their result vectors become NaN.
pub(crate) fn guarded(a: &Array, n: i32, f: impl FnOnce(&Array) -> Result<Array>) -> Result<Array> {
    on_cpu(|| {
        let bad = not_finite(a)?;
        let safe = replaced(a, &bad, &stand_in(a, n, n)?)?;
        marked(&f(&safe)?, &bad.squeeze_axis(-1)?)
    })
}
