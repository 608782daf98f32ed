//! Evaluation of lazy arrays.

use mlx_sys as sys;

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::device::Device;
use crate::error::Result;
use crate::stream::Stream;

/// Computes all `arrays` and waits until they are there.
///
/// # Errors
/// MLX's own message when an operation of the graph fails.
pub fn eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let _guard = call::lock();
    let vec = ArrayVec::new("eval", arrays)?;
    // SAFETY: the vector handle is live for the length of the call.
    call::status("eval", || unsafe { sys::mlx_eval(vec.raw()) })
}

/// Starts computing all `arrays` and returns at once; a later access waits for the result.
///
/// # Errors
/// MLX's own message when the graph cannot be scheduled.
pub fn async_eval<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    let _guard = call::lock();
    let vec = ArrayVec::new("async_eval", arrays)?;
    // SAFETY: the vector handle is live for the length of the call; MLX keeps its own references.
    call::status("async_eval", || unsafe { sys::mlx_async_eval(vec.raw()) })
}

/// Waits until all work on the default device's default stream is done.
///
/// # Errors
/// When that work failed.
pub fn synchronize() -> Result<()> {
    Stream::default_of(Device::default_device())?.synchronize()
}
