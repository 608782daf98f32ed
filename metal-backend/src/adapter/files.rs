//! Adapters to files and from them: `adapters.safetensors` and `adapter_config.json` as Python mlx-lm
//! writes them. What is read besides is in `stored.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use inference::{Adapter, Error, ErrorKind, Result};
use mlx_rs_core::io;
use serde_json::json;

use super::lora::{self, LoraAdapter};
use super::naming::{Naming, same_layer, turned};
use super::stored::{CONFIG_FILE, Stored, WEIGHTS_FILE};
use crate::error::engine;
use crate::nn::adapter::{Delta, Passes, Site};
use crate::workdir::replace;

impl LoraAdapter {
    /// Puts the adapter of a directory on the model, in place of what was there before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] naming the file and the number that does not fit this model.
    pub(crate) fn load(
        all: &[Arc<Site>],
        dir: &Path,
        architecture: &str,
        passes: &Passes,
    ) -> Result<Self> {
        load(all, dir, Naming::of(architecture), passes)
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

/// Writes an adapter to a directory, which is made where there is none. Each file is replaced as a whole,
/// the numbers last.
///
/// # Errors
/// When writing fails.
fn save(adapter: &LoraAdapter, dir: &Path) -> Result<()> {
    let io_error =
        |path: &Path, e: &std::io::Error| Error::new(ErrorKind::Io, e.to_string()).with_path(path);
    let sites: Vec<(&Arc<Site>, Arc<Delta>)> = adapter
        .sites()
        .iter()
        .filter_map(|site| Some((site, site.stored()?)))
        .collect();
    if sites.is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the adapter was taken off the model; there is nothing to save",
        ));
    }
    let blocks: Vec<usize> = sites.iter().filter_map(|(site, _)| site.block()).collect();
    let from = blocks.iter().min().copied().unwrap_or(0);
    let num_layers = adapter.blocks.saturating_sub(from).max(1);
    let mut config = json!({ "fine_tune_type": adapter.kind, "num_layers": num_layers });
    let low = sites.iter().find_map(|(_, delta)| match delta.as_ref() {
        Delta::LowRank(low) => Some(low),
        Delta::Whole(_) => None,
    });
    if let Some(low) = low {
        let rank = low.a.shape().iter().rev().nth(1).copied().unwrap_or(0);
        let mut keys: Vec<String> = sites
            .iter()
            .map(|(site, _)| adapter.naming.key(site.name()))
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
    for (site, delta) in &sites {
        for (end, part) in site.parts() {
            let part = match delta.as_ref() {
                Delta::LowRank(_) => turned(&part, site.kind()).map_err(engine("save"))?,
                Delta::Whole(_) => part,
            };
            let name = adapter.naming.theirs(site.name());
            arrays.insert(format!("{name}.{end}"), part);
        }
    }
    fs::create_dir_all(dir).map_err(|e| io_error(dir, &e))?;
    let path = dir.join(CONFIG_FILE);
    let text = serde_json::to_string_pretty(&config)
        .map_err(|e| Error::new(ErrorKind::Engine, e.to_string()))?;
    replace(&path, text.as_bytes())?;
    io::save_safetensors(dir.join(WEIGHTS_FILE), &arrays, &[("format", "mlx")])
        .map_err(|e| Error::new(ErrorKind::Io, e.to_string()).with_path(dir.join(WEIGHTS_FILE)))
}

/// Loads an adapter from a directory and puts it at the layers of `all` that it names, in place of what was
/// there. Nothing changes when it does not fit.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] naming the file and the number that does not fit this model.
fn load(all: &[Arc<Site>], dir: &Path, naming: Naming, passes: &Passes) -> Result<LoraAdapter> {
    let stored = Stored::read(dir)?;
    let mut deltas = Vec::new();
    let missing = |name: &str| {
        stored.bad(format!(
            "`{name}` is trained, which this model does not have"
        ))
    };
    for name in stored.names() {
        let mut own = all.iter().filter(|site| same_layer(name, site.name()));
        if !stored.is_whole() {
            let site = own.find(|s| s.is_matrix()).ok_or_else(|| missing(name))?;
            let low = stored.low_rank(name, site.kind(), &site.shape())?;
            deltas.push((Arc::clone(site), Delta::LowRank(low)));
            continue;
        }
        let own: Vec<_> = own.collect();
        for end in stored.ends(name) {
            let site = own.iter().find(|site| site.end() == end);
            let site = site.ok_or_else(|| missing(&format!("{name}.{end}")))?;
            let whole = stored.whole(name, end, &site.shape())?;
            deltas.push((Arc::clone(site), Delta::Whole(whole)));
        }
    }
    let new = deltas.into_iter().map(|(site, delta)| (site, Some(delta)));
    passes.change(lora::bare(all).chain(new));
    Ok(LoraAdapter::standing(all, stored.kind, naming))
}
