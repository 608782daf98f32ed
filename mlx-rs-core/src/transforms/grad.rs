//! Gradients of scalar functions, with respect to arguments by index, or to trees of parameters.

use mlx_sys as sys;

use super::tree::Tree;
use super::{Direction, differentiable, some_output};
use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::closure::{self, ClosureError, Outcome};
use crate::error::{Error, ErrorKind, Result};
use crate::stack;

/// Returns a function that computes the value of `f`, and its gradients with respect to the
/// arguments with the indices `argnums`.
///
/// The first output of `f` is the value: a floating-point array of shape `[]`. Further outputs are
/// returned unchanged and have no gradient. The result is the outputs, and one gradient per entry
/// of `argnums`, in that order. Each gradient has the shape and type of its argument.
///
/// Mirrors `mx.value_and_grad`.
///
/// ```
/// use mlx_rs_core::{All, Array, Result, transforms::value_and_grad};
/// # fn main() -> Result<()> {
/// let loss = |x: &[Array]| -> Result<Vec<Array>> {
///     let error = x[0].subtract(&x[1])?;
///     Ok(vec![error.square()?.sum(All, false)?, error])
/// };
/// let (x, y) = (Array::vector(&[1.0f32, 2.0])?, Array::vector(&[0.0f32, 4.0])?);
/// let (values, grads) = value_and_grad(loss, &[0])(&[x, y])?;
/// assert_eq!(values[0].item::<f32>()?, 5.0);
/// assert_eq!(values[1].to_vec::<f32>()?, [1.0, -2.0]); // passed through
/// assert_eq!(grads[0].to_vec::<f32>()?, [2.0, -4.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// From the returned function: errors of `f`; [`ErrorKind::Index`] for an argument that does not
/// exist; [`ErrorKind::Value`] for empty or repeated `argnums`, or an `f` without outputs;
/// [`ErrorKind::Dtype`] for an argument or value that is not floating-point; [`ErrorKind::Shape`]
/// for a value that is not a scalar; MLX's message for an operation without a gradient.
#[expect(
    clippy::type_complexity,
    reason = "spelled out, so that a reader sees what the function returns"
)]
#[doc(alias = "mlx_value_and_grad")]
pub fn value_and_grad<F, E>(
    mut f: F,
    argnums: &[usize],
) -> impl FnMut(&[Array]) -> Result<(Vec<Array>, Vec<Array>), E> + use<F, E>
where
    F: FnMut(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let argnums = argnums.to_vec();
    move |inputs| differentiate("value_and_grad", &mut f, inputs, &argnums)
}

/// Returns a function that computes the gradients of `f` with respect to the arguments with the
/// indices `argnums`, as [`value_and_grad`] does, but without the values.
///
/// Mirrors `mx.grad`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::grad};
/// # fn main() -> Result<()> {
/// let product = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].multiply(&x[1])?]) };
/// let grads = grad(product, &[1, 0])(&[Array::scalar(3.0f32)?, Array::scalar(5.0f32)?])?;
/// assert_eq!(grads[0].item::<f32>()?, 3.0); // with respect to argument 1
/// assert_eq!(grads[1].item::<f32>()?, 5.0);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`value_and_grad`].
pub fn grad<F, E>(
    mut f: F,
    argnums: &[usize],
) -> impl FnMut(&[Array]) -> Result<Vec<Array>, E> + use<F, E>
where
    F: FnMut(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let argnums = argnums.to_vec();
    move |inputs| Ok(differentiate("grad", &mut f, inputs, &argnums)?.1)
}

/// The value of `f` at `params`, its further results, and its gradients as a tree with the
/// structure of `params`.
///
/// This is for training. `params` is any [`Tree`], such as a map from names to arrays. `f` returns
/// the loss (a floating-point array of shape `[]`) and a tree of further results without gradients;
/// use `()` for none. Every leaf of `params` is differentiated, so `f` should capture arrays that
/// stay fixed.
///
/// ```
/// use std::collections::BTreeMap;
/// use mlx_rs_core::{All, Array, Result, transforms::value_and_grad_tree};
/// # fn main() -> Result<()> {
/// let mut params = BTreeMap::new();
/// params.insert("weight".to_string(), Array::vector(&[1.0f32, 2.0])?);
/// params.insert("bias".to_string(), Array::scalar(0.5f32)?);
/// let x = Array::vector(&[3.0f32, 4.0])?;
///
/// let (loss, predicted, grads) = value_and_grad_tree(&params, |p| -> Result<_> {
///     let y = p["weight"].multiply(&x)?.sum(All, false)?.add(&p["bias"])?;
///     Ok((y.square()?, y))
/// })?;
/// assert_eq!(predicted.item::<f32>()?, 11.5);
/// assert_eq!(loss.item::<f32>()?, 132.25);
/// assert_eq!(grads["bias"].item::<f32>()?, 23.0);
/// assert_eq!(grads["weight"].to_vec::<f32>()?, [69.0, 92.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`value_and_grad`]; [`ErrorKind::Value`] when `params` has no leaves.
pub fn value_and_grad_tree<P, A, F, E>(params: &P, f: F) -> Result<(Array, A, P), E>
where
    P: Tree,
    A: Tree,
    F: FnOnce(&P) -> Result<(Array, A), E>,
    E: ClosureError,
{
    const OP: &str = "value_and_grad_tree";
    let inputs: Vec<Array> = params.leaves().into_iter().cloned().collect();
    if inputs.is_empty() {
        return Err(Error::new(ErrorKind::Value, OP, "there are no parameters").into());
    }
    let argnums: Vec<usize> = (0..inputs.len()).collect();
    let mut f = Some(f);
    let mut form: Option<A> = None;
    let (values, grads) = differentiate(
        OP,
        |x: &[Array]| -> Result<Vec<Array>, E> {
            let f = f.take().ok_or_else(|| {
                Error::new(ErrorKind::Mlx, OP, "MLX called the function more than once")
            })?;
            let (value, aux) = f(&params.with_leaves(OP, x.to_vec())?)?;
            let mut outputs = vec![value];
            outputs.extend(aux.leaves().into_iter().cloned());
            form = Some(aux);
            Ok(outputs)
        },
        &inputs,
        &argnums,
    )?;
    let mut values = values.into_iter();
    let (Some(value), Some(form)) = (values.next(), form) else {
        return Err(Error::new(ErrorKind::Mlx, OP, "MLX returned no value").into());
    };
    let aux = form.with_leaves(OP, values.collect())?;
    Ok((value, aux, params.with_leaves(OP, grads)?))
}

/// The common implementation of [`value_and_grad`] and [`value_and_grad_tree`].
fn differentiate<E: ClosureError>(
    op: &'static str,
    mut f: impl FnMut(&[Array]) -> Result<Vec<Array>, E>,
    inputs: &[Array],
    argnums: &[usize],
) -> Result<(Vec<Array>, Vec<Array>), E> {
    let order = check_argnums(op, inputs, argnums)?;
    // MLX requires sorted indices, and returns gradients in that order.
    let sorted: Vec<i32> = order.iter().map(|&i| argnums[i] as i32).collect();
    let mut body = |x: &[Array]| -> Outcome {
        let outputs = closure::guarded(|| Direction::Reverse.during(|| f(x)))?;
        check_value(op, &outputs)?;
        stack::check(op, &outputs, x)?;
        Ok(outputs)
    };
    closure::run(op, || {
        closure::scoped(&mut body, |function| {
            let args = ArrayVec::new(op, inputs)?;
            let transformed = ValueAndGrad::new(op, function, &sorted)?;
            let (mut values, mut grads) = (ArrayVec::empty(), ArrayVec::empty());
            call::status(op, || {
                // SAFETY: both results are writable, closure and arguments are live.
                unsafe {
                    sys::mlx_closure_value_and_grad_apply(
                        values.out(),
                        grads.out(),
                        transformed.0,
                        args.raw(),
                    )
                }
            })?;
            let values = values.to_arrays(op)?;
            let grads = grads.to_arrays(op)?;
            if grads.len() != order.len() {
                return Err(Error::new(
                    ErrorKind::Mlx,
                    op,
                    "MLX returned too few gradients",
                ));
            }
            // grads[k] belongs to argnums[order[k]].
            let mut pairs: Vec<(usize, Array)> = order.iter().copied().zip(grads).collect();
            pairs.sort_by_key(|(i, _)| *i);
            Ok((values, pairs.into_iter().map(|(_, g)| g).collect()))
        })
    })
}

/// Checks that `argnums` exist, are differentiable and are distinct. Returns the order that sorts
/// them.
fn check_argnums(op: &'static str, inputs: &[Array], argnums: &[usize]) -> Result<Vec<usize>> {
    if argnums.is_empty() {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            "no argument was named to differentiate with respect to",
        ));
    }
    for &n in argnums {
        let Some(input) = inputs.get(n) else {
            return Err(Error::new(
                ErrorKind::Index,
                op,
                format!(
                    "argument {n} is out of range for a function of {} arguments",
                    inputs.len()
                ),
            ));
        };
        differentiable(op, "argument", n, input)?;
    }
    let mut order: Vec<usize> = (0..argnums.len()).collect();
    order.sort_by_key(|&i| argnums[i]);
    if let Some(pair) = order.windows(2).find(|w| argnums[w[0]] == argnums[w[1]]) {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            format!("argument {} is named twice", argnums[pair[0]]),
        ));
    }
    Ok(order)
}

fn check_value(op: &'static str, outputs: &[Array]) -> Result<()> {
    some_output(op, outputs)?;
    let value = &outputs[0];
    if !value.shape().is_empty() {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            format!(
                "the value to differentiate (the first output) must have shape [], but has shape {:?}; \
                 reduce it, for example with sum or mean",
                value.shape()
            ),
        ));
    }
    if !value.dtype().is_float() {
        return Err(Error::new(
            ErrorKind::Dtype,
            op,
            format!(
                "the value to differentiate (the first output) is {}, which has no gradient; it must be a \
                 real floating-point number",
                value.dtype()
            ),
        ));
    }
    Ok(())
}

/// A C closure that returns values and gradients.
struct ValueAndGrad(sys::mlx_closure_value_and_grad);

impl ValueAndGrad {
    fn new(op: &'static str, f: &closure::Closure, argnums: &[i32]) -> Result<Self> {
        let mut function = Self(sys::mlx_closure_value_and_grad {
            ctx: std::ptr::null_mut(),
        });
        call::status(op, || {
            // SAFETY: the result is writable and null, the closure is live, pointer and length
            // describe the slice.
            unsafe {
                sys::mlx_value_and_grad(
                    &raw mut function.0,
                    f.raw(),
                    argnums.as_ptr(),
                    argnums.len(),
                )
            }
        })?;
        Ok(function)
    }
}

impl Drop for ValueAndGrad {
    fn drop(&mut self) {
        if !self.0.ctx.is_null() {
            let Some(_guard) = call::lock_to_free() else {
                return;
            };
            // SAFETY: the handle is owned here.
            unsafe { sys::mlx_closure_value_and_grad_free(self.0) };
        }
    }
}
