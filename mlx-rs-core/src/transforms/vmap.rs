//! Vectorization: a function of single examples becomes a function of batches.

use mlx_sys as sys;

use crate::array::{Array, axis_of};
use crate::call::{self, ArrayVec};
use crate::closure::{self, ClosureError, Outcome};
use crate::error::{Error, ErrorKind, Result};
use crate::mapped::Recording;
use crate::stack;

/// The axis of each argument or output that is the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmapAxes {
    /// The same axis for all arguments or outputs. A negative axis counts from the last.
    All(i32),
    /// One batch axis for each argument or output. `None` is for an argument or output without a
    /// batch axis, which all examples share.
    Each(Vec<Option<i32>>),
}

impl From<i32> for VmapAxes {
    fn from(axis: i32) -> Self {
        VmapAxes::All(axis)
    }
}
impl From<&[Option<i32>]> for VmapAxes {
    fn from(axes: &[Option<i32>]) -> Self {
        VmapAxes::Each(axes.to_vec())
    }
}
impl<const N: usize> From<&[Option<i32>; N]> for VmapAxes {
    fn from(axes: &[Option<i32>; N]) -> Self {
        VmapAxes::Each(axes.to_vec())
    }
}
impl<const N: usize> From<[Option<i32>; N]> for VmapAxes {
    fn from(axes: [Option<i32>; N]) -> Self {
        VmapAxes::Each(axes.to_vec())
    }
}

impl VmapAxes {
    /// Expands to one entry for each of `n` arrays, or returns an error.
    fn spread(&self, op: &'static str, what: &str, n: usize) -> Result<Vec<Option<i32>>> {
        match self {
            VmapAxes::All(axis) => Ok(vec![Some(*axis); n]),
            VmapAxes::Each(axes) if axes.len() == n => Ok(axes.clone()),
            VmapAxes::Each(axes) => Err(Error::new(
                ErrorKind::Value,
                op,
                format!("{} axes were given for {n} {what}s", axes.len()),
            )),
        }
    }
}

/// Returns a function that applies `f` to every example of a batch at once.
///
/// `in_axes` is the batch axis of each argument, and `out_axes` the batch axis of each output. Both
/// are usually `0` for all. Inside `f` the batch axis does not exist. An output that depends on no
/// batched argument is repeated for each example, unless its axis is `None`.
///
/// If MLX vectorizes an operation wrongly, this crate computes it for each example separately, for
/// at most 4,096 examples. An empty batch has empty results.
///
/// Mirrors `mx.vmap`.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms::vmap};
/// # fn main() -> Result<()> {
/// let dot = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].multiply(&x[1])?.sum(0, false)?]) };
/// let rows = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// let one = Array::vector(&[1.0f32, 10.0])?;
/// let dots = vmap(dot, [Some(0), None], 0)(&[rows, one])?;
/// assert_eq!(dots[0].to_vec::<f32>()?, [21.0, 43.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// From the returned function: errors of `f`; [`ErrorKind::Value`] when the number of axes differs
/// from that of arguments or outputs, no argument has a batch, or a batched output has the axis
/// `None`; [`ErrorKind::Index`] for an unknown axis; [`ErrorKind::Shape`] when the batches differ
/// in length; MLX's message when `f` reads values or uses an operation that cannot be vectorized.
#[doc(alias = "mlx_detail_vmap_trace")]
pub fn vmap<F, E>(
    mut f: F,
    in_axes: impl Into<VmapAxes>,
    out_axes: impl Into<VmapAxes>,
) -> impl FnMut(&[Array]) -> Result<Vec<Array>, E>
where
    F: FnMut(&[Array]) -> Result<Vec<Array>, E>,
    E: ClosureError,
{
    let (in_axes, out_axes) = (in_axes.into(), out_axes.into());
    move |inputs| {
        let mut body = |x: &[Array]| -> Outcome {
            let outputs = closure::guarded(|| f(x).and_then(apart))?;
            // MLX also walks the graphs of arguments without a batch.
            stack::check("vmap", &outputs, &[])?;
            Ok(outputs)
        };
        vectorize("vmap", &mut body, inputs, &in_axes, &out_axes)
    }
}

/// Makes repeated outputs distinct arrays, because MLX would move the batch axis of a repeated one
/// twice.
fn apart<E: ClosureError>(outputs: Vec<Array>) -> Result<Vec<Array>, E> {
    if outputs.len() < 2 {
        return Ok(outputs);
    }
    Ok(outputs.iter().map(Array::copy).collect::<Result<_>>()?)
}

const NONE: i32 = -1;

fn vectorize<E: ClosureError>(
    op: &'static str,
    body: &mut dyn FnMut(&[Array]) -> Outcome,
    inputs: &[Array],
    in_axes: &VmapAxes,
    out_axes: &VmapAxes,
) -> Result<Vec<Array>, E> {
    let in_axes = check_inputs(op, inputs, in_axes)?;
    closure::run(op, || {
        let args = ArrayVec::new(op, inputs)?;
        let (mut traced_in, mut traced_out) = (ArrayVec::empty(), ArrayVec::empty());
        let recording = Recording::start();
        closure::scoped(body, |function| {
            call::status(op, || {
                // SAFETY: both results are writable, closure and vector are live. There is an axis
                // for each input, in range or -1, and at least one is not -1.
                unsafe {
                    sys::mlx_detail_vmap_trace(
                        traced_in.out(),
                        traced_out.out(),
                        function.raw(),
                        args.raw(),
                        in_axes.as_ptr(),
                        in_axes.len(),
                    )
                }
            })
        })?;
        drop(recording);
        let traced = traced_out.to_arrays(op)?;
        let wanted = out_axes.spread(op, "output", traced.len())?;
        let mut axes = Vec::with_capacity(wanted.len());
        for (axis, output) in wanted.iter().zip(&traced) {
            axes.push(match axis {
                // The batch adds one axis to the output.
                Some(axis) => axis_of(op, *axis, output.ndim() + 1)? as i32,
                None => NONE,
            });
        }
        let mut out = ArrayVec::empty();
        call::status(op, || {
            // SAFETY: the result is writable, the vectors are live; there is an axis for each input
            // and each output.
            unsafe {
                sys::rust_mlx_vmap_replace(
                    out.out(),
                    args.raw(),
                    traced_in.raw(),
                    traced_out.raw(),
                    in_axes.as_ptr(),
                    in_axes.len(),
                    axes.as_ptr(),
                    axes.len(),
                )
            }
        })
        .map_err(|e| match wanted.iter().position(Option::is_none) {
            // MLX's message about axis -1. Here -1 means that there is no batch axis.
            Some(i) if e.message().contains("Axis -1 invalid for output") => Error::new(
                ErrorKind::Value,
                op,
                format!("output {i} (or a later one without an axis) depends on a batched argument, so its axis cannot be None"),
            ),
            _ => e,
        })?;
        // An empty batch makes operands empty that were not empty when their operation was checked.
        // Such results are not computed; see `call::array`.
        out.to_arrays(op)
    })
}

/// The axes in MLX's form: not negative, and -1 for no axis. MLX's own checks are insufficient.
fn check_inputs(op: &'static str, inputs: &[Array], axes: &VmapAxes) -> Result<Vec<i32>> {
    let axes = axes.spread(op, "argument", inputs.len())?;
    let mut batch: Option<(usize, i32)> = None;
    let mut resolved = Vec::with_capacity(axes.len());
    for (i, (axis, input)) in axes.iter().zip(inputs).enumerate() {
        let Some(axis) = axis else {
            resolved.push(NONE);
            continue;
        };
        let axis = axis_of(op, *axis, input.ndim())?;
        let n = input.shape()[axis];
        match batch {
            Some((first, m)) if m != n => {
                return Err(Error::new(
                    ErrorKind::Shape,
                    op,
                    format!("argument {first} has {m} examples, but argument {i} has {n}"),
                ));
            }
            _ => batch = Some((i, n)),
        }
        resolved.push(axis as i32);
    }
    if batch.is_none() {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            "no argument has a batch axis; at least one must",
        ));
    }
    Ok(resolved)
}
