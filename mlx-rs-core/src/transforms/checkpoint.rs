//! Gradient checkpointing. The backward pass recomputes intermediate results, which saves memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Direction, Tree, own_nodes, some_output};
use crate::array::Array;
use crate::call;
use crate::closure::{self, Closure, ClosureError, Function, Payload};
use crate::error::Result;
use crate::stack;

use mlx_sys as sys;

/// Returns a function that computes the same as `f`, but keeps no intermediate results for the
/// gradient. The backward pass runs `f` again (Chen et al. 2016, "Training Deep Nets with Sublinear
/// Memory Cost").
///
/// Only arguments have gradients; an array that `f` captures is a constant. Mirrors
/// `mx.checkpoint`.
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
/// From the returned function: errors of `f`, which may also occur in the backward pass, and are
/// then returned by the transform that runs it; [`ErrorKind::Value`](crate::ErrorKind::Value) when
/// `f` returns no arrays.
#[doc(alias = "mlx_checkpoint")]
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
        closure::run_here(OP, || {
            // The backward pass runs the function again, for the requested kind of gradient.
            let (payload, direction) = (Arc::clone(&payload), Direction::current());
            let forward = AtomicBool::new(true);
            let function: Function = Box::new(move |x| {
                let outputs = direction.during(|| (payload.body)(x))?;
                // MLX traverses this graph only in the backward pass, so the first (forward) run
                // needs no check.
                if !forward.swap(false, Ordering::Relaxed) {
                    stack::check(OP, &outputs, x)?;
                }
                Ok(outputs)
            });
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

/// [`checkpoint`] for a function of parameters in a [`Tree`] and further arguments, such as a layer
/// and its input. Both have gradients.
///
/// Pass only the trained parameters, and let `f` capture the frozen ones. A quantized matrix among
/// the parameters would be differentiated, which is an error. Like any argument, the parameters
/// stay in the graph until the backward pass is over.
///
/// ```
/// use std::collections::BTreeMap;
/// use mlx_rs_core::{All, Array, Result, transforms::{checkpoint_tree, value_and_grad_tree}};
/// type Params = BTreeMap<String, Array>;
/// # fn main() -> Result<()> {
/// let layer = checkpoint_tree(|p: &Params, x: &[Array]| -> Result<Vec<Array>> {
///     Ok(vec![x[0].multiply(&p["scale"])?.tanh()?])
/// });
/// let params = Params::from([("scale".to_string(), Array::scalar(0.0f32)?)]);
/// let x = Array::vector(&[1.0f32, 2.0])?;
/// let (_, (), grads) = value_and_grad_tree(&params, |p| -> Result<_> {
///     let h = layer(p, &[x.clone()])?;
///     Ok((layer(p, &h)?[0].add(&h[0])?.sum(All, false)?, ()))
/// })?;
/// assert_eq!(grads["scale"].item::<f32>()?, 3.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`checkpoint`].
pub fn checkpoint_tree<P, F, E>(
    f: F,
) -> impl Fn(&P, &[Array]) -> Result<Vec<Array>, E> + Send + Sync + 'static
where
    P: Tree + Send + 'static,
    F: Fn(&P, &[Array]) -> Result<Vec<Array>, E> + Send + Sync + 'static,
    E: ClosureError,
{
    const OP: &str = "checkpoint_tree";
    let f = Arc::new(f);
    move |params, args| {
        let mut all: Vec<Array> = params.leaves().into_iter().cloned().collect();
        let n = all.len();
        let form = params.with_leaves(OP, all.clone())?;
        all.extend(args.iter().cloned());
        let f = Arc::clone(&f);
        let block = checkpoint(move |x: &[Array]| {
            let (leaves, args) = x.split_at(n);
            f(&form.with_leaves(OP, leaves.to_vec())?, args)
        });
        block(&all)
    }
}
