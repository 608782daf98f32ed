//! Quantizations of other tools than MLX that the engine reads: GPTQ, AWQ, and FP8 with a scale for
//! each block.

use serde_json::{Map, Value};

use super::fields::shown;
use super::quant_format::{QuantConfig, QuantFault, unsupported};

/// How matrices are packed in safetensors files.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// Packed in the layout of MLX, or not packed.
    #[default]
    Mlx,
    /// As GPTQ packs them: `qweight` `[inputs * bits / 32, outputs]`, `qzeros`
    /// `[groups, outputs * bits / 32]`, `scales` `[groups, outputs]`, and `g_idx` `[inputs]`, the
    /// group of each input. Words hold the lowest element in their lowest bits.
    Gptq {
        /// The offset to add to each stored zero point: 1 in the first version of the format, 0 in
        /// the second.
        zero_offset: u32,
    },
    /// As AWQ packs them, 4 bits: `qweight` `[inputs, outputs / 8]`, `qzeros` and `scales` as in
    /// GPTQ. Words hold outputs 0, 2, 4, 6, 1, 3, 5, 7, beginning with the lowest bits.
    Awq,
    /// E4M3 values with one scale for each block: `weight` and `weight_scale_inv`.
    Fp8 {
        /// Rows and columns of a block.
        block: [usize; 2],
    },
}

impl Packing {
    /// The packing that `quantization_config` describes, with the affine format of MLX that it
    /// becomes. `None` for a `quant_method` that is not supported.
    pub(super) fn parse(
        method: &str,
        map: &Map<String, Value>,
    ) -> Result<Option<(Self, Option<QuantConfig>)>, QuantFault> {
        Ok(Some(match method {
            "gptq" => Self::gptq(map)?,
            "awq" => Self::awq(map)?,
            "fp8" => (Self::fp8(map)?, None),
            _ => return Ok(None),
        }))
    }

    fn gptq(map: &Map<String, Value>) -> Result<(Self, Option<QuantConfig>), QuantFault> {
        let zero_offset = match text(map, "checkpoint_format", "gptq")? {
            "gptq" => 1,
            "gptq_v2" => 0,
            other => return Err(not_read("checkpoint_format", other, "gptq and gptq_v2")),
        };
        let dynamic = map.get("dynamic").and_then(Value::as_object);
        if dynamic.is_some_and(|exceptions| !exceptions.is_empty()) {
            return Err(unsupported(
                "quantization_config.dynamic gives layers formats of their own, which is not \
                 supported for GPTQ; use a checkpoint converted for MLX"
                    .into(),
            ));
        }
        let affine = affine(map, &[2, 4, 8])?;
        Ok((Self::Gptq { zero_offset }, Some(affine)))
    }

    fn awq(map: &Map<String, Value>) -> Result<(Self, Option<QuantConfig>), QuantFault> {
        let version = text(map, "version", "gemm")?;
        if !version.eq_ignore_ascii_case("gemm") {
            return Err(not_read("version", version, "gemm"));
        }
        Ok((Self::Awq, Some(affine(map, &[4])?)))
    }

    fn fp8(map: &Map<String, Value>) -> Result<Self, QuantFault> {
        let format = text(map, "fmt", "e4m3")?;
        if format != "e4m3" {
            return Err(not_read("fmt", format, "e4m3"));
        }
        let sizes = map.get("weight_block_size").and_then(Value::as_array);
        let size = |i: usize| {
            let size = sizes.filter(|sizes| sizes.len() == 2)?.get(i)?.as_u64()?;
            usize::try_from(size).ok().filter(|size| *size > 0)
        };
        match (size(0), size(1)) {
            (Some(rows), Some(cols)) => Ok(Self::Fp8 {
                block: [rows, cols],
            }),
            _ => Err(unsupported(format!(
                "quantization_config.weight_block_size is {}; FP8 is read with two sizes of blocks",
                shown(map.get("weight_block_size").unwrap_or(&Value::Null))
            ))),
        }
    }
}

/// The affine format of MLX with the same values. Groups that MLX lacks are divided.
fn affine(map: &Map<String, Value>, allowed: &[i64]) -> Result<QuantConfig, QuantFault> {
    let bits = map.get("bits").unwrap_or(&Value::Null);
    let Some(bits) = bits.as_i64().filter(|bits| allowed.contains(bits)) else {
        let allowed: Vec<_> = allowed.iter().map(i64::to_string).collect();
        return Err(unsupported(format!(
            "quantization_config.bits is {}; supported are {}",
            shown(bits),
            allowed.join(", ")
        )));
    };
    let stored = map.get("group_size").and_then(Value::as_i64);
    let group_size = match stored {
        // One group for a whole row.
        Some(-1) => 128,
        Some(size) if size > 0 => divided_group(size.unsigned_abs()),
        _ => {
            return Err(QuantFault::from(format!(
                "quantization_config.group_size is {}; it must be -1 or at least 1",
                shown(map.get("group_size").unwrap_or(&Value::Null))
            )));
        }
    };
    Ok(QuantConfig {
        group_size,
        bits: bits as i32,
        mode: String::from("affine"),
    })
}

/// The largest group of MLX that divides groups of `stored` weights; the smallest if none does.
fn divided_group(stored: u64) -> i32 {
    let fits = |size: &i32| stored.is_multiple_of(u64::from(size.unsigned_abs()));
    [128, 64, 32].into_iter().find(fits).unwrap_or(32)
}

fn text<'a>(
    map: &'a Map<String, Value>,
    key: &str,
    default: &'a str,
) -> Result<&'a str, QuantFault> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(QuantFault::from(format!(
            "quantization_config.{key} is {}; it must be a string",
            shown(other)
        ))),
    }
}

fn not_read(key: &str, value: &str, known: &str) -> QuantFault {
    unsupported(format!(
        "quantization_config.{key} {value:?} is not supported; supported: {known}"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(method: &str, map: &Value) -> Result<(Packing, Option<(i32, i32)>), String> {
        let parsed = Packing::parse(method, map.as_object().unwrap());
        let (packing, affine) = parsed.map_err(|e| e.message)?.unwrap();
        Ok((packing, affine.map(|q| (q.bits, q.group_size))))
    }

    #[test]
    fn formats_that_are_read() {
        let v1 = Packing::Gptq { zero_offset: 1 };
        for (method, map, expected) in [
            (
                "gptq",
                json!({"bits": 4, "group_size": 128}),
                (v1, Some((4, 128))),
            ),
            (
                "gptq",
                json!({"bits": 8, "group_size": -1, "dynamic": {}}),
                (v1, Some((8, 128))),
            ),
            (
                "gptq",
                json!({"bits": 2, "group_size": 96, "desc_act": true}),
                (v1, Some((2, 32))),
            ),
            (
                "gptq",
                json!({"bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}),
                (Packing::Gptq { zero_offset: 0 }, Some((4, 64))),
            ),
            (
                "awq",
                json!({"bits": 4, "group_size": 128, "version": "GEMM", "zero_point": true}),
                (Packing::Awq, Some((4, 128))),
            ),
            (
                "fp8",
                json!({"fmt": "e4m3", "weight_block_size": [128, 64]}),
                (Packing::Fp8 { block: [128, 64] }, None),
            ),
        ] {
            assert_eq!(parse(method, &map), Ok(expected), "{method} {map}");
        }
    }

    #[test]
    fn what_is_not_read_is_named() {
        for (method, map, says) in [
            ("gptq", json!({"bits": 3, "group_size": 128}), "bits is 3"),
            (
                "gptq",
                json!({"bits": 4, "group_size": 0}),
                "group_size is 0",
            ),
            (
                "gptq",
                json!({"bits": 4, "group_size": 128, "checkpoint_format": "marlin"}),
                "marlin",
            ),
            (
                "gptq",
                json!({"bits": 4, "group_size": 128, "dynamic": {"x": {}}}),
                "dynamic",
            ),
            (
                "awq",
                json!({"bits": 4, "group_size": 128, "version": "gemv"}),
                "gemv",
            ),
            ("awq", json!({"bits": 8, "group_size": 128}), "bits is 8"),
            (
                "fp8",
                json!({"fmt": "e5m2", "weight_block_size": [1, 1]}),
                "e5m2",
            ),
            (
                "fp8",
                json!({"weight_block_size": [128]}),
                "weight_block_size",
            ),
            (
                "fp8",
                json!({"weight_block_size": [128, 0]}),
                "weight_block_size",
            ),
            ("fp8", json!({}), "null"),
        ] {
            let message = parse(method, &map).unwrap_err();
            assert!(message.contains(says), "{message} does not say {says}");
        }
        let other = Packing::parse("bitsandbytes", &Map::new());
        assert!(other.is_ok_and(|other| other.is_none()));
    }
}
