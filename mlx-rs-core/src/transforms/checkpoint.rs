//! Trading time for memory: intermediate results are computed again in the backward pass.

use std::sync::Arc;

use super::{Direction, own_nodes, some_output};
use crate::array::Array;
use crate::call;
use crate::closure::{self, Closure, ClosureError, Function, Payload};
use crate::error::Result;

use mlx_sys as sys;

/// A function that computes what `f` computes, but keeps none of its intermediate results for the
/// gradient: the backward pass runs `f` again (Chen et al. 2016, "Training Deep Nets with Sublinear
/// Memory Cost").
///
/// Only what is passed as an argument has a gradient: an array that `f` captures counts as
/// constant. Mirrors `mx.checkpoint`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::{checkpoint, grad}};
/// # fn main() -> Result<()> {
/// let block = checkpoint(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].sin()?.exp()?]) });
/// let g = grad(block, &[0])(&[Array::scalar(0.0f32)?])?;
/// assert_eq!(g[0].item::<f32>()?, 1.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// The function returned does: what `f` returns, also from the backward pass, where it surfaces in
/// the transform that runs it; [`ErrorKind::Value`](crate::ErrorKind::Value) when `f` returns no
/// arrays.
pub fn checkpoint<F, E>(f: F) -> impl Fn(&[Array]) -> Result<Vec<Array>, E> + Send + Sync + 'static
where
    F: Fn(&[Array]) -> Result<Vec<Array>, E> + Send + 'static,
    E: ClosureError,
{
    const OP: &str = "checkpoint";
    let function: Function = Box::new(move |x| {
        let outputs = closure::guarded(|| f(x))?;
        some_output(OP, &outputs)?;
        Ok(own_nodes(outputs)?)
    });
    let payload = Payload::new(function);
    move |args| {
        closure::run(OP, || {
            // The backward pass runs the function again, for the derivative that is wanted now.
            let (payload, direction) = (Arc::clone(&payload), Direction::current());
            let function: Function = Box::new(move |x| direction.during(|| (payload.body)(x)));
            let inner = Closure::new(Payload::new(function))?;
            let mut outer = Closure::empty();
            call::status(OP, || {
                // SAFETY: the result is writable and null, the closure is live.
                unsafe { sys::mlx_checkpoint(outer.out(), inner.raw()) }
            })?;
            outer.apply(OP, args)
        })
    }
}
