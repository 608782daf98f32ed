//! K-EXAONE (LG AI Research 2026; reference: `modeling_exaone_moe` of Hugging Face transformers):
//! the attention of EXAONE 4, with norms before attention and feed-forward. The first layers are
//! dense; the others have experts.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::build_attention::AttentionParts;
use super::moe::{USUAL_PARTS, routed_block};
use super::stack::Stack;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let hybrid = config.sliding_window.is_some();
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks(|b, i, prefix| {
        let at = format!("{prefix}.self_attn");
        let parts = AttentionParts {
            no_rope: hybrid && !b.config.slides(i),
            ..AttentionParts::default()
        };
        let mut attention = b.attention(i, &at, parts)?;
        attention.norms = b.head_norms(&at)?;
        let mlp = routed_block(b, i, prefix, USUAL_PARTS)?;
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
