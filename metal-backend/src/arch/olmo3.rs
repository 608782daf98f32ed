//! OLMo 3 (OLMo Team 2025; reference: `modeling_olmo3` of Hugging Face transformers). It is OLMo 2
//! with a sliding window in three of four layers, and with rotary scaling only in the full layers.
//! The configuration has the window and the scaling of each layer.

use inference::Result;

use super::{Decoder, olmo2};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    olmo2::load(config, weights)
}
