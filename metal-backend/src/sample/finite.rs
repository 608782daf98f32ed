//! Checks that a row of logits has a finite maximum.

use inference::{Error, ErrorKind, Result};

/// Returns an error if a row's greatest logit `greatest` is not finite, because then no token can
/// be drawn. `step` is the token's number in the reply; the first token is 1.
///
/// # Errors
/// [`ErrorKind::Engine`], with the step.
pub fn check_greatest(greatest: f32, step: u64) -> Result<()> {
    if greatest.is_finite() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Engine,
        format!(
            "step {step} of the reply: the greatest logit is {greatest}, so no token can be \
             drawn; check the model's weights (and its adapter's) for NaN and infinity"
        ),
    ))
}
