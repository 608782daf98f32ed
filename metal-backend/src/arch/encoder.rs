//! The encoder that BERT and its successors are: an embedding, blocks of full attention and
//! feed-forward parts, and a classifier where the checkpoint has one. Several texts go through it
//! packed one after another, without padding and without caches. Where the norms stand, and how
//! positions are told, are fields.

use std::sync::Arc;

use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate};

use super::Decoder;
use crate::cache::{CacheOptions, Caches, LayerState, Row};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::norm::through;
use crate::nn::{Activation, Attention, Embedding, FeedForward, Linear, Norm};

/// The tokens of several texts, packed one after another.
#[derive(Debug, Clone, Copy)]
pub struct EncoderInput<'a> {
    /// Ids, `[T]`.
    pub ids: &'a [u32],
    /// Which part of a pair each token is of, `[T]`: 0 or 1.
    pub types: &'a [u32],
    /// How many tokens each text has; their sum is `T`.
    pub lengths: &'a [i32],
}

/// A network in which every position sees all others, so that it has no next token.
pub trait Encoder: Send + Sync + std::fmt::Debug {
    /// The last hidden states, `[1, T, hidden]`.
    ///
    /// # Errors
    /// When shapes do not fit or memory runs out.
    fn encode(&self, input: &EncoderInput<'_>) -> Result<Array>;

    /// The most tokens of a text; `None` without a bound.
    fn max_length(&self) -> Option<usize>;

    /// How many numbers the classifier gives for a text; `None` without a classifier.
    fn labels(&self) -> Option<usize>;

    /// What the classifier makes of hidden states `[1, T, hidden]` of texts of these lengths:
    /// `[1, texts, labels]`.
    ///
    /// # Errors
    /// When there is no classifier, shapes do not fit, or memory runs out.
    fn classify(&self, states: &Array, lengths: &[i32]) -> Result<Array>;
}

/// One block. Norms that a family does not have are `None`.
#[derive(Debug)]
pub struct EncoderBlock {
    /// Before the attention.
    pub attention_in: Option<Norm>,
    /// Of each position to those around it.
    pub attention: Attention,
    /// Only to positions that are at most this far away.
    pub reach: Option<i32>,
    /// On the attention's output, before it is added.
    pub attention_out: Option<Norm>,
    /// On the sum (BERT).
    pub after_attention: Option<Norm>,
    /// Before the feed-forward part.
    pub mlp_in: Option<Norm>,
    /// The feed-forward part.
    pub mlp: FeedForward,
    /// On its output, before it is added.
    pub mlp_out: Option<Norm>,
    /// On the sum (BERT).
    pub after_mlp: Option<Norm>,
}

impl EncoderBlock {
    /// `[1, T, hidden] -> [1, T, hidden]`.
    fn forward(&self, x: &Array, lengths: &[i32]) -> Result<Array> {
        // What is added as it comes can be added by whoever computes it.
        let add = self.attention_out.is_none();
        let input = (x, self.attention_in.as_ref(), add);
        let mut h = self.attention.encode(input, lengths, self.reach)?;
        if !add {
            h = x.add(&through(self.attention_out.as_ref(), &h)?)?;
        }
        let h = through(self.after_attention.as_ref(), &h)?;
        let norm = self.mlp_in.as_ref();
        let y = match &self.mlp_out {
            None => self.mlp.forward_from(norm, &h, Some(&h))?,
            Some(out) => h.add(&out.forward(&self.mlp.forward_from(norm, &h, None)?)?)?,
        };
        through(self.after_mlp.as_ref(), &y)
    }
}

/// Learned positions.
#[derive(Debug)]
pub struct Places {
    /// One row a position.
    pub table: Embedding,
    /// The row of the first token (RoBERTa keeps some for padding).
    pub first: i32,
}

/// An encoder of [`EncoderBlock`]s.
#[derive(Debug)]
pub struct EncoderStack {
    /// Token ids to vectors.
    pub embedding: Embedding,
    /// Factor on them.
    pub embedding_scale: Option<Array>,
    /// Learned positions, added to them.
    pub places: Option<Places>,
    /// What tells the two texts of a pair apart, added to them.
    pub types: Option<Embedding>,
    /// On the sum.
    pub embedding_norm: Option<Norm>,
    /// The blocks, first to last.
    pub blocks: Vec<Arc<EncoderBlock>>,
    /// After them.
    pub norm: Option<Norm>,
    /// The most tokens of a text.
    pub max_length: Option<usize>,
    /// To scores, in a checkpoint that classifies texts.
    pub classifier: Option<Classifier>,
}

impl EncoderStack {
    /// The input of the first block, `[1, T, hidden]`.
    fn embedded(&self, input: &EncoderInput<'_>) -> Result<Array> {
        let row = |values: &[u32]| Array::vector(values)?.expand_dims(0);
        let mut x = self.embedding.forward(&row(input.ids)?)?; // [1, T] -> [1, T, hidden]
        if let Some(scale) = &self.embedding_scale {
            x = x.multiply(scale)?;
        }
        if let Some(places) = &self.places {
            let lengths = input.lengths.iter();
            let own: Vec<i32> = lengths
                .flat_map(|&n| places.first..places.first.saturating_add(n))
                .collect();
            let own = Array::vector(&own)?.expand_dims(0)?;
            x = x.add(&places.table.forward(&own)?)?;
        }
        if let Some(types) = &self.types {
            x = x.add(&types.forward(&row(input.types)?)?)?;
        }
        through(self.embedding_norm.as_ref(), &x)
    }
}

impl Encoder for EncoderStack {
    fn encode(&self, input: &EncoderInput<'_>) -> Result<Array> {
        let mut x = self.embedded(input)?;
        for block in &self.blocks {
            x = block.forward(&x, input.lengths)?;
        }
        through(self.norm.as_ref(), &x)
    }

    fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    fn labels(&self) -> Option<usize> {
        let labels = self.classifier.as_ref()?.out.outputs();
        usize::try_from(labels).ok()
    }

    fn classify(&self, states: &Array, lengths: &[i32]) -> Result<Array> {
        match &self.classifier {
            Some(classifier) => classifier.forward(states, lengths),
            None => Err(fault("the checkpoint has no classifier")),
        }
    }
}

fn fault(message: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "encoder", message)
}

impl Decoder for EncoderStack {
    fn forward(
        &self,
        _: &Array,
        _: &mut [Row<'_>],
        _: Positions,
        _: &mut Watch<'_>,
    ) -> Result<Array> {
        Err(fault("an encoder has no next token"))
    }

    fn unembed(&self, _: &Array) -> Result<Array> {
        Err(fault("an encoder has no next token"))
    }

    fn new_caches(&self, _: &CacheOptions) -> Caches {
        std::iter::empty::<Box<dyn LayerState>>().collect()
    }

    fn token_vectors(&self, ids: &Array) -> Result<Array> {
        self.embedding.forward(ids)
    }

    fn token_scores(&self, x: &Array) -> Result<Array> {
        self.embedding.as_output(x)
    }

    fn encoder(&self) -> Option<&dyn Encoder> {
        Some(self)
    }
}

/// What a classifier's hidden layer goes through.
#[derive(Debug, Clone, Copy)]
pub enum HeadActivation {
    /// The hyperbolic tangent.
    Tanh,
    /// One of feed-forward parts.
    Other(Activation),
}

/// From the hidden states of a text to scores.
#[derive(Debug)]
pub struct Classifier {
    /// Whether it reads their mean, rather than the first.
    pub mean: bool,
    /// Its hidden layer, and what that goes through.
    pub dense: Option<(Linear, HeadActivation)>,
    /// On the hidden layer.
    pub norm: Option<Norm>,
    /// To the scores.
    pub out: Linear,
}

impl Classifier {
    /// `[1, T, hidden] -> [1, texts, labels]`.
    fn forward(&self, states: &Array, lengths: &[i32]) -> Result<Array> {
        let begins = lengths.iter().scan(0i32, |end, &n| {
            let begin = *end;
            *end += n;
            Some(begin)
        });
        let mut x = if self.mean {
            let means: Vec<Array> = begins
                .zip(lengths)
                .map(|(from, n)| states.slice_axis(1, from, from + n)?.mean(1, true))
                .collect::<Result<_>>()?;
            concatenate(&means.iter().collect::<Vec<_>>(), 1)?
        } else {
            let firsts: Vec<u32> = begins.map(i32::unsigned_abs).collect();
            states.take_ids(&firsts, 1)?
        };
        if let Some((dense, activation)) = &self.dense {
            let y = dense.forward(&x)?;
            x = match activation {
                HeadActivation::Tanh => y.tanh()?,
                HeadActivation::Other(activation) => activation.apply(&y)?,
            };
        }
        self.out.forward(&through(self.norm.as_ref(), &x)?)
    }
}
