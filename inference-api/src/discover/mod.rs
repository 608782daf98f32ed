//! Finding models on disk without loading them: directories with `config.json` and safetensors
//! files, and `.gguf` files.

mod gguf;

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{Error, ErrorKind, Result};

/// How many directories below the one given are searched.
const MAX_DEPTH: usize = 4;
/// A larger `config.json` is not one.
const MAX_CONFIG: u64 = 16 << 20;

/// The format of a model's files.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelFormat {
    /// A directory with `config.json` and safetensors files.
    Safetensors,
    /// One GGUF file.
    Gguf,
}

/// How weights are quantized.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Quantization {
    /// Bits per weight.
    pub bits: u32,
    /// Weights that share a scale.
    pub group_size: u32,
}

/// A model found on disk.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiscoveredModel {
    /// The directory or file to load.
    pub path: PathBuf,
    /// The architecture's name; empty when the files do not say.
    pub model_type: String,
    /// The files' format.
    pub format: ModelFormat,
    /// How weights are quantized, where that is one number for all.
    pub quantization: Option<Quantization>,
    /// The quantization's name, such as `Q4_1` or `4-bit`.
    pub quantization_name: Option<String>,
    /// Files with weights.
    pub num_files: usize,
    /// Bytes in those files.
    pub bytes: u64,
}

/// The models below a directory; see [`discover`].
#[derive(Debug)]
pub struct Discover {
    /// Still to visit, the next one last.
    stack: Vec<(PathBuf, usize)>,
    seen: HashSet<PathBuf>,
}

/// Searches `dir` and what is below it (to a depth of 4) for models, in the order of their paths.
/// What cannot be read is an `Err` item that names the path, and the search goes on.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] when `dir` is not there.
pub fn discover(dir: impl AsRef<Path>) -> Result<Discover> {
    let dir = dir.as_ref();
    if !dir.exists() {
        return Err(Error::new(ErrorKind::ModelNotFound, "there is no such directory")
            .with_path(dir));
    }
    Ok(Discover { stack: vec![(dir.to_owned(), 0)], seen: HashSet::new() })
}

fn io_error(path: &Path, doing: &str, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("{doing}: {e}")).with_path(path).with_source(e)
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

impl Iterator for Discover {
    type Item = Result<DiscoveredModel>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some((path, depth)) = self.stack.pop() {
            if path.is_dir() {
                match self.visit(&path, depth) {
                    Ok(None) => {}
                    Ok(Some(model)) => return Some(Ok(model)),
                    Err(e) => return Some(Err(e)),
                }
            } else if has_extension(&path, "gguf") {
                return Some(gguf::describe(&path));
            }
        }
        None
    }
}

impl Discover {
    /// Describes a model directory, or queues what lies in another one.
    fn visit(&mut self, dir: &Path, depth: usize) -> Result<Option<DiscoveredModel>> {
        let real = dir.canonicalize().map_err(|e| io_error(dir, "cannot resolve", e))?;
        if !self.seen.insert(real) {
            return Ok(None); // a loop of links
        }
        let mut entries = fs::read_dir(dir)
            .and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect::<Result<Vec<_>, _>>())
            .map_err(|e| io_error(dir, "cannot list", e))?;
        entries.sort();
        let weights: Vec<_> = entries.iter().filter(|p| has_extension(p, "safetensors")).collect();
        if !weights.is_empty() && dir.join("config.json").is_file() {
            return describe(dir, &weights).map(Some);
        }
        // Reversed, since the stack hands out its last entry first.
        for path in entries.into_iter().rev() {
            if has_extension(&path, "gguf") || (depth < MAX_DEPTH && path.is_dir()) {
                self.stack.push((path, depth + 1));
            }
        }
        Ok(None)
    }
}

fn describe(dir: &Path, weights: &[&PathBuf]) -> Result<DiscoveredModel> {
    let path = dir.join("config.json");
    let mut text = Vec::new();
    fs::File::open(&path)
        .and_then(|f| f.take(MAX_CONFIG + 1).read_to_end(&mut text))
        .map_err(|e| io_error(&path, "cannot read", e))?;
    if text.len() as u64 > MAX_CONFIG {
        return Err(Error::new(
            ErrorKind::InvalidModel,
            format!("the file is larger than the {MAX_CONFIG} bytes a configuration may have"),
        )
        .with_path(path));
    }
    let config: serde_json::Value = serde_json::from_slice(&text).map_err(|e| {
        Error::new(ErrorKind::InvalidModel, format!("not a JSON configuration: {e}"))
            .with_path(&path)
            .with_source(e)
    })?;
    let number = |v: &serde_json::Value, key: &str| {
        v.get(key).and_then(serde_json::Value::as_u64).and_then(|n| u32::try_from(n).ok())
    };
    let quantization = ["quantization", "quantization_config"]
        .iter()
        .filter_map(|key| config.get(key))
        .find_map(|q| Some(Quantization { bits: number(q, "bits")?, group_size: number(q, "group_size")? }));
    let mut bytes = 0u64;
    for file in weights {
        let meta = fs::metadata(file).map_err(|e| io_error(file, "cannot read", e))?;
        bytes = bytes.saturating_add(meta.len());
    }
    Ok(DiscoveredModel {
        path: dir.to_owned(),
        model_type: config
            .get("model_type")
            .and_then(serde_json::Value::as_str)
            .unwrap_or_default()
            .to_owned(),
        format: ModelFormat::Safetensors,
        quantization,
        quantization_name: quantization.map(|q| format!("{}-bit", q.bits)),
        num_files: weights.len(),
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, bytes: impl AsRef<[u8]>) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn finds_directories_and_files_in_order_and_reports_what_is_broken() {
        let tmp = tempfile::tempdir().unwrap();
        let d = tmp.path();
        write(
            &d.join("b/config.json"),
            r#"{"model_type": "qwen3", "quantization": {"bits": 4, "group_size": 64}}"#,
        );
        write(&d.join("b/model-1.safetensors"), [0; 10]);
        write(&d.join("b/model-2.safetensors"), [0; 5]);
        write(&d.join("a/config.json"), "{broken");
        write(&d.join("a/model.safetensors"), []);
        write(&d.join("c/config.json"), "{}"); // no weights: not a model
        write(&d.join("d/x.gguf"), gguf::tests::sample("llama", 3));
        write(&d.join("e/1/2/3/4/5/config.json"), "{}"); // too deep
        #[cfg(unix)]
        std::os::unix::fs::symlink(d, d.join("loop")).unwrap();

        let found: Vec<_> = discover(d).unwrap().collect();
        assert_eq!(found.len(), 3, "{found:?}");
        let e = found[0].as_ref().unwrap_err();
        assert_eq!(e.path(), Some(d.join("a/config.json").as_path()));
        let b = found[1].as_ref().unwrap();
        assert_eq!((b.model_type.as_str(), b.num_files, b.bytes), ("qwen3", 2, 15));
        assert_eq!(b.quantization, Some(Quantization { bits: 4, group_size: 64 }));
        let g = found[2].as_ref().unwrap();
        assert_eq!((g.model_type.as_str(), g.format), ("llama", ModelFormat::Gguf));
        assert_eq!(g.quantization_name.as_deref(), Some("Q4_1"));

        // The directory itself may be the model, and so may a file.
        assert_eq!(discover(d.join("b")).unwrap().count(), 1);
        assert_eq!(discover(d.join("d/x.gguf")).unwrap().count(), 1);
        assert_eq!(discover(d.join("none")).unwrap_err().kind(), ErrorKind::ModelNotFound);
    }
}
