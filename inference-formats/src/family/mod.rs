//! Properties of each architecture that its files do not state: one [`Family`] per `model_type`,
//! each in its own file. Everything here is known without an array; the engine defines how a
//! network computes.
//!
//! A new family needs a file in this directory, a `mod` line, and a line in [`Family::all`]. No
//! other place in the workspace spells a `model_type`, but for the engine's table of constructors;
//! a test reads the sources (`tests/families.rs`).

mod elsewhere;
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
use crate::limits;

pub use elsewhere::nearest;
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

/// The models of one architecture: their configurations, tensor names and formats.
#[non_exhaustive]
#[derive(Debug)]
pub struct Family {
    /// The `model_type` of a `config.json`.
    pub model_type: &'static str,
    /// The `model_type`s of multimodal checkpoints whose text part is of this family.
    pub multimodal: &'static [&'static str],
    /// Other `model_type`s of text models that are read the same way.
    pub aliases: &'static [&'static str],
    /// Parts of tensor names that differ from the usual ones, each with the usual one. All that
    /// match are replaced, in this order.
    pub names: Names,
    /// The class in transformers.
    pub class: &'static str,
    /// Whether the model is an encoder: every position attends to all others, and no next token is
    /// predicted.
    pub encoder: bool,
    /// Values that a `config.json` may leave out.
    pub defaults: Defaults,
    /// Changes fields before their usual names are filled in.
    pub(crate) prepare: fn(&mut Map<String, Value>),
    /// Sets the remaining fields that a `config.json` leaves out, under their usual names.
    pub(crate) complete: fn(&mut Map<String, Value>),
    /// Fields of newer configurations, each with its name in older readers.
    pub older_fields: Names,
    /// Whether the output matrix is the embedding even when the files store one, or do not say that
    /// it is tied.
    pub always_tied: bool,
    /// Which layers keep a state of fixed size instead of keys and values.
    pub recurrence: Recurrence,
    /// Whether the keys and values of all heads are kept as one short vector per position.
    pub latent: bool,
    /// Whether sums over a whole sequence need float32 throughout. A GPU then computes in float32,
    /// in whatever type the weights are stored.
    pub sums_in_float32: bool,
    /// How the model is divided among processes.
    pub tensor_parallel: TensorParallel,
    /// Whether a layer needs only the output of the previous layer, under the usual names. Such
    /// layers can be stages of a pipeline ([`crate::pipeline`]) unless they are recurrent.
    pub pipeline: bool,
    /// How mlx-lm's names differ from those of transformers.
    pub mlx_lm: Renaming,
    /// Name suffixes of matrices that the checkpoints of transformers store as `[in, out]`. Those
    /// with names of mlx-lm are `[out, in]`.
    pub transposed: &'static [&'static str],
    /// Name suffixes of tensors that are computed anyway, such as masks.
    pub buffers: &'static [&'static str],
    /// Name prefixes of tensors that the language model does not use, such as those of layers that
    /// predict several tokens at once.
    pub spare: &'static [&'static str],
    /// The published chat format, for models without a template.
    pub chat: Option<ChatFormat>,
    /// The format of tool calls in a reply, by its name in `inference-text`. It applies when the
    /// template does not show the format.
    pub reply: Option<&'static str>,
    /// Properties of the GGUF files; `None` when the family is not read from GGUF.
    pub gguf: Option<GgufFamily>,
}

/// Values that all families have and a `config.json` may leave out. They are those of the reference
/// implementation.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The layers with a sliding window.
    pub windows: Windows,
}

/// Which layers slide when the file does not list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// All layers, if the file has a window.
    All,
    /// With `use_sliding_window`, the layers from `max_window_layers` on; otherwise none.
    FromLayer,
    /// All except every n-th layer.
    AllBut {
        /// The n, which the field `sliding_window_pattern` overrides.
        every: usize,
        /// Whether the last layer is full as well, whatever its number.
        last_is_full: bool,
    },
    /// None.
    Never,
}

/// Which layers keep a state of fixed size instead of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recurrence {
    /// None.
    None,
    /// Every layer.
    Every,
    /// Those that `layer_types` lists as such.
    Listed,
    /// Every layer, in addition to its keys and values.
    Beside,
}

/// How a model is divided among processes that compute each layer together
/// ([`crate::split`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorParallel {
    /// The model cannot be divided.
    No,
    /// By heads, and by the width of feed-forward parts, under the usual names. Recurrent layers
    /// are whole.
    Heads,
    /// As `Heads`, and the norms of queries and keys, which cover all heads, are divided with them.
    HeadsAndNorms,
    /// As `Heads`. In matrices that compute queries, keys and values together, each key head and
    /// its value head follow their query heads.
    Grouped,
    /// As `Heads`, but experts that are stored together are `[in, out]`, and rows of gate and up
    /// alternate (gpt-oss).
    Alternating,
}

/// A format of chats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatFormat {
    /// Always `<|im_start|>role … <|im_end|>`.
    ChatMl,
    /// `[INST] … [/INST]`, unless the vocabulary has the tokens of ChatML.
    Mistral,
    /// Always `<start_of_turn>role … <end_of_turn>`.
    Gemma,
}

/// Pairs of names: first the name to look for, then its other name.
pub type Names = &'static [(&'static str, &'static str)];

/// Prefixes of tensor names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Renaming {
    /// Added in front of every new name.
    pub added: &'static str,
    /// Removed from the front of old names that have it.
    pub dropped: &'static str,
}

impl Family {
    /// A family with rows in the usual order and names like llama's, and no other properties.
    pub(crate) const fn new(
        model_type: &'static str,
        class: &'static str,
        defaults: Defaults,
    ) -> Self {
        Self {
            model_type,
            multimodal: &[],
            aliases: &[],
            names: &[],
            class,
            encoder: false,
            defaults,
            prepare: |_| {},
            complete: |_| {},
            older_fields: &[],
            always_tied: false,
            recurrence: Recurrence::None,
            latent: false,
            sums_in_float32: false,
            tensor_parallel: TensorParallel::No,
            pipeline: true,
            mlx_lm: Renaming {
                added: "",
                dropped: "",
            },
            transposed: &[],
            buffers: &[],
            spare: &[],
            chat: None,
            reply: None,
            gguf: None,
        }
    }

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

    /// The `model_type`s of this family.
    pub fn model_types(&self) -> impl Iterator<Item = &'static str> {
        let others = self.multimodal.iter().chain(self.aliases).copied();
        others.chain([self.model_type])
    }

    /// Whether checkpoints of this `model_type` have other parts in addition to the text model.
    pub fn is_multimodal(&self, model_type: &str) -> bool {
        self.multimodal.contains(&model_type)
    }

    /// How mlx-lm names the layers of a model of this `model_type`. It keeps the text part of a
    /// multimodal checkpoint under a separate prefix.
    pub fn mlx_lm_names(&self, model_type: &str) -> Renaming {
        if self.is_multimodal(model_type) {
            Renaming {
                added: "language_model.",
                dropped: "",
            }
        } else {
            self.mlx_lm
        }
    }

    /// Whether a tensor of a checkpoint is a matrix that is stored as `[in, out]`.
    pub fn is_transposed(&self, name: &str) -> bool {
        !self.is_renamed(name) && self.transposed.iter().any(|end| name.ends_with(end))
    }

    /// The name that mlx-lm gives to a tensor when it converts a checkpoint. `None` for a tensor
    /// that it drops.
    pub fn converted_name(&self, name: &str) -> Option<String> {
        if self.buffers.iter().any(|end| name.ends_with(end)) || self.is_spare(name) {
            return None;
        }
        if self.is_renamed(name) {
            return Some(name.to_owned());
        }
        let Renaming { added, dropped } = self.mlx_lm;
        let rest = name.strip_prefix(dropped).unwrap_or(name);
        Some(format!("{added}{rest}"))
    }

    /// Whether the language model does not use a tensor.
    pub fn is_spare(&self, name: &str) -> bool {
        self.spare.iter().any(|start| name.starts_with(start))
    }

    /// Whether the tensor already has a name of mlx-lm.
    fn is_renamed(&self, name: &str) -> bool {
        let added = self.mlx_lm.added;
        !added.is_empty() && name.starts_with(added)
    }
}

/// Sets each field that is missing or `null`.
pub(crate) fn fill(map: &mut Map<String, Value>, defaults: Value) {
    let Value::Object(defaults) = defaults else {
        return;
    };
    for (name, value) in defaults {
        if !is_set(map, &name) {
            map.insert(name, value);
        }
    }
}

/// Lists the kind of each layer if the file does not.
pub(crate) fn list_layers(map: &mut Map<String, Value>, kind: impl Fn(usize) -> &'static str) {
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    // A number out of range is rejected later.
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "layer_types")
    {
        let kinds: Vec<_> = (0..layers as usize).map(kind).collect();
        map.insert("layer_types".into(), kinds.into());
    }
}

/// Lists which layers have experts (`mlp_layer_types`) if the file does not.
pub(crate) fn list_mixtures(map: &mut Map<String, Value>, is_sparse: impl Fn(usize) -> bool) {
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    // A number out of range is rejected later.
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "mlp_layer_types")
    {
        let kind = |layer| match is_sparse(layer) {
            true => "sparse",
            false => "dense",
        };
        let kinds: Vec<_> = (0..layers as usize).map(kind).collect();
        map.insert("mlp_layer_types".into(), kinds.into());
    }
}

/// The fraction of a head that rotates, for files that give the number of elements (`rotary_dim`).
pub(crate) fn rotated_elements(map: &mut Map<String, Value>) {
    let number = |name: &str| map.get(name).and_then(Value::as_f64);
    let head_width = || Some(number("hidden_size")? / number("num_attention_heads")?);
    if let (Some(part), Some(dim)) = (number("rotary_dim"), number("head_dim").or_else(head_width))
        && dim > 0.0
        && !is_set(map, "partial_rotary_factor")
    {
        map.insert("partial_rotary_factor".into(), (part / dim).into());
    }
}

/// Copies fields with names of one family to their usual names, where these are not set.
pub(crate) fn rename(map: &mut Map<String, Value>, names: Names) {
    for (from, to) in names {
        if !is_set(map, to)
            && let Some(value) = map.get(*from).filter(|v| !v.is_null()).cloned()
        {
            map.insert((*to).to_owned(), value);
        }
    }
}

/// Whether a field is present and not `null`.
pub(crate) fn is_set(map: &Map<String, Value>, name: &str) -> bool {
    map.get(name).is_some_and(|v| !v.is_null())
}
