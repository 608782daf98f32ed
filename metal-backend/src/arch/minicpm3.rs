//! `MiniCPM` 3 (OpenBMB 2024; reference: `modeling_minicpm3` of its checkpoints): latent attention,
//! and factors on the embedding, the residual branches and the logits.

use inference::Result;

use super::Decoder;
use super::build::Builder;
use super::latent::{Latent, dense};
use super::minicpm;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let latent = Latent {
        traditional: false,
        eps: Some(1e-6),
        residual: minicpm::residual(config)?,
        ..Latent::DEEPSEEK
    };
    let mut stack = dense(config, weights, latent)?;
    let b = Builder::new(config, weights)?;
    stack.embedding_scale = b.factor("scale_emb")?;
    stack.head.scale = minicpm::logit_scale(&b)?;
    Ok(Box::new(stack))
}
