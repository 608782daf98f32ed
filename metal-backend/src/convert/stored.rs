//! Reads the existing quantization of a checkpoint from its `config.json`.

use std::collections::HashMap;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::QuantMode;
use serde_json::{Map, Value};

use super::rules::Format;
use super::source::Source;
use crate::checkpoint::files::invalid;

/// The formats of the quantized matrices in the source.
pub(super) struct StoredQuantization {
    pub is_quantized: bool,
    base: Option<Format>,
    layers: HashMap<String, Format>,
}

impl StoredQuantization {
    pub(super) fn read(source: &Source) -> Result<Self> {
        let mut stored = Self {
            is_quantized: false,
            base: None,
            layers: HashMap::new(),
        };
        let text = source.config.get("text_config");
        let places = [Some(&source.config), text.and_then(Value::as_object)];
        let map = places.into_iter().flatten().find_map(|config| {
            let map = config
                .get("quantization")
                .or_else(|| config.get("quantization_config"));
            map.and_then(Value::as_object)
        });
        let Some(map) = map else { return Ok(stored) };
        stored.is_quantized = true;
        if let Some(method @ ("gptq" | "awq" | "fp8")) =
            map.get("quant_method").and_then(Value::as_str)
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "weights packed by {method} are loaded as they are, and not converted; convert \
                     the model that they were made from"
                ),
            )
            .with_path(&source.path));
        }
        if map.contains_key("quant_method") && !map.contains_key("group_size") {
            return Ok(stored); // another tool quantized the model: tensors are copied unchanged
        }
        let base = format_of(map, None, &source.path)?;
        for (layer, value) in map {
            if let Some(fields) = value.as_object() {
                stored
                    .layers
                    .insert(layer.clone(), format_of(fields, Some(base), &source.path)?);
            }
        }
        stored.base = Some(base);
        Ok(stored)
    }

    /// The format of most matrices.
    pub(super) fn base(&self) -> Option<Format> {
        self.base
    }

    /// The format of the matrix `path`.
    pub(super) fn of(&self, path: &str) -> Option<Format> {
        self.layers.get(path).copied().or(self.base)
    }
}

fn format_of(map: &Map<String, Value>, base: Option<Format>, path: &Path) -> Result<Format> {
    let bad = |field: &str| {
        invalid(
            path,
            format!("quantization.{field} in config.json is not usable"),
        )
    };
    let number = |field: &str, base: Option<i32>| {
        let value = map
            .get(field)
            .and_then(Value::as_i64)
            .and_then(|n| i32::try_from(n).ok());
        value
            .or(base)
            .filter(|n| (1..=1024).contains(n))
            .ok_or_else(|| bad(field))
    };
    let mode = match map.get("mode") {
        None | Some(Value::Null) => base.map_or(QuantMode::Affine, |b| b.mode),
        Some(mode) => mode
            .as_str()
            .and_then(QuantMode::from_name)
            .ok_or_else(|| bad("mode"))?,
    };
    Ok(Format {
        bits: number("bits", base.map(|b| b.bits))?,
        group_size: number("group_size", base.map(|b| b.group_size))?,
        mode,
    })
}
