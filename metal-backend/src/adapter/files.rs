//! Loads and saves adapters in the layout of Python mlx-lm: `adapters.safetensors` and
//! `adapter_config.json`. `stored.rs` also reads other layouts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use inference::{Adapter, Error, ErrorKind, Result};
use mlx_rs_core::io;
use serde_json::json;

use super::kind::AdapterKind;
use super::lora::{self, LoraAdapter};
use super::naming::{Naming, same_layer, turned};
use super::part;
use super::stored::{CONFIG_FILE, Stored, WEIGHTS_FILE};
use crate::error::engine;
use crate::nn::adapter::{Delta, ParamSlot, Passes, block_of};
use crate::workdir::replace;

impl LoraAdapter {
    /// Applies the adapter in a directory to the model. It replaces the current adapter.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`], with the file and the tensor or setting that does not fit this
    /// model.
    pub(crate) fn load(
        all: &[Arc<ParamSlot>],
        blocks: usize,
        dir: &Path,
        architecture: &str,
        passes: &Passes,
    ) -> Result<Self> {
        let naming = Naming::for_architecture(architecture);
        load((all, blocks), dir, naming, passes)
    }
}

impl Adapter for LoraAdapter {
    fn parameter_names(&self) -> Vec<String> {
        self.params().into_keys().collect()
    }

    fn num_parameters(&self) -> usize {
        self.params().values().map(mlx_rs_core::Array::size).sum()
    }

    fn save(&self, path: &Path) -> Result<()> {
        save(self, path)
    }
}

/// Writes an adapter to a directory, which is created if missing. Replaces each file atomically,
/// the weights last.
///
/// # Errors
/// If writing fails.
fn save(adapter: &LoraAdapter, dir: &Path) -> Result<()> {
    let slots: Vec<(&Arc<ParamSlot>, Arc<Delta>)> = adapter
        .slots()
        .iter()
        .filter_map(|slot| Some((slot, slot.stored()?)))
        .collect();
    if slots.is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the adapter was removed from the model; there is nothing to save",
        ));
    }
    let blocks: Vec<usize> = slots.iter().filter_map(|(slot, _)| slot.block()).collect();
    let from = blocks.iter().min().copied().unwrap_or(0);
    let num_layers = adapter.blocks.saturating_sub(from).max(1);
    let mut config = json!({ "fine_tune_type": adapter.kind, "num_layers": num_layers });
    let low = slots.iter().find_map(|(_, delta)| match delta.as_ref() {
        Delta::LowRank(low) => Some(low),
        Delta::Whole(_) => None,
    });
    if let Some(low) = low {
        let rank = low.a.shape().iter().rev().nth(1).copied().unwrap_or(0);
        let mut keys: Vec<String> = slots
            .iter()
            .map(|(slot, _)| adapter.naming.key(slot.name()))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        config["lora_parameters"] = json!({
            "rank": rank,
            "scale": low.scale,
            "dropout": low.dropout,
            "alpha": low.scale * rank as f32,
            "keys": keys,
        });
    }
    let mut arrays = BTreeMap::new();
    for (slot, delta) in &slots {
        for (end, part) in slot.parts() {
            let part = match delta.as_ref() {
                Delta::LowRank(_) => turned(&part, slot.kind()).map_err(engine("save"))?,
                Delta::Whole(_) => part,
            };
            let name = adapter.naming.theirs(slot.name());
            arrays.insert(format!("{name}.{end}"), part);
        }
    }
    fs::create_dir_all(dir).map_err(|e| {
        Error::new(ErrorKind::Io, "cannot make the directory")
            .with_path(dir)
            .with_source(e)
    })?;
    let path = dir.join(CONFIG_FILE);
    let text = serde_json::to_string_pretty(&config).map_err(|e| {
        Error::new(ErrorKind::Engine, "the configuration cannot be written").with_source(e)
    })?;
    replace(&path, text.as_bytes())?;
    io::save_safetensors(dir.join(WEIGHTS_FILE), &arrays, &[("format", "mlx")]).map_err(|e| {
        Error::new(ErrorKind::Io, "cannot write the tensors")
            .with_path(dir.join(WEIGHTS_FILE))
            .with_source(e)
    })
}

/// Loads an adapter from a directory, and applies it to those layers in `all` that the adapter
/// names. It replaces the current adapter. On an error, nothing changes.
///
/// # Errors
/// The errors of [`read`].
fn load(
    (all, blocks): (&[Arc<ParamSlot>], usize),
    dir: &Path,
    naming: Naming,
    passes: &Passes,
) -> Result<LoraAdapter> {
    let (deltas, kind) = read(all, blocks, dir)?;
    let new = deltas.into_iter().map(|(slot, delta)| (slot, Some(delta)));
    passes.change(lora::bare(all).chain(new));
    Ok(LoraAdapter::standing(all, kind, naming))
}

/// The changes of an adapter, each with its slot.
pub(super) type SlotDeltas = Vec<(Arc<ParamSlot>, Delta)>;

/// Reads the adapter in `dir`. Returns its changes to the layers in `all`, and its kind. The
/// model's first `blocks` blocks may be in other processes, so changes of missing layers in these
/// blocks are ignored. If a layer is divided among processes, its change is this process's share.
///
/// # Errors
/// [`ErrorKind::InvalidModel`], with the file and the tensor or setting that does not fit this
/// model.
pub(super) fn read(
    all: &[Arc<ParamSlot>],
    blocks: usize,
    dir: &Path,
) -> Result<(SlotDeltas, AdapterKind)> {
    let stored = Stored::read(dir)?;
    let own: BTreeSet<usize> = all.iter().filter_map(|slot| slot.block()).collect();
    let is_elsewhere =
        |name: &str| block_of(name).is_some_and(|block| block < blocks && !own.contains(&block));
    let mut deltas = Vec::new();
    let missing = |name: &str| {
        stored.bad(format!(
            "`{name}` is trained, which this model does not have"
        ))
    };
    for name in stored.names().filter(|name| !is_elsewhere(name)) {
        let mut layer_slots = all.iter().filter(|slot| same_layer(name, slot.name()));
        if !stored.replaces_weights() {
            let slot = layer_slots
                .find(|s| s.is_matrix())
                .ok_or_else(|| missing(name))?;
            let low = stored.low_rank(name, slot.kind(), &slot.stored_shape())?;
            let delta = part::of(slot, Delta::LowRank(low))?;
            deltas.push((Arc::clone(slot), delta));
            continue;
        }
        let layer_slots: Vec<_> = layer_slots.collect();
        for end in stored.ends(name) {
            let slot = layer_slots.iter().find(|slot| slot.end() == end);
            let slot = slot.ok_or_else(|| missing(&format!("{name}.{end}")))?;
            let replacement = stored.replacement(name, end, &slot.stored_shape())?;
            let delta = part::of(slot, Delta::Whole(replacement))?;
            deltas.push((Arc::clone(slot), delta));
        }
    }
    Ok((deltas, stored.kind))
}
