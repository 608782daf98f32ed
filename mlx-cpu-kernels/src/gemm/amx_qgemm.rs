//! Multiplication with quantized matrices on AMX, for two or more rows. This file distributes the
//! tiles of `simd/amx` over threads. Inputs are packed into tiles once. Then pairs of output tiles
//! are computed from them: two adjacent tiles, or for a gate one tile of each matrix.

use std::cell::RefCell;

use crate::gemm::packed_gemm::GemmTask;
use crate::gemm::product::{MatrixData, Product};
use crate::isa::Isa;
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::partition::{SharedOutput, parallel_parts, parallel_ranges};
use crate::pool;
use crate::simd::amx::{
    self, InputTiles, InputTilesWriter, OutputRow, TILE_ROWS, TilePair, TileRegisters,
};

/// The maximum number of input rows per block, and of their elements. The tiles of a block should
/// fit the L2 cache.
const BLOCK_M: usize = 256;
const MAX_ELEMENTS: usize = 1 << 18;

/// The minimum number of input rows for this kernel.
const MIN_ROWS: usize = 2;

/// The maximum number of rows for which each thread packs its own copy of the tiles. For few rows
/// this is faster than waiting for tiles of another thread and reading them.
const MAX_PRIVATE_ROWS: usize = 16;

/// The minimum number of rows per thread for which each thread computes all outputs of its own
/// rows. The thread has then mostly written these input rows itself. Each code of a matrix is still
/// used for enough rows.
const MIN_ROWS_PER_THREAD: usize = 32;

/// Parts of outputs per thread. With several parts, other threads can run some parts of a slow
/// thread.
const PARTS_PER_BLOCK: usize = 4;

thread_local! {
    /// Input tiles that threads share, for each packing of the matrices.
    static SHARED_TILES: RefCell<Vec<InputTiles>> = RefCell::default();
    /// Input tiles of this thread only.
    static PRIVATE_TILES: RefCell<Vec<InputTiles>> = RefCell::default();
    static SCRATCH: RefCell<amx::Scratch> = RefCell::default();
}

/// Outputs of a part that are computed together, and their column in an output row. They fill at
/// most two tiles; for a gate, one tile of each part.
#[derive(Clone, Copy)]
struct TilePlace {
    part: usize,
    from: usize,
    column: usize,
}

impl GemmTask<'_> {
    /// Whether [`Self::run_amx_quantized`] supports this product.
    pub(crate) fn fits_amx_quantized(&self) -> bool {
        let quantized = |(data, _): &(MatrixData<'_>, _)| match data {
            MatrixData::Quantized { matrix, .. } => matrix.kernels().amx,
            MatrixData::Dense(_) => false,
        };
        let together = self.product.gate.is_none() || self.form_of(0) == self.form_of(1);
        self.product.isa == Isa::Amx
            && self.product.rows >= MIN_ROWS
            && self.data.iter().all(quantized)
            && together
    }

    /// The index of the prepared input for a part, if the part is quantized.
    fn form_of(&self, part: usize) -> Option<usize> {
        match self.data.get(part)?.0 {
            MatrixData::Quantized { form, .. } => Some(form),
            MatrixData::Dense(_) => None,
        }
    }

    /// Computes all outputs. Call it only if [`Self::fits_amx_quantized`] is true.
    pub(crate) fn run_amx_quantized(&self, packings: &[(u32, usize)], out: &SharedOutput) {
        let places = self.places();
        if self.product.rows <= MAX_PRIVATE_ROWS {
            return self.run_private_tiles(packings, out);
        }
        if self.product.rows >= MIN_ROWS_PER_THREAD * pool::pool().threads() {
            return self.run_row_blocks(packings, out);
        }
        SHARED_TILES.with_borrow_mut(|tiles| {
            tiles.resize_with(packings.len().max(tiles.len()), InputTiles::default);
            for first in (0..self.product.rows).step_by(BLOCK_M) {
                let rows = (first, (first + BLOCK_M).min(self.product.rows));
                for (tiles, packing) in tiles.iter_mut().zip(packings) {
                    self.fill_shared(rows, *packing, tiles);
                }
                let tiles = &*tiles;
                let work = (rows.1 - rows.0) * self.product.n * self.product.k;
                parallel_parts(places, work, &|indices| {
                    self.multiply_tiles(tiles, indices, rows, out);
                });
            }
        });
    }

    /// Computes the product for many rows. Each thread packs its own rows and computes their
    /// outputs.
    fn run_row_blocks(&self, packings: &[(u32, usize)], out: &SharedOutput) {
        let Product { rows, n, k, .. } = *self.product;
        let threads = pool::pool().threads();
        let most = (MAX_ELEMENTS / k).clamp(MIN_ROWS_PER_THREAD, BLOCK_M) * threads;
        let size = rows
            .div_ceil(threads * rows.div_ceil(most))
            .next_multiple_of(TILE_ROWS);
        let (places, pieces) = (self.places(), PARTS_PER_BLOCK);
        parallel_parts(rows.div_ceil(size) * pieces, rows * n * k, &|indices| {
            PRIVATE_TILES.with_borrow_mut(|tiles| {
                let mut filled = None;
                for (block, piece) in indices.map(|i| (i / pieces, i % pieces)) {
                    let rows = (block * size, rows.min((block + 1) * size));
                    if filled.replace(block) != Some(block) {
                        self.fill_private(packings, rows, tiles);
                    }
                    let place = |piece: usize| places * piece / pieces;
                    let mut tiles_of_piece = place(piece)..place(piece + 1);
                    self.multiply_tiles(tiles, &mut tiles_of_piece, rows, out);
                }
            });
        });
    }

    /// Packs these rows into the thread's own tiles.
    fn fill_private(
        &self,
        packings: &[(u32, usize)],
        rows: (usize, usize),
        tiles: &mut Vec<InputTiles>,
    ) {
        tiles.resize_with(packings.len().max(tiles.len()), InputTiles::default);
        for (tiles, packing) in tiles.iter_mut().zip(packings) {
            tiles.resize(rows.1 - rows.0, self.product.k, *packing);
            let padded = tiles.padded();
            self.fill_rows(rows, (0, padded), &tiles.writer());
        }
    }

    /// Computes the product for few rows. Each thread packs its own copy of all rows.
    fn run_private_tiles(&self, packings: &[(u32, usize)], out: &SharedOutput) {
        let rows = (0, self.product.rows);
        let work = self.product.rows * self.product.n * self.product.k;
        parallel_parts(self.places(), work, &|indices| {
            let mut indices = indices.peekable();
            if indices.peek().is_none() {
                return;
            }
            PRIVATE_TILES.with_borrow_mut(|tiles| {
                self.fill_private(packings, rows, tiles);
                self.multiply_tiles(tiles, &mut indices, rows, out);
            });
        });
    }

    /// Multiplies the packed rows with the matrix rows of the places `indices`.
    fn multiply_tiles(
        &self,
        tiles: &[InputTiles],
        indices: &mut dyn Iterator<Item = usize>,
        rows: (usize, usize),
        out: &SharedOutput,
    ) {
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: only `detect` makes `Isa::Amx`, where AMX is available.
            let registers = unsafe { TileRegisters::new() };
            let form = |place: usize| self.form_of(self.part(place).0);
            let mut indices = indices.peekable();
            while let Some(of) = indices.peek().map(|&place| form(place)) {
                let mut alike = std::iter::from_fn(|| indices.next_if(|&place| form(place) == of));
                let x = &tiles[of.unwrap_or(0)];
                // SAFETY: such processors have AVX-512.
                unsafe {
                    amx::products(
                        &mut alike,
                        &|i| self.source(self.place(i)),
                        x,
                        &registers,
                        scratch,
                        &mut |i, sums| self.finish(self.place(i), rows, sums, out),
                    );
                }
            }
        });
    }

    /// The number of [`TilePlace`]s of the product.
    fn places(&self) -> usize {
        let parts = &self.product.parts;
        match self.product.gate {
            Some(_) => self.product.n.div_ceil(TILE_ROWS),
            None => parts.iter().map(|p| p.size.n.div_ceil(2 * TILE_ROWS)).sum(),
        }
    }

    fn place(&self, i: usize) -> TilePlace {
        let (part, end) = self.part(i);
        let parts = &self.product.parts;
        let from = match self.product.gate {
            Some(_) => i * TILE_ROWS,
            None => (parts[part].size.n.div_ceil(2 * TILE_ROWS) - (end - i)) * 2 * TILE_ROWS,
        };
        let start: usize = parts[..part].iter().map(|p| p.size.n).sum();
        TilePlace {
            part,
            from,
            column: start + from,
        }
    }

    /// Packs input rows into shared tiles, after the norm.
    fn fill_shared(
        &self,
        (first, last): (usize, usize),
        packing: (u32, usize),
        tiles: &mut InputTiles,
    ) {
        let k = self.product.k;
        tiles.resize(last - first, k, packing);
        let padded = tiles.padded();
        let writer = tiles.writer();
        parallel_ranges(padded, padded * k * 4, &|from, to| {
            self.fill_rows((first, last), (from, to), &writer);
        });
    }

    /// Packs the rows `from..to` into tiles. No other thread may write these rows.
    fn fill_rows(
        &self,
        (first, last): (usize, usize),
        (from, to): (usize, usize),
        writer: &InputTilesWriter<'_>,
    ) {
        let k = self.product.k;
        for row in from..to {
            let x = (first + row < last).then(|| &self.x[(first + row) * k..][..k]);
            let factor = x.map_or(1.0, |x| self.factor(self.product.isa, x));
            let weight = self.norm.map(|(weight, _)| weight);
            // SAFETY: each row belongs to only one part of the job. Only `detect` makes `Isa::Amx`,
            // on processors with AVX-512.
            unsafe { writer.row(row, x, (factor, weight)) };
        }
    }

    /// The part to which tile place `i` belongs (the first part for a gate), and the first place of
    /// the next part.
    fn part(&self, i: usize) -> (usize, usize) {
        if self.product.gate.is_some() {
            return (0, self.places());
        }
        let mut end = 0;
        for (part, matrix) in self.product.parts.iter().enumerate() {
            end += matrix.size.n.div_ceil(2 * TILE_ROWS);
            if i < end {
                return (part, end);
            }
        }
        unreachable!("as task as `places` says")
    }

    /// The matrix rows of the two tiles. If there is only one tile, its rows are returned twice.
    fn source(&self, place: TilePlace) -> TilePair<'_> {
        let tile = |part: usize, from: usize| match self.data[part].0 {
            MatrixData::Quantized { matrix, .. } => {
                let (first, count) = (from / INTERLEAVED_ROWS, matrix.row_blocks());
                (first < count).then(|| {
                    matrix.block_range(first..count.min(first + TILE_ROWS / INTERLEAVED_ROWS))
                })
            }
            MatrixData::Dense(_) => None,
        };
        let one = tile(place.part, place.from);
        let other = match self.product.gate {
            Some(_) => tile(1, place.from),
            None => tile(place.part, place.from + TILE_ROWS),
        };
        match (one, other) {
            (Some(one), other) => TilePair([one, other.unwrap_or(one)]),
            (None, _) => unreachable!("a place is in its part"),
        }
    }

    /// Applies the epilogue to two output tiles, and writes them to the output.
    fn finish(
        &self,
        place: TilePlace,
        (first, last): (usize, usize),
        sums: &[OutputRow],
        out: &SharedOutput,
    ) {
        let Product { n, gate, .. } = *self.product;
        // The last row block may extend beyond the matrix.
        let end = self.product.parts[place.part].size.n;
        let most = if gate.is_some() {
            TILE_ROWS
        } else {
            2 * TILE_ROWS
        };
        let width = most.min(end - place.from);
        let bias = |part: usize, from: usize| {
            let bias = self.data[part].1?;
            Some(&bias[from.min(end)..end.min(from + TILE_ROWS)])
        };
        let biases = match gate {
            Some(_) => [bias(0, place.from), bias(1, place.from)],
            None => [
                bias(place.part, place.from),
                bias(place.part, place.from + TILE_ROWS),
            ],
        };
        let at = first * n + place.column;
        let then = amx::Epilogue {
            biases,
            gate,
            residual: self.residual.map(|all| &all[at..]),
        };
        // SAFETY: no other tile place writes these columns of these rows. Only `detect` makes
        // `Isa::Amx`, on processors with AVX-512.
        unsafe {
            let mut to = out.block(at, n, (last - first, width));
            amx::store_outputs(sums, &then, &mut to);
        }
    }
}
