//! Falcon-Mamba (Zuo et al. 2024, arXiv:2410.05355; reference: `modeling_falcon_mamba` of Hugging
//! Face transformers): Mamba with norms on the low-rank step, B and C. These norms have no weights.

use inference::Result;
use mlx_rs_core::ones;

use super::{Decoder, mamba};
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::Norm;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let eps = config.number("mixer_rms_eps")?.unwrap_or(1e-6);
    mamba::load_with(config, weights, &|b, _, shape| {
        let dtype = b.weights.dtype();
        let norm = |width: i32| -> Result<Norm> {
            let weight = ones(&[width], dtype).map_err(engine("weights"))?;
            Ok(Norm::Rms {
                weight: Some(weight),
                eps,
            })
        };
        let norms = [norm(shape.rank)?, norm(shape.state)?, norm(shape.state)?];
        Ok(Some(norms))
    })
}
