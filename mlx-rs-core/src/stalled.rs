//! Arrays whose results never come, because an asynchronous evaluation failed.

use std::sync::atomic::{AtomicBool, Ordering};

use mlx_sys as sys;

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::error::Result;

/// Whether an asynchronous evaluation has failed in this process. If so, some arrays may wait for
/// results that never come. Not all of them are known, so the flag is never reset. Every later
/// evaluation checks its graph first, and waits for unfinished operations.
static STALLED: AtomicBool = AtomicBool::new(false);

/// Marks all arrays that `vec` depends on so that no reader waits for them. Call with the lock
/// held.
pub(crate) fn release(vec: &ArrayVec) -> Result<()> {
    if !STALLED.load(Ordering::Relaxed) {
        return Ok(());
    }
    call::status("eval", || {
        // SAFETY: the vector is live and contains live arrays.
        unsafe { sys::rust_mlx_release_stalled(vec.raw()) }
    })
}

/// Prepares arrays that are about to be evaluated or awaited, if [`STALLED`]. Call with the lock
/// held.
pub(crate) fn before_waiting<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Result<()> {
    if STALLED.load(Ordering::Relaxed) {
        release(&ArrayVec::new("eval", arrays)?)?;
    }
    Ok(())
}

/// Records that an asynchronous evaluation failed.
pub(crate) fn after_failure() {
    STALLED.store(true, Ordering::Relaxed);
}
