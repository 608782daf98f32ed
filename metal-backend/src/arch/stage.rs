//! This process's stage in a pipeline. Other processes compute the preceding and following blocks.
//! Each stage sends its hidden states to the next stage. The last stage distributes its states to
//! all stages, so that each process can compute the logits.
//!
//! All stages must make the same calls in the same order. A stage sends its states to the next
//! stage during the forward pass, even if the caller never evaluates the result. In contrast, the
//! states from the last stage are part of the logits' graph, so prefill steps do not wait for them.

use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Array, Dtype, Result, async_eval};

/// The position of this process among the stages.
#[derive(Debug)]
pub struct Stage {
    group: Group,
    rank: i32,
    size: i32,
    hidden: i32,
    dtype: Dtype,
    has_recurrent: bool,
}

impl Stage {
    /// Creates the stage of this process's rank. Stages exchange hidden states `[1, T, hidden]` of
    /// `dtype`. `has_recurrent` says whether any stage has recurrent layers.
    pub fn new(group: Group, hidden: i32, dtype: Dtype, has_recurrent: bool) -> Self {
        Self {
            group,
            rank: group.rank(),
            size: group.size(),
            hidden,
            dtype,
            has_recurrent,
        }
    }

    /// Whether any stage of the model has recurrent layers.
    pub fn has_recurrent(&self) -> bool {
        self.has_recurrent
    }

    /// Whether this stage computes the first blocks.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Whether this stage computes the last blocks.
    pub fn is_last(&self) -> bool {
        self.rank + 1 == self.size
    }

    /// Receives the previous stage's output for `positions` tokens, `[1, positions, hidden]`.
    pub fn receive(&self, positions: i32) -> Result<Array> {
        let x = self.from(self.rank - 1, positions)?;
        // The previous stage always sends its output. So this stage must receive it even if the
        // result is not used.
        async_eval([&x])?;
        Ok(x)
    }

    /// Distributes the output of the last blocks to all stages, and returns it. `x` is the output
    /// of this stage. `positions` is the number of positions in the output of the last stage.
    pub fn finish(&self, x: &Array, positions: i32) -> Result<Array> {
        if self.is_last() {
            return self.to(0, x);
        }
        async_eval([&self.to(self.rank + 1, x)?])?;
        // The ring backend sends only to neighbors. So the last stage sends its states to the first
        // stage, and each stage forwards them to the next.
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
