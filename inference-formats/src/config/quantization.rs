//! Parses the quantization of a configuration: mlx-lm's form, with exceptions by layer, and the
//! forms of other tools. An unsupported quantization is an error that names it.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::fields::{Fields, shown};
use super::packing::Packing;
use super::quant_format::{FORMATS, QuantConfig, QuantFault, unknown_mode, unsupported};

/// What a configuration says about quantization.
#[derive(Debug, Default)]
pub(super) struct Parsed {
    /// The quantization of all matrices that have scales.
    pub default: Option<QuantConfig>,
    /// Exceptions by layer name, such as `model.layers.3.mlp.down_proj`; `None` for a dense layer.
    pub overrides: BTreeMap<String, Option<QuantConfig>>,
    pub packing: Packing,
}

pub(super) fn parse(fields: &Fields<'_>) -> Result<Parsed, QuantFault> {
    let (name, map) = match fields.object("quantization")? {
        Some(map) => ("quantization", map),
        None => match fields.object("quantization_config")? {
            Some(map) => ("quantization_config", map),
            None => return Ok(Parsed::default()),
        },
    };
    if let Some(method) = map.get("quant_method") {
        // OpenAI's format quantizes only the experts, in a layout that MLX supports.
        if method.as_str() == Some("mxfp4") {
            let packed = QuantConfig {
                group_size: 32,
                bits: 4,
                mode: String::from("mxfp4"),
            };
            return Ok(Parsed {
                default: Some(packed),
                ..Parsed::default()
            });
        }
        let other = Packing::parse(method.as_str().unwrap_or_default(), map)?;
        let (packing, default) = other.ok_or_else(|| {
            unsupported(format!(
                "weights quantized with {} are not supported (gptq, awq, fp8 and mxfp4 are); use a \
                 checkpoint converted for MLX",
                shown(method)
            ))
        })?;
        return Ok(Parsed {
            default,
            packing,
            ..Parsed::default()
        });
    }
    let default = parse_one(name, map, None)?;
    let mut overrides = BTreeMap::new();
    for (layer, value) in map {
        let parsed = match value {
            Value::Bool(false) => None,
            Value::Bool(true) => Some(default.clone()),
            Value::Object(fields) => Some(parse_one(
                &format!("{name}.{layer}"),
                fields,
                Some(&default),
            )?),
            _ => continue, // group_size, bits, mode, and unknown fields
        };
        overrides.insert(layer.clone(), parsed);
    }
    Ok(Parsed {
        default: Some(default),
        overrides,
        packing: Packing::Mlx,
    })
}

fn parse_one(
    place: &str,
    map: &Map<String, Value>,
    default: Option<&QuantConfig>,
) -> Result<QuantConfig, QuantFault> {
    let mode = match map.get("mode") {
        None | Some(Value::Null) => default.map_or("affine", |d| d.mode.as_str()),
        Some(Value::String(mode)) => mode,
        Some(other) => return Err(unknown_mode(place, other)),
    };
    let Some((mode, groups, bits)) = FORMATS.iter().find(|(known, ..)| *known == mode) else {
        return Err(unknown_mode(place, &Value::String(mode.to_owned())));
    };
    let one_of = |field: &str, allowed: &[i32], default: Option<i32>| {
        let value = match (map.get(field), default) {
            (Some(value), _) => value,
            (None, Some(default)) if allowed.contains(&default) => return Ok(default),
            // If a mode allows only one value, the file may omit it.
            (None, _) if allowed.len() == 1 => return Ok(allowed[0]),
            (None, _) => {
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
    Ok(QuantConfig {
        group_size: one_of("group_size", groups, default.map(|d| d.group_size))?,
        bits: one_of("bits", bits, default.map(|d| d.bits))?,
        mode: (*mode).to_owned(),
    })
}
