//! Selects the layers that receive an adapter, and sets the adapter's initial values. `files.rs`
//! loads and saves adapters.

use std::collections::BTreeSet;
use std::sync::Arc;

use inference::{ComputeType, Error, ErrorKind, LoraConfig, Result};
use mlx_rs_core::{Dtype, eval, random, zeros};

use super::Params;
use super::kind::AdapterKind;
use super::naming::{Naming, is_turned};
use crate::error::engine;
use crate::nn::adapter::{Delta, LowRank, ParamSlot, Passes, PreparedPair, lengths};

/// The adapter of a model, with the slots that it changes. A clone refers to the same adapter.
#[derive(Debug, Clone)]
pub struct LoraAdapter {
    slots: Vec<Arc<ParamSlot>>,
    pub(crate) kind: AdapterKind,
    pub(crate) naming: Naming,
    /// The number of blocks in the model.
    pub(crate) blocks: usize,
}

impl LoraAdapter {
    /// Applies a new adapter to every layer of `all` that the configuration selects, and removes
    /// the current adapter. A is drawn from a normal distribution with standard deviation `sqrt(2 /
    /// in)` (He et al. 2015). B is zero, so the model's outputs do not change.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a bad configuration or targets that match nothing,
    /// [`ErrorKind::Unsupported`] for DoRA on experts.
    pub(crate) fn fresh(
        all: &[Arc<ParamSlot>],
        config: &LoraConfig,
        kind: AdapterKind,
        seed: u64,
        architecture: &str,
        passes: &Passes,
    ) -> Result<Self> {
        config.validate()?;
        let dtype = match config.dtype {
            ComputeType::Float32 => Dtype::Float32,
            ComputeType::Float16 => Dtype::Float16,
            ComputeType::BFloat16 => Dtype::Bfloat16,
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("adapters cannot be of type {other}"),
                ));
            }
        };
        let (chosen, deltas) = match kind {
            AdapterKind::Full => {
                let chosen = in_blocks(all, config)?;
                let deltas = replacements(&chosen, dtype)?;
                (chosen, deltas)
            }
            AdapterKind::Lora | AdapterKind::Dora => {
                let chosen = chosen(all, config)?;
                let deltas = low_rank(&chosen, config, kind, dtype, seed)?;
                (chosen, deltas)
            }
        };
        let new = chosen.iter().cloned().zip(deltas.into_iter().map(Some));
        passes.change(bare(all).chain(new));
        Ok(Self {
            slots: chosen,
            kind,
            naming: Naming::for_architecture(architecture),
            blocks: blocks(all),
        })
    }

    /// Returns the adapter that consists of all slots in `all` with a delta.
    pub(super) fn standing(all: &[Arc<ParamSlot>], kind: AdapterKind, naming: Naming) -> Self {
        let slots = all.iter().filter(|s| s.stored().is_some());
        Self {
            slots: slots.cloned().collect(),
            kind,
            naming,
            blocks: blocks(all),
        }
    }

    /// The slots that the adapter changes.
    pub(crate) fn slots(&self) -> &[Arc<ParamSlot>] {
        &self.slots
    }

    /// Returns the names of the parameters that mlx-lm stores transposed.
    pub(crate) fn turned(&self) -> Vec<String> {
        let mut names = Vec::new();
        for slot in &self.slots {
            let is_low = matches!(slot.stored().as_deref(), Some(Delta::LowRank(_)));
            for (end, part) in slot.parts() {
                if is_low && is_turned(&part, slot.kind()) {
                    names.push(format!("{}.{end}", slot.name()));
                }
            }
        }
        names
    }

    /// Returns the current trainable parameters by name.
    #[must_use]
    pub fn params(&self) -> Params {
        let mut params = Params::new();
        for slot in &self.slots {
            for (end, part) in slot.parts() {
                params.insert(format!("{}.{end}", slot.name()), part);
            }
        }
        params
    }

    /// Replaces the parameters in `params`; other parameters do not change.
    pub(crate) fn set_params(&self, params: &Params, passes: &Passes) {
        passes.change(self.slots.iter().filter_map(|slot| {
            let part = |end: &str| params.get(&format!("{}.{end}", slot.name())).cloned();
            Some((Arc::clone(slot), Some(slot.replaced(part)?)))
        }));
    }

    /// Removes the adapter, so that the model computes its original outputs.
    pub(crate) fn remove(&self, passes: &Passes) {
        passes.change(bare(&self.slots));
    }
}

/// Returns the number of blocks in the model.
pub(super) fn blocks(all: &[Arc<ParamSlot>]) -> usize {
    let last = all.iter().filter_map(|slot| slot.block()).max();
    last.map_or(0, |n| n + 1)
}

/// Returns, for each slot, the change that removes its delta.
pub(super) fn bare(
    slots: &[Arc<ParamSlot>],
) -> impl Iterator<Item = (Arc<ParamSlot>, Option<Delta>)> {
    slots.iter().map(|slot| (Arc::clone(slot), None))
}

/// Returns the index of the first trained block.
fn first_block(all: &[Arc<ParamSlot>], config: &LoraConfig) -> usize {
    config
        .num_layers
        .map_or(0, |n| blocks(all).saturating_sub(n))
}

/// Returns all slots of the trained blocks, sorted by name.
fn in_blocks(all: &[Arc<ParamSlot>], config: &LoraConfig) -> Result<Vec<Arc<ParamSlot>>> {
    let first = first_block(all, config);
    let mut chosen: Vec<Arc<ParamSlot>> = all
        .iter()
        .filter(|slot| slot.block().is_some_and(|block| block >= first))
        .cloned()
        .collect();
    chosen.sort_by_key(|slot| (slot.name().to_owned(), slot.end()));
    let packed = chosen.iter().find(|slot| slot.weight().format().is_some());
    if let Some(slot) = packed {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "`{}` is quantized, so that it cannot be trained itself; use LoRA or DoRA, or convert the \
                 model to plain numbers first",
                slot.name()
            ),
        ));
    }
    Ok(chosen)
}

/// Returns the current weights of the slots, as trainable parameters.
fn replacements(slots: &[Arc<ParamSlot>], dtype: Dtype) -> Result<Vec<Delta>> {
    let copied = |slot: &Arc<ParamSlot>| {
        let weight = slot.stored_weight(dtype)?;
        weight.eval()?;
        Ok(Delta::Whole(weight))
    };
    let all: mlx_rs_core::Result<_> = slots.iter().map(copied).collect();
    all.map_err(engine("adapter"))
}

/// Returns initial values of A and B for each slot.
fn low_rank(
    slots: &[Arc<ParamSlot>],
    config: &LoraConfig,
    kind: AdapterKind,
    dtype: Dtype,
    seed: u64,
) -> Result<Vec<Delta>> {
    let rank = i32::try_from(config.rank).map_err(|_| {
        let message = format!("rank is {}; it must be at most {}", config.rank, i32::MAX);
        Error::new(ErrorKind::InvalidOption, message)
    })?;
    let mut keys = random::Key::new(seed).map_err(engine("adapter"))?;
    let mut deltas = Vec::with_capacity(slots.len());
    for slot in slots {
        let shape = slot.shape();
        let [leading @ .., out, inputs] = shape.as_slice() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("`{}` is not a matrix", slot.name()),
            ));
        };
        if kind == AdapterKind::Dora && !leading.is_empty() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "`{}` is a stack of experts, which DoRA does not have; use LoRA, or other targets",
                    slot.name()
                ),
            ));
        }
        let make = || -> mlx_rs_core::Result<_> {
            let shaped = |end: [i32; 2]| [leading, &end[..]].concat();
            let (next, key) = keys.split()?;
            let deviation = (2.0 / (*inputs).max(1) as f32).sqrt();
            let a = random::normal(0.0, deviation, &shaped([rank, *inputs]), dtype, &key)?;
            let b = zeros(&shaped([*out, rank]), dtype)?;
            let m = match kind {
                AdapterKind::Dora => Some(lengths(&slot.dense(Dtype::Float32)?)?),
                _ => None,
            };
            eval([&a, &b].into_iter().chain(&m))?;
            let (scale, dropout) = (config.scale(), config.dropout);
            Ok((
                LowRank {
                    a,
                    b,
                    m,
                    scale,
                    dropout,
                    prepared: PreparedPair::default(),
                },
                next,
            ))
        };
        let (delta, next) = make().map_err(engine("adapter"))?;
        keys = next;
        deltas.push(Delta::LowRank(delta));
    }
    Ok(deltas)
}

/// Returns the matrices that a configuration selects, sorted by name.
fn chosen(all: &[Arc<ParamSlot>], config: &LoraConfig) -> Result<Vec<Arc<ParamSlot>>> {
    let first = first_block(all, config);
    let matrices = || all.iter().filter(|slot| slot.is_matrix());
    let named = |slot: &ParamSlot, target: &str| {
        slot.name()
            .strip_suffix(target)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    for target in &config.targets {
        if !matrices().any(|slot| named(slot, target)) {
            let ends: BTreeSet<&str> = matrices()
                .filter_map(|slot| slot.name().rsplit('.').next())
                .collect();
            let ends: Vec<&str> = ends.into_iter().collect();
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "no layer's name ends in target `{target}`; this model has {}",
                    ends.join(", ")
                ),
            ));
        }
    }
    let mut chosen: Vec<Arc<ParamSlot>> = matrices()
        .filter(|slot| config.targets.iter().any(|target| named(slot, target)))
        .filter(|slot| slot.block().is_none_or(|block| block >= first))
        .cloned()
        .collect();
    chosen.sort_by(|a, b| a.name().cmp(b.name()));
    if chosen.is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "none of the last blocks has a layer that the targets name; raise num_layers",
        ));
    }
    Ok(chosen)
}
