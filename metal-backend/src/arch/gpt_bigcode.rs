//! GPT-BigCode (Allal et al. 2023; reference: `modeling_gpt_bigcode` of Hugging Face transformers):
//! GPT-2 with one key head for all queries, and matrices as `[out, in]`.

use inference::Result;

use super::Decoder;
use super::build::{NormKind, int};
use super::gptj;
use super::llama::{MlpKind, Variant, variant_stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    gptj::ignore_masks(config, weights);
    let one_key = config.flag("multi_query")?.unwrap_or(true);
    let variant = Variant {
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        norms: NormKind::Layer { bias: true },
        fused: one_key,
        grouped: !one_key,
        no_rope: true,
        mlp: MlpKind::Plain,
        ..Variant::default()
    };
    let mut stack = variant_stack(config, weights, variant)?;
    let places = config.max_position_embeddings.unwrap_or(1024);
    let (places, hidden) = (
        int("n_positions", places)?,
        int("n_embd", config.hidden_size)?,
    );
    stack.positions = Some(weights.embedding("model.embed_positions", places, hidden)?);
    Ok(Box::new(stack))
}
