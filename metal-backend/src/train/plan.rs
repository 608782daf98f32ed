//! Converts a run's options to the trainer's types: adapter, optimizer and schedule. Checks options
//! before a model is loaded, as far as possible.

use std::collections::{BTreeMap, BTreeSet};

use inference::{Error, ErrorKind, LoraConfig, Result};

use super::config::{FineTuneType, LrSchedule, OptimizerName, Setting, TrainConfig};
use super::schedule::{Decay, Schedule};
use super::{OptimizerConfig, Tuning};
use crate::adapter::AdapterKind;

pub(super) fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Checks all options that do not depend on the model.
///
/// # Errors
/// [`ErrorKind::InvalidOption`], with the field.
pub fn check(config: &TrainConfig) -> Result<()> {
    config.validate()?;
    tuning(config)?;
    lora(config, &BTreeSet::from([String::from("any")])).map(drop)
}

/// The kind of adapter.
#[must_use]
pub fn kind(config: &TrainConfig) -> AdapterKind {
    match config.fine_tune_type {
        FineTuneType::Lora => AdapterKind::Lora,
        FineTuneType::Dora => AdapterKind::Dora,
        FineTuneType::Full => AdapterKind::Full,
    }
}

/// Returns the adapter's shape. `all` are the names of the model's linear layers in a block, such
/// as `self_attn.q_proj`.
///
/// # Errors
/// [`ErrorKind::InvalidOption`], with the field.
pub fn lora(config: &TrainConfig, all: &BTreeSet<String>) -> Result<LoraConfig> {
    let parameters = &config.lora_parameters;
    let targets = match &parameters.keys {
        Some(keys) => keys.clone(),
        None => all.iter().cloned().collect(),
    };
    let num_layers = match config.num_layers {
        -1 => None,
        n => Some(usize::try_from(n).map_err(|_| bad(format!("num_layers is {n}")))?),
    };
    let lora = LoraConfig::new()
        .with_rank(parameters.rank)
        .with_alpha(parameters.scale * parameters.rank as f32)
        .with_dropout(parameters.dropout)
        .with_targets(targets)
        .with_num_layers(num_layers);
    lora.validate()?;
    Ok(lora)
}

/// The options of training steps.
///
/// # Errors
/// [`ErrorKind::InvalidOption`], with the field.
pub fn tuning(config: &TrainConfig) -> Result<Tuning> {
    let schedule = schedule(config)?;
    schedule.validate()?;
    Ok(Tuning {
        optimizer: optimizer(config)?,
        schedule,
        accumulation: config.grad_accumulation_steps,
        clip: config.max_grad_norm.map(|n| n as f32),
        checkpoint: config.grad_checkpoint,
        compile: config.compile,
        seed: u64::from(config.seed),
    })
}

fn schedule(config: &TrainConfig) -> Result<Schedule> {
    let Some(LrSchedule {
        name,
        arguments,
        warmup,
        warmup_init,
    }) = &config.lr_schedule
    else {
        return Ok(Schedule::constant(config.learning_rate as f32));
    };
    let steps = |value: f64| {
        if value >= 1.0 && value.fract() == 0.0 && value < 1e15 {
            Ok(value as u64)
        } else {
            Err(bad(format!(
                "lr_schedule.arguments of {name}: {value} is not a number of steps"
            )))
        }
    };
    let (rate, decay) = match (name.as_str(), arguments.as_slice()) {
        ("constant", &[rate]) => (rate, Decay::Constant),
        ("cosine_decay", &[rate, n]) => {
            let steps = steps(n)?;
            (rate, Decay::Cosine { end: 0.0, steps })
        }
        ("cosine_decay", &[rate, n, end]) => {
            let (end, steps) = (end as f32, steps(n)?);
            (rate, Decay::Cosine { end, steps })
        }
        ("linear_schedule", &[rate, end, n]) => {
            let (end, steps) = (end as f32, steps(n)?);
            (rate, Decay::Linear { end, steps })
        }
        ("exponential_decay", &[rate, factor]) => {
            let (factor, every) = (factor as f32, 1);
            (rate, Decay::Steps { factor, every })
        }
        ("step_decay", &[rate, factor, n]) => {
            let (factor, every) = (factor as f32, steps(n)?);
            (rate, Decay::Steps { factor, every })
        }
        _ => {
            return Err(bad(format!(
                "lr_schedule {name} does not take {} arguments",
                arguments.len()
            )));
        }
    };
    Ok(Schedule::constant(rate as f32)
        .with_decay(decay)
        .with_warmup(*warmup, *warmup_init as f32))
}

/// The options of the selected optimizer in `optimizer_config`. Reading an option removes it from
/// `left`, so the options that remain are unknown.
struct Settings<'a> {
    name: &'a str,
    left: BTreeMap<String, Setting>,
}

impl Settings<'_> {
    fn wrong(&self, key: &str, wanted: &str) -> Error {
        bad(format!(
            "optimizer_config.{}.{key} must be {wanted}",
            self.name
        ))
    }

    fn number(&mut self, key: &str, default: f64) -> Result<f32> {
        match self.left.remove(key) {
            None => Ok(default as f32),
            Some(Setting::Number(n)) if n.is_finite() => Ok(n as f32),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    fn pair(&mut self, key: &str, default: [f64; 2]) -> Result<[f32; 2]> {
        match self.left.remove(key) {
            None => Ok(default.map(|n| n as f32)),
            Some(Setting::Numbers(n)) if n.len() == 2 && n.iter().all(|n| n.is_finite()) => {
                Ok([n[0] as f32, n[1] as f32])
            }
            Some(_) => Err(self.wrong(key, "two numbers")),
        }
    }

    fn flag(&mut self, key: &str, default: bool) -> Result<bool> {
        match self.left.remove(key) {
            None => Ok(default),
            Some(Setting::Flag(yes)) => Ok(yes),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    fn share(&mut self, key: &str, default: f64) -> Result<f32> {
        let n = self.number(key, default)?;
        if (0.0..1.0).contains(&n) {
            return Ok(n);
        }
        Err(self.wrong(key, "a number from 0 to below 1"))
    }

    fn betas(&mut self, default: [f64; 2]) -> Result<(f32, f32)> {
        let [a, b] = self.pair("betas", default)?;
        if [a, b].iter().all(|n| (0.0..1.0).contains(n)) {
            return Ok((a, b));
        }
        Err(self.wrong("betas", "two numbers from 0 to below 1"))
    }
}

/// Returns the optimizer with MLX's defaults, as in mlx-lm. They partly differ from
/// [`OptimizerConfig::from_name`]: for example, there is no bias correction. Only Adafactor differs
/// from MLX: it uses the given learning rate.
fn optimizer(config: &TrainConfig) -> Result<OptimizerConfig> {
    let name = match config.optimizer {
        OptimizerName::Adam => "adam",
        OptimizerName::AdamW => "adamw",
        OptimizerName::Muon => "muon",
        OptimizerName::Sgd => "sgd",
        OptimizerName::Adafactor => "adafactor",
        OptimizerName::Lion => "lion",
    };
    let left = config.optimizer_config.get(&config.optimizer);
    let mut s = Settings {
        name,
        left: left.cloned().unwrap_or_default(),
    };
    let made = match config.optimizer {
        OptimizerName::Adam => {
            let (beta1, beta2) = s.betas([0.9, 0.999])?;
            OptimizerConfig::Adam {
                beta1,
                beta2,
                eps: s.number("eps", 1e-8)?,
                bias_correction: s.flag("bias_correction", false)?,
            }
        }
        OptimizerName::AdamW => {
            let (beta1, beta2) = s.betas([0.9, 0.999])?;
            OptimizerConfig::AdamW {
                beta1,
                beta2,
                eps: s.number("eps", 1e-8)?,
                weight_decay: s.number("weight_decay", 0.01)?,
                bias_correction: s.flag("bias_correction", false)?,
            }
        }
        OptimizerName::Muon => OptimizerConfig::Muon {
            momentum: s.share("momentum", 0.95)?,
            weight_decay: s.number("weight_decay", 0.01)?,
            nesterov: s.flag("nesterov", true)?,
            ns_steps: match s.number("ns_steps", 5.0)? {
                n if (1.0..=100.0).contains(&n) && n.fract() == 0.0 => n as u32,
                _ => return Err(s.wrong("ns_steps", "a whole number from 1 to 100")),
            },
        },
        OptimizerName::Sgd => OptimizerConfig::Sgd {
            momentum: s.share("momentum", 0.0)?,
            weight_decay: s.number("weight_decay", 0.0)?,
            dampening: s.number("dampening", 0.0)?,
            nesterov: s.flag("nesterov", false)?,
        },
        OptimizerName::Adafactor => {
            let [eps, eps_scale] = s.pair("eps", [1e-30, 1e-3])?;
            // MLX's default is `true`, which would ignore the configured learning rate.
            let relative_step = s.flag("relative_step", false)?;
            let beta1 = match s.left.contains_key("beta_1") {
                true => Some(s.share("beta_1", 0.0)?),
                false => None,
            };
            OptimizerConfig::Adafactor {
                eps,
                eps_scale,
                clip_threshold: s.number("clip_threshold", 1.0)?,
                decay_rate: s.number("decay_rate", -0.8)?,
                beta1,
                weight_decay: s.number("weight_decay", 0.0)?,
                scale_parameter: s.flag("scale_parameter", true)?,
                relative_step,
            }
        }
        OptimizerName::Lion => {
            let (beta1, beta2) = s.betas([0.9, 0.99])?;
            OptimizerConfig::Lion {
                beta1,
                beta2,
                weight_decay: s.number("weight_decay", 0.0)?,
            }
        }
    };
    if let Some(key) = s.left.keys().next() {
        return Err(bad(format!(
            "optimizer_config.{name}.{key} is unknown; see the optimizer's settings in docs/training.md"
        )));
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(yaml: &str) -> Result<Tuning> {
        TrainConfig::from_yaml(yaml).and_then(|c| tuning(&c))
    }

    #[test]
    fn settings_reach_the_optimizer() {
        let made =
            read("optimizer: adamw\noptimizer_config: {adamw: {betas: [0.8, 0.9], eps: 0.5}}")
                .unwrap();
        let expected = OptimizerConfig::AdamW {
            beta1: 0.8,
            beta2: 0.9,
            eps: 0.5,
            weight_decay: 0.01,
            bias_correction: false,
        };
        assert_eq!(made.optimizer, expected);
        for name in ["adam", "adamw", "muon", "sgd", "adafactor", "lion"] {
            read(&format!("optimizer: {name}")).unwrap();
        }
        for (yaml, what) in [
            (
                "optimizer_config: {adam: {weight: 1.0}}",
                "adam.weight is unknown",
            ),
            (
                "optimizer_config: {adam: {eps: true}}",
                "adam.eps must be a number",
            ),
            ("optimizer_config: {adam: {betas: [0.5, 1.0]}}", "below 1"),
            ("optimizer_config: {adam: {betas: 0.5}}", "two numbers"),
        ] {
            let error = read(yaml).unwrap_err().to_string();
            assert!(error.contains(what), "{yaml}: {error}");
        }
        // Options of other optimizers must be ignored.
        read("optimizer_config: {sgd: {momentum: 0.9}}").unwrap();
    }

    #[test]
    fn schedules_are_mlx_s() {
        let at = |yaml: &str, step| read(yaml).unwrap().schedule.at(step);
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} {b}");
        near(at("learning_rate: 0.5", 9), 0.5);
        let yaml = "lr_schedule: {name: cosine_decay, arguments: [0.1, 10, 0.02], warmup: 2, warmup_init: 0.0}";
        near(at(yaml, 1), 0.05);
        near(at(yaml, 100), 0.02);
        near(
            at(
                "lr_schedule: {name: linear_schedule, arguments: [0.4, 0.2, 2]}",
                1,
            ),
            0.3,
        );
        near(
            at(
                "lr_schedule: {name: exponential_decay, arguments: [0.4, 0.5]}",
                2,
            ),
            0.1,
        );
        near(
            at(
                "lr_schedule: {name: step_decay, arguments: [0.4, 0.5, 10]}",
                19,
            ),
            0.2,
        );
        near(
            at("lr_schedule: {name: constant, arguments: [0.4]}", 3),
            0.4,
        );
        assert!(read("lr_schedule: {name: cosine_decay, arguments: [0.1, 0.5]}").is_err());
    }

    #[test]
    fn layers_are_those_named_or_all() {
        let all: BTreeSet<String> = ["mlp.up_proj", "self_attn.q_proj"].map(String::from).into();
        let made = lora(&TrainConfig::from_yaml("num_layers: -1").unwrap(), &all).unwrap();
        assert_eq!(made.targets.len(), 2);
        assert_eq!((made.num_layers, made.scale()), (None, 20.0));
        let yaml = "lora_parameters: {keys: [self_attn.q_proj], rank: 4, scale: 2.0}";
        let made = lora(&TrainConfig::from_yaml(yaml).unwrap(), &all).unwrap();
        assert_eq!(made.targets, ["self_attn.q_proj"]);
        assert_eq!((made.num_layers, made.scale()), (Some(16), 2.0));
    }
}
