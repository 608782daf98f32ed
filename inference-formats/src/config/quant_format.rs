//! The quantization formats of MLX, and errors for configurations that name another format.

use serde_json::Value;

use super::fields::shown;

/// How a matrix is quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantConfig {
    /// Number of adjacent weights in a row that share a scale and a bias.
    pub group_size: i32,
    /// Bits of a weight.
    pub bits: i32,
    /// MLX's name for the meaning of the bits, such as `affine` or `mxfp4`.
    pub mode: String,
}

/// The quantization formats of MLX: mode, group sizes, bits.
pub(super) const FORMATS: [(&str, &[i32], &[i32]); 4] = [
    ("affine", &[32, 64, 128], &[2, 3, 4, 5, 6, 8]),
    ("mxfp4", &[32], &[4]),
    ("mxfp8", &[32], &[8]),
    ("nvfp4", &[16], &[4]),
];

/// Checks that MLX supports the format.
pub(super) fn fits(config: &QuantConfig) -> Result<(), String> {
    let Some((_, groups, bits)) = FORMATS.iter().find(|(mode, ..)| *mode == config.mode) else {
        return Err(format!(
            "quantization.mode is {:?}, which is unknown",
            config.mode
        ));
    };
    for (field, value, allowed) in [
        ("group_size", config.group_size, groups),
        ("bits", config.bits, bits),
    ] {
        if !allowed.contains(&value) {
            return Err(format!(
                "quantization.{field} is {value}; for {} it must be one of {allowed:?}",
                config.mode
            ));
        }
    }
    Ok(())
}

/// A message, and whether a feature is unsupported (otherwise the file is invalid).
pub(super) type QuantFault = super::rope::RopeFault;

pub(super) fn unsupported(message: String) -> QuantFault {
    QuantFault {
        message,
        unsupported: true,
    }
}

pub(super) fn unknown_mode(place: &str, mode: &Value) -> QuantFault {
    let known: Vec<_> = FORMATS.iter().map(|(mode, ..)| *mode).collect();
    unsupported(format!(
        "{place}.mode {} is not supported; supported are {}",
        shown(mode),
        known.join(", ")
    ))
}
