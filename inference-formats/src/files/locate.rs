//! Finds out from names alone whether a path is a model directory or a GGUF file.

use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};

use super::{ModelDir, invalid};

/// The two forms of a model on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// A directory with `config.json` and safetensors files, or a vindex with all weights
    /// ([`is_vindex`]).
    Directory(PathBuf),
    /// One GGUF file.
    Gguf(PathBuf),
}

/// The file that lists the tensors of a vindex other than features.
pub(crate) const MANIFEST: &str = "weight_manifest.json";

/// The file with gate rows, which every vindex has.
const VINDEX: &str = "gate_vectors.bin";

/// Whether the directory of a model is a vindex. The feed-forward parts of a vindex are not among
/// its tensors.
pub fn is_vindex(dir: &Path) -> bool {
    let is_file = |name: &str| dir.join(name).is_file();
    let plain = |dir: &Path| ModelDir::open(dir)?.with_extension("safetensors");
    is_file(VINDEX) && is_file(MANIFEST) && plain(dir).is_ok_and(|names| names.is_empty())
}

/// Finds the model at `path`. It is a directory with `config.json` and safetensors files, a
/// vindex of the level `all`, a directory with one `.gguf` file, or a `.gguf` file.
///
/// # Errors
/// [`ErrorKind::NotFound`] when nothing is at the path. [`ErrorKind::Invalid`] when the path is not
/// a model; the message names the missing files.
pub fn locate(path: &Path) -> Result<ModelFiles> {
    let is_gguf = path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if path.is_file() {
        return if is_gguf {
            Ok(ModelFiles::Gguf(path.to_owned()))
        } else {
            Err(invalid(
                path,
                "not a model; give a model directory or a .gguf file",
            ))
        };
    }
    if !path.exists() {
        return Err(
            Error::new(ErrorKind::NotFound, "there is no such file or directory").with_path(path),
        );
    }
    let dir = ModelDir::open(path)?;
    let has_config = dir.find("config.json")?.is_some();
    if has_config && !dir.with_extension("safetensors")?.is_empty() {
        return Ok(ModelFiles::Directory(path.to_owned()));
    }
    if dir.find(VINDEX)?.is_some() {
        if has_config && dir.find(MANIFEST)?.is_some() {
            return Ok(ModelFiles::Directory(path.to_owned()));
        }
        return Err(invalid(
            path,
            "a vindex without the model's other weights and its configuration; build one with \
             `mlx vindex build --level all`, or give the model and this directory as --vindex",
        ));
    }
    let ggufs = dir.with_extension("gguf")?;
    match ggufs.as_slice() {
        [one] => return Ok(ModelFiles::Gguf(dir.require(one)?)),
        [] => {}
        several => {
            let shown = several
                .iter()
                .take(8)
                .map(String::as_str)
                .collect::<Vec<_>>();
            return Err(invalid(
                path,
                format!(
                    "the directory holds {} .gguf files; name one of them: {}",
                    several.len(),
                    shown.join(", ")
                ),
            ));
        }
    }
    Err(if has_config {
        invalid(
            path,
            "there is a config.json and no .safetensors file; PyTorch .bin weights must be converted",
        )
    } else {
        invalid(
            path,
            "not a model directory: it needs config.json with .safetensors files, or one .gguf file",
        )
    })
}
