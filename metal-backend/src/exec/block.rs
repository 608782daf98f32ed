//! Which whole decoder blocks our kernels have as one operation. What they compute without these is
//! in `arch/stack.rs`.

use mlx_rs_core::{Array, Dtype, Result};

use super::activation::Activation;
use super::attention::Heads;
use super::matrix::{NormSpec, Part, biased};

/// A block for the kernels, and a row's tokens with room for their keys and values.
pub use mlx_rs_core::cpu::{Block, KvSlot};

/// The most tokens that go through blocks in one operation, which is the default size of a prefill
/// step. With more, the memory between the parts should be MLX's, which is counted.
const MOST_TOKENS: i32 = 512;

/// `h = x + attention(norm(x))`, then `h + down(act(gate(norm(h))) * up(norm(h)))`. A part is
/// `None` where there is none, or an adapter changes it.
#[derive(Debug, Clone, Copy)]
pub struct BlockSpec<'a> {
    /// Before the attention.
    pub attention_norm: NormSpec<'a>,
    /// To queries, keys and values.
    pub projections: [Option<Part<'a>>; 3],
    /// From what the heads found.
    pub output: Option<Part<'a>>,
    /// Before the feed-forward part.
    pub feed_norm: NormSpec<'a>,
    /// Of the gate.
    pub activation: Activation,
    /// What goes through the activation, and what it is multiplied with.
    pub gate_up: [Option<Part<'a>>; 2],
    /// From their product.
    pub down: Option<Part<'a>>,
}

impl<'a> BlockSpec<'a> {
    /// Whether blocks can be one operation for `x` `[1, T, hidden]`.
    ///
    /// # Errors
    /// When `x` has fewer than two axes.
    pub fn take(x: &Array) -> Result<bool> {
        Ok(x.dtype() == Dtype::Float32 && x.dim(1)? <= MOST_TOKENS)
    }

    /// The block with these heads; `None` where the kernels do not have all of it.
    pub fn block(&self, heads: &'a Heads) -> Option<Block<'a>> {
        let [q, k, v] = self.projections;
        let [gate, up] = self.gate_up;
        Some(Block {
            heads,
            attention_norm: self.attention_norm.kernel()?,
            projections: [biased(q)?, biased(k)?, biased(v)?],
            output: biased(self.output)?,
            feed_norm: self.feed_norm.kernel()?,
            gate: self.activation.kernel()?,
            gate_up: [biased(gate)?, biased(up)?],
            down: biased(self.down)?,
        })
    }
}
