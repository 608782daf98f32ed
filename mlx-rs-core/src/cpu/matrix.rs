//! A matrix of either kind, quantized or dense. `projection.rs` has the products.

use std::sync::Arc;

use mlx_cpu_kernels::{ColumnMatrix, MatrixFormat, PrefillInputs, Size};

use super::dense::DenseMatrix;
use super::quantized::QuantizedMatrix;
use crate::array::Array;
use crate::error::Result;

/// A quantized or dense matrix. A clone is another handle to the same memory.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix}};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
///     if let Some(matrix) = DenseMatrix::new(&weight)?.map(Matrix::Dense) {
///         assert_eq!(matrix.outputs(), 2);
///         let x = Array::from_slice(&[1.0f32, 10.0], &[1, 2])?;
///         assert_eq!(matrix.product(&x)?.to_vec::<f32>()?, [21.0, 43.0]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum Matrix {
    /// A quantized matrix.
    Quantized(QuantizedMatrix),
    /// A dense matrix.
    Dense(DenseMatrix),
}

impl Matrix {
    /// The type of prefill inputs; see [`QuantizedMatrix::with_prefill_inputs`].
    pub(super) fn prefill_inputs(&self) -> PrefillInputs {
        match self {
            Self::Quantized(m) => m.prefill_inputs(),
            Self::Dense(_) => PrefillInputs::Float32,
        }
    }

    /// The number of rows of the matrix, which is the number of outputs.
    pub fn outputs(&self) -> i32 {
        // The number comes from the matrix's shape, so it fits `i32`.
        self.size().n as i32
    }

    pub(super) fn size(&self) -> Size {
        match self {
            Matrix::Quantized(q) => q.size,
            Matrix::Dense(d) => d.size,
        }
    }

    /// The storage format.
    pub(super) fn kind(&self) -> MatrixFormat {
        match self {
            Matrix::Quantized(q) => MatrixFormat::Quantized {
                bits: q.bits,
                group: q.group,
                scales: q.scales,
            },
            Matrix::Dense(d) => MatrixFormat::Dense(d.number),
        }
    }

    /// The arrays of the matrix, in the order in which kernels read them.
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn arrays(&self) -> Result<Vec<&Array>> {
        match self {
            Matrix::Quantized(q) => q.inputs(),
            Matrix::Dense(d) => d.kept_rows().map(|rows| vec![rows]),
        }
    }

    /// [`DenseMatrix::into_columns`]; a quantized matrix does not change.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::{DenseMatrix, Matrix}};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     if let Some(dense) = DenseMatrix::new(&Array::from_slice(&[1.0f32, 2.0], &[1, 2])?)? {
    ///         assert_eq!(Matrix::Dense(dense).into_columns()?.outputs(), 1);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`DenseMatrix::into_columns`].
    pub fn into_columns(self) -> Result<Self> {
        match self {
            Matrix::Quantized(_) => Ok(self),
            Matrix::Dense(d) => d.into_columns().map(Matrix::Dense),
        }
    }

    /// The packed matrix; see [`DenseMatrix::into_columns`].
    pub(super) fn columns(&self) -> Option<&Arc<ColumnMatrix>> {
        match self {
            Matrix::Quantized(_) => None,
            Matrix::Dense(d) => d.columns(),
        }
    }
}
