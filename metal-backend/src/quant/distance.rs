//! Measures how much a quantized model differs from the original model: the Kullback-Leibler
//! divergence of their next-token distributions, and its gradients.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::transforms::value_and_grad_tree;
use mlx_rs_core::{All, Array, Dtype, eval};

use super::job::{Job, Target};
use super::walk::Batch;
use crate::adapter::Params;
use crate::arch::Decoder;
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Delta, Scope, within};
use crate::nn::hooks::Watch;

/// Returns the mean over positions of `KL(teacher || student)`, a scalar. Logits are `[1, T,
/// vocab]`, and are divided by `temperature`.
pub(super) fn divergence(
    student: &Array,
    teacher: &Array,
    temperature: f32,
) -> mlx_rs_core::Result<Array> {
    let logprobs = |logits: &Array| {
        let logits = logits.astype(Dtype::Float32)?;
        let logits = logits.divide(&logits.scalar_like(temperature)?)?;
        logits.subtract(&logits.logsumexp(-1, true)?)
    };
    let (student, teacher) = (logprobs(student)?, logprobs(teacher)?);
    teacher
        .exp()?
        .multiply(&teacher.subtract(&student)?)?
        .sum(-1, false)?
        .mean(All, false)
}

/// Computes a student's weights, float32, from its parameters. The keys are parameter names in
/// [`Scope::params`].
pub(super) type Weights<'a> = dyn Fn(&Params) -> mlx_rs_core::Result<Params> + 'a;

/// A model (teacher) and its quantized form (student). Both use one decoder: the student's weights
/// replace the teacher's during a pass.
pub(super) struct Pair<'a> {
    engine: &'a Engine,
    decoder: Arc<dyn Decoder>,
    temperature: f32,
    checkpoint: bool,
}

impl<'a> Pair<'a> {
    /// Makes the weights of `targets` replaceable by parameters with the names from [`parameter`].
    pub fn new(
        engine: &'a Engine,
        targets: &[Target],
        temperature: f32,
        checkpoint: bool,
    ) -> Result<Self> {
        let decoder = engine.decoder()?;
        let placeholder = engine
            .scope(|| Array::scalar(0.0f32))
            .map_err(crate::error::engine("quantize"))?;
        engine.passes().change(targets.iter().map(|target| {
            let delta = Delta::Whole(placeholder.clone());
            (Arc::clone(&target.slot), Some(delta))
        }));
        Ok(Self {
            engine,
            decoder,
            temperature,
            checkpoint,
        })
    }

    /// Returns the teacher's logits for a batch, evaluated.
    fn teacher(&self, batch: &Batch) -> mlx_rs_core::Result<Array> {
        let scope = Scope {
            without_adapters: true,
            constant: true,
            ..Scope::default()
        };
        let logits = within(Arc::new(scope), || {
            batch.forward(self.decoder.as_ref(), &mut Watch::nothing())
        })?;
        logits.eval()?;
        Ok(logits)
    }

    fn distance(
        &self,
        batch: &Batch,
        (weights, constant): (Params, bool),
        teacher: &Array,
    ) -> mlx_rs_core::Result<Array> {
        let scope = Scope {
            params: weights,
            checkpoint: self.checkpoint && !constant,
            constant,
            ..Scope::default()
        };
        let student = within(Arc::new(scope), || {
            batch.forward(self.decoder.as_ref(), &mut Watch::nothing())
        })?;
        divergence(&student, teacher, self.temperature)
    }

    /// Returns the divergence on a batch.
    pub fn measure(&self, batch: &Batch, params: &Params, weights: &Weights<'_>) -> Result<f32> {
        let run = || -> mlx_rs_core::Result<f32> {
            let teacher = self.teacher(batch)?;
            self.distance(batch, (weights(params)?, true), &teacher)?
                .item::<f32>()
        };
        self.engine.scope(run).map_err(engine("distance"))
    }

    /// Returns the divergence on a batch, and its gradients with respect to `params`. `weights`
    /// computes the student's weights from `params`.
    ///
    /// # Errors
    /// [`ErrorKind::Engine`] if the divergence is not finite.
    pub fn gradients(
        &self,
        batch: &Batch,
        params: &Params,
        weights: &Weights<'_>,
    ) -> Result<(f32, Params)> {
        let run = || -> mlx_rs_core::Result<_> {
            let teacher = self.teacher(batch)?;
            let (loss, (), grads) = value_and_grad_tree(params, |params: &Params| {
                let loss = self.distance(batch, (weights(params)?, false), &teacher)?;
                Ok::<_, mlx_rs_core::Error>((loss, ()))
            })?;
            eval(grads.values().chain([&loss]))?;
            Ok((loss.item::<f32>()?, grads))
        };
        let (loss, grads) = self.engine.scope(run).map_err(engine("gradients"))?;
        if !loss.is_finite() {
            return Err(Error::new(
                ErrorKind::Engine,
                "the divergence from the model is not finite; check the model, or lower the learning rate",
            ));
        }
        Ok((loss, grads))
    }
}

/// Returns the name of a target's weight in [`Scope::params`].
pub(super) fn parameter(target: &Target) -> String {
    format!("{}.{}", target.slot.name(), target.slot.end())
}

/// Returns the job's sequences in batches.
pub(super) fn batches(job: &Job<'_>) -> Result<Vec<Batch>> {
    let chunks = job.sequences.chunks(job.batch_size.max(1));
    let all: mlx_rs_core::Result<Vec<Batch>> =
        job.engine.scope(|| chunks.map(Batch::new).collect());
    all.map_err(engine("calibration"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergences_are_those_of_the_definition() {
        let (p, q) = ([0.5f32, 0.25, 0.25], [0.25f32, 0.5, 0.25]);
        let logits = |p: &[f32; 3]| Array::from_slice(&p.map(f32::ln), &[1, 1, 3]).unwrap();
        let value = |t| {
            let d = divergence(&logits(&q), &logits(&p), t).unwrap();
            d.item::<f32>().unwrap()
        };
        // 0.5 ln 2 + 0.25 ln 0.5
        assert!(
            (value(1.0) - 0.25 * 2f32.ln()).abs() < 1e-6,
            "{}",
            value(1.0)
        );
        let same = divergence(&logits(&p), &logits(&p), 2.0).unwrap();
        assert!(same.item::<f32>().unwrap().abs() < 1e-6);
        assert!(value(2.0) < value(1.0) && value(2.0) > 0.0);
    }
}
