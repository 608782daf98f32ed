//! Transforms of functions: gradients, vectorization, checkpoints, custom gradients, compilation
//! and export; and evaluation of lazy arrays.
//!
//! A transform accepts a Rust function from arrays to arrays, `Fn(&[Array]) -> Result<Vec<Array>,
//! E>`, and returns another such function. So transforms can be nested: a gradient of a gradient,
//! or a `vmap` of a gradient.
//!
//! ```
//! use mlx_rs_core::{Array, Result, transforms::grad};
//! # fn main() -> Result<()> {
//! let cube = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?.multiply(&x[0])?]) };
//! let mut second = grad(grad(cube, &[0]), &[0]); // d²/dx² x³ = 6x
//! assert_eq!(second(&[Array::scalar(2.0f32)?])?[0].item::<f32>()?, 12.0);
//! # Ok(()) }
//! ```
//!
//! The [guide](crate::guide::transforms) has a chapter on them. `docs/transforms.md` lists the
//! transforms and the differences from Python.
//!
//! # Errors and panics
//!
//! `E` is any [`ClosureError`]: the crate's own error, `anyhow::Error`, or your own enum. The
//! transform returns the function's own error value, not a copy of its text. A function with
//! another error type may run inside (a custom gradient). Its error is then of kind
//! [`Callback`](crate::ErrorKind::Callback), and has the value as its source. A panic inside the
//! function resumes in the caller of the transform, after MLX has returned.
//!
//! # Requirements on functions
//!
//! Functions that run only during the call may borrow and mutate. Other functions must be `Fn +
//! Send + 'static`, because MLX keeps them: a lazy graph may call them later ([`checkpoint`],
//! [`custom_vjp`], [`CustomFunction`]), or their graph is cached ([`compile`]). Functions should be
//! pure, because they may run more or less often than the code suggests.
//!
//! While a function runs, its thread holds the lock of this crate. So it must not wait for another
//! thread that uses MLX. That other thread gets an error of kind
//! [`Deadlock`](crate::ErrorKind::Deadlock) after some time ([`set_deadlock_timeout`]).
//!
//! # Tracers
//!
//! Inside a gradient the arguments have values, so reading them
//! ([`Array::item`](crate::Array::item)) works. Inside [`vmap`], [`compile`] and export they have
//! no values, and reading them is an error. An operation that reads values is also an error, such
//! as [`Array::take`](crate::Array::take) with traced indices (use
//! [`Array::take_clamped`](crate::Array::take_clamped)).

mod autodiff;
mod checkpoint;
mod compile;
mod compile_caches;
mod custom;
mod eval;
mod export;
mod grad;
mod tree;
mod vmap;

pub use crate::closure::ClosureError;
pub use crate::deadlock::set_deadlock_timeout;
pub use autodiff::{jvp, vjp};
pub use checkpoint::{checkpoint, checkpoint_tree};
pub use compile::{
    CompileMode, Compiled, allow_cpu_jit, compile, compile_clear_cache, compile_mode,
    compile_shapeless, disable_compile, enable_compile, set_compile_mode,
};
pub use custom::{CustomFunction, custom_jvp, custom_vjp, custom_vmap};
pub use eval::{async_eval, eval, synchronize};
pub use export::{
    FunctionExporter, ImportedFunction, Kwargs, export_function, export_function_kwargs,
};
pub use grad::{grad, value_and_grad, value_and_grad_tree};
pub use tree::Tree;
pub use vmap::{VmapAxes, vmap};

/// The number of functions that MLX or handles of this module keep alive. Like
/// [`memory::live_arrays`](crate::memory::live_arrays), it indicates a leak if it grows.
///
/// ```
/// use mlx_rs_core::{Array, Result, transforms};
/// # fn main() -> Result<()> {
/// let before = transforms::live_closures();
/// transforms::grad(|x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) }, &[0])(&[Array::scalar(1.0f32)?])?;
/// assert_eq!(transforms::live_closures(), before);
/// # Ok(()) }
/// ```
#[must_use]
pub fn live_closures() -> i64 {
    crate::closure::live()
}

use std::cell::Cell;

use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};

/// The kind of gradient that the innermost surrounding transform needs from a function with custom
/// gradients. MLX computes reverse products in both cases (see [`jvp`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Reverse,
    Forward,
}

thread_local! {
    static DIRECTION: Cell<Direction> = const { Cell::new(Direction::Reverse) };
}

impl Direction {
    pub(crate) fn current() -> Self {
        DIRECTION.get()
    }

    /// Runs `f` with this direction. The previous one is restored afterwards, also if `f` panics.
    pub(crate) fn during<R>(self, f: impl FnOnce() -> R) -> R {
        struct Restore(Direction);
        impl Drop for Restore {
            fn drop(&mut self) {
                DIRECTION.set(self.0);
            }
        }
        let _restore = Restore(DIRECTION.replace(self));
        f()
    }
}

/// Checks that an array can be differentiated.
pub(crate) fn differentiable(op: &'static str, what: &str, i: usize, a: &Array) -> Result<()> {
    let dtype = a.dtype();
    if dtype.is_float() || dtype == crate::Dtype::Complex64 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Dtype,
        op,
        format!(
            "{what} {i} is {dtype}, which has no derivative; convert it to a floating-point type, or \
             leave it out of what is differentiated"
        ),
    ))
}

/// Checks that `given` (tangents, cotangents, results) match `expected` in number and shape.
pub(crate) fn same_shapes(
    op: &'static str,
    what: &str,
    given: &[Array],
    of: &str,
    expected: &[Array],
) -> Result<()> {
    if given.len() != expected.len() {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            format!(
                "{} {what}s were given for {} {of}s",
                given.len(),
                expected.len()
            ),
        ));
    }
    for (i, (g, e)) in given.iter().zip(expected).enumerate() {
        if g.shape() != e.shape() {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!(
                    "{what} {i} has shape {:?}, but {of} {i} has shape {:?}",
                    g.shape(),
                    e.shape()
                ),
            ));
        }
    }
    Ok(())
}

/// Checks that a function returned at least one array, because MLX assumes it.
pub(crate) fn some_output(op: &'static str, outputs: &[Array]) -> Result<()> {
    if outputs.is_empty() {
        return Err(Error::new(
            ErrorKind::Value,
            op,
            "the function returned no arrays; it must return at least one",
        ));
    }
    Ok(())
}

/// Returns the outputs as separate graph nodes. MLX assigns cotangents only to outputs that are not
/// directly a `stop_gradient`. Such an output would shift the cotangents of the others; a copy
/// prevents that.
pub(crate) fn own_nodes(outputs: Vec<Array>) -> Result<Vec<Array>> {
    outputs
        .iter()
        .map(|a| {
            crate::call::array("copy", |out, s| {
                // SAFETY: all handles are live for the length of the call.
                unsafe { mlx_sys::mlx_copy(out, a.raw(), s) }
            })
        })
        .collect()
}
