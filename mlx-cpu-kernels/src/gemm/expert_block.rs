//! The feed-forward block of a mixture of experts as one operation. It multiplies rows with the
//! gate and up matrices of their experts, and applies the gate function. It then multiplies with
//! the down matrices, and adds the weighted outputs of the experts.

use std::cell::RefCell;

use crate::gemm::experts::{ExpertStack, PAIRS_AT_ONCE, StackProduct, add_pairs, gather, span};
use crate::gemm::product::{Product, Size};
use crate::gemm::routes::Routing;
use crate::isa::Isa;
use crate::memory::resize;
use crate::partition::{SharedOutput, parallel_ranges};
use crate::prefill_inputs::PrefillInputs;
use crate::simd::portable::vmath::{self, Gate};
use crate::simd::vmath::gate_mul;
use crate::work::{Input, Work};

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// How gate and up outputs are combined.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertGate {
    /// `gate(g) * u`.
    Plain(Gate),
    /// `g * sigmoid(alpha * g) * (u + 1)`, where `g` is clamped to at most `limit` and `u` to
    /// `-limit..limit`. gpt-oss uses this gate.
    Clamped {
        /// The factor inside the sigmoid.
        alpha: f32,
        /// The limit to which gate and up outputs are clamped.
        limit: f32,
    },
}

/// `sum_e weight_e * down_e(gate(gate_e(x)) * up_e(x))` over the experts `e` of each row.
///
/// Inputs, in this order:
///
/// - the rows, float32 `[rows, hidden]`;
/// - the expert indices, 32-bit integers `[rows, per_row]`;
/// - the weights of the experts, float32 `[rows, per_row]`;
/// - for each of the three stacks, its arrays unless the operation stores them, and its biases.
pub struct ExpertBlock {
    /// The gate matrices, `hidden -> width`.
    pub gate: ExpertStack,
    /// The up matrices, `hidden -> width`.
    pub up: ExpertStack,
    /// The down matrices, `width -> hidden`.
    pub down: ExpertStack,
    /// How gate and up outputs are combined.
    pub activation: ExpertGate,
    /// The experts of each row.
    pub routing: Routing,
    /// The instruction set.
    pub isa: Isa,
    /// The input type for experts with many rows and quantized matrices.
    pub prefill_inputs: PrefillInputs,
}

/// Scratch memory for a batch of experts, sorted by expert.
#[derive(Default)]
struct Buffers {
    inputs: Vec<f32>,
    /// Outputs of the two matrices, `[pairs, 2 * width]`: gate, then up.
    halves: Vec<f32>,
    /// Combined gate and up outputs, `[pairs, width]`.
    middle: Vec<f32>,
    outputs: Vec<f32>,
}

impl ExpertGate {
    /// `gates = self(gates, ups)`.
    fn apply(self, isa: Isa, gates: &mut [f32], ups: &[f32]) {
        match self {
            Self::Plain(gate) => gate_mul(isa, gate, gates, ups),
            Self::Clamped { alpha, limit } => {
                for (gate, up) in gates.iter_mut().zip(ups) {
                    // `min` and `max` would replace NaN by the limit.
                    let g = if *gate > limit { limit } else { *gate };
                    let u = if *up > limit { limit } else { *up };
                    let u = if u < -limit { -limit } else { u };
                    *gate = g / (1.0 + vmath::exp(-alpha * g)) * (u + 1.0);
                }
            }
        }
    }
}

impl ExpertBlock {
    /// The product with these stacks.
    fn product(&self, stacks: &[&ExpertStack]) -> Product {
        Product {
            parts: stacks.iter().map(|stack| stack.part()).collect(),
            rows: 0,
            k: stacks.first().map_or(0, |stack| stack.size.k),
            n: stacks.iter().map(|stack| stack.size.n).sum(),
            eps: None,
            gate: None,
            activation: None,
            residual: false,
            float_inputs: false,
            prefill_inputs: self.prefill_inputs,
            isa: self.isa,
        }
    }
}

impl Work for ExpertBlock {
    fn outputs(&self) -> usize {
        self.routing.rows * self.down.size.n
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let [x, ids, weights, rest @ ..] = inputs else {
            return;
        };
        let Size {
            n: width,
            k: hidden,
        } = self.gate.size;
        let mut rest = rest.iter();
        let (mut packings, mut down_packings) = (Vec::new(), Vec::new());
        // SAFETY: the caller passes arrays of the documented types, in the documented order.
        let (x, routes, weights, gate, up, down) = unsafe {
            (
                x.as_slice::<f32>(),
                self.routing.routes(ids, self.gate.experts),
                weights.as_slice::<f32>(),
                self.gate.data(&mut rest, &mut packings),
                self.up.data(&mut rest, &mut packings),
                self.down.data(&mut rest, &mut down_packings),
            )
        };
        let mut first = StackProduct {
            product: self.product(&[&self.gate, &self.up]),
            stacks: vec![gate, up],
            packings,
        };
        let mut second = StackProduct {
            product: self.product(&[&self.down]),
            stacks: vec![down],
            packings: down_packings,
        };
        output.fill(0.0);
        let out = SharedOutput::new(output);
        BUFFERS.with_borrow_mut(|buffers| {
            for groups in routes.batches(PAIRS_AT_ONCE) {
                let range = span(groups);
                let pairs = range.len();
                let row = |place: usize| routes.pairs[place] / self.routing.per_row;
                gather(x, hidden, range.clone(), &row, &mut buffers.inputs);
                resize(&mut buffers.halves, pairs * 2 * width, 0.0);
                first.run(groups, &buffers.inputs, &mut buffers.halves);
                resize(&mut buffers.middle, pairs * width, 0.0);
                let middle = SharedOutput::new(&mut buffers.middle);
                let halves = &buffers.halves;
                parallel_ranges(pairs, pairs * width * 8, &|from, to| {
                    for (i, both) in halves
                        .chunks_exact(2 * width)
                        .enumerate()
                        .take(to)
                        .skip(from)
                    {
                        let (gates, ups) = both.split_at(width);
                        // SAFETY: each row belongs to only one part of the job.
                        let to = unsafe { middle.slice_mut(i * width, width) };
                        to.copy_from_slice(gates);
                        self.activation.apply(self.isa, to, ups);
                    }
                });
                resize(&mut buffers.outputs, pairs * self.down.size.n, 0.0);
                second.run(groups, &buffers.middle, &mut buffers.outputs);
                let outputs = &buffers.outputs;
                add_pairs(&self.routing, &routes, range, outputs, Some(weights), &out);
            }
        });
    }
}
