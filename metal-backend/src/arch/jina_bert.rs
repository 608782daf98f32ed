//! `JinaBERT` (Günther et al. 2023, arXiv:2310.19923; reference: `modeling_bert` in the
//! checkpoints' repositories): BERT's post-norm blocks with a symmetric form of `ALiBi` (Press et
//! al. 2021, arXiv:2108.12409) instead of learned positions, and with a gated feed-forward part
//! (Shazeer 2020). Models for code also have norms of queries and keys, and add a block's input
//! twice.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::bert::{WORDS, attention, classifier, prefix, types};
use super::build::{Builder, NormKind, invalid};
use super::encoder::{EncoderBlock, EncoderStack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;
use crate::nn::{Activation, FeedForward, GatedMlp, HeadNorms, Linear, Mlp};

/// Loads `JinaBERT`.
pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let prefix = prefix(weights, WORDS);
    let at = |name: &str| format!("{prefix}{name}");
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: true });
    let kind = kind(&b)?;
    let heads = b.dims.n_heads * b.dims.head_dim;
    let slopes: Arc<[f32]> = slopes(b.dims.n_heads.unsigned_abs()).into();
    let blocks = (0..config.num_hidden_layers)
        .map(|i| {
            let at = |name: &str| at(&format!("encoder.layer.{i}.{name}"));
            let mut attention = attention(&mut b, &at("attention"))?;
            let [q, k] = ["q", "k"].map(|name| at(&format!("attention.self.layer_norm_{name}")));
            if b.weights.contains(&format!("{q}.weight")) {
                attention.norms = HeadNorms {
                    q: Some(b.norm(&q, heads)?),
                    k: Some(b.norm(&k, heads)?),
                    across_heads: true,
                    ..HeadNorms::default()
                };
            }
            let second = at("layer_norm_1");
            let after_second_sum = match b.weights.contains(&format!("{second}.weight")) {
                true => Some(b.hidden_norm(&second)?),
                false => None,
            };
            let mlp = feed_forward(&mut b, &at(""), kind, after_second_sum.is_some())?;
            let names = ["mlp.layernorm", "layer_norm_2", "output.LayerNorm"].map(at);
            let block = EncoderBlock {
                attention_in: None,
                attention,
                reach: None,
                slopes: Some(Arc::clone(&slopes)),
                attention_out: None,
                after_attention: Some(b.hidden_norm(&at("attention.output.LayerNorm"))?),
                after_second_sum,
                mlp_in: None,
                mlp,
                mlp_out: None,
                after_mlp: Some(b.hidden_norm(&existing(&b, names))?),
            };
            Ok(Arc::new(block.packed()?))
        })
        .collect::<Result<Vec<_>>>()?;
    let types = types(&mut b, &at("embeddings.token_type_embeddings"))?;
    let embedding = b.embedding(&at("embeddings.word_embeddings"))?;
    let embedding_norm = Some(b.hidden_norm(&at("embeddings.LayerNorm"))?);
    let classifier = classifier(&mut b, &at("pooler.dense"))?;
    // Tensors for other tasks: the pooler of text pairs, and the prediction of masked words.
    for name in [at("pooler"), "cls".to_owned(), "lm_head".to_owned()] {
        b.weights.ignore(&name);
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
        classifier,
    }))
}

/// The kind of feed-forward part.
#[derive(Debug, Clone, Copy)]
struct Kind {
    gated: bool,
    activation: Activation,
}

fn kind(b: &Builder<'_>) -> Result<Kind> {
    let (gated, activation) = match b.config.fields.get("feed_forward_type") {
        Some(kind) if kind == "geglu" => (true, Activation::Gelu),
        Some(kind) if kind == "reglu" => (true, Activation::Relu),
        None => (false, b.activation(Activation::Gelu)?),
        Some(kind) if kind == "original" => (false, b.activation(Activation::Gelu)?),
        Some(other) => {
            let message = format!(
                "feed_forward_type {other} is not supported; original, geglu and reglu are"
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
    };
    Ok(Kind { gated, activation })
}

/// Builds the feed-forward part of the block with this prefix. `up_first` applies to fused matrices
/// in GGUF files. It means that the rows of the up projection precede those of the gate, as in
/// models that add a block's input twice.
fn feed_forward(
    b: &mut Builder<'_>,
    prefix: &str,
    kind: Kind,
    up_first: bool,
) -> Result<FeedForward> {
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let at = |name: &str| format!("{prefix}{name}");
    let Kind { gated, activation } = kind;
    let down = existing(b, ["mlp.wo", "mlp.down_layer", "output.dense"].map(at));
    let names = match gated {
        true => ["mlp.gated_layers", "mlp.up_gated_layer"].map(at).to_vec(),
        false => ["mlp.gated_layers", "mlp.up_layer", "intermediate.dense"]
            .map(at)
            .to_vec(),
    };
    let name = existing(b, names);
    let has_bias = b.weights.contains(&format!("{name}.bias"));
    if !gated {
        return Ok(FeedForward::Plain(Mlp {
            up: b.linear(&name, hidden, width, has_bias)?,
            down: b.linear(&down, width, hidden, true)?,
            activation,
        }));
    }
    let gate = at("mlp.gate_layer");
    let (gate, up) = match b.weights.contains(&format!("{gate}.weight")) {
        true => (
            b.linear(&gate, hidden, width, false)?,
            b.linear(&name, hidden, width, has_bias)?,
        ),
        false => {
            let up_first = up_first || name.ends_with("up_gated_layer");
            let parts = b.fused(&name, hidden, &[width; 2], has_bias)?;
            let [first, second] = <[Linear; 2]>::try_from(parts)
                .map_err(|_| invalid("a fused matrix must have two parts"))?;
            match up_first {
                true => (second, first),
                false => (first, second),
            }
        }
    };
    Ok(FeedForward::Gated(GatedMlp {
        gate,
        up,
        down: b.linear(&down, width, hidden, true)?,
        activation,
    }))
}

/// Returns the first of these names that has a tensor. If none has one, returns the first name,
/// which the loading error then contains.
fn existing(b: &Builder<'_>, names: impl IntoIterator<Item = String>) -> String {
    let names: Vec<String> = names.into_iter().collect();
    let found = |name: &&String| b.weights.contains(&format!("{name}.weight"));
    let name = names.iter().find(found).or(names.first());
    name.cloned().unwrap_or_default()
}

/// Returns the slope of each head (Press et al. 2021, section 3 and their code). For a power of two
/// `n`, slope `i` from 1 to `n` is `2^(-8 i / n)`. For another number, `n` is the next lower power
/// of two; the other heads get the first, third, fifth and so on of the slopes for `2 n` heads.
fn slopes(heads: u32) -> Vec<f32> {
    let n = heads.checked_ilog2().map_or(0, |log| 1u32 << log);
    let slope = |i: u32, n: u32| (-8.0 * f64::from(i) / f64::from(n)).exp2() as f32;
    let own = (1..=n).map(|i| slope(i, n));
    let more = (0..heads - n).map(|i| slope(2 * i + 1, 2 * n));
    own.chain(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        let halves = |n: i32| (1..=n).map(|i| 0.5f32.powi(i)).collect::<Vec<_>>();
        assert_eq!(slopes(8), halves(8));
        assert!(slopes(0).is_empty());
        let root = std::f32::consts::FRAC_1_SQRT_2;
        for (i, slope) in slopes(16).iter().enumerate() {
            assert!((slope - root.powi(i as i32 + 1)).abs() < 1e-7, "{i}");
        }
        let twelve = slopes(12);
        assert_eq!(twelve[..8], halves(8));
        let sixteen = slopes(16);
        for i in 0..4 {
            assert_eq!(twelve[8 + i], sixteen[2 * i]);
        }
    }
}
