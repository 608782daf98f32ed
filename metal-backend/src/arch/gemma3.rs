//! Gemma 3, text only: `gemma3_text`, and the text part of multimodal `gemma3` checkpoints. The
//! network is described in `gemma2.rs`, from which it differs by its head norms.

use inference::Result;

use super::Decoder;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    super::gemma2::load_with(config, weights, true)
}
