//! Options for loading a model.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{FeedForwardPlan, first_changed, invalid, unsupported};
use crate::error::{Error, Result};

/// The floating-point type in which a model computes.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeType {
    /// Single precision.
    Float32,
    /// Half precision.
    Float16,
    /// Brain float.
    BFloat16,
}

impl ComputeType {
    /// `float32`, `float16` or `bfloat16`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ComputeType::Float32 => "float32",
            ComputeType::Float16 => "float16",
            ComputeType::BFloat16 => "bfloat16",
        }
    }
}

impl std::fmt::Display for ComputeType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ComputeType {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "float32" | "f32" => Ok(ComputeType::Float32),
            "float16" | "f16" => Ok(ComputeType::Float16),
            "bfloat16" | "bf16" => Ok(ComputeType::BFloat16),
            _ => invalid(format!(
                "compute type `{s}` is not one of float32, float16, bfloat16"
            )),
        }
    }
}

/// The precision of prefill, where a backend has a choice.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// The compute type of the model.
    Exact,
    /// The fastest form of the backend: inputs of quantized matrices are rounded to 8-bit integers.
    Fast,
}

impl Precision {
    /// `exact` or `fast`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Precision::Exact => "exact",
            Precision::Fast => "fast",
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Precision {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "exact" => Ok(Precision::Exact),
            "fast" => Ok(Precision::Fast),
            _ => invalid(format!("precision `{s}` is not one of exact, fast")),
        }
    }
}

/// The type in which attention layers compute: scores, their softmax, and the sums over values.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionSums {
    /// The backend's fast type, with sums in float32.
    #[default]
    Native,
    /// Double precision. It is slow, and serves to check the native type. The model computes
    /// queries, keys and values in its usual type.
    Float64,
}

impl AttentionSums {
    /// `native` or `float64`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            AttentionSums::Native => "native",
            AttentionSums::Float64 => "float64",
        }
    }
}

impl std::fmt::Display for AttentionSums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for AttentionSums {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "native" => Ok(AttentionSums::Native),
            "float64" | "f64" => Ok(AttentionSums::Float64),
            _ => invalid(format!(
                "type of attention `{s}` is not one of native, float64"
            )),
        }
    }
}

/// How the processes of a group compute one model together.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Each process has the whole model and computes alone.
    #[default]
    None,
    /// Each process computes a part of every layer: some attention heads and a slice of the
    /// feed-forward width. All processes must make equal calls in the same order, and all receive
    /// the same logits. A group of one process computes the whole model.
    Tensor,
    /// Each process computes consecutive layers, and sends its output to the next process. The
    /// rules for calls and logits are those of [`Split::Tensor`].
    Pipeline,
}

/// Options for loading a model.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoadOptions {
    /// The backend's name; `None` lets the registry choose.
    pub backend: Option<String>,
    /// Maximum number of positions in each layer's KV cache; `None` sets no limit. Longer prompts
    /// and replies continue, but the cache drops its oldest positions, except the first few.
    pub context_len: Option<usize>,
    /// Number of layers to put on the GPU; `None` or -1 means all. A backend with one device
    /// ignores this option.
    pub gpu_layers: Option<i32>,
    /// Number of concurrent requests to prepare for; `None` means one. The backend keeps the caches
    /// of recent requests, for prompts with a common prefix. With one slot it keeps one cache, with
    /// more slots several per slot.
    pub parallel_slots: Option<usize>,
    /// A directory with a trained adapter to apply.
    pub adapter_path: Option<PathBuf>,
    /// Bits per value in the KV cache: 32 or 16 for floats, or 8, 6, 5, 4, 3 or 2 for quantized
    /// values. `None` leaves the choice to the backend.
    ///
    /// With `None`, the engine stores the compute type. It stores float16 instead if the CPU has
    /// AVX2, the floats in the model's files have 16 bits, `precision` is not exact, and `dtype` is
    /// not float32.
    ///
    /// With 16 and the compute type float32, caches are float16, and values beyond its range become
    /// its greatest value. Layers with a sliding window are never quantized, but 16 applies to
    /// them, too.
    pub kv_bits: Option<u32>,
    /// Number of cache values that share a scale: 32, 64 or 128.
    pub kv_group_size: u32,
    /// The cache is quantized once it has more positions than this; 0 quantizes from the start.
    pub quantized_kv_start: usize,
    /// A smaller model with the same vocabulary, which proposes tokens for speculative decoding.
    /// Requests that run together in a batch use it, too.
    pub draft_model: Option<PathBuf>,
    /// A Jinja chat template that replaces the model's own; `None` keeps the model's own.
    pub chat_template: Option<String>,
    /// The compute type; `None` lets the backend choose for its device.
    pub dtype: Option<ComputeType>,
    /// The precision of prefill; `None` lets the backend choose.
    pub precision: Option<Precision>,
    /// The type in which attention layers compute. Double precision needs a CPU.
    pub attention_sums: AttentionSums,
    /// How the model is divided among the processes of its group.
    pub split: Split,
    /// The strategy of each layer's feed-forward part.
    pub feed_forward: FeedForwardPlan,
    /// A directory with the features of this model's feed-forward parts, for layers that
    /// [walk](crate::FeedForwardStrategy::Walk). `mlx vindex build` writes such a directory. Its
    /// files are mapped into memory, so they must not change while the model is loaded.
    pub vindex: Option<PathBuf>,
    /// Skip the feed-forward weights of walking layers in the model's files, and read the gate from
    /// the vindex, too. This saves the memory of these weights. Without this option, a quantized
    /// gate of the model's files can be used, which is faster.
    pub walk_only: bool,
    /// A directory for the caches of computed prompts. A later process reads a cache from there,
    /// and does not compute the prompt again. The directory is created if it is missing.
    pub cache_dir: Option<PathBuf>,
    /// The maximum total size in bytes of the files in [`cache_dir`](Self::cache_dir). Beyond it,
    /// the least recently used files of this model are removed.
    pub cache_dir_bytes: u64,
    /// The memory limit in bytes for the KV caches of finished requests, which later requests with
    /// the same beginning reuse. Beyond it, the least recently used caches are dropped. 0 keeps no
    /// caches. `None` leaves the limit to the backend. A draft model's caches have the same limit.
    pub prompt_cache_bytes: Option<u64>,
}

/// The default of [`LoadOptions::cache_dir_bytes`]: 4 GiB.
const CACHE_DIR_BYTES: u64 = 4 << 30;

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            backend: None,
            context_len: None,
            gpu_layers: None,
            parallel_slots: None,
            adapter_path: None,
            kv_bits: None,
            kv_group_size: 64,
            quantized_kv_start: 0,
            draft_model: None,
            chat_template: None,
            dtype: None,
            precision: None,
            attention_sums: AttentionSums::Native,
            split: Split::None,
            feed_forward: FeedForwardPlan::dense(),
            vindex: None,
            walk_only: false,
            cache_dir: None,
            cache_dir_bytes: CACHE_DIR_BYTES,
            prompt_cache_bytes: None,
        }
    }
}

impl LoadOptions {
    /// Creates options with the default values.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Sets the maximum positions that each layer's cache keeps.
        with_context_len(context_len: impl Into<Option<usize>>);
        /// Sets the layers to put on the GPU.
        with_gpu_layers(gpu_layers: impl Into<Option<i32>>);
        /// Sets the number of requests to prepare for.
        with_parallel_slots(parallel_slots: impl Into<Option<usize>>);
        /// Sets the chat template in place of the model's.
        with_chat_template(chat_template: impl Into<Option<String>>);
        /// Sets the compute type.
        with_dtype(dtype: impl Into<Option<ComputeType>>);
        /// Sets the precision of prefill.
        with_precision(precision: impl Into<Option<Precision>>);
        /// Sets the type in which attention layers compute.
        with_attention_sums(attention_sums: AttentionSums);
        /// Sets the bits per value in the KV cache.
        with_kv_bits(kv_bits: impl Into<Option<u32>>);
        /// Sets the number of cache values that share a scale.
        with_kv_group_size(kv_group_size: u32);
        /// Sets the number of positions above which the cache is quantized.
        with_quantized_kv_start(quantized_kv_start: usize);
        /// Sets how the model is divided.
        with_split(split: Split);
        /// Sets the strategies of feed-forward parts.
        with_feed_forward(feed_forward: FeedForwardPlan);
        /// Sets the directory with features.
        with_vindex(vindex: impl Into<Option<PathBuf>>);
        /// Sets whether to skip the feed-forward weights of walking layers in the model's files.
        with_walk_only(walk_only: bool);
        /// Sets the draft model.
        with_draft_model(draft_model: impl Into<Option<PathBuf>>);
        /// Sets the directory of computed prompts.
        with_cache_dir(cache_dir: impl Into<Option<PathBuf>>);
        /// Sets the maximum total size in bytes of the files in the directory of computed prompts.
        with_cache_dir_bytes(cache_dir_bytes: u64);
        /// Sets the memory limit in bytes for the KV caches of finished requests.
        with_prompt_cache_bytes(prompt_cache_bytes: impl Into<Option<u64>>);
    }

    /// Sets the backend's name.
    #[must_use]
    pub fn with_backend(mut self, name: impl Into<String>) -> Self {
        self.backend = Some(name.into());
        self
    }

    /// Refuses every option that differs from its default and is not in `honored`, as
    /// [`GenerateOptions::refuse_all_but`](crate::GenerateOptions::refuse_all_but) does. The
    /// backend's name and `gpu_layers` are never refused; a backend with one device ignores
    /// `gpu_layers`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) naming `backend` and the option.
    pub fn refuse_all_but(&self, backend: &str, honored: &[&str]) -> Result<()> {
        match self.first_not_of(honored)? {
            Some(name) => unsupported(backend, &name),
            None => Ok(()),
        }
    }

    /// The first option that [`LoadOptions::refuse_all_but`] would refuse, for backends with their
    /// own message.
    ///
    /// # Errors
    /// Currently none, because every load option can be represented in JSON.
    pub fn first_not_of(&self, honored: &[&str]) -> Result<Option<String>> {
        let known =
            |name: &str| honored.contains(&name) || matches!(name, "backend" | "gpu_layers");
        first_changed(self, &Self::default(), known)
    }

    /// Sets the adapter's directory.
    #[must_use]
    pub fn with_adapter_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.adapter_path = Some(path.into());
        self
    }

    fn check_cache_dir(&self) -> Result<()> {
        let Some(dir) = &self.cache_dir else {
            return Ok(());
        };
        if dir.as_os_str().is_empty() {
            return invalid(String::from(
                "cache_dir is empty; it must name a directory, or be left out",
            ));
        }
        if self.cache_dir_bytes == 0 {
            return invalid(String::from("cache_dir_bytes is 0; it must be at least 1"));
        }
        if self.split != Split::None {
            return invalid(String::from(
                "split and cache_dir do not go together: each process has a part of the keys; \
                 leave one of them out",
            ));
        }
        if self.vindex.is_some() {
            return invalid(String::from(
                "vindex and cache_dir do not go together: computed prompts do not say which vindex \
                 they come from; leave one of them out",
            ));
        }
        Ok(())
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) naming the field, its value
    /// and the allowed values.
    pub fn validate(&self) -> Result<()> {
        if self.context_len == Some(0) {
            return invalid(String::from("context_len is 0; it must be at least 1"));
        }
        if self.parallel_slots == Some(0) {
            return invalid(String::from("parallel_slots is 0; it must be at least 1"));
        }
        if self
            .adapter_path
            .as_ref()
            .is_some_and(|p| p.as_os_str().is_empty())
        {
            return invalid(String::from(
                "adapter_path is empty; it must name a directory, or be left out",
            ));
        }
        if let Some(bits) = self.kv_bits
            && !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8 | 16 | 32)
        {
            return invalid(format!(
                "kv_bits is {bits}; it must be 2, 3, 4, 5, 6, 8, 16 or 32"
            ));
        }
        if !matches!(self.kv_group_size, 32 | 64 | 128) {
            return invalid(format!(
                "kv_group_size is {}; it must be 32, 64 or 128",
                self.kv_group_size
            ));
        }
        let is_packed = self.kv_bits.is_some_and(|bits| bits < 16);
        if is_packed && self.context_len.is_some() {
            return invalid(String::from(
                "kv_bits below 16 and context_len do not go together: a bounded cache cannot be packed, as in mlx-lm; leave one of them out",
            ));
        }
        if is_packed && self.attention_sums != AttentionSums::Native {
            return invalid(String::from(
                "kv_bits below 16 and attention_sums do not go together: packed keys are multiplied in \
                 float32; leave one of them out",
            ));
        }
        self.check_cache_dir()?;
        self.feed_forward.validate()?;
        if self.split != Split::None && !self.feed_forward.is_dense() {
            return invalid(String::from(
                "split and feed_forward do not go together: each process has a part of the features; \
                 leave one of them out",
            ));
        }
        if self.walk_only && self.vindex.is_none() {
            return invalid(String::from(
                "walk_only needs layers that walk; set vindex and feed_forward",
            ));
        }
        match (&self.vindex, self.feed_forward.walks()) {
            (None, true) => {
                return invalid(String::from(
                    "feed_forward has a layer that walks, which needs vindex: a directory that \
                     `mlx vindex build` writes",
                ));
            }
            (Some(_), false) => {
                return invalid(String::from(
                    "vindex is given, but no layer of feed_forward walks; name some, such as \
                     `0-11=dense,12-=walk:512`",
                ));
            }
            (Some(_), true) if self.adapter_path.is_some() => {
                return invalid(String::from(
                    "vindex and adapter_path do not go together: the features are those of the \
                     model without an adapter; put it into the model first (`mlx fuse`)",
                ));
            }
            _ => {}
        }
        match self.gpu_layers {
            Some(n) if n < -1 => {
                invalid(format!("gpu_layers is {n}; it must be -1 (all), 0 or more"))
            }
            _ => Ok(()),
        }
    }
}
