//! Products with Jacobians: reverse mode ([`vjp`]) and forward mode ([`jvp`]).

use mlx_sys as sys;

use super::{Direction, differentiable, own_nodes, same_shapes};
use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::closure::{self, ClosureError, Outcome};
use crate::error::{Error, ErrorKind, Result};
use crate::stack;

/// The outputs of `f` at `primals`, and the products of `cotangents` with the Jacobian of `f`: one
/// product per primal, in the primal's shape.
///
/// There must be one cotangent per output, with the output's shape. Mirrors `mx.vjp`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::vjp};
/// # fn main() -> Result<()> {
/// let x = Array::vector(&[1.0f32, 2.0, 3.0])?;
/// let square = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) };
/// let (outputs, products) = vjp(square, &[x], &[Array::vector(&[1.0f32, 10.0, 100.0])?])?;
/// assert_eq!(outputs[0].to_vec::<f32>()?, [1.0, 4.0, 9.0]);
/// assert_eq!(products[0].to_vec::<f32>()?, [2.0, 40.0, 600.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// Errors of `f`; [`ErrorKind::Dtype`] for a primal that is not floating-point (capture it
/// instead); [`ErrorKind::Shape`] when the cotangents do not match the outputs; MLX's message for
/// an operation without a gradient.
#[doc(alias = "mlx_vjp")]
pub fn vjp<F, E>(
    f: F,
    primals: &[Array],
    cotangents: &[Array],
) -> Result<(Vec<Array>, Vec<Array>), E>
where
    F: FnOnce(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    const OP: &str = "vjp";
    for (i, primal) in primals.iter().enumerate() {
        differentiable(OP, "primal", i, primal)?;
    }
    let mut f = Some(f);
    let mut body = |x: &[Array]| -> Outcome {
        let outputs = call_once(OP, &mut f, x)?;
        same_shapes(OP, "cotangent", cotangents, "output", &outputs)?;
        Ok(own_nodes(outputs)?)
    };
    closure::run(OP, || vjp_raw(OP, &mut body, primals, cotangents))
}

fn vjp_raw(
    op: &'static str,
    f: &mut dyn FnMut(&[Array]) -> Outcome,
    primals: &[Array],
    cotangents: &[Array],
) -> Result<(Vec<Array>, Vec<Array>)> {
    let mut checked = |x: &[Array]| -> Outcome {
        let outputs = f(x)?;
        stack::check(op, &outputs, x)?;
        Ok(outputs)
    };
    closure::scoped(&mut checked, |function| {
        let primals = ArrayVec::new(op, primals)?;
        let cotangents = ArrayVec::new(op, cotangents)?;
        let (mut outputs, mut products) = (ArrayVec::empty(), ArrayVec::empty());
        call::status(op, || {
            // SAFETY: both results are writable, closure and vectors are live.
            unsafe {
                sys::mlx_vjp(
                    outputs.out(),
                    products.out(),
                    function.raw(),
                    primals.raw(),
                    cotangents.raw(),
                )
            }
        })?;
        Ok((outputs.to_arrays(op)?, products.to_arrays(op)?))
    })
}

/// The outputs of `f` at `primals`, and the products of the Jacobian of `f` with `tangents`: one
/// product per output, in the output's shape (zeros for outputs that are not floating-point).
///
/// There must be one tangent per primal, with the primal's shape. Mirrors `mx.jvp`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::jvp};
/// # fn main() -> Result<()> {
/// let x = Array::vector(&[0.0f32, 1.0])?;
/// let exp = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].exp()?]) };
/// let (_, products) = jvp(exp, &[x], &[Array::vector(&[1.0f32, 0.0])?])?;
/// assert_eq!(products[0].to_vec::<f32>()?, [1.0, 0.0]);
/// # Ok(()) }
/// ```
///
/// MLX's own forward mode is not used, because in 0.30 it reads out of bounds at a `where` and is
/// wrong for `power` and `logsumexp`. Instead, this is [`vjp`] of [`vjp`]. A product with the
/// transposed Jacobian is linear in the cotangents, so its own `vjp` is the product with the
/// Jacobian. `f` therefore runs twice, first for the shapes of its outputs.
///
/// # Errors
/// As [`vjp`]; [`ErrorKind::Shape`] when the tangents do not match the primals;
/// [`ErrorKind::Value`] when the second run of `f` returns other shapes.
pub fn jvp<F, E>(
    mut f: F,
    primals: &[Array],
    tangents: &[Array],
) -> Result<(Vec<Array>, Vec<Array>), E>
where
    F: FnMut(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    const OP: &str = "jvp";
    for (i, primal) in primals.iter().enumerate() {
        differentiable(OP, "primal", i, primal)?;
    }
    same_shapes(OP, "tangent", tangents, "primal", primals)?;
    // Tangents are converted to the primals' types, because another type would change the type of
    // the products.
    let tangents = primals
        .iter()
        .zip(tangents)
        .map(|(p, t)| t.astype(p.dtype()))
        .collect::<Result<Vec<_>>>()?;
    let outputs = Direction::Forward.during(|| f(primals))?;
    let smooth: Vec<usize> = (0..outputs.len())
        .filter(|&k| differentiable(OP, "output", k, &outputs[k]).is_ok())
        .collect();
    let zeros = |k: usize| crate::zeros(outputs[k].shape(), outputs[k].dtype());
    let at = smooth
        .iter()
        .map(|&k| zeros(k))
        .collect::<Result<Vec<_>>>()?;
    let transposed = |cotangents: &[Array]| -> Result<Vec<Array>, E> {
        let f = |x: &[Array]| -> Result<Vec<Array>, E> {
            let again = Direction::Forward.during(|| f(x))?;
            let form = |all: &[Array]| {
                all.iter()
                    .map(|a| (a.shape().to_vec(), a.dtype()))
                    .collect::<Vec<_>>()
            };
            if form(&again) != form(&outputs) {
                let message = "the function returned arrays of another form the second time it ran";
                return Err(Error::new(ErrorKind::Value, OP, message).into());
            }
            Ok(smooth.iter().map(|&k| again[k].clone()).collect())
        };
        Ok(vjp(f, primals, cotangents)?.1)
    };
    let mut products = if smooth.is_empty() {
        Vec::new()
    } else {
        vjp(transposed, &at, &tangents)?.1
    }
    .into_iter();
    let all = (0..outputs.len())
        .map(
            |k| match smooth.binary_search(&k).ok().and_then(|_| products.next()) {
                Some(product) => Ok(product),
                None => zeros(k),
            },
        )
        .collect::<Result<Vec<_>>>()?;
    Ok((outputs, all))
}

/// Computes products with the transposed Jacobian, inside a callback. Failures are returned
/// unchanged.
pub(super) fn transpose(
    op: &'static str,
    f: &mut dyn FnMut(&[Array]) -> Outcome,
    primals: &[Array],
    cotangents: &[Array],
) -> Outcome {
    closure::nested(|| Ok(vjp_raw(op, f, primals, cotangents)?.1))
}

fn call_once<F, E>(op: &'static str, f: &mut Option<F>, x: &[Array]) -> Outcome
where
    F: FnOnce(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let f = f
        .take()
        .ok_or_else(|| Error::new(ErrorKind::Mlx, op, "MLX called the function more than once"))?;
    closure::guarded(|| Direction::Reverse.during(|| f(x)))
}
