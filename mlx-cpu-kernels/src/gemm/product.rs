//! A product of rows with matrices and what surrounds it in a decoder. That is a norm, several
//! matrices on the same input, biases, a gate, or a residual. Types only; `run.rs` computes it.

use std::any::Any;
use std::slice::Iter;
use std::sync::Arc;

use crate::gemm::dense::{DenseType, DenseView};
use crate::isa::Isa;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix, ScaleFormat};
use crate::prompts::Prompts;
use crate::simd::portable::vmath::Gate;
use crate::work::Input;

/// The most matrices in one operation.
pub const MAX_PARTS: usize = 4;

/// The sizes of a matrix `[n, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// The arrays of a quantized matrix that an operation keeps, instead of having them as inputs.
#[derive(Clone)]
pub struct HeldMatrix {
    /// Words, scales and biases.
    inputs: [Input; 3],
    /// Keeps the memory of the inputs.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `HeldMatrix::new` demands that the inputs are in memory that the owner keeps and nothing
// writes.
unsafe impl Send for HeldMatrix {}

// SAFETY: as for Send.
unsafe impl Sync for HeldMatrix {}

impl HeldMatrix {
    /// Words, scales and biases in memory that `owner` keeps.
    ///
    /// # Safety
    /// The elements must be there, and must not be written, while `owner` lives.
    pub unsafe fn new(inputs: [Input; 3], owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            inputs,
            _owner: owner,
        }
    }

    pub(crate) fn inputs(&self) -> &[Input] {
        &self.inputs
    }
}

/// How a matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// Quantized in affine mode, in row blocks.
    Quantized {
        /// Of a code: 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// Numbers that share a scale.
        group: usize,
        /// How scales and biases are stored.
        scales: ScaleFormat,
    },
    /// Dense, of this type.
    Dense(DenseType),
}

impl MatrixFormat {
    /// The matrix of `k` columns that is `held`, or the next of `inputs`, which are taken. A
    /// packing that is not among `packings` is appended.
    ///
    /// # Safety
    /// The inputs must be the arrays of a matrix of this format and so many columns.
    pub(crate) unsafe fn matrix<'a>(
        self,
        k: usize,
        held: Option<&'a HeldMatrix>,
        inputs: &mut Iter<'a, Input>,
        packings: &mut Vec<(u32, usize)>,
    ) -> MatrixData<'a> {
        let (bits, group, scales) = match self {
            // SAFETY: the caller's promise.
            MatrixFormat::Dense(number) => unsafe {
                return MatrixData::Dense(DenseView::of(number, inputs.next()));
            },
            MatrixFormat::Quantized {
                bits,
                group,
                scales,
            } => (bits, group, scales),
        };
        let matrix = match held {
            Some(held) => held.inputs(),
            None => {
                let rest = inputs.as_slice();
                let (matrix, rest) = rest.split_at(rest.len().min(3));
                *inputs = rest.iter();
                matrix
            }
        };
        let packing = (scales.input_bits(bits), group);
        let known = packings.iter().position(|p| *p == packing);
        let form = known.unwrap_or_else(|| {
            packings.push(packing);
            packings.len() - 1
        });
        MatrixData::Quantized {
            // SAFETY: the caller's promise.
            matrix: unsafe { PackedMatrix::from_inputs(matrix, (bits, k / group, scales)) },
            form,
        }
    }
}

/// One matrix of a product.
pub struct MatrixPart {
    /// How it is stored.
    pub kind: MatrixFormat,
    /// Its sizes.
    pub size: Size,
    /// Whether a bias follows it among the inputs.
    pub bias: bool,
    /// A quantized matrix, unless it is among the inputs.
    pub held: Option<HeldMatrix>,
}

impl MatrixPart {
    /// Row blocks of its matrix.
    pub(crate) fn row_blocks(&self) -> usize {
        self.size.n.div_ceil(INTERLEAVED_ROWS)
    }
}

/// A product of rows with the transposes of matrices, with a norm before it and biases, a gate or a
/// residual after it. Its inputs are float32: the rows `[rows, k]`, the weight of the norm `[k]`,
/// the arrays of each part, and the residual `[rows, n]`. A part has its matrix and its bias `[n]`.
/// A dense matrix is one array; a quantized one is words, scales and biases, or none when held.
pub struct Product {
    /// Matrices with the same inputs.
    pub parts: Vec<MatrixPart>,
    /// Rows of the input.
    pub rows: usize,
    /// Columns of the input.
    pub k: usize,
    /// Columns of the output.
    pub n: usize,
    /// What the norm before it adds under the root.
    pub eps: Option<f32>,
    /// The first of two parts goes through it and is multiplied with the second.
    pub gate: Option<Gate>,
    /// What the products of a single part go through. It excludes a gate and a residual.
    pub activation: Option<Gate>,
    /// Whether a residual is added.
    pub residual: bool,
    /// Whether few rows are multiplied like many.
    pub float_inputs: bool,
    /// What many rows become where they meet quantized matrices.
    pub prompts: Prompts,
    /// The instruction set.
    pub isa: Isa,
}

/// A matrix as it lies in memory.
#[derive(Clone, Copy)]
pub(crate) enum MatrixData<'a> {
    Quantized {
        matrix: PackedMatrix<'a>,
        /// Which of the prepared inputs it takes.
        form: usize,
    },
    Dense(DenseView<'a>),
}
