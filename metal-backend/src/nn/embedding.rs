//! The token embedding: ids to vectors, and vectors to logits if the output is tied.

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result};

use super::adapter::SlotView;
use super::linear::Linear;
use crate::exec::Weight;

/// A table `[vocab, hidden]`, if this process has it.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// `None` if only the first process of a pipeline has the table.
    table: Option<Table>,
}

#[derive(Debug, Clone)]
struct Table {
    weight: Weight,
    /// The table as an output layer, which shares its memory.
    output: Linear,
    dtype: Dtype,
    /// The slot for adapters.
    slot: Option<SlotView>,
}

impl Embedding {
    /// From a dense or quantized table; vectors have the type `dtype`. `on_cpu` as in
    /// [`Linear::new`].
    ///
    /// # Errors
    /// When the parts of a quantized table do not match.
    pub fn new(weight: Weight, dtype: Dtype, on_cpu: bool) -> Result<Self> {
        let weight = weight.in_layout(on_cpu)?;
        let table = Table {
            output: Linear::new(weight.clone(), None, on_cpu)?,
            weight,
            dtype,
            slot: None,
        };
        Ok(Self { table: Some(table) })
    }

    /// A table that another process has, and this one never reads.
    #[must_use]
    pub fn elsewhere() -> Self {
        Self { table: None }
    }

    fn table(&self) -> Result<&Table> {
        self.table.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "embedding",
                "the table is in the first process of the pipeline",
            )
        })
    }

    /// Sets the slot for adapters, also for the tied output.
    #[must_use]
    pub fn at(mut self, slot: SlotView) -> Self {
        if let Some(table) = self.table.take() {
            self.table = Some(Table {
                output: table.output.at(slot.clone()),
                slot: Some(slot),
                ..table
            });
        }
        self
    }

    /// Ids `[B, L]` to vectors `[B, L, hidden]`. An id beyond the table reads the last row: callers
    /// check the ids that they know, and sampled ids are below the vocabulary.
    ///
    /// # Errors
    /// When the ids are not integers, or another process has the table.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        let table = self.table()?;
        let plain = || table.weight.take_rows(ids, table.dtype);
        let adapted = match table.slot.as_ref().filter(|p| p.is_adapted()) {
            Some(slot) => slot.rows(ids, plain, table.dtype)?,
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
    /// When the last axis of `x` is not the hidden dimension, or another process has the table.
    pub fn as_output(&self, x: &Array) -> Result<Array> {
        self.table()?.output.forward(x)
    }

    /// The table as an output.
    ///
    /// # Errors
    /// When another process has the table.
    pub fn output(&self) -> Result<&Linear> {
        Ok(&self.table()?.output)
    }
}
