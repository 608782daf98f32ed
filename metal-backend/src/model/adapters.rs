//! Adapters of a loaded model: put on, exchanged and taken off while it answers. What they are is in
//! `adapter/`.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use inference::{Adapter, LoraConfig, Result, TokenModel, TrainableModel};
use mlx_rs_core::Array;

use super::{Engine, MlxModel, locked};
use crate::adapter::{AdapterKind, LoraAdapter, key};
use crate::arch::Decoder;
use crate::cache::{CacheOptions, Caches, Row};
use crate::nn::adapter::Passes;
use crate::nn::attention::Positions;
use crate::nn::hooks::Watch;

/// A decoder whose passes see all of a change of the adapter, or none of it.
#[derive(Debug)]
pub(super) struct Adapted {
    pub decoder: Box<dyn Decoder>,
    pub passes: Arc<Passes>,
}

impl Decoder for Adapted {
    fn forward(
        &self,
        ids: &Array,
        rows: &mut [Row<'_>],
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> mlx_rs_core::Result<Array> {
        self.passes
            .pass(|| self.decoder.forward(ids, rows, positions, watch))
    }

    fn new_caches(&self, options: &CacheOptions) -> Caches {
        self.decoder.new_caches(options)
    }

    fn keys_of(&self, layer: usize) -> usize {
        self.decoder.keys_of(layer)
    }
}

impl Engine {
    /// What the matrices inside of blocks are called, such as `self_attn.q_proj`.
    pub fn layer_names(&self) -> BTreeSet<String> {
        let sites = locked(&self.sites);
        let inside = sites
            .iter()
            .filter(|site| site.is_matrix() && site.block().is_some());
        inside.map(|site| key(site.name()).to_owned()).collect()
    }

    /// The adapter on the model, if any.
    pub fn adapter(&self) -> Option<LoraAdapter> {
        locked(&self.adapter).clone()
    }

    /// Puts a fresh adapter on the model, in place of another.
    pub fn apply_lora(
        &self,
        config: &LoraConfig,
        kind: AdapterKind,
        seed: u64,
    ) -> Result<LoraAdapter> {
        self.check_open()?;
        let mut held = locked(&self.adapter);
        let sites = locked(&self.sites).clone();
        let architecture = &self.info.architecture;
        let adapter = self
            .scope(|| LoraAdapter::fresh(&sites, config, kind, seed, architecture, &self.passes))?;
        *held = Some(adapter.clone());
        self.adapter_changed();
        Ok(adapter)
    }

    /// Puts the adapter of a directory on the model, in place of another.
    pub fn load_adapter(&self, dir: &Path) -> Result<LoraAdapter> {
        self.check_open()?;
        let mut held = locked(&self.adapter);
        let sites = locked(&self.sites).clone();
        let architecture = &self.info.architecture;
        let adapter = self.scope(|| LoraAdapter::load(&sites, dir, architecture, &self.passes))?;
        *held = Some(adapter.clone());
        self.adapter_changed();
        Ok(adapter)
    }

    /// Takes the adapter off the model, if there is one.
    pub fn remove_adapter(&self) -> Result<()> {
        self.check_open()?;
        let mut held = locked(&self.adapter);
        if let Some(adapter) = held.take() {
            adapter.remove(&self.passes);
            self.adapter_changed();
        }
        Ok(())
    }

    /// What keeps forward passes and changes of the adapter apart.
    pub(crate) fn passes(&self) -> &Passes {
        &self.passes
    }

    /// Counts the changes of the adapter and of its numbers.
    pub fn adapter_epoch(&self) -> u64 {
        self.prefixes().epoch()
    }

    /// Begins an epoch of the adapter; call it once its numbers stand. What was computed with those
    /// before is forgotten, and what running requests compute is not kept.
    pub fn adapter_changed(&self) {
        self.prefixes().renew();
    }
}

impl TrainableModel for MlxModel {
    fn apply_lora(&self, config: &LoraConfig) -> Result<Box<dyn Adapter>> {
        let adapter = self.engine.apply_lora(config, AdapterKind::Lora, 0)?;
        Ok(Box::new(adapter))
    }

    fn load_adapter(&self, path: &Path) -> Result<Box<dyn Adapter>> {
        let adapter = self.engine.load_adapter(path)?;
        Ok(Box::new(adapter))
    }

    fn remove_adapter(&self) -> Result<()> {
        self.engine.remove_adapter()
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        TokenModel::encode(self, text, true)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        TokenModel::decode(self, ids)
    }

    fn num_layers(&self) -> usize {
        self.engine.info.num_layers
    }
}
