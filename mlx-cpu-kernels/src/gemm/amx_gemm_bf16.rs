//! Products of matrices of bfloat16 where the processor has AMX (`amx/brain.rs`): inputs go into panels of sixteen rows, and a few
//! tiles of outputs at a time, neighbors or as many of each of a gate's two matrices, go through all of them.

use std::cell::RefCell;

use crate::gemm::dense::Dense;
use crate::gemm::packed_gemm::{Block, Many};
use crate::gemm::product::{Data, Product};
use crate::isa::Isa;
use crate::partition::{Output, share};
use crate::simd::amx::{Outputs, Panel, Registers, SIDE, TOGETHER, dense_products};
use crate::simd::vmath::gate_all;

/// Rows of inputs at a time: their panels fit the second cache.
const ROWS: usize = 256;

thread_local! {
    static PANELS: RefCell<Vec<Panel>> = RefCell::default();
    static SUMS: RefCell<Vec<Outputs>> = RefCell::default();
}

impl Many<'_> {
    /// Whether the product is one for [`Self::run_in_bricks`].
    pub(crate) fn fits_bricks(&self) -> bool {
        let brain = |(data, _): &(Data<'_>, _)| matches!(data, Data::Dense(Dense::Brain(_)));
        let whole = self.product.parts.iter().all(|p| p.size.n % SIDE == 0);
        self.product.isa == Isa::Amx
            && Panel::fits(self.product.k)
            && whole
            && self.data.iter().all(brain)
    }

    /// All products, to be asked for where they fit.
    pub(crate) fn run_in_bricks(&self, out: &Output) {
        let Product { rows, n, k, .. } = *self.product;
        let (per, parts) = match self.product.gate {
            Some(_) => (TOGETHER / 2 * SIDE, 1),
            None => (TOGETHER * SIDE, self.product.parts.len()),
        };
        let parts = &self.product.parts[..parts];
        let blocks: usize = parts.iter().map(|p| p.size.n.div_ceil(per)).sum();
        let block = |mut i: usize| {
            let mut start = 0;
            for (part, own) in parts.iter().enumerate() {
                let count = own.size.n.div_ceil(per);
                if i < count {
                    let (from, to) = (i * per, own.size.n.min((i + 1) * per));
                    return Block {
                        part,
                        from,
                        to,
                        start,
                    };
                }
                i -= count;
                start += own.size.n;
            }
            unreachable!("as many as there are")
        };
        PANELS.with_borrow_mut(|panels| {
            for first in (0..rows).step_by(ROWS) {
                let last = rows.min(first + ROWS);
                self.fill_panels((first, last), panels);
                let panels = &panels[..(last - first).div_ceil(SIDE)];
                share(blocks, (last - first) * n * k, &|from, to| {
                    // SAFETY: `Isa::Amx` is made by `detect` only, where they are available.
                    let registers = unsafe { Registers::whole() };
                    SUMS.with_borrow_mut(|sums| {
                        for i in from..to {
                            self.brick((first, last), panels, &registers, block(i), sums, out);
                        }
                    });
                });
            }
        });
    }

    /// Puts rows of the input into panels, through the norm.
    fn fill_panels(&self, (first, last): (usize, usize), panels: &mut Vec<Panel>) {
        let k = self.product.k;
        let count = (last - first).div_ceil(SIDE);
        panels.resize_with(count.max(panels.len()), Panel::default);
        let all = Output::new(&mut panels[..count]);
        share(count, (last - first) * k * 4, &|from, to| {
            for i in from..to {
                // SAFETY: each panel is written by one part alone.
                let panel = &mut unsafe { all.part(i, 1) }[0];
                panel.clear(k);
                for (lane, row) in (first + i * SIDE..last).take(SIDE).enumerate() {
                    let x = &self.x[row * k..(row + 1) * k];
                    let weight = self.norm.map(|(weight, _)| weight);
                    let factor = self.factor(self.product.isa, x);
                    // SAFETY: `Isa::Amx` is made by `detect` only, where the processor has AVX-512.
                    unsafe { panel.row(lane, x, (factor, weight)) };
                }
            }
        });
    }

    /// Rows of the matrices with all panels.
    fn brick(
        &self,
        (first, last): (usize, usize),
        panels: &[Panel],
        registers: &Registers,
        block: Block,
        sums: &mut Vec<Outputs>,
        out: &Output,
    ) {
        let Product { isa, gate, k, .. } = *self.product;
        let matrix = |part: usize| match self.data[part].0 {
            Data::Dense(Dense::Brain(all)) => all,
            _ => unreachable!("what fits is bfloat16"),
        };
        let parts = block.part..block.part + 1 + usize::from(gate.is_some());
        let columns = block.to - block.from;
        let mut tiles = [&[][..]; TOGETHER];
        let mut count = 0;
        for part in parts.clone() {
            let own = &matrix(part)[block.from * k..block.to * k];
            for tile in own.chunks_exact(SIDE * k) {
                tiles[count] = tile;
                count += 1;
            }
        }
        let tiles = &tiles[..count];
        sums.resize(count * SIDE, Outputs::default());
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
                let (gates, ups) = all.split_at_mut(columns * SIDE);
                gate_all(isa, gate, gates, ups);
            }
            let begin = first + panel * SIDE;
            let rows = (begin, SIDE.min(last - begin));
            self.write(&all[..columns * SIDE], rows, block, out);
        }
    }
}
