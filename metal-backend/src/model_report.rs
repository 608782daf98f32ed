//! What a checkpoint is and what it needs to run, from its headers alone: no weight is read. What
//! a loaded model is, `ModelInfo` says.

use std::fs;
use std::path::Path;

use inference::{ComputeType, Error, LoadOptions, Result};
use inference_formats::footprint::{Expansion, Footprint, Share};
use inference_formats::pipeline::PipelinePlan;
use inference_formats::split::SplitPlan;
use mlx_rs_core::memory;
use serde::Serialize;

use crate::arch;
pub use crate::arch::wiring::{BlockInfo, BlockKind};
use crate::backend::{Place, copied, reduced};
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::checkpoint::{Gguf, ModelConfig, ModelFiles, gguf_config, locate};
use crate::divided;
use crate::loader::Features;
use crate::text::TextPipeline;

/// What the headers of a checkpoint say.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModelReport {
    /// Its `model_type`; empty where only the weights tell.
    pub model_type: String,
    /// Whether this engine computes it.
    pub supported: bool,
    /// Weights; a quantized one counts as one.
    pub parameters: u64,
    /// Bytes of all tensors in the files.
    pub stored_bytes: u64,
    /// The network's parts, in the order in which data passes them.
    pub parts: Vec<Share>,
    /// How weights are stored, the largest share first.
    pub formats: Vec<Share>,
    /// Packed matrices that become plain numbers when they are loaded, the costliest format first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expansions: Vec<Expansion>,
    /// Where the chat template is from; `None` without one.
    pub template: Option<String>,
    /// Tokens that end a reply.
    pub eos_tokens: Vec<u32>,
    /// The positions that the model was made for, where the files say so.
    pub context_length: Option<u64>,
    /// What the model needs to run, and whether it is there.
    pub memory: MemoryNeeds,
    /// The blocks that the tensors' names tell, of an architecture whose blocks differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockInfo>,
}

/// Memory, in bytes. These are estimates: the buffers of a computation come on top.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemoryNeeds {
    /// The type computed in.
    pub compute_type: ComputeType,
    /// All weights once they are loaded. Loading refuses a model by the same number.
    pub weights: u64,
    /// Keys and values of one token; 0 where no layer keeps any.
    pub cache_per_token: u64,
    /// The state of one sequence, the same at every length; 0 without recurrent layers.
    pub state: u64,
    /// What is free now.
    pub available: u64,
    /// Tokens of prompt and reply together that fit, at most 2^31 - 1, which positions are counted
    /// to; `None` where the weights do not fit.
    pub room_for_tokens: Option<u64>,
}

impl ModelReport {
    /// Looks at the model at `path` as `backend` would load it, computing in `compute`. `None`
    /// stands for the best backend of this engine that works here, and for its choice of a type.
    /// The name of another engine counts as `None`.
    ///
    /// # Errors
    /// Those of loading, as far as it reads headers and the tokenizer.
    pub fn of(path: &Path, backend: Option<&str>, compute: Option<ComputeType>) -> Result<Self> {
        let mut options = LoadOptions::new().with_dtype(compute);
        options.backend = backend.map(str::to_owned);
        Self::with_options(path, &options)
    }

    /// The same as these options would load it. Only the backend, the type and what says how
    /// feed-forward parts are computed count.
    ///
    /// # Errors
    /// As [`ModelReport::of`], and those of a vindex that does not fit the model.
    pub fn with_options(path: &Path, options: &LoadOptions) -> Result<Self> {
        let (place, compute) = (
            Place::named_or_best(options.backend.as_deref()),
            options.dtype,
        );
        match locate(path)? {
            ModelFiles::Directory(dir) => {
                let mut config = ModelConfig::from_file(&dir.join("config.json"))?;
                let checkpoint = SafetensorsCheckpoint::open(&dir)?;
                let text =
                    TextPipeline::from_dir(&dir, config.model_type.as_deref().unwrap_or_default())?;
                let stored = arch::stored_type(&config, checkpoint.float_type());
                let (dtype, compute) = place.compute_type(compute, stored)?;
                let storage = place.weight_storage(dtype);
                let footprint = Footprint::of_safetensors(&checkpoint, &config, &storage);
                let on_cpu = place.uses_kernels(dtype);
                let features = Features::open(options, path, &config, (on_cpu, dtype))?;
                let footprint = (
                    reduced(footprint, features.as_ref()),
                    copied(features.as_ref()),
                );
                config.eos_token_ids.extend(text.tokenizer().eos_ids());
                let blocks = arch::blocks(&config, checkpoint.names())?;
                Self::new(&config, &footprint, &text, compute, dtype.size(), blocks)
            }
            ModelFiles::Gguf(file) => {
                let gguf = Gguf::open(&file)?;
                let mut config = gguf_config::config(&gguf)?;
                let parts = gguf_config::tokenizer_parts(&gguf)?;
                let model_type = config.model_type.clone().unwrap_or_default();
                let text = TextPipeline::from_gguf(&parts, &model_type)?;
                let (dtype, compute) = place.compute_type(compute, safetensors::Dtype::F16)?;
                let storage = place.weight_storage(dtype);
                let footprint = Footprint::of_gguf(&gguf, &config, &storage);
                let on_cpu = place.uses_kernels(dtype);
                let features = Features::open(options, path, &config, (on_cpu, dtype))?;
                let footprint = (
                    reduced(footprint, features.as_ref()),
                    copied(features.as_ref()),
                );
                config.eos_token_ids.extend(text.tokenizer().eos_ids());
                Self::new(
                    &config,
                    &footprint,
                    &text,
                    compute,
                    dtype.size(),
                    Vec::new(),
                )
            }
        }
    }

    fn new(
        config: &ModelConfig,
        (footprint, copied): &(Footprint, u64),
        text: &TextPipeline,
        compute: ComputeType,
        compute_bytes: usize,
        blocks: Vec<BlockInfo>,
    ) -> Result<Self> {
        let model_type = config.model_type.clone().unwrap_or_default();
        let weights = footprint.loaded_bytes().saturating_add(*copied);
        let state = arch::state_bytes(config, &blocks)?;
        let cache_per_token = keys_per_token(config, compute_bytes);
        let available = available_memory();
        let left = available.checked_sub(weights.saturating_add(state));
        let most = i32::MAX.unsigned_abs().into();
        let mut eos_tokens = config.eos_token_ids.clone();
        eos_tokens.sort_unstable();
        eos_tokens.dedup();
        Ok(Self {
            supported: model_type.is_empty() || arch::names().any(|name| name == model_type),
            model_type,
            parameters: footprint.parameters(),
            stored_bytes: footprint.stored_bytes(),
            parts: footprint.parts(),
            formats: footprint.formats(),
            expansions: footprint.expansions(),
            template: text.template().map(|t| t.origin().to_owned()),
            eos_tokens,
            context_length: config.max_position_embeddings.map(|n| n as u64),
            memory: MemoryNeeds {
                compute_type: compute,
                weights,
                cache_per_token,
                available,
                state,
                room_for_tokens: left.map(|bytes| {
                    bytes
                        .checked_div(cache_per_token)
                        .map_or(most, |n| n.min(most))
                }),
            },
            blocks,
        })
    }
}

/// What each of so many processes would hold of the model at `path`, by its headers. `backend` and
/// `compute` are as in [`ModelReport::of`].
///
/// # Errors
/// Those of loading a model that is divided: also of kind `Unsupported`, naming what does not
/// divide.
pub fn split_plan(
    path: &Path,
    backend: Option<&str>,
    compute: Option<ComputeType>,
    processes: usize,
) -> Result<SplitPlan> {
    let place = Place::named_or_best(backend);
    if let ModelFiles::Gguf(file) = locate(path)? {
        return Err(divided::tensors_of_gguf().with_path(file));
    }
    let (config, footprint) = headers(path, place, compute)?;
    SplitPlan::new(&config, &footprint, processes).map_err(|e| Error::from(e).with_path(path))
}

/// Which layers of the model at `path` each of so many processes would hold. `backend` and
/// `compute` are as in [`ModelReport::of`].
///
/// # Errors
/// As [`split_plan`].
pub fn pipeline_plan(
    path: &Path,
    backend: Option<&str>,
    compute: Option<ComputeType>,
    processes: usize,
) -> Result<PipelinePlan> {
    let (config, footprint) = headers(path, Place::named_or_best(backend), compute)?;
    PipelinePlan::new(&config, &footprint, processes).map_err(|e| Error::from(e).with_path(path))
}

/// The configuration of the model at `path`, and the bytes of its tensors.
fn headers(
    path: &Path,
    place: Place,
    compute: Option<ComputeType>,
) -> Result<(ModelConfig, Footprint)> {
    match locate(path)? {
        ModelFiles::Directory(dir) => {
            let config = ModelConfig::from_file(&dir.join("config.json"))?;
            let checkpoint = SafetensorsCheckpoint::open(&dir)?;
            let stored = arch::stored_type(&config, checkpoint.float_type());
            let (dtype, _) = place.compute_type(compute, stored)?;
            let storage = place.weight_storage(dtype);
            let footprint = Footprint::of_safetensors(&checkpoint, &config, &storage);
            Ok((config, footprint))
        }
        ModelFiles::Gguf(file) => {
            let gguf = Gguf::open(&file)?;
            let config = gguf_config::config(&gguf)?;
            let (dtype, _) = place.compute_type(compute, safetensors::Dtype::F16)?;
            let footprint = Footprint::of_gguf(&gguf, &config, &place.weight_storage(dtype));
            Ok((config, footprint))
        }
    }
}

/// Bytes of keys and values of one token in all layers that keep them.
fn keys_per_token(config: &ModelConfig, compute_bytes: usize) -> u64 {
    let head_dim = config
        .head_dim
        .unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
    let layers = 0..config.num_hidden_layers;
    let layers = layers.filter(|&layer| config.has_keys(layer)).count();
    [
        2, // keys and values
        layers,
        config.num_key_value_heads,
        head_dim,
    ]
    .iter()
    .fold(compute_bytes as u64, |bytes, n| {
        bytes.saturating_mul(*n as u64)
    })
}

/// Bytes that a new program could use now: what the kernel says, within the limit of the control
/// group; where neither can be read, the machine's memory.
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
    fn some_memory_is_available() {
        assert!(available_memory() > 1 << 20);
    }
}
