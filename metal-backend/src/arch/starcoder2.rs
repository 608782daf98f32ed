//! StarCoder2 (Lozhkov et al. 2024; reference: `modeling_starcoder2` of Hugging Face transformers).
//! It has layer norms, biases everywhere, a feed-forward of two matrices, and a sliding window
//! where configured.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::build_attention::AttentionParts;
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward, Mlp};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: true });
    let activation = b.activation(Activation::GeluTanh)?;
    let bias = config.flag("use_bias")?.unwrap_or(true);
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let blocks = b.blocks(|b, i, prefix| {
        let parts = AttentionParts {
            qkv_bias: bias,
            o_bias: bias,
            ..AttentionParts::default()
        };
        let attention = b.attention(i, &format!("{prefix}.self_attn"), parts)?;
        let mlp = FeedForward::Plain(Mlp {
            up: b.linear(&format!("{prefix}.mlp.c_fc"), hidden, width, bias)?,
            down: b.linear(&format!("{prefix}.mlp.c_proj"), width, hidden, bias)?,
            activation,
        });
        b.pre_norm_block(prefix, attention, mlp)
    })?;
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    }))
}
