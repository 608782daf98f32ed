//! Evaluates a model on a batch, without an update.

use inference::Result;
use mlx_rs_core::{All, eval};

use super::packed::{Packed, check};
use super::{Evaluation, Sequence};
use crate::engine::Engine;
use crate::error::engine;
use crate::train::loss::cross_entropy_each;

/// Returns the loss of a model on sequences.
pub(in crate::train) fn evaluate_on(loaded: &Engine, batch: &[Sequence]) -> Result<Evaluation> {
    check(loaded, batch.iter())?;
    let decoder = loaded.decoder()?;
    loaded
        .scope(|| -> mlx_rs_core::Result<_> {
            let packed = Packed::new(batch.iter())?;
            let logits = packed.logits(decoder.as_ref())?;
            let losses = cross_entropy_each(&logits, &packed.targets)?.multiply(&packed.mask)?;
            let best = logits.argmax(-1, false)?;
            let right = best.equal(&packed.targets.astype(best.dtype())?)?;
            let right = right.astype(losses.dtype())?.multiply(&packed.mask)?;
            let (losses, right) = (losses.sum(All, false)?, right.sum(All, false)?);
            eval([&losses, &right])?;
            Ok(Evaluation {
                loss: f64::from(losses.item::<f32>()?),
                tokens: batch.iter().map(Sequence::learned).sum(),
                correct: right.item::<f32>()?.round() as usize,
            })
        })
        .map_err(engine("evaluate"))
}
