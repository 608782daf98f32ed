//! The feed-forward part of a decoder block, of any kind; and other ways to compute it than with all
//! of its features: strategies behind one trait. `arch/routes.rs` gives blocks theirs.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;

use mlx_rs_core::{Array, Error, ErrorKind, Result, where_};

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

/// A way to compute a feed-forward part.
pub trait FfnStrategy: Debug + Send + Sync {
    /// Why it cannot take the place of `own`; `None` where it can.
    fn obstacle(&self, own: &FeedForward) -> Option<&'static str>;

    /// The output for `x`, `[.., hidden] -> [.., hidden]`. `x` went through the norm that stands
    /// before `own`, whose weights the strategy may use. A position's output depends on that
    /// position alone, so that it is the same in prefill, in decode and in a batch.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension, and for an `own` with an obstacle.
    fn forward(&self, own: &FeedForward, x: &Array) -> Result<Array>;
}

/// What a block does instead of its feed-forward part, or of all.
#[derive(Debug, Clone)]
pub enum LayerMode {
    /// The part's output comes from a strategy.
    Compute(Arc<dyn FfnStrategy>),
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
}

impl Routed {
    /// The part's output for a normed input.
    ///
    /// # Errors
    /// As [`FfnStrategy::forward`].
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match &self.mode {
            LayerMode::Compute(strategy) => strategy.forward(&self.own, x),
            // A block asks before it computes: norms of zeros need not be zero.
            LayerMode::AttentionOnly | LayerMode::Gain(_) => x.zeros_like(),
        }
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

/// Of each position the `top_k` features with the greatest gate, before the activation, by
/// magnitude. Without a gate it is the input of the activation that counts. Of equals any may be
/// taken.
///
/// All products are computed whole, as packed weights cannot be read by columns: the strategy says
/// what the features carry, and saves no time.
#[derive(Debug, Clone, Copy)]
pub struct SparseFfn {
    /// How many features.
    pub top_k: usize,
}

impl SparseFfn {
    /// `activations` where `gate` is among the greatest of its position, else 0; both
    /// `[.., features]`.
    fn chosen(self, gate: &Array, activations: &Array) -> Result<Array> {
        let width = gate.dim(-1)?;
        let count = match i32::try_from(self.top_k) {
            Ok(k) if k < width => k,
            _ => return Ok(activations.clone()),
        };
        let order = gate.abs()?.argpartition(width - count, -1)?;
        let best = order.slice_axis(-1, width - count, width)?; // [.., features] -> [.., k]
        let kept = activations.take_along_axis(&best, -1)?;
        activations.zeros_like()?.put_along_axis(&best, &kept, -1)
    }
}

impl FfnStrategy for SparseFfn {
    fn obstacle(&self, own: &FeedForward) -> Option<&'static str> {
        match own {
            FeedForward::Gated(_) | FeedForward::Plain(_) => None,
            FeedForward::Scaled(_) => Some("its gate and its output have factors"),
            FeedForward::Mixture(_) => Some("its features are those of several experts"),
            FeedForward::Nothing => Some("it has no feed-forward part"),
            FeedForward::Routed(_) => Some("it has another strategy"),
        }
    }

    fn forward(&self, own: &FeedForward, x: &Array) -> Result<Array> {
        match own {
            FeedForward::Gated(mlp) => {
                let gate = mlp.gate.forward(x)?;
                let activations = mlp.activation.apply(&gate)?.multiply(&mlp.up.forward(x)?)?;
                mlp.down.forward(&self.chosen(&gate, &activations)?)
            }
            FeedForward::Plain(mlp) => {
                let input = mlp.up.forward(x)?;
                let activations = mlp.activation.apply(&input)?;
                mlp.down.forward(&self.chosen(&input, &activations)?)
            }
            other => {
                let why = self.obstacle(other).unwrap_or_default();
                Err(Error::new(ErrorKind::Value, "sparse", why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_gates_of_each_position_stay() {
        let gate = Array::from_slice(&[3.0f32, -5.0, 1.0, 0.5, -0.1, 0.2, -0.3, 0.0], &[1, 2, 4]);
        let values = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[1, 2, 4]);
        let (gate, values) = (gate.unwrap(), values.unwrap());
        let kept = |top_k: usize| {
            let kept = SparseFfn { top_k }.chosen(&gate, &values).unwrap();
            assert_eq!(kept.shape(), [1, 2, 4]);
            kept.to_vec::<f32>().unwrap()
        };
        assert_eq!(kept(1), [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 7.0, 0.0]);
        assert_eq!(kept(2), [1.0, 2.0, 0.0, 0.0, 0.0, 6.0, 7.0, 0.0]);
        for all in [4, 5, usize::MAX] {
            assert_eq!(kept(all), values.to_vec::<f32>().unwrap());
        }
    }

    #[test]
    fn a_gain_computes_what_it_drops_and_does_not_read_it() {
        let x = Array::vector(&[1.0f32, -2.0]).unwrap();
        let nan = Array::vector(&[f32::NAN, f32::INFINITY]).unwrap();
        let y = scaled(&x, 1.5, &nan).unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [1.5, -3.0]);
    }
}
