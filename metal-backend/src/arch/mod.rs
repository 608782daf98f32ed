//! The supported architectures, one file for each `model_type`. A loader builds a decoder from a
//! configuration and weights. `nn/` contains the shared layers. `stack.rs` contains the decoder
//! that most families use; `build.rs` and `moe.rs` contain helpers for loading.

mod afmoe;
mod apertus;
mod bailing_moe;
mod bert;
mod blocks;
mod build;
mod build_attention;
mod cohere;
mod cohere2;
mod cohere2_moe;
mod dbrx;
mod decoder;
mod deepseek;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod dots1;
pub mod encoder;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone;
mod exaone4;
mod exaone_moe;
mod falcon_h1;
mod falcon_mamba;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod gemma4_keys;
mod glm;
mod glm4;
mod glm4_moe;
mod glm4_moe_lite;
mod glm_moe_dsa;
mod gpt2;
mod gpt_bigcode;
mod gpt_neox;
mod gpt_oss;
mod gptj;
mod granite;
mod granitemoe;
mod granitemoehybrid;
mod helium;
mod hunyuan;
mod hunyuan_v1_dense;
mod internlm2;
mod internlm3;
mod jamba;
mod jina_bert;
mod kimi_linear;
mod laguna;
mod latent;
mod lfm2;
mod lfm2_moe;
mod lille;
mod llama;
mod llama4_text;
mod mamba;
mod mamba2;
mod mellum;
mod mimo;
mod mimo_v2_flash;
mod minicpm;
mod minicpm3;
mod minimax;
mod ministral3;
mod mistral;
mod mistral4;
mod mixtral;
mod modernbert;
mod moe;
mod nanochat;
mod nemotron;
mod nemotron_h;
mod nomic_bert;
mod olmo;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi;
mod phi3;
mod phimoe;
mod qwen;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
pub mod routes;
mod rwkv7;
mod seed_oss;
mod smollm3;
mod solar_open;
mod stablelm;
mod stack;
mod stage;
mod starcoder2;
mod state_bytes;
mod step3p5;
mod telechat3;
mod variants;
pub mod wiring;
mod xlstm;
mod youtu_llm;

pub use decoder::{Decoder, Encoder, EncoderInput};

use std::collections::BTreeSet;

use inference::{Error, ErrorKind, Result};
use safetensors::Dtype as FileDtype;

use crate::checkpoint::config::limits;
use crate::checkpoint::{Family, ModelConfig, family};
use crate::loader::Weights;
use crate::nn::Linear;
use wiring::{BlockInfo, Wiring};

/// Builds a decoder from its configuration and weights.
type Loader = fn(&ModelConfig, &mut Weights) -> Result<Box<dyn Decoder>>;

/// The constructor of every family, sorted by `model_type`.
static LOADERS: [(&Family, Loader); 96] = [
    (&family::afmoe::FAMILY, afmoe::load),
    (&family::apertus::FAMILY, apertus::load),
    (&family::bailing_moe::FAMILY, bailing_moe::load),
    (&family::bert::FAMILY, bert::load),
    (&family::cohere::FAMILY, cohere::load),
    (&family::cohere2::FAMILY, cohere2::load),
    (&family::cohere2_moe::FAMILY, cohere2_moe::load),
    (&family::dbrx::FAMILY, dbrx::load),
    (&family::deepseek::FAMILY, deepseek::load),
    (&family::deepseek_v2::FAMILY, deepseek_v2::load),
    (&family::deepseek_v3::FAMILY, deepseek_v3::load),
    (&family::deepseek_v32::FAMILY, deepseek_v32::load),
    (&family::dots1::FAMILY, dots1::load),
    (&family::ernie4_5::FAMILY, ernie4_5::load),
    (&family::ernie4_5_moe::FAMILY, ernie4_5_moe::load),
    (&family::exaone::FAMILY, exaone::load),
    (&family::exaone4::FAMILY, exaone4::load),
    (&family::exaone_moe::FAMILY, exaone_moe::load),
    (&family::falcon_h1::FAMILY, falcon_h1::load),
    (&family::falcon_mamba::FAMILY, falcon_mamba::load),
    (&family::gemma::FAMILY, gemma::load),
    (&family::gemma2::FAMILY, gemma2::load),
    (&family::gemma3::FAMILY, gemma3::load),
    (&family::gemma3n::FAMILY, gemma3n::load),
    (&family::gemma4::FAMILY, gemma4::load),
    (&family::glm::FAMILY, glm::load),
    (&family::glm4::FAMILY, glm4::load),
    (&family::glm4_moe::FAMILY, glm4_moe::load),
    (&family::glm4_moe_lite::FAMILY, glm4_moe_lite::load),
    (&family::glm_moe_dsa::FAMILY, glm_moe_dsa::load),
    (&family::gpt2::FAMILY, gpt2::load),
    (&family::gpt_bigcode::FAMILY, gpt_bigcode::load),
    (&family::gpt_neox::FAMILY, gpt_neox::load),
    (&family::gpt_oss::FAMILY, gpt_oss::load),
    (&family::gptj::FAMILY, gptj::load),
    (&family::granite::FAMILY, granite::load),
    (&family::granitemoe::FAMILY, granitemoe::load),
    (&family::granitemoehybrid::FAMILY, granitemoehybrid::load),
    (&family::helium::FAMILY, helium::load),
    (&family::hunyuan::FAMILY, hunyuan::load),
    (&family::hunyuan_v1_dense::FAMILY, hunyuan_v1_dense::load),
    (&family::internlm2::FAMILY, internlm2::load),
    (&family::internlm3::FAMILY, internlm3::load),
    (&family::jamba::FAMILY, jamba::load),
    (&family::jina_bert::FAMILY, jina_bert::load),
    (&family::kimi_linear::FAMILY, kimi_linear::load),
    (&family::laguna::FAMILY, laguna::load),
    (&family::lfm2::FAMILY, lfm2::load),
    (&family::lfm2_moe::FAMILY, lfm2_moe::load),
    (&family::lille::FAMILY, lille::load),
    (&family::llama::FAMILY, llama::load),
    (&family::llama4_text::FAMILY, llama4_text::load),
    (&family::mamba::FAMILY, mamba::load),
    (&family::mamba2::FAMILY, mamba2::load),
    (&family::mellum::FAMILY, mellum::load),
    (&family::mimo::FAMILY, mimo::load),
    (&family::mimo_v2_flash::FAMILY, mimo_v2_flash::load),
    (&family::minicpm::FAMILY, minicpm::load),
    (&family::minicpm3::FAMILY, minicpm3::load),
    (&family::minimax::FAMILY, minimax::load),
    (&family::ministral3::FAMILY, ministral3::load),
    (&family::mistral::FAMILY, mistral::load),
    (&family::mistral4::FAMILY, mistral4::load),
    (&family::mixtral::FAMILY, mixtral::load),
    (&family::modernbert::FAMILY, modernbert::load),
    (&family::nanochat::FAMILY, nanochat::load),
    (&family::nemotron::FAMILY, nemotron::load),
    (&family::nemotron_h::FAMILY, nemotron_h::load),
    (&family::nomic_bert::FAMILY, nomic_bert::load),
    (&family::olmo::FAMILY, olmo::load),
    (&family::olmo2::FAMILY, olmo2::load),
    (&family::olmo3::FAMILY, olmo3::load),
    (&family::olmoe::FAMILY, olmoe::load),
    (&family::phi::FAMILY, phi::load),
    (&family::phi3::FAMILY, phi3::load),
    (&family::phimoe::FAMILY, phimoe::load),
    (&family::qwen::FAMILY, qwen::load),
    (&family::qwen2::FAMILY, qwen2::load),
    (&family::qwen2_moe::FAMILY, qwen2_moe::load),
    (&family::qwen3::FAMILY, qwen3::load),
    (&family::qwen3_5_moe::FAMILY, qwen3_5_moe::load),
    (&family::qwen3_5::FAMILY, qwen3_5::load),
    (&family::qwen3_moe::FAMILY, qwen3_moe::load),
    (&family::qwen3_next::FAMILY, qwen3_next::load),
    (&family::roberta::FAMILY, bert::load_roberta),
    (&family::rwkv7::FAMILY, rwkv7::load),
    (&family::seed_oss::FAMILY, seed_oss::load),
    (&family::smollm3::FAMILY, smollm3::load),
    (&family::solar_open::FAMILY, solar_open::load),
    (&family::stablelm::FAMILY, stablelm::load),
    (&family::starcoder2::FAMILY, starcoder2::load),
    (&family::step3p5::FAMILY, step3p5::load),
    (&family::telechat3::FAMILY, telechat3::load),
    (&family::roberta::XLM, bert::load_roberta),
    (&family::xlstm::FAMILY, xlstm::load),
    (&family::youtu_llm::FAMILY, youtu_llm::load),
];

/// Returns the names of the architectures that [`load`] accepts, sorted.
pub fn names() -> impl Iterator<Item = &'static str> {
    let all = LOADERS.iter().flat_map(|(family, _)| family.model_types());
    all.collect::<BTreeSet<_>>().into_iter()
}

/// A function that computes the bytes of one sequence's recurrent state.
type StateBytes = fn(&ModelConfig, &[BlockInfo]) -> Result<u64>;

/// Families with recurrent layers: the prefix of their blocks in a checkpoint, and the function for
/// the size of their state.
static RECURRENT: [(&Family, &str, StateBytes); 15] = [
    (&family::falcon_h1::FAMILY, LAYERS, falcon_h1::state_bytes),
    (
        &family::falcon_mamba::FAMILY,
        mamba::BLOCKS,
        mamba::state_bytes,
    ),
    (
        &family::granitemoehybrid::FAMILY,
        LAYERS,
        granitemoehybrid::state_bytes,
    ),
    (&family::jamba::FAMILY, LAYERS, jamba::state_bytes),
    (
        &family::kimi_linear::FAMILY,
        LAYERS,
        kimi_linear::state_bytes,
    ),
    (&family::lfm2::FAMILY, LAYERS, lfm2::state_bytes),
    (&family::lfm2_moe::FAMILY, LAYERS, lfm2::state_bytes),
    (&family::mamba::FAMILY, mamba::BLOCKS, mamba::state_bytes),
    (&family::mamba2::FAMILY, mamba2::BLOCKS, mamba2::state_bytes),
    (
        &family::nemotron_h::FAMILY,
        nemotron_h::BLOCKS,
        nemotron_h::state_bytes,
    ),
    (
        &family::qwen3_5_moe::FAMILY,
        LAYERS,
        qwen3_next::state_bytes,
    ),
    (&family::qwen3_5::FAMILY, LAYERS, qwen3_next::state_bytes),
    (&family::qwen3_next::FAMILY, LAYERS, qwen3_next::state_bytes),
    (&family::rwkv7::FAMILY, LAYERS, rwkv7::state_bytes),
    (&family::xlstm::FAMILY, xlstm::BLOCKS, xlstm::state_bytes),
];

/// The usual prefix of blocks.
const LAYERS: &str = "model.layers.";

fn recurrent(config: &ModelConfig) -> Option<&'static (&'static Family, &'static str, StateBytes)> {
    let described = config.family()?;
    (RECURRENT.iter()).find(|(family, ..)| family.model_type == described.model_type)
}

/// Returns the number of bytes of one sequence's state in all recurrent layers. It does not depend
/// on the sequence's length.
pub fn state_bytes(config: &ModelConfig, blocks: &[BlockInfo]) -> Result<u64> {
    recurrent(config).map_or(Ok(0), |(_, _, bytes)| bytes(config, blocks))
}

/// Returns the number of key and value elements per token in all layers that cache them.
pub fn key_numbers(config: &ModelConfig) -> Result<u64> {
    // In Gemma 3n and Gemma 4, some layers share keys. In Gemma 4, layers also differ in the number
    // and size of their heads.
    let sharing = [&family::gemma3n::FAMILY, &family::gemma4::FAMILY];
    let shares = |f: &Family| sharing.iter().any(|s| s.model_type == f.model_type);
    if config.family().is_some_and(shares) {
        return gemma4_keys::key_numbers(config);
    }
    if let Some(numbers) = latent::key_numbers(config)? {
        return Ok(numbers);
    }
    // In MiMo-V2, sliding layers differ from full layers in the number of key heads.
    let sliding = config.uint("swa_num_key_value_heads", 1..=limits::HEADS)?;
    let layers = 0..config.num_hidden_layers;
    let layers = layers.filter(|&layer| config.has_keys(layer));
    let heads: usize = layers
        .map(|layer| match sliding.filter(|_| config.slides(layer)) {
            Some(heads) => heads,
            None => config.num_key_value_heads,
        })
        .sum();
    Ok((heads as u64).saturating_mul(2 * config.head_size() as u64))
}

/// Finds the blocks of an architecture with recurrent layers from the names of its tensors. Returns
/// an empty list for other architectures.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] if a block is missing.
pub fn blocks<'a>(
    config: &ModelConfig,
    names: impl Iterator<Item = &'a str>,
) -> Result<Vec<BlockInfo>> {
    match recurrent(config) {
        Some((_, prefix, _)) => Ok(Wiring::from_names(prefix, names)?.blocks),
        None => Ok(Vec::new()),
    }
}

/// Returns the default compute type on a GPU for weights stored as `stored`.
pub fn stored_type(config: &ModelConfig, stored: FileDtype) -> FileDtype {
    // Some families sum over a whole sequence. In bfloat16, such sums lose small terms.
    match config.family() {
        Some(family) if family.sums_in_float32 => FileDtype::F32,
        _ => stored,
    }
}

/// Loads the layer that scores a text from its last hidden state. Checkpoints of decoders that
/// classify texts with one label have this layer (`ForSequenceClassification` in transformers).
/// Returns `None` if the checkpoint does not have it.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] if its shape is wrong; [`ErrorKind::Unsupported`] if it has several
/// labels.
pub fn score_layer(config: &ModelConfig, weights: &mut Weights) -> Result<Option<Linear>> {
    let is_encoder = config.family().is_some_and(|family| family.encoder);
    let Some(labels) = weights.rows("score").filter(|_| !is_encoder) else {
        return Ok(None);
    };
    if labels != 1 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the checkpoint classifies texts with {labels} labels; only one is supported"),
        ));
    }
    let hidden = build::int("hidden_size", config.hidden_size)?;
    let weight = weights.matrix("score", 1, hidden)?;
    let bias = match weights.contains("score.bias") {
        true => Some(weights.vector("score.bias", 1)?),
        false => None,
    };
    // A classifier does not predict tokens, so its output head is not used.
    weights.ignore("lm_head");
    weights.layer(weight, bias).map(Some)
}

/// Builds the decoder for `config.model_type`, and returns it with the name of its architecture. If
/// `model_type` is missing, the weights determine the architecture: qwen3 if there are query norms,
/// qwen2 if there are query biases, otherwise llama.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for an unknown architecture, with a list of the known ones;
/// [`ErrorKind::InvalidModel`] if weights are missing, unused or of the wrong shape.
pub fn load(config: &ModelConfig, weights: &mut Weights) -> Result<(String, Box<dyn Decoder>)> {
    let name = match config.model_type.as_deref() {
        Some(name) => name,
        None if weights.contains("model.layers.0.self_attn.q_norm.weight") => {
            family::qwen3::FAMILY.model_type
        }
        None if weights.contains("model.layers.0.self_attn.q_proj.bias") => {
            family::qwen2::FAMILY.model_type
        }
        None => family::llama::FAMILY.model_type,
    };
    let wanted = Family::of(name).map(|family| family.model_type);
    let loader = LOADERS
        .iter()
        .find(|(family, _)| wanted == Some(family.model_type));
    let Some((_, loader)) = loader else {
        let known: Vec<_> = names().collect();
        let known = known.join(", ");
        let message = match family::nearest(name) {
            Some((near, lacks)) => format!(
                "model_type `{name}` is not supported (missing: {lacks}); the nearest supported \
                 one is {near}; supported are {known}"
            ),
            None => format!("model_type `{name}` is not supported; supported are {known}"),
        };
        return Err(Error::new(ErrorKind::Unsupported, message));
    };
    let decoder = loader(config, weights)?;
    weights.finish()?;
    Ok((name.to_owned(), decoder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::family::Recurrence;

    #[test]
    fn each_family_has_its_constructor() {
        let known = LOADERS.iter().map(|(family, _)| family.model_type);
        let all = Family::all().iter().map(|family| family.model_type);
        assert!(
            known.eq(all),
            "the tables of formats and of the engine differ"
        );
    }

    #[test]
    fn each_family_with_recurrent_layers_says_how_large_its_state_is() {
        let known = RECURRENT.iter().map(|(family, ..)| family.model_type);
        let all = (Family::all().iter())
            .filter(|family| family.recurrence != Recurrence::None)
            .map(|family| family.model_type);
        assert!(known.eq(all));
    }
}
