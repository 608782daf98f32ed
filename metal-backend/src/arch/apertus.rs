//! Apertus (Swiss AI 2025, arXiv:2509.14233; reference: `modeling_apertus` of Hugging Face
//! transformers): llama with norms of query and key heads. Its feed-forward part has two matrices
//! with xIELU between them.

use inference::Result;

use super::Decoder;
use super::build::{Builder, invalid};
use super::llama::{Variant, stack_of};
use super::variants::refuse;
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::Activation;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    refuse(config, "post_norm")?;
    let variant = Variant {
        qk_norm: true,
        ..Variant::configured(config)
    };
    let stack = stack_of(config, weights, variant, &|b, i, prefix| {
        let at = format!("{prefix}.mlp");
        let activation = match b.config.activation.as_deref() {
            None | Some("xielu") => xielu(b, i, &format!("{at}.act_fn"))?,
            Some(_) => b.activation(Activation::Silu)?,
        };
        b.plain_mlp(&at, activation, b.config.mlp_bias)
    })?;
    Ok(Box::new(stack))
}

/// Builds the activation xIELU from the numbers at `at`. Its factors are the softplus of the stored
/// numbers. GGUF files store these numbers for each layer in the metadata.
fn xielu(b: &mut Builder<'_>, layer: usize, at: &str) -> Result<Activation> {
    let mut number = |name: &str| -> Result<Option<f32>> {
        if let Some(each) = b.config.numbers(&format!("xielu_{name}"))? {
            return Ok(each.get(layer).copied());
        }
        let name = format!("{at}.{name}");
        let shape = match b.weights.shape(&name) {
            None => return Ok(None),
            // Checkpoints from mlx-lm store a scalar without an axis.
            Some([]) => Vec::new(),
            Some(_) => vec![1],
        };
        let value = b.weights.tensor(&name, &shape)?;
        let value = value.to_f32_vec().map_err(engine("weights"))?;
        Ok(value.first().copied())
    };
    let mut required =
        |name: &str| number(name)?.ok_or_else(|| invalid(format!("`{at}.{name}` is missing")));
    let (positive, negative) = (required("alpha_p")?, required("alpha_n")?);
    let beta = number("beta")?.unwrap_or(0.5);
    Ok(Activation::Xielu {
        positive: softplus(positive),
        negative: beta + softplus(negative),
        beta,
        eps: number("eps")?.unwrap_or(-1e-6),
    })
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::softplus;

    #[test]
    fn softplus_neither_overflows_nor_vanishes() {
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
        assert_eq!(softplus(200.0), 200.0);
        assert!((softplus(-10.0) - 4.539_89e-5).abs() < 1e-9);
    }
}
