//! Multiplication of few input rows, as in decode. Each matrix is read once, in packed form.
//! `packed_gemm.rs` handles many rows, as in prefill.

use crate::gemm::activations::PreparedRows;
use crate::gemm::packed_gemm::MIN_GEMM_ROWS;
use crate::gemm::product::{MatrixData, MatrixFormat, MatrixPart, Product};
#[cfg(target_arch = "x86_64")]
use crate::isa::Isa;
use crate::layout::input_panel::{MAX_ROWS, MOST_ROWS};
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::partition::{OutputBlock, SharedOutput, parallel_ranges};
#[cfg(target_arch = "x86_64")]
use crate::prefill_inputs::PrefillInputs;
use crate::simd::portable::vmath::Gate;
use crate::simd::vmath::{gate_apply, gate_mul};
use crate::simd::{dense_rows, qgemv};

/// The number of matrix rows that stay in the cache while all input rows are processed.
const BLOCK: usize = 32;

/// [`BLOCK`] for products with a dense matrix: whole tiles of two, three and four rows. The results
/// of [`MAX_ROWS`] inputs fit the memory for [`BLOCK`] rows and [`MOST_ROWS`] inputs.
const DENSE_BLOCK: usize = 48;

/// The maximum number of elements of a block, unless that leaves fewer than [`TILE`] rows.
const LONG: usize = 1 << 15;

/// The number of matrix rows that the AVX-512 kernel multiplies at once.
const TILE: usize = 2 * INTERLEAVED_ROWS;

/// The minimum number of rows for which codes are unpacked to memory.
#[cfg(target_arch = "x86_64")]
const MIN_INTEGER_ROWS: usize = 64;

/// Input rows, their matrices, and the row of their first output.
pub(crate) struct FewRows<'a> {
    /// Matrices of the product's sizes, each with its bias.
    pub data: &'a [(MatrixData<'a>, Option<&'a [f32]>)],
    pub rows: &'a PreparedRows<'a>,
    /// The output row of the first input row.
    pub first_row: usize,
}

impl Product {
    /// Multiplies the inputs from row `from` on with row blocks `blocks.0..blocks.1` of a matrix,
    /// and adds its biases. There is one output row per input row. The last row block may extend
    /// beyond the matrix; `out` has only columns of the matrix.
    fn qgemv(
        &self,
        (data, bias): (MatrixData<'_>, Option<&[f32]>),
        blocks: (usize, usize),
        rows: &PreparedRows<'_>,
        from: usize,
        out: &mut OutputBlock<'_>,
    ) {
        let (first, width) = (
            blocks.0 * INTERLEAVED_ROWS,
            (blocks.1 - blocks.0) * INTERLEAVED_ROWS,
        );
        let (n, columns) = out.dims();
        match data {
            MatrixData::Quantized { form, matrix: all } => {
                let (x, all) = (rows.panel(form, from), all.block_range(blocks.0..blocks.1));
                if columns == width {
                    qgemv::qgemv(self.isa, all, x, out);
                } else {
                    let mut sums = [0.0; BLOCK * MOST_ROWS];
                    for at in (0..width).step_by(BLOCK) {
                        let part = at..width.min(at + BLOCK);
                        let sums = &mut sums[..n * part.len()];
                        let all = all.block_range(
                            part.start / INTERLEAVED_ROWS..part.end / INTERLEAVED_ROWS,
                        );
                        qgemv::qgemv(self.isa, all, x, &mut OutputBlock::contiguous(sums, n));
                        for (i, sums) in sums.chunks_exact(part.len()).enumerate() {
                            let to = &mut out.row_mut(i)[at..columns.min(part.end)];
                            to.copy_from_slice(&sums[..to.len()]);
                        }
                    }
                }
            }
            MatrixData::Dense(matrix) => {
                let matrix = matrix.slice(first * self.k..(first + columns) * self.k);
                dense_rows::multiply(self.isa, matrix, rows.dense(from), out);
            }
        }
        if let Some(bias) = bias {
            for i in 0..n {
                let row = out.row_mut(i).iter_mut();
                row.zip(&bias[first..]).for_each(|(v, b)| *v += b);
            }
        }
    }

    /// Returns the number of rows from which on another kernel is used. It unpacks codes to
    /// registers, once for each panel. `integer_gemm.rs` unpacks codes to memory, once for all
    /// rows. That is faster with 64 or more rows, and gives the same bits.
    pub(crate) fn few_below(&self) -> usize {
        if self.float_inputs {
            return 0;
        }
        #[cfg(target_arch = "x86_64")]
        if self.prefill_inputs == PrefillInputs::Int16 && self.isa.has_avx2() && self.has_integers()
        {
            return MIN_INTEGER_ROWS;
        }
        MIN_GEMM_ROWS
    }

    /// Whether the kernels for x86-64 multiply all matrices with integers.
    #[cfg(target_arch = "x86_64")]
    fn has_integers(&self) -> bool {
        self.parts.iter().all(|part| part.kind.has_integers())
    }

    /// The maximum number of rows of a panel that suits the kernels of all parts.
    pub(crate) fn panel_rows(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if matches!(self.isa, Isa::Avx512 | Isa::Amx) && self.has_integers() {
            return MOST_ROWS;
        }
        MAX_ROWS
    }

    /// Whether a matrix is dense.
    pub(crate) fn has_dense(&self) -> bool {
        let mut kinds = self.parts.iter().map(|part| &part.kind);
        kinds.any(|kind| matches!(kind, MatrixFormat::Dense(_)))
    }

    /// The number of row blocks processed at once, in whole tiles. For long rows of quantized
    /// matrices it is smaller, so that the operands fit the L1 cache. The kernel for dense matrices
    /// divides rows itself.
    fn blocks_at_once(&self) -> usize {
        if self.has_dense() {
            return DENSE_BLOCK / INTERLEAVED_ROWS;
        }
        (LONG / self.k.max(1) / TILE * TILE).clamp(TILE, BLOCK) / INTERLEAVED_ROWS
    }

    pub(crate) fn run_few_rows(
        &self,
        data: &[(MatrixData<'_>, Option<&[f32]>)],
        residual: Option<&[f32]>,
        rows: &PreparedRows<'_>,
        out: &SharedOutput,
    ) {
        let job = FewRows {
            data,
            rows,
            first_row: 0,
        };
        self.run_jobs(std::slice::from_ref(&job), residual, out);
    }

    /// Computes the products of several sets of rows in one pass over the threads. Each set has its
    /// own matrices of this product's sizes.
    pub(crate) fn run_jobs(
        &self,
        jobs: &[FewRows<'_>],
        residual: Option<&[f32]>,
        out: &SharedOutput,
    ) {
        let all: usize = self.parts.iter().map(MatrixPart::row_blocks).sum();
        let rows: usize = jobs.iter().map(|job| job.rows.count).sum();
        parallel_ranges(all * jobs.len(), rows * self.n * self.k, &|first, last| {
            let mut at = first;
            while at < last {
                let (job, begin) = (at / all, at % all);
                let end = all.min(begin + last - at);
                self.run_blocks(&jobs[job], (begin, end), residual, out);
                at += end - begin;
            }
        });
    }

    /// Computes row blocks `first..last` of all parts for the rows of one job.
    fn run_blocks(
        &self,
        job: &FewRows<'_>,
        (first, last): (usize, usize),
        residual: Option<&[f32]>,
        out: &SharedOutput,
    ) {
        let rows = job.rows;
        // A single row needs no blocking, because it reuses nothing from the cache.
        let block = match rows.count {
            1 => last - first,
            _ => self.blocks_at_once(),
        };
        let (mut start, mut place) = (0, 0);
        for (part, data) in self.parts.iter().zip(job.data) {
            let end = start + part.row_blocks();
            let (mut at, stop) = (first.max(start), last.min(end));
            while at < stop {
                let next = (at + block).min(stop);
                let column = (at - start) * INTERLEAVED_ROWS;
                // The last row block may extend beyond the matrix.
                let columns = ((next - at) * INTERLEAVED_ROWS).min(part.size.n - column);
                let mut from = 0;
                while from < rows.count {
                    let n = rows.panel_rows(from);
                    let at_row = |i: usize| (job.first_row + from + i) * self.n + place + column;
                    // SAFETY: no other part of the job writes these columns of these rows.
                    let mut to = unsafe { out.block(at_row(0), self.n, (n, columns)) };
                    self.qgemv(*data, (at - start, next - start), rows, from, &mut to);
                    if let Some(activation) = self.activation {
                        for i in 0..n {
                            gate_apply(self.isa, activation, to.row_mut(i));
                        }
                    }
                    if let Some(residual) = residual {
                        for i in 0..n {
                            let before = &residual[at_row(i)..];
                            let to = to.row_mut(i).iter_mut();
                            to.zip(before).for_each(|(to, before)| *to += before);
                        }
                    }
                    from += n;
                }
                at = next;
            }
            start = end;
            place += part.size.n;
        }
    }

    pub(crate) fn run_few_rows_gated(
        &self,
        gate: Gate,
        data: &[(MatrixData<'_>, Option<&[f32]>)],
        rows: &PreparedRows<'_>,
        out: &SharedOutput,
    ) {
        let [first, second] = data else {
            return;
        };
        let block = self.blocks_at_once();
        let work = 2 * rows.count * self.n * self.k;
        parallel_ranges(self.n.div_ceil(INTERLEAVED_ROWS), work, &|begin, last| {
            for at in (begin..last).step_by(block) {
                let blocks = (at, (at + block).min(last));
                let columns =
                    ((blocks.1 - at) * INTERLEAVED_ROWS).min(self.n - at * INTERLEAVED_ROWS);
                let mut from = 0;
                while from < rows.count {
                    let n = rows.panel_rows(from);
                    let place = from * self.n + at * INTERLEAVED_ROWS;
                    // SAFETY: no other part of the job writes these columns.
                    let mut gates = unsafe { out.block(place, self.n, (n, columns)) };
                    let mut ups = [0.0; BLOCK * MOST_ROWS];
                    let mut ups = OutputBlock::contiguous(&mut ups[..n * columns], n);
                    self.qgemv(*first, blocks, rows, from, &mut gates);
                    self.qgemv(*second, blocks, rows, from, &mut ups);
                    for i in 0..n {
                        gate_mul(self.isa, gate, gates.row_mut(i), ups.row_mut(i));
                    }
                    from += n;
                }
            }
        });
    }
}
