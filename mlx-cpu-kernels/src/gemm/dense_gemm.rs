//! Multiplication of many input rows with dense matrices, for AVX2 and AVX-512. A row has the same
//! result as in `few_rows.rs`, bit by bit. `packed_gemm.rs` handles other instruction sets.
//!
//! Inputs are packed into panels, some rows at a time. A thread packs a block of matrix rows as
//! float32 and multiplies it with each panel. Meanwhile it prefetches the next block.

use std::cell::RefCell;

use crate::gemm::dense::DenseView;
use crate::gemm::packed_gemm::{ColumnBlock, GemmTask};
use crate::gemm::product::{MatrixData, Product};
use crate::layout::aligned::AlignedVec;
use crate::layout::dense::DenseTile;
use crate::layout::tile::LANES;
use crate::partition::{MIN_PARALLEL_WORK, SharedOutput, parallel_ranges};
use crate::pool;
use crate::simd::dense_rows;

/// The size of the inputs that are packed at once, in elements. They fit the L2 cache, unless they
/// are [`LEAST_ROWS`] rows.
const INPUTS: usize = 1 << 18;

/// The minimum number of rows that are packed at once, if there are as many. For fewer rows,
/// packing the matrix would take a large part of the time.
const LEAST_ROWS: usize = 128;

/// The maximum number of rows that are packed at once.
const MOST_ROWS: usize = 512;

/// The maximum size of a packed block of the matrix. It stays in the L2 cache of a core, of 1 or 2
/// MiB, for all panels.
const BLOCK_BYTES: usize = 1 << 20;

/// The maximum numbers of rows of a block. The first one that fits [`BLOCK_BYTES`] is used. Each is
/// a multiple of three, the number of rows of a tile.
const BLOCK_ROWS: [usize; 3] = [48, 24, 12];

/// Scratch memory of a thread for a block.
#[derive(Default)]
struct Scratch {
    /// Packed matrix rows.
    weights: AlignedVec,
    /// Vectors of sums.
    vectors: AlignedVec,
    /// Finished tiles.
    tiles: AlignedVec,
}

thread_local! {
    /// Packed input rows, after the norm.
    static PANELS: RefCell<AlignedVec> = RefCell::default();
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl GemmTask<'_> {
    /// Whether this kernel supports the product: it has many rows, and only dense matrices.
    pub(crate) fn fits_dense(&self) -> bool {
        let is_dense = |(data, _): &(MatrixData<'_>, _)| matches!(data, MatrixData::Dense(_));
        dense_rows::packed_tile(self.product.isa).is_some()
            && self.product.rows >= dense_rows::MIN_PACKED_ROWS
            && self.product.k > 0
            && self.data.iter().all(is_dense)
    }

    /// Computes the product.
    pub(crate) fn run_dense(&self, out: &SharedOutput) {
        let Product { k, n, isa, .. } = *self.product;
        let Some(sizes) = dense_rows::packed_tile(isa) else {
            return;
        };
        let at_once = (INPUTS / k).clamp(LEAST_ROWS, MOST_ROWS) / LANES * LANES;
        let fits = |rows: &usize| rows * k * size_of::<f32>() <= BLOCK_BYTES;
        let most = BLOCK_ROWS.into_iter().find(fits);
        let most = most.unwrap_or(BLOCK_ROWS[BLOCK_ROWS.len() - 1]);
        let blocks = self.blocks_of(most);
        PANELS.with_borrow_mut(|panels| {
            for first in (0..self.product.rows).step_by(at_once) {
                let rows = (first, (first + at_once).min(self.product.rows));
                self.pack_inputs(sizes, rows, panels);
                let run = |i: usize| {
                    let block = (blocks[i], blocks.get(i + 1).copied());
                    SCRATCH.with_borrow_mut(|scratch| {
                        self.dense_block(sizes, (rows, panels), block, scratch, out);
                    });
                };
                if (rows.1 - rows.0) * n * k < MIN_PARALLEL_WORK {
                    (0..blocks.len()).for_each(run);
                } else {
                    pool::pool().run(blocks.len(), &run);
                }
            }
        });
    }

    /// Packs input rows, after the norm. A tile of outputs has a whole number of panels.
    fn pack_inputs(
        &self,
        sizes: DenseTile,
        (first, last): (usize, usize),
        panels: &mut AlignedVec,
    ) {
        let Product { k, isa, .. } = *self.product;
        let (count, size) = ((last - first).div_ceil(sizes.inputs), sizes.panel_len(k));
        panels.resize(count * size);
        let all = SharedOutput::new(panels);
        parallel_ranges(count, (last - first) * k * 4, &|from, to| {
            for i in from..to {
                let begin = first + i * sizes.inputs;
                let mut rows = [&[][..]; LANES];
                let mut factors = [1.0; LANES];
                let n = sizes.inputs.min(last - begin);
                for (row, (x, factor)) in (begin..).zip(rows[..n].iter_mut().zip(&mut factors)) {
                    *x = &self.x[row * k..(row + 1) * k];
                    *factor = self.factor(isa, x);
                }
                let norm = self.norm.map(|(weight, _)| (weight, &factors[..]));
                // SAFETY: no other part of the job writes this panel.
                let panel = unsafe { all.slice_mut(i * size, size) };
                dense_rows::pack_inputs(isa, &rows[..n], norm, sizes.inputs, panel);
            }
        });
    }

    /// The rows of a block in matrix `part`.
    fn dense_rows(&self, part: usize, block: ColumnBlock) -> Option<DenseView<'_>> {
        let k = self.product.k;
        match self.data.get(part)?.0 {
            MatrixData::Dense(matrix) => Some(matrix.slice(block.from * k..block.to * k)),
            MatrixData::Quantized { .. } => None,
        }
    }

    /// Multiplies a range of rows of one matrix, or of both matrices of a gate, with all panels.
    fn dense_block(
        &self,
        sizes: DenseTile,
        ((first, last), panels): ((usize, usize), &[f32]),
        (block, next): (ColumnBlock, Option<ColumnBlock>),
        scratch: &mut Scratch,
        out: &SharedOutput,
    ) {
        let Product { k, isa, gate, .. } = *self.product;
        let Scratch {
            weights,
            vectors,
            tiles,
        } = scratch;
        let columns = block.to - block.from;
        let parts = 1 + usize::from(gate.is_some());
        let size = sizes.matrix_len(columns, k);
        weights.resize(parts * size);
        let mut ahead = [
            std::ptr::null()..std::ptr::null(),
            std::ptr::null()..std::ptr::null(),
        ];
        for (i, weights) in weights.chunks_exact_mut(size).enumerate() {
            if let Some(matrix) = self.dense_rows(block.part + i, block) {
                dense_rows::pack_matrix(isa, matrix, k, weights);
            }
            if let Some(next) = next.and_then(|next| self.dense_rows(next.part + i, next)) {
                ahead[i] = next.bytes();
            }
        }
        tiles.resize(parts * columns * LANES);
        let size_of_panel = sizes.panel_len(k);
        for begin in (first..last).step_by(LANES) {
            let count = LANES.min(last - begin).div_ceil(sizes.inputs);
            let from = (begin - first) / sizes.inputs * size_of_panel;
            let panels = &panels[from..from + count * size_of_panel];
            let each = tiles.chunks_exact_mut(columns * LANES);
            for ((weights, tile), ahead) in weights.chunks_exact(size).zip(each).zip(&mut ahead) {
                for (i, panel) in panels.chunks_exact(size_of_panel).enumerate() {
                    let tile = &mut tile[i * sizes.inputs..];
                    let size = (columns, k);
                    dense_rows::multiply_packed(isa, panel, weights, size, vectors, tile, ahead);
                }
            }
            self.finish_tile(tiles, (begin, last), block, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use crate::gemm::dense::DenseType;
    use crate::gemm::product::{MatrixFormat, Product, Size};
    use crate::isa::Isa;
    use crate::simd::dense_rows;
    use crate::testing::{noise, with_each};
    use crate::work::{Input, Work as _};

    /// The outputs of some rows `x`, after a norm with `weight` if there is one.
    fn product(
        (isa, number, size): (Isa, DenseType, Size),
        x: &[f32],
        weight: Option<&[f32]>,
        matrix: Input,
    ) -> Vec<f32> {
        let rows = x.len() / size.k;
        let mut product = Product::plain(isa, MatrixFormat::Dense(number), size, rows);
        product.eps = weight.map(|_| 1e-5);
        let mut inputs = vec![Input::from_slice(x)];
        inputs.extend(weight.map(Input::from_slice));
        inputs.push(matrix);
        let mut out = vec![f32::NAN; rows * size.n];
        // SAFETY: the inputs have the types, the order and the sizes of the product.
        unsafe { product.run(&inputs, &mut out) };
        out
    }

    /// The sizes have incomplete vectors, tiles and panels, several blocks of columns, and more
    /// rows than are packed at once.
    #[test]
    fn a_row_has_the_same_bits_alone_and_among_many() {
        with_each(|isa| {
            if dense_rows::packed_tile(isa).is_none() {
                return;
            }
            for (rows, k, n) in [
                (16, 1, 1),
                (17, 37, 50),
                (30, 2310, 26),
                (137, 2100, 5),
                (530, 24, 7),
                (17, 11_000, 30),
            ] {
                for (number, weight) in [
                    (DenseType::F32, None),
                    (DenseType::F32, Some(noise(k, 5))),
                    (DenseType::F16, None),
                    (DenseType::Bf16, Some(noise(k, 6))),
                ] {
                    let (x, w) = (noise(rows * k, 3), noise(n * k, 4));
                    let bits: Vec<u16> = (w.iter())
                        .map(|v| match number {
                            DenseType::Bf16 => bf16::from_f32(*v).to_bits(),
                            _ => f16::from_f32(*v).to_bits(),
                        })
                        .collect();
                    let matrix = match number {
                        DenseType::F32 => Input::from_slice(&w),
                        // SAFETY: the elements exist until the end of the loop.
                        _ => unsafe { Input::from_raw(bits.as_ptr().cast(), n * k) },
                    };
                    let of = (isa, number, Size { n, k });
                    let all = product(of, &x, weight.as_deref(), matrix);
                    for i in [0, 7, 8, 15, rows / 2, rows - 1] {
                        let row = &x[i * k..(i + 1) * k];
                        let alone = product(of, row, weight.as_deref(), matrix);
                        assert_eq!(alone, all[i * n..(i + 1) * n], "{isa:?} {rows} {k} {n} {i}");
                    }
                }
            }
        });
    }
}
