//! Products with Jacobians: reverse mode ([`vjp`]) and forward mode ([`jvp`]).

use mlx_sys as sys;

use super::{differentiable, own_nodes, same_shapes};
use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::closure::{self, ClosureError, Failure};
use crate::error::{Error, ErrorKind, Result};

/// The outputs of `f` at `primals`, and the products of `cotangents` with its Jacobian: one for each
/// primal, with its shape.
///
/// `cotangents` are one for each output, with its shape. Mirrors `mx.vjp`.
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
/// What `f` returns; [`ErrorKind::Dtype`] for a primal that is not floating-point (capture it
/// instead); [`ErrorKind::Shape`] when the cotangents do not fit the outputs; MLX's message for an
/// operation without a derivative.
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
    let mut body = |x: &[Array]| -> Result<Vec<Array>, Failure> {
        let outputs = call_once(OP, &mut f, x)?;
        same_shapes(OP, "cotangent", cotangents, "output", &outputs)?;
        Ok(own_nodes(outputs)?)
    };
    closure::run(OP, || {
        closure::scoped(&mut body, |function| {
            let primals = ArrayVec::new(OP, primals)?;
            let cotangents = ArrayVec::new(OP, cotangents)?;
            let (mut outputs, mut products) = (ArrayVec::empty(), ArrayVec::empty());
            call::status(OP, || {
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
            Ok((outputs.to_arrays(OP)?, products.to_arrays(OP)?))
        })
    })
}

/// The outputs of `f` at `primals`, and the products of its Jacobian with `tangents`: one for each
/// output, with its shape.
///
/// `tangents` are one for each primal, with its shape. Mirrors `mx.jvp`.
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
/// # Errors
/// As [`vjp`]; [`ErrorKind::Shape`] when the tangents do not fit the primals.
pub fn jvp<F, E>(f: F, primals: &[Array], tangents: &[Array]) -> Result<(Vec<Array>, Vec<Array>), E>
where
    F: FnOnce(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    const OP: &str = "jvp";
    for (i, primal) in primals.iter().enumerate() {
        differentiable(OP, "primal", i, primal)?;
    }
    same_shapes(OP, "tangent", tangents, "primal", primals)?;
    // MLX takes the tangents as they come; of another type they would leak it into the products.
    let tangents = primals
        .iter()
        .zip(tangents)
        .map(|(p, t)| t.astype(p.dtype()))
        .collect::<Result<Vec<_>>>()?;
    let mut f = Some(f);
    let mut body = |x: &[Array]| -> Result<Vec<Array>, Failure> { call_once(OP, &mut f, x) };
    closure::run(OP, || {
        closure::scoped(&mut body, |function| {
            let primals = ArrayVec::new(OP, primals)?;
            let tangents = ArrayVec::new(OP, &tangents)?;
            let (mut outputs, mut products) = (ArrayVec::empty(), ArrayVec::empty());
            call::status(OP, || {
                // SAFETY: both results are writable, closure and vectors are live.
                unsafe {
                    sys::mlx_jvp(
                        outputs.out(),
                        products.out(),
                        function.raw(),
                        primals.raw(),
                        tangents.raw(),
                    )
                }
            })?;
            Ok((outputs.to_arrays(OP)?, products.to_arrays(OP)?))
        })
    })
}

fn call_once<F, E>(op: &'static str, f: &mut Option<F>, x: &[Array]) -> Result<Vec<Array>, Failure>
where
    F: FnOnce(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let f = f
        .take()
        .ok_or_else(|| Error::new(ErrorKind::Mlx, op, "MLX called the function more than once"))?;
    closure::guarded(|| f(x))
}
