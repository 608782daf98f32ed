//! Runs a program and compares each step with the same step on values in other layouts, under
//! `vmap`, differentiated, and compiled.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use mlx_rs_core::transforms::{VmapAxes, checkpoint, compile, grad, vmap};
use mlx_rs_core::{All, Array, Dtype, Result, eval, stack};

use crate::apply::{Step, apply};
use crate::make::{Program, input};
use crate::operations::{Kind, RANDOM, is_smooth, kind};
use crate::value::{Random, Value};

/// Receives the progress and the findings of a run.
pub trait Report {
    /// Called before anything that could end the process.
    fn at(&mut self, step: usize, phase: &str);
    fn found(&mut self, step: usize, phase: &str, text: &str);
    /// Called if MLX refuses an operation.
    fn refused(&mut self, phase: &str, name: &str);
}

/// The steps that a step depends on, including the step itself.
pub fn needed(program: &Program, step: usize) -> BTreeSet<usize> {
    let mut reached = BTreeSet::from([step]);
    let mut open = vec![step];
    while let Some(at) = open.pop() {
        for &arg in &program.steps[at].args {
            let from = program.first.partition_point(|&f| f <= arg) - 1;
            if reached.insert(from) {
                open.push(from);
            }
        }
    }
    reached
}

fn arrays(values: &[Value]) -> Result<Vec<Array>> {
    values.iter().map(Value::array).collect()
}

fn values(arrays: &[Array]) -> Result<Vec<Value>> {
    eval(arrays)?;
    arrays.iter().map(Value::read).collect()
}

/// The allowed difference of results, and the magnitude that it is relative to.
fn room(step: &Step, args: &[Value]) -> (f64, f64) {
    let greatest = |v: &Value| {
        let finite = v.numbers().into_iter().filter(|v| v.is_finite());
        finite.fold(1.0f64, |m, v| m.max(v.abs()))
    };
    let length = args
        .first()
        .map_or(1.0, |a| a.numbers().len().max(1) as f64);
    // MLX computes elementary functions of doubles in single precision.
    let single = matches!(
        step.name,
        "softmax"
            | "logsumexp"
            | "logcumsumexp"
            | "rms_norm"
            | "layer_norm"
            | "attention"
            | "conv"
            | "conv_transpose"
            | "rope"
    ) || kind(step.name) == Kind::Element;
    let double = args.iter().any(|a| a.dtype == Dtype::Float64);
    let coarse = if single && double { 5e8 } else { 1.0 };
    match kind(step.name) {
        Kind::Exact => (0.0, 0.0),
        Kind::Element => (8.0 * coarse, 0.0),
        Kind::Sum => {
            let product: f64 = args.iter().map(greatest).product();
            let squares = matches!(
                step.name,
                "var" | "std" | "norm" | "rms_norm" | "layer_norm"
            );
            let power = if squares { product } else { 1.0 };
            let product_of_many = matches!(step.name, "prod" | "cumprod");
            (
                if product_of_many { 200.0 } else { 16.0 } * coarse,
                product * power * length,
            )
        }
        Kind::Long => (4000.0, args.iter().map(greatest).product::<f64>().powi(2)),
    }
}

/// Describes the first difference between two lists of results.
fn apart(a: &[Value], b: &[Value], (tolerance, scale): (f64, f64)) -> Option<String> {
    if a.len() != b.len() {
        return Some(format!("{} results against {}", a.len(), b.len()));
    }
    a.iter()
        .zip(b)
        .find_map(|(a, b)| a.difference(b, tolerance, scale))
}

fn is_random(step: &Step) -> bool {
    RANDOM.contains(&step.name)
}

/// Runs `program`, or only the steps that `only` depends on. The values in `cuts` become row-major
/// inputs.
pub struct Judge<'a> {
    pub program: &'a Program,
    pub seed: u64,
    pub only: Option<usize>,
    pub cuts: BTreeSet<usize>,
    pub json: Option<Box<dyn Write>>,
}

impl Judge<'_> {
    pub fn run(&mut self, report: &mut dyn Report) {
        let wanted = self.only.map(|k| needed(self.program, k));
        let mut all: BTreeMap<usize, Array> = BTreeMap::new();
        let program = self.program;
        for (k, step) in program.steps.iter().enumerate() {
            if wanted.as_ref().is_some_and(|w| !w.contains(&k)) {
                continue;
            }
            let checked = self.only.is_none_or(|only| only == k);
            let args: Vec<Array> = step.args.iter().map(|a| all[a].clone()).collect();
            let results = if step.name == "input" {
                input(step).and_then(|v| Ok(vec![v.array()?]))
            } else {
                self.step(k, step, &args, checked, report)
            };
            let Ok(results) = results else { return };
            for (i, array) in results.into_iter().enumerate() {
                let array = if self.cuts.contains(&k) {
                    Value::read(&array)
                        .and_then(|v| v.array())
                        .expect("a copy of a result")
                } else {
                    array
                };
                all.insert(program.first[k] + i, array);
            }
        }
        if self.only.is_none() {
            self.whole(&all, report);
        }
    }

    fn step(
        &mut self,
        k: usize,
        step: &Step,
        args: &[Array],
        checked: bool,
        report: &mut dyn Report,
    ) -> Result<Vec<Array>> {
        let mut random = Random(self.seed ^ (k as u64) << 32);
        let phases = [
            random.once_in(4),
            random.once_in(4),
            random.once_in(12),
            random.once_in(4),
        ];
        report.at(k, "views");
        let actual = apply(step, args).and_then(|a| eval(&a).map(|()| a));
        if !checked {
            return actual;
        }
        let given = values(args)?;
        // The conversion of a float that an integer type cannot represent is undefined.
        let cut =
            step.name == "astype" && given[0].numbers().iter().any(|v| !(0.0..100.0).contains(v));
        if cut && given[0].dtype.is_float() && step.dtype.is_integer() {
            return actual;
        }
        report.at(k, "copies");
        let plain = apply(step, &arrays(&given)?).and_then(|a| values(&a));
        let (actual, plain) = match (actual, plain) {
            (Ok(actual), Ok(plain)) => (actual, plain),
            (Err(actual), Err(_)) => return Err(actual),
            (actual, plain) => {
                let text = format!("{:?} against {:?}", actual.as_ref().err(), plain.err());
                report.found(k, "views", &format!("{} {text}", step.name));
                return actual;
            }
        };
        report.at(k, "reading");
        let got = values(&actual)?;
        if let Some(text) = apart(&got, &plain, room(step, &given)) {
            report.found(k, "views", &format!("{} {text}", step.name));
        }
        self.tell(step, &given, &got);
        if is_random(step) {
            return Ok(actual);
        }
        if phases[0] {
            report.at(k, "vmap");
            if let Err(e) = mapped(step, &given, &mut random, k, report) {
                report.refused("vmap", &format!("{} {e:?}", step.name));
            }
        }
        let smooth = is_smooth(step.name)
            && given
                .iter()
                .any(|v| v.dtype.is_float() && !v.bytes.is_empty());
        if phases[1] && smooth {
            report.at(k, "grad");
            if let Err(e) = derived(step, args, &given, &mut random, k, report) {
                report.refused("grad", &format!("{} {e:?}", step.name));
            }
        }
        // Which of several equal elements `topk` selects is undefined.
        if phases[3] && smooth && step.name != "topk" {
            report.at(k, "slopes");
            if let Err(e) = mapped_slopes(step, &given, &mut random, k, report) {
                report.refused("slopes", &format!("{} {e:?}", step.name));
            }
        }
        if phases[2] {
            report.at(k, "compile");
            let candidate = step.clone();
            let compiled = compile(move |a: &[Array]| apply(&candidate, a));
            match compiled.call(args).and_then(|a| values(&a)) {
                Ok(compiled) => {
                    if let Some(text) = apart(&compiled, &got, room(step, &given)) {
                        report.found(k, "compile", &format!("{} {text}", step.name));
                    }
                }
                Err(e) => report.refused("compile", &format!("{} {e:?}", step.name)),
            }
        }
        Ok(actual)
    }

    /// Writes a line that other implementations can check.
    fn tell(&mut self, step: &Step, args: &[Value], results: &[Value]) {
        let Some(out) = &mut self.json else { return };
        let list = |values: &[Value]| {
            let each = values.iter().map(|v| {
                let hex: String = v.bytes.iter().map(|b| format!("{b:02x}")).collect();
                format!("[\"{}\",{:?},\"{hex}\"]", v.dtype, v.shape)
            });
            each.collect::<Vec<_>>().join(",")
        };
        // A reader that has ended is not a failure of the program.
        let _ = writeln!(
            out,
            "{{\"seed\":{},\"name\":\"{}\",\"p\":{:?},\"dtype\":\"{}\",\"args\":[{}],\"out\":[{}]}}",
            self.seed,
            step.name,
            step.p,
            step.dtype,
            list(args),
            list(results)
        );
    }

    /// Differentiates the steps `wanted` of the program, with the value `target`, by the inputs,
    /// over a batch of two. It checks only shapes, and that no crash occurs, because rounding may
    /// change an order.
    fn slopes(
        &self,
        wanted: &BTreeSet<usize>,
        target: usize,
        random: &mut Random,
        report: &mut dyn Report,
    ) -> Result<()> {
        let program = self.program;
        let k = wanted.last().copied().unwrap_or(0);
        let inputs = || wanted.iter().filter(|&&k| program.steps[k].name == "input");
        let given = inputs()
            .map(|&k| input(&program.steps[k]))
            .collect::<Result<Vec<_>>>()?;
        let by: Vec<usize> = (0..given.len())
            .filter(|&i| given[i].dtype.is_float())
            .collect();
        if by.is_empty() {
            return Ok(());
        }
        let seed = random.bits();
        let total = |args: &[Array]| -> Result<Vec<Array>> {
            let mut inputs = args.iter();
            let mut open: BTreeMap<usize, Array> = BTreeMap::new();
            for &k in wanted {
                let step = &program.steps[k];
                let results = if step.name == "input" {
                    inputs.next().cloned().into_iter().collect()
                } else {
                    let given: Vec<Array> = step.args.iter().map(|a| open[a].clone()).collect();
                    apply(step, &given)?
                };
                for (i, array) in results.into_iter().enumerate() {
                    open.insert(program.first[k] + i, array);
                }
            }
            weighed(vec![open[&target].clone()], seed, given[by[0]].dtype)
        };
        let mut mapped: Vec<bool> = given.iter().map(|_| random.once_in(2)).collect();
        mapped[by[0]] = true;
        let (axes, batch, _) = batch_of(&given, &mapped, random)?;
        report.at(k, "chain");
        let slopes = values(&vmap(grad(total, &by), VmapAxes::Each(axes), 0)(&batch)?)?;
        for (slope, &i) in slopes.iter().zip(&by) {
            let shape = [&[2], &given[i].shape[..]].concat();
            if slope.shape != shape {
                let text = format!("{:?}, not {shape:?}", slope.shape);
                report.found(k, "chain", &text);
            }
        }
        Ok(())
    }

    /// Evaluates some of the values again, each in one evaluation. Values that are not needed are
    /// dropped first.
    fn whole(&self, all: &BTreeMap<usize, Array>, report: &mut dyn Report) {
        let program = self.program;
        let mut random = Random(self.seed ^ 0xface);
        for _ in 0..3 {
            let Some(&target) = all.keys().nth(random.below(all.len())) else {
                return;
            };
            let last = program.first.partition_point(|&f| f <= target) - 1;
            let wanted = needed(program, last);
            if wanted.iter().any(|&k| is_random(&program.steps[k])) {
                continue;
            }
            let build = |inputs: &mut dyn FnMut(&Step) -> Result<Array>| -> Result<Array> {
                let mut open: BTreeMap<usize, Array> = BTreeMap::new();
                for &k in &wanted {
                    let step = &program.steps[k];
                    let results = if step.name == "input" {
                        vec![inputs(step)?]
                    } else {
                        let args: Vec<Array> = step.args.iter().map(|a| open[a].clone()).collect();
                        let later = wanted.range(k + 1..);
                        let used: BTreeSet<usize> =
                            later.flat_map(|&l| program.steps[l].args.clone()).collect();
                        open.retain(|a, _| used.contains(a));
                        apply(step, &args)?
                    };
                    for (i, array) in results.into_iter().enumerate() {
                        open.insert(program.first[k] + i, array);
                    }
                }
                Ok(open
                    .remove(&target)
                    .expect("the target is among the results"))
            };
            if let Err(e) = self.slopes(&wanted, target, &mut random, report) {
                report.refused("chain", &format!("{e:?}"));
            }
            report.at(last, "whole");
            let lazy = build(&mut |step| input(step)?.array()).and_then(|a| Value::read(&a));
            let (Ok(lazy), Ok(eager)) = (lazy, Value::read(&all[&target])) else {
                report.found(last, "whole", "failed");
                continue;
            };
            if let Some(text) = lazy.difference(&eager, 0.0, 0.0) {
                report.found(last, "whole", &text);
            }
        }
    }
}

/// Compares the step over a batch of two with the step on each example.
fn mapped(
    step: &Step,
    given: &[Value],
    random: &mut Random,
    k: usize,
    report: &mut dyn Report,
) -> Result<()> {
    let mut mapped: Vec<bool> = given.iter().map(|_| !random.once_in(3)).collect();
    if !mapped.contains(&true) {
        mapped[0] = true;
    }
    let (axes, batch, single) = batch_of(given, &mapped, random)?;
    let (Ok(a), Ok(b)) = (apply(step, &single[0]), apply(step, &single[1])) else {
        return Ok(());
    };
    let expected: Result<Vec<Array>> = a.iter().zip(&b).map(|(a, b)| stack(&[a, b], 0)).collect();
    let expected = values(&expected?)?;
    let f = |args: &[Array]| apply(step, args);
    let text = format!("{} over {axes:?} ", step.name);
    let got = values(&vmap(f, VmapAxes::Each(axes), 0)(&batch)?)?;
    if let Some(apart) = apart(&got, &expected, room(step, given)) {
        report.found(k, "vmap", &(text + &apart));
    }
    Ok(())
}

/// The sum of all outputs times weights. The weights are in a different layout from the one in
/// which they are used.
fn total_of(step: &Step, seed: u64) -> impl Fn(&[Array]) -> Result<Vec<Array>> + Clone + use<> {
    let step = step.clone();
    move |args: &[Array]| -> Result<Vec<Array>> {
        weighed(apply(&step, args)?, seed, args[by_first(args)].dtype())
    }
}

/// The weighted sum of the floats among `results`, as `dtype`.
fn weighed(results: Vec<Array>, seed: u64, dtype: Dtype) -> Result<Vec<Array>> {
    let mut sum = Array::scalar(0.0f32)?.astype(dtype)?;
    for result in results {
        if !result.dtype().is_float() {
            continue;
        }
        let mut random = Random(seed);
        let numbers: Vec<f64> = (0..result.size())
            .map(|_| f64::from(random.between(-64, 64)) / 64.0)
            .collect();
        let mut back = result.shape().to_vec();
        back.reverse();
        let weights = Array::from_slice(&numbers, &back)?
            .astype(result.dtype())?
            .transpose()?;
        sum = sum.add(&result.multiply(&weights)?.sum(All, false)?)?;
    }
    Ok(vec![sum])
}

/// A batch of two examples, and each example. The second example has the elements of the first in
/// reverse. `mapped` says which of the values have the batch axis.
type Batch = (Vec<Option<i32>>, Vec<Array>, [Vec<Array>; 2]);

fn batch_of(given: &[Value], mapped: &[bool], random: &mut Random) -> Result<Batch> {
    let axes: Vec<Option<i32>> = given
        .iter()
        .zip(mapped)
        .map(|(v, &mapped)| mapped.then(|| random.between(0, v.shape.len() as i32)))
        .collect();
    let (mut batch, mut single) = (Vec::new(), [Vec::new(), Vec::new()]);
    for (value, axis) in given.iter().zip(&axes) {
        let other = if axis.is_some() {
            value.reversed()
        } else {
            value.clone()
        };
        let pair = [value.array()?, other.array()?];
        batch.push(match axis {
            Some(axis) => stack(&[&pair[0], &pair[1]], *axis)?,
            None => pair[0].clone(),
        });
        for (list, array) in single.iter_mut().zip(pair) {
            list.push(array);
        }
    }
    Ok((axes, batch, single))
}

/// Compares the derivative of the step over a batch of two with the derivative on each example.
fn mapped_slopes(
    step: &Step,
    given: &[Value],
    random: &mut Random,
    k: usize,
    report: &mut dyn Report,
) -> Result<()> {
    let by: Vec<usize> = (0..given.len())
        .filter(|&i| given[i].dtype.is_float())
        .collect();
    let mut mapped: Vec<bool> = given.iter().map(|_| !random.once_in(3)).collect();
    if !mapped.contains(&true) {
        mapped[by[0]] = true;
    }
    let (axes, batch, single) = batch_of(given, &mapped, random)?;
    let total = total_of(step, random.bits());
    let slopes = |args: &[Array]| grad(total.clone(), &by)(args);
    let text = format!("slope of {} over {axes:?}: ", step.name);
    mapped_against_each(
        &slopes,
        axes,
        &batch,
        &single,
        (step, given, &text),
        k,
        report,
    )
}

/// Compares `f` over a batch of two with `f` on each example.
fn mapped_against_each(
    f: &dyn Fn(&[Array]) -> Result<Vec<Array>>,
    axes: Vec<Option<i32>>,
    batch: &[Array],
    single: &[Vec<Array>; 2],
    (step, given, text): (&Step, &[Value], &str),
    k: usize,
    report: &mut dyn Report,
) -> Result<()> {
    let (Ok(a), Ok(b)) = (f(&single[0]), f(&single[1])) else {
        return Ok(());
    };
    let expected: Result<Vec<Array>> = a.iter().zip(&b).map(|(a, b)| stack(&[a, b], 0)).collect();
    let expected = values(&expected?)?;
    let got = values(&vmap(|args: &[Array]| f(args), VmapAxes::Each(axes), 0)(
        batch,
    )?)?;
    let scale = room(step, given).1;
    let tolerance = room(step, given).0.max(1024.0);
    if let Some(apart) = apart(&got, &expected, (tolerance, scale)) {
        report.found(k, "slopes", &format!("{text}{apart}"));
    }
    Ok(())
}

/// Compares the derivative on views with the derivative on copies, and with finite differences.
fn derived(
    step: &Step,
    args: &[Array],
    given: &[Value],
    random: &mut Random,
    k: usize,
    report: &mut dyn Report,
) -> Result<()> {
    let by: Vec<usize> = (0..args.len())
        .filter(|&i| given[i].dtype.is_float())
        .collect();
    let total = total_of(step, random.bits());
    let views = values(&grad(total.clone(), &by)(args)?)?;
    let copies = values(&grad(total.clone(), &by)(&arrays(given)?)?)?;
    for (view, &i) in views.iter().zip(&by) {
        if view.shape != given[i].shape || view.dtype != given[i].dtype {
            let text = format!(
                "{} {}{:?} by {:?}",
                step.name, view.dtype, view.shape, given[i].shape
            );
            report.found(k, "grad", &text);
            return Ok(());
        }
    }
    let greatest = copies
        .iter()
        .flat_map(Value::numbers)
        .filter(|v| v.is_finite());
    let greatest = greatest.fold(1.0f64, |m, v| m.max(v.abs()));
    let scale = room(
        &Step {
            name: "sum",
            ..step.clone()
        },
        given,
    )
    .1 * greatest;
    let room_of_own = room(step, given).0.max(64.0);
    if let Some(text) = apart(&views, &copies, (room_of_own, scale)) {
        report.found(k, "grad", &format!("{} of views: {text}", step.name));
    }
    if random.once_in(4) {
        report.at(k, "checkpoint");
        let inner = checkpoint(total.clone());
        let again = values(&grad(inner, &by)(args)?)?;
        if let Some(text) = apart(&again, &views, (room_of_own, scale)) {
            report.found(k, "checkpoint", &format!("{} {text}", step.name));
        }
    }
    // Single precision is too coarse for finite differences, and some operations support no other
    // precision.
    if matches!(
        step.name,
        "block_masked_mm" | "gather_mm" | "hadamard" | "attention"
    ) {
        return Ok(());
    }
    report.at(k, "differences");
    let mut point = Vec::new();
    for (i, value) in given.iter().enumerate() {
        if !value.dtype.is_float() {
            point.push(value.array()?);
            continue;
        }
        // Moves values away from points where their order or a sign changes.
        let (mut numbers, mut at) = (value.numbers(), 1009 * i as i32);
        for v in &mut numbers {
            at = (at + 7919) % 10007;
            *v += f64::from(at + 1) * 1e-6;
        }
        point.push(Array::from_slice(&numbers, &value.shape)?);
    }
    let slopes = grad(total.clone(), &by)(&point)?;
    let (mut expected, mut size) = (0.0, 1.0f64);
    // A function with corners is linear beside them, so a small step suffices. For other functions
    // the step is large, because MLX computes elementary functions of doubles in single precision.
    // Where curvature is large, as for a norm near zero, a smaller step decides.
    let corners = [
        "sort",
        "topk",
        "median",
        "max",
        "min",
        "cummax",
        "cummin",
        "maximum",
        "minimum",
        "clip",
        "abs",
        "sort_flat",
    ];
    let steps = if corners.contains(&step.name) {
        [1e-7, 1e-7]
    } else {
        [1e-3, 1e-4]
    };
    let mut directions = Vec::new();
    for (slope, &i) in slopes.iter().zip(&by) {
        let slope = Value::read(slope)?.numbers();
        let numbers = Value::read(&point[i])?.numbers();
        let along: Vec<f64> = numbers
            .iter()
            .map(|_| f64::from(random.between(-8, 8)) / 8.0)
            .collect();
        for (s, d) in slope.iter().zip(&along) {
            expected += s * d;
            size += (s * d).abs();
        }
        directions.push((i, numbers, along));
    }
    let value_at = |h: f64| -> Result<f64> {
        let mut moved = point.clone();
        for (i, numbers, along) in &directions {
            let numbers: Vec<f64> = numbers.iter().zip(along).map(|(v, d)| v + h * d).collect();
            moved[*i] = Array::from_slice(&numbers, point[*i].shape())?;
        }
        Ok(Value::read(&total(&moved)?[0])?.numbers()[0])
    };
    let middle = value_at(0.0)?;
    let greatest = given
        .iter()
        .flat_map(Value::numbers)
        .filter(|v| v.is_finite());
    let greatest = greatest.fold(1.0f64, |m, v| m.max(v.abs()));
    let mut wrong = None;
    for h in steps {
        let (high, low) = (value_at(h)?, value_at(-h)?);
        let got = (high - low) / (2.0 * h);
        let noise =
            (middle.abs().max(1.0) + greatest * size) * 1e-6 / if h < 1e-5 { 1e-3 } else { h };
        // At a corner, the slopes on both sides differ.
        let corner = ((high - middle) - (middle - low)).abs() / h > 1e-2 * size;
        // A slope that is not finite is ignored, such as that of a standard deviation of zero.
        let apart = (got - expected).abs() > 2e-3 * size + noise;
        if !apart || corner || !got.is_finite() || size >= 1e6 {
            return Ok(());
        }
        wrong.get_or_insert(got);
    }
    if let Some(got) = wrong {
        let text = format!("{} slope {expected}, by differences {got}", step.name);
        report.found(k, "differences", &text);
    }
    Ok(())
}

/// The index of the first floating-point argument.
fn by_first(args: &[Array]) -> usize {
    let of = |a: &Array| a.dtype().is_float() && a.dtype() != Dtype::Complex64;
    args.iter().position(of).unwrap_or(0)
}
