//! Gives blocks the strategies that the loading options ask for. What strategies compute is in
//! `nn/feed_forward.rs`.

use std::sync::Arc;

use inference::{Error, ErrorKind, FeedForwardPlan, FeedForwardStrategy, Result};

use super::Decoder;
use crate::loader::Features;
use crate::nn::feed_forward::{FeedForward, LayerMode, Routed, SparseFfn};
use crate::nn::walk::WalkFfn;

/// Sets the strategies of `plan` in the blocks of a decoder with `layers` layers. Those that walk
/// read `features`.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for a layer that is not there; [`ErrorKind::Unsupported`] for one
/// whose feed-forward part cannot be computed so; those of [`Features::layer`].
pub fn apply(
    decoder: &mut dyn Decoder,
    plan: &FeedForwardPlan,
    layers: usize,
    features: Option<&Features>,
) -> Result<()> {
    for (layer, strategy) in plan.for_layers(layers)?.into_iter().enumerate() {
        let mode = match strategy {
            FeedForwardStrategy::Dense => continue,
            FeedForwardStrategy::Sparse { top_k } => {
                LayerMode::Compute(Arc::new(SparseFfn { top_k }))
            }
            FeedForwardStrategy::Walk { top_k } => {
                let Some(features) = features else {
                    return Err(refused(layer, strategy, "there is no vindex"));
                };
                let rows = features.layer(layer)?;
                LayerMode::Compute(Arc::new(WalkFfn { rows, top_k }))
            }
            FeedForwardStrategy::AttentionOnly => LayerMode::AttentionOnly,
            FeedForwardStrategy::Gain(gain) => LayerMode::Gain(gain),
            other => return Err(refused(layer, other, "this backend does not have it")),
        };
        let Some(part) = decoder.feed_forward_mut(layer) else {
            let why = "the architecture computes its feed-forward part together with others";
            return Err(refused(layer, strategy, why));
        };
        if let LayerMode::Compute(strategy_of) = &mode
            && let Some(why) = strategy_of.obstacle(part)
        {
            return Err(refused(layer, strategy, why));
        }
        let own = std::mem::replace(part, FeedForward::Nothing);
        *part = FeedForward::Routed(Box::new(Routed { own, mode }));
    }
    Ok(())
}

fn refused(layer: usize, strategy: FeedForwardStrategy, why: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("feed_forward: layer {layer} cannot be {strategy}: {why}"),
    )
}
