//! Optimizers compute new parameters from parameters and gradients. The formulas are those of MLX's
//! `mlx.optimizers`, with one difference: moments are float32 for all parameter types, so that
//! small updates of half-precision parameters are not lost.

mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use inference::{Error as ApiError, ErrorKind as ApiErrorKind};
use mlx_rs_core::{All, Array, Dtype, Error, ErrorKind, Result, eval};
use serde::{Deserialize, Serialize};

use crate::adapter::Params;
use rules::Step;

/// An optimizer with its hyperparameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerConfig {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019):
    /// `p * (1 - lr * wd) - lr * m^ / (sqrt(v^) + eps)`.
    AdamW {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Epsilon, added to the square root of the second moment.
        eps: f32,
        /// Decay of the parameters.
        weight_decay: f32,
        /// Whether moments are corrected for their start at zero. MLX's default is `false`.
        bias_correction: bool,
    },
    /// Adam (Kingma and Ba 2015).
    Adam {
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Epsilon, added to the square root of the second moment.
        eps: f32,
        /// Whether moments are corrected for their start at zero.
        bias_correction: bool,
    },
    /// Gradient descent with momentum.
    Sgd {
        /// The fraction of the previous update that is added to the next update.
        momentum: f32,
        /// Weight decay, added to the gradient.
        weight_decay: f32,
        /// The momentum adds `(1 - dampening) * gradient`.
        dampening: f32,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
    },
    /// The sign of a moving average (Chen et al. 2023).
    Lion {
        /// Weight of the moving average `m` in the update `sign(beta1 * m + (1 - beta1) * grad)`.
        beta1: f32,
        /// Decay of the moving average between steps.
        beta2: f32,
        /// Decay of the parameters.
        weight_decay: f32,
    },
    /// Second moments factored by rows and columns (Shazeer and Stern 2018).
    Adafactor {
        /// Epsilon, added to squared gradients.
        eps: f32,
        /// The minimum scale of a parameter.
        eps_scale: f32,
        /// The maximum root mean square of an update.
        clip_threshold: f32,
        /// The exponent in the decay of the second moment, `1 - step^decay_rate`.
        decay_rate: f32,
        /// Decay of a moving average of updates; `None` disables it.
        beta1: Option<f32>,
        /// Decay of the parameters.
        weight_decay: f32,
        /// Whether updates scale with the parameter's root mean square.
        scale_parameter: bool,
        /// Whether the rate is `min(0.01, 1 / sqrt(step))` instead of the schedule's rate.
        relative_step: bool,
    },
    /// Orthogonalized momentum (Jordan et al. 2024) for matrices, plain momentum for other
    /// parameters.
    Muon {
        /// Decay of the moving average.
        momentum: f32,
        /// Weight decay, added to the gradient.
        weight_decay: f32,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
        /// The number of Newton-Schulz iterations.
        ns_steps: u32,
    },
}

impl OptimizerConfig {
    /// AdamW with beta 0.9 and 0.999, epsilon 1e-8, weight decay 0.01 and bias correction.
    #[must_use]
    pub fn adamw() -> Self {
        Self::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            bias_correction: true,
        }
    }

    /// Returns an optimizer by name, with its default hyperparameters: `adamw`, `adam`, `sgd`,
    /// `lion`, `adafactor` or `muon`.
    ///
    /// # Errors
    /// [`ApiErrorKind::InvalidOption`] for an unknown name, with a list of the known names.
    pub fn from_name(name: &str) -> Result<Self, ApiError> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "adamw" => Self::adamw(),
            "adam" => Self::Adam {
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                bias_correction: true,
            },
            "sgd" => Self::Sgd {
                momentum: 0.0,
                weight_decay: 0.0,
                dampening: 0.0,
                nesterov: false,
            },
            "lion" => Self::Lion {
                beta1: 0.9,
                beta2: 0.99,
                weight_decay: 0.0,
            },
            "adafactor" => Self::Adafactor {
                eps: 1e-30,
                eps_scale: 1e-3,
                clip_threshold: 1.0,
                decay_rate: -0.8,
                beta1: None,
                weight_decay: 0.0,
                scale_parameter: true,
                relative_step: false,
            },
            "muon" => Self::Muon {
                momentum: 0.95,
                weight_decay: 0.01,
                nesterov: true,
                ns_steps: 5,
            },
            _ => {
                return Err(ApiError::new(
                    ApiErrorKind::InvalidOption,
                    format!(
                        "there is no optimizer {name:?}; there are adamw, adam, sgd, lion, adafactor and muon"
                    ),
                ));
            }
        })
    }
}

impl OptimizerConfig {
    /// Returns the values that vary between steps, for step `step` (the first is 1) at learning
    /// rate `rate`. The first value is the effective learning rate of the step.
    fn numbers(&self, step: u64, rate: f32) -> Vec<f32> {
        // Double precision, because single precision loses digits of 1 - 0.999.
        let seen = |beta: f32| 1.0 - f64::from(beta).powf(step as f64);
        // Returns the learning rate, and a factor for the square root of the second moment. If
        // `corrected`, both include Adam's bias correction.
        let adam = |beta1: f32, beta2: f32, corrected: bool| {
            if corrected {
                let rate = (f64::from(rate) / seen(beta1)) as f32;
                (rate, (1.0 / seen(beta2).sqrt()) as f32)
            } else {
                (rate, 1.0)
            }
        };
        match *self {
            Self::AdamW {
                beta1,
                beta2,
                weight_decay,
                bias_correction,
                ..
            } => {
                let (stepped, root) = adam(beta1, beta2, bias_correction);
                vec![stepped, root, 1.0 - rate * weight_decay]
            }
            Self::Adam {
                beta1,
                beta2,
                bias_correction,
                ..
            } => {
                let (stepped, root) = adam(beta1, beta2, bias_correction);
                vec![stepped, root]
            }
            Self::Sgd { .. } | Self::Muon { .. } => vec![rate],
            Self::Lion { weight_decay, .. } => vec![rate, 1.0 - rate * weight_decay],
            Self::Adafactor {
                decay_rate,
                relative_step,
                ..
            } => {
                let step = step as f32;
                let rate = if relative_step {
                    step.sqrt().recip().min(1e-2)
                } else {
                    rate
                };
                let beta2 = 1.0 - step.powf(decay_rate);
                vec![rate, beta2, 1.0 - beta2]
            }
        }
    }
}

/// An optimizer with its state.
#[derive(Debug, Clone)]
pub struct Optimizer {
    config: OptimizerConfig,
    steps: u64,
    /// State by parameter name and part, such as `model.layers.0.self_attn.q_proj.lora_a/m`.
    state: Params,
    turned: Arc<BTreeSet<String>>,
}

impl Optimizer {
    /// Creates an optimizer without state.
    #[must_use]
    pub fn new(config: OptimizerConfig) -> Self {
        Self {
            config,
            steps: 0,
            state: Params::new(),
            turned: Arc::default(),
        }
    }

    /// Sets the names of matrices that mlx-lm stores transposed, because Muon's rate depends on a
    /// matrix's shape.
    #[must_use]
    pub fn with_turned(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.turned = Arc::new(names.into_iter().collect());
        self
    }

    /// The names set by [`Self::with_turned`].
    pub(super) fn turned(&self) -> &Arc<BTreeSet<String>> {
        &self.turned
    }

    /// The optimizer's configuration.
    #[must_use]
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }

    /// The number of updates.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the state that must be saved; see [`Self::restore`].
    #[must_use]
    pub fn state(&self) -> &Params {
        &self.state
    }

    /// Continues from the saved state of an optimizer of the same kind after `steps` updates.
    pub fn restore(&mut self, steps: u64, state: Params) {
        (self.steps, self.state) = (steps, state);
    }

    /// Computes new parameters from gradients with the same names, at learning rate `rate`.
    /// Evaluates the result, so that no graph accumulates.
    ///
    /// # Errors
    /// If a gradient is missing or has another shape, or memory runs out. The optimizer does not
    /// change then.
    pub fn update(&mut self, params: &Params, grads: &Params, rate: f32) -> Result<Params> {
        let numbers = self.numbers(rate)?;
        let (next, state) = apply(
            &self.config,
            &self.turned,
            params,
            grads,
            &self.state,
            &numbers,
        )?;
        eval(next.values().chain(state.values()))?;
        self.advance(state);
        Ok(next)
    }

    /// Returns the values of the next step that vary between steps, at learning rate `rate`. They
    /// are float32 scalars, so that they can be arguments of a compiled step.
    pub(super) fn numbers(&self, rate: f32) -> Result<Vec<Array>> {
        let all = self.config.numbers(self.steps + 1, rate);
        all.into_iter().map(Array::scalar).collect()
    }

    /// Counts one update, and sets the state that [`apply`] returned.
    pub(super) fn advance(&mut self, state: Params) {
        self.steps += 1;
        self.state = state;
    }
}

/// Computes new parameters and state from the old state and from gradients with the same names.
/// Evaluates nothing. `numbers` come from [`Optimizer::numbers`], `turned` from
/// [`Optimizer::with_turned`].
///
/// # Errors
/// If a gradient is missing or has another shape.
pub(super) fn apply(
    config: &OptimizerConfig,
    turned: &BTreeSet<String>,
    params: &Params,
    grads: &Params,
    old: &Params,
    numbers: &[Array],
) -> Result<(Params, Params)> {
    let (mut next, mut state) = (Params::new(), Params::new());
    for (name, param) in params {
        let fault = |what: String| Error::new(ErrorKind::Value, "optimizer", what);
        let grad = grads
            .get(name)
            .ok_or_else(|| fault(format!("there is no gradient of `{name}`")))?;
        if grad.shape() != param.shape() {
            return Err(fault(format!(
                "the gradient of `{name}` is {:?}, the parameter {:?}",
                grad.shape(),
                param.shape()
            )));
        }
        let mut step = Step {
            name,
            turned: turned.contains(name),
            old,
            new: &mut state,
            grad: grad.astype(Dtype::Float32)?,
            param: param.astype(Dtype::Float32)?,
            numbers,
        };
        let value = step.update(config)?;
        next.insert(name.clone(), value.astype(param.dtype())?);
    }
    Ok((next, state))
}

/// Returns the global norm of all gradients, a float32 scalar.
///
/// # Errors
/// If memory runs out.
pub fn global_norm(grads: &Params) -> Result<Array> {
    let mut sum = Array::scalar(0.0f32)?;
    for grad in grads.values() {
        sum = sum.add(&grad.astype(Dtype::Float32)?.square()?.sum(All, false)?)?;
    }
    sum.sqrt()
}

/// Scales gradients down to a global norm of at most `max`. Returns the scaled gradients and the
/// original norm.
///
/// # Errors
/// If memory runs out.
pub fn clip_by_global_norm(grads: &Params, max: f32) -> Result<(Params, Array)> {
    let norm = global_norm(grads)?;
    // As in MLX, the epsilon prevents a division by zero for zero gradients.
    let factor = norm
        .scalar_like(max)?
        .divide(&norm.add(&norm.scalar_like(1e-6)?)?)?;
    let factor = factor.minimum(&factor.scalar_like(1.0)?)?;
    let clipped: Result<BTreeMap<_, _>> = grads
        .iter()
        .map(|(name, g)| Ok((name.clone(), g.multiply(&factor.astype(g.dtype())?)?)))
        .collect();
    Ok((clipped?, norm))
}
