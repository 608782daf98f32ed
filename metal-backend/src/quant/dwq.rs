//! Distilled weight quantization, as mlx-lm's `dwq`: rounds codes to nearest, then trains scales
//! and biases so that the model predicts the same next tokens as before quantization.

use std::sync::Arc;

use inference::{Error, ErrorKind, Interrupt, Result};
use mlx_rs_core::{Array, Dtype};

use super::affine::Rounded;
use super::distance::{Pair, batches, parameter};
use super::job::{Job, Target};
use super::walk::Batch;
use crate::adapter::Params;
use crate::error::engine;
use crate::train::{Optimizer, OptimizerConfig};

/// Options of the method.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dwq {
    /// The learning rate of Adam (1e-6).
    pub learning_rate: f32,
    /// The divisor of the logits of both models (2).
    pub temperature: f32,
    /// Whether to recompute blocks in the backward pass: less memory, more time.
    pub grad_checkpoint: bool,
}

impl Default for Dwq {
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            temperature: 2.0,
            grad_checkpoint: false,
        }
    }
}

/// One in this number of batches, but at least one, is used for validation instead of training.
const VALIDATION: usize = 16;

/// A matrix with its codes, which do not change during training.
struct Student {
    target: Target,
    /// uint8 `[.., in]`.
    codes: Array,
    rounded: Rounded,
}

impl Student {
    fn new(target: Target) -> mlx_rs_core::Result<Self> {
        let weight = target.slot.stored_weight(Dtype::Float32)?;
        let mut rounded = target.affine().rounded(&weight)?;
        let codes = rounded.codes.astype(Dtype::Uint8)?;
        mlx_rs_core::eval([&codes, &rounded.scales, &rounded.biases])?;
        // Codes as float32 would need four times the memory.
        rounded.codes = codes.clone();
        Ok(Self {
            target,
            codes,
            rounded,
        })
    }

    fn names(&self) -> [String; 2] {
        let name = self.target.slot.name();
        [format!("{name}.scales"), format!("{name}.biases")]
    }

    /// Returns the matrix with the trained scales and biases.
    fn with(&self, params: &Params) -> mlx_rs_core::Result<Rounded> {
        let [scales, biases] = self.names();
        let part = |name: &str, own: &Array| params.get(name).unwrap_or(own).clone();
        Ok(Rounded {
            codes: self.codes.astype(Dtype::Float32)?,
            scales: part(&scales, &self.rounded.scales),
            biases: part(&biases, &self.rounded.biases),
            affine: self.rounded.affine,
        })
    }
}

impl Dwq {
    /// Returns an error for values that are out of range.
    pub(super) fn check(self) -> Result<()> {
        for (name, value) in [
            ("learning_rate", self.learning_rate),
            ("temperature", self.temperature),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!("{name} is {value}; it must be a number above 0"),
                ));
            }
        }
        Ok(())
    }

    /// Trains the scales and biases of all matrices with fewer than 8 bits.
    pub(super) fn run(self, job: &mut Job<'_>) -> Result<()> {
        let batches = batches(job)?;
        if batches.len() < 2 {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "dwq needs at least two batches, one to train on and one to validate on; give more data, \
                 or a smaller batch size",
            ));
        }
        let held = (batches.len() / VALIDATION).max(1);
        let (validation, training) = batches.split_at(held);
        let loaded = Arc::clone(&job.engine);
        let pair = Pair::new(
            &loaded,
            &job.targets,
            self.temperature,
            self.grad_checkpoint,
        )?;
        let students: mlx_rs_core::Result<Vec<Student>> =
            loaded.scope(|| job.targets.iter().cloned().map(Student::new).collect());
        let students = students.map_err(engine("dwq"))?;
        let weights = |params: &Params| -> mlx_rs_core::Result<Params> {
            let of = |student: &Student| -> mlx_rs_core::Result<(String, Array)> {
                Ok((parameter(&student.target), student.with(params)?.dense()?))
            };
            students.iter().map(of).collect()
        };
        let mut params = Params::new();
        for student in students.iter().filter(|s| s.rounded.affine.bits < 8) {
            let [scales, biases] = student.names();
            params.insert(scales, student.rounded.scales.clone());
            params.insert(biases, student.rounded.biases.clone());
        }
        if params.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "dwq trains matrices with fewer than 8 bits, and there are none",
            ));
        }
        let score = |params: &Params| -> Result<f32> {
            let of = |batch: &Batch| pair.measure(batch, params, &weights);
            let all: Result<Vec<f32>> = validation.iter().map(of).collect();
            Ok(all?.iter().sum::<f32>() / validation.len() as f32)
        };
        let before = score(&params)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::Adam {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            bias_correction: true,
        });
        let interrupt = Interrupt::new().with_cancel(job.cancel.clone());
        let mut trained = params.clone();
        for (at, batch) in training.iter().enumerate() {
            interrupt.check()?;
            (job.progress)("distilling", at as u64, training.len() as u64);
            let (_, grads) = pair.gradients(batch, &trained, &weights)?;
            trained = loaded
                .scope(|| optimizer.update(&trained, &grads, self.learning_rate))
                .map_err(engine("dwq"))?;
        }
        (job.progress)("distilling", training.len() as u64, training.len() as u64);
        let after = score(&trained)?;
        job.notes.push(format!(
            "divergence from the model on validation data: {before:.5} before, {after:.5} after training"
        ));
        if after < before {
            params = trained;
        } else {
            job.notes.push(String::from(
                "the training did not help, so that the result is that of plain rounding; change the \
                 learning rate or the data",
            ));
        }
        for student in &students {
            let packed = || {
                let mut rounded = student.with(&params)?;
                rounded.scales = rounded.affine.stored(&rounded.scales)?;
                rounded.biases = rounded.affine.stored(&rounded.biases)?;
                rounded.packed()
            };
            let packed = loaded.scope(packed).map_err(engine("dwq"))?;
            let path = student.target.planned.path.clone();
            job.given.packed.insert(path, packed);
        }
        Ok(())
    }
}
