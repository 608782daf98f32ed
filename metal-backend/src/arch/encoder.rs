//! The encoder of BERT and its successors: an embedding, blocks of bidirectional attention and
//! feed-forward parts, and an optional classifier. Several texts are packed one after another,
//! without padding and without caches. The fields determine the positions of norms and the kind of
//! position encoding.

use std::collections::BTreeMap;
use std::sync::Arc;

use mlx_rs_core::transforms::checkpoint_tree;
use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate};

use super::{Decoder, Encoder, EncoderInput};
use crate::cache::{CacheOptions, Caches, LayerState, Row};
use crate::error::engine;
use crate::exec::Locality;
use crate::nn::adapter::{self, Scope};
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;
use crate::nn::norm::through;
use crate::nn::{Activation, Attention, Embedding, FeedForward, Linear, Norm};

/// One block. A norm is `None` if the family does not have it.
#[derive(Debug)]
pub struct EncoderBlock {
    /// The norm before attention.
    pub attention_in: Option<Norm>,
    /// Bidirectional attention.
    pub attention: Attention,
    /// The maximum distance to an attended position; `None` if unlimited.
    pub reach: Option<i32>,
    /// For each query head, the factor on the distance of two positions. The product is subtracted
    /// from the score (`ALiBi`).
    pub slopes: Option<Arc<[f32]>>,
    /// The norm on attention's output, before the residual sum.
    pub attention_out: Option<Norm>,
    /// The norm after the residual sum (BERT).
    pub after_attention: Option<Norm>,
    /// The norm on the sum of the block's input and [`Self::after_attention`]'s output. Only blocks
    /// that add their input a second time have it (JinaBERT with norms of queries and keys).
    pub after_second_sum: Option<Norm>,
    /// The norm before the feed-forward part.
    pub mlp_in: Option<Norm>,
    /// The feed-forward part.
    pub mlp: FeedForward,
    /// The norm on the feed-forward output, before the residual sum.
    pub mlp_out: Option<Norm>,
    /// The norm after the residual sum (BERT).
    pub after_mlp: Option<Norm>,
}

impl EncoderBlock {
    /// Returns the block with its matrices in the layout in which an encoder's products are
    /// fastest.
    ///
    /// # Errors
    /// If a matrix cannot be read.
    pub fn packed(mut self) -> inference::Result<Self> {
        let attention = &mut self.attention;
        let matrices = [
            Some(&mut attention.q_proj),
            attention.k_proj.as_mut(),
            attention.v_proj.as_mut(),
            Some(&mut attention.o_proj),
        ];
        let parts = match &mut self.mlp {
            FeedForward::Gated(mlp) => vec![&mut mlp.gate, &mut mlp.up, &mut mlp.down],
            FeedForward::Plain(mlp) => vec![&mut mlp.up, &mut mlp.down],
            _ => Vec::new(),
        };
        for linear in matrices.into_iter().flatten().chain(parts) {
            *linear = linear.clone().into_columns().map_err(engine("encoder"))?;
        }
        Ok(self)
    }

    /// Computes [`Self::forward`] of block `layer`, and recomputes it in the backward pass
    /// (gradient checkpointing).
    fn forward_again(
        self: &Arc<Self>,
        x: &Array,
        lengths: &[i32],
        layer: usize,
        scope: &Scope,
    ) -> Result<Array> {
        let (block, lengths) = (Arc::clone(self), lengths.to_vec());
        let frozen = Scope {
            params: BTreeMap::new(),
            ..scope.clone()
        };
        let one = |what: &str| Error::new(ErrorKind::Value, "encoder block", what);
        let again = checkpoint_tree(move |params: &BTreeMap<String, Array>, x: &[Array]| {
            let [x] = x else {
                return Err(one("one input is expected"));
            };
            let scope = Scope {
                params: params.clone(),
                ..frozen.clone()
            };
            adapter::within(Arc::new(scope), || Ok(vec![block.forward(x, &lengths)?]))
        });
        again(&scope.of_block(layer), std::slice::from_ref(x))?
            .pop()
            .ok_or_else(|| one("there is no output"))
    }

    /// Maps `[1, T, hidden]` to `[1, T, hidden]`. `lengths` are the numbers of tokens of the texts.
    fn forward(&self, x: &Array, lengths: &[i32]) -> Result<Array> {
        // Without a norm on its output, the output projection itself can add the residual stream.
        let add = self.attention_out.is_none();
        let input = (x, self.attention_in.as_ref(), add);
        let locality = Locality {
            reach: self.reach,
            slopes: self.slopes.as_deref(),
        };
        let mut h = self.attention.encode(input, lengths, locality)?;
        if !add {
            h = x.add(&through(self.attention_out.as_ref(), &h)?)?;
        }
        h = through(self.after_attention.as_ref(), &h)?;
        if let Some(norm) = &self.after_second_sum {
            h = norm.forward(&x.add(&h)?)?;
        }
        let norm = self.mlp_in.as_ref();
        let y = match &self.mlp_out {
            None => self.mlp.forward_from(norm, &h, Some(&h))?,
            Some(out) => h.add(&out.forward(&self.mlp.forward_from(norm, &h, None)?)?)?,
        };
        through(self.after_mlp.as_ref(), &y)
    }
}

/// Learned position embeddings.
#[derive(Debug)]
pub struct Places {
    /// One row per position.
    pub table: Embedding,
    /// The table's row for the first token. RoBERTa reserves the first rows for padding.
    pub first: i32,
}

/// An encoder of [`EncoderBlock`]s.
#[derive(Debug)]
pub struct EncoderStack {
    /// Token ids to vectors.
    pub embedding: Embedding,
    /// The factor on embeddings.
    pub embedding_scale: Option<Array>,
    /// Learned position embeddings, added to the token embeddings.
    pub places: Option<Places>,
    /// Segment embeddings for the two texts of a pair, added to the token embeddings.
    pub types: Option<Embedding>,
    /// The norm on the sum of embeddings.
    pub embedding_norm: Option<Norm>,
    /// The blocks, first to last.
    pub blocks: Vec<Arc<EncoderBlock>>,
    /// The norm after the blocks.
    pub norm: Option<Norm>,
    /// The maximum number of tokens in a text.
    pub max_length: Option<usize>,
    /// The classifier, if the checkpoint has one.
    pub classifier: Option<Classifier>,
}

impl EncoderStack {
    /// Returns the input of the first block, `[1, T, hidden]`.
    fn embedded(&self, input: &EncoderInput<'_>) -> Result<Array> {
        let row = |values: &[u32]| Array::vector(values)?.expand_dims(0);
        let mut x = self.embedding.forward(&row(input.ids)?)?; // [1, T] -> [1, T, hidden]
        if let Some(scale) = &self.embedding_scale {
            x = x.multiply(scale)?;
        }
        if let Some(places) = &self.places {
            let lengths = input.lengths.iter();
            let place_ids: Vec<i32> = lengths
                .flat_map(|&n| places.first..places.first.saturating_add(n))
                .collect();
            let place_ids = Array::vector(&place_ids)?.expand_dims(0)?;
            x = x.add(&places.table.forward(&place_ids)?)?;
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
        for (layer, block) in self.blocks.iter().enumerate() {
            x = match adapter::scope().filter(|scope| scope.checkpoint) {
                Some(scope) => block.forward_again(&x, input.lengths, layer, &scope)?,
                None => block.forward(&x, input.lengths)?,
            };
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

/// The activation of the classifier's hidden layer.
#[derive(Debug, Clone, Copy)]
pub enum HeadActivation {
    /// Hyperbolic tangent.
    Tanh,
    /// An activation function of feed-forward parts.
    Other(Activation),
}

/// Computes scores from the hidden states of a text.
#[derive(Debug)]
pub struct Classifier {
    /// Whether the classifier reads the mean of all states, instead of the first state.
    pub mean: bool,
    /// The hidden layer and its activation.
    pub dense: Option<(Linear, HeadActivation)>,
    /// The norm on the hidden layer's output.
    pub norm: Option<Norm>,
    /// The output layer.
    pub out: Linear,
}

impl Classifier {
    /// Returns the scores `[1, texts, labels]` for hidden states `[1, T, hidden]`.
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
