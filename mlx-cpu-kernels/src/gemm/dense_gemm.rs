//! Multiplication of many input rows with dense matrices, for AVX2 and AVX-512. A row has the same
//! result as in `few_rows.rs`, bit by bit. `packed_gemm.rs` handles other instruction sets.

use std::cell::RefCell;

use crate::gemm::dense::DenseView;
use crate::gemm::packed_gemm::{ColumnBlock, GemmTask, MIN_GEMM_ROWS};
use crate::gemm::product::{MatrixData, Product};
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::LANES;
use crate::partition::{MIN_PARALLEL_WORK, SharedOutput, parallel_ranges};
use crate::pool;
use crate::simd::dense_rows;

/// Scratch memory of a thread for a block.
#[derive(Default)]
struct Scratch {
    /// Matrix rows in float32.
    weights: AlignedVec,
    /// Vectors of sums.
    vectors: AlignedVec,
    /// Finished tiles.
    tiles: AlignedVec,
}

thread_local! {
    /// The input rows after the norm.
    static NORMALIZED: RefCell<AlignedVec> = RefCell::default();
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl GemmTask<'_> {
    /// Whether this kernel supports the product: it has many rows, and only dense matrices.
    pub(crate) fn fits_dense(&self) -> bool {
        let is_dense = |(data, _): &(MatrixData<'_>, _)| matches!(data, MatrixData::Dense(_));
        dense_rows::supports_many(self.product.isa)
            && self.product.rows >= MIN_GEMM_ROWS
            && self.product.k > 0
            && self.data.iter().all(is_dense)
    }

    /// Computes the product.
    pub(crate) fn run_dense(&self, out: &SharedOutput) {
        if self.norm.is_none() {
            return self.multiply_dense(self.x, out);
        }
        NORMALIZED.with_borrow_mut(|rows| {
            self.normalize(rows);
            self.multiply_dense(rows, out);
        });
    }

    /// Applies the norm to all rows.
    fn normalize(&self, rows: &mut AlignedVec) {
        let Product { k, isa, .. } = *self.product;
        rows.resize(self.x.len());
        let Some((weight, _)) = self.norm else {
            return rows.copy_from_slice(self.x);
        };
        let all = SharedOutput::new(rows);
        parallel_ranges(self.product.rows, self.x.len() * 4, &|from, to| {
            // SAFETY: only this part writes these rows.
            let rows = unsafe { all.slice_mut(from * k, (to - from) * k) };
            let inputs = self.x[from * k..to * k].chunks_exact(k);
            for (row, x) in rows.chunks_exact_mut(k).zip(inputs) {
                let factor = self.factor(isa, x);
                for ((row, x), w) in row.iter_mut().zip(x).zip(weight) {
                    *row = x * factor * w;
                }
            }
        });
    }

    fn multiply_dense(&self, x: &[f32], out: &SharedOutput) {
        let Product { k, n, rows, .. } = *self.product;
        let blocks = self.blocks();
        let run = |i: usize| {
            SCRATCH.with_borrow_mut(|scratch| self.dense_block(x, blocks[i], scratch, out));
        };
        if rows * n * k < MIN_PARALLEL_WORK {
            (0..blocks.len()).for_each(run);
        } else {
            pool::pool().run(blocks.len(), &run);
        }
    }

    /// Multiplies a range of rows of one matrix, or of both matrices of a gate, with all inputs.
    fn dense_block(
        &self,
        x: &[f32],
        block: ColumnBlock,
        scratch: &mut Scratch,
        out: &SharedOutput,
    ) {
        let Product {
            k, isa, gate, rows, ..
        } = *self.product;
        let Scratch {
            weights,
            vectors,
            tiles,
        } = scratch;
        let columns = block.to - block.from;
        let parts = &self.data[block.part..block.part + 1 + usize::from(gate.is_some())];
        weights.resize(parts.len() * columns * k);
        for ((data, _), weights) in parts.iter().zip(weights.chunks_exact_mut(columns * k)) {
            if let MatrixData::Dense(matrix @ (DenseView::F16(_) | DenseView::Bf16(_))) = data {
                matrix.to_f32(isa, block.from * k, weights);
            }
        }
        tiles.resize(parts.len() * columns * LANES);
        for begin in (0..rows).step_by(LANES) {
            let x = &x[begin * k..rows.min(begin + LANES) * k];
            let each = tiles.chunks_exact_mut(columns * LANES);
            let converted = weights.chunks_exact(columns * k);
            for (((data, _), converted), tile) in parts.iter().zip(converted).zip(each) {
                let matrix = match data {
                    MatrixData::Dense(DenseView::F32(all)) => &all[block.from * k..block.to * k],
                    _ => converted,
                };
                dense_rows::multiply_many(isa, matrix, x, k, vectors, tile);
            }
            self.finish_tile(tiles, (begin, rows), block, out);
        }
    }
}
