//! The backward pass of a product with respect to its input rows: gradients times the matrix (not
//! transposed). The matrix stays packed; a few rows are dequantized at a time. There is no gradient
//! with respect to the matrix.

use std::cell::RefCell;

use crate::gemm::dense::DenseView;
use crate::gemm::product::{MatrixFormat, Size};
use crate::isa::Isa;
use crate::layout::float_codes::Codes;
use crate::layout::packed::{CHUNK, PackedMatrix};
use crate::layout::tile::{self, LANES, TileA, TileB};
use crate::memory::resize;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::dequantize::DequantizeScratch;
use crate::simd::microkernel;
use crate::work::{Input, Work};

/// The number of matrix columns per part; a multiple of every group size.
const WIDE: usize = 128;

/// The number of matrix rows dequantized at once. Tiles of this many rows and `WIDE` columns fit
/// the L1 and L2 caches.
const TILE_K: usize = 64;

/// Products of gradients `[rows, n]` with a matrix `[n, k]`. The inputs are the gradients, float32,
/// and the matrix. A dense matrix is one array. A quantized matrix is three arrays: words, scales,
/// and the biases or super-scales of its `ScaleFormat`. Without these, the scales are passed twice.
pub struct ProductVjp {
    /// The size of the matrix.
    pub size: Size,
    /// The number of gradient rows.
    pub rows: usize,
    /// The storage format of the matrix.
    pub kind: MatrixFormat,
    /// The instruction set.
    pub isa: Isa,
}

/// The matrix in memory.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    Dense(DenseView<'a>),
    Quantized(PackedMatrix<'a>),
}

/// Scratch memory of a thread.
#[derive(Default)]
struct Scratch {
    /// Dequantized rows.
    weights: Vec<f32>,
    buffer: DequantizeScratch,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for ProductVjp {
    fn outputs(&self) -> usize {
        self.rows * self.size.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `vjp_of` (mlx-rs-core) passes arrays of the documented types, in the documented
        // order.
        let of = |i: usize| unsafe {
            let input = inputs.get(i);
            input.map(|i| i.as_slice::<f32>()).unwrap_or_default()
        };
        let c = of(0);
        let stored = match self.kind {
            MatrixFormat::Dense(number) => {
                // SAFETY: `vjp_of` (mlx-rs-core) passes an array of this type.
                Stored::Dense(unsafe { DenseView::new(number, inputs.get(1)) })
            }
            MatrixFormat::Quantized {
                bits,
                group,
                scales,
            } => {
                let groups = self.size.k / group;
                let matrix = inputs.get(1..).unwrap_or_default();
                // SAFETY: `vjp_of` (mlx-rs-core) passes the arrays of a matrix in this format.
                Stored::Quantized(unsafe {
                    PackedMatrix::from_inputs(matrix, (bits, groups, scales))
                })
            }
        };
        self.compute(c, stored, &SharedOutput::new(output));
    }
}

impl ProductVjp {
    /// Multiplies the gradients `c` with the matrix.
    pub(crate) fn compute(&self, c: &[f32], stored: Stored<'_>, out: &SharedOutput) {
        let Size { n, k } = self.size;
        assert!(c.len() >= self.rows * n);
        if self.rows == 0 {
            return;
        }
        parallel_ranges(k.div_ceil(WIDE), self.rows * n * k, &|first, last| {
            for part in first..last {
                let columns = (part * WIDE, ((part + 1) * WIDE).min(k));
                SCRATCH.with_borrow_mut(|scratch| self.part(c, stored, columns, scratch, out));
            }
        });
    }

    /// Computes columns `from..to` of the output.
    fn part(
        &self,
        c: &[f32],
        stored: Stored<'_>,
        (from, to): (usize, usize),
        Scratch { weights, buffer }: &mut Scratch,
        out: &SharedOutput,
    ) {
        let Size { n, k } = self.size;
        let width = to - from;
        resize(weights, TILE_K * width, 0.0);
        for first in (0..n).step_by(TILE_K) {
            let depth = TILE_K.min(n - first);
            let rows = &mut weights[..depth * width];
            match stored {
                Stored::Dense(weight) => {
                    for (row, to) in (first..).zip(rows.chunks_exact_mut(width)) {
                        weight.to_f32(self.isa, row * k + from, to);
                    }
                }
                Stored::Quantized(matrix) => {
                    matrix.dequantize_rows(self.isa, first..first + depth, from, buffer, rows);
                }
            }
            for column in (0..width).step_by(LANES) {
                let left = TileA {
                    data: c[first..].as_ptr(),
                    row_stride: n,
                    stride: 1,
                };
                let right = TileB {
                    data: weights[column..].as_ptr(),
                    stride: width,
                };
                let product = tile::TileC {
                    data: out.ptr(from + column, (self.rows - 1) * k + LANES),
                    row_stride: k,
                    accumulate: first > 0,
                };
                // SAFETY: `rows` rows of `c`, whose length is asserted, have `depth` elements from
                // `first` on. `weights` has `depth` rows of `width` elements, a multiple of
                // `LANES`. The output has these columns in each row, and no other part of the job
                // writes them.
                unsafe {
                    microkernel::gemm_tiles(self.isa, self.rows, depth, left, right, product);
                };
            }
        }
        if matches!(stored, Stored::Quantized(matrix) if matrix.bits == 4 && matrix.codes() == Codes::Integers)
        {
            for row in 0..self.rows {
                // SAFETY: no other part of the job uses these columns, and all tiles are done.
                let columns = unsafe { out.slice_mut(row * k + from, width) };
                columns.as_chunks_mut::<CHUNK>().0.iter_mut().for_each(pair);
            }
        }
    }
}

/// Dequantized chunks have their even elements before the odd ones. This restores the column order.
fn pair(chunk: &mut [f32; CHUNK]) {
    let deinterleave = *chunk;
    for i in 0..CHUNK / 2 {
        chunk[2 * i] = deinterleave[i];
        chunk[2 * i + 1] = deinterleave[CHUNK / 2 + i];
    }
}
