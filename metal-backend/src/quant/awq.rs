//! AWQ (Lin et al. 2023, arXiv:2306.00978) scales up input channels with large activations before
//! rounding. It scales down the previous layer by the same factors, so the network's result does
//! not change. Then it clips the ranges of groups if this lowers the error.

use std::collections::BTreeMap;
use std::sync::Arc;

use inference::{Error, ErrorKind, Interrupt, Result};
use mlx_rs_core::{All, Array, Dtype, eval, where_};

use super::affine::{Affine, Rounded};
use super::inputs::Moments;
use super::job::{Block, Changes, Job, Target};
use crate::adapter::key;
use crate::error::engine;
use crate::exec::product_of;
use crate::nn::adapter::{Delta, ParamSlot, SlotKind};

/// Options of the method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awq {
    /// The number of exponents that are tried for channel scales, and of clipped ranges that are
    /// tried for groups (20).
    pub n_grid: usize,
}

impl Default for Awq {
    fn default() -> Self {
        Self { n_grid: 20 }
    }
}

/// Layers whose input channels are scaled (`after`), and the layer before them that is scaled
/// inversely. Names are those inside a block. The first name in `before` that exists in the block
/// is used.
struct Fold {
    before: &'static [&'static str],
    after: &'static [&'static str],
}

/// The folds of Llama's block structure, which many families share.
const FOLDS: [Fold; 4] = [
    Fold {
        before: &["input_layernorm"],
        after: &[
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.qkv_proj",
        ],
    },
    Fold {
        before: &["self_attn.v_proj"],
        after: &["self_attn.o_proj"],
    },
    Fold {
        before: &["pre_feedforward_layernorm", "post_attention_layernorm"],
        after: &["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"],
    },
    Fold {
        before: &["mlp.up_proj"],
        after: &["mlp.down_proj"],
    },
];

/// The greatest fraction of a range that clipping removes.
const MOST_CLIPPED: f32 = 0.5;

/// The maximum relative change of a block's outputs by folding alone. Folding changes outputs only
/// by rounding, so a greater change means that the fold does not fit the block.
const TOLERANCE: f32 = 0.02;

impl Awq {
    /// Returns an error for values that are out of range.
    pub(super) fn check(self) -> Result<()> {
        if (1..=1000).contains(&self.n_grid) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidOption,
            format!("n_grid is {}; it must be from 1 to 1000", self.n_grid),
        ))
    }

    /// Scales, clips and quantizes the linear layers of all blocks, block by block.
    pub(super) fn run(self, job: &mut Job<'_>) -> Result<()> {
        let cancel = job.cancel;
        let slots = job.engine.param_slots();
        job.block_by_block(false, |block| {
            let interrupt = Interrupt::new().with_cancel(cancel.clone());
            let mut folding = Folding::new(block, &slots)?;
            for fold in &FOLDS {
                interrupt.check()?;
                folding.apply(fold, self.n_grid).map_err(engine("awq"))?;
            }
            folding.check(block)?;
            let mut changes = Changes {
                dense: folding.dense(),
                ..Changes::default()
            };
            for target in &block.targets {
                interrupt.check()?;
                let rounded = folding
                    .rounded(target, self.n_grid)
                    .map_err(engine("awq"))?;
                if let Some(rounded) = rounded {
                    changes.rounded.push((target.clone(), rounded));
                }
            }
            Ok(changes)
        })
    }
}

/// A layer of a block with its current weights.
struct Layer {
    slot: Arc<ParamSlot>,
    /// float32, as stored in the checkpoint.
    weight: Array,
    /// The constant that a norm adds to its stored weight.
    plus: f32,
    changed: bool,
}

/// The weights of a block during the search for scales.
struct Folding {
    /// Layers by their name inside the block and suffix, such as `self_attn.q_proj.weight`.
    layers: BTreeMap<String, Layer>,
    /// The formats and input moments of linear layers, by their name inside the block.
    linear: BTreeMap<String, (Affine, Arc<Moments>)>,
    /// Factors on input channels, by the layer's name inside the block.
    scales: BTreeMap<String, Array>,
}

impl Folding {
    fn new(block: &Block<'_>, slots: &[Arc<ParamSlot>]) -> Result<Self> {
        let mut layers = BTreeMap::new();
        for slot in slots.iter().filter(|s| s.block() == Some(block.index)) {
            let weight = slot.stored_weight(Dtype::Float32).map_err(engine("awq"))?;
            let plus = match slot.kind() {
                SlotKind::Norm { plus } => plus,
                _ => 0.0,
            };
            layers.insert(
                format!("{}.{}", key(slot.name()), slot.end()),
                Layer {
                    slot: Arc::clone(slot),
                    weight,
                    plus,
                    changed: false,
                },
            );
        }
        let linear = block
            .targets
            .iter()
            .filter_map(|t| {
                let moments = block.inputs.get(t.slot.name())?;
                let name = key(t.slot.name()).to_owned();
                Some((name, (t.affine(), Arc::clone(moments))))
            })
            .collect();
        Ok(Self {
            layers,
            linear,
            scales: BTreeMap::new(),
        })
    }

    fn weight(&self, name: &str) -> Option<&Array> {
        Some(&self.layers.get(&format!("{name}.weight"))?.weight)
    }

    /// Searches the scales of one fold and applies them, if the block has the fold's layers.
    fn apply(&mut self, fold: &Fold, n_grid: usize) -> mlx_rs_core::Result<()> {
        let after: Vec<&str> = (fold.after.iter().copied())
            .filter(|name| self.linear.contains_key(*name))
            .collect();
        let before = fold.before.iter().find(|n| self.weight(n).is_some());
        let (Some(before), Some(first)) = (before, after.first()) else {
            return Ok(());
        };
        let Some((_, moments)) = self.linear.get(*first) else {
            return Ok(());
        };
        let channels = moments.magnitudes.dim(0)?;
        // With grouped-query attention, each value channel feeds several inputs of the output
        // projection, so the sizes differ.
        let outputs = self.weight(before).map_or(Ok(0), |w| w.dim(0))?;
        if outputs != channels {
            return Ok(());
        }
        let mut matrices = Vec::new();
        for name in &after {
            if let (Some(weight), Some((affine, _))) = (self.weight(name), self.linear.get(*name)) {
                matrices.push((weight.clone(), *affine));
            }
        }
        let scales = search(&matrices, moments, n_grid)?;
        for name in &after {
            self.multiply(&format!("{name}.weight"), &scales)?;
            self.scales.insert((*name).to_owned(), scales.clone());
        }
        let inverse = scales.reciprocal()?;
        let is_norm = self.weight(before).is_some_and(|weight| weight.ndim() == 1);
        let factors = match is_norm {
            true => inverse.clone(),
            false => inverse.expand_dims(-1)?,
        };
        self.multiply(&format!("{before}.weight"), &factors)?;
        self.multiply(&format!("{before}.bias"), &inverse)
    }

    /// Multiplies a layer's effective weight by `factors`, if the block has this layer.
    fn multiply(&mut self, name: &str, factors: &Array) -> mlx_rs_core::Result<()> {
        let Some(layer) = self.layers.get_mut(name) else {
            return Ok(());
        };
        let plus = layer.weight.scalar_like(layer.plus)?;
        layer.weight = layer
            .weight
            .add(&plus)?
            .multiply(factors)?
            .subtract(&plus)?;
        layer.weight.eval()?;
        layer.changed = true;
        Ok(())
    }

    /// Checks that folding does not change the block's outputs.
    fn check(&self, block: &Block<'_>) -> Result<()> {
        if self.scales.is_empty() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "awq: block {} of {} has no layers into which scales can be folded; use gptq",
                    block.index,
                    block.engine.info().architecture
                ),
            ));
        }
        let before = block.walk.output(0)?;
        let changed: Vec<&Layer> = self.layers.values().filter(|l| l.changed).collect();
        let passes = block.engine.passes();
        passes.change(changed.iter().map(|layer| {
            let delta = Delta::Whole(layer.weight.clone());
            (Arc::clone(&layer.slot), Some(delta))
        }));
        let after = block.walk.output(0);
        passes.change(changed.iter().map(|l| (Arc::clone(&l.slot), None)));
        let after = after?;
        let relative = || -> mlx_rs_core::Result<f32> {
            let of = |x: &Array| x.astype(Dtype::Float32)?.abs()?.mean(All, false);
            let change = of(&after.subtract(&before)?)?;
            change.divide(&of(&before)?)?.item::<f32>()
        };
        let change = relative().map_err(engine("awq"))?;
        if change < TOLERANCE {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "awq: block {} of {} computes something else after scales are folded into its norms, \
                 so its structure is not supported; use gptq",
                block.index,
                block.engine.info().architecture
            ),
        ))
    }

    /// Returns the changed vectors and matrices that are not quantized.
    fn dense(&self) -> Vec<(Arc<ParamSlot>, Array)> {
        let is_dense = |layer: &&Layer| {
            let is_quantized = self.linear.contains_key(key(layer.slot.name()));
            layer.changed && (layer.weight.ndim() == 1 || !is_quantized)
        };
        (self.layers.values().filter(is_dense))
            .map(|layer| (Arc::clone(&layer.slot), layer.weight.clone()))
            .collect()
    }

    /// Returns the quantized matrix of a layer, with clipped ranges.
    fn rounded(&self, target: &Target, n_grid: usize) -> mlx_rs_core::Result<Option<Rounded>> {
        let name = key(target.slot.name());
        let (Some(weight), Some((affine, moments))) = (self.weight(name), self.linear.get(name))
        else {
            return Ok(None);
        };
        // Queries and keys are multiplied by each other, which amplifies clipping errors. The
        // authors do not clip them either.
        if ["q_proj", "k_proj", "qkv_proj"]
            .iter()
            .any(|end| name.ends_with(end))
        {
            return affine.rounded(weight).map(Some);
        }
        let products = match self.scales.get(name) {
            Some(scales) => moments
                .products
                .divide(&scales.expand_dims(0)?.multiply(&scales.expand_dims(-1)?)?)?,
            None => moments.products.clone(),
        };
        clipped(weight, &products, *affine, n_grid).map(Some)
    }
}

/// Returns the error of the outputs, `trace(E H E^T)` for the weights' errors `E`, summed over
/// matrices.
fn loss(errors: &Array, products: &Array) -> mlx_rs_core::Result<Array> {
    // The moments are symmetric, so their orientation does not matter.
    product_of(errors, products)?
        .multiply(errors)?
        .sum(All, false)
}

/// Returns the factors on input channels with the least error, float32 `[in]`:
/// `magnitude^exponent`, with the best of `n_grid` exponents from 0 to 1.
pub(super) fn search(
    matrices: &[(Array, Affine)],
    moments: &Moments,
    n_grid: usize,
) -> mlx_rs_core::Result<Array> {
    let mean = moments.magnitudes.divide(
        &moments
            .magnitudes
            .scalar_like(moments.count.max(1) as f32)?,
    )?;
    let mean = mean.maximum(&mean.scalar_like(1e-4)?)?;
    let mut best = (f32::INFINITY, mean.ones_like()?);
    for step in 0..n_grid {
        let exponent = step as f32 / n_grid as f32;
        let scales = mean.power(&mean.scalar_like(exponent)?)?;
        let middle = scales
            .max(All, false)?
            .multiply(&scales.min(All, false)?)?
            .sqrt()?;
        let scales = scales.divide(&middle)?;
        let mut total = mean.scalar_like(0.0)?;
        for (weight, affine) in matrices {
            let rounded = affine.rounded(&weight.multiply(&scales)?)?;
            let errors = rounded.dense()?.divide(&scales)?.subtract(weight)?;
            total = total.add(&loss(&errors, &moments.products)?)?;
        }
        eval([&total, &scales])?;
        let total = total.item::<f32>()?;
        if total < best.0 {
            best = (total, scales);
        }
    }
    Ok(best.1)
}

/// Rounds `weight` `[out, in]` after narrowing each group's range to the best of `n_grid`
/// fractions. The error of a group is computed from the moments of its own inputs only.
pub(super) fn clipped(
    weight: &Array,
    products: &Array,
    affine: Affine,
    n_grid: usize,
) -> mlx_rs_core::Result<Rounded> {
    let size = affine.group_size;
    let groups = weight.dim(1)? / size;
    // The blocks on the diagonal: [groups, size, size].
    let blocks = (0..groups)
        .map(|g| {
            let (from, to) = (g * size, (g + 1) * size);
            products.slice(&[from, from], &[to, to], &[1, 1])
        })
        .collect::<mlx_rs_core::Result<Vec<_>>>()?;
    let blocks = mlx_rs_core::stack(&blocks.iter().collect::<Vec<_>>(), 0)?;
    let grouped = affine.grouped(weight)?;
    let (low, high) = (grouped.min(-1, true)?, grouped.max(-1, true)?);
    let mut best: Option<(Array, Array, Array)> = None;
    for step in 0..n_grid {
        let share = 1.0 - MOST_CLIPPED * step as f32 / n_grid as f32;
        let share = weight.scalar_like(share)?;
        let narrow = grouped.clip(Some(&low.multiply(&share)?), Some(&high.multiply(&share)?))?;
        let (scales, biases) = affine.factors(&narrow.reshape(weight.shape())?)?;
        let (s, b) = (scales.expand_dims(-1)?, biases.expand_dims(-1)?);
        let codes = affine.codes(&grouped, &s, &b)?;
        let errors = codes.multiply(&s)?.add(&b)?.subtract(&grouped)?;
        // Transposes [out, groups, size] to [groups, out, size], and the losses back to [out,
        // groups].
        let turned = errors.swap_axes(0, 1)?;
        let losses = turned.matmul(&blocks)?.multiply(&turned)?.sum(-1, false)?;
        let losses = losses.swap_axes(0, 1)?;
        let next = match best {
            None => (losses, scales, biases),
            Some((least, old_scales, old_biases)) => {
                let better = losses.less(&least)?;
                (
                    where_(&better, &losses, &least)?,
                    where_(&better, &scales, &old_scales)?,
                    where_(&better, &biases, &old_biases)?,
                )
            }
        };
        eval([&next.0, &next.1, &next.2])?;
        best = Some(next);
    }
    let Some((_, scales, biases)) = best else {
        return affine.rounded(weight);
    };
    let codes = affine.codes(&grouped, &scales.expand_dims(-1)?, &biases.expand_dims(-1)?)?;
    let codes = codes.reshape(weight.shape())?;
    codes.eval()?;
    Ok(Rounded {
        codes,
        scales,
        biases,
        affine,
    })
}
