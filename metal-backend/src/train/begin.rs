//! Starts a run from an existing adapter. The run uses the shape of that adapter, and the user's
//! options must agree with it. `run.rs` runs the training.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::io;
use serde_json::json;

use super::config::{FineTuneType, TrainConfig};
use crate::adapter::{AdapterKind, CONFIG_FILE, LoraAdapter, WEIGHTS_FILE};
use crate::checkpoint::files::invalid;
use crate::nn::adapter::{Delta, Passes};

/// An adapter in a directory: the user's directory, or a temporary one that was made for a single
/// file.
pub(super) enum Staged {
    Given(PathBuf),
    Made(tempfile::TempDir, Option<String>),
}

impl Staged {
    /// The directory.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Given(path) => path,
            Self::Made(dir, _) => dir.path(),
        }
    }

    /// Returns a note for the user, if the adapter's settings had to be assumed.
    pub(super) fn note(&self) -> Option<&str> {
        match self {
            Self::Given(_) => None,
            Self::Made(_, note) => note.as_deref(),
        }
    }
}

/// Returns a directory for the adapter at `path` ([`TrainConfig::resume_adapter_file`]). A single
/// file is copied to a temporary directory. If no configuration is beside the file, one is made
/// from the tensors and `config`.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn stage(path: &Path, config: &TrainConfig) -> Result<Staged> {
    if path.is_dir() {
        return Ok(Staged::Given(path.to_owned()));
    }
    let failed = |e: std::io::Error| {
        Error::new(
            ErrorKind::Io,
            format!(
                "cannot read the adapter; give a directory with {CONFIG_FILE}, or a .safetensors file"
            ),
        )
        .with_path(path)
        .with_source(e)
    };
    std::fs::File::open(path).map_err(failed)?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let beside = parent.unwrap_or(Path::new(".")).join(CONFIG_FILE);
    let made = tempfile::tempdir().map_err(failed)?;
    std::fs::copy(path, made.path().join(WEIGHTS_FILE)).map_err(failed)?;
    let to = made.path().join(CONFIG_FILE);
    if beside.is_file() {
        std::fs::copy(beside, to).map_err(failed)?;
        return Ok(Staged::Made(made, None));
    }
    let text = described(path, config)?.to_string();
    std::fs::write(to, text).map_err(failed)?;
    let scale = config.lora_parameters.scale;
    let note = format!(
        "there is no {CONFIG_FILE} beside {}; its scale is taken to be {scale} (--scale)",
        path.display()
    );
    Ok(Staged::Made(made, Some(note)))
}

/// Makes an adapter configuration for a single file. The type follows from the tensor names, rank
/// and layers from the tensors, the scale from `config`.
fn described(path: &Path, config: &TrainConfig) -> Result<serde_json::Value> {
    let loaded = io::load_safetensors(path)
        .map_err(|e| invalid(path, "the tensors cannot be read").with_source(e))?;
    let any = |is: fn(&str) -> bool| loaded.arrays.keys().any(|name| is(name));
    let kind = if any(|n| n.ends_with(".m") || n.contains("lora_magnitude_vector")) {
        AdapterKind::Dora
    } else if any(|n| n.contains(".lora_")) {
        AdapterKind::Lora
    } else {
        AdapterKind::Full
    };
    let lora = &config.lora_parameters;
    let mut made = json!({
        "fine_tune_type": kind,
        "lora_parameters": {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout},
    });
    if any(|n| n.contains(".lora_A")) {
        made["peft_type"] = json!("LORA");
    }
    Ok(made)
}

/// Checks shape options that were given ([`TrainConfig::given`]) against the initial adapter. Sets
/// the others from that adapter. A given dropout replaces the adapter's dropout.
///
/// # Errors
/// [`ErrorKind::InvalidOption`], with the first option that contradicts the adapter.
pub(super) fn agree(
    config: &mut TrainConfig,
    adapter: &LoraAdapter,
    passes: &Passes,
) -> Result<()> {
    let fault = |option: &str, theirs: String, ours: String| {
        Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{option} is {ours}, but the adapter to begin with (resume_adapter_file) has {theirs}; leave \
                 {option} out, or begin with a fresh adapter"
            ),
        ))
    };
    let kind = match adapter.kind {
        AdapterKind::Lora => FineTuneType::Lora,
        AdapterKind::Dora => FineTuneType::Dora,
        AdapterKind::Full => FineTuneType::Full,
    };
    let given = config.given;
    if given.fine_tune_type && kind != config.fine_tune_type {
        let named = |kind: FineTuneType| format!("{kind:?}").to_lowercase();
        return fault("fine_tune_type", named(kind), named(config.fine_tune_type));
    }
    config.fine_tune_type = kind;
    layers(config, adapter, &fault)?;
    if kind == FineTuneType::Full {
        return Ok(());
    }
    let lora = &mut config.lora_parameters;
    for slot in adapter.slots() {
        let Some(delta) = slot.stored() else { continue };
        let Delta::LowRank(low) = delta.as_ref() else {
            continue;
        };
        let rank = low.a.shape().iter().rev().nth(1).copied().unwrap_or(0);
        let rank = usize::try_from(rank).unwrap_or(0);
        if given.rank && lora.rank != rank {
            return fault("rank", rank.to_string(), lora.rank.to_string());
        }
        if given.scale && (lora.scale - low.scale).abs() > 1e-6 * low.scale.abs() {
            return fault("scale", low.scale.to_string(), lora.scale.to_string());
        }
        (lora.rank, lora.scale) = (rank, low.scale);
        if given.dropout {
            // Dropout is used only in training, so another dropout does not contradict the adapter.
            let mut low = low.clone();
            low.dropout = lora.dropout;
            passes.change([(Arc::clone(slot), Some(Delta::LowRank(low)))]);
        } else {
            lora.dropout = low.dropout;
        }
    }
    Ok(())
}

/// Checks the options for blocks and projections against the adapter, or sets them from it.
fn layers(
    config: &mut TrainConfig,
    adapter: &LoraAdapter,
    fault: &dyn Fn(&str, String, String) -> Result<()>,
) -> Result<()> {
    let first = adapter.slots().iter().filter_map(|slot| slot.block()).min();
    let last = first.map_or(0, |first| adapter.blocks.saturating_sub(first));
    let wanted = match usize::try_from(config.num_layers) {
        Ok(n) => n.min(adapter.blocks),
        Err(_) => adapter.blocks,
    };
    if config.given.num_layers && first.is_some() && wanted != last {
        return fault(
            "num_layers",
            last.to_string(),
            config.num_layers.to_string(),
        );
    }
    if !config.given.num_layers {
        config.num_layers = last as i64;
    }
    if config.fine_tune_type == FineTuneType::Full {
        return Ok(());
    }
    let keys: BTreeSet<String> = adapter
        .slots()
        .iter()
        .map(|slot| adapter.naming.key(slot.name()))
        .collect();
    let have: Vec<String> = keys.into_iter().collect();
    match &config.lora_parameters.keys {
        Some(wanted) if config.given.keys => {
            let meant = |key: &str, target: &str| {
                key.strip_suffix(target)
                    .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            };
            let all_there = wanted.iter().all(|t| have.iter().any(|k| meant(k, t)));
            let all_meant = have.iter().all(|k| wanted.iter().any(|t| meant(k, t)));
            if !(all_there && all_meant) {
                return fault("keys", have.join(","), wanted.join(","));
            }
        }
        _ => config.lora_parameters.keys = Some(have),
    }
    Ok(())
}
