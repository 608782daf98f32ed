//! Computes complete decoder blocks as one kernel operation, if our kernels support them. Otherwise
//! `arch/stack.rs` computes the blocks from `attention.rs` and `mlp.rs`.

use mlx_rs_core::{Array, Error, ErrorKind, Result};

use super::attention::Attention;
use super::attention_parts::furthest;
use super::linear::Linear;
use super::mlp::GatedMlp;
use super::norm::{Norm, spec};
use crate::cache::{KvAllocator, LayerState as _, Row, in_place};
use crate::exec::{Block, BlockSpec, Heads, KvSlot};

/// A decoder block for the fused kernel: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.
#[derive(Debug, Clone, Copy)]
pub struct Fused<'a> {
    /// The norm before attention.
    pub attention_in: Option<&'a Norm>,
    /// The attention.
    pub attention: &'a Attention,
    /// The norm before the feed-forward block.
    pub mlp_in: Option<&'a Norm>,
    /// The feed-forward block.
    pub mlp: &'a GatedMlp,
}

impl<'a> Fused<'a> {
    /// Computes as many leading blocks as the kernels support for `x` `[1, T, hidden]`, and stores
    /// their keys and values. Returns the output and the number of blocks. If the kernels do not
    /// support the first block, returns `None` and stores nothing.
    pub fn steps<'f>(
        all: impl Iterator<Item = Fused<'f>>,
        x: &Array,
        rows: &mut [Row<'_>],
        layer: usize,
    ) -> Result<Option<(Array, usize)>> {
        let stores = |row: &mut Row<'_>, at: usize| {
            let cache = row.caches.get_mut(layer + at);
            cache.is_some_and(|cache| in_place(cache).is_some())
        };
        if !BlockSpec::take(x)? {
            return Ok(None);
        }
        let positions = furthest(rows);
        let all: Vec<(Fused<'f>, Heads)> = (all.enumerate())
            .take_while(|(at, _)| rows.iter_mut().all(|row| stores(row, *at)))
            .map_while(|(_, fused)| Some((fused, fused.attention.kernel_heads(positions)?)))
            .collect();
        let blocks: Vec<Block<'_>> = (all.iter())
            .map_while(|(fused, heads)| fused.spec().block(heads))
            .collect();
        let count = blocks.len();
        if count == 0 {
            return Ok(None);
        }
        let mut slots: Vec<Vec<KvSlot<'_>>> = Vec::new();
        slots.resize_with(count, || Vec::with_capacity(rows.len()));
        for row in rows.iter_mut() {
            let caches = row.caches.iter_mut().skip(layer);
            let mut allocator = KvAllocator::new(count);
            for ((cache, slots), (fused, heads)) in caches.zip(&mut slots).zip(&all) {
                let fault = || {
                    let message = "this kind of cache is not written in place";
                    Error::new(ErrorKind::Value, "cache", message)
                };
                let cache = in_place(cache).ok_or_else(fault)?;
                slots.push(KvSlot {
                    length: row.length,
                    offset: cache.offset(),
                    memory: cache.memory(heads, row.length, &mut allocator)?,
                    window: fused.attention.window,
                });
            }
        }
        let mut steps: Vec<_> = (blocks.iter().zip(&mut slots))
            .map(|(block, slots)| (block, slots.as_mut_slice()))
            .collect();
        let y = Block::steps(x, &mut steps)?;
        for row in rows {
            for cache in row.caches.iter_mut().skip(layer).take(count) {
                if let Some(cache) = in_place(cache) {
                    cache.advance(row.length);
                }
            }
        }
        Ok(Some((y, count)))
    }

    /// Returns the description of the block for the kernels.
    fn spec(&self) -> BlockSpec<'a> {
        let (attention, mlp) = (self.attention, self.mlp);
        let part = |layer: Option<&'a Linear>| layer.and_then(Linear::part);
        BlockSpec {
            attention_norm: spec(self.attention_in),
            projections: [
                attention.q_proj.part(),
                part(attention.k_proj.as_ref()),
                part(attention.v_proj.as_ref()),
            ],
            output: attention.o_proj.part(),
            feed_norm: spec(self.mlp_in),
            activation: mlp.activation,
            gate_up: [mlp.gate.part(), mlp.up.part()],
            down: mlp.down.part(),
        }
    }
}
