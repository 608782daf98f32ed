//! Learning-rate schedules of MLX's `optimizers.schedulers` and mlx-lm's `lr_schedule`. Steps count
//! from 0.

use inference::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The maximum learning rate. With a higher rate, hidden states overflow. Norms hide the overflow,
/// and the loss becomes that of equally likely tokens.
const MAX_RATE: f32 = 10_000.0;

/// How a learning rate changes after its warmup.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// No change.
    Constant,
    /// Changes linearly to `end` over `steps` steps.
    Linear {
        /// The final rate.
        end: f32,
        /// The number of steps.
        steps: u64,
    },
    /// Follows half a cosine wave to `end` over `steps` steps (Loshchilov and Hutter 2017).
    Cosine {
        /// The final rate.
        end: f32,
        /// The number of steps.
        steps: u64,
    },
    /// Multiplies the rate by `factor` after every `every` steps.
    Steps {
        /// The factor.
        factor: f32,
        /// The number of steps between two changes.
        every: u64,
    },
}

/// A learning rate for each step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The rate at the end of the warmup.
    pub rate: f32,
    /// The decay after the warmup.
    pub decay: Decay,
    /// Steps of linear warmup from `warmup_init` to `rate`; 0 disables it.
    pub warmup: u64,
    /// The rate at the start of the warmup.
    pub warmup_init: f32,
}

impl Schedule {
    /// Returns a schedule with a constant rate.
    #[must_use]
    pub fn constant(rate: f32) -> Self {
        Self {
            rate,
            decay: Decay::Constant,
            warmup: 0,
            warmup_init: 0.0,
        }
    }

    /// Sets the decay.
    #[must_use]
    pub fn with_decay(mut self, decay: Decay) -> Self {
        self.decay = decay;
        self
    }

    /// Sets a warmup of `steps` steps from `init`.
    #[must_use]
    pub fn with_warmup(mut self, steps: u64, init: f32) -> Self {
        (self.warmup, self.warmup_init) = (steps, init);
        self
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`], with the field.
    pub fn validate(&self) -> Result<()> {
        let end = match self.decay {
            Decay::Constant => 0.0,
            Decay::Steps { factor, every } => {
                if every == 0 {
                    let message = "the schedule's steps are 0; they must be at least 1";
                    return Err(Error::new(ErrorKind::InvalidOption, message));
                }
                factor
            }
            Decay::Linear { end, steps } | Decay::Cosine { end, steps } => {
                if steps == 0 {
                    let message = "the schedule's steps are 0; they must be at least 1";
                    return Err(Error::new(ErrorKind::InvalidOption, message));
                }
                end
            }
        };
        for (name, value) in [
            ("learning rate", self.rate),
            ("end or factor of the schedule", end),
            ("start of the warm-up", self.warmup_init),
        ] {
            if !(0.0..=MAX_RATE).contains(&value) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!("the {name} is {value}; it must be a number from 0 to {MAX_RATE}"),
                ));
            }
        }
        Ok(())
    }

    /// Returns the learning rate of step `step`.
    #[must_use]
    pub fn at(&self, step: u64) -> f32 {
        let straight = |from: f32, to: f32, step: u64, steps: u64| {
            let share = step.min(steps) as f64 / steps as f64;
            (f64::from(from) + (f64::from(to) - f64::from(from)) * share) as f32
        };
        let step = if self.warmup == 0 {
            step
        } else if step <= self.warmup {
            return straight(self.warmup_init, self.rate, step, self.warmup);
        } else {
            step - self.warmup - 1
        };
        match self.decay {
            Decay::Constant => self.rate,
            Decay::Linear { end, steps } => straight(self.rate, end, step, steps.max(1)),
            Decay::Steps { factor, every } => {
                let times = i32::try_from(step / every.max(1)).unwrap_or(i32::MAX);
                (f64::from(self.rate) * f64::from(factor).powi(times)) as f32
            }
            Decay::Cosine { end, steps } => {
                let share = step.min(steps) as f64 / steps.max(1) as f64;
                let left = 0.5 * (1.0 + (std::f64::consts::PI * share).cos());
                (f64::from(end) + left * (f64::from(self.rate) - f64::from(end))) as f32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_go_up_and_down() {
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-7, "{a} {b}");
        near(Schedule::constant(0.1).at(1_000_000), 0.1);
        let linear = Schedule::constant(1.0).with_decay(Decay::Linear { end: 0.2, steps: 4 });
        near(linear.at(0), 1.0);
        near(linear.at(1), 0.8);
        near(linear.at(9), 0.2);
        let cosine = Schedule::constant(1.0).with_decay(Decay::Cosine {
            end: 0.0,
            steps: 10,
        });
        near(cosine.at(5), 0.5);
        near(cosine.at(11), 0.0);
        let warm = cosine.with_warmup(4, 0.0);
        near(warm.at(0), 0.0);
        near(warm.at(1), 0.25);
        near(warm.at(4), 1.0);
        near(warm.at(5), 1.0);
        near(warm.at(10), 0.5);
    }

    #[test]
    fn bad_numbers_are_refused() {
        assert!(Schedule::constant(f32::NAN).validate().is_err());
        assert!(Schedule::constant(-1.0).validate().is_err());
        let none = Decay::Cosine { end: 0.0, steps: 0 };
        assert!(Schedule::constant(1.0).with_decay(none).validate().is_err());
        Schedule::constant(0.0).validate().unwrap();
    }
}
