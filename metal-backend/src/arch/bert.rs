//! BERT (Devlin et al. 2018, arXiv:1810.04805; reference: `modeling_bert` of Hugging Face
//! transformers) and RoBERTa (Liu et al. 2019, arXiv:1907.11692): post-norm blocks with biases and
//! learned positions. RoBERTa's positions begin after the index of the padding token.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::Decoder;
use super::build::{Builder, NormKind, int, invalid};
use super::encoder::{Classifier, EncoderBlock, EncoderStack, HeadActivation, Places};
use crate::checkpoint::{ModelConfig, config};
use crate::loader::Weights;
use crate::nn::{Activation, Attention, Embedding, FeedForward, Mlp};

/// Loads BERT.
pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    load_from(config, weights, 0)
}

/// Loads RoBERTa.
pub(super) fn load_roberta(
    config: &ModelConfig,
    weights: &mut Weights,
) -> Result<Box<dyn Decoder>> {
    let padding = config.uint("pad_token_id", 0..=config::limits::VOCAB)?;
    load_from(config, weights, padding.unwrap_or(1) + 1)
}

/// Loads BERT or RoBERTa. `first` is the row of the position table for the first token.
fn load_from(
    config: &ModelConfig,
    weights: &mut Weights,
    first: usize,
) -> Result<Box<dyn Decoder>> {
    // Models with ALiBi belong to the family JinaBERT (`jina_bert.rs`).
    let kind = config.fields.get("position_embedding_type");
    if let Some(kind) = kind.and_then(|kind| kind.as_str())
        && kind != "absolute"
    {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("position_embedding_type {kind:?} is not supported; only \"absolute\" is"),
        ));
    }
    let prefix = prefix(weights, WORDS);
    let at = |name: &str| format!("{prefix}{name}");
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::Layer { bias: true });
    let activation = b.activation(Activation::Gelu)?;
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let blocks = (0..config.num_hidden_layers)
        .map(|i| {
            let at = |name: &str| at(&format!("encoder.layer.{i}.{name}"));
            let block = EncoderBlock {
                attention_in: None,
                attention: attention(&mut b, &at("attention"))?,
                reach: None,
                slopes: None,
                attention_out: None,
                after_attention: Some(b.hidden_norm(&at("attention.output.LayerNorm"))?),
                after_second_sum: None,
                mlp_in: None,
                mlp: FeedForward::Plain(Mlp {
                    up: b.linear(&at("intermediate.dense"), hidden, width, true)?,
                    down: b.linear(&at("output.dense"), width, hidden, true)?,
                    activation,
                }),
                mlp_out: None,
                after_mlp: Some(b.hidden_norm(&at("output.LayerNorm"))?),
            };
            Ok(Arc::new(block.packed()?))
        })
        .collect::<Result<Vec<_>>>()?;
    let places = at("embeddings.position_embeddings");
    let rows = config.max_position_embeddings.or(b.weights.rows(&places));
    let rows = rows.ok_or_else(|| invalid("max_position_embeddings is missing"))?;
    let Some(max_length) = rows.checked_sub(first).filter(|n| *n > 0) else {
        return Err(invalid(format!(
            "max_position_embeddings is {rows}, of which the first {first} are for padding"
        )));
    };
    let places = Places {
        table: b
            .weights
            .embedding(&places, int("max_position_embeddings", rows)?, hidden)?,
        first: int("pad_token_id", first)?,
    };
    let types = types(&mut b, &at("embeddings.token_type_embeddings"))?;
    let embedding = b.embedding(&at("embeddings.word_embeddings"))?;
    let embedding_norm = Some(b.hidden_norm(&at("embeddings.LayerNorm"))?);
    let classifier = classifier(&mut b, &at("pooler.dense"))?;
    // Tensors for other tasks: the pooler of text pairs, and the prediction of masked words.
    for name in ["pooler", "embeddings.position_ids"] {
        b.weights.ignore(&at(name));
    }
    for name in ["cls", "lm_head"] {
        b.weights.ignore(name);
    }
    Ok(Box::new(EncoderStack {
        embedding,
        embedding_scale: None,
        places: Some(places),
        types,
        embedding_norm,
        blocks,
        norm: None,
        max_length: Some(max_length),
        classifier,
    }))
}

/// The name of a tensor that every BERT has.
pub(super) const WORDS: &str = "embeddings.word_embeddings.weight";

/// Builds the attention layer with BERT's tensor names.
pub(super) fn attention(b: &mut Builder<'_>, prefix: &str) -> Result<Attention> {
    let hidden = b.dims.hidden;
    let heads = b.dims.n_heads * b.dims.head_dim;
    let at = |name: &str| format!("{prefix}.{name}");
    let qkv = [
        b.linear(&at("self.query"), hidden, heads, true)?,
        b.linear(&at("self.key"), hidden, heads, true)?,
        b.linear(&at("self.value"), hidden, heads, true)?,
    ];
    let o_proj = b.linear(&at("output.dense"), heads, hidden, true)?;
    Ok(b.plain_attention(qkv, o_proj, None))
}

/// Loads the segment embeddings for the two texts of a pair. Returns `None` if the checkpoint has
/// none.
pub(super) fn types(b: &mut Builder<'_>, name: &str) -> Result<Option<Embedding>> {
    let hidden = b.dims.hidden;
    let Some(rows) = b.weights.rows(name) else {
        return Ok(None);
    };
    let rows = int("type_vocab_size", rows)?;
    b.weights.embedding(name, rows, hidden).map(Some)
}

/// Returns the prefix of the network's tensor names. It is empty, or a name such as `bert.` in
/// checkpoints that also have a head. `known` is the name of a tensor that every such network has.
pub(super) fn prefix(weights: &Weights, known: &str) -> &'static str {
    const PREFIXES: [&str; 4] = ["", "bert.", "roberta.", "model."];
    let has = |prefix: &&&str| weights.contains(&format!("{prefix}{known}"));
    PREFIXES.iter().find(has).copied().unwrap_or("")
}

/// Builds the classifier: a hidden layer (BERT's pooler) and an output layer. Returns `None` if the
/// checkpoint has no classifier.
pub(super) fn classifier(b: &mut Builder<'_>, pooler: &str) -> Result<Option<Classifier>> {
    let hidden = b.dims.hidden;
    let (dense, out) = if b.weights.contains("classifier.out_proj.weight") {
        ("classifier.dense", "classifier.out_proj")
    } else if b.weights.contains("classifier.weight") {
        (pooler, "classifier")
    } else {
        return Ok(None);
    };
    let labels = int("num_labels", b.weights.rows(out).unwrap_or(1))?;
    Ok(Some(Classifier {
        mean: false,
        dense: Some((b.linear(dense, hidden, hidden, true)?, HeadActivation::Tanh)),
        norm: None,
        out: b.linear(out, hidden, labels, true)?,
    }))
}
