//! The decoder that almost every architecture is: an embedding, blocks of attention and
//! feed-forward with residuals around them, a norm, and a head. Where the norms stand and what is
//! scaled are fields; what has another flow (Gemma 4) is a decoder of its own.

use mlx_rs_core::{Array, Dtype, Result, arange};

use super::Decoder;
use crate::cache::{Caches, ChunkedCache, KvCache};
use crate::nn::attention::Positions;
use crate::nn::norm::through;
use crate::nn::{Attention, Embedding, FeedForward, Linear, Norm};

/// One block. Norms that a family does not have are `None`.
#[derive(Debug)]
pub struct Block {
    /// Before the attention; in a parallel block also before the feed-forward part.
    pub attention_in: Option<Norm>,
    /// The attention.
    pub attention: Attention,
    /// On the attention's output, before it is added.
    pub attention_out: Option<Norm>,
    /// Before the feed-forward part.
    pub mlp_in: Option<Norm>,
    /// The feed-forward part.
    pub mlp: FeedForward,
    /// On its output, before it is added.
    pub mlp_out: Option<Norm>,
    /// Factor on what is added to the residual (Granite).
    pub residual: Option<Array>,
    /// Both parts read the same input and are added together (Cohere).
    pub parallel: bool,
}

impl Block {
    /// `[B, L, hidden] -> [B, L or 1, hidden]`.
    fn forward(&self, x: &Array, cache: &mut dyn KvCache, positions: Positions) -> Result<Array> {
        let normed = through(self.attention_in.as_ref(), x)?;
        let attended = self.attention.forward(&normed, cache, positions)?;
        let attended = through(self.attention_out.as_ref(), &attended)?;
        let x = self.add(&positions.of(x)?, &attended)?;
        let input = if self.parallel {
            positions.of(&normed)?
        } else {
            through(self.mlp_in.as_ref(), &x)?
        };
        let y = self.mlp.forward(&input)?;
        self.add(&x, &through(self.mlp_out.as_ref(), &y)?)
    }

    fn add(&self, x: &Array, y: &Array) -> Result<Array> {
        match &self.residual {
            Some(factor) => x.add(&y.multiply(factor)?),
            None => x.add(y),
        }
    }
}

/// From the last block's output to logits.
#[derive(Debug)]
pub struct Head {
    /// `None` when the output is tied to the embedding.
    pub linear: Option<Linear>,
    /// Factor on the logits.
    pub scale: Option<Array>,
    /// Logits are squeezed into `-cap..cap` by a tanh.
    pub softcap: Option<Array>,
}

impl Head {
    /// `[.., hidden] -> [.., vocab]`.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn forward(&self, x: &Array, embedding: &Embedding) -> Result<Array> {
        let mut logits = match &self.linear {
            Some(linear) => linear.forward(x)?,
            None => embedding.as_output(x)?,
        };
        if let Some(scale) = &self.scale {
            logits = logits.multiply(scale)?;
        }
        match &self.softcap {
            Some(cap) => logits.divide(cap)?.tanh()?.multiply(cap),
            None => Ok(logits),
        }
    }
}

/// A decoder of [`Block`]s.
#[derive(Debug)]
pub struct Stack {
    /// Token ids to vectors.
    pub embedding: Embedding,
    /// Factor on them.
    pub embedding_scale: Option<Array>,
    /// Learned positions, added to them (GPT-2).
    pub positions: Option<Embedding>,
    /// The blocks, first to last.
    pub blocks: Vec<Block>,
    /// After them.
    pub norm: Norm,
    /// To logits.
    pub head: Head,
}

impl Decoder for Stack {
    fn forward(&self, ids: &Array, caches: &mut Caches, positions: Positions) -> Result<Array> {
        let mut x = self.embedding.forward(ids)?; // [B, L] -> [B, L, hidden]
        if let Some(scale) = &self.embedding_scale {
            x = x.multiply(scale)?;
        }
        if let Some(table) = &self.positions {
            let start = f64::from(caches.first().map_or(0, |c| c.offset()));
            let length = f64::from(ids.dim(1)?);
            let places = arange(start, start + length, 1.0, Dtype::Int32)?;
            x = x.add(&table.forward(&places)?)?;
        }
        let last = self.blocks.len().saturating_sub(1);
        for (i, (block, cache)) in self.blocks.iter().zip(caches.iter_mut()).enumerate() {
            // Only the last block may drop positions: the others feed the keys of the next.
            let keep = if i == last { positions } else { Positions::All };
            x = block.forward(&x, cache.as_mut(), keep)?;
        }
        self.head.forward(&self.norm.forward(&x)?, &self.embedding)
    }

    fn new_caches(&self) -> Caches {
        self.blocks
            .iter()
            .map(|_| Box::new(ChunkedCache::new()) as _)
            .collect()
    }
}
