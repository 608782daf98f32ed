//! Records which options a file contains, and removes mlx-lm options that have no effect here.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Records which options were given explicitly. It covers the options whose default depends on the
/// model or on an earlier adapter.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs, reason = "the names are those of the options")]
pub struct Given {
    pub fine_tune_type: bool,
    pub num_layers: bool,
    pub rank: bool,
    pub dropout: bool,
    pub scale: bool,
    pub keys: bool,
    pub method: bool,
    pub batch_order: bool,
}

impl Given {
    /// Records that an option was given.
    pub(super) fn mark(&mut self, option: &str) {
        match option {
            "fine_tune_type" => self.fine_tune_type = true,
            "num_layers" => self.num_layers = true,
            "rank" => self.rank = true,
            "dropout" => self.dropout = true,
            "scale" => self.scale = true,
            "keys" => self.keys = true,
            "method" => self.method = true,
            "batch_order" => self.batch_order = true,
            _ => {}
        }
    }
}

/// Equality of configurations depends only on values, not on whether options were given.
impl PartialEq for Given {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// The options of [`Given`] as they appear in a file; `null` means absent.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Written {
    fine_tune_type: Option<IgnoredAny>,
    num_layers: Option<IgnoredAny>,
    method: Option<IgnoredAny>,
    batch_order: Option<IgnoredAny>,
    lora_parameters: Option<Shape>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Shape {
    rank: Option<IgnoredAny>,
    dropout: Option<IgnoredAny>,
    scale: Option<IgnoredAny>,
    keys: Option<IgnoredAny>,
}

impl Written {
    pub(super) fn given(self) -> Given {
        let shape = self.lora_parameters.unwrap_or_default();
        Given {
            fine_tune_type: self.fine_tune_type.is_some(),
            num_layers: self.num_layers.is_some(),
            rank: shape.rank.is_some(),
            dropout: shape.dropout.is_some(),
            scale: shape.scale.is_some(),
            keys: shape.keys.is_some(),
            method: self.method.is_some(),
            batch_order: self.batch_order.is_some(),
        }
    }
}

/// Removes mlx-lm options that have no effect here, and `null` values, which mlx-lm treats as
/// absent. Returns whether it removed anything.
pub(super) fn without_harmless(config: &mut Value) -> bool {
    let Some(options) = config.as_object_mut() else {
        return false;
    };
    let before = options.len();
    options.retain(|name, value| {
        let harmless = match name.as_str() {
            // The path of the config file and the title of reports are not used here.
            "config" | "project_name" => value.is_string(),
            // Controls when MLX returns memory; results do not change.
            "clear_cache_threshold" => value.is_number(),
            // This engine never runs code from a model, so `false` is harmless.
            "trust_remote_code" => value == &Value::Bool(false),
            "report_to" => value == "",
            _ => false,
        };
        !harmless && !value.is_null()
    });
    options.len() < before
}
