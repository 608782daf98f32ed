//! Eigenvalues and singular values. LAPACK's iterations fail on values that are not finite, and MLX
//! then aborts the process. So the graph replaces such matrices by the identity, and sets their
//! results to NaN.

use mlx_sys as sys;

use super::{
    LARGEST_SINGLE, Triangle, marked, matrices, not_finite, on_cpu, replaced, square, stand_in,
};
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The input, in which the identity replaces matrices that are not finite, and a mask of those
/// matrices.
struct Sound {
    input: Array,
    bad: Array,
    widened: bool,
}

impl Sound {
    fn check(a: &Array, rows: i32, columns: i32) -> Result<Self> {
        let bad = not_finite(a)?;
        let input = replaced(a, &bad, &stand_in(a, rows, columns)?)?;
        let widened = a.dtype() == Dtype::Float32 && rows.max(columns) > LARGEST_SINGLE;
        let input = if widened {
            input.astype(Dtype::Float64)?
        } else {
            input
        };
        Ok(Self {
            input,
            bad,
            widened,
        })
    }

    /// A result that has one matrix per input matrix. Matrices that were not finite become NaN.
    fn matrix(&self, a: &Array) -> Result<Array> {
        marked(&self.narrow(a)?, &self.bad)
    }

    /// A result that has one vector per input matrix. Vectors of matrices that were not finite
    /// become NaN.
    fn vector(&self, a: &Array) -> Result<Array> {
        marked(&self.narrow(a)?, &self.bad.squeeze_axis(-1)?)
    }

    fn narrow(&self, a: &Array) -> Result<Array> {
        if self.widened && a.dtype() == Dtype::Float64 {
            a.astype(Dtype::Float32)
        } else {
            Ok(a.clone())
        }
    }
}

impl Triangle {
    fn name(self) -> &'static std::ffi::CStr {
        match self {
            Triangle::Lower => c"L",
            Triangle::Upper => c"U",
        }
    }
}

/// Eigenvalues `[.., n]`, ascending, and eigenvectors `[.., n, n]`, in the columns, of symmetric
/// (or `complex64` Hermitian) matrices. Only one triangle is read.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[2.0, 1.0], [1.0, 2.0]])?;
/// let (values, vectors) = linalg::eigh(&a, linalg::Triangle::Lower)?;
/// assert!(values.all_close(&array!([1.0, 3.0])?, 1e-5, 1e-5)?);
/// assert!(a.matmul(&vectors)?.all_close(&vectors.multiply(&values)?, 1e-4, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_eigh")]
pub fn eigh(a: &Array, triangle: Triangle) -> Result<(Array, Array)> {
    let op = "eigh";
    let n = square(op, a, true)?;
    on_cpu(|| {
        let sound = Sound::check(a, n, n)?;
        let (values, vectors) = call::pair(op, |values, vectors, s| {
            // SAFETY: all handles are live. The name is a static string. The matrices are square
            // and finite.
            unsafe {
                sys::mlx_linalg_eigh(
                    values,
                    vectors,
                    sound.input.raw(),
                    triangle.name().as_ptr(),
                    s,
                )
            }
        })?;
        Ok((sound.vector(&values)?, sound.matrix(&vectors)?))
    })
    .map_err(|e: Error| e.with_inputs(&[a]))
}

/// Only the eigenvalues of [`eigh`].
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[2.0, 1.0], [1.0, 2.0]])?;
/// let values = linalg::eigvalsh(&a, linalg::Triangle::Upper)?;
/// assert!(values.all_close(&array!([1.0, 3.0])?, 1e-5, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`eigh`].
#[doc(alias = "mlx_linalg_eigvalsh")]
pub fn eigvalsh(a: &Array, triangle: Triangle) -> Result<Array> {
    let op = "eigvalsh";
    let n = square(op, a, true)?;
    on_cpu(|| {
        let sound = Sound::check(a, n, n)?;
        let values = call::array(op, |out, s| {
            // SAFETY: all handles are live. The name is a static string. The matrices are square
            // and finite.
            unsafe { sys::mlx_linalg_eigvalsh(out, sound.input.raw(), triangle.name().as_ptr(), s) }
        })?;
        sound.vector(&values)
    })
    .map_err(|e| e.with_inputs(&[a]))
}

/// Eigenvalues `[.., n]`, and eigenvectors `[.., n, n]` in the columns, both `complex64`. Their
/// order is unspecified.
///
/// ```
/// use mlx_rs_core::{Dtype, array, linalg};
/// let (values, vectors) = linalg::eig(&array!([[0.0, -1.0], [1.0, 0.0]])?)?; // a rotation
/// assert!(values.abs()?.all_close(&array!([1.0, 1.0])?, 1e-5, 1e-5)?);
/// assert_eq!((vectors.shape(), vectors.dtype()), (&[2, 2][..], Dtype::Complex64));
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_eig")]
pub fn eig(a: &Array) -> Result<(Array, Array)> {
    let op = "eig";
    let n = square(op, a, true)?;
    on_cpu(|| {
        let sound = Sound::check(a, n, n)?;
        let (values, vectors) = call::pair(op, |values, vectors, s| {
            // SAFETY: all handles are live; the matrices are square and finite.
            unsafe { sys::mlx_linalg_eig(values, vectors, sound.input.raw(), s) }
        })?;
        Ok((sound.vector(&values)?, sound.matrix(&vectors)?))
    })
    .map_err(|e: Error| e.with_inputs(&[a]))
}

/// Only the eigenvalues of [`eig`].
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let values = linalg::eigvals(&array!([[1.0, 5.0], [0.0, 2.0]])?)?;
/// assert!(values.real()?.sort(0)?.all_close(&array!([1.0, 2.0])?, 1e-5, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`eig`].
#[doc(alias = "mlx_linalg_eigvals")]
pub fn eigvals(a: &Array) -> Result<Array> {
    let op = "eigvals";
    let n = square(op, a, true)?;
    on_cpu(|| {
        let sound = Sound::check(a, n, n)?;
        let values = call::array(op, |out, s| {
            // SAFETY: all handles are live; the matrices are square and finite.
            unsafe { sys::mlx_linalg_eigvals(out, sound.input.raw(), s) }
        })?;
        sound.vector(&values)
    })
    .map_err(|e| e.with_inputs(&[a]))
}

/// The singular value decomposition `a = u * diag(s) * vt` of `[.., m, n]`. `u` is `[.., m, m]`,
/// `s` is `[.., min(m, n)]` and descending, and `vt` is `[.., n, n]`.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[3.0, 0.0], [0.0, -4.0]])?;
/// let (u, s, vt) = linalg::svd(&a)?;
/// assert!(s.all_close(&array!([4.0, 3.0])?, 1e-5, 1e-5)?);
/// assert!(u.multiply(&s)?.matmul(&vt)?.all_close(&a, 1e-4, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_svd")]
pub fn svd(a: &Array) -> Result<(Array, Array, Array)> {
    let op = "svd";
    let (sound, mut parts) = svd_parts(op, a, true)?;
    match (parts.pop(), parts.pop(), parts.pop()) {
        (Some(vt), Some(s), Some(u)) => {
            Ok((sound.matrix(&u)?, sound.vector(&s)?, sound.matrix(&vt)?))
        }
        _ => Err(too_few(op)),
    }
}

/// Only the singular values of [`svd`].
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let s = linalg::singular_values(&array!([[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]])?)?;
/// assert!(s.all_close(&array!([4.0, 3.0])?, 1e-5, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`svd`].
#[doc(alias = "mlx_linalg_svd")]
pub fn singular_values(a: &Array) -> Result<Array> {
    let op = "singular_values";
    let (sound, mut parts) = svd_parts(op, a, false)?;
    sound.vector(&parts.pop().ok_or_else(|| too_few(op))?)
}

fn too_few(op: &'static str) -> Error {
    Error::new(ErrorKind::Mlx, op, "MLX returned too few arrays")
}

fn svd_parts(op: &'static str, a: &Array, vectors: bool) -> Result<(Sound, Vec<Array>)> {
    let (m, n) = matrices(op, a, true)?;
    on_cpu(|| {
        let sound = Sound::check(a, m, n)?;
        let parts = call::arrays(op, |out: *mut sys::mlx_vector_array, s| {
            // SAFETY: all handles are live. The matrices are finite and not empty.
            unsafe { sys::mlx_linalg_svd(out, sound.input.raw(), vectors, s) }
        })?;
        Ok((sound, parts))
    })
    .map_err(|e: Error| e.with_inputs(&[a]))
}

/// The Moore-Penrose inverse `[.., n, m]` of `[.., m, n]`, by the singular value decomposition.
/// Singular values below `max(m, n) * precision * s` count as zero. Here `precision` is that of the
/// type, and `s` is the greatest singular value.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])?;
/// assert!(linalg::pinv(&a)?.matmul(&a)?.all_close(&array!([[1.0, 0.0], [0.0, 1.0]])?, 1e-5, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_pinv")]
pub fn pinv(a: &Array) -> Result<Array> {
    let op = "pinv";
    let (m, n) = matrices(op, a, false)?;
    on_cpu(|| {
        let sound = Sound::check(a, m, n)?;
        let inverse = call::array(op, |out, s| {
            // SAFETY: all handles are live. The matrices are finite and not empty.
            unsafe { sys::mlx_linalg_pinv(out, sound.input.raw(), s) }
        })?;
        sound.matrix(&inverse)
    })
    .map_err(|e| e.with_inputs(&[a]))
}
