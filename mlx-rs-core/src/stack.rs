//! Stack space for transforms. MLX walks graphs by recursion on the caller's stack, with one level
//! per operation of a chain. Here transforms run on a stack of known size. A graph too deep for
//! that stack is an error.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use mlx_sys as sys;

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::error::{Error, ErrorKind, Result};

/// The free stack space of a transform, in bytes. The system provides a page of it at the first
/// access.
const FREE: usize = 128 << 20;

/// The assumed number of bytes of one recursion level in MLX. With it, chains of a million
/// operations fit 512 MiB.
const LEVEL: usize = 512;

/// The assumed number of free bytes, if the platform does not report it.
const UNKNOWN: usize = 256 << 10;

/// Whether the stack already has the free space that [`grown`] provides.
pub(crate) fn is_large() -> bool {
    stacker::remaining_stack().is_some_and(|free| free >= FREE)
}

/// Runs `f` on the same thread, with at least [`FREE`] bytes of stack.
pub(crate) fn grown<T>(f: impl FnOnce() -> T) -> T {
    let mut f = Some(f);
    let result = catch_unwind(AssertUnwindSafe(|| {
        stacker::maybe_grow(FREE, 2 * FREE, || f.take().map(|f| f()))
    }));
    match (result, f) {
        (Ok(Some(value)), _) => value,
        // The system has no memory for a new stack. Smaller graphs still fit the current stack.
        (Ok(None) | Err(_), Some(f)) => f(),
        (Err(panic), None) => resume_unwind(panic),
        (Ok(None), None) => unreachable!("the function runs once and then has a value"),
    }
}

/// Checks that MLX can walk the graph from `inputs` to `outputs` on the free stack.
///
/// # Errors
/// [`ErrorKind::Value`] for a graph that is too deep.
pub(crate) fn check(op: &'static str, outputs: &[Array], inputs: &[Array]) -> Result<()> {
    let free = stacker::remaining_stack().unwrap_or(UNKNOWN);
    let limit = free / LEVEL;
    let outputs = ArrayVec::new(op, outputs)?;
    let inputs = ArrayVec::new(op, inputs)?;
    let mut exceeds = false;
    call::status(op, || {
        // SAFETY: the result is writable, and the vectors are live.
        unsafe { sys::rust_mlx_graph_exceeds(&raw mut exceeds, outputs.raw(), inputs.raw(), limit) }
    })?;
    if !exceeds {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Value,
        op,
        format!(
            "the graph of the function, with unevaluated arrays that it captures, has more than \
             {limit} operations; evaluate captured arrays first, or split the function"
        ),
    ))
}
