//! Reads configurations from YAML and TOML.

use std::io::Read;
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::written::{Written, without_harmless};
use super::{TrainConfig, bad};

/// The maximum size of a config file in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The file format of a config.
#[derive(Clone, Copy)]
enum Format {
    Yaml,
    Toml,
}

impl Format {
    fn read<T: DeserializeOwned>(self, text: &str) -> std::result::Result<T, String> {
        match self {
            Self::Yaml => serde_saphyr::from_str(text).map_err(|e| e.to_string()),
            Self::Toml => toml::from_str(text).map_err(|e| e.to_string()),
        }
    }
}

impl TrainConfig {
    /// Reads and checks a file: `.yaml`, `.yml`, `.json` (mlx-lm's `adapter_config.json`) or
    /// `.toml`.
    ///
    /// # Errors
    /// `Io` if the file cannot be read; `InvalidOption` for another file type, and for a field that
    /// is unknown, of the wrong type or out of range. All errors contain the file's path.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let named = |e: Error| e.with_path(path).context("training config");
        let kind = path
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or_default();
        let parse = match kind.to_ascii_lowercase().as_str() {
            // JSON is a subset of YAML.
            "yaml" | "yml" | "json" => Self::from_yaml,
            "toml" => Self::from_toml,
            _ => {
                return Err(named(bad(
                    "the file's name must end in .yaml, .yml, .json or .toml",
                )));
            }
        };
        let io = |e: std::io::Error| {
            named(Error::new(ErrorKind::Io, "cannot read the file").with_source(e))
        };
        // Checked before the file is opened, because opening a pipe would block.
        if !path.metadata().map_err(io)?.is_file() {
            return Err(named(bad("it is not a regular file")));
        }
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|f| f.take(MAX_BYTES + 1).read_to_string(&mut text))
            .map_err(io)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(named(bad(format!(
                "the file has more than {MAX_BYTES} bytes; a config is small"
            ))));
        }
        parse(&text).map_err(named)
    }

    /// Parses YAML and checks the options.
    ///
    /// # Errors
    /// The errors of [`TrainConfig::read`].
    pub fn from_yaml(text: &str) -> Result<Self> {
        if text
            .lines()
            .all(|l| l.trim().is_empty() || l.trim_start().starts_with('#'))
        {
            return Ok(Self::default());
        }
        Self::read_by(Format::Yaml, text)
    }

    /// Parses TOML and checks the options.
    ///
    /// # Errors
    /// The errors of [`TrainConfig::read`].
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::read_by(Format::Toml, text)
    }

    /// Parses text in a format.
    fn read_by(format: Format, text: &str) -> Result<Self> {
        let wrong = |e: String| bad(helped(&e));
        match format.read::<Self>(text) {
            Ok(config) => config.checked(|| format.read(text).map_err(wrong)),
            Err(first) => {
                // The first parse was typed, so its errors have line numbers. The parse below
                // yields a `Value`, whose errors have none.
                let mut value: Value = format.read(text).map_err(|_| wrong(first.clone()))?;
                if !without_harmless(&mut value) {
                    return Err(wrong(first));
                }
                let again = |e: serde_json::Error| wrong(e.to_string());
                let config = Self::deserialize(&value).map_err(again)?;
                config.checked(|| Written::deserialize(&value).map_err(again))
            }
        }
    }

    fn checked(mut self, written: impl FnOnce() -> Result<Written>) -> Result<Self> {
        self.validate()?;
        self.given = written()?.given();
        Ok(self)
    }
}

/// Returns a parser's message, with a suggestion if a name is unknown.
fn helped(message: &str) -> String {
    // A parser's message may have several lines, which are joined into one.
    let message = message.trim().replace('\n', " ");
    let hint = |name: &str| match name {
        "hf_dataset" => {
            Some("give `data`, a directory with train.jsonl; data sets are not downloaded")
        }
        "alpha" => Some("write `scale`, which is alpha / rank"),
        _ => None,
    };
    let Some(name) = message
        .split_once("unknown field `")
        .and_then(|(_, rest)| rest.split_once('`'))
        .map(|(name, _)| name.to_owned())
    else {
        return message;
    };
    match hint(&name) {
        Some(hint) => format!("{message}; {hint}"),
        None => message,
    }
}
