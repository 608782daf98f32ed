//! Describes a checkpoint and its memory needs from its headers alone: no weight is read.
//! `ModelInfo` describes a loaded model.

use std::fs;
use std::path::Path;

use inference::{ComputeType, Error, LoadOptions, Result};
use inference_formats::footprint::{Expansion, Footprint, Share};
use inference_formats::pipeline::PipelinePlan;
use inference_formats::split::SplitPlan;
use mlx_rs_core::memory;
use serde::Serialize;

use crate::adapter::stored_bytes;
use crate::arch;
pub use crate::arch::wiring::{BlockInfo, BlockKind};
use crate::backend::{
    CacheCost, OpenModel, Place, cache_options, check_attention_sums, check_keyless, copied,
    reduced,
};
use crate::checkpoint::ModelConfig;
use crate::loader::Features;
use crate::text::TextPipeline;

/// Properties of a checkpoint, read from its headers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModelReport {
    /// The `model_type`; empty if only the weights identify it.
    pub model_type: String,
    /// Whether this engine supports the architecture.
    pub supported: bool,
    /// The number of weights. A quantized weight counts as one.
    pub parameters: u64,
    /// Bytes of all tensors in the files.
    pub stored_bytes: u64,
    /// The network's parts, in the order of data flow.
    pub parts: Vec<Share>,
    /// The storage formats of weights, the largest share first.
    pub formats: Vec<Share>,
    /// Quantized matrices that loading dequantizes, the format with the greatest cost first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expansions: Vec<Expansion>,
    /// The source of the chat template; `None` without one.
    pub template: Option<String>,
    /// Tokens that end a reply.
    pub eos_tokens: Vec<u32>,
    /// The context length for which the model was trained, if the files contain it.
    pub context_length: Option<u64>,
    /// The memory that the model needs, and the memory that is available.
    pub memory: MemoryNeeds,
    /// The blocks found from the tensors' names, for an architecture whose blocks differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockInfo>,
}

/// Memory in bytes. These are estimates, and they do not include temporary buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemoryNeeds {
    /// The compute type.
    pub compute_type: ComputeType,
    /// Bytes of all weights after loading. Loading fails if they exceed the available memory.
    pub weights: u64,
    /// Keys and values of one token, quantized if the options say so; 0 without KV caches.
    pub cache_per_token: u64,
    /// The recurrent state of one sequence, independent of its length; 0 without recurrent layers.
    pub state: u64,
    /// The memory available now.
    pub available: u64,
    /// The maximum number of prompt and reply tokens together, limited by memory and by the maximum
    /// position 2^31 - 1. `None` if the weights do not fit into memory.
    pub room_for_tokens: Option<u64>,
}

impl ModelReport {
    /// Describes the model at `path` as `backend` would load it, with the compute type `compute`.
    /// `None` selects the best available backend of this engine, or the backend's default type. The
    /// name of another engine's backend counts as `None`.
    ///
    /// # Errors
    /// The errors of loading that headers and tokenizer can cause.
    pub fn read(path: &Path, backend: Option<&str>, compute: Option<ComputeType>) -> Result<Self> {
        let mut options = LoadOptions::new().with_dtype(compute);
        options.backend = backend.map(str::to_owned);
        Self::with_options(path, &options)
    }

    /// Describes the model as these options would load it, with their adapter.
    ///
    /// # Errors
    /// The errors of [`ModelReport::read`]. Also errors of options, a vindex or an adapter that do
    /// not match the model, if the headers show this.
    pub fn with_options(path: &Path, options: &LoadOptions) -> Result<Self> {
        let place = Place::named_or_best(options.backend.as_deref());
        check_attention_sums(options, place)?;
        let adapter = match &options.adapter_path {
            Some(dir) => stored_bytes(dir)?,
            None => 0,
        };
        let mut model = OpenModel::open(path, place, options.dtype)?;
        let text = model.text()?;
        let (dtype, compute) = model.compute_type();
        let half = model.has_half_caches(options)?;
        let features = Features::open(options, path, &model.config)?;
        let footprint = (
            reduced(model.footprint(), features.as_ref()),
            copied(features.as_ref(), model.on_cpu(), dtype).saturating_add(adapter),
        );
        let blocks = model.blocks()?;
        let config = &mut model.config;
        config.eos_token_ids.extend(text.tokenizer().eos_ids());
        let compute = (compute, dtype.size(), half);
        Self::new(config, &footprint, &text, compute, options, blocks)
    }

    fn new(
        config: &ModelConfig,
        (footprint, copied): &(Footprint, u64),
        text: &TextPipeline,
        (compute, compute_bytes, half): (ComputeType, usize, bool),
        options: &LoadOptions,
        blocks: Vec<BlockInfo>,
    ) -> Result<Self> {
        options.feed_forward.for_layers(config.num_hidden_layers)?;
        let model_type = config.model_type.clone().unwrap_or_default();
        let weights = footprint.loaded_bytes().saturating_add(*copied);
        let state = arch::state_bytes(config, &blocks)?;
        let numbers = arch::key_numbers(config)?;
        if numbers == 0 {
            let name = config.model_type.as_deref().unwrap_or_default();
            check_keyless(options, name)?;
        }
        let caches = cache_options(options, config.head_size(), compute_bytes, half)?;
        let cache = CacheCost::new(caches, numbers, compute_bytes);
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
                cache_per_token: cache.per_token(),
                available,
                state,
                room_for_tokens: left.map(|bytes| cache.max_tokens(bytes).min(most)),
            },
            blocks,
        })
    }
}

/// Returns the share of the model at `path` that each of `processes` processes would load, read
/// from the headers. `backend` and `compute` are as in [`ModelReport::read`].
///
/// # Errors
/// Errors of loading a divided model. Kind `Unsupported` names the part that cannot be divided.
pub fn split_plan(
    path: &Path,
    backend: Option<&str>,
    compute: Option<ComputeType>,
    processes: usize,
) -> Result<SplitPlan> {
    let place = Place::named_or_best(backend);
    let model = OpenModel::open(path, place, compute)?;
    SplitPlan::new(&model.config, &model.footprint(), processes)
        .map_err(|e| Error::from(e).with_path(path))
}

/// Returns the layers of the model at `path` that each of `processes` processes would load.
/// `backend` and `compute` are as in [`ModelReport::read`].
///
/// # Errors
/// The errors of [`split_plan`].
pub fn pipeline_plan(
    path: &Path,
    backend: Option<&str>,
    compute: Option<ComputeType>,
    processes: usize,
) -> Result<PipelinePlan> {
    let model = OpenModel::open(path, Place::named_or_best(backend), compute)?;
    PipelinePlan::new(&model.config, &model.footprint(), processes)
        .map_err(|e| Error::from(e).with_path(path))
}

/// Returns the bytes available to a new program: the kernel's estimate, limited by the control
/// group. Returns the machine's memory if neither is known.
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
