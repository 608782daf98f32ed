//! The feed-forward part of a decoder block, of any kind; and other ways to compute it than with all
//! of its features: backends behind one trait. `arch/routes.rs` gives blocks theirs.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, where_, zeros};

use super::mlp::{GatedMlp, Mlp, ScaledMlp};
use super::moe::Mixture;
use super::norm::{Norm, through};

thread_local! {
    /// Whether this thread computes all parts as they were trained.
    static AS_TRAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with all parts on this thread computed as they were trained, whatever strategy they
/// have. What `f` builds keeps that when it is evaluated.
pub fn as_trained<R>(f: impl FnOnce() -> R) -> R {
    /// Also after a panic.
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
    /// With a gate.
    Gated(GatedMlp),
    /// With a gate, and factors.
    Scaled(Box<ScaledMlp>),
    /// Two matrices.
    Plain(Mlp),
    /// Experts, a few of which see each token.
    Mixture(Box<Mixture>),
    /// None: the block ends after its mixer.
    Nothing,
    /// Computed another way than it was trained.
    Routed(Box<Routed>),
}

impl FeedForward {
    /// The part as it was trained.
    pub fn trained(&self) -> &Self {
        match self {
            Self::Routed(routed) => routed.own.trained(),
            own => own,
        }
    }

    /// The part that this thread computes: the trained one within [`as_trained`].
    pub fn current(&self) -> &Self {
        match AS_TRAINED.get() {
            true => self.trained(),
            false => self,
        }
    }

    /// The factor on the residual stream that stands for the whole block, where there is one.
    pub fn gain(&self) -> Option<f32> {
        match self.current() {
            Self::Routed(routed) => match routed.mode {
                LayerMode::Gain(gain) => Some(gain),
                LayerMode::Compute(_) | LayerMode::AttentionOnly => None,
            },
            _ => None,
        }
    }

    /// Whether the block ends after its mixer although it has a feed-forward part.
    pub fn is_left_out(&self) -> bool {
        let left_out = |routed: &Routed| matches!(routed.mode, LayerMode::AttentionOnly);
        matches!(self.current(), Self::Routed(routed) if left_out(routed))
    }

    /// `forward(norm(x)) + add`, where there are a norm and something to add:
    /// `[B, L, hidden] -> [B, L, hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward_from(
        &self,
        norm: Option<&Norm>,
        x: &Array,
        add: Option<&Array>,
    ) -> Result<Array> {
        let y = match self.current() {
            Self::Gated(mlp) => return mlp.forward_from(norm, x, add),
            Self::Scaled(mlp) => mlp.forward(&through(norm, x)?)?,
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
    /// How many neurons have activations that [`Self::forward_edited`] shows.
    pub fn neurons(&self) -> Option<usize> {
        let outputs = match self {
            Self::Gated(mlp) => mlp.gate.outputs(),
            Self::Plain(mlp) => mlp.up.outputs(),
            Self::Scaled(_) | Self::Mixture(_) | Self::Nothing | Self::Routed(_) => return None,
        };
        usize::try_from(outputs).ok().filter(|&n| n > 0)
    }

    /// `forward(norm(x))`, and what the down matrix read.
    ///
    /// # Errors
    /// As [`Self::forward_from`], and for a part whose features are not one list (experts).
    pub fn forward_with_activation(
        &self,
        norm: Option<&Norm>,
        x: &Array,
    ) -> Result<(Array, Array)> {
        let x = through(norm, x)?;
        match self.current() {
            Self::Routed(routed) => routed.forward_with_activation(&x),
            own => {
                // Where it stands plays no role as long as it is computed as it was trained.
                let place = FfnPlace {
                    layer: 0,
                    on_cpu: false,
                    dtype: x.dtype(),
                };
                DenseFfn.forward_with_activation(&FfnPart::new(own, place), &x)
            }
        }
    }

    /// Whether [`Self::forward_with_activation`] has activations to show.
    pub fn has_activations(&self) -> bool {
        match self.current() {
            Self::Gated(_) | Self::Scaled(_) | Self::Plain(_) => true,
            Self::Mixture(_) | Self::Nothing => false,
            Self::Routed(routed) => routed.own.trained().has_activations(),
        }
    }

    /// `forward(norm(x))`, with what `edit` makes of the activations in their place.
    ///
    /// # Errors
    /// As [`Self::forward_from`], for a part without [`Self::neurons`], and what `edit` says.
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

/// The feed-forward part of one layer as it was loaded, for those that compute it another way.
#[derive(Debug, Clone, Copy)]
pub struct FfnPart<'a> {
    own: &'a FeedForward,
    place: FfnPlace,
}

/// Where a feed-forward part stands, and where it is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FfnPlace {
    /// The layer, from 0.
    pub layer: usize,
    /// Whether our kernels compute.
    pub on_cpu: bool,
    /// The type that the model computes in.
    pub dtype: Dtype,
}

impl<'a> FfnPart<'a> {
    /// The part `own` at a place.
    pub fn new(own: &'a FeedForward, place: FfnPlace) -> Self {
        Self { own, place }
    }

    /// The part itself.
    pub(crate) fn own(&self) -> &'a FeedForward {
        self.own
    }

    /// The layer, where it is computed, and in which type.
    #[must_use]
    pub fn place(&self) -> FfnPlace {
        self.place
    }

    /// How many features it has. `None` for experts and for a layer without such a part, and 0
    /// where it is not loaded.
    #[must_use]
    pub fn features(&self) -> Option<usize> {
        let outputs = match self.own {
            FeedForward::Gated(mlp) => mlp.gate.outputs(),
            FeedForward::Scaled(scaled) => scaled.mlp.gate.outputs(),
            FeedForward::Plain(mlp) => mlp.up.outputs(),
            FeedForward::Mixture(_) | FeedForward::Nothing | FeedForward::Routed(_) => return None,
        };
        usize::try_from(outputs).ok()
    }

    /// The output as the model was trained, `[.., hidden] -> [.., hidden]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension, and for a part that is not loaded.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        self.own.forward_from(None, x, None)
    }

    /// The gates of all features before the activation, `[.., hidden] -> [.., features]`. Without a
    /// gate, as in GPT-2, it is the up matrix that goes through the activation.
    ///
    /// # Errors
    /// As [`Self::forward`], and for a part without [`Self::features`].
    pub fn gates(&self, x: &Array) -> Result<Array> {
        match self.own {
            FeedForward::Gated(mlp) => mlp.gate.forward(x),
            FeedForward::Scaled(scaled) => scaled.mlp.gate.forward(x)?.multiply(&scaled.gate),
            FeedForward::Plain(mlp) => mlp.up.forward(x),
            _ => Err(self.featureless()),
        }
    }

    /// What the down matrix reads, `[.., hidden] -> [.., features]`: `act(gate(x)) * up(x)`, or
    /// without a gate `act(up(x))`.
    ///
    /// # Errors
    /// As [`Self::gates`].
    pub fn activations(&self, x: &Array) -> Result<Array> {
        match self.own {
            FeedForward::Gated(mlp) => mlp.activations(None, x),
            FeedForward::Scaled(scaled) => scaled.activations(x),
            FeedForward::Plain(mlp) => mlp.activation.apply(&mlp.up.forward(x)?),
            _ => Err(self.featureless()),
        }
    }

    /// The output for these activations, `[.., features] -> [.., hidden]`.
    ///
    /// # Errors
    /// As [`Self::gates`].
    pub fn down(&self, activations: &Array) -> Result<Array> {
        match self.own {
            FeedForward::Gated(mlp) => mlp.down.forward(activations),
            FeedForward::Scaled(scaled) => {
                (scaled.mlp.down.forward(activations)?).multiply(&scaled.down)
            }
            FeedForward::Plain(mlp) => mlp.down.forward(activations),
            _ => Err(self.featureless()),
        }
    }

    /// Whether an adapter changes the part, now.
    #[must_use]
    pub fn is_adapted(&self) -> bool {
        match self.own {
            FeedForward::Gated(mlp) => mlp.is_adapted(),
            FeedForward::Scaled(scaled) => scaled.mlp.is_adapted(),
            FeedForward::Plain(mlp) => mlp.is_adapted(),
            FeedForward::Mixture(mixture) => mixture.is_adapted(),
            FeedForward::Nothing | FeedForward::Routed(_) => false,
        }
    }

    fn featureless(&self) -> Error {
        let why = self.without_features().unwrap_or("it has no features");
        Error::new(ErrorKind::Unsupported, "feed-forward", why)
    }

    /// Why it has no features that could be chosen one by one; `None` where it has.
    pub(crate) fn without_features(&self) -> Option<&'static str> {
        match self.own {
            FeedForward::Gated(_) | FeedForward::Plain(_) => None,
            FeedForward::Scaled(_) => Some("its gate and its output have factors"),
            FeedForward::Mixture(_) => Some("its features are those of several experts"),
            FeedForward::Nothing => Some("it has no feed-forward part"),
            FeedForward::Routed(_) => Some("it has another strategy"),
        }
    }
}

/// A way to compute the feed-forward parts of layers.
///
/// A backend is given to layers by [`FfnRouter`](crate::ffn::FfnRouter) when a model is loaded, and
/// is asked in every forward pass. Requests of several threads may ask at the same time.
pub trait FfnBackend: Debug + Send + Sync {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// The output for `x`, `[.., hidden] -> [.., hidden]`, of the type of `x`. `x` went through the
    /// norm that stands before the part, whose weights the backend may use. A position's output
    /// depends on that position alone: prompts are computed in steps, and requests together.
    ///
    /// # Errors
    /// What the backend says; the request ends with it.
    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array>;

    /// The same, and what each feature's column was multiplied with, `[.., features]`: 0 for those
    /// that were left out.
    ///
    /// # Errors
    /// As [`Self::forward`]; [`ErrorKind::Unsupported`] in a backend that has no features, as here.
    fn forward_with_activation(&self, part: &FfnPart<'_>, x: &Array) -> Result<(Array, Array)> {
        let _ = (part, x);
        let message = format!("{} shows no activations", self.name());
        Err(Error::new(ErrorKind::Unsupported, "feed-forward", message))
    }

    /// Called once for each of its layers when a model is loaded. What it returns computes the
    /// layer; `None`, as here, is the backend itself. One that keeps numbers for each layer
    /// returns what keeps them.
    ///
    /// # Errors
    /// When it cannot compute the layer; the model is not loaded then.
    fn bind(&self, part: &FfnPart<'_>) -> Result<Option<Arc<dyn FfnBackend>>> {
        let _ = part;
        Ok(None)
    }

    /// Whether nothing is added to the residual stream, whatever `x` is. The norm after the part is
    /// left out, too, as that of zeros need not be zero.
    fn adds_nothing(&self) -> bool {
        false
    }
}

/// All features, as the model was trained.
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

/// No features: the layer's attention, or its recurrent part, is all that it adds (highway).
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

/// What a block does instead of its feed-forward part, or of all.
#[derive(Debug, Clone)]
pub enum LayerMode {
    /// The part's output comes from a backend.
    Compute(Arc<dyn FfnBackend>),
    /// Nothing is added after the mixer.
    AttentionOnly,
    /// The residual stream times this factor is the block's output.
    Gain(f32),
}

/// A feed-forward part that is computed another way.
#[derive(Debug, Clone)]
pub struct Routed {
    /// The part as it was loaded.
    pub own: FeedForward,
    /// The way.
    pub mode: LayerMode,
    /// Where the part stands.
    pub place: FfnPlace,
}

impl Routed {
    /// The part as a backend sees it.
    pub fn part(&self) -> FfnPart<'_> {
        FfnPart::new(&self.own, self.place)
    }

    /// The part's output for a normed input.
    ///
    /// # Errors
    /// As [`FfnBackend::forward`], and when that returns another shape.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match &self.mode {
            LayerMode::Compute(backend) => {
                let y = backend.forward(&self.part(), x)?;
                self.checked(backend.as_ref(), x, y)
            }
            // A block asks before it computes: norms of zeros need not be zero.
            LayerMode::AttentionOnly | LayerMode::Gain(_) => x.zeros_like(),
        }
    }

    /// The same with the activations of all features.
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

    /// `y`, whose shape must be that of `x`: another one could be broadcast without a word.
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

/// `x` times `gain`, of the type of `x`. `mixed`, of the same shape, is computed and dropped: the
/// keys or the state that come with it tell the next step its position.
///
/// # Errors
/// When the shapes differ.
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
