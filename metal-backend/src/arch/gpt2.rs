//! GPT-2 (Radford et al. 2019; reference: `modeling_gpt2` of Hugging Face transformers). It has
//! learned positions, layer norms, biases, and a fused QKV projection. Original checkpoints store
//! matrices as `[in, out]`. Checkpoints written by MLX (names start with `model.`) and GGUF files
//! store `[out, in]`.

use std::sync::Arc;

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind, int};
use super::stack::{Block, Head, Stack};
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::adapter::{SlotKind, SlotView};
use crate::nn::{Activation, FeedForward, Linear, Mlp, Weight};

/// The tensor-name prefix and the orientation of matrices in a checkpoint.
struct Layout {
    prefix: &'static str,
    transposed: bool,
}

impl Layout {
    fn from_weights(weights: &Weights) -> Self {
        let prefix = ["model.", "transformer.", ""]
            .into_iter()
            .find(|p| weights.contains(&format!("{p}wte.weight")))
            .unwrap_or("");
        Self {
            prefix,
            transposed: prefix != "model." && !weights.is_gguf(),
        }
    }
}

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let layout = Layout::from_weights(weights);
    let at = |name: &str| format!("{}{name}", layout.prefix);
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: true });
    let activation = b.activation(Activation::GeluTanh)?;
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let positions = int(
        "n_positions",
        config.max_position_embeddings.unwrap_or(1024),
    )?;
    let blocks = b.blocks_at(&at("h."), |b, _, prefix| {
        let at = |name: &str| format!("{prefix}.{name}");
        let heads = b.dims.n_heads * b.dims.head_dim;
        let qkv = matrix(b, &layout, &at("attn.c_attn"), hidden, 3 * heads)?;
        let bias = b.weights.vector(&at("attn.c_attn.bias"), 3 * heads)?;
        let slot = b.weights.slot(&at("attn.c_attn"), SlotKind::Matrix, &qkv);
        let bias_slot = b.weights.bias_slot(&at("attn.c_attn"), Some(&bias));
        let part = |n: i32| -> Result<Linear> {
            let (from, to) = (n * heads, (n + 1) * heads);
            let weight = qkv.rows(from, to).map_err(engine("weights"))?;
            let bias = bias.slice_axis(0, from, to).map_err(engine("weights"))?;
            let at = |slot: &Arc<_>| SlotView::new(Arc::clone(slot), Some((from, to)));
            let layer = b.weights.layer(weight, Some(bias))?.at(at(&slot));
            Ok(layer.with_bias_at(bias_slot.as_ref().map(at)))
        };
        let qkv = [part(0)?, part(1)?, part(2)?];
        let o_proj = linear(b, &layout, &at("attn.c_proj"), heads, hidden)?;
        // Old checkpoints also store the causal mask, which is not needed.
        b.weights.ignore(&at("attn.bias"));
        b.weights.ignore(&at("attn.masked_bias"));
        Ok(Block {
            mixer_in: Some(b.hidden_norm(&at("ln_1"))?),
            mixer: b.plain_attention(qkv, o_proj, None),
            mixer_out: None,
            mlp_in: Some(b.hidden_norm(&at("ln_2"))?),
            mlp: FeedForward::Plain(Mlp {
                up: linear(b, &layout, &at("mlp.c_fc"), hidden, width)?,
                down: linear(b, &layout, &at("mlp.c_proj"), width, hidden)?,
                activation,
            }),
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    })?;
    let embedding = b.embedding(&at("wte"))?;
    let places = b.weights.embedding(&at("wpe"), positions, hidden)?;
    let norm = b.hidden_norm(&at("ln_f"))?;
    // The output matrix is always tied. Conversion to GGUF stores the table a second time, and this
    // copy is ignored.
    b.weights.ignore("lm_head");
    Ok(Box::new(Stack {
        embedding,
        embedding_scale: None,
        embedding_norm: None,
        positions: Some(places),
        blocks,
        norm,
        head: Head {
            linear: None,
            scale: None,
            softcap: None,
        },
    }))
}

/// Loads a matrix of either orientation. Returns it as `[outputs, inputs]`.
fn matrix(
    b: &mut Builder<'_>,
    layout: &Layout,
    prefix: &str,
    inputs: i32,
    outputs: i32,
) -> Result<Weight> {
    if !layout.transposed {
        return b.weights.matrix(prefix, outputs, inputs);
    }
    b.weights.turned_matrix(prefix, outputs, inputs)
}

fn linear(
    b: &mut Builder<'_>,
    layout: &Layout,
    prefix: &str,
    inputs: i32,
    outputs: i32,
) -> Result<Linear> {
    if b.weights.leaves_out(prefix) {
        return Ok(Linear::absent());
    }
    let weight = matrix(b, layout, prefix, inputs, outputs)?;
    let bias = b.weights.vector(&format!("{prefix}.bias"), outputs)?;
    let slot = SlotView::new(b.weights.slot(prefix, SlotKind::Matrix, &weight), None);
    let bias_slot = b.weights.bias_slot(prefix, Some(&bias));
    let layer = b.weights.layer(weight, Some(bias))?.at(slot);
    let layer = layer.summed_over(b.weights.summed_over(prefix));
    Ok(layer.with_bias_at(bias_slot.map(|slot| SlotView::new(slot, None))))
}
