//! A product of rows with matrices, and the decoder operations that are fused with it: a norm,
//! several matrices on the same input, biases, a gate, or a residual. This file has only types;
//! `run.rs` has the computation.

use std::slice::Iter;
use std::sync::Arc;

use crate::gemm::dense::{DenseType, DenseView};
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::layout::packed::FLOAT_INPUTS;
use crate::layout::packed::{INTERLEAVED_ROWS, PackedMatrix, ScaleFormat};
use crate::prefill_inputs::PrefillInputs;
use crate::simd::portable::vmath::Gate;
use crate::work::Input;

/// The maximum number of matrices in one operation.
pub const MAX_PARTS: usize = 4;

/// The sizes of a matrix `[n, k]`.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// The number of outputs.
    pub n: usize,
    /// The number of inputs.
    pub k: usize,
}

/// Keeps the memory of a [`StoredMatrix`] alive.
pub trait MatrixOwner: Send + Sync {
    /// Whether all values read so far are valid. They are invalid if the matrix is in a mapped file
    /// that was truncated. Products with such a matrix are NaN.
    fn is_intact(&self) -> bool {
        true
    }
}

/// The arrays of a matrix that the operation itself stores, instead of receiving them as inputs.
#[derive(Clone)]
pub struct StoredMatrix {
    /// Words, scales and biases; or three times the elements of a dense matrix.
    inputs: [Input; 3],
    /// Keeps the memory of the inputs alive.
    owner: Arc<dyn MatrixOwner>,
}

// SAFETY: callers of `StoredMatrix::new` guarantee that the owner keeps the inputs' memory alive
// and that nothing writes to it.
unsafe impl Send for StoredMatrix {}

// SAFETY: see the note for `Send`.
unsafe impl Sync for StoredMatrix {}

impl StoredMatrix {
    /// Stores words, scales and biases in memory of `owner`, or the elements of a dense matrix.
    ///
    /// # Safety
    /// While `owner` lives, the elements must exist and nothing may write them.
    pub unsafe fn new(inputs: [Input; 3], owner: Arc<dyn MatrixOwner>) -> Self {
        Self { inputs, owner }
    }

    /// See [`MatrixOwner::is_intact`].
    pub(crate) fn is_intact(&self) -> bool {
        self.owner.is_intact()
    }

    pub(crate) fn inputs(&self) -> &[Input] {
        &self.inputs
    }
}

/// The storage format of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// Quantized in groups, with row blocks interleaved.
    Quantized {
        /// Bits per code: 2, 3, 4, 5, 6 or 8.
        bits: u32,
        /// The group size.
        group: usize,
        /// The format of scales and biases.
        scales: ScaleFormat,
    },
    /// Dense, with elements of this type.
    Dense(DenseType),
}

impl MatrixFormat {
    /// Whether the kernels for x86-64 multiply the codes with integers.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_integers(self) -> bool {
        match self {
            Self::Quantized { bits, scales, .. } => scales.input_bits(bits) != FLOAT_INPUTS,
            Self::Dense(_) => false,
        }
    }

    /// The matrix with `k` columns: `stored`, or otherwise the next of `inputs`, which is consumed.
    /// Adds the matrix's packing to `packings`, unless it is already there.
    ///
    /// # Safety
    /// The inputs must be the arrays of a matrix with this format and `k` columns.
    pub(crate) unsafe fn matrix<'a>(
        self,
        k: usize,
        stored: Option<&'a StoredMatrix>,
        inputs: &mut Iter<'a, Input>,
        packings: &mut Vec<(u32, usize)>,
    ) -> MatrixData<'a> {
        let (bits, group, scales) = match self {
            // SAFETY: the caller guarantees the type.
            MatrixFormat::Dense(number) => unsafe {
                let elements = match stored {
                    Some(stored) => stored.inputs().first(),
                    None => inputs.next(),
                };
                return MatrixData::Dense(DenseView::new(number, elements));
            },
            MatrixFormat::Quantized {
                bits,
                group,
                scales,
            } => (bits, group, scales),
        };
        let matrix = match stored {
            Some(stored) => stored.inputs(),
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
            // SAFETY: the caller guarantees the format.
            matrix: unsafe { PackedMatrix::from_inputs(matrix, (bits, k / group, scales)) },
            form,
        }
    }
}

/// One matrix of a product.
pub struct MatrixPart {
    /// The storage format.
    pub kind: MatrixFormat,
    /// The sizes.
    pub size: Size,
    /// Whether a bias follows in the inputs.
    pub bias: bool,
    /// The matrix, unless it is among the inputs.
    pub stored: Option<StoredMatrix>,
}

impl MatrixPart {
    /// The number of row blocks of the matrix.
    pub(crate) fn row_blocks(&self) -> usize {
        self.size.n.div_ceil(INTERLEAVED_ROWS)
    }
}

/// A product of rows with transposed matrices. An optional norm comes before it, and biases, a gate
/// or a residual after it. The inputs are float32: the rows `[rows, k]`, the weight of the norm
/// `[k]`, the arrays of each part, and the residual `[rows, n]`. A part has its matrix, then its
/// bias `[n]`. A dense matrix is one array. A quantized matrix is three arrays as in
/// [`ProductVjp`](super::vjp::ProductVjp). A matrix that the operation stores is not among the
/// inputs.
pub struct Product {
    /// The matrices that are multiplied with the same inputs.
    pub parts: Vec<MatrixPart>,
    /// The number of rows of the input.
    pub rows: usize,
    /// The number of columns of the input.
    pub k: usize,
    /// The number of columns of the output.
    pub n: usize,
    /// Epsilon of the norm, if there is one.
    pub eps: Option<f32>,
    /// The activation of a gate: it is applied to the first of two parts, and the result is
    /// multiplied with the second part.
    pub gate: Option<Gate>,
    /// The activation of a single part. It excludes `gate` and `residual`.
    pub activation: Option<Gate>,
    /// Whether a residual is added.
    pub residual: bool,
    /// Whether inputs stay floats. Any number of rows then uses the kernel of `packed_gemm.rs`.
    pub float_inputs: bool,
    /// The input type for many rows and quantized matrices.
    pub prefill_inputs: PrefillInputs,
    /// The instruction set.
    pub isa: Isa,
}

impl Product {
    /// Whether all stored matrices are intact; see [`MatrixOwner::is_intact`].
    pub fn is_intact(&self) -> bool {
        let stored = self.parts.iter().filter_map(|part| part.stored.as_ref());
        stored.into_iter().all(StoredMatrix::is_intact)
    }

    /// A product with one matrix, without norm, bias, gate, activation and residual.
    pub fn plain(isa: Isa, kind: MatrixFormat, size: Size, rows: usize) -> Self {
        Self {
            parts: vec![MatrixPart {
                kind,
                size,
                bias: false,
                stored: None,
            }],
            rows,
            k: size.k,
            n: size.n,
            eps: None,
            gate: None,
            activation: None,
            residual: false,
            float_inputs: false,
            prefill_inputs: PrefillInputs::default(),
            isa,
        }
    }
}

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(crate) enum MatrixData<'a> {
    Quantized {
        matrix: PackedMatrix<'a>,
        /// The index of the prepared input that suits the matrix's packing.
        form: usize,
    },
    Dense(DenseView<'a>),
}
