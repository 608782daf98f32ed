//! Computes the size in memory of each tensor of a model, from file headers only. An engine uses it
//! to reject a model that does not fit, before it reads weights. Reports show the same sizes.
//!
//! The size covers weights only. It does not cover caches, activations, or temporary memory while
//! loading.

use std::collections::{BTreeMap, BTreeSet};

use ::safetensors::Dtype;
use serde::Serialize;

use crate::config::{ModelConfig, QuantConfig};
use crate::gguf::{GgmlType, Gguf, GgufTensor};
use crate::gguf_config::{GgufNames, predicts_further};
use crate::quantization::{self, Layout};
use crate::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};

/// How an engine stores weights in memory.
#[derive(Debug, Clone, Copy)]
pub struct WeightStorage {
    /// Bytes per value of the engine's compute type: 4 for float32, 2 for 16-bit types.
    pub compute_bytes: u64,
    /// Whether 16-bit float matrices stay in 16 bits when the engine computes in float32.
    pub keeps_halves: bool,
    /// Whether a quantized matrix of this mode, bit width and group size stores scales and biases
    /// as 16-bit floats, where the conversion is exact.
    pub keeps_half_factors: fn(mode: &str, bits: i32, group_size: i32) -> bool,
    /// Whether these matrices stay packed: matrices of GGUF types that MLX lacks (Q3_K, Q6_K, the
    /// IQ types), and stacks of experts.
    pub keeps_gguf_bits: bool,
}

impl WeightStorage {
    /// The storage of an engine that converts all floats to its compute type, which has
    /// `compute_bytes` bytes.
    pub fn converted(compute_bytes: u64) -> Self {
        Self {
            compute_bytes,
            keeps_halves: false,
            keeps_half_factors: |_, _, _| false,
            keeps_gguf_bits: false,
        }
    }
}

/// The part of a network to which a tensor belongs. Variants are in the order of the data flow.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Token embeddings, and learned position embeddings.
    Embedding,
    /// Queries, keys, values and outputs of attention.
    Attention,
    /// Projections and gates of recurrent layers.
    Recurrent,
    /// Feed-forward blocks, routers and shared experts.
    FeedForward,
    /// The experts of mixtures.
    Experts,
    /// Normalization.
    Norms,
    /// The output head.
    Output,
    /// Other parts, such as the vision tower of a multimodal checkpoint.
    Other,
}

impl Part {
    /// The part's name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Part::Embedding => "embedding",
            Part::Attention => "attention",
            Part::Recurrent => "recurrent",
            Part::FeedForward => "feed-forward",
            Part::Experts => "experts",
            Part::Norms => "norms",
            Part::Output => "output",
            Part::Other => "other",
        }
    }

    /// The part to which a tensor belongs, by its name in transformers.
    ///
    /// ```
    /// use inference_formats::footprint::Part;
    /// assert_eq!(Part::from_name("model.layers.0.self_attn.q_proj.weight"), Part::Attention);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        let has = |part: &str| name.contains(part);
        let tower = ["vision", "visual", "audio", "multi_modal", "projector"];
        if tower.iter().any(|t| has(t)) {
            Part::Other
        } else if has("lm_head") {
            Part::Output
        } else if has("embed_tokens") || has("wte") || has("wpe") || has(".embeddings.") {
            Part::Embedding
        } else if has("norm") || has(".ln_") || name.starts_with("ln_f") {
            Part::Norms
        } else if [
            "mlstm_layer",
            "slstm_layer",
            ".conv.",
            "linear_attn",
            ".mamba.",
            ".mixer.",
        ]
        .iter()
        .any(|layer| has(layer))
        {
            Part::Recurrent
        } else if has("attn") {
            Part::Attention
        } else if has("shared_expert") {
            Part::FeedForward
        } else if [
            "experts",
            "switch_mlp",
            "moe.input_linear",
            "moe.output_linear",
        ]
        .iter()
        .any(|stack| has(stack))
        {
            Part::Experts
        } else if has("mlp")
            || has(".ffn.")
            || has("feed_forward")
            || has("block_sparse_moe")
            || has("router")
        {
            Part::FeedForward
        } else {
            Part::Other
        }
    }
}

/// The layer whose feed-forward part contains the tensor, by the tensor's name in transformers.
/// Norms around the feed-forward part do not belong to it, and experts do not either.
///
/// ```
/// use inference_formats::footprint::feed_forward_layer;
/// assert_eq!(feed_forward_layer("model.layers.7.mlp.up_proj.weight"), Some(7));
/// assert_eq!(feed_forward_layer("model.layers.7.self_attn.q_proj.weight"), None);
/// ```
#[must_use]
pub fn feed_forward_layer(name: &str) -> Option<usize> {
    let number = || name.split('.').find_map(|part| part.parse().ok());
    (Part::from_name(name) == Part::FeedForward).then(number)?
}

/// One tensor of a model's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorFootprint {
    /// The tensor's name in transformers, or its name in the file if it has no other.
    pub name: String,
    /// The part of the network to which the tensor belongs.
    pub part: Part,
    /// How its values are stored, such as `BF16`, `Q4_K` or `affine 4 bits, groups of 64`.
    pub format: String,
    /// Number of weights. Scales and biases of quantized matrices count as 0.
    pub parameters: u64,
    /// Bytes in the file.
    pub stored_bytes: u64,
    /// Bytes in memory; 0 for a tensor that is not loaded.
    pub loaded_bytes: u64,
    /// Whether the tensor is packed in the file but stored as plain floats in memory.
    pub expanded: bool,
}

/// Packed matrices of one format that the engine expands to floats.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Expansion {
    /// The format in the files, such as `IQ2_XXS`.
    pub format: String,
    /// The names of the matrices, sorted as in the file.
    pub tensors: Vec<String>,
    /// Bytes of the matrices in the files.
    pub stored_bytes: u64,
    /// Bytes of the matrices in memory. Each token reads all of them.
    pub loaded_bytes: u64,
}

impl std::fmt::Display for Expansion {
    /// For example `Q2_K: model.layers.0.mlp.up_proj.weight and 5 more, in 12.2 times the bytes`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (format, times) = (
            &self.format,
            self.loaded_bytes as f64 / self.stored_bytes.max(1) as f64,
        );
        match self.tensors.as_slice() {
            [one] => write!(f, "{format}: {one}, in {times:.1} times the bytes"),
            all => {
                let first = all.first().map_or("", String::as_str);
                let more = all.len().saturating_sub(1);
                write!(
                    f,
                    "{format}: {first} and {more} more, in {times:.1} times the bytes"
                )
            }
        }
    }
}

/// The total size of several tensors, under a common name.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Share {
    /// The name of a network part or of a format.
    pub name: String,
    /// The number of weights in the tensors.
    pub parameters: u64,
    /// Bytes of the tensors in the files.
    pub stored_bytes: u64,
    /// Bytes of the tensors in memory.
    pub loaded_bytes: u64,
}

/// All tensors of a model's files, with their sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    tensors: Vec<TensorFootprint>,
}

impl Footprint {
    /// The tensors of a directory of safetensors files, for an engine with this `storage`.
    ///
    /// If a header does not show whether a scale or bias fits into 16 bits, 32 bits are counted.
    pub fn of_safetensors(
        checkpoint: &SafetensorsCheckpoint,
        config: &ModelConfig,
        storage: &WeightStorage,
    ) -> Self {
        let model_type = config.model_type.as_deref().unwrap_or_default();
        let names = TensorNames::new(checkpoint.names(), model_type);
        let usual: BTreeMap<&str, &str> = names
            .all()
            .filter_map(|usual| Some((names.stored(usual)?, usual)))
            .collect();
        let tensors = checkpoint
            .names()
            .filter_map(|stored| {
                let info = checkpoint.info(stored)?;
                let name = usual.get(stored).copied();
                let one = Stored {
                    checkpoint,
                    stored,
                    name: name.unwrap_or(stored),
                    info,
                };
                let mut footprint = one.footprint(config, storage);
                if config.family().is_some_and(|family| family.latent) {
                    expand_plain(&mut footprint, storage);
                }
                // Parts other than the text model are not loaded.
                if name.is_none() || is_spare_output(&footprint, config) {
                    footprint.loaded_bytes = 0;
                }
                Some(footprint)
            })
            .collect();
        Self { tensors }
    }

    /// Computes the footprint of a GGUF file in an engine that stores weights as `storage`
    /// describes. Types that MLX can represent without loss stay packed. Other types stay packed if
    /// `storage` allows it, and otherwise become floats.
    pub fn of_gguf(file: &Gguf, config: &ModelConfig, storage: &WeightStorage) -> Self {
        let names = GgufNames::new(config.model_type.as_deref().unwrap_or_default());
        let tensors = file
            .tensors()
            .iter()
            .map(|(stored, tensor)| {
                let mut footprint = of_gguf(&names, stored, tensor, storage);
                let further = predicts_further(&config.fields, stored);
                if further || is_spare_output(&footprint, config) {
                    footprint.loaded_bytes = 0;
                }
                footprint
            })
            .collect();
        Self { tensors }
    }

    /// Removes the feed-forward parts of `layers`, which are not loaded.
    #[must_use]
    pub fn without_feed_forward(mut self, layers: &BTreeSet<usize>) -> Self {
        for tensor in &mut self.tensors {
            if feed_forward_layer(&tensor.name).is_some_and(|layer| layers.contains(&layer)) {
                tensor.loaded_bytes = 0;
            }
        }
        self
    }

    /// The tensors, sorted by their names in the files.
    pub fn tensors(&self) -> &[TensorFootprint] {
        &self.tensors
    }

    /// Number of weights in all tensors. A quantized weight counts as one weight.
    pub fn parameters(&self) -> u64 {
        self.sum(|t| t.parameters)
    }

    /// Bytes of all tensors in the files.
    pub fn stored_bytes(&self) -> u64 {
        self.sum(|t| t.stored_bytes)
    }

    /// Bytes of all tensors in memory.
    pub fn loaded_bytes(&self) -> u64 {
        self.sum(|t| t.loaded_bytes)
    }

    /// The parts of the network, in order.
    pub fn parts(&self) -> Vec<Share> {
        let shares = self.shares(|t| (t.part, t.part.name()));
        shares.into_values().collect()
    }

    /// The formats of the weights; the largest share of the files comes first.
    pub fn formats(&self) -> Vec<Share> {
        let shares = self.shares(|t| (t.format.as_str(), t.format.as_str()));
        let mut shares: Vec<_> = shares.into_values().collect();
        shares.sort_by(|a, b| (b.stored_bytes, &a.name).cmp(&(a.stored_bytes, &b.name)));
        shares
    }

    /// Packed matrices that become plain floats, by format; the largest increase comes first. All
    /// other matrices need as many bits in memory as in the file.
    pub fn expansions(&self) -> Vec<Expansion> {
        let mut all: BTreeMap<&str, Expansion> = BTreeMap::new();
        let expanded = |t: &&TensorFootprint| t.expanded && t.loaded_bytes > 0;
        for tensor in self.tensors.iter().filter(expanded) {
            let one = all.entry(&tensor.format).or_insert_with(|| Expansion {
                format: tensor.format.clone(),
                tensors: Vec::new(),
                stored_bytes: 0,
                loaded_bytes: 0,
            });
            one.tensors.push(tensor.name.clone());
            one.stored_bytes = one.stored_bytes.saturating_add(tensor.stored_bytes);
            one.loaded_bytes = one.loaded_bytes.saturating_add(tensor.loaded_bytes);
        }
        let mut all: Vec<_> = all.into_values().collect();
        all.sort_by_key(|one| std::cmp::Reverse(one.loaded_bytes));
        all
    }

    fn sum(&self, of: fn(&TensorFootprint) -> u64) -> u64 {
        self.tensors.iter().map(of).fold(0, u64::saturating_add)
    }

    fn shares<'a, K: Ord>(
        &'a self,
        key: impl Fn(&'a TensorFootprint) -> (K, &'a str),
    ) -> BTreeMap<K, Share> {
        let mut shares = BTreeMap::new();
        for tensor in &self.tensors {
            let (key, name) = key(tensor);
            let share = shares.entry(key).or_insert_with(|| Share {
                name: name.to_owned(),
                parameters: 0,
                stored_bytes: 0,
                loaded_bytes: 0,
            });
            share.parameters = share.parameters.saturating_add(tensor.parameters);
            share.stored_bytes = share.stored_bytes.saturating_add(tensor.stored_bytes);
            share.loaded_bytes = share.loaded_bytes.saturating_add(tensor.loaded_bytes);
        }
        shares
    }
}

/// Whether the tensor is an output matrix that is not loaded, because the embedding is the output
/// matrix.
fn is_spare_output(footprint: &TensorFootprint, config: &ModelConfig) -> bool {
    let always = || config.family().is_some_and(|family| family.always_tied);
    footprint.part == Part::Output && (config.tie_word_embeddings == Some(true) || always())
}

/// Parts of the names of matrices that the engine keeps as plain floats: those that expand the
/// compressed vectors of latent attention, and stacked projections of residual streams.
const PLAIN: [&str; 5] = [
    ".kv_b_proj.",
    ".embed_q.",
    ".unembed_out.",
    ".altup_projections.weight",
    ".altup_unembed_projections.weight",
];

/// Whether the tensor with this name is kept as plain floats, whatever its stored format.
fn is_plain(name: &str) -> bool {
    PLAIN.iter().any(|part| name.contains(part))
}

/// Sets the size in memory of such a matrix.
fn expand_plain(footprint: &mut TensorFootprint, storage: &WeightStorage) {
    if !is_plain(&footprint.name) {
        return;
    }
    let plain = footprint.parameters.saturating_mul(storage.compute_bytes);
    footprint.expanded = plain > footprint.stored_bytes && footprint.format.contains("bits");
    footprint.loaded_bytes = plain;
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |n, &d| n.saturating_mul(d as u64))
}

/// Whether the kernels can use a tensor of this shape in its packed format. It must be a matrix or
/// a stack of experts. Each expert must start at a block of eight rows.
fn is_matrix(shape: &[usize]) -> bool {
    match *shape {
        [_, _] => true,
        [_, rows, _] => rows % 8 == 0,
        _ => false,
    }
}

/// A tensor of a safetensors file.
struct Stored<'a> {
    checkpoint: &'a SafetensorsCheckpoint,
    /// The name in the file.
    stored: &'a str,
    /// The usual name.
    name: &'a str,
    info: &'a TensorInfo,
}

impl Stored<'_> {
    fn footprint(&self, config: &ModelConfig, storage: &WeightStorage) -> TensorFootprint {
        let info = self.info;
        let (elements, stored) = (elements(&info.shape), info.nbytes as u64);
        let part = Part::from_name(self.name);
        let (_, suffix) = self.stored.rsplit_once('.').unwrap_or(("", self.stored));
        let is_float = matches!(
            info.dtype,
            Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16
        );
        let is_half = matches!(info.dtype, Dtype::F16 | Dtype::BF16);
        let is_matrix = is_matrix(&info.shape);
        let float = |stays: bool| {
            if !is_float || (stays && storage.compute_bytes > 2) {
                stored
            } else {
                elements.saturating_mul(storage.compute_bytes)
            }
        };
        let expanded = |weights: u64| {
            let bytes = if storage.keeps_halves {
                2
            } else {
                storage.compute_bytes
            };
            weights.saturating_mul(bytes)
        };
        let (format, parameters, loaded) = match self.quantization(config) {
            _ if info.dtype == Dtype::F8_E4M3 => {
                ("F8_E4M3".to_owned(), elements, expanded(elements))
            }
            _ if suffix == "weight_scale_inv" => ("F8_E4M3".to_owned(), 0, 0),
            Some(q) if self.is_packed_elsewhere() => {
                let per_word = 32 / u64::from(q.bits.unsigned_abs()).max(1);
                let weights = elements.saturating_mul(per_word);
                let format = format!("{} {} bits, groups of {}", q.mode, q.bits, q.group_size);
                let is_expanded = config.has_ordered_groups();
                match suffix {
                    "qweight" if is_expanded => (format, weights, expanded(weights)),
                    "qweight" => (format, weights, stored),
                    // Zero points become biases, one for each scale.
                    "scales" if !is_expanded => (
                        format,
                        0,
                        elements.saturating_mul(2 * storage.compute_bytes),
                    ),
                    "qzeros" | "g_idx" | "scales" => (format, 0, 0),
                    _ => (format!("{:?}", info.dtype), elements, float(false)),
                }
            }
            Some(q) if matches!(suffix, "weight" | "scales" | "biases") && self.is_packed() => {
                let bits = u64::from(q.bits.unsigned_abs()).max(1);
                let format = format!("{} {} bits, groups of {}", q.mode, q.bits, q.group_size);
                let weights = elements.saturating_mul(32) / bits;
                let parameters = if suffix == "weight" { weights } else { 0 };
                // A bfloat16 value may be too small for float16, so only float16 is exact.
                let exact = info.dtype == Dtype::F16;
                let keeps_half = (storage.keeps_half_factors)(&q.mode, q.bits, q.group_size);
                (format, parameters, float(exact && keeps_half && is_matrix))
            }
            // OpenAI's packing of experts has two weights per byte.
            Some(_) if suffix.ends_with("_blocks") => {
                ("mxfp4".to_owned(), elements.saturating_mul(2), stored)
            }
            Some(_) if suffix.ends_with("_scales") => ("mxfp4".to_owned(), 0, stored),
            _ => {
                let is_weight = matches!(suffix, "weight" | "gate_up_proj" | "down_proj");
                // The kernels support no stacks other than experts. The stacked gates of recurrent
                // cells are expanded.
                let fits = is_matrix && (info.shape.len() == 2 || part == Part::Experts);
                let stays = storage.keeps_halves && is_half && fits && is_weight;
                (format!("{:?}", info.dtype), elements, float(stays))
            }
        };
        TensorFootprint {
            name: self.name.to_owned(),
            part,
            format,
            parameters,
            stored_bytes: stored,
            loaded_bytes: loaded,
            expanded: false,
        }
    }

    /// The layer's quantization. The configuration may list an exception under the stored or the
    /// usual name.
    fn quantization<'c>(&self, config: &'c ModelConfig) -> Option<&'c QuantConfig> {
        let exception = [self.stored, self.name].into_iter().find_map(|name| {
            let (layer, _) = name.rsplit_once('.')?;
            config.quantization_overrides.get(layer)
        });
        match exception {
            Some(layer_format) => layer_format.as_ref(),
            None => config.quantization.as_ref(),
        }
    }

    /// Whether the tensor belongs to a matrix that GPTQ or AWQ packed.
    fn is_packed_elsewhere(&self) -> bool {
        let layer = self.stored.rsplit_once('.').map(|(layer, _)| layer);
        layer.is_some_and(|layer| self.checkpoint.info(&format!("{layer}.qweight")).is_some())
    }

    /// Whether the tensor is a part of a matrix in MLX's packing.
    fn is_packed(&self) -> bool {
        let Some((layer, _)) = self.stored.rsplit_once('.') else {
            return false;
        };
        let part = |part: &str| self.checkpoint.info(&format!("{layer}.{part}"));
        part("weight").is_some_and(|w| w.dtype == Dtype::U32) && part("scales").is_some()
    }
}

fn of_gguf(
    names: &GgufNames,
    stored: &str,
    tensor: &GgufTensor,
    storage: &WeightStorage,
) -> TensorFootprint {
    let parameters = elements(&tensor.shape);
    let stored_bytes = tensor.nbytes as u64;
    let usual = names.usual(stored);
    let is_matrix = is_matrix(&tensor.shape);
    let name = usual.unwrap_or_else(|| stored.to_owned());
    let part = Part::from_name(&name);
    let is_packed = tensor.kind.block().is_some_and(|(weights, _)| weights > 1);
    let mut expanded = false;
    let layout = tensor.kind.layout();
    let is_kept = match layout {
        Layout::Floats | Layout::Affine { .. } => false,
        // MLX also supports MXFP4.
        Layout::Powers => tensor.shape.len() >= 2,
        _ => storage.keeps_gguf_bits && is_matrix,
    };
    let loaded_bytes = match layout.affine_bits() {
        // The configuration already contains these factors, so the tensor is not loaded.
        _ if stored.starts_with("rope_factors_") => 0,
        _ if is_plain(&name) => {
            expanded = is_packed;
            parameters.saturating_mul(storage.compute_bytes)
        }
        _ if is_kept => layout.bytes(parameters),
        // A vector becomes floats, whatever its type.
        Some(bits) if tensor.shape.len() >= 2 => {
            let group = quantization::GROUP as u64;
            let keeps_half =
                (storage.keeps_half_factors)("affine", bits.cast_signed(), group as i32);
            let factor = if keeps_half && !layout.has_product_scales() && is_matrix {
                2
            } else {
                storage.compute_bytes
            };
            let packed = parameters.saturating_mul(u64::from(bits)) / 8;
            packed.saturating_add((parameters / group).saturating_mul(2 * factor))
        }
        _ => {
            let is_half = matches!(tensor.kind, GgmlType::F16 | GgmlType::BF16);
            if storage.keeps_halves && storage.compute_bytes > 2 && is_half && is_matrix {
                stored_bytes
            } else {
                expanded = is_packed && tensor.shape.len() >= 2;
                parameters.saturating_mul(storage.compute_bytes)
            }
        }
    };
    TensorFootprint {
        expanded,
        part,
        name,
        format: tensor.kind.name(),
        parameters,
        stored_bytes,
        loaded_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_belong_to_parts() {
        for (name, part) in [
            ("model.embed_tokens.weight", Part::Embedding),
            ("h.0.attn.c_attn.weight", Part::Attention),
            ("model.layers.3.self_attn.q_proj.scales", Part::Attention),
            ("model.layers.3.self_attn.q_norm.weight", Part::Norms),
            ("h.3.ln_1.weight", Part::Norms),
            ("model.layers.3.mlp.experts.5.up_proj.weight", Part::Experts),
            (
                "model.layers.3.block_sparse_moe.switch_mlp.up_proj.weight",
                Part::Experts,
            ),
            (
                "model.layers.3.mlp.shared_expert.up_proj.weight",
                Part::FeedForward,
            ),
            (
                "model.layers.3.block_sparse_moe.gate.weight",
                Part::FeedForward,
            ),
            ("lm_head.weight", Part::Output),
            (
                "vision_tower.encoder.layers.0.self_attn.q_proj",
                Part::Other,
            ),
            ("rope_freqs.weight", Part::Other),
        ] {
            assert_eq!(Part::from_name(name), part, "{name}");
        }
    }
}
