//! What a checkpoint is and what it would take to run it, from its headers alone: no weight is read and
//! nothing is loaded. What a loaded model is, `ModelInfo` says.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use inference::{ComputeType, Result};
use mlx_rs_core::{cpu, cuda_is_available, memory, metal_is_available};
use safetensors::Dtype;
use serde::Serialize;

use crate::arch;
use crate::checkpoint::gguf::{GgmlType, GgufTensor};
use crate::checkpoint::gguf_config::{self, GgufNames};
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::checkpoint::{Gguf, ModelConfig, ModelFiles, gguf_quant, locate};
use crate::text::TextPipeline;

/// What the headers of a checkpoint say.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Survey {
    /// Its `model_type`; empty where only the weights tell.
    pub model_type: String,
    /// Whether this engine computes it.
    pub supported: bool,
    /// Weights, a quantized one counted as one.
    pub parameters: u64,
    /// Bytes of all tensors as they are stored.
    pub stored_bytes: u64,
    /// The network's parts, in the order in which data goes through them.
    pub parts: Vec<Share>,
    /// How weights are stored, the largest share first.
    pub formats: Vec<Share>,
    /// Where the chat template is from; `None` without one.
    pub template: Option<String>,
    /// Tokens that end a reply.
    pub eos_tokens: Vec<u32>,
    /// What it needs to run, and whether it is there.
    pub memory: Needs,
}

/// A part of the weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Share {
    /// The part's name, or the format's.
    pub name: String,
    /// Weights.
    pub parameters: u64,
    /// Bytes as they are stored.
    pub stored_bytes: u64,
    /// Bytes once they are loaded.
    pub loaded_bytes: u64,
}

/// Memory, in bytes. Estimates: what a computation needs on top comes and goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Needs {
    /// The type computed in.
    pub compute_type: ComputeType,
    /// All weights once they are loaded.
    pub weights: u64,
    /// Keys and values of one token.
    pub cache_per_token: u64,
    /// What is free now.
    pub available: u64,
    /// Tokens of prompt and reply together that there is room for; `None` where the weights do not fit.
    pub room_for_tokens: Option<u64>,
}

/// The parts, in order.
const PARTS: [&str; 7] = [
    "embedding",
    "attention",
    "feed-forward",
    "experts",
    "norms",
    "output",
    "other",
];

/// What is known of one tensor.
struct Entry {
    name: String,
    format: String,
    parameters: u64,
    stored: u64,
    loaded: u64,
}

impl Survey {
    /// Looks at the model at `path`. It is computed in `compute`; `None` is what the backend that is
    /// best here would choose.
    ///
    /// # Errors
    /// As loading it, as far as that reads headers and the tokenizer.
    pub fn of(path: &Path, compute: Option<ComputeType>) -> Result<Self> {
        let gpu = metal_is_available() || cuda_is_available();
        let halves_stay = !gpu && cpu::DenseMatrix::supports(mlx_rs_core::Dtype::Bfloat16);
        match locate(path)? {
            ModelFiles::Directory(dir) => {
                let mut config = ModelConfig::from_file(&dir.join("config.json"))?;
                let checkpoint = SafetensorsCheckpoint::open(&dir)?;
                let text =
                    TextPipeline::from_dir(&dir, config.model_type.as_deref().unwrap_or_default())?;
                let compute = compute.unwrap_or_else(|| match stored_type(&checkpoint) {
                    _ if !gpu => ComputeType::Float32,
                    Dtype::F16 => ComputeType::Float16,
                    Dtype::BF16 => ComputeType::BFloat16,
                    _ => ComputeType::Float32,
                });
                let entries = of_safetensors(&checkpoint, &config, width(compute), halves_stay);
                config.eos_token_ids.extend(text.tokenizer().eos_ids());
                Ok(Self::put_together(&config, &entries, &text, compute))
            }
            ModelFiles::Gguf(file) => {
                let gguf = Gguf::open(&file)?;
                let mut config = gguf_config::config(&gguf)?;
                let parts = gguf_config::tokenizer_parts(&gguf)?;
                let model_type = config.model_type.clone().unwrap_or_default();
                let text = TextPipeline::from_gguf(&parts, &model_type)?;
                let default = if gpu {
                    ComputeType::Float16
                } else {
                    ComputeType::Float32
                };
                let compute = compute.unwrap_or(default);
                let names = GgufNames::new(&model_type);
                let entries: Vec<_> = gguf
                    .tensors()
                    .iter()
                    .map(|(name, tensor)| {
                        let width = width(compute);
                        of_gguf(&names, name, Blocks::of(tensor), (width, halves_stay))
                    })
                    .collect();
                config.eos_token_ids.extend(text.tokenizer().eos_ids());
                Ok(Self::put_together(&config, &entries, &text, compute))
            }
        }
    }

    fn put_together(
        config: &ModelConfig,
        entries: &[Entry],
        text: &TextPipeline,
        compute: ComputeType,
    ) -> Self {
        let model_type = config.model_type.clone().unwrap_or_default();
        let sum = |of: fn(&Entry) -> u64| entries.iter().map(of).fold(0, u64::saturating_add);
        let mut parts = shares(entries, |e| part_of(&e.name).to_owned());
        parts.sort_by_key(|share| PARTS.iter().position(|name| *name == share.name));
        let mut formats = shares(entries, |e| e.format.clone());
        formats.sort_by(|a, b| (b.stored_bytes, &a.name).cmp(&(a.stored_bytes, &b.name)));
        let weights = sum(|e| e.loaded);
        let head_dim = config
            .head_dim
            .unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
        let cache_per_token = [
            2,
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim,
        ]
        .iter()
        .fold(width(compute), |bytes, n| bytes.saturating_mul(*n as u64));
        let available = available_memory();
        let room = available.checked_sub(weights);
        let mut eos_tokens = config.eos_token_ids.clone();
        eos_tokens.sort_unstable();
        eos_tokens.dedup();
        Self {
            supported: model_type.is_empty() || arch::names().any(|name| name == model_type),
            model_type,
            parameters: sum(|e| e.parameters),
            stored_bytes: sum(|e| e.stored),
            parts,
            formats,
            template: text.template().map(|t| t.origin().to_owned()),
            eos_tokens,
            memory: Needs {
                compute_type: compute,
                weights,
                cache_per_token,
                available,
                room_for_tokens: room.map(|bytes| bytes / cache_per_token.max(1)),
            },
        }
    }
}

/// Bytes of a number.
fn width(compute: ComputeType) -> u64 {
    match compute {
        ComputeType::Float16 | ComputeType::BFloat16 => 2,
        _ => 4,
    }
}

fn shares(entries: &[Entry], name: impl Fn(&Entry) -> String) -> Vec<Share> {
    let mut found: BTreeMap<String, Share> = BTreeMap::new();
    for entry in entries {
        let name = name(entry);
        let share = found.entry(name.clone()).or_insert(Share {
            name,
            parameters: 0,
            stored_bytes: 0,
            loaded_bytes: 0,
        });
        share.parameters = share.parameters.saturating_add(entry.parameters);
        share.stored_bytes = share.stored_bytes.saturating_add(entry.stored);
        share.loaded_bytes = share.loaded_bytes.saturating_add(entry.loaded);
    }
    found.into_values().collect()
}

/// The part that a tensor, by its usual name, belongs to.
fn part_of(name: &str) -> &'static str {
    let has = |part: &str| name.contains(part);
    let tower = ["vision", "visual", "audio", "multi_modal", "projector"];
    if tower.iter().any(|t| has(t)) {
        "other"
    } else if has("lm_head") {
        "output"
    } else if has("embed_tokens") || has("wte") || has("wpe") {
        "embedding"
    } else if has("norm") || has(".ln_") || name.starts_with("ln_f") {
        "norms"
    } else if has("attn") {
        "attention"
    } else if has("experts") || has("switch_mlp") {
        "experts"
    } else if has("mlp") || has("block_sparse_moe") || has("router") {
        "feed-forward"
    } else {
        "other"
    }
}

fn of_safetensors(
    checkpoint: &SafetensorsCheckpoint,
    config: &ModelConfig,
    width: u64,
    halves_stay: bool,
) -> Vec<Entry> {
    let is_packed = |path: &str| {
        let dtype = |part: &str| checkpoint.info(&format!("{path}.{part}")).map(|i| i.dtype);
        dtype("weight") == Some(Dtype::U32) && dtype("scales").is_some()
    };
    checkpoint
        .names()
        .filter_map(|name| {
            let info = checkpoint.info(name)?;
            let elements = info
                .shape
                .iter()
                .fold(1u64, |n, &d| n.saturating_mul(d as u64));
            let stored = info.nbytes as u64;
            let (path, part) = name.rsplit_once('.').unwrap_or(("", name));
            let is_float = matches!(
                info.dtype,
                Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16
            );
            // As `Weights::matrix` has it: experts are stacked as what is computed with.
            let stays = width > 2
                && matches!(info.dtype, Dtype::F16 | Dtype::BF16)
                && info.shape.len() == 2
                && part == "weight"
                && part_of(name) != "experts"
                && halves_stay;
            let as_float = if stays {
                stored
            } else {
                elements.saturating_mul(width)
            };
            let quantized = config
                .quantization_overrides
                .get(path)
                .cloned()
                .unwrap_or_else(|| config.quantization.clone());
            let (format, parameters, loaded) = match quantized {
                Some(q) if is_packed(path) && matches!(part, "weight" | "scales" | "biases") => {
                    let bits = u64::from(q.bits.unsigned_abs()).max(1);
                    let parameters = if part == "weight" {
                        elements.saturating_mul(32) / bits
                    } else {
                        0
                    };
                    let format = format!("{} {} bits, groups of {}", q.mode, q.bits, q.group_size);
                    (format, parameters, if is_float { as_float } else { stored })
                }
                // As OpenAI packs experts: two weights in a byte.
                Some(_) if part.ends_with("_blocks") => {
                    ("mxfp4".into(), elements.saturating_mul(2), stored)
                }
                Some(_) if part.ends_with("_scales") => ("mxfp4".into(), 0, stored),
                _ => {
                    let format = format!("{:?}", info.dtype);
                    (format, elements, if is_float { as_float } else { stored })
                }
            };
            let loaded = if part_of(name) == "other" { 0 } else { loaded };
            Some(Entry {
                name: name.to_owned(),
                format,
                parameters,
                stored,
                loaded,
            })
        })
        .collect()
}

/// How a GGUF tensor is stored.
struct Blocks<'a> {
    kind: GgmlType,
    shape: &'a [usize],
    nbytes: usize,
}

impl<'a> Blocks<'a> {
    fn of(tensor: &'a GgufTensor) -> Self {
        Self {
            kind: tensor.kind,
            shape: &tensor.shape,
            nbytes: tensor.nbytes,
        }
    }
}

fn of_gguf(
    names: &GgufNames,
    name: &str,
    tensor: Blocks<'_>,
    (width, halves_stay): (u64, bool),
) -> Entry {
    let parameters = tensor
        .shape
        .iter()
        .fold(1u64, |n, &d| n.saturating_mul(d as u64));
    let stored = tensor.nbytes as u64;
    let loaded = match gguf_quant::repack(tensor.kind, &[]) {
        // The packed words, and scale and bias for each 32.
        Some(packed) => {
            let bits = u64::from(packed.bits.unsigned_abs());
            // The kernels keep factors as halves where that is exact: those of K blocks are products.
            let product = matches!(tensor.kind, GgmlType::Q4K | GgmlType::Q5K);
            let halves = halves_stay && !product && tensor.shape.len() == 2;
            let factor = if halves { 2 } else { width };
            (parameters.saturating_mul(bits) / 8).saturating_add(parameters / 16 * factor)
        }
        // As `Weights::matrix` has it; stacks of experts have three axes.
        None if halves_stay
            && width > 2
            && matches!(tensor.kind, GgmlType::F16 | GgmlType::BF16)
            && tensor.shape.len() == 2 =>
        {
            stored
        }
        None => parameters.saturating_mul(width),
    };
    Entry {
        name: names.usual(name).unwrap_or_else(|| name.to_owned()),
        format: tensor.kind.name(),
        parameters,
        stored,
        loaded,
    }
}

/// The float type that most bytes are in.
fn stored_type(checkpoint: &SafetensorsCheckpoint) -> Dtype {
    let bytes = |dtype: Dtype| -> usize {
        checkpoint
            .names()
            .filter_map(|name| checkpoint.info(name))
            .filter(|info| info.dtype == dtype)
            .map(|info| info.nbytes)
            .sum()
    };
    [Dtype::F32, Dtype::F16, Dtype::BF16]
        .into_iter()
        .max_by_key(|dtype| bytes(*dtype))
        .unwrap_or(Dtype::F32)
}

/// Bytes that a new program could use now: what the kernel says, within the limit of the control group;
/// where neither can be read, the machine's memory.
#[must_use]
pub fn available_memory() -> u64 {
    let read = |path: &str| fs::read_to_string(path).ok();
    let free = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        kib.checked_mul(1024)
    });
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .map(|most| most.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    [free, group]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or_else(memory::budget)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_belong_to_parts() {
        for (name, part) in [
            ("model.embed_tokens.weight", "embedding"),
            ("h.0.attn.c_attn.weight", "attention"),
            ("model.layers.3.self_attn.q_proj.scales", "attention"),
            ("model.layers.3.self_attn.q_norm.weight", "norms"),
            ("h.3.ln_1.weight", "norms"),
            ("model.layers.3.mlp.experts.5.up_proj.weight", "experts"),
            (
                "model.layers.3.block_sparse_moe.switch_mlp.up_proj.weight",
                "experts",
            ),
            (
                "model.layers.3.mlp.shared_expert.up_proj.weight",
                "feed-forward",
            ),
            (
                "model.layers.3.block_sparse_moe.gate.weight",
                "feed-forward",
            ),
            ("lm_head.weight", "output"),
            ("vision_tower.encoder.layers.0.self_attn.q_proj", "other"),
            ("rope_freqs.weight", "other"),
        ] {
            assert_eq!(part_of(name), part, "{name}");
        }
        assert!(PARTS.contains(&part_of("x")));
    }

    #[test]
    fn gguf_blocks_are_counted_as_they_will_be_loaded() {
        let names = GgufNames::new("llama");
        let stays = std::cell::Cell::new(true);
        let of = |kind: GgmlType, nbytes: usize, width: u64| {
            let tensor = Blocks {
                kind,
                shape: &[32, 256],
                nbytes,
            };
            let entry = of_gguf(&names, "blk.0.ffn_up.weight", tensor, (width, stays.get()));
            assert_eq!(entry.parameters, 8192);
            entry.loaded
        };
        // 4 bits each, and 256 groups with two numbers, which the kernels keep as halves.
        assert_eq!(of(GgmlType::Q4_1, 5120, 4), 4096 + 256 * 4);
        assert_eq!(of(GgmlType::Q4K, 4608, 4), 4096 + 256 * 8);
        assert_eq!(of(GgmlType::Q8_0, 8704, 2), 8192 + 256 * 4);
        assert_eq!(of(GgmlType::Q6K, 6720, 4), 4 * 8192);
        assert_eq!(of(GgmlType::BF16, 16384, 2), 2 * 8192);
        // Matrices of 16 bits stay so for the kernels, and become what is computed with elsewhere.
        assert_eq!(of(GgmlType::F16, 16384, 4), 2 * 8192);
        stays.set(false);
        assert_eq!(of(GgmlType::Q4_1, 5120, 4), 4096 + 256 * 8);
        assert_eq!(of(GgmlType::F16, 16384, 4), 4 * 8192);
    }

    #[test]
    fn some_memory_is_available() {
        assert!(available_memory() > 1 << 20);
    }
}
