//! A model whose files are open: its configuration and its headers, but none of its weights.

use std::path::{Path, PathBuf};

use inference::{AttentionSums, ComputeType, LoadOptions, Result, SamplingDefaults};
use inference_formats::footprint::Footprint;
use mlx_rs_core::Dtype;
use safetensors::Dtype as FileDtype;

use super::place::Place;
use crate::arch::{self, wiring::BlockInfo};
use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::checkpoint::{Gguf, ModelConfig, ModelFiles, config, gguf_config, locate};
use crate::exec::PrefillInputs;
use crate::loader::Weights;
use crate::text::TextPipeline;

/// A model whose files are open.
pub(crate) struct OpenModel {
    /// The model's configuration, with the end-of-text tokens of `generation_config.json`.
    pub(crate) config: ModelConfig,
    files: Files,
    place: Place,
    dtype: Dtype,
    compute: ComputeType,
    /// Whether the checkpoint has 16-bit floats, and float32 was not requested.
    is_half: bool,
}

enum Files {
    Directory(PathBuf, SafetensorsCheckpoint),
    Gguf(Gguf),
}

impl OpenModel {
    /// Opens the files of the model at `path`. The model will compute on the device `place` in the
    /// type `asked`; `None` selects the default type of the device.
    ///
    /// # Errors
    /// If the files are not a model, or if the device cannot compute in this type.
    pub(crate) fn open(path: &Path, place: Place, asked: Option<ComputeType>) -> Result<Self> {
        let (config, files, stored) = match locate(path)? {
            ModelFiles::Directory(dir) => {
                let mut config = ModelConfig::from_file(&dir.join("config.json"))?;
                config.eos_token_ids.extend(generation_eos(&dir)?);
                let checkpoint = SafetensorsCheckpoint::open(&dir)?;
                let stored = arch::stored_type(&config, checkpoint.float_type());
                (config, Files::Directory(dir, checkpoint), stored)
            }
            ModelFiles::Gguf(file) => {
                let gguf = Gguf::open(&file)?;
                let config = gguf_config::config(&gguf)?;
                (config, Files::Gguf(gguf), FileDtype::F16)
            }
        };
        let (dtype, compute) = place.compute_type(asked, stored)?;
        let is_half = matches!(stored, FileDtype::F16 | FileDtype::BF16)
            && asked != Some(ComputeType::Float32);
        Ok(Self {
            config,
            files,
            place,
            dtype,
            compute,
            is_half,
        })
    }

    /// Whether caches store float16 if `kv_bits` is not set.
    ///
    /// True if the model is already limited to 16 bits: its files have 16-bit floats, the kernels
    /// round matrix inputs to at most 16 bits, and attention sums are native. Then float16 caches
    /// change the perplexity by about as little as this rounding does (docs/results.md).
    ///
    /// # Errors
    /// The errors of [`Place::prefill_inputs`].
    pub(crate) fn has_half_caches(&self, options: &LoadOptions) -> Result<bool> {
        let inputs = self.place.prefill_inputs(self.dtype, options.precision)?;
        let rounds = inputs.is_some_and(|inputs| inputs.available() != PrefillInputs::Float32);
        Ok(self.is_half && rounds && options.attention_sums == AttentionSums::Native)
    }

    /// The type in which the model computes, for MLX and for users.
    pub(crate) fn compute_type(&self) -> (Dtype, ComputeType) {
        (self.dtype, self.compute)
    }

    /// Whether the CPU kernels compute this model.
    pub(crate) fn on_cpu(&self) -> bool {
        self.place.uses_kernels(self.dtype)
    }

    /// Whether the weights are in a GGUF file.
    pub(crate) fn is_gguf(&self) -> bool {
        matches!(self.files, Files::Gguf(_))
    }

    /// The model's directory, or its GGUF file.
    pub(crate) fn path(&self) -> &Path {
        match &self.files {
            Files::Directory(dir, _) => dir,
            Files::Gguf(gguf) => gguf.path(),
        }
    }

    /// The sizes of all tensors, in the files and after loading.
    pub(crate) fn footprint(&self) -> Footprint {
        let storage = self.place.weight_storage(self.dtype);
        match &self.files {
            Files::Directory(_, checkpoint) => {
                Footprint::of_safetensors(checkpoint, &self.config, &storage)
            }
            Files::Gguf(gguf) => Footprint::of_gguf(gguf, &self.config, &storage),
        }
    }

    /// Returns the blocks derived from tensor names, for an architecture whose blocks differ from
    /// each other. Empty for GGUF files, which have no such architecture.
    ///
    /// # Errors
    /// If the names describe no block.
    pub(crate) fn blocks(&self) -> Result<Vec<BlockInfo>> {
        match &self.files {
            Files::Directory(_, checkpoint) => arch::blocks(&self.config, checkpoint.names()),
            Files::Gguf(_) => Ok(Vec::new()),
        }
    }

    /// The tokenizer and the chat template.
    ///
    /// # Errors
    /// If one of them is missing or damaged.
    pub(crate) fn text(&self) -> Result<TextPipeline> {
        let model_type = self.config.model_type.as_deref().unwrap_or_default();
        match &self.files {
            Files::Directory(dir, _) => TextPipeline::from_dir(dir, model_type),
            Files::Gguf(gguf) => {
                let parts = gguf_config::tokenizer_parts(gguf)?;
                TextPipeline::from_gguf(&parts, model_type)
            }
        }
    }

    /// The sampling options that the model's files recommend. An error in these files does not
    /// prevent loading.
    pub(crate) fn sampling(&self) -> SamplingDefaults {
        let read = match &self.files {
            Files::Directory(dir, _) => SamplingDefaults::from_dir(dir),
            Files::Gguf(gguf) => SamplingDefaults::from_gguf(gguf),
        };
        read.unwrap_or_else(|e| {
            tracing::warn!("the model's recommended sampling is ignored: {e}");
            SamplingDefaults::default()
        })
    }

    /// Returns the configuration and the weights. Reads no weights yet.
    pub(crate) fn into_weights(self) -> (ModelConfig, Weights) {
        let weights = match self.files {
            Files::Directory(dir, checkpoint) => {
                Weights::from_safetensors(checkpoint, &dir, &self.config, self.dtype)
            }
            Files::Gguf(gguf) => Weights::from_gguf(gguf, &self.config, self.dtype),
        };
        (self.config, weights)
    }
}

/// Reads additional end-of-text tokens from `generation_config.json`, if the file exists.
fn generation_eos(dir: &Path) -> Result<Vec<u32>> {
    let path = dir.join("generation_config.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = read_text(&path, MAX_TEXT_FILE)?;
    let value: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| invalid(&path, "not a JSON file").with_source(e))?;
    config::token_ids("eos_token_id", value.get("eos_token_id")).map_err(|m| invalid(&path, m))
}
