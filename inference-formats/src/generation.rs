//! The sampling options that the authors of a model recommend, from transformers'
//! `generation_config.json` or the keys `general.sampling.*` of GGUF. A caller may use them as
//! defaults.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Result;
use crate::files::{invalid, read_text};
use crate::gguf::Gguf;

/// The name of the file.
const FILE: &str = "generation_config.json";
/// The maximum size of this file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The recommended sampling options; `None` for an option without a recommendation.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingDefaults {
    /// The temperature, from 0.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to sample from; 0 means no limit.
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens with this total probability: above 0, up to 1.
    pub top_p: Option<f32>,
    /// Minimum probability of a token relative to the most likely token: 0 to 1.
    pub min_p: Option<f32>,
    /// The factor by which repeated tokens become less likely; above 0.
    pub repeat_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// Reads `generation_config.json` in `dir`. Without such a file, all values are `None`.
    ///
    /// # Errors
    /// If the file cannot be read, is not JSON, or has a value outside the valid range.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE);
        if !path.is_file() {
            return Ok(Self::default());
        }
        let text = read_text(&path, MAX_FILE)?;
        let fields: Value = serde_json::from_str(&text)
            .map_err(|e| invalid(&path, "not a JSON file").with_source(e))?;
        let number = |name: &str| match fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value
                .as_f64()
                .map(|number| Some(number as f32))
                .ok_or_else(|| invalid(&path, format!("{name} is {value}, not a number"))),
        };
        let top_k = match fields.get("top_k") {
            None | Some(Value::Null) => None,
            Some(value) => Some(value.as_u64().ok_or_else(|| {
                invalid(
                    &path,
                    format!("top_k is {value}, not a whole number from 0"),
                )
            })?),
        };
        let defaults = Self {
            temperature: number("temperature")?,
            top_k: top_k.and_then(|k| usize::try_from(k).ok()),
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repeat_penalty: number("repetition_penalty")?,
        };
        defaults
            .checked()
            .map_err(|message| invalid(&path, message))
    }

    /// Reads the keys `general.sampling.*` of a GGUF file.
    ///
    /// # Errors
    /// If a key has another type, or a value outside the valid range.
    pub fn from_gguf(file: &Gguf) -> Result<Self> {
        let metadata = file.metadata();
        let number = |name: &str| metadata.f32(&format!("general.sampling.{name}"));
        let defaults = Self {
            temperature: number("temp")?,
            top_k: metadata.usize("general.sampling.top_k")?,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repeat_penalty: number("penalty_repeat")?,
        };
        defaults
            .checked()
            .map_err(|message| invalid(file.path(), message))
    }

    /// Returns these values, or a message about the first one that is out of range.
    fn checked(self) -> Result<Self, String> {
        let zero_to_one = 0.0..=1.0;
        let above_zero = |x: f32| x > 0.0 && x.is_finite();
        for (name, value, is_good, range) in [
            (
                "temperature",
                self.temperature,
                self.temperature.is_none_or(|t| t >= 0.0 && t.is_finite()),
                "0 or more",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p.is_none_or(|p| above_zero(p) && p <= 1.0),
                "above 0, at most 1",
            ),
            (
                "min_p",
                self.min_p,
                self.min_p.is_none_or(|p| zero_to_one.contains(&p)),
                "0 to 1",
            ),
            (
                "the repetition penalty",
                self.repeat_penalty,
                self.repeat_penalty.is_none_or(above_zero),
                "above 0",
            ),
        ] {
            if let (Some(value), false) = (value, is_good) {
                return Err(format!("{name} is {value}; it must be {range}"));
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::testing::Writer;

    fn read(text: &str) -> Result<SamplingDefaults> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), text).unwrap();
        SamplingDefaults::from_dir(dir.path())
    }

    #[test]
    fn the_fields_of_transformers_are_read() {
        let defaults = read(
            r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null,
                "repetition_penalty": 1.05, "eos_token_id": [1, 2]}"#,
        )
        .unwrap();
        assert_eq!(
            defaults,
            SamplingDefaults {
                temperature: Some(0.6),
                top_k: Some(20),
                top_p: Some(0.95),
                min_p: None,
                repeat_penalty: Some(1.05),
            }
        );
        assert_eq!(read("{}").unwrap(), SamplingDefaults::default());
        let empty = tempfile::tempdir().unwrap();
        let none = SamplingDefaults::from_dir(empty.path()).unwrap();
        assert_eq!(none, SamplingDefaults::default());
    }

    #[test]
    fn values_that_no_sampler_takes_are_named() {
        for (text, says) in [
            ("[", "not a JSON file"),
            (r#"{"temperature": "hot"}"#, "temperature is \"hot\""),
            (
                r#"{"temperature": -1}"#,
                "temperature is -1; it must be 0 or more",
            ),
            (r#"{"top_k": 1.5}"#, "top_k is 1.5, not a whole number"),
            (r#"{"top_k": -1}"#, "top_k is -1, not a whole number"),
            (r#"{"top_p": 0}"#, "top_p is 0; it must be above 0"),
            (r#"{"min_p": 2}"#, "min_p is 2; it must be 0 to 1"),
            (
                r#"{"repetition_penalty": 0}"#,
                "penalty is 0; it must be above 0",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message().contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn the_keys_of_gguf_are_read() {
        let base = || Writer::default().str("general.architecture", "llama");
        let (_dir, path) = base()
            .f32("general.sampling.temp", 0.7)
            .u32("general.sampling.top_k", 40)
            .f32("general.sampling.penalty_repeat", 1.1)
            .file();
        let defaults = SamplingDefaults::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
        assert_eq!(
            (defaults.temperature, defaults.top_k),
            (Some(0.7), Some(40))
        );
        assert_eq!((defaults.repeat_penalty, defaults.top_p), (Some(1.1), None));
        let (_dir, path) = base().f32("general.sampling.min_p", -0.5).file();
        let error = SamplingDefaults::from_gguf(&Gguf::open(&path).unwrap()).unwrap_err();
        assert!(error.message().contains("min_p is -0.5"), "{error}");
    }
}
