//! Selection between two arrays by a condition.

use crate::array::Array;
use crate::call;
use crate::error::Result;

/// Selects the values of `yes` where `condition` is true, and those of `no` elsewhere. All three
/// arrays broadcast.
///
/// ```
/// use mlx_rs_core::{array, where_};
/// let x = array!([-1.0, 2.0])?;
/// let relu = where_(&x.greater(&array!(0.0)?)?, &x, &array!(0.0)?)?;
/// assert_eq!(relu.to_vec::<f32>()?, [0.0, 2.0]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// MLX's message when the shapes do not broadcast.
#[doc(alias = "mlx_where")]
pub fn where_(condition: &Array, yes: &Array, no: &Array) -> Result<Array> {
    call::array("where", |out, s| {
        // SAFETY: all handles are live for the length of the call.
        unsafe { mlx_sys::mlx_where(out, condition.raw(), yes.raw(), no.raw(), s) }
    })
    .map_err(|e| e.with_inputs(&[condition, yes, no]))
}
