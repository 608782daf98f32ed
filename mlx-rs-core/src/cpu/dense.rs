//! Dense matrices for the kernels: as rows, in the layout of encoders, or in a mapped file.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use mlx_cpu_kernels::{
    ColumnMatrix, DenseType, GatherDenseRows, Input, Isa, MatrixOwner, Size, StoredMatrix, dim,
};

use super::enabled;
use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::io::MappedFile;

/// The sizes `n` and `k` of a shape `[n, k]`; `None` for any other shape, or if a size is zero.
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
    /// `[n, k]`, in a mapped file. `rows` is a copy, as soon as an operation needs an array.
    Mapped {
        values: Arc<MappedValues>,
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

    /// The matrix `[n, k]` of `dtype` at these bytes of a file, which are not copied. `None` if the
    /// kernels are disabled or do not support the type, or if the bytes are not aligned to it.
    ///
    /// If the file is truncated, later operations return errors, and the outputs of operations that
    /// already began are NaN. Operations with gradients for the matrix copy it once.
    ///
    /// ```
    /// use mlx_rs_core::{Array, Device, Dtype, Stream, cpu::DenseMatrix, io::MappedFile};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let dir = tempfile::tempdir()?;
    /// let path = dir.path().join("halves");
    /// std::fs::write(&path, [0u8, 60, 0, 192])?; // 1 and -2
    /// let file = MappedFile::open(&path)?;
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     if let Some(matrix) = DenseMatrix::mapped(&file, 0..4, Dtype::Float16, [1, 2])? {
    ///         let y = matrix.product(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?)?;
    ///         assert_eq!(y.to_vec::<f32>()?, [-19.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the bytes are not those of the shape; [`ErrorKind::Value`] when
    /// they lie outside the file; [`ErrorKind::Io`] if the file was truncated.
    pub fn mapped(
        file: &MappedFile,
        bytes: Range<usize>,
        dtype: Dtype,
        shape: [i32; 2],
    ) -> Result<Option<Self>> {
        let fault = |kind, message| Error::new(kind, "cpu::DenseMatrix", message);
        let (Some(number), true) = (number_of(dtype), enabled()) else {
            return Ok(None);
        };
        let size = size_of(&shape).filter(|size| {
            let count = size.n.checked_mul(size.k);
            count.and_then(|count| count.checked_mul(dtype.size())) == Some(bytes.len())
        });
        let Some(size) = size else {
            let message = format!("{} bytes are not {shape:?} of {dtype}", bytes.len());
            return Err(fault(ErrorKind::Shape, message));
        };
        let Some(elements) = file.bytes().get(bytes.clone()) else {
            let message = format!("bytes {bytes:?} lie outside the file");
            return Err(fault(ErrorKind::Value, message));
        };
        let aligned = elements.as_ptr().addr().is_multiple_of(dtype.size());
        if !aligned || cfg!(target_endian = "big") {
            return Ok(None);
        }
        file.check()?;
        Ok(Some(Self {
            form: Form::Mapped {
                values: Arc::new(MappedValues {
                    file: file.clone(),
                    bytes,
                }),
                rows: Arc::default(),
            },
            size,
            number,
        }))
    }

    /// The matrix for an operation without gradients for it, if it is mapped.
    ///
    /// # Errors
    /// If the file was truncated.
    pub(super) fn stored_matrix(&self) -> Result<Option<StoredMatrix>> {
        let Form::Mapped { values, .. } = &self.form else {
            return Ok(None);
        };
        values.file.check()?;
        let owner = Arc::clone(values);
        // SAFETY: `mapped` checked that these bytes are aligned elements of the matrix. The owner
        // keeps the file mapped, and as documented nothing writes to it.
        Ok(Some(unsafe {
            let first = owner.elements().as_ptr();
            let elements = Input::from_raw(first.cast(), self.size.n * self.size.k);
            StoredMatrix::new([elements; 3], owner)
        }))
    }

    /// The type of the elements.
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::DenseMatrix, ones};
    /// if let Some(matrix) = DenseMatrix::new(&ones(&[2, 3], Dtype::Float16)?)? {
    ///     assert_eq!((matrix.dtype(), matrix.shape()), (Dtype::Float16, [2, 3]));
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn dtype(&self) -> Dtype {
        match self.number {
            DenseType::F32 => Dtype::Float32,
            DenseType::F16 => Dtype::Float16,
            DenseType::Bf16 => Dtype::Bfloat16,
        }
    }

    /// The shape, `[n, k]`.
    /// ```
    /// use mlx_rs_core::{Dtype, cpu::DenseMatrix, ones};
    /// let matrix = DenseMatrix::new(&ones(&[2, 3], Dtype::Float32)?)?;
    /// assert!(matrix.is_none_or(|matrix| matrix.shape() == [2, 3]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn shape(&self) -> [i32; 2] {
        // Both sizes come from the matrix's shape, so they fit `i32`.
        [self.size.n as i32, self.size.k as i32]
    }

    /// The rows with these `ids`: integers `[..]` to float32 `[.., k]`, on the CPU. An ID out of
    /// range selects the nearest row.
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] when the IDs are not integers; MLX's message when the current stream is
    /// not on the CPU; if the matrix is in a file that was truncated.
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::DenseMatrix};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let weight = Array::from_slice(&[1.0f32, 2.0], &[2, 1])?;
    ///     if let Some(matrix) = DenseMatrix::new(&weight)? {
    ///         let rows = matrix.take_rows(&Array::from_slice(&[7i32, 0], &[2])?)?;
    ///         assert_eq!(rows.to_vec::<f32>()?, [2.0, 1.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn take_rows(&self, ids: &Array) -> Result<Array> {
        const OP: &str = "cpu::take_rows";
        let Some(stored) = self.stored_matrix()? else {
            return self.weight()?.take_clamped(ids, 0)?.astype(Dtype::Float32);
        };
        let ids = match ids.dtype() {
            Dtype::Int32 | Dtype::Uint32 => ids.clone(),
            _ => Array::clamp_indices(OP, ids, self.shape()[0])?.astype(Dtype::Int32)?,
        };
        let work = GatherDenseRows {
            count: ids.size(),
            signed: ids.dtype() == Dtype::Int32,
            size: self.size,
            number: self.number,
            stored,
            isa: Isa::detect(),
        };
        let shape = [ids.shape(), &self.shape()[1..]].concat();
        host_op::add(OP, OpKind::Opaque, work, &[&ids], &shape)
    }

    /// The matrix in another layout, which makes products without gradients faster, in particular
    /// those of fewer than a few hundred rows. It changes the order of summation in a product.
    /// Operations other than such products convert the matrix back, once, and keep both layouts.
    /// The matrix does not change if there is no kernel for the instruction set and the type.
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
        let weight = match &self.form {
            Form::Rows(weight) => weight.clone(),
            Form::Mapped { .. } => self.weight()?,
            Form::Columns { .. } => return Ok(self),
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
            Form::Rows(_) | Form::Mapped { .. } => None,
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
            Form::Mapped { values, rows } => match rows.get() {
                Some(rows) => Ok(rows.clone()),
                None => values.copied(self.number, &self.shape()),
            },
        }
    }

    /// The elements, `[n, k]`. At the first call, a packed or mapped matrix stores a copy of them.
    pub(super) fn kept_rows(&self) -> Result<&Array> {
        let rows = match &self.form {
            Form::Rows(weight) => return Ok(weight),
            Form::Columns { rows, .. } | Form::Mapped { rows, .. } => rows,
        };
        match rows.get() {
            Some(rows) => Ok(rows),
            None => {
                let copied = self.weight()?;
                Ok(rows.get_or_init(|| copied))
            }
        }
    }
}

/// The elements of a matrix in a mapped file.
#[derive(Debug)]
struct MappedValues {
    file: MappedFile,
    /// Aligned elements within the file.
    bytes: Range<usize>,
}

impl MappedValues {
    fn elements(&self) -> &[u8] {
        self.file
            .bytes()
            .get(self.bytes.clone())
            .unwrap_or_default()
    }

    /// A copy of the elements.
    fn copied(&self, number: DenseType, shape: &[i32]) -> Result<Array> {
        let bytes = self.elements();
        let copy = match number {
            DenseType::F32 => Array::from_slice::<f32>(bytemuck::cast_slice(bytes), shape),
            DenseType::F16 => Array::from_slice::<f16>(bytemuck::cast_slice(bytes), shape),
            DenseType::Bf16 => Array::from_slice::<bf16>(bytemuck::cast_slice(bytes), shape),
        };
        self.file.check()?;
        copy
    }
}

impl MatrixOwner for MappedValues {
    fn is_intact(&self) -> bool {
        !self.file.lost()
    }
}

/// The elements of a packed matrix, `[n, k]`.
fn unpacked(packed: &ColumnMatrix) -> Result<Array> {
    // Both sizes come from an array's shape, so they fit `i32`.
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

#[cfg(test)]
#[path = "dense_tests.rs"]
mod tests;
