//! Whether operations are recorded for a function under `vmap`. MLX replaces each recorded
//! operation by an operation on the whole batch, and some replacements are wrong: they forget an
//! argument, count axes without the batch, or assume that both operands have the batch. Under
//! `vmap`, this crate records other operations instead of those.

use std::cell::Cell;

use crate::array::Array;
use crate::error::Result;
use crate::ops::where_;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// While a value of this type exists, this thread's operations are recorded for a mapped function.
pub(crate) struct Recording(());

impl Recording {
    pub(crate) fn start() -> Self {
        DEPTH.with(|depth| depth.set(depth.get() + 1));
        Self(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Whether this thread records a mapped function.
pub(crate) fn inside() -> bool {
    DEPTH.with(|depth| depth.get() > 0)
}

/// `a`, in the common shape and type of `a` and `b`. It has the batch if `b` has it.
pub(crate) fn with_batch_of(a: &Array, b: &Array) -> Result<Array> {
    where_(&Array::scalar(true)?, a, b)
}

/// `a` with the batch axis, if it has one, as the first axis. A reshape requires this.
pub(crate) fn batch_first(a: &Array) -> Result<Array> {
    let shape = [a.shape(), &[1]].concat();
    a.reshape(&shape)?.squeeze_axis(-1)
}

/// An operation of two arrays inside a mapped function.
pub(crate) fn binary(
    name: &str,
    a: &Array,
    b: &Array,
    raw: impl Fn(&Array, &Array) -> Result<Array>,
) -> Result<Array> {
    match name {
        // MLX's rule reads the position of the batch axis before the operands are aligned.
        "not_equal" => a.equal(b)?.logical_not(),
        // MLX's rule does not broadcast: the result has the shape of the first operand.
        "bitwise_and" | "bitwise_or" | "bitwise_xor" | "left_shift" | "right_shift" => {
            raw(&with_batch_of(a, b)?, &with_batch_of(b, a)?)
        }
        _ => raw(a, b),
    }
}
