//! Matrices for the kernels' products. Their shapes and types are checked once, when a matrix is
//! made. `projection.rs` has the products.

use mlx_cpu_kernels::{DenseType, MatrixFormat, PrefillInputs, Size, dim};

use super::enabled;
use super::projection::{Epilogue, Projection};
use super::quantized::QuantizedMatrix;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// The sizes `n` and `k` of a shape `[n, k]`; `None` if one is zero or the shape is another.
pub(super) fn size_of(shape: &[i32]) -> Option<Size> {
    match *shape {
        [n, k] if n > 0 && k > 0 => Some(Size {
            n: dim(n),
            k: dim(k),
        }),
        _ => None,
    }
}

/// The element type for the kernels; `None` for a type that they do not support.
fn number_of(dtype: Dtype) -> Option<DenseType> {
    match dtype {
        Dtype::Float32 => Some(DenseType::F32),
        Dtype::Float16 => Some(DenseType::F16),
        Dtype::Bfloat16 => Some(DenseType::Bf16),
        _ => None,
    }
}

/// A matrix of float32, float16 or bfloat16. Products convert 16-bit values to float32 when they
/// read them.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::DenseMatrix};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
///     if let Some(matrix) = DenseMatrix::new(&weight)? {
///         let y = matrix.product(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
///         assert_eq!(y.to_vec::<f32>()?, [21.0, 43.0]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DenseMatrix {
    weight: Array,
    size: Size,
    pub(super) number: DenseType,
}

impl DenseMatrix {
    /// Whether the kernels are enabled and support this type.
    /// ```
    /// use mlx_rs_core::{Dtype, cpu};
    /// assert_eq!(cpu::DenseMatrix::supports(Dtype::Bfloat16), cpu::enabled());
    /// assert!(!cpu::DenseMatrix::supports(Dtype::Int32));
    /// ```
    pub fn supports(dtype: Dtype) -> bool {
        enabled() && number_of(dtype).is_some()
    }

    /// The matrix `[n, k]` for the kernels; `None` if the kernels are disabled or do not support
    /// its type.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(weight: &Array) -> Result<Option<Self>> {
        let (Some(size), true, Some(number)) = (
            size_of(weight.shape()),
            enabled(),
            number_of(weight.dtype()),
        ) else {
            return Ok(None);
        };
        let [weight] = contiguous([weight])?;
        Ok(Some(Self {
            weight,
            size,
            number,
        }))
    }

    /// The elements, `[n, k]`.
    /// ```
    /// use mlx_rs_core::{Array, cpu::DenseMatrix};
    /// let weight = Array::from_slice(&[1.0f32, 2.0], &[1, 2])?;
    /// if let Some(matrix) = DenseMatrix::new(&weight)? {
    ///     assert_eq!(matrix.weight().shape(), [1, 2]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn weight(&self) -> &Array {
        &self.weight
    }

    /// Products of `x` with the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::product`].
    pub fn product(&self, x: &Array) -> Result<Array> {
        Matrix::Dense(self.clone()).product(x)
    }
}

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
    /// Products of `x` with the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`Projection::of`].
    pub fn product(&self, x: &Array) -> Result<Array> {
        self.product_with(x, false)
    }

    /// [`Self::product`]. With `float_inputs`, inputs are never quantized.
    pub(super) fn product_with(&self, x: &Array, float_inputs: bool) -> Result<Array> {
        let parts = [(self, None)];
        Projection {
            parts: &parts,
            norm: None,
            then: Epilogue::None,
        }
        .with(x, float_inputs)
    }

    /// The type of prefill inputs; see [`QuantizedMatrix::with_prefill_inputs`].
    pub(super) fn prefill_inputs(&self) -> PrefillInputs {
        match self {
            Self::Quantized(m) => m.prefill_inputs(),
            Self::Dense(_) => PrefillInputs::Float32,
        }
    }

    /// The number of rows of the matrix, which is the number of outputs.
    pub fn outputs(&self) -> i32 {
        // The number was an `i32` in the matrix's shape.
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
    pub(super) fn arrays(&self) -> Vec<&Array> {
        match self {
            Matrix::Quantized(q) => q.inputs(),
            Matrix::Dense(d) => vec![&d.weight],
        }
    }
}

/// The arrays, or row-contiguous copies of those that are not row-contiguous.
fn contiguous<const N: usize>(arrays: [&Array; N]) -> Result<[Array; N]> {
    let all: Vec<Array> = arrays
        .iter()
        .map(|a| a.contiguous())
        .collect::<Result<_>>()?;
    crate::eval(&all)?;
    <[Array; N]>::try_from(all)
        .map_err(|_| Error::new(ErrorKind::Mlx, "contiguous", "arrays were lost"))
}
