//! The token embedding. It maps ids to vectors, and also vectors to logits if the output layer is
//! tied.

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result};

use super::adapter::SlotView;
use super::linear::Linear;
use crate::exec::Weight;

/// An embedding table `[vocab, hidden]`. In a pipeline, some processes have no table.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// `None` in processes that do not load the table, such as later ranks of a pipeline.
    table: Option<Table>,
}

#[derive(Debug, Clone)]
struct Table {
    weight: Weight,
    /// The table as an output layer, which shares the table's memory.
    output: Linear,
    dtype: Dtype,
    /// The slot for adapters.
    slot: Option<SlotView>,
}

impl Embedding {
    /// Creates the layer from a dense or quantized table. Vectors have the type `dtype`. `on_cpu`
    /// means the same as in [`Linear::new`].
    ///
    /// # Errors
    /// If the parts of a quantized table do not match.
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

    /// Creates the layer for a process that does not load the table.
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

    /// Sets the slot for adapters, for the embedding and for the tied output layer.
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

    /// Maps ids `[B, L]` to vectors `[B, L, hidden]`. An id beyond the table reads the last row.
    /// Ids are not checked here: callers check the prompt's ids, and sampled ids are always in the
    /// vocabulary.
    ///
    /// # Errors
    /// If the ids are not integers, or this process has no table.
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

    /// Maps vectors `[.., hidden]` to logits `[.., vocab]` with the same table.
    ///
    /// # Errors
    /// If the last axis of `x` is not the hidden dimension, or this process has no table.
    pub fn as_output(&self, x: &Array) -> Result<Array> {
        self.table()?.output.forward(x)
    }

    /// Returns the table as an output layer.
    ///
    /// # Errors
    /// If this process has no table.
    pub fn output(&self) -> Result<&Linear> {
        Ok(&self.table()?.output)
    }
}
