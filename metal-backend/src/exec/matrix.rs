//! Products with matrices, and the operations fused with them: a preceding norm, biases, and an
//! epilogue.

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, cpu};

use super::activation::Activation;
use super::parallel::ParallelMatrix;
use super::weight::Weight;

/// A matrix `[out, in]`, prepared for products.
#[derive(Debug, Clone)]
pub struct Matrix(Kind);

#[derive(Debug, Clone)]
enum Kind {
    /// The transposed view `[in, out]`, made once instead of per call.
    Dense { transposed: Array },
    /// Multiplied by our kernels.
    Kernel(cpu::Matrix),
    /// Multiplied by MLX.
    Quantized(ParallelMatrix),
    /// Not loaded.
    Absent,
}

/// Above this `k`, all outputs are computed and then sorted.
const MOST_GREATEST: usize = 1024;

/// A matrix with an optional bias `[out]`.
pub type Part<'a> = (&'a Matrix, Option<&'a Array>);

/// The norm before a product.
#[derive(Debug, Clone, Copy)]
pub enum NormSpec<'a> {
    /// No norm.
    None,
    /// An RMS norm: its weight, and epsilon.
    Rms(&'a Array, f32),
    /// Another norm, or one that an adapter changes.
    Other,
}

impl<'a> NormSpec<'a> {
    /// The kernels' form of the norm; `None` if they do not support it.
    pub(super) fn kernel(self) -> Option<cpu::RowNorm<'a>> {
        match self {
            Self::None => Some(None),
            Self::Rms(weight, eps) => Some(Some((weight, eps))),
            Self::Other => None,
        }
    }
}

/// The operation on the outputs of products.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue<'a> {
    /// Concatenates the outputs along the last axis.
    None,
    /// Adds the outputs to this array of the output's shape.
    Add(&'a Array),
    /// Applies an activation to the first of two outputs and multiplies it with the second.
    Gate(Activation),
    /// Applies an activation to the output of one matrix.
    Activate(Activation),
}

impl Matrix {
    /// From a weight `[out, in]`, for a CPU if `on_cpu`.
    pub fn new(weight: Weight, on_cpu: bool) -> Result<Self> {
        Ok(Self(match weight.in_layout(on_cpu)? {
            Weight::Interleaved(m) => Kind::Kernel(cpu::Matrix::Quantized(m)),
            Weight::Quantized(q) => Kind::Quantized(ParallelMatrix::new(q, on_cpu)?),
            Weight::Experts { .. } => {
                let message = "a stack of experts is not a matrix";
                return Err(Error::new(ErrorKind::Shape, "linear", message));
            }
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

    /// A matrix that is not loaded; products with it fail.
    #[must_use]
    pub fn absent() -> Self {
        Self(Kind::Absent)
    }

    /// Whether the matrix is loaded.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        !matches!(self.0, Kind::Absent)
    }

    /// `x W^T`, `[.., in] -> [.., out]`. `differentiated` says that the result needs gradients.
    pub fn product(&self, x: &Array, differentiated: bool) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => x.matmul(transposed),
            Kind::Kernel(w) if differentiated => w.product_for_gradients(x),
            Kind::Kernel(w) => w.product(x),
            Kind::Quantized(q) => q.product(x),
            Kind::Absent => Err(not_loaded()),
        }
    }

    /// `x W^T + b`, as [`Self::product`].
    ///
    /// # Errors
    /// As [`Self::product`].
    pub fn affine(&self, x: &Array, bias: &Array, differentiated: bool) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => bias.addmm(x, transposed, 1.0, 1.0),
            _ => self.product(x, differentiated)?.add(bias),
        }
    }

    /// The weights `[out, in]` in float32.
    ///
    /// # Errors
    /// When it is not loaded, or memory runs out.
    pub fn dense(&self) -> Result<Array> {
        match &self.0 {
            Kind::Dense { transposed } => transposed.swap_axes(0, 1)?.astype(Dtype::Float32),
            Kind::Kernel(m) => kernel_numbers(m),
            Kind::Quantized(q) => q.dense(),
            Kind::Absent => Err(not_loaded()),
        }
    }

    fn kernel(&self) -> Option<&cpu::Matrix> {
        match &self.0 {
            Kind::Kernel(matrix) => Some(matrix),
            _ => None,
        }
    }
}

/// The weights of a kernel matrix, `[out, in]` in float32.
pub(super) fn kernel_numbers(matrix: &cpu::Matrix) -> Result<Array> {
    match matrix {
        cpu::Matrix::Dense(m) => m.weight().astype(Dtype::Float32),
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

/// The kernels' form of a part; `None` if they do not support it, or without a part.
pub(super) fn biased(part: Option<Part<'_>>) -> Option<cpu::Biased<'_>> {
    let (matrix, bias) = part?;
    Some((matrix.kernel()?, bias))
}

/// Several products of one input through a norm, fused by the kernels. `None` if the kernels do not
/// support them, if a part is `None`, or if the result needs gradients. Outputs are concatenated
/// along the last axis, unless `then` combines two.
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

/// The `k` greatest outputs of each row of `x`, `[.., in]`, through a norm, in descending order:
/// values and columns, float32 and uint32 `[rows, k]`. The other outputs are not held in memory.
/// `None` if the kernels do not support it, or are faster with all outputs in memory.
///
/// # Errors
/// When `x` does not end in the input dimension, or there are fewer than `k` outputs.
pub fn greatest(
    part: Option<Part<'_>>,
    norm: NormSpec<'_>,
    x: &Array,
    k: usize,
) -> Result<Option<(Array, Array)>> {
    // An insertion into a row's list costs up to k moves. With AMX, float32 products are far slower
    // than tile products, which store their outputs.
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
