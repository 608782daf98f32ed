//! A whole decoder block of a few tokens in one operation of our kernels, where they have all of it. What it
//! computes without them is `arch/stack.rs`; its parts are `attention.rs` and `mlp.rs`.

use mlx_rs_core::{Array, Dtype, Result, cpu};

use super::{Attention, GatedMlp, Norm};
use crate::cache::Row;

/// The most tokens that go through a block in one operation. With more, what lies between its parts had better
/// be MLX's memory, and the time to build the graph is nothing beside the arithmetic.
const FEW: i32 = 64;

/// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.
#[derive(Debug, Clone, Copy)]
pub struct Fused<'a> {
    /// Before the attention.
    pub attention_in: Option<&'a Norm>,
    /// The attention.
    pub attention: &'a Attention,
    /// Before the feed-forward part.
    pub mlp_in: Option<&'a Norm>,
    /// The feed-forward part.
    pub mlp: &'a GatedMlp,
}

impl Fused<'_> {
    /// The output for `x` `[1, T, hidden]`, whose keys and values are stored; `None`, with nothing stored, where the
    /// kernels do not have all of it.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn step(&self, x: &Array, rows: &mut [Row<'_>], layer: usize) -> Result<Option<Array>> {
        let Some(heads) = self.attention.kernel() else {
            return Ok(None);
        };
        let Some(block) = self.block(&heads) else {
            return Ok(None);
        };
        let stores = |row: &Row<'_>| row.caches.get(layer).is_some_and(|cache| cache.stores());
        if x.dtype() != Dtype::Float32 || x.dim(1)? > FEW || !rows.iter().all(stores) {
            return Ok(None);
        }
        let mut rooms = Vec::with_capacity(rows.len());
        for row in rows.iter_mut() {
            if let Some(cache) = row.caches.get_mut(layer) {
                rooms.push(cpu::Room {
                    length: row.length,
                    offset: cache.offset(),
                    memory: cache.memory(&heads, row.length)?,
                    window: self.attention.window,
                });
            }
        }
        let y = block.step(x, &mut rooms)?;
        for row in rows {
            if let Some(cache) = row.caches.get_mut(layer) {
                cache.advance(row.length);
            }
        }
        Ok(Some(y))
    }

    fn block<'b>(&'b self, heads: &'b cpu::Heads) -> Option<cpu::Block<'b>> {
        let norm = |norm: Option<&'b Norm>| match norm {
            None => Some(None),
            Some(norm) => norm.rms().map(Some),
        };
        let (attention, mlp) = (self.attention, self.mlp);
        Some(cpu::Block {
            heads,
            attention_norm: norm(self.attention_in)?,
            projections: [
                attention.q_proj.kernel()?,
                attention.k_proj.as_ref()?.kernel()?,
                attention.v_proj.as_ref()?.kernel()?,
            ],
            output: attention.o_proj.kernel()?,
            feed_norm: norm(self.mlp_in)?,
            gate: mlp.activation.kernel()?,
            gate_up: [mlp.gate.kernel()?, mlp.up.kernel()?],
            down: mlp.down.kernel()?,
        })
    }
}
