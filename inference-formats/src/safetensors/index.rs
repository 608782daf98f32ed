//! `model.safetensors.index.json`, which lists the tensors and their shards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::error::Result;
use serde::Deserialize;

use super::header::MAX_TENSORS;
use crate::files::{invalid, read_capped};

/// The largest accepted index, in bytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The fields of the file that are used.
#[derive(Debug, Deserialize)]
pub(super) struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = read_capped(path, MAX_INDEX_BYTES)?;
        let index: Self = serde_json::from_slice(&bytes)
            .map_err(|e| invalid(path, "not an index of shards").with_source(e))?;
        if index.weight_map.is_empty() {
            return Err(invalid(
                path,
                "weight_map is empty; it must name the tensors' shards",
            ));
        }
        if index.weight_map.len() > MAX_TENSORS {
            return Err(invalid(
                path,
                format!("weight_map has more than {MAX_TENSORS} entries"),
            ));
        }
        for shard in index.weight_map.values() {
            // The path is checked when the shard is opened. This checks only the extension.
            if !shard.ends_with(".safetensors") {
                return Err(invalid(
                    path,
                    format!("the shard {shard:?} is not named like a .safetensors file"),
                ));
            }
        }
        Ok(index)
    }

    /// The files in the index, sorted.
    pub(super) fn shards(&self) -> Vec<String> {
        self.weight_map
            .values()
            .collect::<BTreeSet<_>>()
            .into_iter()
            .cloned()
            .collect()
    }

    /// Each tensor with its shard.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.weight_map
            .iter()
            .map(|(name, shard)| (name.as_str(), shard.as_str()))
    }
}
