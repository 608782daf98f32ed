//! The feed-forward block of a decoder layer, and the backends that replace its dense computation.
//! `arch/routes.rs` assigns backends to layers.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, where_, zeros};

use super::mlp::{GatedMlp, LimitedMlp, Mlp, ScaledMlp};
use super::moe::Mixture;
use super::norm::{Norm, through};

thread_local! {
    /// Whether this thread computes all feed-forward blocks densely.
    static AS_TRAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`; this thread then computes all feed-forward blocks densely, without their backends.
/// Graphs that `f` builds stay dense when they are evaluated later.
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

/// The feed-forward block of a decoder layer, after its attention.
#[derive(Debug, Clone)]
pub enum FeedForward {
    /// A gated feed-forward block.
    Gated(GatedMlp),
    /// A gated feed-forward block with scale factors.
    Scaled(Box<ScaledMlp>),
    /// A gated feed-forward block whose gate has limits.
    Limited(Box<LimitedMlp>),
    /// Two matrices without a gate.
    Plain(Mlp),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
    /// No feed-forward block: the layer ends after its mixer.
    Nothing,
    /// A block that a backend computes, or that a [`LayerMode`] replaces.
    Routed(Box<Routed>),
}

impl FeedForward {
    /// Returns the dense block as loaded, without a backend.
    pub fn trained(&self) -> &Self {
        match self {
            Self::Routed(routed) => routed.dense.trained(),
            other => other,
        }
    }

    /// Returns the block that this thread computes; within [`as_trained`], the dense block.
    pub fn current(&self) -> &Self {
        match AS_TRAINED.get() {
            true => self.trained(),
            false => self,
        }
    }

    /// Returns the factor that replaces the complete layer; `None` without this replacement.
    pub fn gain(&self) -> Option<f32> {
        match self.current() {
            Self::Routed(routed) => match routed.mode {
                LayerMode::Gain(gain) => Some(gain),
                LayerMode::Compute(_) | LayerMode::AttentionOnly => None,
            },
            _ => None,
        }
    }

    /// Whether the layer skips its feed-forward block.
    pub fn is_left_out(&self) -> bool {
        let left_out = |routed: &Routed| matches!(routed.mode, LayerMode::AttentionOnly);
        matches!(self.current(), Self::Routed(routed) if left_out(routed))
    }

    /// Computes `forward(norm(x)) + add`: `[B, L, hidden] -> [B, L, hidden]`. `norm` and `add` are
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
    /// Returns the number of neurons whose activations [`Self::forward_edited`] can edit; `None` if
    /// it can edit none.
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
    /// The errors of [`Self::forward_from`]; also for a block with experts.
    pub fn forward_with_activation(
        &self,
        norm: Option<&Norm>,
        x: &Array,
    ) -> Result<(Array, Array)> {
        let x = through(norm, x)?;
        match self.current() {
            Self::Routed(routed) => routed.forward_with_activation(&x),
            other => {
                // Dense computation ignores `place`, so its values do not matter.
                let place = FfnPlace {
                    layer: 0,
                    on_cpu: false,
                    dtype: x.dtype(),
                };
                DenseFfn.forward_with_activation(&FfnPart::new(other, place), &x)
            }
        }
    }

    /// Whether [`Self::forward_with_activation`] supports this block.
    pub fn has_activations(&self) -> bool {
        match self.current() {
            Self::Gated(_) | Self::Scaled(_) | Self::Limited(_) | Self::Plain(_) => true,
            Self::Mixture(_) | Self::Nothing => false,
            Self::Routed(routed) => routed.dense.trained().has_activations(),
        }
    }

    /// Computes `forward(norm(x))` with the activations replaced by the result of `edit`.
    ///
    /// # Errors
    /// The errors of [`Self::forward_from`] and of `edit`; also for a block without
    /// [`Self::neurons`].
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

/// The feed-forward block of one layer as loaded, for backends.
#[derive(Debug, Clone, Copy)]
pub struct FfnPart<'a> {
    dense: &'a FeedForward,
    place: FfnPlace,
}

/// The position of a feed-forward block in the model, and its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FfnPlace {
    /// The layer index, from 0.
    pub layer: usize,
    /// Whether our CPU kernels compute the block.
    pub on_cpu: bool,
    /// The model's compute type.
    pub dtype: Dtype,
}

impl<'a> FfnPart<'a> {
    /// Creates the description of the block `dense` at `place`.
    pub fn new(dense: &'a FeedForward, place: FfnPlace) -> Self {
        Self { dense, place }
    }

    /// Returns the dense block.
    pub(crate) fn dense(&self) -> &'a FeedForward {
        self.dense
    }

    /// The layer index, device and compute type.
    #[must_use]
    pub fn place(&self) -> FfnPlace {
        self.place
    }

    /// Returns the number of features. `None` for experts and for a layer without a feed-forward
    /// block; 0 if the block is not loaded.
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

    /// Returns the dense output, `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// If the last axis of `x` is not the hidden dimension, or the block is not loaded.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.dense.forward_from(None, x, None)
    }

    /// Returns the gates of all features before the activation function, `[.., hidden] -> [..,
    /// features]`. For a block without a gate (GPT-2), returns the outputs of the up matrix.
    ///
    /// # Errors
    /// The errors of [`Self::forward`]; also for a block without [`Self::features`].
    pub fn gates(&self, x: &Array) -> Result<Array> {
        match self.dense {
            FeedForward::Gated(mlp) => mlp.gate.forward(x),
            FeedForward::Scaled(scaled) => scaled.mlp.gate.forward(x)?.multiply(&scaled.gate),
            FeedForward::Limited(limited) => limited.mlp.gate.forward(x),
            FeedForward::Plain(mlp) => mlp.up.forward(x),
            _ => Err(self.featureless()),
        }
    }

    /// Returns the input of the down matrix, `[.., hidden] -> [.., features]`: `act(gate(x)) *
    /// up(x)`, or `act(up(x))` without a gate.
    pub fn activations(&self, x: &Array) -> Result<Array> {
        match self.dense {
            FeedForward::Gated(mlp) => mlp.activations(None, x),
            FeedForward::Scaled(scaled) => scaled.activations(x),
            FeedForward::Limited(limited) => limited.activations(x),
            FeedForward::Plain(mlp) => mlp.activation.apply(&mlp.up.forward(x)?),
            _ => Err(self.featureless()),
        }
    }

    /// Returns the output of the down matrix for these activations, `[.., features] -> [..,
    /// hidden]`.
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

    /// Whether an adapter currently changes the block.
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

    /// Returns the reason why single features cannot be computed; `None` if they can.
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

/// A replacement for the dense computation of feed-forward blocks.
///
/// [`FfnRouter`](crate::ffn::FfnRouter) assigns a backend to layers when a model is loaded. Every
/// forward pass then calls the backend, possibly from several threads at once.
pub trait FfnBackend: Debug + Send + Sync {
    /// The backend's name, for error messages.
    fn name(&self) -> &str;

    /// Returns the output for `x`, `[.., hidden] -> [.., hidden]`, in the type of `x`. `x` is the
    /// output of the norm before the block; the backend may use the block's weights. A position's
    /// output must depend only on that position, because prompts are split into steps and requests
    /// are batched.
    ///
    /// # Errors
    /// The backend's error, which ends the request.
    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array>;

    /// Returns the output, and the activation of each feature, `[.., features]`. Features that the
    /// backend omits have activation 0.
    ///
    /// # Errors
    /// The errors of [`Self::forward`]. This default returns [`ErrorKind::Unsupported`].
    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let _ = (part, x);
        let message = format!("{} shows no activations", self.name());
        Err(Error::new(ErrorKind::Unsupported, "feed-forward", message))
    }

    /// Prepares the backend for one layer. Loading a model calls it once per assigned layer. If it
    /// returns a backend, that backend computes the layer instead of `self`; the default is `None`.
    /// A backend with data per layer returns a new backend with this layer's data.
    ///
    /// # Errors
    /// If the backend cannot compute the layer. The model is then not loaded.
    fn bind(&self, part: &FfnPart<'_>) -> Result<Option<Arc<dyn FfnBackend>>> {
        let _ = part;
        Ok(None)
    }

    /// Whether the output is always zero. If so, the layer also skips the norm after the block,
    /// because this norm's output for zeros may not be zero.
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

/// Backend that computes no features: the layer adds only the output of its attention or recurrence
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

/// The replacement of a layer's feed-forward block, or of the complete layer.
#[derive(Debug, Clone)]
pub enum LayerMode {
    /// A backend computes the block.
    Compute(Arc<dyn FfnBackend>),
    /// The layer adds only the mixer's output.
    AttentionOnly,
    /// The layer returns the residual stream times this factor.
    Gain(f32),
}

/// A feed-forward block with a replacement.
#[derive(Debug, Clone)]
pub struct Routed {
    /// The block as loaded.
    pub dense: FeedForward,
    /// The replacement.
    pub mode: LayerMode,
    /// The position of the block in the model.
    pub place: FfnPlace,
}

impl Routed {
    /// Returns the block in the form that backends receive.
    pub fn part(&self) -> FfnPart<'_> {
        FfnPart::new(&self.dense, self.place)
    }

    /// Returns the block's output for a normalized input.
    ///
    /// # Errors
    /// The errors of [`FfnBackend::forward`]; also if the shape of the backend's result differs
    /// from that of `x`.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match &self.mode {
            LayerMode::Compute(backend) => {
                let y = backend.forward(&self.part(), x)?;
                self.checked(backend.as_ref(), x, y)
            }
            // Not reached: layers handle these modes before their norm, because a norm of zeros may
            // not be zero.
            LayerMode::AttentionOnly | LayerMode::Gain(_) => x.zeros_like(),
        }
    }

    /// Returns the block's output, and the activations of all features.
    ///
    /// # Errors
    /// The errors of [`FfnBackend::forward_with_activation`].
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

/// Returns `x` times `gain`, in the type of `x`. `mixed` has the same shape; its values are not
/// used. It stays in the graph, because computing it advances the KV cache or state to the next
/// position.
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
