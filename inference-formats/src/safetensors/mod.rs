//! Named tensors of safetensors files. Headers are validated when a file is opened. Tensor data are
//! read later, at their exact positions.

mod header;
mod index;
mod manifest;
mod names;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};
use bytemuck::Pod;

use super::files::{CheckedFile, MANIFEST, ModelDir, invalid};
use header::MAX_TENSORS;

pub use ::safetensors::Dtype;
pub use names::TensorNames;

/// A tensor: its type, its shape, and the position of its data.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// The type of its elements.
    pub dtype: Dtype,
    /// The dimensions, row-major; empty for a scalar.
    pub shape: Vec<usize>,
    /// Bytes of its data: the product of the shape, times the element's size.
    pub nbytes: usize,
    file: Arc<CheckedFile>,
    offset: u64,
}

/// All tensors of a model in safetensors files.
#[derive(Debug, Default)]
pub struct SafetensorsCheckpoint {
    tensors: BTreeMap<String, TensorInfo>,
}

/// A LoRA adapter that mlx-lm may leave in the directory of a model.
const ADAPTERS: &str = "adapters.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum number of shards. A model with more shards is assumed to be a mistake, and could exhaust
/// file handles.
const MAX_FILES: usize = 512;

impl SafetensorsCheckpoint {
    /// Opens the tensors in the directory `dir`. They are in the shards that
    /// `model.safetensors.index.json` names. Without an index, they are in all `.safetensors` files
    /// except `adapters.safetensors`. Without such files, they are in the files that a vindex's
    /// `weight_manifest.json` names.
    ///
    /// # Errors
    /// If a file is missing, truncated, malformed or outside the directory; if two files contain
    /// one name; if the index names a tensor that its shard lacks.
    pub fn open(dir: &Path) -> Result<Self> {
        let dir = ModelDir::open(dir)?;
        let index = match dir.find(INDEX)? {
            Some(path) => Some((index::Index::read(&path)?, path)),
            None => None,
        };
        let names = match &index {
            Some((index, _)) => index.shards(),
            None => {
                let mut names = dir.with_extension("safetensors")?;
                names.retain(|n| n != ADAPTERS);
                names
            }
        };
        if names.is_empty() && dir.find(MANIFEST)?.is_some() {
            return Ok(Self {
                tensors: manifest::tensors(&dir)?,
            });
        }
        if names.is_empty() {
            return Err(invalid(
                dir.path(),
                "the directory has no .safetensors file with weights",
            ));
        }
        if names.len() > MAX_FILES {
            return Err(invalid(
                dir.path(),
                format!(
                    "{} shards are more than the {MAX_FILES} accepted",
                    names.len()
                ),
            ));
        }
        let mut checkpoint = Self::default();
        for name in names {
            // The index may name a missing file. The error must name that file.
            let path = dir.require(&name)?;
            checkpoint.add(&path)?;
        }
        if let Some((index, path)) = &index {
            checkpoint.check_index(index, path)?;
        }
        Ok(checkpoint)
    }

    /// The tensors of one file.
    ///
    /// # Errors
    /// If the file is missing, truncated or malformed.
    pub fn open_file(path: &Path) -> Result<Self> {
        let mut checkpoint = Self::default();
        checkpoint.add(path)?;
        Ok(checkpoint)
    }

    /// The strings in a file's header, by name. For weight files, no string is used.
    ///
    /// # Errors
    /// If the file is missing, or its header is malformed.
    pub fn metadata(path: &Path) -> Result<BTreeMap<String, String>> {
        header::metadata(&CheckedFile::open(path)?)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = Arc::new(CheckedFile::open(path)?);
        let entries = header::read(&file)?;
        if self.tensors.len().saturating_add(entries.len()) > MAX_TENSORS {
            return Err(invalid(
                path,
                format!("the model has more than {MAX_TENSORS} tensors"),
            ));
        }
        for entry in entries {
            if let Some(other) = self.tensors.get(&entry.name) {
                let message = format!(
                    "is also in {}; remove the file that does not belong",
                    self.file_of(other).display()
                );
                return Err(wrong_tensor(path, &entry.name, message));
            }
            let info = TensorInfo {
                dtype: entry.dtype,
                shape: entry.shape,
                nbytes: entry.nbytes,
                file: Arc::clone(&file),
                offset: entry.offset,
            };
            self.tensors.insert(entry.name, info);
        }
        Ok(())
    }

    /// Checks that each tensor of the index is in its shard.
    fn check_index(&self, index: &index::Index, path: &Path) -> Result<()> {
        for (name, shard) in index.entries() {
            let entry = self.info(name);
            if entry.is_none_or(|t| !self.file_of(t).ends_with(shard)) {
                return Err(invalid(
                    path,
                    format!("the index says that {name} is in {shard}, which does not hold it"),
                ));
            }
        }
        Ok(())
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The total number of bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.nbytes as u64).sum()
    }

    /// The float type with the largest share of bytes. If two types have equal shares, the wider
    /// type wins. `F32` if there are no floats.
    pub fn float_type(&self) -> Dtype {
        let bytes = |wanted: Dtype| -> u64 {
            let of_type = self.tensors.values().filter(|t| t.dtype == wanted);
            of_type.map(|t| t.nbytes as u64).sum()
        };
        [Dtype::BF16, Dtype::F16, Dtype::F32]
            .into_iter()
            .max_by_key(|dtype| bytes(*dtype))
            .unwrap_or(Dtype::F32)
    }

    /// The tensor `name`.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The path of the file that holds a tensor.
    #[allow(clippy::unused_self, reason = "a tensor belongs to its checkpoint")]
    pub fn file_of<'a>(&self, info: &'a TensorInfo) -> &'a Path {
        info.file.path()
    }

    /// All elements of a tensor.
    ///
    /// # Errors
    /// When an element is not as large as `T`, memory is short, or reading fails.
    pub fn read<T: Pod>(&self, info: &TensorInfo) -> Result<Vec<T>> {
        let bits = size_of::<T>() * 8;
        if info.dtype.bitsize() != bits {
            return Err(invalid(
                self.file_of(info),
                format!(
                    "a tensor of type {} was read in elements of {bits} bits",
                    info.dtype
                ),
            ));
        }
        info.file.read_vec(info.offset, info.nbytes)
    }

    /// Reads `length` bytes of a tensor from byte `first` on, as elements of `T`. The caller must
    /// have checked that `T` is the tensor's type.
    ///
    /// # Errors
    /// When the range lies outside the tensor or is not a whole number of elements, memory is
    /// short, or reading fails.
    pub fn read_part<T: Pod>(
        &self,
        info: &TensorInfo,
        first: usize,
        length: usize,
    ) -> Result<Vec<T>> {
        let place = self.place_of(info, first, length)?;
        info.file.read_vec(place, length)
    }

    /// Fills `buffer` with the bytes of a tensor from its byte `first` on.
    ///
    /// # Errors
    /// When the range lies outside the tensor, or reading fails.
    pub fn read_into(&self, info: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let place = self.place_of(info, first, buffer.len())?;
        info.file.read_exact_at(buffer, place)
    }

    /// The position in its file of a range of a tensor's bytes.
    fn place_of(&self, info: &TensorInfo, first: usize, length: usize) -> Result<u64> {
        let end = first.checked_add(length);
        if end.is_none_or(|end| end > info.nbytes) {
            return Err(invalid(
                self.file_of(info),
                format!(
                    "{length} bytes at {first} of a tensor of {} bytes",
                    info.nbytes
                ),
            ));
        }
        Ok(info.offset + first as u64)
    }
}

/// An error about the tensor `name` in the file at `path`.
fn wrong_tensor(path: &Path, name: &str, message: impl Into<String>) -> Error {
    invalid(path, message).with_tensor(name)
}
