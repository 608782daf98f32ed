//! Facts about a loaded model. [`crate::discover`] describes the files on disk.

use serde::{Deserialize, Serialize};

use inference_formats::SamplingDefaults;

use crate::options::ComputeType;

/// Facts about a loaded model.
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
    /// The context the model was trained for, in tokens.
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
    /// The type it computes in.
    pub compute_type: Option<ComputeType>,
    /// The type to which inputs of quantized matrices are converted in prompts, such as `float32`
    /// or `int8`; `bfloat16x2` is the sum of two bfloat16. `None` where the backend does not say.
    pub prompts: Option<String>,
    /// Whether the model has a chat template.
    pub has_chat_template: bool,
    /// The sampling options recommended by the model's authors. The engine does not apply them; a
    /// caller may use them as defaults.
    pub sampling: SamplingDefaults,
}
