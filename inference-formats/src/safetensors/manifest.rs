//! `weight_manifest.json` of a vindex, which lists tensors in files of unquantized values.
//! Feed-forward weights are not among these tensors.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::header::{MAX_DIMS, MAX_TENSORS};
use super::{Dtype, TensorInfo, wrong_tensor};
use crate::error::Result;
use crate::files::{CheckedFile, MANIFEST, ModelDir, invalid, read_capped};

/// The largest accepted manifest, in bytes.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// The fields of the file that are used.
#[derive(Debug, Deserialize)]
struct Manifest {
    tensors: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    name: String,
    file: String,
    offset: u64,
    bytes: u64,
    shape: Vec<usize>,
    dtype: String,
}

/// The tensors in the manifest of a directory.
pub(super) fn tensors(dir: &ModelDir) -> Result<BTreeMap<String, TensorInfo>> {
    let path = dir.require(MANIFEST)?;
    let bytes = read_capped(&path, MAX_MANIFEST_BYTES)?;
    let manifest: Manifest = serde_json::from_slice(&bytes)
        .map_err(|e| invalid(&path, "not a manifest of tensors").with_source(e))?;
    if manifest.tensors.len() > MAX_TENSORS {
        return Err(invalid(
            &path,
            format!("has more than {MAX_TENSORS} tensors"),
        ));
    }
    let mut files: BTreeMap<String, Arc<CheckedFile>> = BTreeMap::new();
    let mut tensors = BTreeMap::new();
    for entry in manifest.tensors {
        let file = match files.get(&entry.file) {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(CheckedFile::open(&dir.require(&entry.file)?)?);
                files.insert(entry.file.clone(), Arc::clone(&file));
                file
            }
        };
        let name = entry.name.clone();
        let info = info(entry, file, &path)?;
        if tensors.insert(name.clone(), info).is_some() {
            return Err(wrong_tensor(&path, &name, "is named twice"));
        }
    }
    Ok(tensors)
}

/// Checks that a tensor lies within its file.
fn info(entry: Entry, file: Arc<CheckedFile>, path: &Path) -> Result<TensorInfo> {
    let dtype = match entry.dtype.as_str() {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        other => {
            let message =
                format!("has the type {other:?}, which is neither \"float32\" nor \"float16\"");
            return Err(wrong_tensor(path, &entry.name, message));
        }
    };
    let size = dtype.bitsize() / 8;
    let elements = (entry.shape.iter()).try_fold(size, |n, &d| n.checked_mul(d));
    let end = entry.offset.checked_add(entry.bytes);
    let fits = entry.shape.len() <= MAX_DIMS
        && elements.is_some_and(|n| n as u64 == entry.bytes)
        && end.is_some_and(|end| end <= file.len());
    if !fits {
        let message = format!(
            "has an impossible position: {} bytes at {} for the shape {:?}",
            entry.bytes, entry.offset, entry.shape
        );
        return Err(wrong_tensor(path, &entry.name, message));
    }
    Ok(TensorInfo {
        dtype,
        shape: entry.shape,
        nbytes: elements.unwrap_or_default(),
        file,
        offset: entry.offset,
    })
}
