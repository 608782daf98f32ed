//! Compares matrix memories with their definitions: float64 loops over positions.

use crate::isa::Isa;
use crate::recurrence::matrix_memory::{MatrixMemory, MemoryRule};
use crate::testing::{noise, with_each};
use crate::work::{Input, Work};

const MLSTM: MemoryRule = MemoryRule::Exponential {
    gate_cap: None,
    eps: 1e-6,
};
const CAPPED: MemoryRule = MemoryRule::Exponential {
    gate_cap: Some(15.0),
    eps: 1e-6,
};

/// The values of all inputs. Queries, keys and values are adjacent, as a projection returns them.
struct Case {
    memory: MatrixMemory,
    c: Vec<f32>,
    n: Vec<f32>,
    m: Vec<f32>,
    qkv: Vec<f32>,
    f: Vec<f32>,
    second: Vec<f32>,
}

/// Outputs and the final state by the definition. For each output also the effect of rounding by
/// one part in a million, which is large where terms cancel.
#[derive(Default)]
struct Defined {
    y: Vec<f64>,
    unsure: Vec<f64>,
    c: Vec<f64>,
    n: Vec<f64>,
    m: Vec<f64>,
}

impl Case {
    /// Random values. `gate` and `second` map values in -1..1 to forget gates and second gates.
    /// Keys have length one, so that the delta rule is stable.
    fn new(memory: MatrixMemory, gate: impl Fn(f32) -> f32, second: impl Fn(f32) -> f32) -> Self {
        let MatrixMemory {
            rows,
            length,
            heads,
            key_heads,
            key_dim,
            value_dim,
            ..
        } = memory;
        let random = |n: usize, seed: u32| -> Vec<f32> {
            noise(n, seed).into_iter().map(|x| 2.0 * x).collect()
        };
        let (keys, values) = (key_heads * key_dim, heads * value_dim);
        let width = 2 * keys + values;
        let mut qkv = random(rows * length * width, 1);
        for position in qkv.chunks_mut(width) {
            for key in position[keys..2 * keys].chunks_mut(key_dim) {
                let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-3);
                key.iter_mut().for_each(|x| *x /= norm);
            }
        }
        let gates = rows * length * heads;
        let state = rows * heads;
        Self {
            memory,
            c: random(state * key_dim * value_dim, 2),
            n: random(state * key_dim, 3),
            m: random(state, 4),
            qkv,
            f: random(gates, 5).into_iter().map(gate).collect(),
            second: random(gates, 6).into_iter().map(second).collect(),
        }
    }

    fn width(&self) -> usize {
        let of = &self.memory;
        2 * of.key_heads * of.key_dim + of.heads * of.value_dim
    }

    /// The kernel's outputs and state, concatenated.
    fn run(&self) -> Vec<f32> {
        let of = &self.memory;
        let (rows, length) = (of.rows, of.length);
        let width = self.width();
        let keys = of.key_heads * of.key_dim;
        let axes = |width: usize| [rows as i32, length as i32, width as i32];
        let strides = |width: usize| [(length * width) as i64, width as i64, 1];
        let (key_shape, value_shape) = (axes(keys), axes(of.heads * of.value_dim));
        let (gate_shape, wide) = (axes(of.heads), strides(width));
        let narrow = strides(of.heads);
        let mut inputs = vec![Input::from_slice(&self.c)];
        if of.rule.is_normalized() {
            inputs.extend([&self.n, &self.m].map(|a| Input::from_slice(a)));
        }
        let mut positions = |data: &[f32], shape: &[i32], strides: &[i64]| {
            // SAFETY: data, shapes and strides outlive the inputs. All indices are within the data.
            inputs.push(unsafe { Input::strided(data.as_ptr(), data.len(), shape, strides) });
        };
        positions(&self.qkv, &key_shape, &wide);
        positions(&self.qkv[keys..], &key_shape, &wide);
        positions(&self.qkv[2 * keys..], &value_shape, &wide);
        positions(&self.f, &gate_shape, &narrow);
        if of.rule.has_second_gate() {
            positions(&self.second, &gate_shape, &narrow);
        }
        let mut output = vec![f32::NAN; of.outputs()];
        // SAFETY: the inputs are as the type documents.
        unsafe { of.run(&inputs, &mut output) };
        output
    }

    fn defined(&self) -> Defined {
        let of = &self.memory;
        let mut defined = Defined {
            y: vec![0.0; of.rows * of.length * of.heads * of.value_dim],
            ..Defined::default()
        };
        defined.unsure = defined.y.clone();
        for row in 0..of.rows {
            for head in 0..of.heads {
                self.head(row, head, &mut defined);
            }
        }
        defined
    }

    fn head(&self, row: usize, head: usize, out: &mut Defined) {
        let of = &self.memory;
        let (dk, dv) = (of.key_dim, of.value_dim);
        let at = row * of.heads + head;
        let wide = |a: &[f32]| -> Vec<f64> { a.iter().map(|&x| f64::from(x)).collect() };
        let mut c = wide(&self.c[at * dk * dv..][..dk * dv]);
        let mut n = wide(&self.n[at * dk..][..dk]);
        let mut m = f64::from(self.m[at]);
        let absolute = |a: &[f64]| -> Vec<f64> { a.iter().map(|x| x.abs()).collect() };
        let (mut c_abs, mut n_abs) = (absolute(&c), absolute(&n));
        let (keys, key_head) = (of.key_heads * dk, head / (of.heads / of.key_heads));
        for t in 0..of.length {
            let position = row * of.length + t;
            let all = &self.qkv[position * self.width()..][..self.width()];
            let q: Vec<f64> = (wide(&all[key_head * dk..][..dk]).iter())
                .map(|q| q * f64::from(of.scale))
                .collect();
            let k = wide(&all[keys + key_head * dk..][..dk]);
            let mut v = wide(&all[2 * keys + head * dv..][..dv]);
            let gate = position * of.heads + head;
            let (f, second) = (f64::from(self.f[gate]), f64::from(self.second[gate]));
            let (mut keep, mut take) = (f.exp(), 1.0);
            let mut least = 1.0;
            if let MemoryRule::Exponential { gate_cap, eps: _ } = of.rule {
                let cap = |x: f64| gate_cap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh());
                let f = cap(f);
                let log = f.min(0.0) - (-f.abs()).exp().ln_1p();
                let next = (log + m).max(cap(second));
                (keep, take) = ((log + m - next).exp(), (cap(second) - next).exp());
                m = next;
                least = (-m.max(-80.0)).exp();
            }
            if of.rule == MemoryRule::Delta {
                for b in 0..dv {
                    let predicted: f64 = (0..dk).map(|a| k[a] * keep * c[a * dv + b]).sum();
                    v[b] = second * (v[b] - predicted);
                }
            }
            for a in 0..dk {
                n[a] = keep * n[a] + take * k[a];
                n_abs[a] = keep * n_abs[a] + take * k[a].abs();
                for b in 0..dv {
                    let new = take * k[a] * v[b];
                    c[a * dv + b] = keep * c[a * dv + b] + new;
                    c_abs[a * dv + b] = keep * c_abs[a * dv + b] + new.abs();
                }
            }
            let dot: f64 = (0..dk).map(|a| q[a] * n[a]).sum();
            let dot_abs: f64 = (0..dk).map(|a| (q[a] * n_abs[a]).abs()).sum();
            let (den, dot_abs) = match of.rule {
                MemoryRule::Exponential { eps, .. } => {
                    (dot.abs().max(least) + f64::from(eps), dot_abs)
                }
                _ => (1.0, 0.0),
            };
            for b in 0..dv {
                let y: f64 = (0..dk).map(|a| q[a] * c[a * dv + b]).sum::<f64>() / den;
                let sum: f64 = (0..dk).map(|a| q[a].abs() * c_abs[a * dv + b]).sum();
                let place = (position * of.heads + head) * dv + b;
                out.y[place] = y;
                out.unsure[place] = (sum + y.abs() * dot_abs) / den + 1.0;
            }
        }
        out.c.extend(c);
        if of.rule.is_normalized() {
            out.n.extend(n);
            out.m.push(m);
        }
    }

    /// Fails unless outputs differ by at most `within` times the effect of rounding, and states are
    /// close.
    fn check(&self, isa: Isa, within: f64) {
        let actual = self.run();
        let Defined { y, unsure, c, n, m } = self.defined();
        let (outputs, state) = actual.split_at(y.len());
        for (at, ((&f, &d), &u)) in outputs.iter().zip(&y).zip(&unsure).enumerate() {
            let far = (f64::from(f) - d).abs();
            assert!(
                far <= within * u,
                "{isa:?} {:?} y[{at}]: {f} for {d}",
                self.memory
            );
        }
        let expected: Vec<f64> = c.into_iter().chain(n).chain(m).collect();
        assert_eq!(state.len(), expected.len());
        for (at, (&f, &e)) in state.iter().zip(&expected).enumerate() {
            let far = (f64::from(f) - e).abs();
            let near = 10.0 * within * (1.0 + e.abs());
            assert!(
                far <= near,
                "{isa:?} {:?} state[{at}]: {f} for {e}",
                self.memory
            );
        }
    }
}

fn memory(rule: MemoryRule, (rows, length): (usize, usize), chunk: usize) -> MatrixMemory {
    let repeats = if rule.is_normalized() { 1 } else { 3 };
    MatrixMemory {
        rule,
        rows,
        length,
        heads: 2 * repeats,
        key_heads: 2,
        key_dim: 5,
        value_dim: 19,
        scale: 0.4,
        chunk,
    }
}

#[test]
fn chunks_of_any_length_and_steps_are_the_definition() {
    with_each(|isa| {
        for rule in [MLSTM, CAPPED, MemoryRule::Decay, MemoryRule::Delta] {
            for length in [1, 2, 16, 37, 130] {
                for chunk in [1, 2, 7, 16, 33, 64, 1000] {
                    let memory = memory(rule, (2, length), chunk);
                    let case = match rule {
                        MemoryRule::Exponential { .. } => {
                            Case::new(memory, |x| 4.0 * x + 1.0, |x| 3.0 * x)
                        }
                        _ => Case::new(memory, |x| -0.3 * x.abs(), |x| 0.5 + 0.5 * x),
                    };
                    case.check(isa, 2e-6);
                }
            }
        }
    });
}

/// The exponentials of these gates are zero or exceed float32.
#[test]
fn extreme_gates_give_numbers_and_those_of_the_definition() {
    let gates = [-200.0f32, 0.0, 200.0];
    with_each(|isa| {
        for rule in [MLSTM, CAPPED] {
            for f in gates {
                for i in gates {
                    for chunk in [1, 16, 64] {
                        let memory = memory(rule, (1, 70), chunk);
                        let steady = Case::new(memory, |_| f, |_| i);
                        steady.check(isa, 1e-5);
                        let pick = |x: f32| gates[((x + 1.0) * 1.499) as usize];
                        Case::new(memory, pick, |x| pick(-x)).check(isa, 1e-5);
                    }
                }
            }
        }
        for rule in [MemoryRule::Decay, MemoryRule::Delta] {
            for f in [-1e30, -200.0, 0.0] {
                for chunk in [1, 16, 64] {
                    let memory = memory(rule, (1, 70), chunk);
                    Case::new(memory, |_| f, |_| 1.0).check(isa, 1e-5);
                    let mixed = |x: f32| if x < 0.0 { f } else { -0.1 * x };
                    Case::new(memory, mixed, f32::abs).check(isa, 1e-5);
                }
            }
        }
    });
}

/// Sizes of real models: rows of whole lanes, and parts that divide the columns of a head.
#[test]
fn sizes_of_models_on_several_threads() {
    with_each(|isa| {
        if isa == Isa::Portable {
            return;
        }
        for rule in [CAPPED, MemoryRule::Decay, MemoryRule::Delta] {
            for length in [1, 65] {
                let mut memory = memory(rule, (1, length), 64);
                (memory.key_dim, memory.value_dim) = (128, 256);
                memory.scale = 128f32.powf(-0.5);
                if !rule.is_normalized() {
                    (memory.heads, memory.key_heads) = (8, 1);
                }
                let case = Case::new(memory, |x| -0.2 * x.abs(), |x| 0.5 + 0.5 * x);
                case.check(isa, 4e-6);
            }
        }
    });
}

/// Equal keys that replace everything. If this fails, powers of the triangular system overflow.
#[test]
fn keys_that_are_alike_lose_no_digits() {
    with_each(|isa| {
        let memory = memory(MemoryRule::Delta, (1, 128), 64);
        let mut case = Case::new(memory, |_| 0.0, |_| 1.0);
        let keys = memory.key_heads * memory.key_dim;
        let width = case.width();
        let first = case.qkv[keys..2 * keys].to_vec();
        for position in case.qkv.chunks_mut(width) {
            position[keys..2 * keys].copy_from_slice(&first);
        }
        case.check(isa, 1e-5);
    });
}

#[test]
fn two_thousand_positions_by_chunks_are_those_by_steps() {
    for rule in [CAPPED, MemoryRule::Decay, MemoryRule::Delta] {
        let runs = [1, 64].map(|chunk| {
            let memory = memory(rule, (1, 2000), chunk);
            let case = match rule {
                MemoryRule::Exponential { .. } => Case::new(memory, |x| 2.0 + 3.0 * x, |x| 2.0 * x),
                _ => Case::new(memory, |x| -0.05 - 0.2 * x.abs(), |x| 0.5 + 0.5 * x),
            };
            let unsure = case.defined().unsure;
            (case.run(), unsure)
        });
        let [(steps, unsure), (chunks, _)] = runs;
        for (at, (step, chunk)) in steps.iter().zip(&chunks).enumerate() {
            let allowed = unsure.get(at).map_or(1.0, |u| u.max(1.0) as f32);
            assert!(
                (step - chunk).abs() <= 1e-5 * allowed,
                "{rule:?} {at}: {step} {chunk}"
            );
        }
    }
}
