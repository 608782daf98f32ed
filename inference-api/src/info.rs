//! Properties of a loaded model. [`crate::discover`] describes files on disk instead.

use serde::{Deserialize, Serialize};

use inference_formats::SamplingDefaults;

use crate::options::ComputeType;

/// Properties of a loaded model.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelInfo {
    /// The architecture's name, such as `llama`.
    pub architecture: String,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Elements of the hidden state.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Context length for which the model was trained, in tokens.
    pub context_length: Option<usize>,
    /// Bits per quantized weight; `None` for a dense model.
    pub quantization_bits: Option<u32>,
    /// Weights that share a scale; `None` for a dense model.
    pub quantization_group: Option<u32>,
    /// Weights in the network.
    pub parameters: u64,
    /// Bytes of the weights in memory.
    pub weight_bytes: u64,
    /// The device, such as `cpu`.
    pub device: String,
    /// Type in which the model computes.
    pub compute_type: Option<ComputeType>,
    /// Type to which inputs of quantized matrices are converted in prefill, such as `float32` or
    /// `int8`; `bfloat16x2` is the sum of two bfloat16. `None` if the backend does not report it.
    pub prompts: Option<String>,
    /// How keys and values are stored, such as `float16`, or `4 bits, groups of 64`. `None` if the
    /// backend does not report it, or if the model has no keys and values.
    pub cache: Option<String>,
    /// Bytes of a token's keys and values over all layers, in a long sequence; 0 if the model has
    /// no keys and values. `None` if the backend does not report it.
    pub cache_bytes_per_token: Option<u64>,
    /// Whether the model has a chat template.
    pub has_chat_template: bool,
    /// The sampling options recommended by the model's authors. The engine does not apply them; a
    /// caller may use them as defaults.
    pub sampling: SamplingDefaults,
}
