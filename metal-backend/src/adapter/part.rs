//! Cuts out the share of an adapter that belongs to this process, for a model that is divided among
//! processes.

use inference::{Error, ErrorKind, Result};
use inference_formats::split::Window;
use mlx_rs_core::{Array, concatenate, eval};

use crate::error::engine;
use crate::nn::adapter::{Delta, ParamSlot, PreparedPair};

/// Returns this process's share of `delta`, a change of the complete weight at `slot`.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for `DoRA` on a layer whose inputs are divided, because no process
/// knows the norm of a complete row, which DoRA needs.
pub(super) fn of(slot: &ParamSlot, delta: Delta) -> Result<Delta> {
    let Some(window) = slot.window() else {
        return Ok(delta);
    };
    let part = |array: &Array, axis: i32| part(array, axis, window).map_err(engine("adapter"));
    let mut low = match delta {
        Delta::Whole(weight) => {
            let axis = i32::try_from(window.axis).unwrap_or(-1);
            return Ok(Delta::Whole(part(&weight, axis)?));
        }
        Delta::LowRank(low) => low,
    };
    match slot.shape().len() - window.axis {
        // The inputs are divided.
        1 if low.m.is_some() => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "DoRA of `{}`, whose inputs are divided among processes, is not supported; use \
                     a pipeline, or put the adapter into the model (`mlx fuse`)",
                    slot.name()
                ),
            ));
        }
        1 => low.a = part(&low.a, -1)?,
        // The outputs are divided.
        2 => {
            low.b = part(&low.b, -2)?;
            low.m = low.m.map(|m| part(&m, -1)).transpose()?;
        }
        // Heads or experts are divided.
        _ => (low.a, low.b) = (part(&low.a, 0)?, part(&low.b, 0)?),
    }
    low.prepared = PreparedPair::default();
    Ok(Delta::LowRank(low))
}

/// Concatenates the ranges of `window` on an axis of an array.
fn part(array: &Array, axis: i32, window: &Window) -> mlx_rs_core::Result<Array> {
    let place = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let ranges = window.ranges.iter();
    let parts = ranges
        .map(|range| array.slice_axis(axis, place(range.start), place(range.end)))
        .collect::<mlx_rs_core::Result<Vec<_>>>()?;
    let all = concatenate(&parts.iter().collect::<Vec<_>>(), axis)?.contiguous()?;
    eval([&all])?;
    Ok(all)
}
