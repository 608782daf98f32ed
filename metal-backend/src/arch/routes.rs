//! Assigns feed-forward backends to blocks, according to the loading options and the program's
//! requests. `nn/` implements the backends.

use std::sync::Arc;

use inference::{Error, ErrorKind, FeedForwardPlan, FeedForwardStrategy, Result};
use mlx_rs_core::Dtype;

use super::Decoder;
use crate::error::engine;
use crate::loader::Features;
use crate::nn::feed_forward::{FeedForward, FfnBackend, FfnPart, FfnPlace, LayerMode, Routed};
use crate::nn::router::FfnRouter;
use crate::nn::sparse::SparseFfn;
use crate::nn::walk::{WalkRows, has_gate};

/// The requested feed-forward backends.
pub struct Routes<'a> {
    /// The plan in the loading options.
    pub plan: &'a FeedForwardPlan,
    /// The program's own backends.
    pub router: &'a FfnRouter,
    /// The stored features, for layers that read them from files (`walk`).
    pub features: Option<&'a Features>,
    /// Whether our CPU kernels compute.
    pub on_cpu: bool,
    /// The model's compute type.
    pub dtype: Dtype,
}

/// Assigns backends to a decoder of `layers` layers.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for an unknown layer, or a layer that both the plan and the program
/// assign; [`ErrorKind::Unsupported`] for a feed-forward part that the backend cannot compute;
/// errors of [`Features::layer`].
pub fn apply(decoder: &mut dyn Decoder, routes: &Routes<'_>, layers: usize) -> Result<()> {
    routes.router.check(layers)?;
    for (layer, strategy) in routes.plan.for_layers(layers)?.into_iter().enumerate() {
        let backend = routes.router.backend(layer);
        let name = match (backend, strategy) {
            (None, FeedForwardStrategy::Dense) => continue,
            (None, strategy) => strategy.to_string(),
            (Some(backend), FeedForwardStrategy::Dense) => backend.name().to_owned(),
            (Some(backend), strategy) => {
                let message = format!(
                    "feed_forward: layer {layer} is {strategy}, and has the backend {} of the \
                     program; leave one of them out",
                    backend.name()
                );
                return Err(Error::new(ErrorKind::InvalidOption, message));
            }
        };
        let refused = |why: &str| {
            let message = format!("feed_forward: layer {layer} cannot be {name}: {why}");
            Error::new(ErrorKind::Unsupported, message)
        };
        let Some(part) = decoder.feed_forward_mut(layer) else {
            let why = "the architecture computes its feed-forward part together with others";
            return Err(refused(why));
        };
        let place = FfnPlace {
            layer,
            on_cpu: routes.on_cpu,
            dtype: routes.dtype,
        };
        let seen = FfnPart::new(part, place);
        let fault = |e: mlx_rs_core::Error| match e.kind() {
            mlx_rs_core::ErrorKind::Unsupported => refused(e.message()),
            _ => engine("feed_forward")(e),
        };
        let bound = |backend: &Arc<dyn FfnBackend>| -> Result<LayerMode> {
            let bound = backend.bind(&seen).map_err(fault)?;
            let backend = bound.unwrap_or_else(|| Arc::clone(backend));
            Ok(match backend.adds_nothing() {
                true => LayerMode::AttentionOnly,
                false => LayerMode::Compute(backend),
            })
        };
        let mode = match (backend, strategy) {
            (Some(backend), _) => bound(backend)?,
            (None, FeedForwardStrategy::Sparse { top_k }) => {
                let sparse: Arc<dyn FfnBackend> = Arc::new(SparseFfn { top_k });
                bound(&sparse)?
            }
            (None, FeedForwardStrategy::Walk { top_k }) => {
                let Some(features) = routes.features else {
                    return Err(refused("there is no vindex"));
                };
                if let Some(why) = seen.without_features() {
                    return Err(refused(why));
                }
                let rows = features.layer(place, !has_gate(&seen))?;
                let walk = WalkRows::new(rows, top_k, &seen).map_err(fault)?;
                LayerMode::Compute(Arc::new(walk))
            }
            (None, FeedForwardStrategy::AttentionOnly) => LayerMode::AttentionOnly,
            (None, FeedForwardStrategy::Gain(gain)) => LayerMode::Gain(gain),
            _ => return Err(refused("this backend does not have it")),
        };
        let dense = std::mem::replace(part, FeedForward::Nothing);
        *part = FeedForward::Routed(Box::new(Routed { dense, mode, place }));
    }
    Ok(())
}
