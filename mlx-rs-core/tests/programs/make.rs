//! Makes random programs: arrays in many layouts, and operations on them.

mod other;
mod products;
mod views;

use mlx_rs_core::{Array, Dtype, Result};

use crate::apply::{Step, apply};
use crate::operations::{AXIS, BINARY, OTHER, RANDOM, REDUCE, UNARY, VIEWS};
use crate::value::{Random, Value};

/// A list of steps. Each makes one or more values, which later steps refer to by index.
#[derive(Clone, Default)]
pub struct Program {
    pub steps: Vec<Step>,
    /// The index of the first value of each step.
    pub first: Vec<usize>,
}

const NORMAL: i32 = 0;
const POSITIVE: i32 = 1;
/// Values in `-limit..limit`.
const INDEX: i32 = 2;
const SPECIAL: i32 = 3;
/// Values in `0..limit`.
const COUNT: i32 = 4;

/// The values of an `input` step.
pub fn input(step: &Step) -> Result<Value> {
    let (shape, kind, limit) = (&step.p[0], step.p[1][0], step.p[1][1]);
    let mut random = Random(step.p[1][2] as u64);
    let size: i32 = shape.iter().product();
    let unsigned = matches!(
        step.dtype,
        Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 | Dtype::Uint64
    );
    let numbers: Vec<f64> = (0..size)
        .map(|_| match kind {
            _ if step.dtype == Dtype::Bool => f64::from(random.between(0, 1)),
            INDEX if !unsigned => f64::from(random.between(-limit, limit - 1)),
            INDEX | COUNT => f64::from(random.between(0, limit - 1)),
            SPECIAL if random.once_in(4) && step.dtype.is_float() => random.pick(&[
                f64::NAN,
                f64::INFINITY,
                f64::NEG_INFINITY,
                -0.0,
                6.0e4,
                1e-8,
            ]),
            POSITIVE => f64::from(random.between(32, 128)) / 64.0,
            _ if step.dtype.is_integer() => {
                f64::from(random.between(if unsigned { 0 } else { -9 }, 9))
            }
            _ => f64::from(random.between(-128, 128)) / 64.0,
        })
        .collect();
    Value::from_numbers(&numbers, shape, step.dtype)
}

pub struct Maker {
    pub random: Random,
    pub program: Program,
    /// The values are not evaluated: only their shapes and types are read.
    values: Vec<Array>,
}

type Made = Option<()>;

impl Maker {
    pub fn program(seed: u64, steps: usize) -> Program {
        let mut maker = Self {
            random: Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x5eed),
            program: Program::default(),
            values: Vec::new(),
        };
        let dtype = maker.dtype();
        let shape = maker.shape(3);
        maker.fresh(&shape, dtype, NORMAL, 0);
        let mut tries = 0;
        while maker.program.steps.len() < steps && tries < 10 * steps {
            tries += 1;
            maker.step();
        }
        maker.program
    }

    fn dtype(&mut self) -> Dtype {
        use Dtype::*;
        self.random.pick(&[
            Float32, Float32, Float32, Float32, Float16, Bfloat16, Float64, Int32, Int32, Int64,
            Int8, Uint8, Uint32, Bool, Complex64, Uint16, Int16, Uint64,
        ])
    }

    fn float(&mut self) -> Dtype {
        self.random.pick(&[
            Dtype::Float32,
            Dtype::Float32,
            Dtype::Float32,
            Dtype::Float16,
            Dtype::Bfloat16,
            Dtype::Float64,
        ])
    }

    fn length(&mut self) -> i32 {
        self.random
            .pick(&[0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 16, 17, 33])
    }

    /// A small shape with at most `axes` axes.
    fn shape(&mut self, axes: usize) -> Vec<i32> {
        let n = self.random.below(axes + 2).min(axes);
        let mut shape: Vec<i32> = (0..n).map(|_| self.length()).collect();
        while shape.iter().map(|&d| i64::from(d.max(1))).product::<i64>() > 1500 {
            let at = self.random.below(n);
            shape[at] = (shape[at] / 2).max(1);
        }
        shape
    }

    /// Adds a step if it is valid, and returns the index of its first value.
    fn push(
        &mut self,
        name: &'static str,
        args: &[usize],
        p: &[&[i32]],
        dtype: Dtype,
    ) -> Option<usize> {
        let step = Step {
            name,
            args: args.to_vec(),
            p: p.iter().map(|l| l.to_vec()).collect(),
            dtype,
        };
        let made = if name == "input" {
            let size: i32 = step.p[0].iter().product();
            // An input needs only its shape here.
            vec![
                mlx_rs_core::zeros(&step.p[0], dtype)
                    .ok()
                    .filter(|_| size >= 0)?,
            ]
        } else {
            let args: Vec<Array> = args.iter().map(|&a| self.values[a].clone()).collect();
            apply(&step, &args).ok()?
        };
        if name != "input" && made.iter().any(|a| a.size() > 6000 || a.ndim() > 7) {
            return None;
        }
        self.program.first.push(self.values.len());
        self.program.steps.push(step);
        let at = self.values.len();
        self.values.extend(made);
        Some(at)
    }

    fn plain(&mut self, shape: &[i32], dtype: Dtype, kind: i32, limit: i32) -> usize {
        let seed = self.random.between(0, i32::MAX - 1);
        self.push("input", &[], &[shape, &[kind, limit, seed]], dtype)
            .expect("inputs can always be made")
    }

    /// Adds an input with new values of this shape, in one of many memory layouts.
    fn fresh(&mut self, shape: &[i32], dtype: Dtype, kind: i32, limit: i32) -> usize {
        let n = shape.len();
        let strides = vec![1; n];
        let made = match self.random.below(if n == 0 { 1 } else { 9 }) {
            // Column-major, or with axes in any order.
            1 | 2 => {
                let order = if self.random.once_in(2) {
                    (0..n as i32).rev().collect()
                } else {
                    self.random.shuffled(n)
                };
                let mut moved = vec![0; n];
                for (to, &from) in order.iter().enumerate() {
                    moved[from as usize] = shape[to];
                }
                let base = self.plain(&moved, dtype, kind, limit);
                self.push("transpose_axes", &[base], &[&order], dtype)
            }
            // Reversed along one axis or all.
            3 | 4 => {
                let all = self.random.once_in(2);
                let at = self.random.below(n);
                let base = self.plain(shape, dtype, kind, limit);
                let back = |i: usize| all || i == at;
                let start: Vec<i32> = (0..n).map(|i| if back(i) { i32::MAX } else { 0 }).collect();
                let stop: Vec<i32> = (0..n)
                    .map(|i| if back(i) { i32::MIN } else { shape[i] })
                    .collect();
                let step: Vec<i32> = (0..n).map(|i| if back(i) { -1 } else { 1 }).collect();
                self.push("slice", &[base], &[&start, &stop, &step], dtype)
            }
            // With gaps between elements.
            5 => {
                let at = self.random.below(n);
                let (step, skip) = (self.random.between(2, 3), self.random.between(0, 1));
                let mut large = shape.to_vec();
                large[at] = large[at] * step + skip;
                let mut start = vec![0; n];
                start[at] = skip;
                let mut steps = strides;
                steps[at] = step;
                let base = self.plain(&large, dtype, kind, limit);
                self.push("slice", &[base], &[&start, &large, &steps], dtype)
            }
            // A part of a larger array.
            6 => {
                let (mut large, mut start, mut stop) = (shape.to_vec(), vec![0; n], shape.to_vec());
                for i in 0..n {
                    let (before, behind) = (self.random.between(0, 2), self.random.between(0, 1));
                    large[i] += before + behind;
                    start[i] += before;
                    stop[i] += before;
                }
                let base = self.plain(&large, dtype, kind, limit);
                self.push("slice", &[base], &[&start, &stop, &strides], dtype)
            }
            // Broadcast along an axis.
            7 => {
                let keep = self.random.bits();
                let small: Vec<i32> = (0..n)
                    .map(|i| {
                        if keep >> i & 1 == 1 {
                            shape[i]
                        } else {
                            shape[i].min(1)
                        }
                    })
                    .collect();
                let base = self.plain(&small, dtype, kind, limit);
                self.push("broadcast_to", &[base], &[shape], dtype)
            }
            _ => None,
        };
        made.unwrap_or_else(|| self.plain(shape, dtype, kind, limit))
    }

    fn any(&mut self) -> usize {
        // Recent values are more probable than old ones.
        let n = self.values.len();
        let a = self.random.below(n);
        a.max(self.random.below(n))
    }

    /// The index of an existing value that fits, or of a new one.
    fn like(&mut self, fits: impl Fn(&Array) -> bool, shape: &[i32], dtype: Dtype) -> usize {
        for _ in 0..4 {
            let at = self.any();
            if fits(&self.values[at]) && !self.random.once_in(4) {
                return at;
            }
        }
        let kind = if self.random.once_in(12) {
            SPECIAL
        } else {
            NORMAL
        };
        self.fresh(shape, dtype, kind, 0)
    }

    fn step(&mut self) -> Made {
        match self.random.below(20) {
            0..=5 => {
                let name = self.random.pick(&VIEWS);
                self.view(name)
            }
            6..=7 => {
                let (name, x) = (self.random.pick(&UNARY), self.any());
                let dtype = self.values[x].dtype();
                self.push(name, &[x], &[], dtype).map(drop)
            }
            8..=9 => self.binary(),
            10..=11 => self.reduce(),
            12..=13 => self.along(),
            14 if self.random.once_in(4) => {
                let (name, x) = (self.random.pick(&RANDOM), self.any());
                let n = self.values[x].ndim().max(1) as i32;
                let (axis, seed) = (self.random.between(0, n - 1), self.random.between(0, 1000));
                let p = if matches!(name, "bernoulli" | "uniform") {
                    [seed, 0]
                } else {
                    [axis, seed]
                };
                let dtype = self.values[x].dtype();
                self.push(name, &[x], &[&p], dtype).map(drop)
            }
            _ => {
                let name = self.random.pick(&OTHER);
                self.other(name)
            }
        }
    }

    /// The index of a value whose shape broadcasts with `shape`.
    fn partner(&mut self, shape: &[i32], dtype: Dtype) -> usize {
        let mut other = shape.to_vec();
        if self.random.once_in(3) {
            for d in &mut other {
                if self.random.once_in(2) {
                    *d = (*d).min(1);
                }
            }
        }
        if self.random.once_in(5) && !other.is_empty() {
            other.remove(0);
        }
        let dtype = if self.random.once_in(6) {
            self.dtype()
        } else {
            dtype
        };
        let copy = other.clone();
        self.like(|a| a.shape() == copy && a.dtype() == dtype, &other, dtype)
    }

    fn binary(&mut self) -> Made {
        let (name, x) = (self.random.pick(&BINARY), self.any());
        let (shape, dtype) = (self.values[x].shape().to_vec(), self.values[x].dtype());
        let y = self.partner(&shape, dtype);
        let (a, b) = if self.random.once_in(2) {
            (x, y)
        } else {
            (y, x)
        };
        self.push(name, &[a, b], &[], dtype).map(drop)
    }

    /// Some axes of an array with `n` axes, in order.
    fn axes(&mut self, n: usize) -> Vec<i32> {
        let bits = self.random.bits();
        (0..n)
            .filter(|&i| bits >> i & 1 == 1)
            .map(|i| i as i32)
            .collect()
    }

    fn reduce(&mut self) -> Made {
        let (name, x) = (self.random.pick(&REDUCE), self.any());
        let n = self.values[x].ndim();
        let (axes, keep) = (self.axes(n), self.random.between(0, 1));
        if name == "argmax" {
            let axis = self.random.below(n.max(1)) as i32;
            return self
                .push(name, &[x], &[&[axis, keep]], Dtype::Uint32)
                .map(drop);
        }
        let dtype = self.values[x].dtype();
        self.push(name, &[x], &[&axes, &[keep]], dtype).map(drop)
    }

    fn along(&mut self) -> Made {
        let (name, x) = (self.random.pick(&AXIS), self.any());
        let shape = self.values[x].shape().to_vec();
        let axis = self.random.below(shape.len().max(1));
        let d = shape.get(axis).copied().unwrap_or(1);
        let r = &mut self.random;
        let second = match name {
            "partition" | "argpartition" => r.between(0, d - 1),
            "topk" => r.between(1, d),
            "roll" => r.between(-3, 40),
            "repeat" => r.between(0, 3),
            _ => r.between(0, 1),
        };
        let third = r.between(0, 1);
        let dtype = self.values[x].dtype();
        self.push(name, &[x], &[&[axis as i32, second, third]], dtype)
            .map(drop)
    }

    fn index_type(&mut self) -> Dtype {
        use Dtype::*;
        self.random
            .pick(&[Int32, Int32, Uint32, Int64, Uint8, Int8, Uint64, Int16])
    }
}
