//! Matrices for the kernels' products. Their shapes and types are checked once, when a matrix is
//! made. `projection.rs` has the products.

use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use mlx_cpu_kernels::{ColumnMatrix, DenseType, Isa, MatrixFormat, PrefillInputs, Size, dim};

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
    form: Form,
    size: Size,
    pub(super) number: DenseType,
}

/// The layout of a dense matrix.
#[derive(Debug, Clone)]
enum Form {
    /// `[n, k]`.
    Rows(Array),
    /// Packed for products with the kernels of encoders. `rows` is the matrix `[n, k]`, as soon as
    /// an operation needs it.
    Columns {
        packed: Arc<ColumnMatrix>,
        rows: Arc<OnceLock<Array>>,
    },
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
            form: Form::Rows(weight),
            size,
            number,
        }))
    }

    /// The matrix in another layout, which makes products without gradients faster, in particular
    /// those of fewer than some hundred rows. Sums of a product then have another order. Operations
    /// other than such products convert the matrix back, once, and keep both layouts. The matrix
    /// does not change if there is no kernel for the instruction set and the type.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::DenseMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)? {
    ///         let matrix = matrix.into_columns()?;
    ///         let y = matrix.product(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
    ///         assert_eq!(y.to_vec::<f32>()?, [21.0, 43.0]);
    ///         assert_eq!(matrix.weight()?.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the elements cannot be read.
    pub fn into_columns(self) -> Result<Self> {
        let Form::Rows(weight) = &self.form else {
            return Ok(self);
        };
        let (isa, k) = (Isa::detect(), self.size.k);
        let bits = |all: &mut dyn Iterator<Item = u16>| all.collect::<Vec<_>>();
        let half = |bits: Vec<u16>| ColumnMatrix::from_half(isa, &bits, self.number, k);
        let packed = match self.number {
            DenseType::F32 => ColumnMatrix::from_f32(isa, &weight.data::<f32>()?, k),
            DenseType::F16 => {
                let all = weight.data::<f16>()?;
                half(bits(&mut all.iter().map(|v| v.to_bits())))
            }
            DenseType::Bf16 => {
                let all = weight.data::<bf16>()?;
                half(bits(&mut all.iter().map(|v| v.to_bits())))
            }
        };
        Ok(match packed {
            None => self,
            Some(packed) => Self {
                form: Form::Columns {
                    packed: Arc::new(packed),
                    rows: Arc::default(),
                },
                ..self
            },
        })
    }

    /// The packed matrix, if it is packed by [`Self::into_columns`].
    pub(super) fn columns(&self) -> Option<&Arc<ColumnMatrix>> {
        match &self.form {
            Form::Rows(_) => None,
            Form::Columns { packed, .. } => Some(packed),
        }
    }

    /// The elements, `[n, k]`.
    ///
    /// # Errors
    /// When memory runs out.
    /// ```
    /// use mlx_rs_core::{Array, cpu::DenseMatrix};
    /// let weight = Array::from_slice(&[1.0f32, 2.0], &[1, 2])?;
    /// if let Some(matrix) = DenseMatrix::new(&weight)? {
    ///     assert_eq!(matrix.weight()?.shape(), [1, 2]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn weight(&self) -> Result<Array> {
        match &self.form {
            Form::Rows(weight) => Ok(weight.clone()),
            Form::Columns { packed, rows } => match rows.get() {
                Some(rows) => Ok(rows.clone()),
                None => unpacked(packed),
            },
        }
    }

    /// The elements, `[n, k]`. If the matrix is packed, this keeps them beside the packed ones.
    fn kept_rows(&self) -> Result<&Array> {
        match &self.form {
            Form::Rows(weight) => Ok(weight),
            Form::Columns { packed, rows } => match rows.get() {
                Some(rows) => Ok(rows),
                None => {
                    let unpacked = unpacked(packed)?;
                    Ok(rows.get_or_init(|| unpacked))
                }
            },
        }
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
    ///
    /// # Errors
    /// When memory runs out.
    pub(super) fn arrays(&self) -> Result<Vec<&Array>> {
        match self {
            Matrix::Quantized(q) => Ok(q.inputs()),
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

/// The elements of a packed matrix, `[n, k]`.
fn unpacked(packed: &ColumnMatrix) -> Result<Array> {
    // The sizes were those of an array.
    let shape = [packed.n as i32, packed.k as i32];
    if let Some(rows) = packed.rows_f32() {
        return Array::from_vec(rows, &shape);
    }
    let bits = packed.rows_half().unwrap_or_default();
    match packed.number() {
        DenseType::Bf16 => {
            let rows = bits.into_iter().map(bf16::from_bits).collect();
            Array::from_vec::<bf16>(rows, &shape)
        }
        _ => Array::from_vec::<f16>(bits.into_iter().map(f16::from_bits).collect(), &shape),
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
