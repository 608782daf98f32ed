//! Factorizations, inverses and solutions of linear equations.
//!
//! MLX's own inverse and solver abort the process for a singular matrix, so they are not used.
//! Inverses and solutions are computed by the QR factorization, which succeeds for every matrix.
//! Before a triangular matrix is inverted, its diagonal is checked. Gradients come from a series
//! expansion in the change of the matrix.

use mlx_sys as sys;

use super::{marked, matrices, not_finite, on_cpu, replaced, square, stand_in, zero_on_diagonal};
use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::where_;

/// The Cholesky factor of symmetric positive definite matrices: the lower triangular `l` with `l *
/// l^T = a`, or with `upper` the `u` with `u^T * u = a`. Only one triangle is read. The result is
/// NaN for a matrix that is not positive definite.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[4.0, 2.0], [2.0, 5.0]])?;
/// let l = linalg::cholesky(&a, false)?;
/// assert!(l.all_close(&array!([[2.0, 0.0], [1.0, 2.0]])?, 1e-5, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_cholesky")]
pub fn cholesky(a: &Array, upper: bool) -> Result<Array> {
    let op = "cholesky";
    square(op, a, false)?;
    on_cpu(|| {
        let factor = call::array(op, |out, s| {
            // SAFETY: all handles are live; the matrices are square and not empty.
            unsafe { sys::mlx_linalg_cholesky(out, a.raw(), upper, s) }
        })?;
        // If a diagonal element under the square root is negative, LAPACK stops and leaves the
        // element there.
        let diagonal = factor.stop_gradient()?.diagonal(0, -2, -1)?;
        let zero = Array::scalar(0.0f32)?.astype(a.dtype())?;
        let sound = diagonal.greater(&zero)?.all(-1, true)?;
        let bad = sound
            .expand_dims(-1)?
            .logical_not()?
            .logical_or(&not_finite(&factor)?)?;
        marked(&factor, &bad)
    })
    .map_err(|e| e.with_inputs(&[a]))
}

/// The inverse of a matrix from its [`cholesky`] factor. The result is NaN where the factor has a
/// zero on the diagonal.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[4.0, 2.0], [2.0, 5.0]])?;
/// let inverse = linalg::cholesky_inv(&linalg::cholesky(&a, false)?, false)?;
/// assert!(a.matmul(&inverse)?.all_close(&array!([[1.0, 0.0], [0.0, 1.0]])?, 1e-4, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_cholesky_inv")]
pub fn cholesky_inv(factor: &Array, upper: bool) -> Result<Array> {
    let op = "cholesky_inv";
    let n = square(op, factor, false)?;
    on_cpu(|| {
        let bad = zero_on_diagonal(factor)?;
        let safe = replaced(factor, &bad, &stand_in(factor, n, n)?)?;
        let inverse = call::array(op, |out, s| {
            // SAFETY: all handles are live. The matrices are square, and no diagonal contains a
            // zero.
            unsafe { sys::mlx_linalg_cholesky_inv(out, safe.raw(), upper, s) }
        })?;
        marked(&inverse, &bad)
    })
    .map_err(|e| e.with_inputs(&[factor]))
}

/// The inverse of triangular matrices. The other triangle is not read. The result is NaN for a
/// matrix with a zero on the diagonal.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let l = array!([[2.0, 0.0], [1.0, 4.0]])?;
/// assert!(linalg::tri_inv(&l, false)?.all_close(&array!([[0.5, 0.0], [-0.125, 0.25]])?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_tri_inv")]
pub fn tri_inv(a: &Array, upper: bool) -> Result<Array> {
    let op = "tri_inv";
    let n = square(op, a, false)?;
    on_cpu(|| {
        let bad = zero_on_diagonal(a)?;
        let triangle = if upper { a.triu(0)? } else { a.tril(0)? };
        let safe = replaced(&triangle, &bad, &stand_in(a, n, n)?)?;
        let inverse = call::array(op, |out, s| {
            // SAFETY: all handles are live. The matrices are square, and no diagonal contains a
            // zero.
            unsafe { sys::mlx_linalg_tri_inv(out, safe.raw(), upper, s) }
        })?;
        marked(&inverse, &bad)
    })
    .map_err(|e| e.with_inputs(&[a]))
}

/// The QR factorization of `[.., m, n]`. `q` `[.., m, k]` has orthonormal columns, and `r` `[.., k,
/// n]` is upper triangular, with `k = min(m, n)`.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])?;
/// let (q, r) = linalg::qr(&a)?;
/// assert_eq!((q.shape(), r.shape()), (&[3, 2][..], &[2, 2][..]));
/// assert!(q.matmul(&r)?.all_close(&a, 1e-4, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without matrices; [`ErrorKind::Dtype`] for other types.
#[doc(alias = "mlx_linalg_qr")]
pub fn qr(a: &Array) -> Result<(Array, Array)> {
    let op = "qr";
    matrices(op, a, false)?;
    on_cpu(|| {
        call::pair(op, |q, r, s| {
            // SAFETY: all handles are live; the matrices are not empty.
            unsafe { sys::mlx_linalg_qr(q, r, a.raw(), s) }
        })
    })
    .map_err(|e| e.with_inputs(&[a]))
}

/// Factors of square matrices. Singular matrices are replaced by the identity.
struct Factored {
    /// `q^T`, which is constant for gradients.
    qt: Array,
    /// The inverse of `r`, which is constant for gradients.
    r_inv: Array,
    /// The change of the matrix. Its value is zero, and its gradient is that of the matrix.
    change: Array,
    bad: Array,
}

impl Factored {
    fn compute(op: &'static str, a: &Array) -> Result<Self> {
        let n = square(op, a, false)?;
        let constant = a.stop_gradient()?;
        let unsound = not_finite(a)?;
        let (q, r) = qr(&replaced(&constant, &unsound, &stand_in(a, n, n)?)?)?;
        // A column that depends linearly on earlier columns leaves a value near zero on the
        // diagonal.
        let lengths = constant.square()?.sum(-2, false)?.sqrt()?;
        let precision = match a.dtype() {
            Dtype::Float64 => f64::EPSILON,
            _ => f64::from(f32::EPSILON),
        };
        let least =
            lengths.multiply(&Array::scalar(precision * f64::from(n))?.astype(a.dtype())?)?;
        let diagonal = r.diagonal(0, -2, -1)?.abs()?;
        let singular = diagonal.greater(&least)?.all(-1, true)?.logical_not()?;
        let bad = unsound.logical_or(&singular.expand_dims(-1)?)?;
        let safe = |a: &Array| a.subtract(&a.stop_gradient()?);
        let none = Array::scalar(0.0f32)?.astype(a.dtype())?;
        Ok(Self {
            qt: q.swap_axes(-1, -2)?,
            r_inv: tri_inv(&replaced(&r, &bad, &stand_in(a, n, n)?)?, true)?,
            change: where_(&bad, &none, &safe(a)?)?,
            bad,
        })
    }

    /// `a^-1 v`, to the second order in the change of `a`, which is zero. So the value and its
    /// first and second derivatives are correct.
    fn apply(&self, v: &Array) -> Result<Array> {
        let inverse = |v: &Array| self.r_inv.matmul(&self.qt.matmul(v)?);
        let first = inverse(v)?;
        let second = inverse(&self.change.matmul(&first)?)?;
        let third = inverse(&self.change.matmul(&second)?)?;
        marked(&first.subtract(&second)?.add(&third)?, &self.bad)
    }
}

/// The inverse of square matrices. The result is NaN for a matrix that is singular to the precision
/// of its type. First and second derivatives are correct; higher ones are not.
///
/// ```
/// use mlx_rs_core::{All, array, linalg};
/// let inverse = linalg::inv(&array!([[2.0, 0.0], [0.0, 4.0]])?)?;
/// assert!(inverse.all_close(&array!([[0.5, 0.0], [0.0, 0.25]])?, 1e-5, 1e-6)?);
/// // Singular: not a number, rather than the end of the process.
/// let singular = linalg::inv(&array!([[1.0, 2.0], [2.0, 4.0]])?)?;
/// assert!(singular.is_nan()?.all(All, false)?.item::<bool>()?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
pub fn inv(a: &Array) -> Result<Array> {
    let op = "inv";
    let n = square(op, a, false)?;
    on_cpu(|| Factored::compute(op, a)?.apply(&stand_in(a, n, n)?)).map_err(|e| e.with_inputs(&[a]))
}

/// Checks `a` `[.., n, n]` against `b`. Returns `b` as matrices, and whether it was a vector.
fn right_side(op: &'static str, a: &Array, b: &Array) -> Result<(Array, bool)> {
    let n = square(op, a, false)?;
    let bad = |kind, why: &str| Err(Error::new(kind, op, why).with_inputs(&[a, b]));
    if b.dtype() != a.dtype() {
        return bad(ErrorKind::Dtype, "both sides must have the same type");
    }
    match *b.shape() {
        [length] if length == n => Ok((b.expand_dims(-1)?, true)),
        [.., rows, columns] if rows == n && columns > 0 && b.size() > 0 => Ok((b.clone(), false)),
        _ => bad(
            ErrorKind::Shape,
            "the right side must be a vector [n] or matrices [.., n, k] that are not empty",
        ),
    }
}

/// The solution `x` of `a * x = b`, with `a` `[.., n, n]` and `b` `[n]` or `[.., n, k]`. The result
/// is NaN for a matrix that is singular to the precision of its type. First and second derivatives
/// are correct; higher ones are not.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let x = linalg::solve(&array!([[2.0, 1.0], [1.0, 3.0]])?, &array!([5.0, 10.0])?)?;
/// assert!(x.all_close(&array!([1.0, 3.0])?, 1e-4, 1e-5)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] when the shapes of `a` and `b` do not match; [`ErrorKind::Dtype`] for other
/// types.
pub fn solve(a: &Array, b: &Array) -> Result<Array> {
    let op = "solve";
    let (right, vector) = right_side(op, a, b)?;
    on_cpu(|| {
        let x = Factored::compute(op, a)?.apply(&right)?;
        if vector { x.squeeze_axis(-1) } else { Ok(x) }
    })
    .map_err(|e| e.with_inputs(&[a, b]))
}

/// [`solve`] for a triangular `a`, whose other triangle is not read. The result is NaN for a matrix
/// with a zero on the diagonal.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let l = array!([[2.0, 0.0], [1.0, 4.0]])?;
/// let x = linalg::solve_triangular(&l, &array!([2.0, 9.0])?, false)?;
/// assert!(x.all_close(&array!([1.0, 2.0])?, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`solve`].
#[doc(alias = "mlx_linalg_solve_triangular")]
pub fn solve_triangular(a: &Array, b: &Array, upper: bool) -> Result<Array> {
    let op = "solve_triangular";
    let (right, vector) = right_side(op, a, b)?;
    let n = square(op, a, false)?;
    on_cpu(|| {
        let bad = zero_on_diagonal(a)?;
        let triangle = if upper { a.triu(0)? } else { a.tril(0)? };
        let safe = replaced(&triangle, &bad, &stand_in(a, n, n)?)?;
        let x = call::array(op, |out, s| {
            // SAFETY: all handles are live. The matrices are square, and no diagonal contains a
            // zero.
            unsafe { sys::mlx_linalg_solve_triangular(out, safe.raw(), right.raw(), upper, s) }
        })?;
        let x = marked(&x, &bad)?;
        if vector { x.squeeze_axis(-1) } else { Ok(x) }
    })
    .map_err(|e| e.with_inputs(&[a, b]))
}

/// The LU factorization of `[.., m, n]` with row pivots: `(rows, l, u)`, with `k = min(m, n)`. `l`
/// `[.., m, k]` is lower triangular with a unit diagonal, and `u` `[.., k, n]` is upper triangular.
/// For each row, `a[i] = (l * u)[rows[i]]`; `rows` is `uint32` `[.., m]`. A singular matrix has
/// zeros on the diagonal of `u`. **Evaluates the matrices**, and has no gradient.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let a = array!([[1.0, 2.0], [3.0, 4.0]])?;
/// let (rows, l, u) = linalg::lu(&a)?;
/// assert!(l.matmul(&u)?.take(&rows, 0)?.all_close(&a, 1e-5, 1e-6)?);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without matrices; [`ErrorKind::Dtype`] for other types.
pub fn lu(a: &Array) -> Result<(Array, Array, Array)> {
    let op = "lu";
    let (m, n) = matrices(op, a, false)?;
    let k = m.min(n);
    let (packed, pivots) = factor(op, a)?;
    let lead = &a.shape()[..a.ndim() - 2];
    // Converts the exchanges of rows to the final order of rows.
    let mut rows = Vec::with_capacity(pivots.len() / k as usize * m as usize);
    for pivots in pivots.chunks_exact(k as usize) {
        let mut order: Vec<u32> = (0..m as u32).collect();
        for (at, &pivot) in pivots.iter().enumerate() {
            order.swap(at, pivot as usize);
        }
        let mut place = vec![0; order.len()];
        for (at, &row) in order.iter().enumerate() {
            place[row as usize] = at as u32;
        }
        rows.extend(place);
    }
    let rows = Array::from_slice(&rows, &[lead, &[m]].concat())?;
    let unit = stand_in(a, m, k)?;
    let l = packed.slice_axis(-1, 0, k)?.tril(-1)?.add(&unit)?;
    let u = packed.slice_axis(-2, 0, k)?.triu(0)?;
    Ok((rows, l, u))
}

/// The LU factorization as LAPACK packs it. The first array has the shape of `a`. Below the
/// diagonal it contains `l`, without the unit diagonal; on and above the diagonal it contains `u`.
/// The second array has the row that each step exchanged, `uint32` `[.., min(m, n)]`. **Evaluates
/// the matrices**, and has no gradient.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let (packed, pivots) = linalg::lu_factor(&array!([[1.0, 2.0], [3.0, 4.0]])?)?;
/// assert_eq!(pivots.to_vec::<u32>()?, [1, 1]); // the first row was exchanged with the second
/// assert_eq!(packed.at::<f32>(&[0, 0])?, 3.0);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without matrices; [`ErrorKind::Dtype`] for other types.
pub fn lu_factor(a: &Array) -> Result<(Array, Array)> {
    let op = "lu_factor";
    let (m, n) = matrices(op, a, false)?;
    let (packed, pivots) = factor(op, a)?;
    let lead = &a.shape()[..a.ndim() - 2];
    let pivots = Array::from_slice(&pivots, &[lead, &[m.min(n)]].concat())?;
    Ok((packed, pivots))
}

/// The determinants of `[.., n, n]`, as `[..]`. **Evaluates the matrices**, and has no gradient.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let det = linalg::det(&array!([[1.0, 2.0], [3.0, 4.0]])?)?;
/// assert!((det.item::<f32>()? + 2.0).abs() < 1e-6);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
pub fn det(a: &Array) -> Result<Array> {
    let factors = determinants("det", a, 1.0, |product, factor| product * factor)?;
    let values: Vec<f64> = factors
        .into_iter()
        .map(|(sign, size)| sign * size)
        .collect();
    of_matrices(a, &values)
}

/// The signs of the determinants of `[.., n, n]`, and the logarithms of their absolute values, both
/// `[..]`. For a singular matrix they are zero and minus infinity. **Evaluates the matrices**, and
/// has no gradient.
///
/// ```
/// use mlx_rs_core::{array, linalg};
/// let (sign, log) = linalg::slogdet(&array!([[0.0, 2.0], [3.0, 0.0]])?)?;
/// assert_eq!(sign.item::<f32>()?, -1.0);
/// assert!((log.item::<f32>()? - 6.0f32.ln()).abs() < 1e-6);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] for arrays without square matrices; [`ErrorKind::Dtype`] for other types.
pub fn slogdet(a: &Array) -> Result<(Array, Array)> {
    let factors = determinants("slogdet", a, 0.0, |sum, factor| sum + factor.ln())?;
    let (signs, logs): (Vec<f64>, Vec<f64>) = factors.into_iter().unzip();
    Ok((of_matrices(a, &signs)?, of_matrices(a, &logs)?))
}

/// An array with one value for each matrix of `a`, in the type of `a`.
fn of_matrices(a: &Array, values: &[f64]) -> Result<Array> {
    let lead = &a.shape()[..a.ndim() - 2];
    on_cpu(|| Array::from_slice(values, lead)?.astype(a.dtype()))
}

/// For each matrix, the sign of its determinant, and `fold` over the absolute values of the
/// determinant's factors.
fn determinants(
    op: &'static str,
    a: &Array,
    start: f64,
    fold: impl Fn(f64, f64) -> f64,
) -> Result<Vec<(f64, f64)>> {
    let (n, _) = matrices(op, a, true)?;
    let n = n as usize;
    let (packed, pivots) = factor(op, a)?;
    let packed = on_cpu(|| packed.astype(Dtype::Float64)?.to_vec::<f64>())?;
    let all = packed.chunks_exact(n * n).zip(pivots.chunks_exact(n));
    let of = |(matrix, pivots): (&[f64], &[u32])| {
        let exchanges = (pivots.iter().enumerate()).filter(|&(at, &pivot)| at != pivot as usize);
        let start = (
            if exchanges.count() % 2 == 0 {
                1.0
            } else {
                -1.0
            },
            start,
        );
        (0..n)
            .map(|i| matrix[i * n + i])
            .fold(start, |(sign, size), factor| {
                let of_factor = if factor == 0.0 { 0.0 } else { factor.signum() };
                (sign * of_factor, fold(size, factor.abs()))
            })
    };
    Ok(all.map(of).collect())
}

/// Gaussian elimination with row pivots (Golub and Van Loan, algorithm 3.4.1), in double precision.
/// MLX's own function is not used, because it aborts the process for a singular matrix.
fn factor(op: &'static str, a: &Array) -> Result<(Array, Vec<u32>)> {
    let (m, n) = matrices(op, a, false)?;
    let (m, n) = (m as usize, n as usize);
    let mut values = on_cpu(|| a.astype(Dtype::Float64)?.to_vec::<f64>())?;
    let mut pivots = Vec::with_capacity(values.len() / (m * n) * m.min(n));
    for matrix in values.chunks_exact_mut(m * n) {
        for step in 0..m.min(n) {
            let mut pivot = step;
            for row in step + 1..m {
                if matrix[row * n + step].abs() > matrix[pivot * n + step].abs() {
                    pivot = row;
                }
            }
            pivots.push(pivot as u32);
            if pivot != step {
                let (upper, lower) = matrix.split_at_mut(pivot * n);
                upper[step * n..(step + 1) * n].swap_with_slice(&mut lower[..n]);
            }
            let (upper, lower) = matrix.split_at_mut((step + 1) * n);
            let top = &upper[step * n..];
            if top[step] == 0.0 {
                continue;
            }
            for row in lower.chunks_exact_mut(n) {
                let factor = row[step] / top[step];
                row[step] = factor;
                for (value, above) in row[step + 1..].iter_mut().zip(&top[step + 1..]) {
                    *value -= factor * above;
                }
            }
        }
    }
    let packed = if a.dtype() == Dtype::Float64 {
        Array::from_slice(&values, a.shape())?
    } else {
        let narrow: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        Array::from_slice(&narrow, a.shape())?
    };
    Ok((packed, pivots))
}
