//! Dense matrices for the kernels, as rows or in the layout of encoders.

use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use mlx_cpu_kernels::{ColumnMatrix, DenseType, Isa, Size, dim};

use super::enabled;
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
    pub(super) size: Size,
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
    pub(super) fn kept_rows(&self) -> Result<&Array> {
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
