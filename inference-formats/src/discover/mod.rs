//! Finds models on disk without loading them: directories with `config.json` and safetensors files,
//! and `.gguf` files. Whether a model is complete and supported is for backends to decide.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::files::read_capped;
use crate::gguf::GgufSummary;
use crate::quantization::TYPES;

/// Maximum depth of the search below the given directory.
const MAX_DEPTH: usize = 4;
/// Maximum size of a `config.json` that is read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// The format of a model's files.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelFormat {
    /// A directory with `config.json` and safetensors files.
    Safetensors,
    /// One GGUF file.
    Gguf,
}

/// How weights are quantized.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantization {
    /// Bits per weight.
    pub bits: u32,
    /// The number of weights that share a scale.
    pub group_size: u32,
}

/// A model found on disk.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiscoveredModel {
    /// The directory or file to load.
    pub path: PathBuf,
    /// The architecture's name; empty if the files do not contain it.
    pub model_type: String,
    /// The files' format.
    pub format: ModelFormat,
    /// The quantization, if all weights share one.
    pub quantization: Option<Quantization>,
    /// The quantization's name, such as `Q4_1`, `4-bit` or `gptq 4-bit`. For an unquantized GGUF
    /// file, the type of its weights, such as `F16`.
    pub quantization_name: Option<String>,
    /// Number of weight files.
    pub num_files: usize,
    /// Total size of the weight files in bytes.
    pub bytes: u64,
}

/// An iterator over the models below a directory; see [`discover`].
#[derive(Debug)]
pub struct Discover {
    /// Entries to visit. The last element is visited next.
    stack: Vec<Visit>,
    /// Directories that were visited, with links resolved.
    seen: HashSet<PathBuf>,
}

#[derive(Debug)]
enum Visit {
    Directory(PathBuf, usize),
    Gguf(PathBuf),
    /// An error, which is reported in sequence, between the models before and after it.
    Fault(Error),
}

/// Searches `dir` and its subdirectories, up to a depth of 4, for models, sorted by path.
///
/// A directory with `config.json` and safetensors files is a model, and the search does not enter
/// it. Every other `.gguf` file is a model. A GGUF model in numbered parts (`-00001-of-00003.gguf`)
/// counts once, with the path of the first part. `dir` may itself be a model, or a `.gguf` file.
/// Links are followed, and each directory is visited once.
///
/// An unreadable or damaged entry becomes an `Err` item with its path, and the search continues.
/// Only headers and configurations are read, so a listed model may still be incomplete.
///
/// # Errors
/// [`ErrorKind::NotFound`] if `dir` does not exist, [`ErrorKind::Invalid`] for a file that is not a
/// model, [`ErrorKind::Io`] if `dir` cannot be read.
pub fn discover(dir: impl AsRef<Path>) -> Result<Discover> {
    let dir = dir.as_ref();
    let metadata = fs::metadata(dir).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Error::new(ErrorKind::NotFound, "there is no such directory").with_path(dir)
        }
        _ => io_error(dir, "cannot be reached", e),
    })?;
    let first = if metadata.is_dir() {
        Visit::Directory(dir.to_owned(), 0)
    } else if has_extension(dir, "gguf") {
        Visit::Gguf(dir.to_owned())
    } else {
        return Err(
            Error::new(ErrorKind::Invalid, "neither a directory nor a .gguf file").with_path(dir),
        );
    };
    Ok(Discover {
        stack: vec![first],
        seen: HashSet::new(),
    })
}

fn io_error(path: &Path, doing: &str, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, doing)
        .with_path(path)
        .with_source(e)
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension()
        .is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

impl Iterator for Discover {
    type Item = Result<DiscoveredModel>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(visit) = self.stack.pop() {
            match visit {
                Visit::Directory(dir, depth) => {
                    if let Some(item) = self.visit(&dir, depth).transpose() {
                        return Some(item);
                    }
                }
                Visit::Gguf(path) => return Some(describe_gguf(&path)),
                Visit::Fault(e) => return Some(Err(e)),
            }
        }
        None
    }
}

impl std::iter::FusedIterator for Discover {}

impl Discover {
    /// Describes the model in a directory. If the directory is not a model, queues its entries.
    fn visit(&mut self, dir: &Path, depth: usize) -> Result<Option<DiscoveredModel>> {
        let real = dir
            .canonicalize()
            .map_err(|e| io_error(dir, "cannot be resolved", e))?;
        if !self.seen.insert(real) {
            return Ok(None); // a cycle of links
        }
        let (mut entries, mut faults) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(dir).map_err(|e| io_error(dir, "cannot be listed", e))? {
            match entry {
                Ok(entry) => entries.push(entry.path()),
                Err(e) => {
                    faults.push(Visit::Fault(io_error(dir, "an entry cannot be read", e)));
                    break; // a broken directory iterator may return errors forever
                }
            }
        }
        entries.sort();
        let weights: Vec<_> = entries
            .iter()
            .filter(|p| has_extension(p, "safetensors"))
            .collect();
        let configured = entries
            .iter()
            .any(|p| p.file_name().is_some_and(|n| n == "config.json"));
        if configured && !weights.is_empty() {
            return describe(dir, &weights).map(Some);
        }
        // Reversed, because the last element of the stack is visited next.
        for path in entries.into_iter().rev() {
            if path.is_dir() {
                if depth < MAX_DEPTH {
                    self.stack.push(Visit::Directory(path, depth + 1));
                }
            } else if has_extension(&path, "gguf") && !follows_another(&path) {
                self.stack.push(Visit::Gguf(path));
            }
        }
        self.stack.append(&mut faults);
        Ok(None)
    }
}

/// One part of a split file with llama.cpp's naming: `stem-00001-of-00003.gguf`.
struct Part<'a> {
    stem: &'a str,
    number: u32,
    count: u32,
    /// `.gguf`, in the letter case of the file name.
    extension: &'a str,
}

impl<'a> Part<'a> {
    fn from_path(path: &'a Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let (name, extension) = name.split_at_checked(name.rfind('.')?)?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| {
            let five = s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
            five.then(|| s.parse().ok()).flatten()
        };
        Some(Self {
            stem,
            number: digits(number)?,
            count: digits(count)?,
            extension,
        })
    }

    fn sibling(&self, path: &Path, number: u32) -> PathBuf {
        let Self {
            stem,
            count,
            extension,
            ..
        } = self;
        path.with_file_name(format!("{stem}-{number:05}-of-{count:05}{extension}"))
    }
}

/// Whether the file is a later part of a split file whose first part exists.
fn follows_another(path: &Path) -> bool {
    Part::from_path(path)
        .is_some_and(|p| (2..=p.count).contains(&p.number) && p.sibling(path, 1).exists())
}

fn describe_gguf(path: &Path) -> Result<DiscoveredModel> {
    let summary = GgufSummary::open(path)?;
    // Other types have nested scales or mix types, so one pair of bits and group size cannot
    // describe them.
    let name = summary.quantization.as_deref();
    let row = TYPES.iter().find(|row| Some(row.name) == name);
    let quantization = row.and_then(|row| row.uniform);
    let mut model = DiscoveredModel {
        path: path.to_owned(),
        model_type: summary.architecture.unwrap_or_default(),
        format: ModelFormat::Gguf,
        quantization: quantization.map(|(bits, group_size)| Quantization { bits, group_size }),
        quantization_name: summary.quantization,
        num_files: 1,
        bytes: summary.bytes,
    };
    if let Some(part) = Part::from_path(path).filter(|p| p.number == 1) {
        for number in 2..=part.count {
            let sibling = part.sibling(path, number);
            let meta = fs::metadata(&sibling).map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Error::new(
                    ErrorKind::Invalid,
                    format!("part {number} of {} is missing", part.count),
                )
                .with_path(&sibling),
                _ => io_error(&sibling, "a part of the model cannot be read", e),
            })?;
            model.num_files += 1;
            model.bytes = model.bytes.saturating_add(meta.len());
        }
    }
    Ok(model)
}

fn describe(dir: &Path, weights: &[&PathBuf]) -> Result<DiscoveredModel> {
    let path = dir.join("config.json");
    let invalid = |message: String| Error::new(ErrorKind::Invalid, message).with_path(&path);
    let text = read_capped(&path, MAX_CONFIG)?;
    let config: Value = crate::python_json::from_slice(&text)
        .map_err(|e| invalid("not a JSON configuration".into()).with_source(e))?;
    if !config.is_object() {
        return Err(invalid(String::from(
            "not a configuration: the JSON is not an object",
        )));
    }
    let (quantization, quantization_name) = quantization(&config);
    let mut bytes = 0u64;
    for file in weights {
        let meta = fs::metadata(file).map_err(|e| io_error(file, "cannot be read", e))?;
        if !meta.is_file() {
            return Err(
                Error::new(ErrorKind::Invalid, "not a regular file").with_path(file.as_path())
            );
        }
        bytes = bytes.saturating_add(meta.len());
    }
    Ok(DiscoveredModel {
        path: dir.to_owned(),
        model_type: text_of(&config, "model_type")
            .unwrap_or_default()
            .to_owned(),
        format: ModelFormat::Safetensors,
        quantization,
        quantization_name,
        num_files: weights.len(),
        bytes,
    })
}

fn text_of<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}

/// MLX writes `quantization`; other tools write `quantization_config` with the name of a method.
fn quantization(config: &Value) -> (Option<Quantization>, Option<String>) {
    let number = |q: &Value, key: &str, most: u64| {
        let n = q.get(key)?.as_u64()?;
        (1..=most).contains(&n).then_some(n as u32)
    };
    for key in ["quantization", "quantization_config"] {
        let Some(q) = config.get(key).filter(|q| q.is_object()) else {
            continue;
        };
        let bits = number(q, "bits", 64);
        let group_size = number(q, "group_size", 1 << 20);
        let method = text_of(q, "quant_method").or_else(|| {
            // The name of an MLX quantization mode other than affine.
            text_of(q, "mode").filter(|mode| *mode != "affine")
        });
        let name = match (method, bits) {
            (Some(method), Some(bits)) => Some(format!("{method} {bits}-bit")),
            (Some(method), None) => Some(method.to_owned()),
            (None, bits) => bits.map(|bits| format!("{bits}-bit")),
        };
        let both = bits
            .zip(group_size)
            .map(|(bits, group_size)| Quantization { bits, group_size });
        if both.is_some() || name.is_some() {
            return (both, name);
        }
    }
    (None, None)
}

#[cfg(test)]
mod tests;
