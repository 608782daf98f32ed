//! How a configuration says that weights are quantized: the layout of mlx-lm, with its exceptions
//! by layer. Other tools' quantizations are named and refused.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::fields::{Fields, shown};

/// How a matrix is quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantConfig {
    /// Neighboring weights of a row that share scale and bias.
    pub group_size: i32,
    /// Bits of a weight.
    pub bits: i32,
    /// MLX's name for what the bits mean.
    pub mode: String,
}

/// One way for all matrices that have scales, and those that differ, by the layer's name such as
/// `model.layers.3.mlp.down_proj`; `None` there means dense.
pub(super) type Parsed = (Option<QuantConfig>, BTreeMap<String, Option<QuantConfig>>);

/// The group sizes that MLX has kernels for.
pub(super) const GROUP_SIZES: [i32; 3] = [32, 64, 128];
/// The widths that MLX has kernels for.
pub(super) const BITS: [i32; 6] = [2, 3, 4, 5, 6, 8];

/// An error's text and whether the fault is that we lack the feature.
pub(super) type QuantFault = super::rope::RopeFault;

fn unsupported(message: String) -> QuantFault {
    QuantFault {
        message,
        unsupported: true,
    }
}

pub(super) fn parse(fields: &Fields<'_>) -> Result<Parsed, QuantFault> {
    let (name, map) = match fields.object("quantization")? {
        Some(map) => ("quantization", map),
        None => match fields.object("quantization_config")? {
            Some(map) => ("quantization_config", map),
            None => return Ok((None, BTreeMap::new())),
        },
    };
    if let Some(method) = map.get("quant_method") {
        return Err(unsupported(format!(
            "weights quantized with {} are not supported; use a checkpoint converted for MLX",
            shown(method)
        )));
    }
    let default = parse_one(name, map, None)?;
    let mut overrides = BTreeMap::new();
    for (layer, value) in map {
        let parsed = match value {
            Value::Bool(false) => None,
            Value::Bool(true) => Some(default.clone()),
            Value::Object(own) => Some(parse_one(&format!("{name}.{layer}"), own, Some(&default))?),
            _ => continue, // group_size, bits, mode, and what we do not know
        };
        overrides.insert(layer.clone(), parsed);
    }
    Ok((Some(default), overrides))
}

fn parse_one(
    place: &str,
    map: &Map<String, Value>,
    default: Option<&QuantConfig>,
) -> Result<QuantConfig, QuantFault> {
    let one_of = |field: &str, allowed: &[i32], default: Option<i32>| {
        let value = match (map.get(field), default) {
            (Some(value), _) => value,
            (None, Some(default)) => return Ok(default),
            (None, None) => {
                return Err(QuantFault::from(format!(
                    "the field {place}.{field} is missing"
                )));
            }
        };
        let number = value.as_i64().and_then(|n| i32::try_from(n).ok());
        number.filter(|n| allowed.contains(n)).ok_or_else(|| {
            let allowed: Vec<_> = allowed.iter().map(i32::to_string).collect();
            QuantFault::from(format!(
                "{place}.{field} is {}; it must be one of {}",
                shown(value),
                allowed.join(", ")
            ))
        })
    };
    match map.get("mode") {
        None | Some(Value::Null) => {}
        Some(Value::String(mode)) if mode == "affine" => {}
        Some(other) => {
            return Err(unsupported(format!(
                "{place}.mode {} is not supported; supported is affine",
                shown(other)
            )));
        }
    }
    Ok(QuantConfig {
        group_size: one_of("group_size", &GROUP_SIZES, default.map(|d| d.group_size))?,
        bits: one_of("bits", &BITS, default.map(|d| d.bits))?,
        mode: String::from("affine"),
    })
}
