//! Youtu-LLM (Tencent 2025; reference: `modeling_youtu` of Hugging Face transformers): latent
//! attention and dense blocks.

use inference::Result;

use super::Decoder;
use super::latent::{Latent, dense};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let latent = Latent {
        traditional: config.rope_traditional,
        eps: None,
        ..Latent::DEEPSEEK
    };
    Ok(Box::new(dense(config, weights, latent)?))
}
