//! The place of this process in a pipeline: others compute the blocks before and after its own.
//! Hidden states go from neighbor to neighbor, and the last ones to all, so that each process has
//! the logits.
//!
//! All stages must make the same calls in the same order. The forward pass itself sends states to
//! the next stage, whether the caller evaluates its result or not. What the last stage sends back is
//! part of the graph of the logits. So the steps of a prompt do not wait for each other.

use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Array, Dtype, Result, async_eval};

/// This process among the stages.
#[derive(Debug)]
pub struct Stage {
    group: Group,
    rank: i32,
    size: i32,
    hidden: i32,
    dtype: Dtype,
}

impl Stage {
    /// The stage of this process's rank, between which hidden states `[1, T, hidden]` of `dtype`
    /// go.
    pub fn new(group: Group, hidden: i32, dtype: Dtype) -> Self {
        Self {
            group,
            rank: group.rank(),
            size: group.size(),
            hidden,
            dtype,
        }
    }

    /// Whether it has the first blocks.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Whether it has the last blocks.
    pub fn is_last(&self) -> bool {
        self.rank + 1 == self.size
    }

    /// What the stage before made of `positions` tokens, `[1, positions, hidden]`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn receive(&self, positions: i32) -> Result<Array> {
        let x = self.from(self.rank - 1, positions)?;
        // The stage before sends it, also where nothing here is asked for.
        async_eval([&x])?;
        Ok(x)
    }

    /// The output of the last blocks, in all stages. `x` is the output of this stage's, of which
    /// the last stage has left `positions`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn finish(&self, x: &Array, positions: i32) -> Result<Array> {
        if self.is_last() {
            return self.to(0, x);
        }
        async_eval([&self.to(self.rank + 1, x)?])?;
        // Around the ring, which only neighbors can send on: the last one, the first, and so on.
        let before = (self.rank + self.size - 1) % self.size;
        let last = self.from(before, positions)?;
        if self.rank + 2 < self.size {
            return self.to(self.rank + 1, &last);
        }
        Ok(last)
    }

    fn from(&self, rank: i32, positions: i32) -> Result<Array> {
        let shape = [1, positions, self.hidden];
        self.group.recv(&shape, self.dtype, rank)
    }

    fn to(&self, rank: i32, x: &Array) -> Result<Array> {
        self.group.send(&x.astype(self.dtype)?.contiguous()?, rank)
    }
}
