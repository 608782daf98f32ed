//! Falcon-H1 (TII 2025, arXiv:2507.22448; reference: `modeling_falcon_h1` of Hugging Face
//! transformers): attention and Mamba-2 in parallel, and scale factors on the inputs and outputs of
//! most layers.
//!
//! When mlx-lm converts a checkpoint, it multiplies all factors except that of the keys into the
//! matrices. It also transposes the convolutions; this is how a converted checkpoint is recognized.

use inference::Result;
use mlx_rs_core::Array;

use super::Decoder;
use super::build::{Builder, invalid};
use super::build_attention::AttentionParts;
use super::mamba2::{Fields, mixer, shape};
use super::stack::{Block, Stack};
use super::wiring::BlockInfo;
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::mamba2::{GatedNorm, Mamba2Shape};
use crate::nn::parallel_mixers::{Factors, ParallelMixers};
use crate::nn::{Activation, FeedForward, ScaledMlp};

/// The configuration's field names for the sizes of Mamba-2.
const FIELDS: Fields = Fields {
    heads: "mamba_n_heads",
    dim: "mamba_d_head",
    state: "mamba_d_state",
    groups: "mamba_n_groups",
    width: "mamba_d_conv",
};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let sizes = shape(config, &FIELDS)?;
    let scalars = Scalars::read(config, weights)?;
    let mut b = Builder::new(config, weights)?;
    let vector = scalars.projected(&b, sizes)?;
    let blocks = b.blocks(|b, i, prefix| {
        let mixers = mixers(b, (i, prefix), sizes, &scalars, vector.as_ref())?;
        let (width, bias) = (b.dims.intermediate, b.config.mlp_bias);
        let activation = b.activation(Activation::Silu)?;
        let mlp = b.gated_mlp(&format!("{prefix}.feed_forward"), width, activation, bias)?;
        let [gate, down] = scalars.mlp;
        Ok(Block {
            mixer_in: Some(b.hidden_norm(&format!("{prefix}.input_layernorm"))?),
            mixer: mixers,
            mixer_out: None,
            mlp_in: Some(b.hidden_norm(&format!("{prefix}.pre_ff_layernorm"))?),
            mlp: FeedForward::Scaled(Box::new(ScaledMlp {
                mlp,
                gate: b.scalar(gate)?,
                down: b.scalar(down)?,
            })),
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    })?;
    let mut head = b.head(Some(false))?;
    // In a converted checkpoint, the tied matrix includes the embedding's factor, so the logits are
    // divided by this factor.
    let scale = match (scalars.folded, &head.linear) {
        (false, _) => scalars.head,
        (true, None) => scalars.head / scalars.embedding,
        (true, Some(_)) => 1.0,
    };
    head.scale = factor(&b, scale)?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: match scalars.folded {
            true => None,
            false => factor(&b, scalars.embedding)?,
        },
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.final_layernorm")?,
        head,
    }))
}

/// Returns a factor as an array; `None` if it is 1.
fn factor(b: &Builder<'_>, value: f32) -> Result<Option<Array>> {
    (value != 1.0).then(|| b.scalar(value)).transpose()
}

/// The factors of a configuration. If the matrices already include them, all except `embedding`,
/// `head` and `key` are 1.
struct Scalars {
    /// Whether the matrices already include the factors.
    folded: bool,
    embedding: f32,
    head: f32,
    key: f32,
    /// The factors on attention's input and output.
    attention: [f32; 2],
    ssm: [f32; 2],
    /// The factors on Mamba-2's projected gates, inputs, B, C and steps.
    projected: [f32; 5],
    /// The factors on the gate and on the output.
    mlp: [f32; 2],
}

impl Scalars {
    fn read(config: &ModelConfig, weights: &Weights) -> Result<Self> {
        let conv = weights.shape("model.layers.0.mamba.conv1d.weight");
        let folded = matches!(conv, Some([_, _, 1]));
        let one = |name: &str| -> Result<f32> { Ok(config.number(name)?.unwrap_or(1.0)) };
        let multiplier = |name: &str| if folded { Ok(1.0) } else { one(name) };
        let scalars = Self {
            folded,
            embedding: one("embedding_multiplier")?,
            head: one("lm_head_multiplier")?,
            key: one("key_multiplier")?,
            attention: [
                multiplier("attention_in_multiplier")?,
                multiplier("attention_out_multiplier")?,
            ],
            ssm: [
                multiplier("ssm_in_multiplier")?,
                multiplier("ssm_out_multiplier")?,
            ],
            projected: listed(config, "ssm_multipliers", folded)?,
            mlp: listed(config, "mlp_multipliers", folded)?,
        };
        if scalars.embedding == 0.0 {
            return Err(invalid("embedding_multiplier is 0"));
        }
        Ok(scalars)
    }

    /// Returns the factors on the input projection's outputs; `None` if all are 1.
    fn projected(&self, b: &Builder<'_>, sizes: Mamba2Shape) -> Result<Option<Array>> {
        if self.projected.iter().all(|&f| f == 1.0) {
            return Ok(None);
        }
        let shared = sizes.groups * sizes.state;
        let widths = [sizes.inner(), sizes.inner(), shared, shared, sizes.heads];
        let each = self.projected.iter().zip(widths);
        let all: Vec<f32> = each
            .flat_map(|(&f, width)| std::iter::repeat_n(f, width.unsigned_abs() as usize))
            .collect();
        let vector = Array::vector(&all).and_then(|all| all.astype(b.weights.dtype()));
        vector.map(Some).map_err(engine("weights"))
    }
}

/// Returns a list of `N` factors from the configuration.
fn listed<const N: usize>(config: &ModelConfig, name: &str, folded: bool) -> Result<[f32; N]> {
    match config.numbers(name)? {
        Some(all) if !folded => <[f32; N]>::try_from(all)
            .map_err(|all| invalid(format!("{name} lists {} factors, not {N}", all.len()))),
        _ => Ok([1.0; N]),
    }
}

fn mixers(
    b: &mut Builder<'_>,
    (i, prefix): (usize, &str),
    sizes: Mamba2Shape,
    scalars: &Scalars,
    projected: Option<&Array>,
) -> Result<ParallelMixers> {
    let config = b.config;
    let flag = |name: &str| -> Result<bool> { Ok(config.flag(name)?.unwrap_or(false)) };
    let parts = AttentionParts {
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        ..AttentionParts::default()
    };
    let mut attention = b.attention(i, &format!("{prefix}.self_attn"), parts)?;
    attention.scale *= scalars.key;
    let at = format!("{prefix}.mamba");
    let biases = [flag("mamba_proj_bias")?, flag("projectors_bias")?];
    let norm = match flag("mamba_rms_norm")? {
        false => GatedNorm::Gate,
        true => GatedNorm::Grouped {
            norm: b.group_norm(&format!("{at}.norm"), sizes.inner())?,
            groups: sizes.groups,
            before_gate: flag("mamba_norm_before_gate")?,
        },
    };
    let mut recurrent = mixer(b, &at, sizes, (biases, norm))?;
    recurrent.factors = projected.cloned();
    let [attention_in, attention_out] = scalars.attention;
    let [ssm_in, ssm_out] = scalars.ssm;
    Ok(ParallelMixers {
        attention,
        attention_factors: Factors {
            input: factor(b, attention_in)?,
            output: factor(b, attention_out)?,
        },
        recurrent,
        recurrent_factors: Factors {
            input: factor(b, ssm_in)?,
            output: factor(b, ssm_out)?,
        },
    })
}

/// Returns the number of bytes of one sequence's Mamba-2 states in all blocks.
pub fn state_bytes(config: &ModelConfig, _blocks: &[BlockInfo]) -> Result<u64> {
    let layout = shape(config, &FIELDS)?.layout();
    Ok((layout.nbytes() as u64).saturating_mul(config.num_hidden_layers as u64))
}
