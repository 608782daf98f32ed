//! Multiplication with matrices selected from a stack, as in mixtures of experts. Rows are sorted
//! by expert, and multiplied with the expert's packed matrix. `expert_block.rs` has the whole
//! feed-forward block.

use std::cell::RefCell;
use std::ops::Range;
use std::slice::Iter;

use crate::gemm::activations::{Forms, Scratch};
use crate::gemm::few_rows::FewRows;
use crate::gemm::packed_gemm::GemmTask;
use crate::gemm::product::{MatrixData, MatrixFormat, MatrixPart, Product, Size, StoredMatrix};
use crate::gemm::routes::{Routes, Routing};
use crate::gemm::vjp::{ProductVjp, Stored};
use crate::isa::Isa;
use crate::layout::packed::INTERLEAVED_ROWS;
use crate::memory::resize;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::prefill_inputs::PrefillInputs;
use crate::work::{Input, Work};

/// The maximum number of (row, expert) pairs in memory at once, unless one expert has more.
pub(crate) const PAIRS_AT_ONCE: usize = 512;

thread_local! {
    /// Prepared inputs of experts with few rows each.
    static SCRATCHES: RefCell<Vec<Scratch>> = RefCell::default();
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Matrices of the same size and format, one per expert, stored consecutively. Each quantized
/// matrix begins at a row block.
pub struct ExpertStack {
    /// The storage format.
    pub kind: MatrixFormat,
    /// The number of experts.
    pub experts: usize,
    /// The size of one matrix.
    pub size: Size,
    /// Whether biases `[experts, n]` follow in the inputs.
    pub bias: bool,
    /// Quantized matrices, unless they are among the inputs.
    pub stored: Option<StoredMatrix>,
}

/// Products of each input row with the transposed matrices of the row's experts: `[rows, per_row,
/// n]`. The inputs are the rows, float32 `[rows, k]`; the expert indices, 32-bit integers `[rows,
/// per_row]`; the arrays of the stack unless the operation stores them; and the biases.
pub struct ExpertProduct {
    /// The matrices.
    pub stack: ExpertStack,
    /// The experts of each row.
    pub routing: Routing,
    /// Whether inputs stay floats. Any number of rows then uses the kernel of `packed_gemm.rs`.
    pub float_inputs: bool,
    /// The input type for experts with many rows and quantized matrices.
    pub prefill_inputs: PrefillInputs,
    /// The instruction set.
    pub isa: Isa,
}

/// The backward pass of [`ExpertProduct`] with respect to its rows. It multiplies gradients `[rows,
/// per_row, n]` with the matrices (not transposed), and sums over the experts of each row: `[rows,
/// k]`. The inputs are the gradients, the expert indices, and the arrays of the stack, without
/// biases.
pub struct ExpertVjp {
    /// The matrices.
    pub stack: ExpertStack,
    /// The experts of each row.
    pub routing: Routing,
    /// The instruction set.
    pub isa: Isa,
}

/// Rows in the order of their experts.
#[derive(Default)]
struct Buffers {
    inputs: Vec<f32>,
    outputs: Vec<f32>,
}

/// A stack in memory.
#[derive(Clone, Copy)]
pub(crate) struct StackData<'a> {
    data: MatrixData<'a>,
    bias: Option<&'a [f32]>,
    pub size: Size,
}

impl ExpertStack {
    /// Takes the arrays of this stack from `inputs`, and returns a view of them. Adds the stack's
    /// packing to `packings`, unless `packings` already contains it.
    ///
    /// # Safety
    /// The inputs must be the arrays of this stack.
    pub(crate) unsafe fn data<'a>(
        &'a self,
        inputs: &mut Iter<'a, Input>,
        packings: &mut Vec<(u32, usize)>,
    ) -> StackData<'a> {
        let size = self.size;
        // SAFETY: the caller guarantees that the inputs are the arrays of this stack.
        let data = unsafe {
            self.kind
                .matrix(size.k, self.stored.as_ref(), inputs, packings)
        };
        // SAFETY: the caller guarantees that biases are float32 arrays of this stack.
        let floats = |input: Option<&'a Input>| input.map(|i| unsafe { i.as_slice::<f32>() });
        let bias = if self.bias {
            floats(inputs.next())
        } else {
            None
        };
        StackData { data, bias, size }
    }

    /// One expert's matrix as a part of a product.
    pub(crate) fn part(&self) -> MatrixPart {
        MatrixPart {
            kind: self.kind,
            size: self.size,
            bias: self.bias,
            stored: None,
        }
    }
}

impl<'a> StackData<'a> {
    /// The matrix and the bias of one expert.
    fn expert(self, expert: usize) -> (MatrixData<'a>, Option<&'a [f32]>) {
        let Size { n, k } = self.size;
        let data = match self.data {
            MatrixData::Quantized { matrix, form } => {
                let blocks = n.div_ceil(INTERLEAVED_ROWS);
                MatrixData::Quantized {
                    matrix: matrix.block_range(expert * blocks..(expert + 1) * blocks),
                    form,
                }
            }
            MatrixData::Dense(all) => {
                MatrixData::Dense(all.slice(expert * n * k..(expert + 1) * n * k))
            }
        };
        let bias = self.bias.map(|all| &all[expert * n..(expert + 1) * n]);
        (data, bias)
    }
}

/// The matrices and biases of an expert with few rows, and the range of its rows in the sorted
/// order.
type FewPairs<'a> = (Vec<(MatrixData<'a>, Option<&'a [f32]>)>, Range<usize>);

/// Multiplication with the same stacks for each expert. `product` has the parts; its `rows` is
/// ignored.
pub(crate) struct StackProduct<'a> {
    pub product: Product,
    pub stacks: Vec<StackData<'a>>,
    pub packings: Vec<(u32, usize)>,
}

impl StackProduct<'_> {
    /// Computes the products of rows `x`, which are sorted by expert. `groups` has the range of
    /// each expert's rows; the start of the first range is row 0 of `x`.
    pub(crate) fn run(&mut self, groups: &[(usize, Range<usize>)], x: &[f32], out: &mut [f32]) {
        let (k, n) = (self.product.k, self.product.n);
        let start = groups.first().map_or(0, |(_, range)| range.start);
        let mut few = Vec::new();
        for (expert, range) in groups {
            let range = range.start - start..range.end - start;
            let data: Vec<_> = self.stacks.iter().map(|s| s.expert(*expert)).collect();
            if !self.is_many(range.len()) {
                few.push((data, range));
                continue;
            }
            self.product.rows = range.len();
            let task = GemmTask {
                product: &self.product,
                x: &x[range.start * k..range.end * k],
                norm: None,
                data: &data,
                residual: None,
            };
            let out = SharedOutput::new(&mut out[range.start * n..range.end * n]);
            task.compute(&self.packings, &out);
        }
        self.run_few(&few, x, &SharedOutput::new(out));
    }

    /// Whether an expert has enough rows that all threads should work on it alone.
    fn is_many(&self, rows: usize) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.product.isa == Isa::Amx && rows >= 4 {
            return true;
        }
        self.product.few_below() <= rows
    }

    /// Computes the products of experts with few rows each, in one pass over the threads.
    fn run_few(&self, few: &[FewPairs<'_>], x: &[f32], out: &SharedOutput) {
        if few.is_empty() {
            return;
        }
        SCRATCHES.with_borrow_mut(|scratches| self.run_few_with(few, x, scratches, out));
    }

    fn run_few_with(
        &self,
        few: &[FewPairs<'_>],
        x: &[f32],
        scratches: &mut Vec<Scratch>,
        out: &SharedOutput,
    ) {
        let Product { isa, k, .. } = self.product;
        let forms = Forms {
            packings: &self.packings,
            dense: self.product.has_dense(),
            most: self.product.panel_rows(),
            threads: false,
        };
        scratches.resize_with(few.len().max(scratches.len()), Scratch::default);
        let scratches = &mut scratches[..few.len()];
        let rows: usize = few.iter().map(|(_, range)| range.len()).sum();
        let shared = SharedOutput::new(scratches);
        parallel_ranges(few.len(), rows * k * 4, &|from, to| {
            for (i, (_, range)) in few.iter().enumerate().take(to).skip(from) {
                // SAFETY: each scratch memory belongs to only one part of the job.
                let scratch = &mut unsafe { shared.slice_mut(i, 1) }[0];
                let inputs = &x[range.start * k..range.end * k];
                scratch.fill(isa, inputs, None, k, forms);
            }
        });
        let prepared: Vec<_> = (scratches.iter().zip(few))
            .map(|(scratch, (_, range))| {
                scratch.filled(isa, &x[range.start * k..range.end * k], k, forms)
            })
            .collect();
        let jobs: Vec<_> = (prepared.iter().zip(few))
            .map(|(rows, (data, range))| FewRows {
                data,
                rows,
                first_row: range.start,
            })
            .collect();
        self.product.run_jobs(&jobs, None, out);
    }
}

/// Copies rows of `k` elements to the positions `range` of the sorted order. `row` returns the
/// source row of a position.
pub(crate) fn gather(
    from: &[f32],
    k: usize,
    range: Range<usize>,
    row: &(dyn Fn(usize) -> usize + Sync),
    to: &mut Vec<f32>,
) {
    resize(to, range.len() * k, 0.0);
    let out = SharedOutput::new(to);
    parallel_ranges(range.len(), range.len() * k, &|first, last| {
        for i in first..last {
            let row = row(range.start + i);
            // SAFETY: no two parts of the job write the same row.
            let to = unsafe { out.slice_mut(i * k, k) };
            to.copy_from_slice(&from[row * k..(row + 1) * k]);
        }
    });
}

/// The range of positions of these experts' rows in the sorted order.
pub(crate) fn span(groups: &[(usize, Range<usize>)]) -> Range<usize> {
    match (groups.first(), groups.last()) {
        (Some((_, first)), Some((_, last))) => first.start..last.end,
        _ => 0..0,
    }
}

impl Work for ExpertProduct {
    fn outputs(&self) -> usize {
        self.routing.pairs() * self.stack.size.n
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let [x, ids, rest @ ..] = inputs else {
            return;
        };
        let Size { n, k } = self.stack.size;
        let mut packings = Vec::new();
        // SAFETY: the caller passes arrays of the documented types, in the documented order.
        let (x, routes, stack) = unsafe {
            (
                x.as_slice::<f32>(),
                self.routing.routes(ids, self.stack.experts),
                self.stack.data(&mut rest.iter(), &mut packings),
            )
        };
        let mut product = StackProduct {
            product: Product {
                parts: vec![self.stack.part()],
                rows: 0,
                k,
                n,
                eps: None,
                gate: None,
                activation: None,
                residual: false,
                float_inputs: self.float_inputs,
                prefill_inputs: self.prefill_inputs,
                isa: self.isa,
            },
            stacks: vec![stack],
            packings,
        };
        let out = SharedOutput::new(output);
        BUFFERS.with_borrow_mut(|Buffers { inputs, outputs }| {
            for groups in routes.batches(PAIRS_AT_ONCE) {
                let range = span(groups);
                let row = |place: usize| routes.pairs[place] / self.routing.per_row;
                gather(x, k, range.clone(), &row, inputs);
                resize(outputs, range.len() * n, 0.0);
                product.run(groups, inputs, outputs);
                let outputs = &outputs[..range.len() * n];
                parallel_ranges(range.len(), range.len() * n, &|first, last| {
                    for (i, y) in outputs.chunks_exact(n).enumerate().take(last).skip(first) {
                        // SAFETY: no two parts of the job write the same pair.
                        let to = unsafe { out.slice_mut(routes.pairs[range.start + i] * n, n) };
                        to.copy_from_slice(y);
                    }
                });
            }
        });
    }
}

impl Work for ExpertVjp {
    fn outputs(&self) -> usize {
        self.routing.rows * self.stack.size.k
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let [c, ids, rest @ ..] = inputs else {
            return;
        };
        let Size { n, k } = self.stack.size;
        // SAFETY: the caller passes arrays of the documented types, in the documented order.
        let (c, routes, stack) = unsafe {
            (
                c.as_slice::<f32>(),
                self.routing.routes(ids, self.stack.experts),
                self.stack.data(&mut rest.iter(), &mut Vec::new()),
            )
        };
        output.fill(0.0);
        let out = SharedOutput::new(output);
        BUFFERS.with_borrow_mut(|Buffers { inputs, outputs }| {
            for groups in routes.batches(PAIRS_AT_ONCE) {
                let range = span(groups);
                gather(c, n, range.clone(), &|place| routes.pairs[place], inputs);
                resize(outputs, range.len() * k, 0.0);
                for (expert, pairs) in groups {
                    let pairs = pairs.start - range.start..pairs.end - range.start;
                    let product = ProductVjp {
                        size: self.stack.size,
                        rows: pairs.len(),
                        kind: self.stack.kind,
                        isa: self.isa,
                    };
                    let stored = match stack.expert(*expert).0 {
                        MatrixData::Dense(dense) => Stored::Dense(dense),
                        MatrixData::Quantized { matrix, .. } => Stored::Quantized(matrix),
                    };
                    let to = SharedOutput::new(&mut outputs[pairs.start * k..pairs.end * k]);
                    product.compute(&inputs[pairs.start * n..pairs.end * n], stored, &to);
                }
                let outputs = &outputs[..range.len() * k];
                add_pairs(&self.routing, &routes, range, outputs, None, &out);
            }
        });
    }
}

/// Adds the weighted results of the pairs at the positions `range` of the sorted order to their
/// output rows. Result rows and output rows have equal lengths.
pub(crate) fn add_pairs(
    routing: &Routing,
    routes: &Routes,
    range: Range<usize>,
    values: &[f32],
    weights: Option<&[f32]>,
    out: &SharedOutput,
) {
    let Routing { rows, per_row, .. } = *routing;
    let n = values.len() / range.len().max(1);
    parallel_ranges(rows, values.len(), &|first, last| {
        for row in first..last {
            // SAFETY: no two parts of the job write the same row.
            let to = unsafe { out.slice_mut(row * n, n) };
            for pair in row * per_row..(row + 1) * per_row {
                let place = routes.places[pair];
                if !range.contains(&place) {
                    continue;
                }
                let weight = weights.map_or(1.0, |all| all[pair]);
                let output = &values[(place - range.start) * n..][..n];
                to.iter_mut()
                    .zip(output)
                    .for_each(|(to, y)| *to += weight * y);
            }
        }
    });
}

#[cfg(test)]
#[path = "experts_tests.rs"]
pub(crate) mod tests;
