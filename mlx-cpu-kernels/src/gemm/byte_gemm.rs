//! Multiplication of many input rows with quantized matrices in 8-bit integers, for AVX2 and
//! AVX-512. Blocks and outputs are as in `packed_gemm.rs`. In each row, 32 input columns share a
//! scale. The integer sums over these columns are exact.
//!
//! Float sums are accumulated in column order. So a row's result depends neither on the number of
//! threads nor on other rows.

use std::cell::RefCell;

use crate::gemm::packed_gemm::{BLOCK_M, ColumnBlock, GemmTask, MIN_GEMM_ROWS};
use crate::gemm::product::{MatrixData, Product};
use crate::layout::aligned::AlignedVec;
use crate::layout::byte_panel::{ByteColumns, ByteColumnsMut, BytePanel, BytePanelMut, HALF, UNIT};
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::layout::tile::LANES;
use crate::partition::{MIN_PARALLEL_WORK, SharedOutput, parallel_ranges};
use crate::pool;
use crate::simd::byte_tile::{self, Dot, PANELS};

/// The number of units of columns per block. The units of two panels fit the L1 cache.
const BLOCK_UNITS: usize = 24;

/// Input rows, panel by panel; see [`ByteColumns`].
#[derive(Default)]
struct Panels {
    quads: AlignedVec,
    scales: AlignedVec,
    sums: AlignedVec,
}

/// Quantized input rows, and the rounding residuals of large values.
#[derive(Default)]
struct Inputs {
    coarse: Panels,
    /// The residuals of refined units.
    fine: Panels,
    /// The indices of refined units per panel, in order.
    refined: Vec<Vec<usize>>,
}

/// Scratch memory of a thread for a block.
#[derive(Default)]
struct Scratch {
    quads: AlignedVec,
    scales: AlignedVec,
    biases: AlignedVec,
    sums: AlignedVec,
}

thread_local! {
    static INPUTS: RefCell<Inputs> = RefCell::default();
    static PANEL: RefCell<AlignedVec> = RefCell::default();
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Element counts of a panel with `k` columns: quads, scales and sums.
const fn sizes(k: usize) -> [usize; 3] {
    [k / 4 * LANES, k / UNIT * LANES, k / HALF * LANES]
}

/// [`Panels`] that several threads write.
struct SharedPanels {
    quads: SharedOutput,
    scales: SharedOutput,
    sums: SharedOutput,
}

impl SharedPanels {
    /// The panel with index `i`.
    ///
    /// # Safety
    /// No other part may use this panel.
    unsafe fn panel(&self, i: usize, [quads, scales, sums]: [usize; 3]) -> ByteColumnsMut<'_> {
        // SAFETY: the caller guarantees that no other part uses this panel.
        unsafe {
            ByteColumnsMut {
                quads: bytemuck::cast_slice_mut(self.quads.slice_mut(i * quads, quads)),
                scales: self.scales.slice_mut(i * scales, scales),
                sums: self.sums.slice_mut(i * sums, sums),
            }
        }
    }
}

impl Panels {
    fn shared(&mut self) -> SharedPanels {
        SharedPanels {
            quads: SharedOutput::new(&mut self.quads),
            scales: SharedOutput::new(&mut self.scales),
            sums: SharedOutput::new(&mut self.sums),
        }
    }

    fn resize(&mut self, count: usize, sizes: [usize; 3]) {
        let buffers = [&mut self.quads, &mut self.scales, &mut self.sums];
        for (buffer, size) in buffers.into_iter().zip(sizes) {
            buffer.resize(count * size);
        }
    }

    fn panel(&self, i: usize, k: usize) -> ByteColumns<'_> {
        let [quads, scales, sums] = sizes(k);
        ByteColumns {
            quads: bytemuck::cast_slice(&self.quads[i * quads..(i + 1) * quads]),
            scales: &self.scales[i * scales..(i + 1) * scales],
            sums: &self.sums[i * sums..(i + 1) * sums],
        }
    }
}

impl Inputs {
    /// Adds the products with the residuals of refined units to the sums of one or two panels.
    /// `panel` is the index of the first panel.
    fn add_fine(
        &self,
        dot: Dot,
        columns: usize,
        (panel, count): (usize, usize),
        (matrix, k): (BytePanel<'_>, usize),
        (sums, apart): (&mut [f32], usize),
    ) {
        let mut add = |first: usize, count: usize, unit: usize| {
            let x: [_; PANELS] =
                std::array::from_fn(|p| self.fine.panel(panel + first + p.min(count - 1), k));
            let to = (&mut sums[first * apart..], apart);
            byte_tile::multiply(dot, columns, unit..unit + 1, matrix, &x[..count], to, true);
        };
        let of = |p: usize| match p < count {
            true => self.refined[panel + p].as_slice(),
            false => &[],
        };
        // The same channels are large in most rows, so most units are refined in both panels.
        let (mut left, mut right) = (of(0), of(1));
        while let Some(&unit) = left.iter().take(1).chain(right.iter().take(1)).min() {
            let starts_with_unit = |list: &[usize]| usize::from(list.first() == Some(&unit));
            let (in_left, in_right) = (starts_with_unit(left), starts_with_unit(right));
            add(1 - in_left, in_left + in_right, unit);
            (left, right) = (&left[in_left..], &right[in_right..]);
        }
    }
}

impl GemmTask<'_> {
    /// Returns the instruction for this product, or `None` if it cannot be computed in 8-bit
    /// integers. This requires many rows, whole units of columns, and a matrix whose codes
    /// represent integers.
    pub(crate) fn byte_dot(&self) -> Option<Dot> {
        let fits = self.product.rows >= MIN_GEMM_ROWS
            && self.product.k.is_multiple_of(UNIT)
            && self.data.iter().all(|(data, _)| match data {
                MatrixData::Quantized { matrix, .. } => matrix.kernels().integers,
                MatrixData::Dense(_) => false,
            });
        Dot::for_isa(self.product.isa).filter(|_| fits)
    }

    /// Computes the product in 8-bit integers. With `refine`, values of units with large inputs get
    /// a second integer, for their residuals.
    pub(crate) fn run_bytes(&self, (dot, refine): (Dot, bool), out: &SharedOutput) {
        let blocks = self.blocks();
        INPUTS.with_borrow_mut(|inputs| {
            for first in (0..self.product.rows).step_by(BLOCK_M) {
                let rows = (first, (first + BLOCK_M).min(self.product.rows));
                self.quantize_bytes((dot, refine), rows, inputs);
                self.multiply_bytes(dot, rows, inputs, &blocks, out);
            }
        });
    }

    /// Quantizes input rows into panels, after the norm.
    fn quantize_bytes(
        &self,
        (dot, refine): (Dot, bool),
        (first, last): (usize, usize),
        inputs: &mut Inputs,
    ) {
        let k = self.product.k;
        let count = (last - first).div_ceil(LANES);
        let sizes = sizes(k);
        inputs.coarse.resize(count, sizes);
        let fine_sizes = if refine { sizes } else { [0; 3] };
        inputs.fine.resize(count, fine_sizes);
        inputs.refined.resize_with(count, Vec::new);
        let (coarse, fine) = (inputs.coarse.shared(), inputs.fine.shared());
        let refined = SharedOutput::new(&mut inputs.refined);
        parallel_ranges(count, (last - first) * k * 4, &|from, to| {
            PANEL.with_borrow_mut(|panel| {
                panel.resize(LANES * k);
                for i in from..to {
                    self.fill_panel((first + i * LANES, last), panel);
                    // SAFETY: no two parts of the job write the same panel.
                    let (mut coarse, fine, refined) = unsafe {
                        let refined = &mut refined.slice_mut(i, 1)[0];
                        (coarse.panel(i, sizes), fine.panel(i, fine_sizes), refined)
                    };
                    byte_tile::quantize(dot, panel, coarse.reborrow());
                    match refine {
                        true => byte_tile::refine(dot, panel, coarse.as_ref(), fine, refined),
                        false => refined.clear(),
                    }
                }
            });
        });
    }

    fn multiply_bytes(
        &self,
        dot: Dot,
        rows: (usize, usize),
        inputs: &Inputs,
        blocks: &[ColumnBlock],
        out: &SharedOutput,
    ) {
        let Product { k, n, .. } = *self.product;
        let run = |i: usize| {
            SCRATCH.with_borrow_mut(|scratch| {
                self.byte_block(dot, rows, inputs, blocks[i], scratch, out);
            });
        };
        if (rows.1 - rows.0) * n * k < MIN_PARALLEL_WORK {
            (0..blocks.len()).for_each(run);
        } else {
            pool::pool().run(blocks.len(), &run);
        }
    }

    /// Multiplies a range of rows of one matrix, or of both matrices of a gate, with all panels.
    fn byte_block(
        &self,
        dot: Dot,
        (first, last): (usize, usize),
        inputs: &Inputs,
        block: ColumnBlock,
        scratch: &mut Scratch,
        out: &SharedOutput,
    ) {
        let Product { k, gate, .. } = *self.product;
        let columns = block.to - block.from;
        // The last row block may extend beyond the matrix.
        let wide = columns.next_multiple_of(INTERLEAVED_ROWS);
        let row_blocks = block.from / INTERLEAVED_ROWS..block.to.div_ceil(INTERLEAVED_ROWS);
        let parts = &self.data[block.part..block.part + 1 + usize::from(gate.is_some())];
        let (quads, factors) = (k / 4 * wide, k / HALF * wide);
        let Scratch {
            quads: all_quads,
            scales,
            biases,
            sums,
        } = scratch;
        all_quads.resize(parts.len() * quads);
        scales.resize(parts.len() * factors);
        biases.resize(parts.len() * factors);
        let mut matrices = Vec::with_capacity(parts.len());
        let places = all_quads
            .chunks_exact_mut(quads)
            .zip(scales.chunks_exact_mut(factors))
            .zip(biases.chunks_exact_mut(factors));
        for ((data, _), ((quads, scales), biases)) in parts.iter().zip(places) {
            let MatrixData::Quantized { matrix, .. } = data else {
                unreachable!("`byte_dot` has seen the matrices");
            };
            let matrix = matrix.block_range(row_blocks.clone());
            let size = matrix.groups * wide;
            let to = BytePanelMut {
                quads: bytemuck::cast_slice_mut(quads),
                scales: &mut scales[..size],
                biases: &mut biases[..size],
            };
            let bytes = dot.bytes(matrix.bits, matrix.codes());
            let largest = dot.largest(matrix.bits, matrix.codes());
            matrix.byte_quads(bytes, to);
            matrices.push(BytePanel {
                quads: bytemuck::cast_slice(quads),
                scales: &scales[..size],
                biases: &biases[..size],
                rows: wide,
                group: matrix.group_size(),
                bytes,
                largest,
            });
        }
        let size = columns * LANES;
        let each = parts.len() * size;
        sums.resize(PANELS * each);
        let panels = (last - first).div_ceil(LANES);
        for panel in (0..panels).step_by(PANELS) {
            let count = PANELS.min(panels - panel);
            let x: [_; PANELS] =
                std::array::from_fn(|p| inputs.coarse.panel(panel + p.min(count - 1), k));
            for (i, matrix) in matrices.iter().enumerate() {
                for from in (0..k / UNIT).step_by(BLOCK_UNITS) {
                    let units = from..(k / UNIT).min(from + BLOCK_UNITS);
                    let sums = (&mut sums[i * size..], each);
                    byte_tile::multiply(dot, columns, units, *matrix, &x[..count], sums, from > 0);
                }
                let to = (&mut sums[i * size..], each);
                inputs.add_fine(dot, columns, (panel, count), (*matrix, k), to);
            }
            for (i, sums) in sums.chunks_exact_mut(each).take(count).enumerate() {
                self.finish_tile(sums, (first + (panel + i) * LANES, last), block, out);
            }
        }
    }
}
