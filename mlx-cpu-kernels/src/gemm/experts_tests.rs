//! Compares multiplication with selected matrices with its definition in double precision, on every
//! instruction set of this machine.

use half::{bf16, f16};

use super::*;
use crate::gemm::dense::DenseType;
use crate::gemm::expert_block::{ExpertBlock, ExpertGate};
use crate::layout::packed::PackedMatrix;
use crate::layout::packed::{
    GROUPS_PER_AFFINE_SUPER, GROUPS_PER_SUPER, MAX_SCALED_CODE, ScaleFormat, TABLE_SUPER_WEIGHTS,
};
use crate::layout::table::Table;
use crate::simd::portable::vmath::Gate;
use crate::testing::{exact_gate, noise, with_each};

const EXPERTS: usize = 5;

/// A stack with the memory of its arrays, and its dequantized values in order.
pub(crate) struct Stack {
    kind: MatrixFormat,
    size: Size,
    words: Vec<u32>,
    scales: Vec<u32>,
    biases: Vec<u32>,
    lens: [usize; 3],
    bias: Vec<f32>,
    /// The dequantized values, `[experts, n, k]`.
    numbers: Vec<f32>,
}

/// The bytes of these values, as 32-bit words.
fn words_of<T: bytemuck::NoUninit>(values: &[T]) -> Vec<u32> {
    let mut bytes = bytemuck::cast_slice::<T, u8>(values).to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|word| u32::from_ne_bytes(*word)).collect()
}

impl Stack {
    pub(crate) fn new(kind: MatrixFormat, size: Size, seed: u32) -> Self {
        let rows = size.n.next_multiple_of(INTERLEAVED_ROWS) * EXPERTS;
        let mut made = Self {
            kind,
            size,
            words: Vec::new(),
            scales: Vec::new(),
            biases: Vec::new(),
            lens: [0; 3],
            bias: noise(EXPERTS * size.n, seed + 7),
            numbers: vec![0.0; EXPERTS * size.n * size.k],
        };
        match kind {
            MatrixFormat::Dense(number) => {
                let all = noise(EXPERTS * size.n * size.k, seed);
                made.lens[0] = all.len();
                made.words = match number {
                    DenseType::F32 => words_of(&all),
                    DenseType::F16 => {
                        words_of(&all.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>())
                    }
                    DenseType::Bf16 => {
                        words_of(&all.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>())
                    }
                };
                let rounded = |v: &f32| match number {
                    DenseType::F32 => *v,
                    DenseType::F16 => f16::from_f32(*v).to_f32(),
                    DenseType::Bf16 => bf16::from_f32(*v).to_f32(),
                };
                made.numbers = all.iter().map(rounded).collect();
            }
            MatrixFormat::Quantized {
                bits,
                group,
                scales,
            } => {
                let groups = size.k / group;
                made.words = noise(rows * size.k / 32 * bits as usize, seed)
                    .iter()
                    .map(|v| v.to_bits().wrapping_mul(2_654_435_761))
                    .collect();
                let small = |n: usize, seed| -> Vec<f32> {
                    noise(n, seed).iter().map(|v| v / 32.0).collect()
                };
                let (one, other) = (
                    small(rows * groups, seed + 1),
                    noise(rows * groups, seed + 2),
                );
                (made.scales, made.biases) = match scales {
                    ScaleFormat::F32 => (words_of(&one), words_of(&other)),
                    ScaleFormat::F16 => {
                        let half =
                            |v: &[f32]| v.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>();
                        (words_of(&half(&one)), words_of(&half(&other)))
                    }
                    ScaleFormat::E8m0 | ScaleFormat::E4m3 => {
                        let middle = match (scales, bits) {
                            (ScaleFormat::E8m0, 4) => 122.0,
                            (ScaleFormat::E8m0, _) => 116.0,
                            _ => 16.0,
                        };
                        let byte = |v: &f32| (middle + 4.0 * 32.0 * v) as u8;
                        (words_of(&one.iter().map(byte).collect::<Vec<_>>()), vec![0])
                    }
                    ScaleFormat::Table(_) | ScaleFormat::Symmetric => {
                        let halves: Vec<_> = one.iter().map(|v| f16::from_f32(v / 64.0)).collect();
                        (words_of(&halves), vec![0])
                    }
                    ScaleFormat::TableSuper(table) => {
                        let integers = table.integers().iter().map(|v| v.unsigned_abs());
                        let most = (MAX_SCALED_CODE as f32 / f32::from(integers.max().unwrap()))
                            .floor()
                            .min(127.0);
                        let bytes: Vec<i8> = one
                            .iter()
                            .map(|v| (v * 1024.0).clamp(-most, most) as i8)
                            .collect();
                        let supers: Vec<f16> = other[..rows * size.k / TABLE_SUPER_WEIGHTS]
                            .iter()
                            .map(|v| f16::from_f32(v / 65536.0))
                            .collect();
                        (words_of(&bytes), words_of(&supers))
                    }
                    ScaleFormat::SuperAffine => {
                        // Two bytes per group, from 0 to 63.
                        let bytes = noise(2 * rows * groups, 21);
                        let bytes: Vec<i8> =
                            bytes.iter().map(|v| (v * 63.9 + 32.0) as i8).collect();
                        let supers = noise(2 * rows * groups / GROUPS_PER_AFFINE_SUPER, 22);
                        let supers: Vec<f16> =
                            supers.iter().map(|v| f16::from_f32(v / 512.0)).collect();
                        (words_of(&bytes), words_of(&supers))
                    }
                    ScaleFormat::Super => {
                        let bytes: Vec<i8> = one.iter().map(|v| (v * 4096.0) as i8).collect();
                        let supers: Vec<f16> = other[..rows * groups / GROUPS_PER_SUPER]
                            .iter()
                            .map(|v| f16::from_f32(v / 4096.0))
                            .collect();
                        (words_of(&bytes), words_of(&supers))
                    }
                };
                made.lens = [made.words.len(), rows * groups, rows * groups];
                match scales {
                    ScaleFormat::Super => made.lens[2] /= GROUPS_PER_SUPER,
                    ScaleFormat::SuperAffine => {
                        made.lens[1] *= 2;
                        made.lens[2] = made.lens[1] / GROUPS_PER_AFFINE_SUPER;
                    }
                    ScaleFormat::TableSuper(_) => {
                        made.lens[2] = rows * size.k / TABLE_SUPER_WEIGHTS;
                    }
                    ScaleFormat::E8m0
                    | ScaleFormat::E4m3
                    | ScaleFormat::Table(_)
                    | ScaleFormat::Symmetric => {
                        made.lens[2] = 0;
                    }
                    _ => {}
                }
                let mut numbers = Vec::new();
                let inputs = made.inputs(false);
                // SAFETY: the arrays above have this format.
                let matrix = unsafe { PackedMatrix::from_inputs(&inputs, (bits, groups, scales)) };
                let mut row = vec![0.0; size.k];
                for i in 0..rows {
                    matrix.dequantize_row(i, &mut row);
                    if i % (rows / EXPERTS) < size.n {
                        numbers.extend_from_slice(&row);
                    }
                }
                made.numbers = numbers;
            }
        }
        made
    }

    fn inputs(&self, bias: bool) -> Vec<Input> {
        let mut inputs = self.arrays(EXPERTS);
        if bias {
            inputs.push(Input::from_slice(&self.bias));
        }
        inputs
    }

    /// The arrays of the first experts.
    pub(crate) fn arrays(&self, experts: usize) -> Vec<Input> {
        let arrays = match self.kind {
            MatrixFormat::Dense(_) => vec![(&self.words, self.lens[0])],
            MatrixFormat::Quantized { .. } => vec![
                (&self.words, self.lens[0]),
                (&self.scales, self.lens[1]),
                (&self.biases, self.lens[2]),
            ],
        };
        let first = |(array, len): (&Vec<u32>, usize)| {
            let len = len / EXPERTS * experts;
            // SAFETY: the vectors live as long as the stack.
            unsafe { Input::from_raw(array.as_ptr().cast(), len) }
        };
        arrays.into_iter().map(first).collect()
    }

    fn stack(&self, bias: bool) -> ExpertStack {
        ExpertStack {
            kind: self.kind,
            experts: EXPERTS,
            size: self.size,
            bias,
            stored: None,
        }
    }

    /// A row of the first expert's matrix.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn row(&self, i: usize) -> &[f32] {
        &self.numbers[i * self.size.k..][..self.size.k]
    }

    /// An expert's product with a row, in double precision.
    pub(crate) fn exact(&self, expert: usize, x: &[f64], bias: bool) -> Vec<f64> {
        let Size { n, k } = self.size;
        (0..n)
            .map(|i| {
                let row = &self.numbers[(expert * n + i) * k..][..k];
                let sum: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
                sum + if bias {
                    f64::from(self.bias[expert * n + i])
                } else {
                    0.0
                }
            })
            .collect()
    }
}

fn formats() -> Vec<MatrixFormat> {
    let mut all: Vec<_> = [DenseType::F32, DenseType::F16, DenseType::Bf16]
        .into_iter()
        .map(MatrixFormat::Dense)
        .collect();
    for (i, bits) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        all.push(MatrixFormat::Quantized {
            bits,
            group: [32, 64, 128][i % 3],
            scales: [ScaleFormat::F32, ScaleFormat::F16][i % 2],
        });
    }
    for (bits, group, scales) in [
        (6, 16, ScaleFormat::Super),
        (8, 32, ScaleFormat::Symmetric),
        (2, 16, ScaleFormat::SuperAffine),
        (4, 32, ScaleFormat::SuperAffine),
        (5, 32, ScaleFormat::SuperAffine),
        (4, 32, ScaleFormat::E8m0),
        (4, 16, ScaleFormat::E4m3),
        (8, 32, ScaleFormat::E8m0),
        (4, 32, ScaleFormat::Table(Table::Iq4)),
        (4, 32, ScaleFormat::TableSuper(Table::Iq3Xxs)),
        (4, 16, ScaleFormat::TableSuper(Table::Iq2)),
    ] {
        all.push(MatrixFormat::Quantized {
            bits,
            group,
            scales,
        });
    }
    all
}

/// Expert indices: some experts have no rows, one has most.
fn ids(pairs: usize) -> Vec<u32> {
    (0..pairs)
        .map(|i| [2, 0, 2, 4, 2, 2, 1][(i * i + i / 3) % 7])
        .collect()
}

fn ids_input(ids: &[u32]) -> Input {
    // SAFETY: the elements exist while the test uses the input.
    unsafe { Input::from_raw(ids.as_ptr().cast(), ids.len()) }
}

pub(crate) fn double(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

pub(crate) fn near(got: &[f32], wanted: &[f64], what: &str) {
    assert_eq!(got.len(), wanted.len());
    let largest = wanted.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let off = (f64::from(*got) - wanted).abs();
        assert!(off <= 2e-4 * largest, "{what}: {i}: {got} {wanted}");
    }
}

/// The number of rows, and the number of experts per row.
const SHAPES: &[(usize, usize)] = &[(1, 1), (1, 4), (3, 2), (21, 2), (90, 3), (600, 1)];

#[test]
fn products_by_index_equal_the_definition() {
    for kind in formats() {
        // The second size ends within a row block.
        for (n, k) in [(40, 256), (12, 512)] {
            let made = Stack::new(kind, Size { n, k }, n as u32);
            for (i, &(rows, per_row)) in SHAPES.iter().enumerate() {
                let (x, ids, bias) = (noise(rows * k, 5), ids(rows * per_row), i % 2 == 0);
                let wanted: Vec<f64> = (ids.iter().enumerate())
                    .flat_map(|(pair, id)| {
                        let row = pair / per_row;
                        made.exact(*id as usize, &double(&x[row * k..(row + 1) * k]), bias)
                    })
                    .collect();
                let c = noise(rows * per_row * n, 9);
                let mut back = vec![0.0f64; rows * k];
                for (pair, id) in ids.iter().enumerate() {
                    let to = &mut back[pair / per_row * k..][..k];
                    for (o, c) in c[pair * n..(pair + 1) * n].iter().enumerate() {
                        let w = &made.numbers[(*id as usize * n + o) * k..][..k];
                        for (to, w) in to.iter_mut().zip(w) {
                            *to += f64::from(*c) * f64::from(*w);
                        }
                    }
                }
                with_each(|isa| {
                    let what = format!("{kind:?} {n} {k} {rows} {per_row} {isa:?}");
                    let routing = Routing {
                        rows,
                        per_row,
                        signed: i % 2 == 0,
                    };
                    for float_inputs in [false, true] {
                        let work = ExpertProduct {
                            stack: made.stack(bias),
                            routing,
                            float_inputs,
                            prefill_inputs: PrefillInputs::Float32,
                            isa,
                        };
                        let first = [Input::from_slice(&x), ids_input(&ids)];
                        let inputs = [&first[..], &made.inputs(bias)].concat();
                        let mut out = vec![f32::NAN; work.outputs()];
                        // SAFETY: the inputs are as the operation documents.
                        unsafe { work.run(&inputs, &mut out) };
                        near(&out, &wanted, &what);
                    }
                    let work = ExpertVjp {
                        stack: made.stack(false),
                        routing,
                        isa,
                    };
                    let first = [Input::from_slice(&c), ids_input(&ids)];
                    let inputs = [&first[..], &made.inputs(false)].concat();
                    let mut out = vec![f32::NAN; work.outputs()];
                    // SAFETY: the inputs are as the operation documents.
                    unsafe { work.run(&inputs, &mut out) };
                    near(&out, &back, &what);
                });
            }
        }
    }
}

fn gate(activation: ExpertGate, g: f64, u: f64) -> f64 {
    match activation {
        ExpertGate::Plain(gate) => exact_gate(gate, g) * u,
        ExpertGate::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            g / (1.0 + (-alpha * g).exp()) * (u + 1.0)
        }
    }
}

#[test]
fn blocks_equal_the_definition() {
    let activations = [
        ExpertGate::Plain(Gate::Silu),
        ExpertGate::Plain(Gate::GeluTanh),
        ExpertGate::Plain(Gate::Relu),
        ExpertGate::Clamped {
            alpha: 1.702,
            limit: 0.5,
        },
    ];
    let formats = formats();
    for (f, kind) in formats.iter().enumerate() {
        let (hidden, width, bias) = (256, 512, f % 2 == 0);
        // The three stacks have different formats.
        let other = formats[(f + 3) % formats.len()];
        let (wide, narrow) = (
            Size {
                n: width,
                k: hidden,
            },
            Size {
                n: hidden,
                k: width,
            },
        );
        let up = Stack::new(*kind, wide, 2);
        let (gates, down) = (Stack::new(other, wide, 1), Stack::new(*kind, narrow, 3));
        for (i, &(rows, per_row)) in SHAPES.iter().enumerate().take(5) {
            let activation = activations[(i + f) % activations.len()];
            let x: Vec<f32> = noise(rows * hidden, 5).iter().map(|v| v / 8.0).collect();
            let (ids, weights) = (ids(rows * per_row), noise(rows * per_row, 6));
            let mut wanted = vec![0.0; rows * hidden];
            for (pair, id) in ids.iter().enumerate() {
                let (row, id) = (pair / per_row, *id as usize);
                let x = double(&x[row * hidden..(row + 1) * hidden]);
                let both = (gates.exact(id, &x, bias).into_iter()).zip(up.exact(id, &x, bias));
                let middle: Vec<f64> = both.map(|(g, u)| gate(activation, g, u)).collect();
                let to = &mut wanted[row * hidden..(row + 1) * hidden];
                for (to, y) in to.iter_mut().zip(down.exact(id, &middle, bias)) {
                    *to += f64::from(weights[pair]) * y;
                }
            }
            with_each(|isa| {
                let work = ExpertBlock {
                    gate: gates.stack(bias),
                    up: up.stack(bias),
                    down: down.stack(bias),
                    activation,
                    routing: Routing {
                        rows,
                        per_row,
                        signed: false,
                    },
                    prefill_inputs: PrefillInputs::Float32,
                    isa,
                };
                let first = [
                    Input::from_slice(&x),
                    ids_input(&ids),
                    Input::from_slice(&weights),
                ];
                let stacks = [&gates, &up, &down]
                    .map(|stack| stack.inputs(bias))
                    .concat();
                let inputs = [&first[..], &stacks].concat();
                let mut out = vec![f32::NAN; work.outputs()];
                // SAFETY: the inputs are as the operation documents.
                unsafe { work.run(&inputs, &mut out) };
                near(&out, &wanted, &format!("{kind:?} {other:?} {rows} {isa:?}"));
            });
        }
    }
}
