//! Trains a small network on generated data, with named parameters, an optimizer with state (Adam;
//! Kingma and Ba 2014), mini-batches, and accuracy on unseen examples.
//!
//! ```text
//! cargo run -p rust-mlx-core --example mlp
//! ```

use std::collections::BTreeMap;

use mlx_rs_core::transforms::{Tree, value_and_grad_tree};
use mlx_rs_core::{Array, Dtype, Result, eval, random, where_};

/// Parameters by name, as in files of weights.
type Params = BTreeMap<String, Array>;

const CLASSES: i32 = 3;
const HIDDEN: i32 = 32;
const BATCH: i32 = 64;

pub(crate) fn main() -> Result<()> {
    let mut key = random::Key::new(7)?;
    let (points, classes) = spirals(1_500, &mut key)?;
    let (train, test) = (1_200, 1_500);
    let mut params = init(&mut key)?;
    let mut adam = Adam::new(&params, 1e-2)?;

    for epoch in 0..30 {
        let mut total = 0.0;
        let mut batches = 0;
        for start in (0..train).step_by(BATCH as usize) {
            let stop = (start + BATCH).min(train);
            let x = points.slice_axis(0, start, stop)?;
            let y = classes.slice_axis(0, start, stop)?;
            let (loss, (), grads) = value_and_grad_tree(&params, |p| {
                Ok::<_, mlx_rs_core::Error>((cross_entropy(p, &x, &y)?, ()))
            })?;
            params = adam.update(&params, &grads)?;
            eval(
                params
                    .leaves()
                    .into_iter()
                    .chain(adam.state())
                    .chain([&loss]),
            )?;
            total += loss.item::<f32>()?;
            batches += 1;
        }
        if epoch % 5 == 4 {
            println!("epoch {:2}  loss {:.4}", epoch + 1, total / batches as f32);
        }
    }

    let guesses = forward(&params, &points.slice_axis(0, train, test)?)?.argmax(-1, false)?;
    let right = guesses.equal(&classes.slice_axis(0, train, test)?.squeeze_axis(1)?)?;
    let accuracy = right
        .astype(Dtype::Float32)?
        .mean(0, false)?
        .item::<f32>()?;
    println!(
        "right on {:.1} % of {} new points",
        100.0 * accuracy,
        test - train
    );
    assert!(accuracy > 0.9, "the network learned nothing");
    Ok(())
}

/// Points `[n, 2]` on one spiral arm per class, and the class of each, `[n, 1]`.
fn spirals(n: i32, key: &mut random::Key) -> Result<(Array, Array)> {
    let (a, b) = key.split()?;
    let (b, c) = b.split()?;
    *key = c;
    let radius = random::uniform(0.05, 1.0, &[n], Dtype::Float32, &a)?;
    let noise = random::normal(0.0, 0.1, &[n], Dtype::Float32, &b)?;
    let classes: Vec<i32> = (0..n).map(|i| i % CLASSES).collect();
    let classes = Array::from_slice(&classes, &[n, 1])?;
    let turn = Array::scalar(std::f32::consts::TAU / CLASSES as f32)?;
    let start = classes
        .squeeze_axis(1)?
        .astype(Dtype::Float32)?
        .multiply(&turn)?;
    let angle = radius
        .multiply(&Array::scalar(4.0f32)?)?
        .add(&start)?
        .add(&noise)?;
    let x = radius.multiply(&angle.cos()?)?;
    let y = radius.multiply(&angle.sin()?)?;
    Ok((mlx_rs_core::stack(&[&x, &y], 1)?, classes))
}

/// Initial weights `[in, out]` by He et al. 2015; biases are zero.
fn init(key: &mut random::Key) -> Result<Params> {
    let mut params = Params::new();
    for (name, from, to) in [
        ("layer0", 2, HIDDEN),
        ("layer1", HIDDEN, HIDDEN),
        ("layer2", HIDDEN, CLASSES),
    ] {
        let (now, later) = key.split()?;
        *key = later;
        let std = (2.0 / from as f32).sqrt();
        let weight = random::normal(0.0, std, &[from, to], Dtype::Float32, &now)?;
        params.insert(format!("{name}.weight"), weight);
        params.insert(
            format!("{name}.bias"),
            mlx_rs_core::zeros(&[to], Dtype::Float32)?,
        );
    }
    Ok(params)
}

/// `[n, 2] -> [n, CLASSES]`
fn forward(params: &Params, x: &Array) -> Result<Array> {
    let zero = Array::scalar(0.0f32)?;
    let mut x = x.clone();
    for i in 0..3 {
        let weight = &params[&format!("layer{i}.weight")];
        x = x.matmul(weight)?.add(&params[&format!("layer{i}.bias")])?;
        if i < 2 {
            x = where_(&x.greater(&zero)?, &x, &zero)?;
        }
    }
    Ok(x)
}

fn cross_entropy(params: &Params, x: &Array, classes: &Array) -> Result<Array> {
    let logits = forward(params, x)?;
    let right = logits.take_along_axis(classes, -1)?.squeeze_axis(-1)?;
    logits
        .logsumexp(-1, false)?
        .subtract(&right)?
        .mean(0, false)
}

/// Adam: the moving average of the gradient, divided by the square root of the moving average of
/// its square.
struct Adam {
    rate: f32,
    steps: i32,
    mean: Params,
    square: Params,
}

impl Adam {
    fn new(params: &Params, rate: f32) -> Result<Self> {
        let zeros = |p: &Array| mlx_rs_core::zeros(p.shape(), p.dtype());
        Ok(Self {
            rate,
            steps: 0,
            mean: params.map_leaves(zeros)?,
            square: params.map_leaves(zeros)?,
        })
    }

    /// The optimizer's state, to evaluate together with the parameters in each step.
    fn state(&self) -> Vec<&Array> {
        let mut leaves = self.mean.leaves();
        leaves.extend(self.square.leaves());
        leaves
    }

    fn update(&mut self, params: &Params, grads: &Params) -> Result<Params> {
        const BETA1: f32 = 0.9;
        const BETA2: f32 = 0.999;
        self.steps += 1;
        let mix = |beta: f32| {
            move |old: &Array, new: &Array| {
                old.multiply(&Array::scalar(beta)?)?
                    .add(&new.multiply(&Array::scalar(1.0 - beta)?)?)
            }
        };
        self.mean = self.mean.zip_leaves(grads, mix(BETA1))?;
        self.square = self
            .square
            .zip_leaves(&grads.map_leaves(Array::square)?, mix(BETA2))?;
        let correction = (1.0 - BETA2.powi(self.steps)).sqrt() / (1.0 - BETA1.powi(self.steps));
        let rate = Array::scalar(self.rate * correction)?;
        let tiny = Array::scalar(1e-8f32)?;
        let steps = self.mean.zip_leaves(&self.square, |m, s| {
            m.divide(&s.sqrt()?.add(&tiny)?)?.multiply(&rate)
        })?;
        params.zip_leaves(&steps, Array::subtract)
    }
}
