//! Normalization layers.

use std::sync::Arc;

use inference::StepPart;
use mlx_rs_core::{Array, Result, fast};

use super::adapter::{self, ParamSlot};
use super::hooks::Watch;
use crate::exec::{self, NormSpec};

/// Normalization over the last axis.
#[derive(Debug, Clone)]
pub enum Norm {
    /// By the root of the mean square (Zhang and Sennrich 2019).
    Rms {
        /// `[dim]`; `None` for ones.
        weight: Option<Array>,
        /// Added under the root.
        eps: f32,
    },
    /// By mean and variance (Ba et al. 2016).
    Layer {
        /// `[dim]`.
        weight: Array,
        /// `[dim]`.
        bias: Option<Array>,
        /// Added under the root.
        eps: f32,
        /// Whether it is for a processor.
        on_cpu: bool,
    },
    /// One of the others, with a bias that it has no place for (xLSTM).
    Biased {
        /// Without the bias.
        norm: Box<Norm>,
        /// `[dim]`.
        bias: Array,
    },
    /// Nothing, where a family has a norm and a model has none.
    Identity,
    /// One of the others, at places where its numbers can be trained.
    Placed {
        /// As it was loaded.
        norm: Box<Norm>,
        /// Where its weight stands.
        weight: Arc<ParamSlot>,
        /// Where its bias stands.
        bias: Option<Arc<ParamSlot>>,
    },
}

impl Norm {
    /// What it is, with the numbers that stand in its place.
    fn spec(&self) -> NormSpec<'_> {
        match self {
            Norm::Rms {
                weight: Some(weight),
                eps,
            } => NormSpec::Rms(weight, *eps),
            Norm::Placed { norm, weight, .. } if !weight.is_adapted() => norm.spec(),
            _ => NormSpec::Other,
        }
    }

    /// `[.., dim] -> [.., dim]`.
    ///
    /// # Errors
    /// When `x` does not end in the weight's dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self {
            Norm::Identity => Ok(x.clone()),
            Norm::Biased { norm, bias } => norm.forward(x)?.add(bias),
            Norm::Rms { weight, eps } => fast::rms_norm(x, weight.as_ref(), *eps),
            Norm::Layer {
                weight,
                bias,
                eps,
                on_cpu,
            } => {
                let norm = (weight, bias.as_ref(), *eps);
                exec::layer_norm(x, norm, *on_cpu, adapter::differentiated())
            }
            Norm::Placed { norm, weight, bias } => {
                let vector = |slot: &Arc<ParamSlot>| slot.vector(x.dtype());
                let bias = bias.as_ref().map(vector).transpose()?.flatten();
                match (vector(weight)?, norm.as_ref()) {
                    (Some(own), Norm::Rms { eps, .. }) => fast::rms_norm(x, Some(&own), *eps),
                    (
                        own,
                        Norm::Layer {
                            weight,
                            bias: b,
                            eps,
                            on_cpu,
                        },
                    ) => {
                        let (weight, bias) = (own.as_ref().unwrap_or(weight), bias.as_ref());
                        let norm = (weight, bias.or(b.as_ref()), *eps);
                        exec::layer_norm(x, norm, *on_cpu, adapter::differentiated())
                    }
                    (_, plain) => plain.forward(x),
                }
            }
        }
    }
}

/// What a norm is, for whoever computes; none is none.
pub fn spec(norm: Option<&Norm>) -> NormSpec<'_> {
    norm.map_or(NormSpec::None, Norm::spec)
}

/// `x` through `norm`, measured apart where the parts of layer `layer` are measured. Otherwise `x` and
/// the norm, for what computes both at once.
///
/// # Errors
/// As [`Norm::forward`].
pub fn apart<'n>(
    watch: &mut Watch<'_>,
    layer: usize,
    norm: Option<&'n Norm>,
    x: &Array,
) -> Result<(Array, Option<&'n Norm>)> {
    if !watch.measures() || norm.is_none() {
        return Ok((x.clone(), norm));
    }
    let x = through(norm, x)?;
    watch.lap(layer, StepPart::Norm, &[&x])?;
    Ok((x, None))
}

/// Through a norm, where there is one.
///
/// # Errors
/// As [`Norm::forward`].
pub fn through(norm: Option<&Norm>, x: &Array) -> Result<Array> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.clone()),
    }
}
