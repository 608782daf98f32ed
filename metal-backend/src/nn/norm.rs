//! Normalization layers.

use std::sync::Arc;

use inference::StepPart;
use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Array, Dtype, Result, fast};

use super::adapter::{self, ParamSlot};
use super::hooks::Watch;
use crate::exec::{self, NormSpec};

/// Normalization over the last axis.
#[derive(Debug, Clone)]
pub enum Norm {
    /// RMS norm (Zhang and Sennrich 2019).
    Rms {
        /// `[dim]`; `None` means a weight of ones.
        weight: Option<Array>,
        /// Epsilon.
        eps: f32,
    },
    /// Layer norm (Ba et al. 2016).
    Layer {
        /// `[dim]`.
        weight: Array,
        /// `[dim]`.
        bias: Option<Array>,
        /// Epsilon.
        eps: f32,
        /// Whether the norm is computed on a CPU.
        on_cpu: bool,
    },
    /// A norm with an additional bias, for kinds without a bias (xLSTM).
    Biased {
        /// The norm without the bias.
        norm: Box<Norm>,
        /// `[dim]`.
        bias: Array,
    },
    /// An RMS norm over elements that are divided among the processes of a group.
    Divided {
        /// This process's slice of the weight, `[part]`.
        weight: Array,
        /// Epsilon.
        eps: f32,
        /// The processes. Their slices have equal lengths.
        group: Group,
    },
    /// No normalization, for a model without a norm that its family usually has.
    Identity,
    /// A norm with slots through which its parameters can be trained.
    Placed {
        /// The norm as loaded.
        norm: Box<Norm>,
        /// The slot of its weight.
        weight: Arc<ParamSlot>,
        /// The slot of its bias.
        bias: Option<Arc<ParamSlot>>,
    },
}

impl Norm {
    /// Returns the norm with trained parameters, in the form that `exec` reads.
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

    /// Maps `[.., dim]` to `[.., dim]`.
    ///
    /// # Errors
    /// If the last axis of `x` does not match the weight.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match self {
            Norm::Identity => Ok(x.clone()),
            Norm::Biased { norm, bias } => norm.forward(x)?.add(bias),
            Norm::Rms { weight, eps } => fast::rms_norm(x, weight.as_ref(), *eps),
            Norm::Divided { weight, eps, group } => divided_rms(x, weight, *eps, *group),
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
                    (Some(trained), Norm::Rms { eps, .. }) => {
                        fast::rms_norm(x, Some(&trained), *eps)
                    }
                    (
                        trained,
                        Norm::Layer {
                            weight,
                            bias: b,
                            eps,
                            on_cpu,
                        },
                    ) => {
                        let (weight, bias) = (trained.as_ref().unwrap_or(weight), bias.as_ref());
                        let norm = (weight, bias.or(b.as_ref()), *eps);
                        exec::layer_norm(x, norm, *on_cpu, adapter::differentiated())
                    }
                    (_, plain) => plain.forward(x),
                }
            }
        }
    }
}

/// Computes the RMS norm of `x` `[.., part]`. Each process of `group` has a slice of the last axis,
/// of equal length.
fn divided_rms(x: &Array, weight: &Array, eps: f32, group: Group) -> Result<Array> {
    let wide = x.astype(Dtype::Float32)?;
    let squares = wide.square()?.mean(-1, true)?;
    let processes = Array::scalar(group.size() as f32)?;
    let mean = group.all_sum(&squares)?.divide(&processes)?;
    let factor = mean.add(&Array::scalar(eps)?)?.rsqrt()?;
    wide.multiply(&factor)?.astype(x.dtype())?.multiply(weight)
}

/// Returns an optional norm in the form that `exec` reads.
pub fn spec(norm: Option<&Norm>) -> NormSpec<'_> {
    norm.map_or(NormSpec::None, Norm::spec)
}

/// Separates a norm from the following matrix product if a stopwatch measures parts: returns
/// `norm(x)` and no norm, and reports the norm as a part of `layer`. Otherwise returns `x` and
/// `norm`, so that kernels can fuse them.
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

/// Returns `norm(x)`, or `x` if there is no norm.
pub fn through(norm: Option<&Norm>, x: &Array) -> Result<Array> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.clone()),
    }
}
