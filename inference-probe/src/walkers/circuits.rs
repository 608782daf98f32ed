//! OV circuits of attention heads (Elhage et al. 2021, "A Mathematical Framework for Transformer
//! Circuits"): the vector that a head adds to the residual stream when it attends to a token. For
//! the token's embedding `e`, the vector is `W_O[:, h] W_V[h, :] e`.

use crate::error::{Error, Result};

/// The value and output matrices of one head.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Rows of the value matrix, `[head_dim, hidden]`.
    pub values: &'a [f32],
    /// Columns of the output matrix, `[head_dim, hidden]`.
    pub outputs: &'a [f32],
    /// Elements of a hidden state.
    pub hidden: usize,
}

impl Head<'_> {
    /// The number of elements of a value.
    ///
    /// # Errors
    /// [`Error::Data`] when the two matrices have different shapes or are empty.
    pub fn dim(&self) -> Result<usize> {
        let divides = |m: &[f32]| self.hidden > 0 && m.len().is_multiple_of(self.hidden);
        let alike = self.values.len() == self.outputs.len() && !self.values.is_empty();
        if !alike || !divides(self.values) {
            return Err(Error::data(format!(
                "a head has {} numbers of values and {} of outputs; both must be a number of rows of {}",
                self.values.len(),
                self.outputs.len(),
                self.hidden
            )));
        }
        Ok(self.values.len() / self.hidden)
    }

    /// For each token, the length of the vector that the head adds. `scores` are the dot products
    /// of the rows of `values` with all token embeddings, `[head_dim][tokens]`.
    ///
    /// # Errors
    /// As [`Self::dim`], and when the shape of `scores` does not match the head.
    pub fn lengths(&self, scores: &[Vec<f32>]) -> Result<Vec<f32>> {
        let dim = self.dim()?;
        let tokens = scores.first().map_or(0, Vec::len);
        if scores.len() != dim || scores.iter().any(|row| row.len() != tokens) {
            return Err(Error::data(format!(
                "{} rows of scores are not those of a head of {dim}",
                scores.len()
            )));
        }
        // |W_O v|^2 = v^T G v, where G has the dot products of the columns of W_O.
        let columns: Vec<&[f32]> = self.outputs.chunks_exact(self.hidden).collect();
        let gram: Vec<Vec<f64>> = (columns.iter())
            .map(|a| columns.iter().map(|b| dot(a, b)).collect())
            .collect();
        let mut value = vec![0.0f64; dim];
        let length = |token: usize| {
            for (v, row) in value.iter_mut().zip(scores) {
                *v = f64::from(row[token]);
            }
            let square = |(row, v): (&Vec<f64>, &f64)| -> f64 {
                v * row.iter().zip(&value).map(|(g, w)| g * w).sum::<f64>()
            };
            let square: f64 = gram.iter().zip(&value).map(square).sum();
            square.max(0.0).sqrt() as f32
        };
        Ok((0..tokens).map(length).collect())
    }

    /// The vector `[hidden]` that the head adds for a token. `value` has the dot products of the
    /// token's embedding with the rows of `values`.
    #[must_use]
    pub fn added(&self, value: &[f32]) -> Vec<f32> {
        let mut sum = vec![0.0f64; self.hidden];
        for (v, column) in value
            .iter()
            .zip(self.outputs.chunks_exact(self.hidden.max(1)))
        {
            for (sum, w) in sum.iter_mut().zip(column) {
                *sum += f64::from(*v) * f64::from(*w);
            }
        }
        sum.into_iter().map(|x| x as f32).collect()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum()
}
