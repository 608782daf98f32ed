//! Multiplication of many input rows with quantized matrices in 16-bit integers, for AVX2 and for
//! AVX-512 with VNNI. With AVX-512 it is 1.2 (Zen 4) to 1.5 times (Zen 5) as fast as
//! `packed_gemm.rs`, with the same blocks and outputs. A row has the same result as in
//! `few_rows.rs`, bit by bit. In each row, sixteen input columns share a scale. With this number,
//! logits of one tiny model differ from the reference by up to 2.2e-3. They differ by 1.1e-3 with 8
//! columns per scale, by 3e-3 with 32, and by 0.9e-3 with float inputs.
//!
//! [`crate::PrefillInputs::Int16`], the default of models, selects this kernel.
//! [`crate::PrefillInputs::Mixed`] selects it where `byte_gemm.rs` is not supported.

use std::cell::RefCell;

use crate::gemm::packed_gemm::{BLOCK_M, ColumnBlock, GemmTask};
use crate::gemm::product::{MatrixData, Product};
use crate::layout::aligned::AlignedVec;
use crate::layout::integer_panel::{CodePanel, CodePanelMut, InputColumns, InputColumnsMut, STEP};
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::layout::tile::LANES;
use crate::partition::{MIN_PARALLEL_WORK, SharedOutput, parallel_ranges};
use crate::pool;
use crate::simd::integer_tile::{self, PANELS};

/// The number of columns per block. The columns of [`PANELS`] panels fit the L1 cache.
const BLOCK_K: usize = 256;

/// The maximum and the minimum number of matrix rows per block. With more rows, panels of inputs
/// are read less often.
const BLOCK_N: [usize; 2] = [96, 24];

/// The maximum size of a block's codes. They should stay in the L2 cache for all panels.
const BLOCK_BYTES: usize = 3 << 18;

/// The number of rows that a block may have even if its codes exceed [`BLOCK_BYTES`].
const BLOCK_N_USUAL: usize = 48;

/// The number of blocks that each thread should get, unless they would have fewer rows than the
/// minimum. A thread that ends early waits for at most one block of another thread.
const BLOCKS_PER_THREAD: usize = 8;

/// The number of matrix rows per block, for a matrix `[n, k]`.
fn block_width((n, k): (usize, usize), threads: usize) -> usize {
    let [most, least] = BLOCK_N;
    let fit = BLOCK_BYTES / (k * size_of::<i16>()).max(1);
    let most = fit.clamp(BLOCK_N_USUAL, most) / INTERLEAVED_ROWS * INTERLEAVED_ROWS;
    let balanced = n.div_ceil(threads * BLOCKS_PER_THREAD);
    balanced
        .next_multiple_of(INTERLEAVED_ROWS)
        .clamp(least, most)
}

/// Input rows, panel by panel; see [`InputColumns`].
#[derive(Default)]
struct Inputs {
    pairs: AlignedVec,
    scales: AlignedVec,
    sums: AlignedVec,
}

/// Scratch memory of a thread for a block.
#[derive(Default)]
struct Scratch {
    pairs: AlignedVec,
    scales: AlignedVec,
    biases: AlignedVec,
    sums: AlignedVec,
}

thread_local! {
    static INPUTS: RefCell<Inputs> = RefCell::default();
    static PANEL: RefCell<AlignedVec> = RefCell::default();
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Element counts of a panel with `k` columns: pairs, scales and sums.
const fn sizes(k: usize) -> [usize; 3] {
    [k / 2 * LANES, k / STEP * LANES, k / STEP * LANES]
}

impl Inputs {
    fn panel(&self, i: usize, k: usize) -> InputColumns<'_> {
        let [pairs, scales, sums] = sizes(k);
        InputColumns {
            pairs: bytemuck::cast_slice(&self.pairs[i * pairs..(i + 1) * pairs]),
            scales: &self.scales[i * scales..(i + 1) * scales],
            sums: &self.sums[i * sums..(i + 1) * sums],
        }
    }
}

impl GemmTask<'_> {
    /// Whether 16-bit integers support this product: it has many rows, and codes that represent
    /// integers.
    pub(crate) fn fits_integers(&self) -> bool {
        integer_tile::supports(self.product.isa)
            && self.product.rows >= self.product.few_below()
            && self.data.iter().all(|(data, _)| match data {
                MatrixData::Quantized { matrix, .. } => matrix.kernels().integers,
                MatrixData::Dense(_) => false,
            })
    }

    /// Computes the product in integers.
    pub(crate) fn run_integers(&self, out: &SharedOutput) {
        let Product { k, n, .. } = *self.product;
        let blocks = self.blocks_of_width(block_width((n, k), pool::pool().threads()));
        INPUTS.with_borrow_mut(|inputs| {
            for first in (0..self.product.rows).step_by(BLOCK_M) {
                let rows = (first, (first + BLOCK_M).min(self.product.rows));
                self.quantize(rows, inputs);
                self.multiply_integers(rows, inputs, &blocks, out);
            }
        });
    }

    /// Quantizes input rows into panels, after the norm.
    fn quantize(&self, (first, last): (usize, usize), inputs: &mut Inputs) {
        let k = self.product.k;
        let count = (last - first).div_ceil(LANES);
        let sizes = sizes(k);
        let buffers = [&mut inputs.pairs, &mut inputs.scales, &mut inputs.sums];
        for (buffer, size) in buffers.into_iter().zip(sizes) {
            buffer.resize(count * size);
        }
        let (pairs, scales, sums) = (
            SharedOutput::new(&mut inputs.pairs),
            SharedOutput::new(&mut inputs.scales),
            SharedOutput::new(&mut inputs.sums),
        );
        parallel_ranges(count, (last - first) * k * 4, &|from, to| {
            PANEL.with_borrow_mut(|panel| {
                panel.resize(LANES * k);
                for i in from..to {
                    self.fill_panel((first + i * LANES, last), panel);
                    // SAFETY: each panel belongs to only one part of the job.
                    let columns = unsafe {
                        let pairs = pairs.slice_mut(i * sizes[0], sizes[0]);
                        InputColumnsMut {
                            pairs: bytemuck::cast_slice_mut(pairs),
                            scales: scales.slice_mut(i * sizes[1], sizes[1]),
                            sums: sums.slice_mut(i * sizes[2], sizes[2]),
                        }
                    };
                    integer_tile::quantize(self.product.isa, panel, columns);
                }
            });
        });
    }

    fn multiply_integers(
        &self,
        rows: (usize, usize),
        inputs: &Inputs,
        blocks: &[ColumnBlock],
        out: &SharedOutput,
    ) {
        let Product { k, n, .. } = *self.product;
        let run = |i: usize| {
            SCRATCH.with_borrow_mut(|scratch| {
                self.integer_block(rows, inputs, blocks[i], scratch, out);
            });
        };
        if (rows.1 - rows.0) * n * k < MIN_PARALLEL_WORK {
            (0..blocks.len()).for_each(run);
        } else {
            pool::pool().run(blocks.len(), &run);
        }
    }

    /// Multiplies a range of rows of one matrix, or of both matrices of a gate, with all panels.
    fn integer_block(
        &self,
        (first, last): (usize, usize),
        inputs: &Inputs,
        block: ColumnBlock,
        scratch: &mut Scratch,
        out: &SharedOutput,
    ) {
        let Product { k, isa, gate, .. } = *self.product;
        let columns = block.to - block.from;
        // The last row block may extend beyond the matrix.
        let wide = columns.next_multiple_of(INTERLEAVED_ROWS);
        let row_blocks = block.from / INTERLEAVED_ROWS..block.to.div_ceil(INTERLEAVED_ROWS);
        let parts = &self.data[block.part..block.part + 1 + usize::from(gate.is_some())];
        let (pairs, factors) = (k / 2 * wide, k / STEP * wide);
        let Scratch {
            pairs: all_pairs,
            scales,
            biases,
            sums,
        } = scratch;
        all_pairs.resize(parts.len() * pairs);
        scales.resize(parts.len() * factors);
        biases.resize(parts.len() * factors);
        let mut matrices = Vec::with_capacity(parts.len());
        let places = all_pairs
            .chunks_exact_mut(pairs)
            .zip(scales.chunks_exact_mut(factors))
            .zip(biases.chunks_exact_mut(factors));
        for ((data, _), ((pairs, scales), biases)) in parts.iter().zip(places) {
            let MatrixData::Quantized { matrix, .. } = data else {
                unreachable!("`fits_integers` has seen the matrices");
            };
            let matrix = matrix.block_range(row_blocks.clone());
            let (group, biases_per_scale) = matrix.panel_groups();
            let size = k / group * wide;
            let (scales, biases) = (&mut scales[..size], &mut biases[..biases_per_scale * size]);
            let to = CodePanelMut {
                pairs: bytemuck::cast_slice_mut(pairs),
                scales,
                biases,
            };
            matrix.integer_pairs(isa, to);
            matrices.push(CodePanel {
                pairs: bytemuck::cast_slice(pairs),
                scales,
                biases,
                rows: wide,
                columns: k,
                group,
                biases_per_scale,
            });
        }
        let size = columns * LANES;
        // A tile has whole rows, so it may write beyond the sums of a panel.
        let apart = parts.len() * size + INTERLEAVED_ROWS * LANES;
        sums.resize(PANELS * apart);
        let panels = (last - first).div_ceil(LANES);
        let mut panel = 0;
        while panel < panels {
            let count = integer_tile::panels_at_once(panels - panel);
            let x: [_; PANELS] = std::array::from_fn(|p| inputs.panel(panel + p.min(count - 1), k));
            for (i, matrix) in matrices.iter().enumerate() {
                let (groups, at_once) = (k / matrix.group, (BLOCK_K / matrix.group).max(1));
                for from in (0..groups).step_by(at_once) {
                    let groups = from..groups.min(from + at_once);
                    let sums = (&mut sums[i * size..], apart);
                    let some = (columns, groups);
                    integer_tile::multiply(isa, some, *matrix, &x[..count], sums, from > 0);
                }
            }
            for (i, sums) in sums.chunks_exact_mut(apart).take(count).enumerate() {
                let sums = &mut sums[..parts.len() * size];
                self.finish_tile(sums, (first + (panel + i) * LANES, last), block, out);
            }
            panel += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::product::{MatrixFormat, MatrixPart, Size};
    use crate::isa::Isa;
    use crate::layout::packed::{PackedMatrix, ScaleFormat};
    use crate::prefill_inputs::PrefillInputs;
    use crate::simd::portable::vmath::Gate;
    use crate::testing::{noise, with_each};
    use crate::work::Input;

    /// Words, scales and biases of a matrix `[n, k]`.
    fn matrix((n, k): (usize, usize), (bits, group): (u32, usize), seed: u32) -> [Vec<f32>; 3] {
        let wide = n.next_multiple_of(INTERLEAVED_ROWS);
        let words = wide * k * bits as usize / 32;
        let bits_of = |v: &f32| f32::from_bits(v.to_bits().wrapping_mul(2_654_435_761));
        let words = noise(words, seed).iter().map(bits_of).collect();
        [
            words,
            noise(wide * k / group, seed + 1),
            noise(wide * k / group, seed + 2),
        ]
    }

    fn packed<'a>(
        parts: &'a [Vec<f32>; 3],
        k: usize,
        (bits, group): (u32, usize),
        inputs: &'a mut Vec<Input>,
    ) -> PackedMatrix<'a> {
        // SAFETY: the elements exist while the inputs are used.
        inputs.extend(
            parts
                .iter()
                .map(|p| unsafe { Input::from_raw(p.as_ptr().cast(), p.len()) }),
        );
        // SAFETY: the inputs are words and float32 scales and biases.
        unsafe { PackedMatrix::from_inputs(inputs, (bits, k / group, ScaleFormat::F32)) }
    }

    /// Tests every width, group size and number of rows, with a norm, biases and a gate. One
    /// channel is thousands of times as large as the others.
    #[test]
    fn products_equal_those_in_float64() {
        with_each(|isa| {
            if !integer_tile::supports(isa) {
                return;
            }
            for (bits, group) in [
                (4, 32),
                (8, 32),
                (5, 32),
                (6, 16),
                (3, 64),
                (2, 128),
                (4, 64),
            ] {
                for (rows, n, k) in [(16, 24, 128), (17, 53, 256), (49, 8, 640), (33, 100, 1152)] {
                    check(isa, (bits, group), (rows, n, k));
                }
            }
        });
    }

    fn check(isa: Isa, format: (u32, usize), (rows, n, k): (usize, usize, usize)) {
        let (bits, group) = format;
        if k % group != 0 {
            return;
        }
        let mut x = noise(rows * k, 9);
        x.iter_mut().skip(5).step_by(k).for_each(|v| *v *= 3000.0);
        let weights = [matrix((n, k), format, 20), matrix((n, k), format, 30)];
        let bias = noise(n, 40);
        let part = || MatrixPart {
            kind: MatrixFormat::Quantized {
                bits,
                group,
                scales: ScaleFormat::F32,
            },
            size: Size { n, k },
            bias: true,
            stored: None,
        };
        let product = Product {
            parts: vec![part(), part()],
            rows,
            k,
            n,
            eps: None,
            gate: Some(Gate::Relu),
            activation: None,
            residual: false,
            float_inputs: false,
            prefill_inputs: PrefillInputs::Float32,
            isa,
        };
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let matrices = [
            packed(&weights[0], k, format, &mut first),
            packed(&weights[1], k, format, &mut second),
        ];
        let data =
            matrices.map(|matrix| (MatrixData::Quantized { matrix, form: 0 }, Some(&bias[..])));
        let task = GemmTask {
            product: &product,
            x: &x,
            norm: None,
            data: &data,
            residual: None,
        };
        assert!(task.fits_integers());
        let mut actual = vec![f32::NAN; rows * n];
        task.run_integers(&SharedOutput::new(&mut actual));
        let mut w = vec![0.0; k];
        for column in 0..n {
            let mut wanted = [vec![0.0f64; rows], vec![0.0f64; rows]];
            // The expected squared rounding errors. An error is at most half a step of the integers
            // and of the sums.
            let mut errors = vec![0.0f64; rows];
            for (matrix, wanted) in matrices.iter().zip(&mut wanted) {
                matrix.dequantize_row(column, &mut w);
                for (row, x) in x.chunks_exact(k).enumerate() {
                    wanted[row] = f64::from(bias[column]);
                    for (w, x) in w.chunks(STEP).zip(x.chunks(STEP)) {
                        let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                        for (w, x) in w.iter().zip(x) {
                            let (w, x) = (f64::from(*w), f64::from(*x));
                            wanted[row] += w * x;
                            errors[row] += (w * f64::from(most) / 65_534.0).powi(2);
                            errors[row] += (w * x * 1e-6).powi(2);
                        }
                    }
                }
            }
            for row in 0..rows {
                let (gate, up) = (wanted[0][row], wanted[1][row]);
                let error = 4.0 * errors[row].sqrt();
                let allowed = error * (gate.abs() + up.abs() + error);
                let off = (f64::from(actual[row * n + column]) - gate.max(0.0) * up).abs();
                assert!(
                    off < allowed,
                    "{format:?} {rows} {row} {column}: {off} {allowed}"
                );
            }
        }
    }

    #[test]
    fn blocks_are_large_if_each_thread_gets_some_and_they_fit_the_cache() {
        for ((n, k), threads, width) in [
            ((8192, 2048), 2, 96),
            ((8192, 8192), 2, 48),
            ((8192, 5000), 2, 72),
            ((1024, 3072), 2, 64),
            ((1024, 3072), 64, 24),
            ((1, 64), 1, 24),
        ] {
            assert_eq!(block_width((n, k), threads), width, "{n} {k} {threads}");
        }
    }

    #[test]
    fn inputs_that_are_no_numbers_stay_so() {
        with_each(|isa| {
            if !integer_tile::supports(isa) {
                return;
            }
            for bad in [f32::NAN, f32::INFINITY] {
                let (rows, n, k) = (16, 8, 64);
                let mut x = noise(rows * k, 3);
                x[2 * k + 7] = bad;
                let weights = matrix((n, k), (4, 32), 5);
                let mut inputs = Vec::new();
                let matrix = packed(&weights, k, (4, 32), &mut inputs);
                let kind = MatrixFormat::Quantized {
                    bits: 4,
                    group: 32,
                    scales: ScaleFormat::F32,
                };
                let mut product = Product::plain(isa, kind, Size { n, k }, rows);
                product.prefill_inputs = PrefillInputs::Float32;
                let data = [(MatrixData::Quantized { matrix, form: 0 }, None)];
                let task = GemmTask {
                    product: &product,
                    x: &x,
                    norm: None,
                    data: &data,
                    residual: None,
                };
                let mut actual = vec![0.0; rows * n];
                task.run_integers(&SharedOutput::new(&mut actual));
                for (row, actual) in actual.chunks_exact(n).enumerate() {
                    let all = actual.iter().all(|v| v.is_finite());
                    assert!(all == (row != 2), "{bad} {row}: {actual:?}");
                }
            }
        });
    }
}
