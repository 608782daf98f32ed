//! Helpers for building decoders: validated sizes, and layers looked up by name with their expected
//! shapes.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, ones};

use super::stack::Head;
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::adapter::{SlotKind, SlotView};
use crate::nn::causal_conv::Vector;
use crate::nn::{
    Activation, CausalConv, Embedding, FeedForward, GatedMlp, HeadNorm, Linear, Norm, Rope, Weight,
    activation,
};

/// Model dimensions as `i32`, the type that MLX uses. If several processes share each layer, the
/// numbers of heads and the width of the feed-forward block are those of this process.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    /// Width of the residual stream.
    pub hidden: i32,
    /// Width of the feed-forward block.
    pub intermediate: i32,
    /// Rows of the embedding.
    pub vocab: i32,
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads.
    pub n_kv_heads: i32,
    /// Width of a head.
    pub head_dim: i32,
    /// Epsilon of norms.
    pub eps: f32,
}

/// The formula of a family's norms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square with `weight`.
    #[default]
    Rms,
    /// Root mean square with `1 + weight` (Gemma).
    RmsPlusOne,
    /// Mean and variance, with a bias or without.
    Layer {
        /// Whether the norm has a bias.
        bias: bool,
    },
    /// Mean and variance with `1 + weight` and a bias (Nemotron).
    LayerPlusOne,
    /// Root mean square, without a weight (nanochat).
    PlainRms,
    /// Mean and variance, without a weight (OLMo).
    PlainLayer,
}

/// Converts a size to `i32`.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] if the size is too large.
pub fn int(name: &str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| invalid(format!("{name} {value} is too large")))
}

/// Returns this process's share of `width`. `name` is the name of the width in the configuration,
/// for error messages.
fn part_of(weights: &Weights, name: &str, width: usize) -> Result<i32> {
    match weights.split() {
        Some(split) => int(name, split.part_of(name, width)?),
        None => int(name, width),
    }
}

/// Returns an error of the kind [`ErrorKind::InvalidModel`].
pub fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidModel, message)
}

/// The maximum kernel width of a convolution.
pub const MAX_CONV: usize = 64;

/// The inputs from which a decoder is built: configuration and weights.
pub struct Builder<'a> {
    /// The configuration.
    pub config: &'a ModelConfig,
    /// The weights.
    pub weights: &'a mut Weights,
    /// The dimensions.
    pub dims: Dims,
    /// The formula of norms.
    pub norms: NormKind,
}

impl<'a> Builder<'a> {
    /// Creates a builder from the configuration's sizes. If the configuration lacks `head_dim`, the
    /// number of rows of the query projection determines it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if a size is too large.
    pub fn new(config: &'a ModelConfig, weights: &'a mut Weights) -> Result<Self> {
        let heads = config.num_attention_heads;
        // Some checkpoints omit head_dim although it differs from hidden / heads.
        let head_dim = match config.head_dim {
            Some(d) => d,
            None => match weights.rows("model.layers.0.self_attn.q_proj") {
                Some(rows) if rows % heads == 0 => rows / heads,
                _ => config.hidden_size / heads,
            },
        };
        let (own_heads, kv_heads) = match weights.split() {
            Some(split) => (split.heads(), split.kv_heads()),
            None => (heads, config.num_key_value_heads),
        };
        let dims = Dims {
            hidden: int("hidden_size", config.hidden_size)?,
            intermediate: part_of(weights, "intermediate_size", config.intermediate_size)?,
            vocab: int("vocab_size", config.vocab_size)?,
            n_heads: int("num_attention_heads", own_heads)?,
            n_kv_heads: int("num_key_value_heads", kv_heads)?,
            head_dim: int("head_dim", head_dim)?,
            eps: config.rms_norm_eps,
        };
        Ok(Self {
            config,
            weights,
            dims,
            norms: NormKind::Rms,
        })
    }

    /// Returns this process's share of a width in the configuration.
    ///
    /// # Errors
    /// If the width is not divisible by the number of processes, or too large.
    pub fn part_of(&self, name: &str, width: usize) -> Result<i32> {
        part_of(self.weights, name, width)
    }

    /// Sets the formula of norms.
    #[must_use]
    pub fn with_norms(mut self, norms: NormKind) -> Self {
        self.norms = norms;
        self
    }

    /// Returns a factor as an array in the compute type.
    pub fn scalar(&self, value: f32) -> Result<Array> {
        Array::scalar(value)
            .and_then(|a| a.astype(self.weights.dtype()))
            .and_then(|a| a.eval().map(|()| a))
            .map_err(engine("weights"))
    }

    /// Returns a factor from the configuration; `None` if the field is missing or 1.
    ///
    /// # Errors
    /// If the field is not a number.
    pub fn factor(&self, field: &str) -> Result<Option<Array>> {
        match self.config.number(field)? {
            Some(f) if f != 1.0 => self.scalar(f).map(Some),
            _ => Ok(None),
        }
    }

    /// Loads a norm over `dim` elements.
    pub fn norm(&mut self, prefix: &str, dim: i32) -> Result<Norm> {
        let eps = self.dims.eps;
        if let NormKind::PlainRms | NormKind::PlainLayer = self.norms {
            // The kernels require a weight, so a norm without a stored weight gets ones.
            let weight = ones(&[dim], self.weights.dtype()).map_err(engine("weights"))?;
            return Ok(match self.norms {
                NormKind::PlainRms => Norm::Rms {
                    weight: Some(weight),
                    eps,
                },
                _ => Norm::Layer {
                    weight,
                    bias: None,
                    eps,
                    on_cpu: self.weights.is_on_cpu(),
                },
            });
        }
        let mut weight = self.weights.vector(&format!("{prefix}.weight"), dim)?;
        // Conversion to GGUF has already added the 1 to the stored weight.
        let plus = match self.norms {
            NormKind::RmsPlusOne | NormKind::LayerPlusOne if !self.weights.is_gguf() => 1.0,
            _ => 0.0,
        };
        if plus != 0.0 {
            weight = Array::scalar(plus)
                .and_then(|one| one.astype(weight.dtype()))
                .and_then(|one| weight.add(&one))
                .and_then(|w| w.eval().map(|()| w))
                .map_err(engine("weights"))?;
        }
        let bias = match self.norms {
            NormKind::Layer { bias: true } | NormKind::LayerPlusOne => {
                Some(self.weights.vector(&format!("{prefix}.bias"), dim)?)
            }
            _ => None,
        };
        let kind = SlotKind::Norm { plus };
        let slot = self
            .weights
            .slot(prefix, kind, &Weight::Dense(weight.clone()));
        let bias_slot = self.weights.bias_slot(prefix, bias.as_ref());
        Ok(Norm::Placed {
            norm: Box::new(match self.norms {
                NormKind::Rms | NormKind::RmsPlusOne | NormKind::PlainRms => Norm::Rms {
                    weight: Some(weight),
                    eps,
                },
                NormKind::Layer { .. } | NormKind::LayerPlusOne | NormKind::PlainLayer => {
                    Norm::Layer {
                        weight,
                        bias,
                        eps,
                        on_cpu: self.weights.is_on_cpu(),
                    }
                }
            }),
            weight: slot,
            bias: bias_slot,
        })
    }

    /// Loads a norm over the hidden dimension.
    ///
    /// # Errors
    /// The errors of [`Self::norm`].
    pub fn hidden_norm(&mut self, prefix: &str) -> Result<Norm> {
        self.norm(prefix, self.dims.hidden)
    }

    /// Builds the rotary embedding of layer `layer`.
    ///
    /// # Errors
    /// If memory runs out, or the scaling factors do not match the head size.
    pub fn rope(&mut self, layer: usize, head_dim: i32, traditional: bool) -> Result<Rope> {
        let config = self.config.rope_of(layer);
        let rope = Rope::new(head_dim, config, traditional, self.weights.dtype())
            .map_err(engine("rope"))?;
        if let crate::checkpoint::config::RopeScaling::LongRope { short, long, .. } =
            &config.scaling
        {
            let pairs = rope.dims() as usize / 2;
            if short.len() != pairs || long.len() != pairs {
                return Err(invalid(format!(
                    "rope_scaling has {} short and {} long factors; {pairs} pairs rotate",
                    short.len(),
                    long.len()
                )));
            }
        }
        // In GGUF files, this tensor determines which part of a head rotates. The configuration has
        // the same information, so the tensor is ignored.
        if let crate::checkpoint::config::RopeScaling::Proportional { .. } =
            self.config.rope.scaling
        {
            self.weights.ignore("rope_freqs");
            return Ok(rope);
        }
        // GGUF files store Llama 3's scaling of frequencies as a tensor of factors.
        const FACTORS: &str = "rope_freqs.weight";
        let mut pairs = rope.dims() / 2;
        let family = self.config.family().and_then(|family| family.gguf.as_ref());
        if family.is_some_and(|family| family.full_layers_scale) {
            if self.config.slides(layer) {
                return Ok(rope);
            }
            if let Some(&[stored]) = self.weights.shape(FACTORS) {
                pairs = pairs.max(int(FACTORS, stored)?);
            }
        }
        match self.weights.optional_host_vector(FACTORS, pairs)? {
            Some(factors) => {
                let factors = factors.get(..rope.dims() as usize / 2).unwrap_or(&factors);
                rope.with_factors(factors).map_err(engine("rope"))
            }
            None => Ok(rope),
        }
    }

    /// Returns the sliding window of layer `layer`; `None` if the layer has none.
    ///
    /// # Errors
    /// If the window is too large.
    pub fn window(&self, layer: usize) -> Result<Option<i32>> {
        self.config
            .window(layer)
            .map(|w| int("sliding_window", w))
            .transpose()
    }

    /// Returns the configured activation, or the architecture's default.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for an unknown activation.
    pub fn activation(&self, default: Activation) -> Result<Activation> {
        match self.config.activation.as_deref() {
            None => Ok(default),
            Some(name) => Activation::from_name(name).ok_or_else(|| {
                Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "hidden_act {name:?} is not supported; supported are {}",
                        activation::NAMES
                    ),
                )
            }),
        }
    }

    /// Loads the linear layer with this prefix.
    pub fn linear(
        &mut self,
        prefix: &str,
        inputs: i32,
        outputs: i32,
        bias: bool,
    ) -> Result<Linear> {
        self.weights.linear(prefix, inputs, outputs, bias)
    }

    /// Loads a matrix that combines several layers, and returns the layers. Each layer maps
    /// `inputs` elements to its number in `outputs`. The bias is optional.
    pub fn fused(
        &mut self,
        prefix: &str,
        inputs: i32,
        outputs: &[i32],
        bias: bool,
    ) -> Result<Vec<Linear>> {
        if self.weights.leaves_out(prefix) {
            return Ok(outputs.iter().map(|_| Linear::absent()).collect());
        }
        let total: i32 = outputs.iter().sum();
        let weight = self.weights.matrix(prefix, total, inputs)?;
        let bias = if bias {
            Some(self.weights.vector(&format!("{prefix}.bias"), total)?)
        } else {
            None
        };
        let slot = self.weights.slot(prefix, SlotKind::Matrix, &weight);
        let bias_slot = self.weights.bias_slot(prefix, bias.as_ref());
        let mut from = 0;
        outputs
            .iter()
            .map(|n| {
                let to = from + n;
                let part = weight.rows(from, to).map_err(engine("weights"))?;
                let bias = bias
                    .as_ref()
                    .map(|b| b.slice_axis(0, from, to))
                    .transpose()
                    .map_err(engine("weights"))?;
                let at = |slot: &Arc<_>| SlotView::new(Arc::clone(slot), Some((from, to)));
                let layer = self.weights.layer(part, bias)?.at(at(&slot));
                let layer = layer.with_bias_at(bias_slot.as_ref().map(at));
                from = to;
                Ok(layer)
            })
            .collect()
    }

    /// Returns the kernel width of the convolution at `prefix`; `None` if the checkpoint has no
    /// such convolution.
    ///
    /// # Errors
    /// If the width exceeds the maximum, or the tensor does not have the shape of a convolution.
    pub fn conv_width(&self, prefix: &str) -> Result<Option<i32>> {
        let name = format!("{prefix}.weight");
        let width = match self.weights.shape(&name) {
            None => return Ok(None),
            Some([_, 1, width] | [_, width, 1]) => *width,
            Some(other) => {
                return Err(invalid(format!(
                    "`{name}` has shape {other:?}; a convolution of channels has [channels, 1, \
                     width] or [channels, width, 1]"
                )));
            }
        };
        if !(1..=MAX_CONV).contains(&width) {
            return Err(invalid(format!(
                "`{name}` covers {width} positions; at most {MAX_CONV} are supported"
            )));
        }
        int("width", width).map(Some)
    }

    /// Loads a depthwise convolution of `channels` over `width` positions. The kernel may have the
    /// layout of transformers, `[channels, 1, width]`, or of mlx-lm, `[channels, width, 1]`. The
    /// bias is optional.
    pub fn causal_conv(&mut self, prefix: &str, channels: i32, width: i32) -> Result<CausalConv> {
        let name = format!("{prefix}.weight");
        let value = match self.weights.shape(&name) {
            Some([_, _, 1]) => self.weights.tensor(&name, &[channels, width, 1])?,
            // GGUF files store `[channels, width]`.
            Some([_, _]) => (self.weights.tensor(&name, &[channels, width])?)
                .reshape(&[channels, 1, width])
                .map_err(engine("weights"))?,
            _ => self.weights.tensor(&name, &[channels, 1, width])?,
        };
        // The kernel is not a matrix, so LoRA does not apply to it. It can only be trained
        // directly.
        let kind = SlotKind::Norm { plus: 0.0 };
        let slot = (self.weights).slot(prefix, kind, &Weight::Dense(value.clone()));
        let weight = Vector {
            value,
            slot: SlotView::new(slot, None),
        };
        let bias = if self.weights.contains(&format!("{prefix}.bias")) {
            let value = self.weights.vector(&format!("{prefix}.bias"), channels)?;
            let slot = self.weights.bias_slot(prefix, Some(&value));
            slot.map(|slot| Vector {
                value,
                slot: SlotView::new(slot, None),
            })
        } else {
            None
        };
        CausalConv::new(weight, bias).map_err(engine("weights"))
    }

    /// Loads a vector of `len` elements. GGUF files may store it as `[len, 1]` or as one row per
    /// group.
    ///
    /// # Errors
    /// If the vector is missing or has another size.
    pub fn flat_vector(&mut self, name: &str, len: i32) -> Result<Array> {
        match self.weights.shape(name) {
            Some(&[rows, columns]) if rows.checked_mul(columns) == usize::try_from(len).ok() => {
                let shape = [int(name, rows)?, int(name, columns)?];
                let rows = self.weights.tensor(name, &shape)?;
                rows.reshape(&[len]).map_err(engine("weights"))
            }
            _ => self.weights.vector(name, len),
        }
    }

    /// Loads an RMS norm over groups of heads at `prefix`. Its weight has `width` elements.
    pub fn group_norm(&mut self, prefix: &str, width: i32) -> Result<HeadNorm> {
        let weight = self.flat_vector(&format!("{prefix}.weight"), width)?;
        let kind = SlotKind::Norm { plus: 0.0 };
        let stored = Weight::Dense(weight.clone());
        let slot = self.weights.slot(prefix, kind, &stored);
        Ok(HeadNorm {
            weight,
            bias: None,
            slot,
            eps: self.dims.eps,
            centered: false,
        })
    }

    /// Loads a gated feed-forward block with the usual tensor names.
    pub fn gated_mlp(
        &mut self,
        prefix: &str,
        width: i32,
        activation: Activation,
        bias: bool,
    ) -> Result<GatedMlp> {
        let parts = ["gate_proj", "up_proj", "down_proj"];
        self.gated_mlp_of((prefix, parts), width, activation, bias)
    }

    /// Loads a gated feed-forward block as [`Self::gated_mlp`] does. The array contains the tensor
    /// names of gate, up and down.
    pub fn gated_mlp_of(
        &mut self,
        (prefix, [gate, up, down]): (&str, [&str; 3]),
        width: i32,
        activation: Activation,
        bias: bool,
    ) -> Result<GatedMlp> {
        let hidden = self.dims.hidden;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(GatedMlp {
            gate: self.linear(&name(gate), hidden, width, bias)?,
            up: self.linear(&name(up), hidden, width, bias)?,
            down: self.linear(&name(down), width, hidden, bias)?,
            activation,
        })
    }

    /// Loads a gated feed-forward block in which one matrix, `gate_up_proj`, combines gate and up.
    pub fn fused_mlp(&mut self, prefix: &str, activation: Activation) -> Result<FeedForward> {
        let (hidden, width) = (self.dims.hidden, self.dims.intermediate);
        let fused = self.fused(
            &format!("{prefix}.gate_up_proj"),
            hidden,
            &[width, width],
            false,
        )?;
        let [gate, up] = <[Linear; 2]>::try_from(fused)
            .map_err(|_| invalid("a fused matrix must have two parts"))?;
        Ok(FeedForward::Gated(GatedMlp {
            gate,
            up,
            down: self.linear(&format!("{prefix}.down_proj"), width, hidden, false)?,
            activation,
        }))
    }

    /// Loads the token embedding. In a process that does not load the table, returns an embedding
    /// without data.
    pub fn embedding(&mut self, prefix: &str) -> Result<Embedding> {
        if (self.weights.stage()).is_some_and(|part| !part.reads(&format!("{prefix}.weight"))) {
            return Ok(Embedding::elsewhere());
        }
        self.weights
            .embedding(prefix, self.dims.vocab, self.dims.hidden)
    }

    /// Loads the output head at `lm_head`, or uses the tied embedding. `tied` is the family's
    /// default for configurations without the field `tie_word_embeddings`.
    pub fn head(&mut self, tied: Option<bool>) -> Result<Head> {
        self.head_with(tied, false)
    }

    /// Loads the head as [`Self::head`] does. With `bias`, a head that is not tied has a bias.
    ///
    /// # Errors
    /// The errors of [`Self::head`].
    pub fn head_with(&mut self, tied: Option<bool>, bias: bool) -> Result<Head> {
        let tied = self
            .config
            .tie_word_embeddings
            .or(tied)
            .unwrap_or_else(|| !self.weights.contains("lm_head.weight"));
        let linear = if tied {
            // A tied model may still contain the tensor. As in transformers, it is ignored.
            self.weights.ignore("lm_head");
            None
        } else {
            Some(self.linear("lm_head", self.dims.hidden, self.dims.vocab, bias)?)
        };
        Ok(Head {
            linear,
            scale: None,
            softcap: None,
        })
    }
}
