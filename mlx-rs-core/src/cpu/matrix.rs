//! Matrices that the kernels multiply with: what is checked once. The products are in `project.rs`.

use super::enabled;
use super::project::{Projection, Then};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::ops::{QuantMode, Quantized};

/// The sizes of a matrix `[n, k]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub n: usize,
    pub k: usize,
}

impl Size {
    fn of(shape: &[i32]) -> Option<Self> {
        match *shape {
            [n, k] if n > 0 && k > 0 => Some(Self {
                n: n.unsigned_abs() as usize,
                k: k.unsigned_abs() as usize,
            }),
            _ => None,
        }
    }
}

/// A matrix quantized in affine mode to 4 or 8 bits, with float32 scales.
/// ```
/// use mlx_rs_core::{Array, Device, QuantMode, Quantized, Stream, cpu::QuantizedMatrix};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let weight = Array::from_slice(&[0.5f32; 2 * 32], &[2, 32])?;
///     let packed = Quantized::quantize(&weight, 32, 4, QuantMode::Affine)?;
///     // `None` where `MLX_CPU_KERNELS` is `off`.
///     if let Some(matrix) = QuantizedMatrix::new(&packed)? {
///         let y = matrix.product(&Array::from_slice(&[1.0f32; 32], &[1, 32])?)?;
///         assert_eq!(y.shape(), [1, 2]);
///         assert!((y.to_vec::<f32>()?[1] - 16.0).abs() < 1e-3);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct QuantizedMatrix {
    weight: Array,
    scales: Array,
    biases: Array,
    size: Size,
    pub(super) bits: u32,
    pub(super) group: usize,
    /// Whether scales and biases are kept as float16, which they are without loss where they come from GGUF: a fifth
    /// less to read for each token.
    pub(super) half: bool,
}

impl QuantizedMatrix {
    /// The matrix for the kernels, where they are on and have its format; `None` otherwise.
    ///
    /// # Errors
    /// When its parts do not fit each other, or memory runs out.
    pub fn new(matrix: &Quantized) -> Result<Option<Self>> {
        matrix.validate("cpu::QuantizedMatrix")?;
        let (Some(biases), QuantMode::Affine, 4 | 8) = (&matrix.biases, matrix.mode, matrix.bits)
        else {
            return Ok(None);
        };
        let group = matrix.group_size.unsigned_abs() as usize;
        let k = matrix.scales.shape().last().copied().unwrap_or(0);
        let rows = matrix.weight.shape().first().copied().unwrap_or(0);
        let Some(size) = k
            .checked_mul(matrix.group_size)
            .and_then(|k| Size::of(&[rows, k]))
        else {
            return Ok(None);
        };
        let plain = matrix.scales.dtype() == Dtype::Float32 && matrix.weight.shape().len() == 2;
        if !enabled() || !plain || !matches!(group, 32 | 64 | 128) {
            return Ok(None);
        }
        let parts = [&matrix.weight, &matrix.scales, biases];
        let [weight, scales, biases] = contiguous(parts)?;
        let halves = match (as_half(&scales)?, as_half(&biases)?) {
            (Some(scales), Some(biases)) => Some((scales, biases)),
            _ => None,
        };
        let half = halves.is_some();
        let (scales, biases) = halves.unwrap_or((scales, biases));
        Ok(Some(Self {
            weight,
            scales,
            biases,
            size,
            bits: matrix.bits.unsigned_abs(),
            group,
            half,
        }))
    }

    /// The packed numbers, and scales and biases as float32.
    pub(super) fn in_single(&self) -> Result<[Array; 3]> {
        Ok([
            self.weight.clone(),
            self.scales.astype(Dtype::Float32)?,
            self.biases.astype(Dtype::Float32)?,
        ])
    }

    /// `x` times the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when `x` is of another type or does not end in the matrix's inputs; MLX's
    /// message when the current stream is not on the CPU.
    pub fn product(&self, x: &Array) -> Result<Array> {
        Matrix::Quantized(self.clone()).product(x)
    }
}

/// A matrix of float32.
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
}

impl DenseMatrix {
    /// The matrix `[n, k]` for the kernels, where they are on and it is float32; `None` otherwise.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(weight: &Array) -> Result<Option<Self>> {
        let (Some(size), true, Dtype::Float32) =
            (Size::of(weight.shape()), enabled(), weight.dtype())
        else {
            return Ok(None);
        };
        let [weight] = contiguous([weight])?;
        Ok(Some(Self { weight, size }))
    }

    /// `x` times the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::product`].
    pub fn product(&self, x: &Array) -> Result<Array> {
        Matrix::Dense(self.clone()).product(x)
    }
}

/// A matrix of either kind. A clone is another handle to the same memory.
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
    /// Packed.
    Quantized(QuantizedMatrix),
    /// Plain.
    Dense(DenseMatrix),
}

impl Matrix {
    /// `x` times the transposed matrix, on the CPU: float32 `[.., k] -> [.., n]`.
    ///
    /// # Errors
    /// As [`Projection::of`].
    pub fn product(&self, x: &Array) -> Result<Array> {
        self.product_with(x, false)
    }

    /// [`Self::product`], with floats throughout where `in_floats`.
    pub(super) fn product_with(&self, x: &Array, in_floats: bool) -> Result<Array> {
        let parts = [(self, None)];
        Projection {
            parts: &parts,
            norm: None,
            then: Then::Nothing,
        }
        .with(x, in_floats)
    }

    /// Rows of the matrix: outputs.
    pub fn outputs(&self) -> i32 {
        // It was an i32 in the matrix's shape.
        self.size().n as i32
    }

    pub(super) fn size(&self) -> Size {
        match self {
            Matrix::Quantized(q) => q.size,
            Matrix::Dense(d) => d.size,
        }
    }

    /// The arrays it consists of, in the order that the kernels take them.
    pub(super) fn arrays(&self) -> Vec<&Array> {
        match self {
            Matrix::Quantized(q) => vec![&q.weight, &q.scales, &q.biases],
            Matrix::Dense(d) => vec![&d.weight],
        }
    }
}

/// The numbers as float16, if all of them are such numbers.
fn as_half(a: &Array) -> Result<Option<Array>> {
    let half = a.astype(Dtype::Float16)?;
    let same = half.astype(Dtype::Float32)?.array_equal(a)?;
    Ok(same.then_some(half))
}

/// The arrays in memory, row after row.
fn contiguous<const N: usize>(arrays: [&Array; N]) -> Result<[Array; N]> {
    let all: Vec<Array> = arrays
        .iter()
        .map(|a| a.contiguous())
        .collect::<Result<_>>()?;
    crate::eval(&all)?;
    <[Array; N]>::try_from(all)
        .map_err(|_| Error::new(ErrorKind::Mlx, "contiguous", "arrays were lost"))
}
