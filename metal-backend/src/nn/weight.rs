//! A weight as it is stored in memory: plain, quantized, or in the order of our own kernels.

use mlx_rs_core::{Array, Dtype, Quantized, Result, cpu};

/// A weight matrix `[out, in]` as it is stored in memory.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Plain numbers.
    Dense(Array),
    /// Packed integers with scales per group.
    Quantized(Quantized),
    /// The same in the order of our own kernels.
    Interleaved(cpu::QuantizedMatrix),
}

impl Weight {
    /// Bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Dense(w) => w.nbytes(),
            Weight::Quantized(q) => q.nbytes(),
            Weight::Interleaved(m) => m.nbytes(),
        }
    }

    /// The same in the order of our own kernels where they are on and have its format. What it came from can go then.
    ///
    /// # Errors
    /// When its parts do not fit each other, or memory runs out.
    pub fn for_kernels(self) -> Result<Self> {
        Ok(match self {
            Weight::Quantized(q) => match cpu::QuantizedMatrix::new(&q)? {
                Some(matrix) => Weight::Interleaved(matrix),
                None => Weight::Quantized(q),
            },
            other => other,
        })
    }

    /// The integers, scales and biases as MLX's own operations read them; `None` for plain numbers and
    /// for a format that only the kernels have.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn quantized(&self) -> Result<Option<Quantized>> {
        match self {
            Weight::Dense(_) => Ok(None),
            Weight::Quantized(q) => Ok(Some(q.clone())),
            Weight::Interleaved(m) if m.has_super_scales() => Ok(None),
            Weight::Interleaved(m) => m.to_quantized().map(Some),
        }
    }

    /// Bits and group size; `None` for plain numbers.
    pub fn format(&self) -> Option<(i32, i32)> {
        match self {
            Weight::Dense(_) => None,
            Weight::Quantized(q) => Some((q.bits, q.group_size)),
            Weight::Interleaved(m) => Some((m.bits(), m.group_size())),
        }
    }

    /// `[out, in]`, or `[experts, out, in]`.
    pub fn shape(&self) -> Vec<i32> {
        match self {
            Weight::Dense(w) => w.shape().to_vec(),
            Weight::Quantized(q) => {
                let mut shape = q.scales.shape().to_vec();
                if let Some(last) = shape.last_mut() {
                    *last = last.saturating_mul(q.group_size);
                }
                shape
            }
            Weight::Interleaved(m) => m.shape().to_vec(),
        }
    }

    /// As plain numbers of `dtype`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn dense(&self, dtype: Dtype) -> Result<Array> {
        match self {
            Weight::Dense(w) => w.astype(dtype),
            Weight::Quantized(q) => q.dequantize(dtype),
            Weight::Interleaved(m) if m.has_super_scales() => {
                all_rows(m, 0, m.shape()[0])?.astype(dtype)
            }
            Weight::Interleaved(m) => m.to_quantized()?.dequantize(dtype),
        }
    }

    /// Some of its rows; they share its memory, unless it is interleaved and they do not begin and end where eight do.
    ///
    /// # Errors
    /// When there are not so many.
    pub fn rows(&self, from: i32, to: i32) -> Result<Self> {
        let cut = |a: &Array| a.slice_axis(-2, from, to);
        Ok(match self {
            Weight::Dense(w) => Weight::Dense(cut(w)?),
            Weight::Quantized(q) => Weight::Quantized(Quantized {
                weight: cut(&q.weight)?,
                scales: cut(&q.scales)?,
                biases: q.biases.as_ref().map(cut).transpose()?,
                ..*q
            }),
            Weight::Interleaved(m) => match m.rows(from, to)? {
                Some(rows) => Weight::Interleaved(rows),
                None if m.has_super_scales() => Weight::Dense(all_rows(m, from, to)?),
                None => return Weight::Quantized(m.to_quantized()?).rows(from, to),
            },
        })
    }

    /// The arrays it consists of, for evaluation at load.
    pub fn arrays(&self) -> Vec<&Array> {
        match self {
            Weight::Dense(w) => vec![w],
            Weight::Quantized(q) => [Some(&q.weight), Some(&q.scales), q.biases.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
            Weight::Interleaved(m) => m.arrays().iter().collect(),
        }
    }
}
/// Rows `from..to` as plain numbers.
fn all_rows(matrix: &cpu::QuantizedMatrix, from: i32, to: i32) -> Result<Array> {
    let ids: Vec<i32> = (from..to).collect();
    let count = to.saturating_sub(from).max(0);
    matrix.take_rows(&Array::from_slice(&ids, &[count])?)
}
