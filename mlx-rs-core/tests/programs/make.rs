//! Random programs: arrays in all kinds of layouts, and operations on them.

use mlx_rs_core::{Array, Dtype, Result};

use crate::apply::{AXIS, BINARY, OTHER, RANDOM, REDUCE, Step, UNARY, VIEWS, apply};
use crate::value::{Random, Value};

/// Steps, each of which makes one or more values that later ones take by number.
#[derive(Clone, Default)]
pub struct Program {
    pub steps: Vec<Step>,
    /// The number of the first value of each step.
    pub first: Vec<usize>,
}

const NORMAL: i32 = 0;
const POSITIVE: i32 = 1;
/// Between minus a number and that number, without it.
const INDEX: i32 = 2;
const SPECIAL: i32 = 3;
/// Between zero and a number, without it.
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
    /// Not evaluated: only their shapes and types are looked at.
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

    /// A shape of up to `axes` axes that is not large.
    fn shape(&mut self, axes: usize) -> Vec<i32> {
        let n = self.random.below(axes + 2).min(axes);
        let mut shape: Vec<i32> = (0..n).map(|_| self.length()).collect();
        while shape.iter().map(|&d| i64::from(d.max(1))).product::<i64>() > 1500 {
            let at = self.random.below(n);
            shape[at] = (shape[at] / 2).max(1);
        }
        shape
    }

    /// Adds a step, if it can be done, and gives the number of its first value.
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
            // Only its shape counts here.
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

    /// New numbers of this shape, which lie in memory in one of many ways.
    fn fresh(&mut self, shape: &[i32], dtype: Dtype, kind: i32, limit: i32) -> usize {
        let n = shape.len();
        let strides = vec![1; n];
        let made = match self.random.below(if n == 0 { 1 } else { 9 }) {
            // Column-major, or any order of axes.
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
            // With gaps.
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
            // Broadcast.
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
        // Rather one of the last.
        let n = self.values.len();
        let a = self.random.below(n);
        a.max(self.random.below(n))
    }

    /// A value that is there and fits, or a new one.
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

    fn view(&mut self, name: &'static str) -> Made {
        let x = self.any();
        let (shape, dtype) = (self.values[x].shape().to_vec(), self.values[x].dtype());
        let n = shape.len();
        let r = &mut self.random;
        let axis = r.below(n.max(1)) as i32;
        let other = r.below(n.max(1)) as i32;
        let p: Vec<Vec<i32>> = match name {
            "transpose_axes" => vec![r.shuffled(n)],
            "slice" => {
                let (mut start, mut stop, mut step) = (vec![], vec![], vec![]);
                for &d in &shape {
                    let s = r.pick(&[1, 1, 1, 2, 3, -1, -1, -2, 5, -7]);
                    let (a, b) = (r.between(-1, d), r.between(-1, d));
                    let whole = r.once_in(2);
                    let (low, high) = (a.min(b).max(0), if r.once_in(2) { d } else { a.max(b) });
                    start.push(if s > 0 {
                        if whole { 0 } else { low }
                    } else if whole {
                        i32::MAX
                    } else {
                        high - 1
                    });
                    stop.push(if s > 0 {
                        if whole { d } else { high }
                    } else if whole || low == 0 {
                        i32::MIN
                    } else {
                        low - 1
                    });
                    step.push(s);
                }
                vec![start, stop, step]
            }
            "slice_axis" => {
                let d = *shape.get(axis as usize)?;
                let (a, b) = (r.between(0, d), r.between(0, d));
                vec![vec![axis, a.min(b), a.max(b)]]
            }
            "broadcast_to" => {
                let mut to: Vec<i32> = shape
                    .iter()
                    .map(|&d| if d == 1 { r.pick(&[1, 1, 2, 3, 5]) } else { d })
                    .collect();
                if r.once_in(3) {
                    to.insert(0, r.pick(&[1, 2, 3]));
                }
                vec![to]
            }
            "expand_dims" => vec![vec![r.between(0, n as i32)]],
            "squeeze_axis" => vec![vec![shape.iter().position(|&d| d == 1)? as i32]],
            "reshape" => vec![self.regroup(&shape)],
            "flatten" => vec![vec![axis.min(other), axis.max(other)]],
            "split" => {
                let d = *shape.get(axis as usize)?;
                let parts: Vec<i32> = (1..=d.min(6)).filter(|k| d % k == 0).collect();
                vec![vec![axis, *parts.get(r.below(parts.len()))?]]
            }
            "split_at" => {
                let d = *shape.get(axis as usize)?;
                let mut at = vec![r.between(0, d), r.between(0, d)];
                at.sort_unstable();
                vec![vec![axis], at]
            }
            "as_strided" => {
                let size: i32 = shape.iter().product();
                let (a, b) = (r.between(1, 4), r.between(1, 3));
                let (s, t) = (r.between(-1, 3), r.between(0, 2));
                let offset = if s < 0 { -s * (a - 1) } else { 0 };
                if size == 0 {
                    return None;
                }
                vec![vec![a, b], vec![s, t], vec![offset]]
            }
            "swap_axes" | "move_axis" => vec![vec![axis, other]],
            "diagonal" => vec![vec![r.between(-1, 1), axis, other]],
            "unflatten" => {
                let d = *shape.get(axis as usize)?;
                let parts: Vec<i32> = (1..=d).filter(|k| d % k == 0).collect();
                let k = *parts.get(r.below(parts.len()))?;
                vec![vec![axis], vec![k, d / k]]
            }
            _ => vec![],
        };
        let dtype = if name == "view" {
            use Dtype::*;
            // Not as floats, whose special values are no use.
            self.random.pick(&[Uint8, Uint16, Int32, Uint64, Int8])
        } else {
            dtype
        };
        let p: Vec<&[i32]> = p.iter().map(Vec::as_slice).collect();
        self.push(name, &[x], &p, dtype).map(drop)
    }

    /// Another shape of the same size.
    fn regroup(&mut self, shape: &[i32]) -> Vec<i32> {
        let mut new: Vec<i32> = shape.to_vec();
        for _ in 0..=self.random.below(3) {
            let n = new.len();
            match self.random.below(4) {
                0 if n > 1 => {
                    let at = self.random.below(n - 1);
                    let joined = new[at] * new[at + 1];
                    new.splice(at..at + 2, [joined]);
                }
                1 => {
                    let at = self.random.below(n + 1);
                    new.insert(at, 1);
                }
                _ if n > 0 => {
                    let at = self.random.below(n);
                    let d = new[at];
                    let parts: Vec<i32> = (1..=d).filter(|k| d % k == 0).collect();
                    if !parts.is_empty() {
                        let k = parts[self.random.below(parts.len())];
                        new.splice(at..=at, [k, d / k]);
                    }
                }
                _ => {}
            }
        }
        new
    }

    /// A value whose shape goes with `shape`.
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
        let own = other.clone();
        self.like(|a| a.shape() == own && a.dtype() == dtype, &other, dtype)
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

    /// Some axes of an array of `n`, in order.
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

    #[allow(clippy::too_many_lines)] // a few lines for each operation
    fn other(&mut self, name: &'static str) -> Made {
        let x = self.any();
        let (shape, dtype) = (self.values[x].shape().to_vec(), self.values[x].dtype());
        let n = shape.len();
        let size: i32 = shape.iter().product();
        let axis = self.random.below(n.max(1));
        let length = shape.get(axis).copied();
        let at = axis as i32;
        let done = match name {
            "where" | "clip" => {
                let c = if name == "where" { Dtype::Bool } else { dtype };
                let (a, b) = (self.partner(&shape, c), self.partner(&shape, dtype));
                let args = if name == "where" {
                    [a, x, b]
                } else {
                    [x, a, b]
                };
                self.push(name, &args, &[], dtype)
            }
            "astype" => {
                let to = self.dtype();
                self.push(name, &[x], &[], to)
            }
            "take" | "take_clamped" => {
                let (index, ishape) = (self.index_type(), self.shape(2));
                let limit = length?.clamp(1, 127);
                let i = self.fresh(
                    &ishape,
                    index,
                    if name == "take" { COUNT } else { INDEX },
                    limit,
                );
                self.push(name, &[x, i], &[&[at]], dtype)
            }
            "take_along_axis" | "put_along_axis" | "scatter_add_axis" => {
                let mut ishape = shape.clone();
                *ishape.get_mut(axis)? = if name == "take_along_axis" {
                    self.random.between(0, 6)
                } else {
                    self.random.between(0, length?)
                };
                let index = self.index_type();
                // Each place once, for the order of writes is not told.
                let i = if name == "take_along_axis" {
                    self.fresh(&ishape, index, INDEX, length?.clamp(1, 127))
                } else {
                    let all = self.fresh(&shape, Dtype::Float32, NORMAL, 0);
                    let order = self.push("argsort", &[all], &[&[at, 0, 0]], Dtype::Uint32)?;
                    self.push(
                        "slice_axis",
                        &[order],
                        &[&[at, 0, ishape[axis]]],
                        Dtype::Uint32,
                    )?
                };
                if name == "take_along_axis" {
                    self.push(name, &[x, i], &[&[at]], dtype)
                } else {
                    let v = self.fresh(&ishape, dtype, NORMAL, 0);
                    self.push(name, &[x, i, v], &[&[at]], dtype)
                }
            }
            "gather" | "scatter" => {
                let named = self.random.below(n.min(3) + 1);
                let axes: Vec<i32> = self.random.shuffled(n)[..named].to_vec();
                let ishape = self.shape(2);
                let index = self.index_type();
                let mut block = shape.clone();
                for i in 0..n {
                    if axes.contains(&(i as i32)) {
                        block[i] = self.random.between(0, shape[i].min(2));
                        if self.random.once_in(2) {
                            block[i] = shape[i].min(1);
                        }
                    } else if name == "gather" && self.random.once_in(4) {
                        block[i] = self.random.between(0, shape[i]);
                    }
                }
                let mut args = vec![x];
                for &a in &axes {
                    let limit = shape[a as usize].clamp(1, 127);
                    args.push(self.fresh(&ishape, index, INDEX, limit));
                }
                if name == "gather" {
                    self.push(name, &args, &[&axes, &block], dtype)
                } else {
                    let lead = if named == 0 { vec![] } else { ishape };
                    let updates = [lead, block].concat();
                    if updates.iter().map(|&d| i64::from(d)).product::<i64>() > 6000 {
                        return None;
                    }
                    args.push(self.fresh(&updates, dtype, NORMAL, 0));
                    // Not replacing, where places may be named twice.
                    let mode = self.random.between(1, 3);
                    self.push(name, &args, &[&axes, &[mode]], dtype)
                }
            }
            "slice_update" => {
                let (mut start, mut stop, mut step, mut ushape) = (vec![], vec![], vec![], vec![]);
                for &d in &shape {
                    let s: i32 = self.random.pick(&[1, 1, 2, -1, -2]);
                    let (a, b) = (self.random.between(0, d), self.random.between(0, d));
                    let (low, high) = (a.min(b), a.max(b));
                    start.push(if s > 0 { low } else { high - 1 });
                    stop.push(if s > 0 {
                        high
                    } else if low == 0 {
                        i32::MIN
                    } else {
                        low - 1
                    });
                    if s < 0 && high == low {
                        return None;
                    }
                    step.push(s);
                    let count = (high - low + s.abs() - 1) / s.abs();
                    ushape.push(if self.random.once_in(5) {
                        count.min(1)
                    } else {
                        count
                    });
                }
                let u = self.fresh(&ushape, dtype, NORMAL, 0);
                self.push(name, &[x, u], &[&start, &stop, &step], dtype)
            }
            "slice_at" | "slice_update_at" => {
                let named = self.random.below(n + 1);
                let axes: Vec<i32> = self.random.shuffled(n)[..named].to_vec();
                let sizes: Vec<i32> = shape
                    .iter()
                    .map(|&d| self.random.between(d.min(1), d))
                    .collect();
                let start = self.fresh(&[named as i32], Dtype::Int32, COUNT, 6);
                if name == "slice_at" {
                    self.push(name, &[x, start], &[&axes, &sizes], dtype)
                } else {
                    let u = self.fresh(&sizes, dtype, NORMAL, 0);
                    self.push(name, &[x, start, u], &[&axes], dtype)
                }
            }
            "masked_scatter" => {
                let lead = self.random.below(n + 1);
                let mask = self.fresh(&shape[..lead], Dtype::Bool, NORMAL, 0);
                let mut rows = vec![self.random.between(1, 9)];
                rows.extend(&shape[lead..]);
                let v = self.fresh(&rows, dtype, NORMAL, 0);
                self.push(name, &[x, mask, v], &[], dtype)
            }
            "concatenate" | "stack" => {
                let mut args = vec![x];
                for _ in 0..self.random.below(3) {
                    let mut s = shape.clone();
                    if name == "concatenate" {
                        *s.get_mut(axis)? = self.random.between(0, 4);
                    }
                    let t = if self.random.once_in(5) {
                        self.dtype()
                    } else {
                        dtype
                    };
                    args.push(self.fresh(&s, t, NORMAL, 0));
                }
                self.push(name, &args, &[&[at]], dtype)
            }
            "pad" => {
                let axes = self.axes(n);
                let low: Vec<i32> = axes.iter().map(|_| self.random.between(0, 3)).collect();
                let high: Vec<i32> = axes.iter().map(|_| self.random.between(0, 3)).collect();
                let mode = self.random.between(0, 1);
                self.push(name, &[x], &[&axes, &low, &high, &[mode]], dtype)
            }
            "tile" => {
                let reps: Vec<i32> = (0..n + self.random.below(2))
                    .map(|_| self.random.between(0, 3))
                    .collect();
                self.push(name, &[x], &[&reps], dtype)
            }
            "matmul" | "addmm" | "inner" | "tensordot" | "einsum" | "gather_mm"
            | "segmented_mm" => self.product(name),
            "outer" => {
                let y = self.shape(1);
                let y = self.fresh(&y, dtype, NORMAL, 0);
                self.push(name, &[x, y], &[], dtype)
            }
            "tril" | "triu" => {
                let k = self.random.between(-3, 3);
                self.push(name, &[x], &[&[k]], dtype)
            }
            "conv" | "conv_transpose" => self.conv(name),
            "fft" | "rfft" | "irfft" | "fftn" | "rfftn" | "irfftn" | "fftshift" => {
                let axes = self.axes(n);
                let p = if name.starts_with("ffts") || name.ends_with("fftn") {
                    axes
                } else {
                    vec![at]
                };
                self.push(name, &[x], &[&p], dtype)
            }
            "qr" | "inv" | "solve" | "cholesky" | "singular_values" | "lu_factor" => {
                let dtype = self.random.pick(&[Dtype::Float32, Dtype::Float64]);
                let (m, mut k) = (self.random.between(1, 6), self.random.between(1, 6));
                if !matches!(name, "qr" | "singular_values") {
                    k = m;
                }
                let mut s = vec![m, k];
                if self.random.once_in(2) {
                    s.insert(0, self.random.between(1, 3));
                }
                let a = self.like(|a| a.shape() == s && a.dtype() == dtype, &s.clone(), dtype);
                if name == "solve" {
                    let b = self.fresh(&s, dtype, NORMAL, 0);
                    self.push(name, &[a, b], &[], dtype)
                } else {
                    let upper = self.random.between(0, 1);
                    self.push(name, &[a], &[&[upper]], dtype)
                }
            }
            "cross" => {
                let mut s = self.shape(2);
                s.push(self.random.between(2, 3));
                let dtype = self.dtype();
                let a = self.fresh(&s, dtype, NORMAL, 0);
                if self.random.once_in(3) {
                    let last = s.len() - 1;
                    s[last] = 5 - s[last];
                }
                let b = self.fresh(&s, dtype, NORMAL, 0);
                self.push(name, &[a, b], &[&[-1]], dtype)
            }
            "rms_norm" | "layer_norm" => {
                let last = *shape.last()?;
                let mut args = vec![x];
                for _ in 0..self
                    .random
                    .below(3)
                    .min(if name == "rms_norm" { 1 } else { 2 })
                {
                    args.push(self.fresh(&[last], dtype, NORMAL, 0));
                }
                self.push(name, &args, &[], dtype)
            }
            "rope" => {
                let dtype = self.float();
                let (h, l, d) = (
                    self.random.between(1, 3),
                    self.random.between(1, 5),
                    self.random.pick(&[2, 4, 8, 16]),
                );
                let b = self.random.between(1, 2);
                let x = self.fresh(&[b, h, l, d], dtype, NORMAL, 0);
                let dims = if self.random.once_in(2) { d } else { 2 };
                let (traditional, offset) = (self.random.between(0, 1), self.random.between(0, 9));
                self.push(name, &[x], &[&[dims, traditional, offset]], dtype)
            }
            "attention" => {
                let dtype = self.random.pick(&[
                    Dtype::Float32,
                    Dtype::Float32,
                    Dtype::Float16,
                    Dtype::Bfloat16,
                ]);
                let r = &mut self.random;
                let (b, kv, groups, l, s, d) = (
                    r.between(1, 2),
                    r.between(1, 2),
                    r.between(1, 2),
                    r.between(1, 5),
                    r.between(1, 9),
                    r.pick(&[1, 4, 8, 16]),
                );
                let mask = r.between(0, 2);
                let q = self.fresh(&[b, kv * groups, l, d], dtype, NORMAL, 0);
                let k = self.fresh(&[b, kv, s, d], dtype, NORMAL, 0);
                let v = self.fresh(&[b, kv, s, d], dtype, NORMAL, 0);
                let mut args = vec![q, k, v];
                if mask == 2 {
                    let t = if self.random.once_in(2) {
                        Dtype::Bool
                    } else {
                        dtype
                    };
                    args.push(self.fresh(&[1, 1, l, s], t, NORMAL, 0));
                }
                self.push(name, &args, &[&[mask]], dtype)
            }
            "quantize" | "quantized_matmul" => {
                let group = self.random.pick(&[32, 64]);
                let bits = self.random.pick(&[2, 3, 4, 5, 6, 8]);
                let plain = self.random.between(0, 1);
                let dtype = self
                    .random
                    .pick(&[Dtype::Float32, Dtype::Float16, Dtype::Bfloat16]);
                let (rows, m) = (
                    self.random.pick(&[1, 2, 8, 32, 33]),
                    self.random.between(1, 4),
                );
                let w = self.fresh(&[rows, group], dtype, NORMAL, 0);
                if name == "quantize" {
                    return self.push(name, &[w], &[&[group, bits, 0]], dtype).map(drop);
                }
                let x = self.fresh(
                    &[m, if plain == 0 { group } else { rows }],
                    dtype,
                    NORMAL,
                    0,
                );
                self.push(name, &[x, w], &[&[group, bits, plain]], dtype)
            }
            "block_masked_mm" => {
                let r = &mut self.random;
                let (b, m, k, n) = (
                    r.between(1, 3),
                    r.pick(&[1, 32, 40]),
                    r.pick(&[3, 32, 33]),
                    r.pick(&[2, 32, 35]),
                );
                let batched = r.once_in(2);
                let lead = |s: [i32; 2]| {
                    if batched {
                        vec![b, s[0], s[1]]
                    } else {
                        s.to_vec()
                    }
                };
                let tiles = |d: i32| (d + 31) / 32;
                let kind = if r.once_in(2) {
                    Dtype::Bool
                } else {
                    Dtype::Float32
                };
                let mut args = vec![];
                for s in [[m, k], [k, n]] {
                    args.push(self.fresh(&lead(s), Dtype::Float32, NORMAL, 0));
                }
                for s in [[m, k], [k, n], [m, n]] {
                    args.push(self.fresh(&lead([tiles(s[0]), tiles(s[1])]), kind, NORMAL, 0));
                }
                if self.random.once_in(2) {
                    args.pop();
                }
                self.push(name, &args, &[], Dtype::Float32)
            }
            "hadamard" => {
                let mut s = self.shape(2);
                s.push(self.random.pick(&[1, 2, 8, 12, 20, 24]));
                let dtype = self.random.pick(&[Dtype::Float32, Dtype::Float16]);
                let x = self.fresh(&s, dtype, NORMAL, 0);
                self.push(name, &[x], &[], dtype)
            }
            _ => None,
        };
        debug_assert!(size >= 0);
        done.map(drop)
    }

    fn product(&mut self, name: &'static str) -> Option<usize> {
        let dtype = match name {
            "gather_mm" => Dtype::Float32,
            _ if self.random.once_in(8) => Dtype::Complex64,
            _ => self.float(),
        };
        let r = &mut self.random;
        let (m, k, n, b) = (
            r.between(1, 9),
            r.pick(&[0, 1, 2, 5, 16, 17]),
            r.between(1, 9),
            r.between(1, 3),
        );
        match name {
            "matmul" => {
                let (mut s, mut t) = (vec![m, k], vec![k, n]);
                match r.below(5) {
                    0 => (s, t) = (vec![b, m, k], vec![b, k, n]),
                    1 => (s, t) = (vec![b, m, k], vec![k, n]),
                    2 => (s, t) = (vec![2, 1, m, k], vec![b, k, n]),
                    3 => s = vec![k],
                    _ => {}
                }
                let x = self.like(|a| a.shape() == s && a.dtype() == dtype, &s.clone(), dtype);
                let y = self.fresh(&t, dtype, NORMAL, 0);
                self.push(name, &[x, y], &[], dtype)
            }
            "addmm" => {
                let (x, y) = (
                    self.fresh(&[m, k], dtype, NORMAL, 0),
                    self.fresh(&[k, n], dtype, NORMAL, 0),
                );
                let c = self.partner(&[m, n], dtype);
                self.push(name, &[c, x, y], &[], dtype)
            }
            "inner" => {
                let (x, y) = (
                    self.fresh(&[m, k], dtype, NORMAL, 0),
                    self.fresh(&[n, k], dtype, NORMAL, 0),
                );
                self.push(name, &[x, y], &[], dtype)
            }
            "tensordot" => {
                let x = self.fresh(&[m, b, k], dtype, NORMAL, 0);
                let y = self.fresh(&[k, n, b], dtype, NORMAL, 0);
                self.push(name, &[x, y], &[&[1, 2], &[2, 0]], dtype)
            }
            "einsum" => {
                let which = self.random.between(0, 5);
                let (s, t) = match which {
                    0 => (vec![m, k], vec![k, n]),
                    1 => (vec![m, k], vec![n, k]),
                    2 | 5 => (vec![b, m, k], vec![b, k, n]),
                    3 => (vec![m, n], vec![m, n]),
                    _ => (vec![m, m], vec![m, n]),
                };
                let (x, y) = (
                    self.fresh(&s, dtype, NORMAL, 0),
                    self.fresh(&t, dtype, NORMAL, 0),
                );
                self.push(name, &[x, y], &[&[which]], dtype)
            }
            "gather_mm" => {
                let x = self.fresh(&[b, m, k], dtype, NORMAL, 0);
                let y = self.fresh(&[b, k, n], dtype, NORMAL, 0);
                let ishape = self.shape(1);
                let i = self.fresh(&ishape, Dtype::Uint32, COUNT, b);
                let j = self.fresh(&ishape, Dtype::Uint32, COUNT, b);
                self.push(name, &[x, y, i, j], &[], dtype)
            }
            _ => {
                let (x, y) = (
                    self.fresh(&[m, k], dtype, NORMAL, 0),
                    self.fresh(&[k, n], dtype, NORMAL, 0),
                );
                let segments = self.fresh(&[b, 2], Dtype::Uint32, COUNT, 18);
                self.push(name, &[x, y, segments], &[], dtype)
            }
        }
    }

    fn conv(&mut self, name: &'static str) -> Option<usize> {
        let dtype = self.float();
        let axes = 1 + self.random.below(3);
        let mut lists: Vec<Vec<i32>> = vec![Vec::new(); 5];
        let (mut x, mut w) = (vec![self.random.between(1, 2)], Vec::new());
        let r = &mut self.random;
        let (inputs, outputs) = (r.between(1, 3), r.between(1, 3));
        let groups = if axes < 3 && r.once_in(3) { 2 } else { 1 };
        w.push(outputs * groups);
        for _ in 0..axes {
            x.push(r.between(1, 6));
            w.push(r.between(1, 3));
            lists[0].push(r.pick(&[1, 1, 2, 3]));
            lists[1].push(r.between(0, 3));
            lists[2].push(r.pick(&[1, 1, 2]));
            lists[3].push(if name == "conv" {
                r.pick(&[1, 1, 2])
            } else {
                1
            });
            lists[4].push(if name == "conv" { 0 } else { r.between(0, 1) });
        }
        x.push(inputs * groups);
        w.push(inputs);
        lists.push(vec![groups, r.between(0, 1)]);
        let x = self.fresh(&x, dtype, NORMAL, 0);
        let w = self.fresh(&w, dtype, NORMAL, 0);
        let lists: Vec<&[i32]> = lists.iter().map(Vec::as_slice).collect();
        self.push(name, &[x, w], &lists, dtype)
    }
}
