//! Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613; reference: `modeling_hf_nomic_bert` in the
//! checkpoints' repositories): post-norm blocks with rotary positions and a gated feed-forward
//! part.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::bert::{WORDS, prefix, types};
use super::build::{Builder, NormKind};
use super::encoder::{EncoderBlock, EncoderStack};
use super::modernbert::three;
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward, GatedMlp};

/// Loads Nomic BERT.
pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let prefix = prefix(weights, WORDS);
    let at = |name: &str| format!("{prefix}{name}");
    let flag = |name: &str| config.flag(name).map(|on| on.unwrap_or(false));
    for name in [
        "prenorm",
        "parallel_block",
        "use_rms_norm",
        "rotary_emb_interleaved",
        "causal",
    ] {
        if flag(name)? {
            return Err(unsupported(format!("{name} true is not supported")));
        }
    }
    if config.number("num_experts")?.is_some_and(|n| n > 0.0) {
        return Err(unsupported(String::from(
            "a mixture of experts is not supported",
        )));
    }
    let activation = match config.activation.as_deref() {
        None | Some("swiglu" | "silu") => Activation::Silu,
        Some("geglu") => Activation::Gelu,
        Some(other) => {
            return Err(unsupported(format!(
                "activation_function {other:?} is not supported; swiglu and geglu are"
            )));
        }
    };
    let qkv_bias = flag("qkv_proj_bias")?;
    let (in_bias, out_bias) = (flag("mlp_fc1_bias")?, flag("mlp_fc2_bias")?);
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: true });
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let heads = b.dims.n_heads * b.dims.head_dim;
    let blocks = (0..config.num_hidden_layers)
        .map(|i| {
            let at = |name: &str| at(&format!("encoder.layers.{i}.{name}"));
            let qkv = b.fused(&at("attn.Wqkv"), hidden, &[heads; 3], qkv_bias)?;
            let qkv = three(qkv)?;
            let o_proj = b.linear(&at("attn.out_proj"), heads, hidden, qkv_bias)?;
            let rope = Some(b.rope(i, b.dims.head_dim, false)?);
            let block = EncoderBlock {
                attention_in: None,
                attention: b.plain_attention(qkv, o_proj, rope),
                reach: None,
                slopes: None,
                attention_out: None,
                after_attention: Some(b.hidden_norm(&at("norm1"))?),
                after_second_sum: None,
                mlp_in: None,
                mlp: FeedForward::Gated(GatedMlp {
                    gate: b.linear(&at("mlp.fc12"), hidden, width, in_bias)?,
                    up: b.linear(&at("mlp.fc11"), hidden, width, in_bias)?,
                    down: b.linear(&at("mlp.fc2"), width, hidden, out_bias)?,
                    activation,
                }),
                mlp_out: None,
                after_mlp: Some(b.hidden_norm(&at("norm2"))?),
            };
            Ok(Arc::new(block.packed()?))
        })
        .collect::<Result<Vec<_>>>()?;
    let types = types(&mut b, &at("embeddings.token_type_embeddings"))?;
    let embedding = b.embedding(&at("embeddings.word_embeddings"))?;
    let embedding_norm = Some(b.hidden_norm(&at("emb_ln"))?);
    for name in ["pooler", "cls"] {
        b.weights.ignore(name);
    }
    Ok(Box::new(EncoderStack {
        embedding,
        embedding_scale: None,
        places: None,
        types,
        embedding_norm,
        blocks,
        norm: None,
        max_length: config.max_position_embeddings,
        classifier: None,
    }))
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}
