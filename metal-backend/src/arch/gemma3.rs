//! Gemma 3, text only: `gemma3_text`, and the text part of multimodal `gemma3` checkpoints.
//! `gemma2.rs` describes the network; Gemma 3 adds head norms.
//!
//! With `use_bidirectional_attention` (EmbeddingGemma, Vera et al. 2025, arXiv:2509.20354), the
//! model is an encoder of the same blocks. Then a sliding layer attends to half of its window on
//! each side.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::encoder::{EncoderBlock, EncoderStack};
use super::stack::{Block, Stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let stack = super::gemma2::load_with(config, weights, true)?;
    match config.flag("use_bidirectional_attention")? {
        Some(true) => encoder(config, stack).map(|encoder| Box::new(encoder) as Box<dyn Decoder>),
        _ => Ok(Box::new(stack)),
    }
}

/// Builds an encoder from the network of `stack`. An encoder has no causal mask.
fn encoder(config: &ModelConfig, stack: Stack) -> Result<EncoderStack> {
    if stack.blocks.stage.is_some() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "an encoder is not divided among processes",
        ));
    }
    let block = |block: Arc<Block>| {
        // No other reference to the block exists, so this cannot fail.
        let block = Arc::try_unwrap(block)
            .map_err(|_| Error::new(ErrorKind::Engine, "a block is in use"))?;
        let block = EncoderBlock {
            attention_in: block.mixer_in,
            reach: block.mixer.window.map(|window| window / 2),
            slopes: None,
            attention: block.mixer,
            attention_out: block.mixer_out,
            after_attention: None,
            after_second_sum: None,
            mlp_in: block.mlp_in,
            mlp: block.mlp,
            mlp_out: block.mlp_out,
            after_mlp: None,
        };
        Ok(Arc::new(block.packed()?))
    };
    Ok(EncoderStack {
        embedding: stack.embedding,
        embedding_scale: stack.embedding_scale,
        places: None,
        types: None,
        embedding_norm: None,
        blocks: stack
            .blocks
            .blocks
            .into_iter()
            .map(block)
            .collect::<Result<_>>()?,
        norm: Some(stack.norm),
        max_length: config.max_position_embeddings,
        classifier: None,
    })
}
