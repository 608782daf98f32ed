//! The token embedding: ids to vectors, and back to logits where the output is tied to it.

use mlx_rs_core::{Array, Dtype, Result};

use super::adapter::SlotView;
use super::linear::Linear;
use crate::exec::Weight;

/// A table `[vocab, hidden]`.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Weight,
    /// The same table as an output; it shares the memory.
    output: Linear,
    dtype: Dtype,
    /// Where adapters stand.
    slot: Option<SlotView>,
}

impl Embedding {
    /// From a table, dense or quantized; vectors come out as `dtype`. `on_cpu` as in
    /// [`Linear::new`].
    ///
    /// # Errors
    /// When the parts of a quantized table do not fit each other.
    pub fn new(weight: Weight, dtype: Dtype, on_cpu: bool) -> Result<Self> {
        let weight = weight.in_layout(on_cpu)?;
        Ok(Self {
            output: Linear::new(weight.clone(), None, on_cpu)?,
            weight,
            dtype,
            slot: None,
        })
    }

    /// The same table at a slot that can be adapted, as the output that it may be, too.
    #[must_use]
    pub fn at(mut self, slot: SlotView) -> Self {
        self.output = self.output.at(slot.clone());
        self.slot = Some(slot);
        self
    }

    /// Ids `[B, L]` to vectors `[B, L, hidden]`. An id beyond the table takes the last row: the
    /// caller checks ids it knows, and an id sampled from the logits is below the vocabulary.
    ///
    /// # Errors
    /// When the ids are not integers.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        let plain = || self.weight.take_rows(ids, self.dtype);
        let adapted = match self.slot.as_ref().filter(|p| p.is_adapted()) {
            Some(slot) => slot.rows(ids, plain, self.dtype)?,
            None => None,
        };
        match adapted {
            Some(rows) => Ok(rows),
            None => plain(),
        }
    }

    /// Vectors `[.., hidden]` to logits `[.., vocab]` with the same table.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn as_output(&self, x: &Array) -> Result<Array> {
        self.output.forward(x)
    }
}
