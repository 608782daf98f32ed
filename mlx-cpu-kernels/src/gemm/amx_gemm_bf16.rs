//! Multiplication with bfloat16 matrices on AMX. This file distributes the tiles of
//! `simd/amx/bf16.rs` over threads. Inputs are packed into panels of sixteen rows, and each pass
//! over a panel computes up to four output tiles.

use std::cell::RefCell;

use crate::gemm::dense::DenseView;
use crate::gemm::packed_gemm::{ColumnBlock, GemmTask};
use crate::gemm::product::{MatrixData, Product};
use crate::isa::Isa;
use crate::memory::resize;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::simd::amx::{
    Bf16Panel, OutputRow, TILE_ROWS, TILES_TOGETHER, TileRegisters, dense_products,
};
use crate::simd::vmath::gate_mul;

/// The number of input rows per block. The panels of a block fit the L2 cache.
const BLOCK_M: usize = 256;

thread_local! {
    static PANELS: RefCell<Vec<Bf16Panel>> = RefCell::default();
    static SUMS: RefCell<Vec<OutputRow>> = RefCell::default();
}

impl GemmTask<'_> {
    /// Whether [`Self::run_amx_bf16`] supports this product.
    pub(crate) fn fits_amx_bf16(&self) -> bool {
        let is_bf16 =
            |(data, _): &(MatrixData<'_>, _)| matches!(data, MatrixData::Dense(DenseView::Bf16(_)));
        let fills_tiles = self.product.parts.iter().all(|p| p.size.n % TILE_ROWS == 0);
        self.product.isa == Isa::Amx
            && Bf16Panel::fits(self.product.k)
            && fills_tiles
            && self.data.iter().all(is_bf16)
    }

    /// Computes all outputs. Call it only if [`Self::fits_amx_bf16`] is true.
    pub(crate) fn run_amx_bf16(&self, out: &SharedOutput) {
        let Product { rows, n, k, .. } = *self.product;
        let (per, parts) = match self.product.gate {
            Some(_) => (TILES_TOGETHER / 2 * TILE_ROWS, 1),
            None => (TILES_TOGETHER * TILE_ROWS, self.product.parts.len()),
        };
        let parts = &self.product.parts[..parts];
        let blocks: usize = parts.iter().map(|p| p.size.n.div_ceil(per)).sum();
        let block = |mut i: usize| {
            let mut start = 0;
            for (part, matrix_part) in parts.iter().enumerate() {
                let count = matrix_part.size.n.div_ceil(per);
                if i < count {
                    let (from, to) = (i * per, matrix_part.size.n.min((i + 1) * per));
                    return ColumnBlock {
                        part,
                        from,
                        to,
                        start,
                    };
                }
                i -= count;
                start += matrix_part.size.n;
            }
            unreachable!("as task as there are")
        };
        PANELS.with_borrow_mut(|panels| {
            for first in (0..rows).step_by(BLOCK_M) {
                let last = rows.min(first + BLOCK_M);
                self.fill_panels((first, last), panels);
                let panels = &panels[..(last - first).div_ceil(TILE_ROWS)];
                parallel_ranges(blocks, (last - first) * n * k, &|from, to| {
                    // SAFETY: only `detect` makes `Isa::Amx`, where AMX is available.
                    let registers = unsafe { TileRegisters::full() };
                    SUMS.with_borrow_mut(|sums| {
                        for i in from..to {
                            self.bf16_block((first, last), panels, &registers, block(i), sums, out);
                        }
                    });
                });
            }
        });
    }

    /// Packs input rows into panels, after the norm.
    fn fill_panels(&self, (first, last): (usize, usize), panels: &mut Vec<Bf16Panel>) {
        let k = self.product.k;
        let count = (last - first).div_ceil(TILE_ROWS);
        panels.resize_with(count.max(panels.len()), Bf16Panel::default);
        let all = SharedOutput::new(&mut panels[..count]);
        parallel_ranges(count, (last - first) * k * 4, &|from, to| {
            for i in from..to {
                // SAFETY: each panel belongs to only one part of the job.
                let panel = &mut unsafe { all.slice_mut(i, 1) }[0];
                panel.clear(k);
                for (lane, row) in (first + i * TILE_ROWS..last).take(TILE_ROWS).enumerate() {
                    let x = &self.x[row * k..(row + 1) * k];
                    let weight = self.norm.map(|(weight, _)| weight);
                    let factor = self.factor(self.product.isa, x);
                    // SAFETY: only `detect` makes `Isa::Amx`, on processors with AVX-512.
                    unsafe { panel.row(lane, x, (factor, weight)) };
                }
            }
        });
    }

    /// Multiplies a range of matrix rows with all panels.
    fn bf16_block(
        &self,
        (first, last): (usize, usize),
        panels: &[Bf16Panel],
        registers: &TileRegisters,
        block: ColumnBlock,
        sums: &mut Vec<OutputRow>,
        out: &SharedOutput,
    ) {
        let Product { isa, gate, k, .. } = *self.product;
        let matrix = |part: usize| match self.data[part].0 {
            MatrixData::Dense(DenseView::Bf16(all)) => all,
            _ => unreachable!("what fits is bfloat16"),
        };
        let parts = block.part..block.part + 1 + usize::from(gate.is_some());
        let columns = block.to - block.from;
        let mut tiles = [&[][..]; TILES_TOGETHER];
        let mut count = 0;
        for part in parts.clone() {
            let weights = &matrix(part)[block.from * k..block.to * k];
            for tile in weights.chunks_exact(TILE_ROWS * k) {
                tiles[count] = tile;
                count += 1;
            }
        }
        let tiles = &tiles[..count];
        resize(sums, count * TILE_ROWS, OutputRow::default());
        for (panel, inputs) in panels.iter().enumerate() {
            dense_products(tiles, inputs, registers, sums);
            for (part, sums) in parts.clone().zip(sums.chunks_exact_mut(columns)) {
                if let Some(bias) = self.data[part].1 {
                    let bias = &bias[block.from..block.to];
                    for (sums, bias) in sums.iter_mut().zip(bias) {
                        sums.0.iter_mut().for_each(|sum| *sum += bias);
                    }
                }
            }
            let all: &mut [f32] = bytemuck::cast_slice_mut(sums);
            if let Some(gate) = gate {
                let (gates, ups) = all.split_at_mut(columns * TILE_ROWS);
                gate_mul(isa, gate, gates, ups);
            }
            let begin = first + panel * TILE_ROWS;
            let rows = (begin, TILE_ROWS.min(last - begin));
            self.write(&all[..columns * TILE_ROWS], rows, block, out);
        }
    }
}
