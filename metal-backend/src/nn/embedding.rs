//! The token embedding: ids to vectors, and back to logits where the output is tied to it.

use mlx_rs_core::{Array, Dtype, Result};

use super::linear::Weight;
use super::parallel::ParallelMatrix;

/// A table `[vocab, hidden]`.
#[derive(Debug, Clone)]
pub struct Embedding {
    weight: Weight,
    /// The same table as an output, where it is quantized and tied.
    output: Option<ParallelMatrix>,
    dtype: Dtype,
}

impl Embedding {
    /// From a table, dense or quantized; vectors come out as `dtype`. `cut` as in
    /// [`ParallelMatrix::new`].
    ///
    /// # Errors
    /// When the parts of a quantized table do not fit each other.
    pub fn new(weight: Weight, dtype: Dtype, cut: bool) -> Result<Self> {
        let output = match &weight {
            Weight::Dense(_) => None,
            Weight::Quantized(q) => Some(ParallelMatrix::new(q.clone(), cut)?),
        };
        Ok(Self {
            weight,
            output,
            dtype,
        })
    }

    /// Ids `[B, L]` to vectors `[B, L, hidden]`. An id beyond the table takes the last row: the
    /// caller checks ids it knows, and an id sampled from the logits is below the vocabulary.
    ///
    /// # Errors
    /// When the ids are not integers.
    pub fn forward(&self, ids: &Array) -> Result<Array> {
        match &self.weight {
            Weight::Dense(w) => w.take_clamped(ids, 0)?.astype(self.dtype),
            Weight::Quantized(q) => q.take_rows(ids)?.dequantize(self.dtype),
        }
    }

    /// Vectors `[.., hidden]` to logits `[.., vocab]` with the same table.
    ///
    /// # Errors
    /// When `x` does not end in the hidden dimension.
    pub fn as_output(&self, x: &Array) -> Result<Array> {
        match (&self.output, &self.weight) {
            (Some(matrix), _) => matrix.product(x),
            (None, Weight::Dense(w)) => x.matmul(&w.swap_axes(0, 1)?),
            (None, Weight::Quantized(q)) => q.matmul_transposed(x),
        }
    }
}
