//! Adapters that requests select by name. They share the model's weights, and requests with
//! different adapters run in one batch.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::decoder::{Adapted, Seen};
use super::files::read;
use super::stored::hash_of_files;
use crate::arch::Decoder;
use crate::nn::adapter::{Deltas, ParamSlot, Pass};

/// An adapter that requests select by name.
#[derive(Debug)]
pub struct NamedAdapter {
    hash: String,
    group: u64,
    deltas: Arc<Deltas>,
}

impl NamedAdapter {
    /// Returns a hash of the adapter's files. Equal files give equal keys and values.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns the group of adapters whose rows can share a pass, at least 1. All adapters of a
    /// group change the same layers. Otherwise, one row's adapter would disable a layer's fused
    /// form for all rows, and results would differ in their last bits.
    #[must_use]
    pub fn group(&self) -> u64 {
        self.group
    }

    /// The adapter's changes of the model's weights.
    #[must_use]
    pub fn deltas(&self) -> &Arc<Deltas> {
        &self.deltas
    }

    /// Returns `decoder` with this adapter in all passes.
    #[must_use]
    pub fn on(&self, decoder: Arc<dyn Decoder>) -> Arc<dyn Decoder> {
        let pass = Arc::new(Pass::of(Arc::clone(&self.deltas)));
        let seen = Seen::These(pass);
        Arc::new(Adapted { decoder, seen })
    }
}

/// The adapters of a model that requests select by name.
#[derive(Debug, Default)]
pub struct NamedAdapters {
    by_name: BTreeMap<String, Arc<NamedAdapter>>,
    groups: u64,
}

impl NamedAdapters {
    /// Adds the adapter in `dir` for the layers in `all`. `divisible` says whether rows with
    /// different adapters can share passes of the network.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the name is empty or taken; the errors of loading an
    /// adapter.
    pub(crate) fn add(
        &mut self,
        name: &str,
        dir: &Path,
        all: &[Arc<ParamSlot>],
        divisible: bool,
    ) -> Result<()> {
        let invalid = |message| Err(Error::new(ErrorKind::InvalidOption, message));
        if name.is_empty() {
            return invalid(String::from("the adapter's name is empty"));
        }
        if self.by_name.contains_key(name) {
            return invalid(format!("there is already an adapter `{name}`"));
        }
        // Named adapters need a complete model in this process, so no block may be missing.
        let (deltas, _) = read(all, 0, dir)?;
        let hash = hash_of_files(dir).map_err(|e| {
            Error::new(ErrorKind::Io, "cannot read the adapter's files")
                .with_path(dir)
                .with_source(e)
        })?;
        let deltas: Deltas = deltas.into_iter().collect();
        let same = self.by_name.values().find(|other| {
            divisible && deltas.is_divisible() && deltas.has_layers_of(&other.deltas)
        });
        let group = match same.filter(|other| other.deltas.is_divisible()) {
            Some(other) => other.group,
            None => {
                self.groups += 1;
                self.groups
            }
        };
        let adapter = NamedAdapter {
            hash,
            group,
            deltas: Arc::new(deltas),
        };
        self.by_name.insert(name.to_owned(), Arc::new(adapter));
        Ok(())
    }

    /// Removes an adapter. Running requests keep using it. Returns whether it existed.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        self.by_name.remove(name).is_some()
    }

    /// Removes all adapters.
    pub(crate) fn clear(&mut self) {
        self.by_name.clear();
    }

    /// Returns the adapter of this name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] with the names that exist.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<NamedAdapter>> {
        self.by_name.get(name).cloned().ok_or_else(|| {
            let names: Vec<&str> = self.by_name.keys().map(String::as_str).collect();
            let there = match names.as_slice() {
                [] => String::from("add it with add_adapter"),
                names => format!("there are: {}", names.join(", ")),
            };
            let message = format!("the model has no adapter `{name}`; {there}");
            Error::new(ErrorKind::InvalidOption, message)
        })
    }
}
