//! The feed-forward part of a decoder block, and the backends that replace its dense computation.
//! `arch/routes.rs` assigns backends to blocks.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, where_, zeros};

use super::mlp::{GatedMlp, LimitedMlp, Mlp, ScaledMlp};
use super::moe::Mixture;
use super::norm::{Norm, through};

thread_local! {
    /// Whether this thread computes all feed-forward parts densely.
    static AS_TRAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with all feed-forward parts on this thread computed densely, without their backends.
/// Graphs built by `f` stay dense when they are evaluated later.
pub fn as_trained<R>(f: impl FnOnce() -> R) -> R {
    /// Restores the flag when dropped, even after a panic.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            AS_TRAINED.set(self.0);
        }
    }
    let _before = Before(AS_TRAINED.replace(true));
    f()
}

/// The part after the attention in a decoder block.
#[derive(Debug, Clone)]
pub enum FeedForward {
    /// A gated feed-forward part.
    Gated(GatedMlp),
    /// A gated feed-forward part with scale factors.
    Scaled(Box<ScaledMlp>),
    /// A gated feed-forward part whose gate has limits.
    Limited(Box<LimitedMlp>),
    /// Two matrices without a gate.
    Plain(Mlp),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
    /// No feed-forward part: the block ends after its mixer.
    Nothing,
    /// A part that a backend computes, or that a [`LayerMode`] replaces.
    Routed(Box<Routed>),
}

impl FeedForward {
    /// The dense part as loaded, without a backend.
    pub fn trained(&self) -> &Self {
        match self {
            Self::Routed(routed) => routed.dense.trained(),
            other => other,
        }
    }

    /// The part that this thread computes: the dense one within [`as_trained`].
    pub fn current(&self) -> &Self {
        match AS_TRAINED.get() {
            true => self.trained(),
            false => self,
        }
    }

    /// The factor that replaces the whole block, if the block has such a replacement.
    pub fn gain(&self) -> Option<f32> {
        match self.current() {
            Self::Routed(routed) => match routed.mode {
                LayerMode::Gain(gain) => Some(gain),
                LayerMode::Compute(_) | LayerMode::AttentionOnly => None,
            },
            _ => None,
        }
    }

    /// Whether the block skips its feed-forward part.
    pub fn is_left_out(&self) -> bool {
        let left_out = |routed: &Routed| matches!(routed.mode, LayerMode::AttentionOnly);
        matches!(self.current(), Self::Routed(routed) if left_out(routed))
    }

    /// `forward(norm(x)) + add`: `[B, L, hidden] -> [B, L, hidden]`. Both `norm` and `add` are
    /// optional.
    pub fn forward_from(
        &self,
        norm: Option<&Norm>,
        x: &Array,
        add: Option<&Array>,
    ) -> Result<Array> {
        let y = match self.current() {
            Self::Gated(mlp) => return mlp.forward_from(norm, x, add),
            Self::Scaled(mlp) => mlp.forward(&through(norm, x)?)?,
            Self::Limited(mlp) => mlp.forward(&through(norm, x)?)?,
            Self::Plain(mlp) => return mlp.forward_from(&through(norm, x)?, add),
            Self::Mixture(mixture) => mixture.forward(&through(norm, x)?)?,
            Self::Routed(routed) => routed.forward(&through(norm, x)?)?,
            Self::Nothing => return add.map_or_else(|| x.zeros_like(), |add| Ok(add.clone())),
        };
        match add {
            Some(add) => add.add(&y),
            None => Ok(y),
        }
    }
}

impl FeedForward {
    /// The number of neurons whose activations [`Self::forward_edited`] can edit.
    pub fn neurons(&self) -> Option<usize> {
        let outputs = match self {
            Self::Gated(mlp) => mlp.gate.outputs(),
            Self::Plain(mlp) => mlp.up.outputs(),
            Self::Scaled(_)
            | Self::Limited(_)
            | Self::Mixture(_)
            | Self::Nothing
            | Self::Routed(_) => return None,
        };
        usize::try_from(outputs).ok().filter(|&n| n > 0)
    }

    /// Returns `forward(norm(x))` and the input of the down matrix.
    ///
    /// # Errors
    /// As [`Self::forward_from`], and for a part with experts.
    pub fn forward_with_activation(
        &self,
        norm: Option<&Norm>,
        x: &Array,
    ) -> Result<(Array, Array)> {
        let x = through(norm, x)?;
        match self.current() {
            Self::Routed(routed) => routed.forward_with_activation(&x),
            other => {
                // Dense computation ignores the place, so any place will do.
                let place = FfnPlace {
                    layer: 0,
                    on_cpu: false,
                    dtype: x.dtype(),
                };
                DenseFfn.forward_with_activation(&FfnPart::new(other, place), &x)
            }
        }
    }

    /// Whether [`Self::forward_with_activation`] supports this part.
    pub fn has_activations(&self) -> bool {
        match self.current() {
            Self::Gated(_) | Self::Scaled(_) | Self::Limited(_) | Self::Plain(_) => true,
            Self::Mixture(_) | Self::Nothing => false,
            Self::Routed(routed) => routed.dense.trained().has_activations(),
        }
    }

    /// Computes `forward(norm(x))` with the result of `edit` in place of the activations.
    ///
    /// # Errors
    /// As [`Self::forward_from`]; also for a part without [`Self::neurons`], and errors of `edit`.
    pub fn forward_edited(
        &self,
        norm: Option<&Norm>,
        x: &Array,
        edit: &mut dyn FnMut(Array) -> Result<Array>,
    ) -> Result<Array> {
        match self.current() {
            Self::Gated(mlp) => mlp.down.forward(&edit(mlp.activations(norm, x)?)?),
            Self::Plain(mlp) => {
                let y = mlp.activation.apply(&mlp.up.forward(&through(norm, x)?)?)?;
                mlp.down.forward(&edit(y)?)
            }
            _ => {
                let message = "activations of this feed-forward part cannot be edited";
                Err(Error::new(ErrorKind::Value, "feed-forward", message))
            }
        }
    }
}

/// The feed-forward part of one layer as loaded, for backends.
#[derive(Debug, Clone, Copy)]
pub struct FfnPart<'a> {
    dense: &'a FeedForward,
    place: FfnPlace,
}

/// The position of a feed-forward part in the model, and its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FfnPlace {
    /// The layer index, from 0.
    pub layer: usize,
    /// Whether our CPU kernels compute the part.
    pub on_cpu: bool,
    /// The model's compute type.
    pub dtype: Dtype,
}

impl<'a> FfnPart<'a> {
    /// The part `dense` at a place.
    pub fn new(dense: &'a FeedForward, place: FfnPlace) -> Self {
        Self { dense, place }
    }

    /// The dense part.
    pub(crate) fn dense(&self) -> &'a FeedForward {
        self.dense
    }

    /// The layer index, device and compute type.
    #[must_use]
    pub fn place(&self) -> FfnPlace {
        self.place
    }

    /// The number of features. `None` for experts and for a block without a feed-forward part; 0 if
    /// the part is not loaded.
    #[must_use]
    pub fn features(&self) -> Option<usize> {
        let outputs = match self.dense {
            FeedForward::Gated(mlp) => mlp.gate.outputs(),
            FeedForward::Scaled(scaled) => scaled.mlp.gate.outputs(),
            FeedForward::Limited(limited) => limited.mlp.gate.outputs(),
            FeedForward::Plain(mlp) => mlp.up.outputs(),
            FeedForward::Mixture(_) | FeedForward::Nothing | FeedForward::Routed(_) => return None,
        };
        usize::try_from(outputs).ok()
    }

    /// The dense output, `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// If the last axis of `x` is not the hidden dimension, or the part is not loaded.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.dense.forward_from(None, x, None)
    }

    /// The gates of all features before the activation function, `[.., hidden] -> [.., features]`.
    /// A part without a gate (GPT-2) returns the outputs of the up matrix.
    ///
    /// # Errors
    /// As [`Self::forward`], and for a part without [`Self::features`].
    pub fn gates(&self, x: &Array) -> Result<Array> {
        match self.dense {
            FeedForward::Gated(mlp) => mlp.gate.forward(x),
            FeedForward::Scaled(scaled) => scaled.mlp.gate.forward(x)?.multiply(&scaled.gate),
            FeedForward::Limited(limited) => limited.mlp.gate.forward(x),
            FeedForward::Plain(mlp) => mlp.up.forward(x),
            _ => Err(self.featureless()),
        }
    }

    /// The input of the down matrix, `[.., hidden] -> [.., features]`: `act(gate(x)) * up(x)`, or
    /// `act(up(x))` without a gate.
    pub fn activations(&self, x: &Array) -> Result<Array> {
        match self.dense {
            FeedForward::Gated(mlp) => mlp.activations(None, x),
            FeedForward::Scaled(scaled) => scaled.activations(x),
            FeedForward::Limited(limited) => limited.activations(x),
            FeedForward::Plain(mlp) => mlp.activation.apply(&mlp.up.forward(x)?),
            _ => Err(self.featureless()),
        }
    }

    /// The output of the down matrix for these activations, `[.., features] -> [.., hidden]`.
    pub fn down(&self, activations: &Array) -> Result<Array> {
        match self.dense {
            FeedForward::Gated(mlp) => mlp.down.forward(activations),
            FeedForward::Scaled(scaled) => {
                (scaled.mlp.down.forward(activations)?).multiply(&scaled.down)
            }
            FeedForward::Limited(limited) => limited.mlp.down.forward(activations),
            FeedForward::Plain(mlp) => mlp.down.forward(activations),
            _ => Err(self.featureless()),
        }
    }

    /// Whether an adapter currently changes the part.
    #[must_use]
    pub fn is_adapted(&self) -> bool {
        match self.dense {
            FeedForward::Gated(mlp) => mlp.is_adapted(),
            FeedForward::Scaled(scaled) => scaled.mlp.is_adapted(),
            FeedForward::Limited(limited) => limited.mlp.is_adapted(),
            FeedForward::Plain(mlp) => mlp.is_adapted(),
            FeedForward::Mixture(mixture) => mixture.is_adapted(),
            FeedForward::Nothing | FeedForward::Routed(_) => false,
        }
    }

    fn featureless(&self) -> Error {
        let why = self.without_features().unwrap_or("it has no features");
        Error::new(ErrorKind::Unsupported, "feed-forward", why)
    }

    /// The reason why single features cannot be computed; `None` if they can.
    pub(crate) fn without_features(&self) -> Option<&'static str> {
        match self.dense {
            FeedForward::Gated(_) | FeedForward::Plain(_) => None,
            FeedForward::Scaled(_) => Some("its gate and its output have factors"),
            FeedForward::Limited(_) => Some("its gate has limits"),
            FeedForward::Mixture(_) => Some("its features are those of several experts"),
            FeedForward::Nothing => Some("it has no feed-forward part"),
            FeedForward::Routed(_) => Some("it has another strategy"),
        }
    }
}

/// A replacement for the dense computation of feed-forward parts.
///
/// [`FfnRouter`](crate::ffn::FfnRouter) assigns a backend to layers when a model is loaded. Every
/// forward pass then calls the backend, possibly from several threads at once.
pub trait FfnBackend: Debug + Send + Sync {
    /// The backend's name, for error messages.
    fn name(&self) -> &str;

    /// The output for `x`, `[.., hidden] -> [.., hidden]`, in the type of `x`. `x` is the output of
    /// the norm before the part; the backend may use the part's weights. A position's output must
    /// depend on that position alone: prompts are split into steps, and requests are batched.
    ///
    /// # Errors
    /// The backend's error, which ends the request.
    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array>;

    /// The output, and the activation of each feature, `[.., features]`. Features that the backend
    /// omits have activation 0.
    ///
    /// # Errors
    /// As [`Self::forward`]; this default returns [`ErrorKind::Unsupported`].
    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let _ = (part, x);
        let message = format!("{} shows no activations", self.name());
        Err(Error::new(ErrorKind::Unsupported, "feed-forward", message))
    }

    /// Prepares the backend for one layer. Loading a model calls it once per assigned layer. A
    /// returned backend computes this layer instead of `self`; `None`, the default, keeps `self`. A
    /// backend with data per layer returns a new backend with the data of this layer.
    ///
    /// # Errors
    /// If the backend cannot compute the layer. The model is then not loaded.
    fn bind(&self, part: &FfnPart<'_>) -> Result<Option<Arc<dyn FfnBackend>>> {
        let _ = part;
        Ok(None)
    }

    /// Whether the output is always zero. The block then also skips the norm after the part,
    /// because that norm's output for zeros need not be zero.
    fn adds_nothing(&self) -> bool {
        false
    }
}

/// Backend that computes all features (dense).
#[derive(Debug, Clone, Copy, Default)]
pub struct DenseFfn;

impl FfnBackend for DenseFfn {
    fn name(&self) -> &str {
        "dense"
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
        part.forward(x)
    }

    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let activations = part.activations(x)?;
        Ok((part.down(&activations)?, activations))
    }
}

/// Backend that computes no features: the layer adds only its attention or recurrent part
/// (highway).
#[derive(Debug, Clone, Copy, Default)]
pub struct HighwayFfn;

impl FfnBackend for HighwayFfn {
    fn name(&self) -> &str {
        "highway"
    }

    fn forward(&self, _: &FfnPart<'_>, x: &Array) -> Result<Array> {
        x.zeros_like()
    }

    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let features = (part.features()).and_then(|n| i32::try_from(n).ok());
        let mut shape = x.shape().to_vec();
        if let (Some(last), Some(features)) = (shape.last_mut(), features) {
            *last = features;
        }
        Ok((x.zeros_like()?, zeros(&shape, x.dtype())?))
    }

    fn adds_nothing(&self) -> bool {
        true
    }
}

/// The replacement of a block's feed-forward part, or of the whole block.
#[derive(Debug, Clone)]
pub enum LayerMode {
    /// A backend computes the part.
    Compute(Arc<dyn FfnBackend>),
    /// The block adds only the mixer's output.
    AttentionOnly,
    /// The block returns the residual stream times this factor.
    Gain(f32),
}

/// A feed-forward part with a replacement.
#[derive(Debug, Clone)]
pub struct Routed {
    /// The part as loaded.
    pub dense: FeedForward,
    /// The replacement.
    pub mode: LayerMode,
    /// The place of the part.
    pub place: FfnPlace,
}

impl Routed {
    /// The part in the form that backends receive.
    pub fn part(&self) -> FfnPart<'_> {
        FfnPart::new(&self.dense, self.place)
    }

    /// The part's output for a normalized input.
    ///
    /// # Errors
    /// As [`FfnBackend::forward`], and if the backend returns another shape than that of `x`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match &self.mode {
            LayerMode::Compute(backend) => {
                let y = backend.forward(&self.part(), x)?;
                self.checked(backend.as_ref(), x, y)
            }
            // Unused: blocks handle these modes before their norm, because a norm of zeros need not
            // be zero.
            LayerMode::AttentionOnly | LayerMode::Gain(_) => x.zeros_like(),
        }
    }

    /// The part's output, and the activations of all features.
    ///
    /// # Errors
    /// As [`FfnBackend::forward_with_activation`].
    pub fn forward_with_activation(&self, x: &Array) -> Result<(Array, Array)> {
        match &self.mode {
            LayerMode::Compute(backend) => {
                let (y, activations) = backend.forward_with_activation(&self.part(), x)?;
                Ok((self.checked(backend.as_ref(), x, y)?, activations))
            }
            LayerMode::AttentionOnly | LayerMode::Gain(_) => {
                HighwayFfn.forward_with_activation(&self.part(), x)
            }
        }
    }

    /// Checks that `y` has the shape of `x`. A different shape could broadcast without an error.
    fn checked(&self, backend: &dyn FfnBackend, x: &Array, y: Array) -> Result<Array> {
        if y.shape() != x.shape() {
            let message = format!(
                "the backend {} gave {:?} for {:?} in layer {}",
                backend.name(),
                y.shape(),
                x.shape(),
                self.place.layer
            );
            return Err(Error::new(ErrorKind::Shape, "feed-forward", message));
        }
        y.astype(x.dtype())
    }
}

/// Returns `x` times `gain`, in the type of `x`. `mixed` has the same shape and its values are not
/// used. It stays in the graph because it advances the KV cache or state to the next position.
///
/// # Errors
/// If the shapes differ.
pub fn scaled(x: &Array, gain: f32, mixed: &Array) -> Result<Array> {
    let y = x.multiply(&Array::scalar(gain)?.astype(x.dtype())?)?;
    where_(&Array::scalar(false)?, mixed, &y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_computes_what_it_drops_and_does_not_read_it() {
        let x = Array::vector(&[1.0f32, -2.0]).unwrap();
        let nan = Array::vector(&[f32::NAN, f32::INFINITY]).unwrap();
        let y = scaled(&x, 1.5, &nan).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [1.5, -3.0]);
    }
}
