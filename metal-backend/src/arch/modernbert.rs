//! ModernBERT (Warner et al. 2024, arXiv:2412.13663; reference: `modeling_modernbert` of Hugging
//! Face transformers): pre-norm blocks with rotary positions and a gated feed-forward part. Two of
//! three layers have local attention. The first layer has no norm before its attention.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::bert::prefix;
use super::build::{Builder, NormKind, int};
use super::encoder::{Classifier, EncoderBlock, EncoderStack, HeadActivation};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward, GatedMlp, Linear};

/// Loads ModernBERT.
pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let prefix = prefix(weights, "embeddings.tok_embeddings.weight");
    let at = |name: &str| format!("{prefix}{name}");
    let flag = |name: &str| config.flag(name).map(|on| on.unwrap_or(false));
    let norm_bias = flag("norm_bias")?;
    let (attention_bias, mlp_bias) = (config.attention_bias, config.mlp_bias);
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: norm_bias });
    let activation = b.activation(Activation::Gelu)?;
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let heads = b.dims.n_heads * b.dims.head_dim;
    let blocks = (0..config.num_hidden_layers)
        .map(|i| {
            let at = |name: &str| at(&format!("layers.{i}.{name}"));
            let qkv = b.fused(&at("attn.Wqkv"), hidden, &[heads; 3], attention_bias)?;
            let qkv = three(qkv)?;
            let o_proj = b.linear(&at("attn.Wo"), heads, hidden, attention_bias)?;
            let rope = Some(b.rope(i, b.dims.head_dim, false)?);
            let wi = b.fused(&at("mlp.Wi"), hidden, &[width; 2], mlp_bias)?;
            let [gate, up] = <[Linear; 2]>::try_from(wi).map_err(|_| parts())?;
            let attention_in = match i {
                0 => None,
                _ => Some(b.hidden_norm(&at("attn_norm"))?),
            };
            let block = EncoderBlock {
                attention_in,
                attention: b.plain_attention(qkv, o_proj, rope),
                // The window is the total width, so half of it is on each side.
                reach: b.window(i)?.map(|window| window / 2),
                slopes: None,
                attention_out: None,
                after_attention: None,
                after_second_sum: None,
                mlp_in: Some(b.hidden_norm(&at("mlp_norm"))?),
                mlp: FeedForward::Gated(GatedMlp {
                    gate,
                    up,
                    down: b.linear(&at("mlp.Wo"), width, hidden, mlp_bias)?,
                    activation,
                }),
                mlp_out: None,
                after_mlp: None,
            };
            Ok(Arc::new(block.packed()?))
        })
        .collect::<Result<Vec<_>>>()?;
    let embedding = b.embedding(&at("embeddings.tok_embeddings"))?;
    let embedding_norm = Some(b.hidden_norm(&at("embeddings.norm"))?);
    let norm = Some(b.hidden_norm(&at("final_norm"))?);
    let classifier = classifier(&mut b)?;
    if classifier.is_none() {
        // These tensors predict masked words, which an embedding does not need.
        b.weights.ignore("head");
        b.weights.ignore("decoder");
    }
    Ok(Box::new(EncoderStack {
        embedding,
        embedding_scale: None,
        places: None,
        types: None,
        embedding_norm,
        blocks,
        norm,
        max_length: config.max_position_embeddings,
        classifier,
    }))
}

/// Converts a list of three layers to an array: queries, keys and values.
pub(super) fn three(parts_of: Vec<Linear>) -> Result<[Linear; 3]> {
    <[Linear; 3]>::try_from(parts_of).map_err(|_| parts())
}

fn parts() -> Error {
    Error::new(
        ErrorKind::Engine,
        "a fused matrix has the wrong number of parts",
    )
}

fn classifier(b: &mut Builder<'_>) -> Result<Option<Classifier>> {
    if !b.weights.contains("classifier.weight") {
        return Ok(None);
    }
    let hidden = b.dims.hidden;
    let text = |name: &str| b.config.fields.get(name).and_then(|v| v.as_str());
    let mean = match text("classifier_pooling") {
        None | Some("cls") => false,
        Some("mean") => true,
        Some(other) => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("classifier_pooling {other:?} is not supported; cls and mean are"),
            ));
        }
    };
    let activation = match text("classifier_activation") {
        None => Activation::Gelu,
        Some(name) => Activation::from_name(name).ok_or_else(|| {
            let message = format!("classifier_activation {name:?} is not supported");
            Error::new(ErrorKind::Unsupported, message)
        })?,
    };
    let bias = b.config.flag("classifier_bias")?.unwrap_or(false);
    let labels = int("num_labels", b.weights.rows("classifier").unwrap_or(1))?;
    Ok(Some(Classifier {
        mean,
        dense: Some((
            b.linear("head.dense", hidden, hidden, bias)?,
            HeadActivation::Other(activation),
        )),
        norm: Some(b.hidden_norm("head.norm")?),
        out: b.linear("classifier", hidden, labels, true)?,
    }))
}
