//! The formats of a model's matrices.

use std::path::{Path, PathBuf};

use inference::Result;
use mlx_rs_core::QuantMode;
use serde_json::Value;

use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::checkpoint::python_json;

/// The formats of the model's matrices, from its configuration.
pub(super) struct Formats {
    path: PathBuf,
    quantization: Value,
}

impl Formats {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path, MAX_TEXT_FILE)?;
        let mut config: Value = python_json::from_slice(text.as_bytes())
            .map_err(|e| invalid(&path, "not a JSON file").with_source(e))?;
        let quantization = ["quantization", "quantization_config"]
            .iter()
            .find_map(|key| config.get_mut(*key).map(Value::take))
            .unwrap_or(Value::Null);
        Ok(Self { path, quantization })
    }

    /// Returns group size, bits and mode of a layer's matrix.
    pub(super) fn of(&self, stem: &str) -> Result<(i32, i32, QuantMode)> {
        let entry = self.quantization.get(stem).filter(|v| v.is_object());
        let field = |name: &str| {
            entry
                .and_then(|entry| entry.get(name))
                .or_else(|| self.quantization.get(name))
        };
        let number = |name: &str| {
            field(name)
                .and_then(Value::as_i64)
                .and_then(|n| i32::try_from(n).ok())
                .ok_or_else(|| {
                    invalid(
                        &self.path,
                        format!("the quantization of `{stem}` has no {name}"),
                    )
                })
        };
        let mode = field("mode").and_then(Value::as_str).unwrap_or("affine");
        let mode = QuantMode::from_name(mode)
            .ok_or_else(|| invalid(&self.path, format!("there is no quantization `{mode}`")))?;
        Ok((number("group_size")?, number("bits")?, mode))
    }
}
