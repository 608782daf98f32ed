//! Presets: named combinations of a model, instructions, parameters, a template, an adapter and
//! messages. Each preset is a small file beside the chat's history. Saved conversations use the
//! same format.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use inference::{GenerateOptions, Message};
use inference_formats::atomic::AtomicFile;
use rust_mlx::hub;
use serde::{Deserialize, Serialize};

use crate::cli::options::settings;
use crate::cli::terminal::bounded;
use crate::cli::terminal::failure::Failure;

/// Maximum size of a preset's file in bytes.
const MAX_BYTES: u64 = 64 << 20;
/// The parameter with the maximum number of cached positions.
const NUM_CTX: &str = "num_ctx";
/// Parameters of ollama that change only resources of its engine, not replies.
const RESOURCES: [&str; 10] = [
    "num_gpu",
    "num_thread",
    "num_batch",
    "num_keep",
    "main_gpu",
    "low_vram",
    "numa",
    "use_mmap",
    "use_mlock",
    "f16_kv",
];

/// A model with its settings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Preset {
    /// The model: an absolute path, a known name or `owner/name`.
    pub from: String,
    /// Instructions.
    pub system: Option<String>,
    /// A chat template in Jinja.
    pub template: Option<String>,
    /// The directory of an adapter.
    pub adapter: Option<String>,
    /// Parameters with values: the names that the chat's `/set` accepts, and `num_ctx`.
    pub parameters: Vec<(String, String)>,
    pub license: Vec<String>,
    /// A conversation to continue.
    pub messages: Vec<Message>,
}

/// The directory of the presets.
pub fn dir() -> Result<PathBuf, Failure> {
    Ok(hub::state_dir()?.join("presets"))
}

/// The normalized name for comparisons: without letter case and without `:latest`.
fn normal(name: &str) -> String {
    let name = name.trim().to_lowercase();
    name.strip_suffix(":latest").unwrap_or(&name).to_owned()
}

/// The file of the preset `name`; `None` if no preset can have this name.
fn file(name: &str) -> Result<Option<PathBuf>, Failure> {
    let name = normal(name);
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
    if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.chars().all(plain) {
        return Ok(None);
    }
    // Some file systems do not allow colons in file names.
    let name = name.replace(':', "%3a");
    Ok(Some(dir()?.join(format!("{name}.json"))))
}

pub fn find(name: &str) -> Result<Option<Preset>, Failure> {
    match file(name)? {
        Some(path) => read(&path),
        None => Ok(None),
    }
}

/// The preset in a file; `None` if the file does not exist.
pub fn read(path: &Path) -> Result<Option<Preset>, Failure> {
    let failed =
        |e: std::io::Error| Failure::failed(format!("cannot read {}: {e}", path.display()));
    match fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
        Ok(_) => {}
    }
    let text = bounded::read_text(path, MAX_BYTES).map_err(failed)?;
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|e| Failure::failed(format!("{} is damaged: {e}", path.display())))
}

/// Saves a preset under a name. An older preset with that name is replaced.
pub fn save(name: &str, preset: &Preset) -> Result<(), Failure> {
    let path = file(name)?.ok_or_else(|| {
        Failure::usage(format!(
            "{name:?} cannot name a preset; use letters, digits, `.`, `_`, `-` and `:`"
        ))
    })?;
    if hub::find(name).is_some() {
        return Err(Failure::usage(format!(
            "{name:?} is the name of a known model; take another for the preset"
        )));
    }
    write(&path, preset)
}

/// Writes the preset to a file that only its owner can read. The file appears completely or not at
/// all.
pub fn write(path: &Path, preset: &Preset) -> Result<(), Failure> {
    let put = || {
        let dir = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(dir)?;
        let mut file = AtomicFile::create_private(path)?;
        serde_json::to_writer_pretty(&mut file, preset)?;
        file.write_all(b"\n")?;
        file.commit()
    };
    put().map_err(|e: std::io::Error| {
        Failure::failed(format!("cannot write {}: {e}", path.display()))
    })
}

/// All presets, by name. A damaged preset causes a warning and is skipped.
pub fn all() -> Result<Vec<(String, PathBuf, Preset)>, Failure> {
    let mut presets = Vec::new();
    for entry in fs::read_dir(dir()?).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().replace("%3a", ":");
        let Some(name) = name.strip_suffix(".json") else {
            continue;
        };
        match read(&path) {
            Ok(Some(preset)) => presets.push((name.to_owned(), path, preset)),
            Ok(None) => {}
            Err(failure) => tracing::warn!("{}", failure.report().unwrap_or_default()),
        }
    }
    presets.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(presets)
}

/// Removes a preset. Returns the bytes of its file; `None` if there is no preset with this name.
pub fn remove(name: &str) -> Result<Option<u64>, Failure> {
    let Some(path) = file(name)? else {
        return Ok(None);
    };
    let Ok(metadata) = fs::metadata(&path) else {
        return Ok(None);
    };
    fs::remove_file(&path)
        .map_err(|e| Failure::failed(format!("cannot remove {}: {e}", path.display())))?;
    Ok(Some(metadata.len()))
}

/// The effect of a parameter.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// The parameter changes the text of replies.
    Used,
    /// The parameter affects only resources of ollama's engine.
    Resource,
}

/// Checks a parameter.
///
/// # Errors
/// If the name is unknown or the value is invalid.
pub fn check(name: &str, value: &str) -> Result<Kind, String> {
    if RESOURCES.contains(&name) {
        return Ok(Kind::Resource);
    }
    if name == NUM_CTX {
        return match value.parse::<usize>() {
            Ok(n) if n > 0 => Ok(Kind::Used),
            _ => Err(format!(
                "{value:?} is no value for {NUM_CTX}: 1 or more positions"
            )),
        };
    }
    if name == "num_predict" && matches!(value, "-1" | "-2") {
        return Ok(Kind::Used);
    }
    settings::set(&mut GenerateOptions::default(), name, value).map(|()| Kind::Used)
}

impl Preset {
    /// Sets the preset's parameters in `options`.
    pub fn apply(&self, options: &mut GenerateOptions) -> Result<(), Failure> {
        for (name, value) in &self.parameters {
            match (name.as_str(), value.as_str()) {
                (NUM_CTX, _) => {}
                // As in ollama, these values mean that the reply may fill the context.
                ("num_predict", "-1" | "-2") => options.max_tokens = usize::MAX,
                _ => settings::set(options, name, value).map_err(Failure::failed)?,
            }
        }
        Ok(())
    }

    /// Maximum number of cached positions, if the preset sets it.
    pub fn ctx_size(&self) -> Option<usize> {
        let given = self
            .parameters
            .iter()
            .rev()
            .find(|(name, _)| name == NUM_CTX);
        given?.1.parse().ok()
    }

    /// Returns this preset, with missing settings taken from `base`.
    #[must_use]
    pub fn over(self, base: Preset) -> Self {
        let mut parameters = base.parameters;
        let replaced = |name: &String| self.parameters.iter().any(|(n, _)| n == name);
        parameters.retain(|(name, _)| !replaced(name));
        parameters.extend(self.parameters);
        Self {
            from: base.from,
            system: self.system.or(base.system),
            template: self.template.or(base.template),
            adapter: self.adapter.or(base.adapter),
            parameters,
            license: [base.license, self.license].concat(),
            messages: if self.messages.is_empty() {
                base.messages
            } else {
                self.messages
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_files() {
        let at = |name: &str| {
            file(name)
                .unwrap()
                .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        };
        assert_eq!(at("Pirate:Latest").as_deref(), Some("pirate.json"));
        assert_eq!(at("pirate:v2").as_deref(), Some("pirate%3av2.json"));
        for bad in [
            "", ".", "..", "a/b", "../a", "a\\b", "a b", ".hidden", "a\0",
        ] {
            assert_eq!(at(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn parameters_reach_the_options() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let preset = Preset {
            parameters: vec![
                pair("temperature", "0.5"),
                pair("stop", "A"),
                pair("stop", "B"),
                pair("num_ctx", "64"),
                pair("num_predict", "-1"),
            ],
            ..Preset::default()
        };
        let mut options = GenerateOptions::default();
        preset.apply(&mut options).unwrap();
        assert_eq!(
            (options.sampling.temperature, options.max_tokens),
            (0.5, usize::MAX)
        );
        assert_eq!(options.stop.stop_strings, ["A", "B"]);
        assert_eq!(preset.ctx_size(), Some(64));
        assert_eq!(check("num_gpu", "1"), Ok(Kind::Resource));
        for (name, value) in [("num_ctx", "0"), ("mirostat", "1"), ("top_p", "2")] {
            assert!(check(name, value).is_err(), "{name}");
        }
        let over = Preset {
            parameters: vec![pair("stop", "C")],
            ..Preset::default()
        }
        .over(preset);
        assert!(over.parameters.contains(&pair("temperature", "0.5")));
        let stops = over.parameters.iter().filter(|(name, _)| name == "stop");
        assert_eq!(stops.count(), 1);
    }
}
