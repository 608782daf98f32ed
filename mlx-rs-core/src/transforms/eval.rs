//! Evaluation of lazy arrays, and [`Array::detach`], which removes an array's graph.

use std::{mem, ptr};

use mlx_sys as sys;

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::closure;
use crate::device::Device;
use crate::error::Result;
use crate::stalled;
use crate::stream::Stream;

/// Removes consecutive duplicates. KV buffers that are written by one operation all return the same
/// array.
fn once<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> impl Iterator<Item = &'a Array> {
    let mut last: *const Array = ptr::null();
    (arrays.into_iter()).filter(move |&array| !ptr::eq(mem::replace(&mut last, array), array))
}

/// Computes all `arrays` and waits for the results. Mirrors `mx.eval`.
///
/// ```
/// use mlx_rs_core::{Array, eval};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let x = Array::vector(&[1.0f32, 2.0])?;
/// let (a, b) = (x.square()?, x.exp()?);
/// eval([&a, &b])?; // both in one go
/// assert_eq!(a.to_vec::<f32>()?, [1.0, 4.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// MLX's own message when an operation of the graph fails.
#[doc(alias = "mlx_eval")]
pub fn eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let _guard = call::enter("eval")?;
    let vec = ArrayVec::new("eval", once(arrays))?;
    stalled::release(&vec)?;
    // SAFETY: the vector handle is live for the length of the call.
    let result = call::evaluation("eval", || unsafe { sys::mlx_eval(vec.raw()) });
    closure::drain();
    result
}

/// Starts computing all `arrays` and returns at once. A later access to a value waits for the
/// result. Mirrors `mx.async_eval`.
///
/// ```
/// use mlx_rs_core::{Array, async_eval};
/// # fn main() -> mlx_rs_core::Result<()> {
/// let y = Array::vector(&[3.0f32])?.square()?;
/// async_eval([&y])?; // what follows overlaps with the computation
/// assert_eq!(y.to_vec::<f32>()?, [9.0]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// MLX's own message when an operation cannot be started. Operations that were started earlier are
/// then complete, and their results can be read. After such an error, each evaluation of the
/// process first waits for the earlier ones that it depends on, so they no longer overlap.
#[doc(alias = "mlx_async_eval")]
pub fn async_eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let _guard = call::enter("async_eval")?;
    let vec = ArrayVec::new("async_eval", once(arrays))?;
    stalled::release(&vec)?;
    // SAFETY: the vector handle is live for the length of the call; MLX keeps its own references.
    let result = call::evaluation("async_eval", || unsafe { sys::mlx_async_eval(vec.raw()) });
    if result.is_err() {
        // MLX does not mark started arrays as available, so their readers would wait forever.
        stalled::after_failure();
    }
    // Payloads are also dropped here, because token generation may never call another function that
    // does it.
    closure::drain();
    result
}

/// Waits for all operations on the default device's default stream. Mirrors `mx.synchronize`.
///
/// ```
/// mlx_rs_core::synchronize()?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// When one of these operations failed.
pub fn synchronize() -> Result<()> {
    Stream::default_of(Device::default_device())?.synchronize()
}

impl Array {
    /// The same values, evaluated, without graph and gradient.
    ///
    /// [`stop_gradient`](Array::stop_gradient) is the lazy counterpart: gradients end there, but
    /// the graph is kept until evaluation. Detach arrays that exist across steps, such as a running
    /// mean, so that their graphs do not grow.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Result, transforms::grad};
    /// # fn main() -> Result<()> {
    /// let f = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].multiply(&x[0].detach()?)?]) };
    /// // d(x * c)/dx at x = c = 3
    /// assert_eq!(grad(f, &[0])(&[Array::scalar(3.0f32)?])?[0].item::<f32>()?, 3.0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// MLX's own message when an operation of the graph fails, or when the array has no values
    /// because it is traced (inside `vmap`, `compile` and export).
    pub fn detach(&self) -> Result<Array> {
        let value = self.stop_gradient()?;
        eval([&value])?;
        Ok(value)
    }
}
