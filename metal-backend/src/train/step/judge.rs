//! Evaluates a model on a batch, without an update.

use inference::Result;
use mlx_rs_core::{All, eval};

use super::packed::{Packed, PackedPairs, check};
use super::{Evaluation, Preference, PreferenceEvaluation, Sequence, check_dpo};
use crate::engine::Engine;
use crate::error::engine;
use crate::train::loss::{cross_entropy_each, dpo};

/// Compares how well the model with its adapter and the base model prefer the better replies.
pub(in crate::train) fn evaluate_pairs_on(
    loaded: &Engine,
    batch: &[Preference],
    beta: f32,
    smoothing: f32,
) -> Result<PreferenceEvaluation> {
    check_dpo(beta, smoothing)?;
    let both = || batch.iter().flat_map(|p| [&p.chosen, &p.rejected]);
    check(loaded, both())?;
    let decoder = loaded.decoder()?;
    let (loss, margins) = loaded
        .scope(|| -> mlx_rs_core::Result<_> {
            let packed = PackedPairs::new(batch)?;
            let base = packed.without_adapters(decoder.as_ref())?;
            let tuned = packed.logprobs(decoder.as_ref())?;
            let loss = dpo((&tuned.0, &tuned.1), (&base.0, &base.1), beta, smoothing)?;
            let margin = tuned
                .0
                .subtract(&tuned.1)?
                .subtract(&base.0.subtract(&base.1)?)?;
            eval([&loss, &margin])?;
            Ok((loss.item::<f32>()?, margin.to_f32_vec()?))
        })
        .map_err(engine("evaluate"))?;
    Ok(PreferenceEvaluation {
        loss: f64::from(loss) * batch.len() as f64,
        pairs: batch.len(),
        correct: margins.iter().filter(|margin| **margin > 0.0).count(),
        tokens: both().map(Sequence::learned).sum(),
    })
}

/// The loss of a model on sequences.
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
