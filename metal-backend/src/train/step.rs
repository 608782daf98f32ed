//! One training step: reads sequences, changes the parameters, and returns the loss. The caller
//! implements the loop, data, reports and files.

mod compiled;
mod contrastive;
mod judge;
mod odds_ratio;
mod packed;
mod policy;
mod preference;
mod types;
mod unpaired;

use std::path::Path;
use std::sync::Arc;

use inference::{Adapter as _, Error, ErrorKind, LoadOptions, LoraConfig, Result, TextModel};
use mlx_rs_core::transforms::{Tree, value_and_grad_tree};
use mlx_rs_core::{All, Array, eval};

use super::optim::{Optimizer, clip_by_global_norm};
use super::together::Together;
use crate::adapter::{AdapterKind, LoraAdapter, Params};
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Dropout, Scope, within};
use compiled::Graphs;
pub(super) use contrastive::evaluate_similarity_on;
pub(super) use judge::evaluate_on;
pub(super) use odds_ratio::evaluate_odds_ratio_on;
use packed::{Packed, check};
pub(super) use preference::evaluate_pairs_on;
pub use types::{
    Compile, Evaluation, ItemEvaluation, JudgedReply, PolicyReport, Preference, PreferenceReport,
    RelatedTexts, Rollout, Sequence, StepReport, Tuning,
};
pub(super) use unpaired::evaluate_verdicts_on;

/// A model in training.
pub struct Trainer {
    engine: Arc<Engine>,
    model: Box<dyn TextModel>,
    adapter: LoraAdapter,
    optimizer: Optimizer,
    tuning: Tuning,
    batches: u64,
    /// Gradients accumulated since the last update.
    gathered: Option<Params>,
    /// Compiled steps, if enabled.
    graphs: Option<Graphs>,
    /// The group for data-parallel training.
    together: Option<Together>,
}

impl Trainer {
    /// Loads a model with the backend of the options, or the best available one, and applies a new
    /// adapter. With [`LoadOptions::adapter_path`], applies that adapter and ignores `lora`.
    ///
    /// # Errors
    /// Errors of loading; [`ErrorKind::InvalidOption`] for an invalid configuration, or targets
    /// that match nothing.
    pub fn load(
        path: &Path,
        options: &LoadOptions,
        lora: &LoraConfig,
        kind: AdapterKind,
        tuning: Tuning,
    ) -> Result<Self> {
        Self::new(crate::backend::open(path, options)?, lora, kind, tuning)
    }

    /// Trains the adapter of a loaded model. Applies a new adapter to a model without one.
    pub(super) fn new(
        (engine, model): (Arc<Engine>, Box<dyn TextModel>),
        lora: &LoraConfig,
        kind: AdapterKind,
        tuning: Tuning,
    ) -> Result<Self> {
        tuning.schedule.validate()?;
        let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if tuning.accumulation == 0 {
            return bad(String::from("accumulation is 0; it must be at least 1"));
        }
        if tuning
            .clip
            .is_some_and(|max| !(max.is_finite() && max > 0.0))
        {
            return bad(String::from("clip must be a number above 0"));
        }
        let adapter = match engine.adapter() {
            Some(adapter) => adapter,
            None => engine.apply_lora(lora, kind, tuning.seed)?,
        };
        let graphs = tuning.compile.on(&engine).then(Graphs::default);
        Ok(Self {
            engine,
            model,
            optimizer: Optimizer::new(tuning.optimizer).with_turned(adapter.turned()),
            adapter,
            tuning,
            batches: 0,
            gathered: None,
            graphs,
            together: None,
        })
    }

    /// Makes later steps train on a share of each batch, and average gradients over the processes
    /// of the group. All processes must receive the same batches. Steps are not compiled.
    #[must_use]
    pub fn with_others(mut self, together: Together) -> Self {
        self.together = Some(together);
        self.graphs = None;
        self
    }

    /// Returns the model. It serves requests with its current parameters.
    #[must_use]
    pub fn model(&self) -> &dyn TextModel {
        self.model.as_ref()
    }

    /// The training options.
    #[must_use]
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Whether steps are compiled, as [`Tuning::compile`] determines.
    #[must_use]
    pub fn is_compiled(&self) -> bool {
        self.graphs.is_some()
    }

    /// The model's engine.
    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the model's engine, for generating replies with the current parameters.
    pub(super) fn shared_engine(&self) -> Arc<Engine> {
        Arc::clone(&self.engine)
    }

    /// A seed that differs between batches.
    pub(super) fn seed_of_batch(&self) -> u64 {
        self.dropout_seed().rotate_left(32)
    }

    /// The trained adapter.
    #[must_use]
    pub fn adapter(&self) -> &LoraAdapter {
        &self.adapter
    }

    /// Returns the optimizer with its state, for saving.
    #[must_use]
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The trainable parameters by name.
    #[must_use]
    pub fn params(&self) -> Params {
        self.adapter.params()
    }

    /// Returns the name of a trainable parameter with a value that is not finite; `None` if all
    /// values are finite.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn not_finite(&self) -> Result<Option<String>> {
        let sound = |array: &Array| array.is_finite()?.all(All, false)?.item::<bool>();
        self.engine.scope(|| {
            for (name, array) in self.params() {
                if !sound(&array).map_err(engine("check"))? {
                    return Ok(Some(name));
                }
            }
            Ok(None)
        })
    }

    /// The number of batches processed.
    #[must_use]
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Continues from another trainer's parameters, optimizer state, and counts of batches and
    /// steps. Drops accumulated gradients, so callers should save only after an update.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if a parameter is missing or has another shape.
    pub fn restore(
        &mut self,
        params: &Params,
        state: Params,
        steps: u64,
        batches: u64,
    ) -> Result<()> {
        for (name, param) in self.params() {
            let shape = params.get(&name).map(Array::shape);
            if shape != Some(param.shape()) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "`{name}` is {}, this adapter's is {:?}",
                        shape.map_or(String::from("missing"), |s| format!("{s:?}")),
                        param.shape()
                    ),
                ));
            }
        }
        self.adapter.set_params(params, self.engine.passes());
        self.optimizer.restore(steps, state);
        self.batches = batches;
        self.gathered = None;
        self.engine.adapter_changed();
        Ok(())
    }

    /// Writes the adapter to a directory.
    ///
    /// # Errors
    /// If writing fails. Earlier files remain unchanged.
    pub fn save(&self, dir: &Path) -> Result<()> {
        self.engine.scope(|| self.adapter.save(dir))
    }

    /// Trains on a batch by cross-entropy over its target tokens. Updates the parameters once
    /// enough batches are accumulated.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for sequences without targets; [`ErrorKind::Engine`] if the
    /// loss is not finite. The state does not change in either case.
    pub fn step(&mut self, batch: &[Sequence]) -> Result<StepReport> {
        check(&self.engine, batch.iter())?;
        let tokens = learned(batch);
        let (batch, weight) = match &self.together {
            // The mean over all tokens equals the mean over the processes' shares, weighted by
            // their tokens.
            Some(together) => match together.part(batch) {
                (part, true) => (part, Some(learned(part) as f32 / tokens.max(1) as f32)),
                (part, false) => (part, Some(0.0)),
            },
            None => (batch, None),
        };
        let decoder = self.engine.decoder()?;
        let packed = self
            .engine
            .scope(|| Packed::new(batch.iter()))
            .map_err(engine("batch"))?;
        if self.is_compiled() {
            return self.replay(decoder, packed, tokens);
        }
        let scope = self.scope_of_batch();
        let (report, _) = self.step_by(tokens, |params| {
            let scope = Scope {
                params: params.clone(),
                ..scope
            };
            let loss = within(Arc::new(scope), || packed.loss(decoder.as_ref()))?;
            Ok((weighed(loss, weight)?, Vec::new()))
        })?;
        Ok(report)
    }

    /// Returns the loss and the gradients by parameter name, without an update.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    pub fn gradients(&self, batch: &[Sequence]) -> Result<(f32, Params)> {
        check(&self.engine, batch.iter())?;
        let loaded = &self.engine;
        let decoder = loaded.decoder()?;
        let scope = self.scope_of_batch();
        let params = self.trainable()?;
        loaded
            .scope(|| -> mlx_rs_core::Result<_> {
                let packed = Packed::new(batch.iter())?;
                let (loss, (), grads) = value_and_grad_tree(&params, |params| {
                    let scope = Scope {
                        params: params.clone(),
                        ..scope
                    };
                    let loss = within(Arc::new(scope), || packed.loss(decoder.as_ref()))?;
                    Ok::<_, mlx_rs_core::Error>((loss, ()))
                })?;
                eval(grads.leaves())?;
                Ok((loss.item::<f32>()?, grads))
            })
            .map_err(engine("gradients"))
    }

    /// Returns the loss of the current model on sequences, without dropout.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for sequences without targets.
    pub fn evaluate(&self, batch: &[Sequence]) -> Result<Evaluation> {
        evaluate_on(&self.engine, batch)
    }

    /// Returns the trainable parameters; an error if there are none.
    fn trainable(&self) -> Result<Params> {
        let params = self.adapter.params();
        if params.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "the adapter was removed from the model; there is nothing to train",
            ));
        }
        Ok(params)
    }

    fn scope_of_batch(&self) -> Scope {
        Scope {
            params: Params::new(),
            dropout: Some(Dropout::Seed(self.dropout_seed())),
            checkpoint: self.tuning.checkpoint,
            ..Scope::default()
        }
    }

    /// Returns the seed of this batch's dropout.
    fn dropout_seed(&self) -> u64 {
        self.tuning
            .seed
            .wrapping_add(self.batches.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn step_by(
        &mut self,
        tokens: usize,
        loss: impl FnOnce(&Params) -> mlx_rs_core::Result<(Array, Vec<Array>)>,
    ) -> Result<(StepReport, Vec<Array>)> {
        let loaded = &self.engine;
        let params = self.trainable()?;
        let rate = self.tuning.schedule.at(self.optimizer.steps());
        let (value, more, grads) = loaded
            .scope(|| -> mlx_rs_core::Result<_> {
                let (value, more, grads) = value_and_grad_tree(&params, |params| loss(params))?;
                let (value, grads) = match &self.together {
                    Some(together) => together.summed(&value, &grads)?,
                    None => (value, grads),
                };
                let grads = match &self.gathered {
                    Some(sum) => sum.zip_leaves(&grads, Array::add)?,
                    None => grads,
                };
                eval(grads.leaves().into_iter().chain([&value]).chain(&more))?;
                Ok((value.item::<f32>()?, more, grads))
            })
            .map_err(engine("gradients"))?;
        finite(value, self.batches + 1)?;
        let mut report = StepReport {
            loss: value,
            tokens,
            norm: None,
            rate,
            updated: false,
            preference: None,
            policy: None,
        };
        let gathered = self.tuning.accumulation as u64;
        if !(self.batches + 1).is_multiple_of(gathered) {
            self.batches += 1;
            self.gathered = Some(grads);
            return Ok((report, more));
        }
        let (clip, optimizer) = (self.tuning.clip, &mut self.optimizer);
        let changed = loaded
            .scope(|| -> mlx_rs_core::Result<_> {
                let (grads, norm) = averaged(grads, gathered, clip)?;
                report.norm = norm.map(|norm| norm.item::<f32>()).transpose()?;
                optimizer.update(&params, &grads, rate)
            })
            .map_err(engine("optimizer"))?;
        self.adopt(&changed);
        report.updated = true;
        Ok((report, more))
    }

    /// Sets the parameters to their values after an update.
    fn adopt(&mut self, changed: &Params) {
        self.adapter.set_params(changed, self.engine.passes());
        self.engine.adapter_changed();
        self.batches += 1;
        self.gathered = None;
    }
}

/// The number of target tokens in a batch.
fn learned(batch: &[Sequence]) -> usize {
    batch.iter().map(Sequence::learned).sum()
}

/// Returns a loss multiplied by its weight, if there is one.
fn weighed(loss: Array, weight: Option<f32>) -> mlx_rs_core::Result<Array> {
    match weight {
        Some(weight) => loss.multiply(&loss.scalar_like(weight)?),
        None => Ok(loss),
    }
}

/// Returns an error if a loss is not finite.
fn finite(loss: f32, step: u64) -> Result<()> {
    if loss.is_finite() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Engine,
        format!(
            "step {step}: the loss is {loss}, and the run ends; what was saved before stays; lower \
             the learning rate, or clip the gradients (max_grad_norm)"
        ),
    ))
}

/// Returns the mean gradients of `batches` batches, computed from their sum. If `clip` is set,
/// clips them and also returns their norm before clipping.
fn averaged(
    mut grads: Params,
    batches: u64,
    clip: Option<f32>,
) -> mlx_rs_core::Result<(Params, Option<Array>)> {
    if batches > 1 {
        let share = 1.0 / batches as f32;
        grads = grads.map_leaves(|g| g.multiply(&g.scalar_like(share)?))?;
    }
    match clip {
        None => Ok((grads, None)),
        Some(max) => clip_by_global_norm(&grads, max).map(|(grads, norm)| (grads, Some(norm))),
    }
}
