//! Replacements for MLX operations that give wrong results under `vmap`; see [`crate::mapped`].

use super::select::where_;
use crate::array::Array;
use crate::error::Result;

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
