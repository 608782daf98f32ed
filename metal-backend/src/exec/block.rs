//! Decides which decoder blocks our kernels compute as one operation. `arch/stack.rs` computes all
//! other blocks.

use mlx_rs_core::{Array, Dtype, Result};

use super::activation::Activation;
use super::attention::Heads;
use super::matrix::{NormSpec, Part, biased};

/// The kernels' types: a block, and a row's tokens with the memory of their keys and values.
pub use mlx_rs_core::cpu::{Block, KvSlot};

/// The maximum number of tokens for a fused block: the default prefill step. For more tokens, MLX
/// should allocate the intermediate results, because it counts only its own memory.
const MOST_TOKENS: i32 = 512;

/// A decoder block: `h = x + attention(norm(x))`, then
/// `h + down(act(gate(norm(h))) * up(norm(h)))`.
/// A matrix is `None` if it is missing or an adapter changes it.
#[derive(Debug, Clone, Copy)]
pub struct BlockSpec<'a> {
    /// The norm before attention.
    pub attention_norm: NormSpec<'a>,
    /// The query, key and value projections.
    pub projections: [Option<Part<'a>>; 3],
    /// The output projection.
    pub output: Option<Part<'a>>,
    /// The norm before the feed-forward block.
    pub feed_norm: NormSpec<'a>,
    /// The gate's activation.
    pub activation: Activation,
    /// The gate and up projections.
    pub gate_up: [Option<Part<'a>>; 2],
    /// The down projection.
    pub down: Option<Part<'a>>,
}

impl<'a> BlockSpec<'a> {
    /// Whether blocks can be fused for `x` `[1, T, hidden]`.
    ///
    /// # Errors
    /// If `x` has fewer than two axes.
    pub fn take(x: &Array) -> Result<bool> {
        Ok(x.dtype() == Dtype::Float32 && x.dim(1)? <= MOST_TOKENS)
    }

    /// Returns the block in the kernels' form, with these heads; `None` if the kernels do not
    /// support the block.
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
