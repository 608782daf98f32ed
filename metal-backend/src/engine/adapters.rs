//! Applies, exchanges and removes the engine's adapter between forward passes. `adapter/`
//! implements adapters.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use inference::{Error, ErrorKind, LoraConfig, Result};

use super::Engine;
use crate::adapter::{AdapterKind, LoraAdapter, NamedAdapter, key};
use crate::nn::adapter::{ParamSlot, Passes};

impl Engine {
    /// Returns the names of matrices in blocks, without the block's prefix, such as
    /// `self_attn.q_proj`.
    pub fn layer_names(&self) -> BTreeSet<String> {
        let param_slots = self.param_slots.lock();
        let inside = param_slots
            .iter()
            .filter(|slot| slot.is_matrix() && slot.block().is_some());
        inside.map(|slot| key(slot.name()).to_owned()).collect()
    }

    /// Returns the slots of the model's weights.
    pub fn param_slots(&self) -> Vec<Arc<ParamSlot>> {
        self.param_slots.lock().clone()
    }

    /// The model's current adapter, if any.
    pub fn adapter(&self) -> Option<LoraAdapter> {
        self.adapter.lock().clone()
    }

    /// Applies a newly initialized adapter. It replaces the current adapter.
    pub fn apply_lora(
        &self,
        config: &LoraConfig,
        kind: AdapterKind,
        seed: u64,
    ) -> Result<LoraAdapter> {
        self.check_open()?;
        let mut current = self.adapter.lock();
        let param_slots = self.param_slots.lock().clone();
        let architecture = &self.info.architecture;
        let adapter = self.scope(|| {
            LoraAdapter::fresh(&param_slots, config, kind, seed, architecture, &self.passes)
        })?;
        *current = Some(adapter.clone());
        self.adapter_changed();
        Ok(adapter)
    }

    /// Applies the adapter in a directory. It replaces the current adapter.
    pub fn load_adapter(&self, dir: &Path) -> Result<LoraAdapter> {
        self.check_open()?;
        let mut current = self.adapter.lock();
        let param_slots = self.param_slots.lock().clone();
        let architecture = &self.info.architecture;
        // In one process, an adapter for a block that does not exist is an error.
        let blocks = if self.is_part() {
            self.info.num_layers
        } else {
            0
        };
        let files = self.hash_of_adapter(dir);
        let adapter = self
            .scope(|| LoraAdapter::load(&param_slots, blocks, dir, architecture, &self.passes))?;
        *current = Some(adapter.clone());
        self.adapter_changed();
        *self.adapter_files.lock() = files.map(|hash| (self.adapter_epoch(), hash));
        Ok(adapter)
    }

    /// Removes the adapter, if there is one.
    pub fn remove_adapter(&self) -> Result<()> {
        self.check_open()?;
        let mut current = self.adapter.lock();
        if let Some(adapter) = current.take() {
            adapter.remove(&self.passes);
            self.adapter_changed();
        }
        Ok(())
    }

    /// Adds an adapter that requests select by name. All named adapters share the model's weights.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for an encoder, for a model divided among processes, and for
    /// layers computed from a vindex; [`ErrorKind::InvalidOption`] for a bad name; the errors of
    /// loading an adapter.
    pub fn add_adapter(&self, name: &str, dir: &Path) -> Result<()> {
        self.check_open()?;
        let decoder = self.decoder()?;
        let refused = if self.is_part() {
            Some("a part of a model")
        } else if decoder.encoder().is_some() {
            Some("an encoder")
        } else if self.feed_forward().walks() {
            Some("a model whose layers walk")
        } else {
            None
        };
        if let Some(what) = refused {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("requests to {what} name no adapters; load it with adapter_path"),
            ));
        }
        let param_slots = self.param_slots.lock().clone();
        let mut named = self.named_adapters.lock();
        self.scope(|| named.add(name, dir, &param_slots, decoder.keeps_row_order()))
    }

    /// Removes a named adapter. Returns whether it existed.
    pub fn drop_adapter(&self, name: &str) -> bool {
        self.named_adapters.lock().remove(name)
    }

    /// Returns the adapter of this name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] with the names that exist.
    pub fn named_adapter(&self, name: &str) -> Result<Arc<NamedAdapter>> {
        self.named_adapters.lock().get(name)
    }

    /// The lock that separates forward passes from adapter changes.
    pub fn passes(&self) -> &Passes {
        &self.passes
    }

    /// Returns how often the adapter or its parameters have changed.
    pub fn adapter_epoch(&self) -> u64 {
        self.prefixes().epoch()
    }

    /// Begins an epoch of the adapter. Call it once the adapter's parameters are final. Drops the
    /// caches of earlier epochs. Requests that already run store no caches.
    pub fn adapter_changed(&self) {
        self.prefixes().renew();
    }
}
