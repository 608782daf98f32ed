//! Multiplication of many input rows, as in prefill (GotoBLAS scheme). Inputs are packed into
//! panels of sixteen rows. Blocks of the matrix are dequantized once for all panels, and the
//! micro-kernel multiplies them. `few_rows.rs` handles few rows.

use std::cell::RefCell;

use crate::gemm::dense::DenseView;
use crate::gemm::product::{MatrixData, Product};
use crate::isa::Isa;
use crate::layout::aligned::AlignedVec;
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::layout::tile::{self, LANES, ScaledRow, TileA, TileB};
use crate::partition::{MIN_PARALLEL_WORK, SharedOutput, parallel_ranges};
use crate::pool;
use crate::simd::vmath::{self, gate_apply, gate_mul};
use crate::simd::{microkernel, transpose};

/// The minimum number of input rows for this kernel.
pub(crate) const MIN_GEMM_ROWS: usize = 16;

/// The number of input rows per block. The panels of a block have a few MiB at most.
pub(crate) const BLOCK_M: usize = 512;

/// The number of matrix rows dequantized at once, a multiple of a tile's rows and of a row block's.
/// With a large number, panels are read less often. With a small one, each thread gets enough
/// blocks. The rows fit the L2 cache.
const BLOCK_N_LARGE: usize = 48;
const BLOCK_N_SMALL: usize = 24;

/// The minimum number of outputs for which a product uses blocks of [`BLOCK_N_LARGE`] rows.
const LARGE_N: usize = 1200;

/// The number of columns that are summed before a tile is stored. These columns of a panel fit the
/// L1 cache.
const BLOCK_K: usize = 256;

/// Scratch memory of a thread for a block.
#[derive(Default)]
struct Scratch {
    weights: AlignedVec,
    sums: AlignedVec,
}

thread_local! {
    /// The packed input rows.
    static PANELS: RefCell<AlignedVec> = RefCell::default();
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Rows `from..to` of the matrix of part `part`. The part's outputs begin at column `start`.
#[derive(Clone, Copy)]
pub(crate) struct ColumnBlock {
    pub part: usize,
    pub from: usize,
    pub to: usize,
    pub start: usize,
}

/// A product with its inputs.
pub(crate) struct GemmTask<'a> {
    pub product: &'a Product,
    pub x: &'a [f32],
    pub norm: Option<(&'a [f32], f32)>,
    pub data: &'a [(MatrixData<'a>, Option<&'a [f32]>)],
    pub residual: Option<&'a [f32]>,
}

/// A function that receives a finished tile `[columns, LANES]`, its first input row and number of
/// rows, and its columns.
pub(crate) type TileSink<'a> = dyn Fn(&[f32], (usize, usize), ColumnBlock) + Sync + 'a;

impl GemmTask<'_> {
    pub(crate) fn run(&self, out: &SharedOutput) {
        self.run_into(&|tile, rows, block| self.write(tile, rows, block, out));
    }

    /// Like [`Self::run`], but passes finished tiles to `sink` instead of storing outputs.
    pub(crate) fn run_into(&self, sink: &TileSink<'_>) {
        let blocks = self.blocks();
        PANELS.with_borrow_mut(|panels| {
            for first in (0..self.product.rows).step_by(BLOCK_M) {
                let rows = (first, (first + BLOCK_M).min(self.product.rows));
                self.fill(rows, panels);
                self.multiply(rows, panels, &blocks, sink);
            }
        });
    }

    /// The blocks of matrix rows. A block is a thread's unit of work.
    pub(crate) fn blocks(&self) -> Vec<ColumnBlock> {
        self.blocks_of(BLOCK_N_LARGE)
    }

    /// [`Self::blocks`] with at most `most` rows.
    pub(crate) fn blocks_of(&self, most: usize) -> Vec<ColumnBlock> {
        self.blocks_of_width(if self.product.n >= LARGE_N {
            BLOCK_N_LARGE.min(most)
        } else {
            BLOCK_N_SMALL.min(most)
        })
    }

    /// [`Self::blocks`] of `width` matrix rows.
    pub(crate) fn blocks_of_width(&self, width: usize) -> Vec<ColumnBlock> {
        // With a gate, half of a block's rows belong to the second matrix.
        let (width, parts) = match self.product.gate {
            Some(_) => ((width / 2).next_multiple_of(INTERLEAVED_ROWS), 1),
            None => (width, self.product.parts.len()),
        };
        let mut blocks = Vec::new();
        let mut start = 0;
        for (part, matrix) in self.product.parts[..parts].iter().enumerate() {
            for from in (0..matrix.size.n).step_by(width) {
                blocks.push(ColumnBlock {
                    part,
                    from,
                    to: (from + width).min(matrix.size.n),
                    start,
                });
            }
            start += matrix.size.n;
        }
        blocks
    }

    /// Packs input rows into panels, after the norm.
    fn fill(&self, (first, last): (usize, usize), panels: &mut AlignedVec) {
        let Product { k, .. } = *self.product;
        let count = (last - first).div_ceil(LANES);
        panels.resize(count * LANES * k);
        let all = SharedOutput::new(panels);
        parallel_ranges(count, (last - first) * k * 4, &|from, to| {
            for i in from..to {
                // SAFETY: no two parts of the job write the same panel.
                let panel = unsafe { all.slice_mut(i * LANES * k, LANES * k) };
                self.fill_panel((first + i * LANES, last), panel);
            }
        });
    }

    /// Packs at most [`LANES`] input rows into one panel, after the norm.
    pub(crate) fn fill_panel(&self, (begin, last): (usize, usize), panel: &mut [f32]) {
        let Product { k, isa, .. } = *self.product;
        let mut rows: [ScaledRow<'_>; LANES] = [(&[], 0.0); LANES];
        let n = LANES.min(last - begin);
        for (row, slot) in (begin..).zip(&mut rows[..n]) {
            let x = &self.x[row * k..(row + 1) * k];
            *slot = (x, self.factor(isa, x));
        }
        let weight = self.norm.map(|(weight, _)| weight);
        transpose::pack_rows(isa, &rows[..n], weight, panel);
    }

    /// The norm's factor for a row; 1 without a norm.
    pub(crate) fn factor(&self, isa: Isa, x: &[f32]) -> f32 {
        self.norm.map_or(1.0, |(_, eps)| {
            1.0 / (vmath::dot(isa, x, x) / x.len() as f32 + eps).sqrt()
        })
    }

    fn multiply(
        &self,
        (first, last): (usize, usize),
        panels: &[f32],
        blocks: &[ColumnBlock],
        sink: &TileSink<'_>,
    ) {
        let Product { k, n, .. } = *self.product;
        let work = (last - first) * n * k;
        let run = |i: usize| {
            SCRATCH.with_borrow_mut(|scratch| {
                self.block((first, last), panels, blocks[i], scratch, sink);
            });
        };
        if work < MIN_PARALLEL_WORK {
            (0..blocks.len()).for_each(run);
        } else {
            pool::pool().run(blocks.len(), &run);
        }
    }

    /// Multiplies a range of rows of one matrix, or of both matrices of a gate, with all panels.
    fn block(
        &self,
        (first, last): (usize, usize),
        panels: &[f32],
        block: ColumnBlock,
        Scratch { weights, sums }: &mut Scratch,
        sink: &TileSink<'_>,
    ) {
        let Product { k, isa, gate, .. } = *self.product;
        let columns = block.to - block.from;
        let parts = block.part..block.part + 1 + usize::from(gate.is_some());
        // The last row block may extend beyond the matrix.
        let wide = columns.next_multiple_of(INTERLEAVED_ROWS);
        weights.resize(parts.len() * wide * k);
        for (part, weights) in parts.clone().zip(weights.chunks_exact_mut(wide * k)) {
            match self.data[part].0 {
                MatrixData::Quantized { matrix, .. } => {
                    let range = matrix.block_range(
                        block.from / INTERLEAVED_ROWS..block.to.div_ceil(INTERLEAVED_ROWS),
                    );
                    range.dequantize_transposed(isa, weights);
                }
                MatrixData::Dense(DenseView::F32(_)) => {}
                MatrixData::Dense(matrix) => {
                    matrix.to_f32(isa, block.from * k, &mut weights[..columns * k]);
                }
            }
        }
        sums.resize(parts.len() * columns * LANES);
        for panel in 0..(last - first).div_ceil(LANES) {
            for (i, part) in parts.clone().enumerate() {
                let data = &self.data[part].0;
                let x = &panels[panel * LANES * k..][..LANES * k];
                // The matrix, and its strides between rows and columns.
                let (w, row_stride, step) = match data {
                    MatrixData::Dense(DenseView::F32(weight)) => {
                        (&weight[block.from * k..block.to * k], k, 1)
                    }
                    MatrixData::Dense(_) => (&weights[i * wide * k..(i + 1) * wide * k], k, 1),
                    MatrixData::Quantized { .. } => {
                        (&weights[i * wide * k..(i + 1) * wide * k], 1, wide)
                    }
                };
                let sums = &mut sums[i * columns * LANES..(i + 1) * columns * LANES];
                for at in (0..k).step_by(BLOCK_K) {
                    let depth = BLOCK_K.min(k - at);
                    let left = TileA {
                        data: w[at * step..].as_ptr(),
                        row_stride,
                        stride: step,
                    };
                    let right = TileB {
                        data: x[at * LANES..].as_ptr(),
                        stride: LANES,
                    };
                    let product = tile::TileC {
                        data: sums.as_mut_ptr(),
                        row_stride: LANES,
                        accumulate: at > 0,
                    };
                    // SAFETY: the slices above guarantee the lengths. `w` has `columns` rows of `k`
                    // elements in either layout, `x` has `k` times `LANES`, and `sums` has
                    // `columns` times `LANES`.
                    unsafe { microkernel::gemm_tiles(isa, columns, depth, left, right, product) };
                }
            }
            let begin = first + panel * LANES;
            sink(
                self.complete_tile(sums, block),
                (begin, LANES.min(last - begin)),
                block,
            );
        }
    }

    /// Applies the epilogue to a tile and writes it to output rows from `begin` on; see
    /// [`Self::complete_tile`].
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn finish_tile(
        &self,
        sums: &mut [f32],
        (begin, last): (usize, usize),
        block: ColumnBlock,
        out: &SharedOutput,
    ) {
        let done = self.complete_tile(sums, block);
        self.write(done, (begin, LANES.min(last - begin)), block, out);
    }

    /// Adds biases to a tile of each part, `[columns, LANES]`, and applies the gate. Returns the
    /// output tile.
    fn complete_tile<'t>(&self, sums: &'t mut [f32], block: ColumnBlock) -> &'t [f32] {
        let Product { isa, gate, .. } = *self.product;
        let size = (block.to - block.from) * LANES;
        for ((_, bias), sums) in self.data[block.part..]
            .iter()
            .zip(sums.chunks_exact_mut(size))
        {
            if let Some(bias) = bias {
                let bias = &bias[block.from..block.to];
                for (sums, bias) in sums.as_chunks_mut::<LANES>().0.iter_mut().zip(bias) {
                    sums.iter_mut().for_each(|sum| *sum += bias);
                }
            }
        }
        if let Some(gate) = gate {
            let (gates, ups) = sums.split_at_mut(size);
            gate_mul(isa, gate, gates, ups);
        }
        if let Some(activation) = self.product.activation {
            gate_apply(isa, activation, &mut sums[..size]);
        }
        &sums[..size]
    }

    /// Writes a tile `[columns, LANES]` to output rows from `begin` on.
    pub(crate) fn write(
        &self,
        sums: &[f32],
        (begin, count): (usize, usize),
        block: ColumnBlock,
        out: &SharedOutput,
    ) {
        let Product { n, isa, .. } = *self.product;
        let columns = block.to - block.from;
        let start = |lane: usize| (begin + lane) * n + block.start + block.from;
        for lane in (0..count).step_by(8) {
            let rows = 8.min(count - lane);
            let mut done = 0;
            if rows == 8 {
                let at = start(lane);
                let reach = 7 * n + columns;
                let before = self.residual.map(|r| r[at..at + reach].as_ptr());
                // SAFETY: no other block writes these columns of these rows. Both bounds are
                // checked.
                done = unsafe {
                    let to = out.ptr(at, reach);
                    transpose::store_rows(isa, sums, lane, (to, n), before)
                };
            }
            if done == columns {
                continue;
            }
            let sums = sums.as_chunks::<LANES>().0;
            for lane in lane..lane + rows {
                let at = start(lane);
                // SAFETY: no other block writes these columns of this row. Both bounds are checked.
                let place = unsafe { out.slice_mut(at + done, columns - done) };
                let before = self.residual.map(|r| &r[at + done..at + columns]);
                for (i, (place, sums)) in place.iter_mut().zip(&sums[done..]).enumerate() {
                    *place = sums[lane] + before.map_or(0.0, |before| before[i]);
                }
            }
        }
    }
}
