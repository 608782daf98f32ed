//! One linear layer for dense and quantized weights: `y = x W^T + b`.

use mlx_rs_core::{Array, Quantized, Result, cpu};

use super::parallel::ParallelMatrix;

/// A weight matrix `[out, in]` as it is stored in memory.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Plain numbers.
    Dense(Array),
    /// Packed integers with scales per group.
    Quantized(Quantized),
}

impl Weight {
    /// Bytes in memory.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Dense(w) => w.nbytes(),
            Weight::Quantized(q) => q.nbytes(),
        }
    }

    /// Some of its rows; they share its memory.
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
        }
    }
}

/// A linear layer.
#[derive(Debug, Clone)]
pub struct Linear {
    kind: Kind,
    bias: Option<Array>,
}

#[derive(Debug, Clone)]
enum Kind {
    /// The transposed view `[in, out]`, made once instead of at every call.
    Dense {
        transposed: Array,
    },
    /// By our own kernel.
    DenseKernel(cpu::DenseMatrix),
    Quantized(ParallelMatrix),
}

impl Linear {
    /// From a weight `[out, in]` and an optional bias `[out]`, for a processor when `on_cpu`.
    ///
    /// # Errors
    /// When the weight is not a matrix.
    pub fn new(weight: Weight, bias: Option<Array>, on_cpu: bool) -> Result<Self> {
        let kind = match weight {
            Weight::Dense(w) => match on_cpu.then(|| cpu::DenseMatrix::new(&w)).transpose()? {
                Some(Some(kernel)) => Kind::DenseKernel(kernel),
                _ => Kind::Dense {
                    transposed: w.swap_axes(0, 1)?,
                },
            },
            Weight::Quantized(q) => Kind::Quantized(ParallelMatrix::new(q, on_cpu)?),
        };
        Ok(Self { kind, bias })
    }

    /// `[.., in] -> [.., out]`.
    ///
    /// # Errors
    /// When `x` does not end in the input dimension.
    pub fn forward(&self, x: &Array) -> Result<Array> {
        match (&self.kind, &self.bias) {
            (Kind::Dense { transposed }, None) => x.matmul(transposed),
            (Kind::Dense { transposed }, Some(b)) => b.addmm(x, transposed, 1.0, 1.0),
            (Kind::DenseKernel(w), None) => w.product(x),
            (Kind::DenseKernel(w), Some(b)) => w.product(x)?.add(b),
            (Kind::Quantized(q), None) => q.product(x),
            (Kind::Quantized(q), Some(b)) => q.product(x)?.add(b),
        }
    }
}
