//! Properties of each architecture that its files do not state: one [`Family`] per `model_type`,
//! each in its own file. Everything here is known without an array; the engine defines how a
//! network computes.
//!
//! A new family needs a file in this directory, a `mod` line, and a line in [`Family::all`]. Only
//! the descriptors and the engine's table of constructors contain the name of a `model_type`. The
//! test `tests/formats/families.rs` checks this.

mod descriptor;
mod elsewhere;
mod fields;
mod gguf;
#[cfg(test)]
mod tests;

pub mod afmoe;
pub mod apertus;
pub mod bailing_moe;
pub mod bert;
pub mod cohere;
pub mod cohere2;
pub mod cohere2_moe;
pub mod dbrx;
pub mod deepseek;
pub mod deepseek_v2;
pub mod deepseek_v3;
pub mod deepseek_v32;
pub mod dots1;
pub mod ernie4_5;
pub mod ernie4_5_moe;
pub mod exaone;
pub mod exaone4;
pub mod exaone_moe;
pub mod falcon_h1;
pub mod falcon_mamba;
pub mod gemma;
pub mod gemma2;
pub mod gemma3;
pub mod gemma3n;
pub mod gemma4;
pub mod glm;
pub mod glm4;
pub mod glm4_moe;
pub mod glm4_moe_lite;
pub mod glm_moe_dsa;
pub mod gpt2;
pub mod gpt_bigcode;
pub mod gpt_neox;
pub mod gpt_oss;
pub mod gptj;
pub mod granite;
pub mod granitemoe;
pub mod granitemoehybrid;
pub mod helium;
pub mod hunyuan;
pub mod hunyuan_v1_dense;
pub mod internlm2;
pub mod internlm3;
pub mod jamba;
pub mod jina_bert;
pub mod kimi_linear;
pub mod laguna;
pub mod lfm2;
pub mod lfm2_moe;
pub mod lille;
pub mod llama;
pub mod llama4_text;
pub mod mamba;
pub mod mamba2;
pub mod mellum;
pub mod mimo;
pub mod mimo_v2_flash;
pub mod minicpm;
pub mod minicpm3;
pub mod minimax;
pub mod ministral3;
pub mod mistral;
pub mod mistral4;
pub mod mixtral;
pub mod modernbert;
pub mod nanochat;
pub mod nemotron;
pub mod nemotron_h;
pub mod nomic_bert;
pub mod olmo;
pub mod olmo2;
pub mod olmo3;
pub mod olmoe;
pub mod phi;
pub mod phi3;
pub mod phimoe;
pub mod qwen;
pub mod qwen2;
pub mod qwen2_moe;
pub mod qwen3;
pub mod qwen3_5;
pub mod qwen3_5_moe;
pub mod qwen3_moe;
pub mod qwen3_next;
pub mod roberta;
mod routed;
pub mod rwkv7;
pub mod seed_oss;
pub mod smollm3;
pub mod solar_open;
mod ssm;
pub mod stablelm;
pub mod starcoder2;
pub mod step3p5;
pub mod telechat3;
pub mod xlstm;
pub mod youtu_llm;

use serde_json::{Map, Value};

use crate::error::Result;

pub use descriptor::{
    ChatFormat, Defaults, Family, JoinedExperts, Recurrence, Renaming, TensorParallel, Windows,
};
pub use elsewhere::nearest;
pub use fields::Names;
pub(crate) use fields::{fill, is_set, list_layers, list_mixtures, rename, rotated_elements};
pub use gguf::{GgufChange, GgufExport, GgufFamily};
pub(crate) use gguf::{GgufHeader, PLAIN};

/// All families, sorted by `model_type`.
static FAMILIES: [&Family; 96] = [
    &afmoe::FAMILY,
    &apertus::FAMILY,
    &bailing_moe::FAMILY,
    &bert::FAMILY,
    &cohere::FAMILY,
    &cohere2::FAMILY,
    &cohere2_moe::FAMILY,
    &dbrx::FAMILY,
    &deepseek::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
    &deepseek_v32::FAMILY,
    &dots1::FAMILY,
    &ernie4_5::FAMILY,
    &ernie4_5_moe::FAMILY,
    &exaone::FAMILY,
    &exaone4::FAMILY,
    &exaone_moe::FAMILY,
    &falcon_h1::FAMILY,
    &falcon_mamba::FAMILY,
    &gemma::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &gemma3n::FAMILY,
    &gemma4::FAMILY,
    &glm::FAMILY,
    &glm4::FAMILY,
    &glm4_moe::FAMILY,
    &glm4_moe_lite::FAMILY,
    &glm_moe_dsa::FAMILY,
    &gpt2::FAMILY,
    &gpt_bigcode::FAMILY,
    &gpt_neox::FAMILY,
    &gpt_oss::FAMILY,
    &gptj::FAMILY,
    &granite::FAMILY,
    &granitemoe::FAMILY,
    &granitemoehybrid::FAMILY,
    &helium::FAMILY,
    &hunyuan::FAMILY,
    &hunyuan_v1_dense::FAMILY,
    &internlm2::FAMILY,
    &internlm3::FAMILY,
    &jamba::FAMILY,
    &jina_bert::FAMILY,
    &kimi_linear::FAMILY,
    &laguna::FAMILY,
    &lfm2::FAMILY,
    &lfm2_moe::FAMILY,
    &lille::FAMILY,
    &llama::FAMILY,
    &llama4_text::FAMILY,
    &mamba::FAMILY,
    &mamba2::FAMILY,
    &mellum::FAMILY,
    &mimo::FAMILY,
    &mimo_v2_flash::FAMILY,
    &minicpm::FAMILY,
    &minicpm3::FAMILY,
    &minimax::FAMILY,
    &ministral3::FAMILY,
    &mistral::FAMILY,
    &mistral4::FAMILY,
    &mixtral::FAMILY,
    &modernbert::FAMILY,
    &nanochat::FAMILY,
    &nemotron::FAMILY,
    &nemotron_h::FAMILY,
    &nomic_bert::FAMILY,
    &olmo::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &olmoe::FAMILY,
    &phi::FAMILY,
    &phi3::FAMILY,
    &phimoe::FAMILY,
    &qwen::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_5_moe::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_moe::FAMILY,
    &qwen3_next::FAMILY,
    &roberta::FAMILY,
    &rwkv7::FAMILY,
    &seed_oss::FAMILY,
    &smollm3::FAMILY,
    &solar_open::FAMILY,
    &stablelm::FAMILY,
    &starcoder2::FAMILY,
    &step3p5::FAMILY,
    &telechat3::FAMILY,
    &roberta::XLM,
    &xlstm::FAMILY,
    &youtu_llm::FAMILY,
];

/// The rules for a configuration without a `model_type`, or with an unknown one. Reports show such
/// models. An engine rejects those whose weights do not reveal their family.
static UNKNOWN: Family = Family::new(
    "",
    "",
    Defaults {
        norm_eps: 1e-6,
        rope_theta: 10_000.0,
        windows: Windows::All,
    },
);

impl Family {
    /// All families, sorted by `model_type`.
    pub fn all() -> &'static [&'static Self] {
        &FAMILIES
    }

    /// The family of a `model_type`, including the `model_type` of a multimodal checkpoint.
    pub fn of(model_type: &str) -> Option<&'static Self> {
        FAMILIES
            .into_iter()
            .find(|f| f.model_types().any(|name| name == model_type))
    }

    /// The family of a configuration, or [`UNKNOWN`].
    pub(crate) fn of_fields(fields: &Map<String, Value>) -> &'static Self {
        let model_type = fields.get("model_type").and_then(Value::as_str);
        model_type.and_then(Self::of).unwrap_or(&UNKNOWN)
    }

    /// The family that GGUF files of an architecture are first read as.
    pub(crate) fn of_architecture(
        architecture: &str,
    ) -> Option<(&'static Self, &'static GgufFamily)> {
        FAMILIES.into_iter().find_map(|family| {
            let gguf = family.gguf.as_ref()?;
            let named = gguf.architecture == architecture || gguf.also.contains(&architecture);
            (named && !gguf.is_variant).then_some((family, gguf))
        })
    }

    /// The family that claims a file of an architecture; `None` if the file is of the family that
    /// [`Self::of_architecture`] returns.
    pub(crate) fn claiming(
        header: &GgufHeader<'_>,
    ) -> Result<Option<(&'static Self, &'static GgufFamily)>> {
        for family in FAMILIES {
            if let Some(gguf) = &family.gguf
                && let Some((architecture, claims)) = gguf.claims
                && architecture == header.keys.architecture
                && claims(header)?
            {
                return Ok(Some((family, gguf)));
            }
        }
        Ok(None)
    }
}
