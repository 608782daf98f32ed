//! The update rule of each optimizer, for one parameter.

use mlx_rs_core::{All, Array, Dtype, Error, ErrorKind, Result};

use super::OptimizerConfig;
use crate::adapter::Params;

/// The inputs for the update of one parameter. All values are float32.
pub(super) struct Step<'a> {
    pub(super) name: &'a str,
    /// Whether mlx-lm stores the parameter transposed.
    pub(super) turned: bool,
    pub(super) old: &'a Params,
    pub(super) new: &'a mut Params,
    pub(super) grad: Array,
    pub(super) param: Array,
    /// The values from [`OptimizerConfig::numbers`].
    pub(super) numbers: &'a [Array],
}

/// Returns `x * factor`.
fn times(x: &Array, factor: f32) -> Result<Array> {
    x.multiply(&x.scalar_like(factor)?)
}

/// Returns the square root of the mean square of all elements.
fn rms(x: &Array) -> Result<Array> {
    x.square()?.mean(All, false)?.sqrt()
}

impl Step<'_> {
    /// Returns the previous state named `part`; zeros of `shape` before the first step.
    fn last(&self, part: &str, shape: &[i32]) -> Result<Array> {
        match self.old.get(&format!("{}/{part}", self.name)) {
            Some(a) if a.shape() == shape => Ok(a.clone()),
            Some(a) => Err(Error::new(
                ErrorKind::Value,
                "optimizer",
                format!(
                    "the state `{part}` of `{}` is {:?}; {shape:?} is needed",
                    self.name,
                    a.shape()
                ),
            )),
            None => mlx_rs_core::zeros(shape, Dtype::Float32),
        }
    }

    fn keep(&mut self, part: &str, value: &Array) {
        self.new
            .insert(format!("{}/{part}", self.name), value.clone());
    }

    /// Returns one of the values that vary between steps, by index.
    fn number(&self, at: usize) -> Result<Array> {
        self.numbers.get(at).cloned().ok_or_else(|| {
            let message = format!("number {at} of the step is missing");
            Error::new(ErrorKind::Value, "optimizer", message)
        })
    }

    /// Returns `decay * last + (1 - decay) * value`, and stores it as the new state.
    fn mean(&mut self, part: &str, value: &Array, decay: f32) -> Result<Array> {
        let shares = (value.scalar_like(decay)?, value.scalar_like(1.0 - decay)?);
        self.mix(part, value, (&shares.0, &shares.1))
    }

    /// Returns `shares.0 * last + shares.1 * value`, and stores it as the new state.
    fn mix(&mut self, part: &str, value: &Array, shares: (&Array, &Array)) -> Result<Array> {
        let last = self.last(part, value.shape())?;
        let next = last.multiply(shares.0)?.add(&value.multiply(shares.1)?)?;
        self.keep(part, &next);
        Ok(next)
    }

    pub(super) fn update(&mut self, config: &OptimizerConfig) -> Result<Array> {
        match *config {
            OptimizerConfig::AdamW {
                beta1,
                beta2,
                eps,
                bias_correction,
                ..
            } => {
                self.param = self.param.multiply(&self.number(2)?)?;
                self.adam((beta1, beta2), eps, bias_correction)
            }
            OptimizerConfig::Adam {
                beta1,
                beta2,
                eps,
                bias_correction,
            } => self.adam((beta1, beta2), eps, bias_correction),
            OptimizerConfig::Sgd {
                momentum,
                weight_decay,
                dampening,
                nesterov,
            } => self.sgd(momentum, weight_decay, dampening, nesterov),
            OptimizerConfig::Lion { beta1, beta2, .. } => self.lion((beta1, beta2)),
            OptimizerConfig::Adafactor { .. } => self.adafactor(config),
            OptimizerConfig::Muon {
                momentum,
                weight_decay,
                nesterov,
                ns_steps,
            } => self.muon(momentum, weight_decay, nesterov, ns_steps),
        }
    }

    fn adam(&mut self, betas: (f32, f32), eps: f32, corrected: bool) -> Result<Array> {
        let grad = self.grad.clone();
        let m = self.mean("m", &grad, betas.0)?;
        let v = self.mean("v", &grad.square()?, betas.1)?;
        let mut root = v.sqrt()?;
        if corrected {
            root = root.multiply(&self.number(1)?)?;
        }
        let step = m
            .multiply(&self.number(0)?)?
            .divide(&root.add(&root.scalar_like(eps)?)?)?;
        self.param.subtract(&step)
    }

    fn sgd(&mut self, momentum: f32, decay: f32, dampening: f32, nesterov: bool) -> Result<Array> {
        let mut grad = self.grad.clone();
        if decay != 0.0 {
            grad = grad.add(&times(&self.param, decay)?)?;
        }
        let step = if momentum > 0.0 {
            let last = self.last("v", grad.shape())?;
            let v = times(&last, momentum)?.add(&times(&grad, 1.0 - dampening)?)?;
            self.keep("v", &v);
            if nesterov {
                grad.add(&times(&v, momentum)?)?
            } else {
                v
            }
        } else {
            grad
        };
        self.param.subtract(&step.multiply(&self.number(0)?)?)
    }

    fn lion(&mut self, betas: (f32, f32)) -> Result<Array> {
        let grad = self.grad.clone();
        let last = self.last("m", grad.shape())?;
        let direction = times(&last, betas.0)?
            .add(&times(&grad, 1.0 - betas.0)?)?
            .sign()?;
        self.mean("m", &grad, betas.1)?;
        let step = direction.multiply(&self.number(0)?)?;
        self.param.multiply(&self.number(1)?)?.subtract(&step)
    }

    fn adafactor(&mut self, config: &OptimizerConfig) -> Result<Array> {
        let OptimizerConfig::Adafactor {
            eps,
            eps_scale,
            clip_threshold,
            beta1,
            weight_decay,
            scale_parameter,
            ..
        } = *config
        else {
            return Ok(self.param.clone());
        };
        let mut rate = self.number(0)?;
        if scale_parameter {
            let size = rms(&self.param)?;
            rate = rate.multiply(&size.maximum(&size.scalar_like(eps_scale)?)?)?;
        }
        let shares = (&self.number(1)?, &self.number(2)?);
        let grad = self.grad.clone();
        let square = grad.square()?;
        let square = square.add(&square.scalar_like(eps)?)?;
        let shape = if grad.shape().len() >= 2 {
            let rows = self.mix("rows", &square.mean(-1, false)?, shares)?;
            let cols = self.mix("cols", &square.mean(-2, false)?, shares)?;
            let rows = rows.divide(&rows.mean(-1, true)?)?.rsqrt()?;
            rows.expand_dims(-1)?
                .multiply(&cols.rsqrt()?.expand_dims(-2)?)?
        } else {
            self.mix("v", &square, shares)?.rsqrt()?
        };
        let mut update = shape.multiply(&grad)?;
        let size = times(&rms(&update)?, 1.0 / clip_threshold)?;
        update = update
            .divide(&size.maximum(&size.scalar_like(1.0)?)?)?
            .multiply(&rate)?;
        if let Some(beta1) = beta1 {
            update = self.mean("m", &update, beta1)?;
        }
        let mut param = self.param.clone();
        if weight_decay != 0.0 {
            param = param.subtract(&times(&param, weight_decay)?.multiply(&rate)?)?;
        }
        param.subtract(&update)
    }

    fn muon(&mut self, momentum: f32, decay: f32, nesterov: bool, steps: u32) -> Result<Array> {
        let mut grad = self.grad.clone();
        if decay != 0.0 {
            grad = grad.add(&times(&self.param, decay)?)?;
        }
        let v = self.mean("v", &grad, momentum)?;
        let mut update = if nesterov {
            times(&grad, 1.0 - momentum)?.add(&times(&v, momentum)?)?
        } else {
            v
        };
        let mut rate = self.number(0)?;
        let shape = update.shape().to_vec();
        if let [.., rows, cols] = *shape {
            // Like MLX, flattens a stack to a matrix with one row per index of the first axis.
            update = match *shape {
                [first, _, _, ..] => orthogonal(&update.reshape(&[first, -1])?, steps)?,
                _ => orthogonal(&update, steps)?,
            }
            .reshape(&shape)?;
            let (rows, cols) = if self.turned {
                (cols, rows)
            } else {
                (rows, cols)
            };
            rate = times(&rate, (rows as f32 / cols.max(1) as f32).max(1.0).sqrt())?;
        }
        self.param.subtract(&update.multiply(&rate)?)
    }
}

/// Approximates the closest orthogonal matrix by Newton-Schulz iterations with Jordan's
/// coefficients.
fn orthogonal(x: &Array, steps: u32) -> Result<Array> {
    const COEFFICIENTS: (f32, f32, f32) = (3.4445, -4.7750, 2.0315);
    let (a, b, c) = COEFFICIENTS;
    let tall = x.dim(-2)? > x.dim(-1)?;
    let mut x = if tall {
        x.swap_axes(-1, -2)?
    } else {
        x.clone()
    };
    let length = x.square()?.sum(&[-2, -1], true)?.sqrt()?;
    x = x.divide(&length.add(&length.scalar_like(1e-7)?)?)?;
    for _ in 0..steps {
        let gram = x.matmul(&x.swap_axes(-1, -2)?)?;
        let mix = times(&gram, b)?.add(&times(&gram.matmul(&gram)?, c)?)?;
        x = times(&x, a)?.add(&mix.matmul(&x)?)?;
    }
    if tall { x.swap_axes(-1, -2) } else { Ok(x) }
}
