//! The sizes of the keys of Gemma 3n and Gemma 4, from their configuration. The last layers share
//! the keys of earlier layers. In Gemma 4, full layers have a separate head size and number of
//! heads.

use inference::Result;

use super::build::{int, invalid};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;

/// Returns the number of layers that compute keys. These are the first layers.
///
/// # Errors
/// If the configuration is inconsistent.
pub(super) fn own_layers(config: &ModelConfig) -> Result<usize> {
    let layers = config.num_hidden_layers;
    let shared = config
        .uint("num_kv_shared_layers", 0..=layers)?
        .unwrap_or(0);
    // Keys can only be shared if at least one layer computes keys.
    Ok(if shared < layers {
        layers - shared
    } else {
        layers
    })
}

/// Returns the number of key and value elements per token in all layers that compute keys.
///
/// # Errors
/// If a size in the configuration is invalid.
pub(super) fn key_numbers(config: &ModelConfig) -> Result<u64> {
    let mut numbers = 0u64;
    for layer in 0..own_layers(config)? {
        let (heads, head_dim) = key_sizes(config, layer)?;
        let heads = heads.map_or(config.num_key_value_heads as u64, u64::from);
        let head_dim = head_dim.map_or(config.head_size() as u64, u64::from);
        numbers = numbers.saturating_add(heads.saturating_mul(head_dim).saturating_mul(2));
    }
    Ok(numbers)
}

/// Returns whether a layer uses its keys as values.
pub(super) fn values_are_keys(config: &ModelConfig, layer: usize) -> Result<bool> {
    Ok(!config.slides(layer) && config.flag("attention_k_eq_v")?.unwrap_or(false))
}

/// Returns the number of key heads of a layer and their size. Each is `None` if it equals the
/// model's.
pub(super) fn key_sizes(config: &ModelConfig, layer: usize) -> Result<(Option<u32>, Option<u32>)> {
    let full = !config.slides(layer);
    let values_are_keys = values_are_keys(config, layer)?;
    // Configurations of transformers 5 have a list of differences for each layer. Published files
    // have separate fields for full layers.
    let listed = config
        .fields
        .get("per_layer_config")
        .and_then(|all| all.get(layer.to_string()));
    let int = |name: &str, n: usize| -> Result<u32> { int(name, n).map(i32::unsigned_abs) };
    let size = |name: &str, limit: usize, global: Option<&str>| -> Result<Option<u32>> {
        if let Some(value) = listed.and_then(|fields| fields.get(name)) {
            let n = value
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| (1..=limit).contains(n))
                .ok_or_else(|| {
                    invalid(format!(
                        "per_layer_config.{layer}.{name} is {value}; it must be from 1 to {limit}"
                    ))
                })?;
            return int(name, n).map(Some);
        }
        match global {
            Some(global) => config
                .uint(global, 1..=limit)?
                .map(|n| int(global, n))
                .transpose(),
            None => Ok(None),
        }
    };
    let head_dim = size(
        "head_dim",
        limits::HEAD_DIM,
        full.then_some("global_head_dim"),
    )?;
    let heads = size(
        "num_key_value_heads",
        limits::HEADS,
        values_are_keys.then_some("num_global_key_value_heads"),
    )?;
    Ok((heads, head_dim))
}
