//! Architectures by `model_type`, one file each: a configuration and weights in, a decoder out. The
//! layers they share are in `nn/`, the decoder that most of them are is in `stack.rs`, and what
//! loading needs in `build.rs` and `moe.rs`.

mod build;
mod cohere2;
mod exaone4;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4;
mod gpt2;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod mixtral;
mod moe;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod smollm3;
mod stack;
mod starcoder2;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Array;

use crate::cache::{CacheOptions, Caches, Row};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;

/// A decoder-only language model.
pub trait Decoder: Send + Sync + std::fmt::Debug {
    /// Token ids `[1, T]` of `rows`, packed one after another, to logits `[1, T, vocab]`, or `[1, rows,
    /// vocab]` for [`Positions::Last`]. Keys and values of all positions are added to the rows' caches. Where the
    /// adapters' scope asks for it, blocks are computed again in a backward pass.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array>;

    /// Empty caches for one row, one a layer that has keys.
    fn new_caches(&self, options: &CacheOptions) -> Caches;

    /// Which of the caches has the keys that `layer` looks at.
    fn keys_of(&self, layer: usize) -> usize {
        layer
    }
}

/// Builds a decoder from its configuration and weights.
type Loader = fn(&ModelConfig, &mut Weights) -> Result<Box<dyn Decoder>>;

/// Every architecture, sorted by name.
const LOADERS: [(&str, Loader); 24] = [
    ("cohere2", cohere2::load),
    ("exaone4", exaone4::load),
    ("gemma", gemma::load),
    ("gemma2", gemma2::load),
    ("gemma3", gemma3::load),
    ("gemma3_text", gemma3::load),
    ("gemma4", gemma4::load),
    ("gemma4_text", gemma4::load),
    ("glm4", glm4::load),
    ("gpt2", gpt2::load),
    ("gpt_oss", gpt_oss::load),
    ("granite", granite::load),
    ("llama", llama::load),
    ("mistral", mistral::load),
    ("mixtral", mixtral::load),
    ("olmo2", olmo2::load),
    ("olmo3", olmo3::load),
    ("phi3", phi3::load),
    ("qwen2", qwen2::load),
    ("qwen2_moe", qwen2_moe::load),
    ("qwen3", qwen3::load),
    ("qwen3_moe", qwen3_moe::load),
    ("smollm3", smollm3::load),
    ("starcoder2", starcoder2::load),
];

/// The names that [`load`] knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    LOADERS.iter().map(|(name, _)| *name)
}

/// Builds the decoder that `config.model_type` names. Without a name, the weights tell qwen3 (which
/// has query norms) from qwen2 (which has query biases) from llama.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for another architecture, listing those there are;
/// [`ErrorKind::InvalidModel`] when weights are missing, left over or of the wrong shape.
pub fn load(config: &ModelConfig, weights: &mut Weights) -> Result<(String, Box<dyn Decoder>)> {
    let name = match config.model_type.as_deref() {
        Some(name) => name,
        None if weights.contains("model.layers.0.self_attn.q_norm.weight") => "qwen3",
        None if weights.contains("model.layers.0.self_attn.q_proj.bias") => "qwen2",
        None => "llama",
    };
    let Some((_, loader)) = LOADERS.iter().find(|(known, _)| *known == name) else {
        let known: Vec<_> = names().collect();
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "model_type `{name}` is not supported; supported are {}",
                known.join(", ")
            ),
        ));
    };
    let decoder = loader(config, weights)?;
    weights.finish()?;
    Ok((name.to_owned(), decoder))
}
