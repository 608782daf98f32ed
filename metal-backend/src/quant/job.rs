//! A learned quantization in progress: a loaded model, its calibration sequences, and the values
//! that replace its weights in the output.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use inference::{CancelToken, Error, ErrorKind, Result};
use mlx_rs_core::{Array, Dtype};

use super::Progress;
use super::affine::{Affine, Rounded};
use super::inputs::{Moments, expert_moments, moments};
use super::walk::Walk;
use crate::adapter::same_layer;
use crate::checkpoint::safetensors::TensorNames;
use crate::convert::{Given, Planned};
use crate::engine::Engine;
use crate::error::engine;
use crate::nn::adapter::{Delta, ParamSlot, SlotKind};

/// A matrix that the conversion quantizes, and the slot of its weight in the loaded model.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub planned: Planned,
    pub slot: Arc<ParamSlot>,
}

impl Target {
    pub fn affine(&self) -> Affine {
        Affine {
            bits: self.planned.bits,
            group_size: self.planned.group_size,
            factors: self.planned.factors,
        }
    }

    /// Returns the weight as stored in the checkpoint, as float32.
    pub fn weight(&self) -> Result<Array> {
        self.slot
            .stored_weight(Dtype::Float32)
            .map_err(engine("quantize"))
    }

    /// Whether the slot is a matrix of this block: one linear layer if `axes` is 2, a stack of
    /// experts if `axes` is 3.
    fn is_of(&self, block: usize, axes: usize) -> bool {
        self.slot.kind() == SlotKind::Matrix
            && self.slot.shape().len() == axes
            && self.slot.block() == Some(block)
    }
}

/// One block, as input of a method that quantizes its layers.
pub(super) struct Block<'a> {
    pub engine: &'a Engine,
    pub walk: &'a Walk<'a>,
    pub index: usize,
    /// The linear layers whose inputs were observed.
    pub targets: Vec<Target>,
    /// The moments of the targets' inputs, by the name of the slot.
    pub inputs: BTreeMap<String, Arc<Moments>>,
    /// The stacks of experts whose inputs were observed.
    pub stacks: Vec<Target>,
    /// The moments of each expert's inputs, by the name of the stack's slot.
    pub expert_inputs: BTreeMap<String, Arc<Vec<Option<Moments>>>>,
}

/// The changes that a method makes to a block.
#[derive(Default)]
pub(super) struct Changes {
    /// Quantized matrices.
    pub rounded: Vec<(Target, Rounded)>,
    /// Vectors that stay dense, as stored in the checkpoint, float32.
    pub dense: Vec<(Arc<ParamSlot>, Array)>,
    /// For each stack: the number of its experts, and the number of experts with too few tokens.
    pub few_tokens: Vec<(Target, usize, usize)>,
}

/// A learned quantization in progress.
pub(super) struct Job<'a> {
    pub engine: Arc<Engine>,
    pub targets: Vec<Target>,
    /// The paths of matrices for which the loaded model has no slot of the same shape.
    pub unknown: Vec<String>,
    /// The names of the output's tensors, searched by the loaded model's names.
    names: TensorNames,
    pub sequences: Vec<Vec<u32>>,
    pub batch_size: usize,
    pub given: Given,
    pub notes: Vec<String>,
    /// The sums of [`Changes::few_tokens`] over all blocks.
    few_tokens: BTreeMap<String, (usize, usize)>,
    pub cancel: &'a CancelToken,
    pub progress: &'a mut Progress<'a>,
}

impl<'a> Job<'a> {
    /// Finds the slot of each planned matrix. `names` are the names of all tensors of the output.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if no matrix has a slot.
    pub fn new(
        engine: Arc<Engine>,
        (planned, names): (Vec<Planned>, &[String]),
        sequences: Vec<Vec<u32>>,
        batch_size: usize,
        cancel: &'a CancelToken,
        progress: &'a mut Progress<'a>,
    ) -> Result<Self> {
        let slots = engine.param_slots();
        let names = names.iter().map(String::as_str);
        let names = TensorNames::new(names, &engine.info().architecture);
        let loaded: HashMap<&str, &str> = names
            .all()
            .filter_map(|name| Some((names.stored(name)?, name.strip_suffix(".weight")?)))
            .collect();
        let (mut targets, mut unknown) = (Vec::new(), Vec::new());
        for planned in planned {
            let alike = |slot: &&Arc<ParamSlot>| {
                let shape = slot.shape();
                let sizes = planned.shape.iter().map(|n| i32::try_from(*n).unwrap_or(0));
                slot.is_matrix() && shape.into_iter().eq(sizes)
            };
            let weight = format!("{}.weight", planned.path);
            let name = loaded.get(weight.as_str()).copied();
            let exact = slots.iter().find(|s| Some(s.name()) == name);
            let near = || slots.iter().find(|s| same_layer(s.name(), &planned.path));
            match exact.or_else(near).filter(alike) {
                Some(slot) => targets.push(Target {
                    slot: Arc::clone(slot),
                    planned,
                }),
                None => unknown.push(planned.path),
            }
        }
        if targets.is_empty() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "no matrix of {} can be found in the loaded model, so that nothing can be learned; \
                     use plain rounding",
                    engine.info().architecture
                ),
            ));
        }
        Ok(Self {
            engine,
            targets,
            unknown,
            names,
            sequences,
            batch_size,
            given: Given::default(),
            notes: Vec::new(),
            few_tokens: BTreeMap::new(),
            cancel,
            progress,
        })
    }

    /// Quantizes the linear layers of each block by `quantize`, and with `experts` also its stacks
    /// of experts. The inputs of a block are computed by the quantized earlier blocks. All other
    /// matrices are rounded to nearest.
    ///
    /// # Errors
    /// Errors of `quantize`; [`ErrorKind::Unsupported`] if no linear layer can be observed.
    pub fn block_by_block(
        &mut self,
        experts: bool,
        mut quantize: impl FnMut(&Block<'_>) -> Result<Changes>,
    ) -> Result<()> {
        let loaded = Arc::clone(&self.engine);
        let sequences = std::mem::take(&mut self.sequences);
        let mut walk = Walk::new(&loaded, &sequences, self.batch_size, self.cancel)?;
        let layers = walk.layers;
        let mut learned = BTreeSet::new();
        for index in 0..layers {
            (self.progress)("quantizing blocks", index as u64, layers as u64);
            let mut targets = self.targets.clone();
            targets.retain(|t| t.is_of(index, 2));
            let mut stacks = self.targets.clone();
            stacks.retain(|t| experts && t.is_of(index, 3));
            let names = targets.iter().map(|t| t.slot.name().to_owned()).collect();
            let inputs = moments(&walk, &names)?;
            // A matrix that is not computed as a linear layer has no observed input.
            targets.retain(|t| inputs.contains_key(t.slot.name()));
            let names = stacks.iter().map(|t| t.slot.name().to_owned()).collect();
            let expert_inputs = expert_moments(&walk, &names)?;
            stacks.retain(|t| expert_inputs.contains_key(t.slot.name()));
            let block = Block {
                engine: &loaded,
                walk: &walk,
                index,
                targets,
                inputs,
                stacks,
                expert_inputs,
            };
            let changes = loaded.scope(|| quantize(&block))?;
            drop(block);
            let changed = loaded.scope(|| self.take(changes, &mut learned))?;
            let bare: Vec<_> = changed
                .iter()
                .map(|(slot, _)| (Arc::clone(slot), None))
                .collect();
            loaded.passes().change(changed);
            walk.advance()?;
            // Later passes begin after this block, so its dense copy is not needed.
            loaded.passes().change(bare);
            mlx_rs_core::memory::clear_cache().map_err(engine("quantize"))?;
        }
        (self.progress)("quantizing blocks", layers as u64, layers as u64);
        self.note_plain(&learned);
        self.note_few_tokens();
        if learned.is_empty() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "no linear layer of {} was run with calibration data; use plain rounding",
                    loaded.info().architecture
                ),
            ));
        }
        Ok(())
    }

    /// Stores a method's changes for the output. Returns the changes of the loaded model.
    fn take(
        &mut self,
        changes: Changes,
        learned: &mut BTreeSet<String>,
    ) -> Result<Vec<(Arc<ParamSlot>, Option<Delta>)>> {
        let fault = engine("quantize");
        let mut changed = Vec::new();
        for (target, all, few) in changes.few_tokens {
            let key = crate::adapter::key(&target.planned.path).to_owned();
            let sum = self.few_tokens.entry(key).or_default();
            *sum = (sum.0 + all, sum.1 + few);
        }
        for (target, rounded) in changes.rounded {
            let dense = rounded.dense().map_err(&fault)?;
            dense.eval().map_err(&fault)?;
            let path = target.planned.path.clone();
            learned.insert(path.clone());
            self.given
                .packed
                .insert(path, rounded.packed().map_err(&fault)?);
            changed.push((target.slot, Some(Delta::Whole(dense))));
        }
        for (slot, values) in changes.dense {
            let name = self.name_of(&format!("{}.{}", slot.name(), slot.end()))?;
            let stored = values.to_vec::<f32>().map_err(&fault)?;
            self.given.dense.insert(name, stored);
            changed.push((slot, Some(Delta::Whole(values))));
        }
        Ok(changed)
    }

    /// Returns the output's name for a tensor of the loaded model.
    fn name_of(&self, loaded: &str) -> Result<String> {
        let near = || self.names.all().find(|name| same_layer(name, loaded));
        let exact = self.names.stored(loaded);
        let found = exact.or_else(|| self.names.stored(near()?));
        found.map(str::to_owned).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the checkpoint of {} stores `{loaded}` in another form, so that it cannot be changed; \
                     use gptq",
                    self.engine.info().architecture
                ),
            )
        })
    }

    /// Adds a note about experts that were rounded to nearest for lack of tokens.
    fn note_few_tokens(&mut self) {
        let few = self.few_tokens.iter().filter(|(_, (_, few))| *few > 0);
        let kinds: Vec<String> = few
            .map(|(key, (all, few))| format!("{key} ({few} of {all})"))
            .collect();
        if !kinds.is_empty() {
            self.notes.push(format!(
                "experts with too few tokens, rounded plainly: {}; more calibration data would reach \
                 more experts",
                kinds.join(", ")
            ));
        }
    }

    /// Adds a note about matrices that were rounded to nearest.
    fn note_plain(&mut self, learned: &BTreeSet<String>) {
        let mut plain: BTreeMap<&str, usize> = BTreeMap::new();
        let paths = self.targets.iter().map(|t| &t.planned.path);
        for path in paths.chain(&self.unknown) {
            if !learned.contains(path) {
                *plain.entry(crate::adapter::key(path)).or_default() += 1;
            }
        }
        if !plain.is_empty() {
            let kinds: Vec<String> = plain
                .iter()
                .map(|(key, n)| match n {
                    1 => (*key).to_owned(),
                    n => format!("{key} ({n})"),
                })
                .collect();
            self.notes.push(format!(
                "rounded plainly, without calibration: {}",
                kinds.join(", ")
            ));
        }
    }
}
