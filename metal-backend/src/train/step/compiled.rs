//! A training step as one graph: forward pass, gradients, clipping and optimizer. The graph is
//! traced for the first batch of a shape, and replayed for later batches of this shape. A compiled
//! step has the same result as [`Trainer::step`] up to rounding.
//!
//! All values that vary between batches are arguments of the graph: tokens, parameters, accumulated
//! gradients, optimizer state and rates, and dropout keys. The constants are the frozen weights,
//! the lengths of the sequences, and the adapter's slots.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use inference::Result;
use mlx_rs_core::transforms::{Compiled, Tree, compile, value_and_grad_tree};
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, eval, random, zeros};

use super::packed::Packed;
use super::{StepReport, Trainer, averaged, finite};
use crate::adapter::Params;
use crate::arch::Decoder;
use crate::error::engine;
use crate::nn::adapter::{Delta, Dropout, Scope, dropout_key, within};
use crate::train::optim::{OptimizerConfig, apply};

/// The maximum number of cached graphs. The least recently used graph is dropped first.
const KEPT: usize = 32;

/// The properties of a batch that determine its graph.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Form {
    lengths: Vec<i32>,
    /// Whether gradients of earlier batches are added.
    gathered: bool,
    /// Whether the step updates the parameters. Otherwise it accumulates gradients.
    updates: bool,
}

/// The compiled graphs of a trainer.
#[derive(Default)]
pub(super) struct Graphs {
    graphs: VecDeque<(Form, Compiled<Error>)>,
    /// Names and shapes of the optimizer state, determined at the first step.
    state: Option<Vec<(String, Vec<i32>)>>,
    /// The names of adapted layers with dropout.
    dropping: Vec<String>,
    /// The adapter's epoch after the last step. Another epoch means that shapes may differ.
    epoch: u64,
}

impl Graphs {
    /// Returns the graph for a form. Creates it from `plan` if it is not cached.
    fn of(&mut self, form: &Form, plan: impl FnOnce() -> Plan) -> &Compiled<Error> {
        let index = self.graphs.iter().position(|(known, _)| known == form);
        let one = match index.and_then(|at| self.graphs.remove(at)) {
            Some(one) => one,
            None => {
                if self.graphs.len() >= KEPT {
                    self.graphs.pop_front();
                }
                let plan = plan();
                (form.clone(), compile(move |args: &[Array]| plan.run(args)))
            }
        };
        self.graphs.push_back(one);
        &self.graphs[self.graphs.len() - 1].1
    }
}

/// The inputs from which a graph is traced.
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

/// Takes one array from `args` for each name.
fn named(names: &[String], args: &mut impl Iterator<Item = Array>) -> Params {
    names.iter().cloned().zip(args).collect()
}

impl Plan {
    /// Computes a step.
    ///
    /// Arguments: ids, targets, mask; parameters; dropout keys; accumulated gradients, if any. If
    /// the step updates, also the optimizer's state and varying values.
    ///
    /// Results: the loss. If the step updates, the new parameters and optimizer state, and the
    /// gradients' norm if they are clipped. Otherwise the gradients.
    fn run(&self, args: &[Array]) -> mlx_rs_core::Result<Vec<Array>> {
        let [ids, targets, mask, rest @ ..] = args else {
            return Err(Error::new(ErrorKind::Value, "step", "the batch is missing"));
        };
        let packed = Packed {
            ids: ids.clone(),
            targets: targets.clone(),
            mask: mask.clone(),
            lengths: self.form.lengths.clone(),
            temperature: 1.0,
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
            ..Scope::default()
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
    /// Runs [`Trainer::step`] with a compiled graph.
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
        let loaded = Arc::clone(&self.engine);
        let epoch = loaded.adapter_epoch();
        let mut graphs = self.graphs.take().unwrap_or_default();
        if graphs.epoch != epoch {
            graphs = Graphs {
                dropping: self.dropping(),
                epoch,
                ..Graphs::default()
            };
        }
        let called = loaded.scope(|| -> mlx_rs_core::Result<_> {
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
                    // Before the first step, the optimizer state is zeros.
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
                graphs.epoch = self.engine.adapter_epoch();
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
            policy: None,
        })
    }

    /// Returns the names of adapted layers with dropout.
    fn dropping(&self) -> Vec<String> {
        let drops = |delta: &Delta| matches!(delta, Delta::LowRank(low) if low.dropout > 0.0);
        // The model may have another adapter by now, with more layers.
        let standing = self.engine.adapter();
        let slots = standing.as_ref().unwrap_or(&self.adapter).slots().iter();
        slots
            .filter(|slot| slot.stored().is_some_and(|delta| drops(&delta)))
            .map(|slot| slot.name().to_owned())
            .collect()
    }

    /// Returns the shapes of the optimizer state. Traces a step that is never evaluated.
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
