//! Arcee's mixtures of experts (Arcee AI 2025; reference: `modeling_afmoe` of Hugging Face
//! transformers). A separate matrix computes the attention's gates. Attention and feed-forward each
//! have a norm on their input and on their output. Full-attention layers have no rotary embedding.
//! The first layers are dense; the others have experts.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::moe::{USUAL_PARTS, routed_block};
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::GatedAttention;
use crate::nn::gated_attention::{GateFunction, OutputGate};

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let scaled = config.flag("mup_enabled")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?;
    let dims = b.dims;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            qkv_bias: b.config.attention_bias,
            o_bias: b.config.attention_bias,
            no_rope: !b.config.slides(i),
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.norms = b.head_norms(&at)?;
        let width = dims.n_heads * dims.head_dim;
        let gate = b.linear(&format!("{at}.gate_proj"), dims.hidden, width, false)?;
        let mlp = routed_block(b, i, prefix, USUAL_PARTS)?;
        let mut norm = |part: &str| b.hidden_norm(&format!("{prefix}.{part}")).map(Some);
        Ok(Block {
            mixer_in: norm("input_layernorm")?,
            mixer: GatedAttention {
                attention,
                gate: Some(OutputGate {
                    linear: gate,
                    function: GateFunction::Sigmoid,
                }),
            },
            mixer_out: norm("post_attention_layernorm")?,
            mlp_in: norm("pre_feedforward_layernorm")?,
            mlp,
            mlp_out: norm("post_feedforward_layernorm")?,
            residual: None,
            parallel: false,
        })
    })?;
    let scale = (dims.hidden as f32).sqrt();
    Ok(Box::new(Stack {
        embedding: b.embedding("model.embed_tokens")?,
        embedding_scale: scaled.then(|| b.scalar(scale)).transpose()?,
        embedding_norm: None,
        positions: None,
        blocks,
        norm: b.hidden_norm("model.norm")?,
        head: b.head(None)?,
    }))
}
