//! A step as one graph: forward pass, gradients, clipping and optimizer, traced at the first batch
//! of a form and replayed at those that follow. What a step computes is the same as without; see
//! [`Trainer::step`].
//!
//! All that differs from batch to batch is an argument of the graph: tokens, trainable numbers,
//! gathered gradients, the optimizer's memory and rates, and what dropout is drawn from. What stays
//! is a constant in it: the frozen weights, the lengths of the sequences, and where the adapter
//! stands.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use inference::Result;
use mlx_rs_core::transforms::{Compiled, Tree, compile, value_and_grad_tree};
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, eval, random, zeros};
use serde::{Deserialize, Serialize};

use super::packed::Packed;
use super::{StepReport, Trainer, averaged, finite};
use crate::adapter::Params;
use crate::arch::Decoder;
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Delta, Dropout, Scope, dropout_key, within};
use crate::train::optim::{OptimizerConfig, apply};

/// Whether a step is compiled: traced once for each form of its batch, and replayed for others of
/// that form.
///
/// The form is the lengths of the batch's sequences, in their order. On a GPU element-wise
/// operations become one kernel, so that results round differently. On a CPU the graph is kept and
/// simplified, and results are the same. It is not fused: that would need a C++ compiler at run
/// time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compile {
    /// On a GPU, and not on a CPU.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Compile {
    /// Whether it is done for a model.
    pub(super) fn on(self, engine: &Engine) -> bool {
        match self {
            Self::Auto => !engine.is_on_cpu(),
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// Forms whose graphs are kept; the one that was not needed longest makes room.
const KEPT: usize = 32;

/// What a graph is for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Form {
    lengths: Vec<i32>,
    /// Gradients of earlier batches are added.
    gathered: bool,
    /// A step follows; otherwise gradients are gathered.
    updates: bool,
}

/// The graphs of a trainer.
#[derive(Default)]
pub(super) struct Graphs {
    kept: VecDeque<(Form, Compiled<Error>)>,
    /// What the optimizer remembers, by name, with the shape; found at the first step.
    state: Option<Vec<(String, Vec<i32>)>>,
    /// Where dropout is.
    dropping: Vec<String>,
    /// Of the adapter, after the last step: another than we trained may have another form.
    epoch: u64,
}

impl Graphs {
    /// The graph of a form, which `plan` makes if there is none.
    fn of(&mut self, form: &Form, plan: impl FnOnce() -> Plan) -> &Compiled<Error> {
        let found = self.kept.iter().position(|(own, _)| own == form);
        let one = match found.and_then(|at| self.kept.remove(at)) {
            Some(one) => one,
            None => {
                if self.kept.len() >= KEPT {
                    self.kept.pop_front();
                }
                let plan = plan();
                (form.clone(), compile(move |args: &[Array]| plan.run(args)))
            }
        };
        self.kept.push_back(one);
        &self.kept[self.kept.len() - 1].1
    }
}

/// What a graph is traced from.
struct Plan {
    form: Form,
    params: Vec<String>,
    state: Vec<String>,
    dropping: Vec<String>,
    checkpoint: bool,
    accumulation: u64,
    clip: Option<f32>,
    optimizer: OptimizerConfig,
    turned: Arc<BTreeSet<String>>,
    decoder: Arc<dyn Decoder>,
}

/// Takes as many arrays as there are names.
fn named(names: &[String], args: &mut impl Iterator<Item = Array>) -> Params {
    names.iter().cloned().zip(args).collect()
}

impl Plan {
    /// Arguments: ids, targets, mask; parameters; dropout keys; gathered gradients, if any; and for
    /// an update the optimizer's memory and numbers. Results: the loss, and either gradients, or
    /// parameters, memory and, where gradients are clipped, their norm.
    fn run(&self, args: &[Array]) -> mlx_rs_core::Result<Vec<Array>> {
        let [ids, targets, mask, rest @ ..] = args else {
            return Err(Error::new(ErrorKind::Value, "step", "the batch is missing"));
        };
        let packed = Packed {
            ids: ids.clone(),
            targets: targets.clone(),
            mask: mask.clone(),
            lengths: self.form.lengths.clone(),
        };
        let mut rest = rest.iter().cloned();
        let params = named(&self.params, &mut rest);
        let keys: BTreeMap<String, random::Key> = named(&self.dropping, &mut rest)
            .into_iter()
            .map(|(name, key)| Ok((name, random::Key::from_array(key)?)))
            .collect::<mlx_rs_core::Result<_>>()?;
        let scope = Scope {
            params: Params::new(),
            dropout: Some(Dropout::Keys(Arc::new(keys))),
            checkpoint: self.checkpoint,
            without_adapters: false,
        };
        let (loss, (), mut grads) = value_and_grad_tree(&params, |params| {
            let scope = Scope {
                params: params.clone(),
                ..scope
            };
            let loss = within(Arc::new(scope), || packed.loss(self.decoder.as_ref()))?;
            Ok::<_, Error>((loss, ()))
        })?;
        if self.form.gathered {
            grads = named(&self.params, &mut rest).zip_leaves(&grads, Array::add)?;
        }
        let mut results = vec![loss];
        if !self.form.updates {
            results.extend(grads.into_values());
            return Ok(results);
        }
        let state = named(&self.state, &mut rest);
        let numbers: Vec<Array> = rest.collect();
        let (grads, norm) = averaged(grads, self.accumulation, self.clip)?;
        let (next, state) = apply(
            &self.optimizer,
            &self.turned,
            &params,
            &grads,
            &state,
            &numbers,
        )?;
        results.extend(next.into_values());
        results.extend(state.into_values());
        results.extend(norm);
        Ok(results)
    }
}

impl Trainer {
    /// [`Trainer::step`] by a graph.
    pub(super) fn replay(
        &mut self,
        decoder: Arc<dyn Decoder>,
        packed: Packed,
        tokens: usize,
    ) -> Result<StepReport> {
        let params = self.trainable()?;
        let rate = self.tuning.schedule.at(self.optimizer.steps());
        let accumulation = self.tuning.accumulation as u64;
        let form = Form {
            lengths: packed.lengths.clone(),
            gathered: self.gathered.is_some(),
            updates: (self.batches + 1).is_multiple_of(accumulation),
        };
        let seed = self.dropout_seed();
        let held = self.model.engine();
        let epoch = held.adapter_epoch();
        let mut graphs = self.graphs.take().unwrap_or_default();
        if graphs.epoch != epoch {
            graphs = Graphs {
                dropping: self.dropping(),
                epoch,
                ..Graphs::default()
            };
        }
        let called = held.scope(|| -> mlx_rs_core::Result<_> {
            let Packed {
                ids, targets, mask, ..
            } = packed;
            let mut args = vec![ids, targets, mask];
            args.extend(params.values().cloned());
            for slot in &graphs.dropping {
                args.push(dropout_key(slot, seed)?.array().clone());
            }
            args.extend(self.gathered.iter().flat_map(|g| g.values().cloned()));
            if form.updates {
                let numbers = self.optimizer.numbers(rate)?;
                let shapes = match graphs.state.take() {
                    Some(shapes) => shapes,
                    None => self.shapes_of_state(&params, &numbers)?,
                };
                for (name, shape) in &shapes {
                    // As the optimizer begins.
                    args.push(match self.optimizer.state().get(name) {
                        Some(array) => array.clone(),
                        None => zeros(shape, Dtype::Float32)?,
                    });
                }
                args.extend(numbers);
                graphs.state = Some(shapes);
            }
            let state: Vec<String> = match &graphs.state {
                Some(shapes) if form.updates => shapes.iter().map(|(n, _)| n.clone()).collect(),
                _ => Vec::new(),
            };
            let dropping = graphs.dropping.clone();
            let graph = graphs.of(&form, || Plan {
                form: form.clone(),
                params: params.keys().cloned().collect(),
                state: state.clone(),
                dropping,
                checkpoint: self.tuning.checkpoint,
                accumulation,
                clip: self.tuning.clip,
                optimizer: self.tuning.optimizer,
                turned: Arc::clone(self.optimizer.turned()),
                decoder,
            });
            let results = graph.call(&args)?;
            eval(&results)?;
            let mut results = results.into_iter();
            let loss = match results.next() {
                Some(loss) => loss.item::<f32>()?,
                None => return Err(Error::new(ErrorKind::Value, "step", "there is no loss")),
            };
            let names: Vec<String> = params.keys().cloned().collect();
            let numbers = named(&names, &mut results);
            let state = named(&state, &mut results);
            let norm = results.next().map(|norm| norm.item::<f32>()).transpose()?;
            Ok((loss, numbers, state, norm))
        });
        self.graphs = Some(graphs);
        let (loss, numbers, state, norm) = called.map_err(engine("compiled step"))?;
        finite(loss, self.batches + 1)?;
        if form.updates {
            self.optimizer.advance(state);
            self.adopt(&numbers);
            if let Some(graphs) = &mut self.graphs {
                graphs.epoch = self.model.engine().adapter_epoch();
            }
        } else {
            self.batches += 1;
            self.gathered = Some(numbers);
        }
        Ok(StepReport {
            loss,
            tokens,
            norm,
            rate,
            updated: form.updates,
            preference: None,
        })
    }

    /// The adapted layers that drop some of their inputs.
    fn dropping(&self) -> Vec<String> {
        let drops = |delta: &Delta| matches!(delta, Delta::LowRank(low) if low.dropout > 0.0);
        // Another adapter than ours may stand there by now, at more layers.
        let standing = self.model.engine().adapter();
        let slots = standing.as_ref().unwrap_or(&self.adapter).slots().iter();
        slots
            .filter(|slot| slot.stored().is_some_and(|delta| drops(&delta)))
            .map(|slot| slot.name().to_owned())
            .collect()
    }

    /// What the optimizer will remember of parameters, from a step that is described and never
    /// computed.
    fn shapes_of_state(
        &self,
        params: &Params,
        numbers: &[Array],
    ) -> mlx_rs_core::Result<Vec<(String, Vec<i32>)>> {
        let config = &self.tuning.optimizer;
        let (_, state) = apply(
            config,
            self.optimizer.turned(),
            params,
            params,
            &Params::new(),
            numbers,
        )?;
        Ok(state
            .into_iter()
            .map(|(name, array)| (name, array.shape().to_vec()))
            .collect())
    }
}
