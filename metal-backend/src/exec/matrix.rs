//! Multiplication by matrices, and operations that are fused with it: a preceding norm, biases, and
//! an epilogue.

use mlx_rs_core::{Array, DeviceKind, Dtype, Error, ErrorKind, Result, Stream, cpu};

use super::activation::Activation;
use super::parallel::ParallelMatrix;
use super::weight::Weight;

/// A matrix `[out, in]`, prepared for multiplication.
#[derive(Debug, Clone)]
pub struct Matrix(Kind);

#[derive(Debug, Clone)]
enum Kind {
    /// The transposed view `[in, out]`, made once instead of in every call.
    Dense { transposed: Array },
    /// Multiplied by our kernels.
    Kernel(cpu::Matrix),
    /// Multiplied by MLX.
    Quantized(ParallelMatrix),
    /// Not loaded.
    Absent,
}

/// The maximum `k` of [`greatest`]. For a greater `k`, it returns `None`.
const MOST_GREATEST: usize = 1024;

/// A matrix with an optional bias `[out]`.
pub type Part<'a> = (&'a Matrix, Option<&'a Array>);

/// The norm before a multiplication, which may be fused with it.
#[derive(Debug, Clone, Copy)]
pub enum NormSpec<'a> {
    /// No norm.
    None,
    /// An RMS norm: its weight, and epsilon.
    Rms(&'a Array, f32),
    /// Another norm, or a norm that an adapter changes.
    Other,
}

impl<'a> NormSpec<'a> {
    /// Returns the norm in the kernels' form; `None` if the kernels do not support the norm.
    pub(super) fn kernel(self) -> Option<cpu::RowNorm<'a>> {
        match self {
            Self::None => Some(None),
            Self::Rms(weight, eps) => Some(Some((weight, eps))),
            Self::Other => None,
        }
    }
}

/// The operation on the outputs of one or several matrices.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue<'a> {
    /// Concatenates the outputs of all matrices along the last axis.
    None,
    /// Adds this array, which has the output's shape.
    Add(&'a Array),
    /// Applies an activation function to the first of two outputs, and multiplies by the second.
    Gate(Activation),
    /// Applies an activation function to the output of one matrix.
    Activate(Activation),
}

impl Matrix {
    /// Prepares a weight `[out, in]`, for a CPU if `on_cpu`.
    pub fn new(weight: Weight, on_cpu: bool) -> Result<Self> {
        Ok(Self(match weight.in_layout(on_cpu)? {
            Weight::Interleaved(m) => Kind::Kernel(cpu::Matrix::Quantized(m)),
            Weight::Quantized(q) => Kind::Quantized(ParallelMatrix::new(q, on_cpu)?),
            Weight::Experts { .. } => {
                let message = "a stack of experts is not a matrix";
                return Err(Error::new(ErrorKind::Shape, "linear", message));
            }
            Weight::Mapped(m) => Kind::Kernel(cpu::Matrix::Dense(m)),
            Weight::Dense(w) => {
                let kernel = if on_cpu {
                    cpu::DenseMatrix::new(&w)?
                } else {
                    None
                };
                match kernel {
                    Some(matrix) => Kind::Kernel(cpu::Matrix::Dense(matrix)),
                    None => Kind::Dense {
                        transposed: w.swap_axes(0, 1)?,
                    },
                }
            }
        }))
    }

    /// Converts the matrix to the layout that is fastest for encoders, if the kernels support it
    /// ([`cpu::DenseMatrix::into_columns`]).
    ///
    /// # Errors
    /// If the elements cannot be read.
    pub fn into_columns(self) -> Result<Self> {
        Ok(match self.0 {
            Kind::Kernel(matrix) => Self(Kind::Kernel(matrix.into_columns()?)),
            other => Self(other),
        })
    }

    /// Returns a matrix that is not loaded. Multiplying by it is an error.
    #[must_use]
    pub fn absent() -> Self {
        Self(Kind::Absent)
    }

    /// Whether the matrix is loaded.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        !matches!(self.0, Kind::Absent)
    }

    /// Computes `x W^T`, `[.., in] -> [.., out]`. `differentiated` says that the result needs
    /// gradients.
    pub fn product(&self, x: &Array, differentiated: bool) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => x.matmul(transposed),
            Kind::Kernel(w) if differentiated => w.product_for_gradients(x),
            Kind::Kernel(w) => w.product(x),
            Kind::Quantized(q) => q.product(x),
            Kind::Absent => Err(not_loaded()),
        }
    }

    /// Computes `x W^T + b`, otherwise as [`Self::product`].
    ///
    /// # Errors
    /// The errors of [`Self::product`].
    pub fn affine(&self, x: &Array, bias: &Array, differentiated: bool) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => bias.addmm(x, transposed, 1.0, 1.0),
            _ => self.product(x, differentiated)?.add(bias),
        }
    }

    /// Returns the weights `[out, in]` in float32.
    ///
    /// # Errors
    /// If the matrix is not loaded, or memory runs out.
    pub fn dense(&self) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => transposed.swap_axes(0, 1)?.astype(Dtype::Float32),
            Kind::Kernel(m) => kernel_numbers(m),
            Kind::Quantized(q) => q.dense(),
            Kind::Absent => Err(not_loaded()),
        }
    }

    /// Whether our kernels multiply by the matrix.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        self.kernel().is_some()
    }

    fn kernel(&self) -> Option<&cpu::Matrix> {
        match &self.0 {
            Kind::Kernel(matrix) => Some(matrix),
            _ => None,
        }
    }
}

/// Computes `x W^T` for a float32 `weight` `[out, in]` that is used only once: `[.., in] -> [..,
/// out]`. The result has no gradient for the weight.
///
/// # Errors
/// If `x` does not end in the input dimension.
pub fn product_of(x: &Array, weight: &Array) -> Result<Array> {
    let on_cpu = Stream::current()?.device().kind() == DeviceKind::Cpu;
    let weight = Weight::Dense(weight.astype(x.dtype())?);
    // The kernels compute only float32; MLX computes other types.
    Matrix::new(weight, on_cpu && x.dtype() == Dtype::Float32)?.product(x, false)
}

/// Returns the weights of a kernel matrix, `[out, in]` in float32.
pub(super) fn kernel_numbers(matrix: &cpu::Matrix) -> Result<Array> {
    match matrix {
        cpu::Matrix::Dense(m) => m.weight()?.astype(Dtype::Float32),
        cpu::Matrix::Quantized(m) => {
            let ids: Vec<i32> = (0..m.shape()[0]).collect();
            m.take_rows(&Array::vector(&ids)?)
        }
    }
}

fn not_loaded() -> Error {
    let message = "the matrix was not loaded, as its layer walks (walk_only)";
    Error::new(ErrorKind::Unsupported, "linear", message)
}

/// Converts a part to the kernels' form. Returns `None` if `part` is `None` or the kernels do not
/// support it.
pub(super) fn biased(part: Option<Part<'_>>) -> Option<cpu::Biased<'_>> {
    let (matrix, bias) = part?;
    Some((matrix.kernel()?, bias))
}

/// Applies a norm to `x`, and multiplies the result by several matrices, in one operation of the
/// kernels. Outputs are concatenated along the last axis, unless `then` combines two of them.
///
/// `None` if the kernels do not support a matrix, the norm or the activation, if a part is `None`,
/// or if the result needs gradients.
pub fn project<'a>(
    parts: impl Iterator<Item = Option<Part<'a>>>,
    norm: NormSpec<'_>,
    then: Epilogue<'_>,
    x: &Array,
    differentiated: bool,
) -> Result<Option<Array>> {
    if differentiated {
        return Ok(None);
    }
    let then = match then {
        Epilogue::None => Some(cpu::Epilogue::None),
        Epilogue::Add(add) => Some(cpu::Epilogue::Add(add)),
        Epilogue::Gate(activation) => activation.kernel().map(cpu::Epilogue::Gate),
        Epilogue::Activate(activation) => activation.kernel().map(cpu::Epilogue::Activate),
    };
    let (Some(then), Some(norm)) = (then, norm.kernel()) else {
        return Ok(None);
    };
    let parts: Option<Vec<_>> = parts.map(biased).collect();
    let Some(parts) = parts else {
        return Ok(None);
    };
    let projection = cpu::Projection {
        parts: &parts,
        norm,
        then,
    };
    projection.of(x).map(Some)
}

/// Computes the `k` greatest outputs for each row of `x` `[.., in]`, after a norm, in descending
/// order. Returns values and columns, float32 and uint32 `[rows, k]`. Does not store the other
/// outputs in memory. Returns `None` if the kernels do not support this, or if storing all outputs
/// is faster.
///
/// # Errors
/// If `x` does not end in the input dimension, or there are fewer than `k` outputs.
pub fn greatest(
    part: Option<Part<'_>>,
    norm: NormSpec<'_>,
    x: &Array,
    k: usize,
) -> Result<Option<(Array, Array)>> {
    // An insertion into a row's list moves up to `k` values, so a large `k` is slow. This function
    // multiplies in float32. With AMX, tile multiplications are much faster, even though they store
    // all outputs.
    if k == 0 || k > MOST_GREATEST || cpu::instruction_set() == "amx" {
        return Ok(None);
    }
    let (Some(part), Some(norm)) = (biased(part), norm.kernel()) else {
        return Ok(None);
    };
    if part.0.outputs().unsigned_abs() as usize > cpu::MAX_ROW_LEN {
        return Ok(None);
    }
    let head = cpu::Projection {
        parts: &[part],
        norm,
        then: cpu::Epilogue::None,
    };
    head.greatest(x, k).map(Some)
}
