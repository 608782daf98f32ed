//! The tensors in prompt cache files: converts arrays to bytes and back, and writes a file
//! completely or not at all. Both formats of prompt caches use this module.

use std::collections::HashMap;
use std::path::Path;

use half::{bf16, f16};
use inference::{Error, ErrorKind, Result};
use inference_formats::atomic::AtomicFile;
use mlx_rs_core::{Array, Dtype};
use safetensors::tensor::{Dtype as FileDtype, TensorView};

use super::Caches;
use crate::checkpoint::files::invalid;
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;
use crate::workdir::{WorkDir, parent_of, unwritten};

/// The prefix of the hidden directories in which files are created before they are moved.
pub(super) const WORK_PREFIX: &str = ".prompt-cache-";

/// The contents of a file.
#[derive(Debug)]
pub struct Kept {
    /// The prompt; `None` if mlx-lm wrote the file without it.
    pub tokens: Option<Vec<u32>>,
    /// The caches after the prompt.
    pub caches: Caches,
}

/// What the disk tier adds to a file.
pub(super) struct Additions<'a> {
    /// Key-value pairs for the header.
    pub texts: &'a [(String, String)],
    /// Runs on the complete file before it gets its name.
    pub finish: &'a dyn Fn(&Path) -> std::io::Result<()>,
}

impl Additions<'_> {
    /// No additions.
    pub(super) const NONE: Self = Self {
        texts: &[],
        finish: &|_| Ok(()),
    };
}

/// A tensor of a file: its name, type, shape and bytes.
pub(super) type Tensor = (String, FileDtype, Vec<usize>, Vec<u8>);

/// Converts an array to a named tensor of a file.
pub(super) fn tensor(name: String, array: &Array) -> Result<Tensor> {
    let shape = array.shape().iter();
    let shape = shape.map(|&d| d.unsigned_abs() as usize).collect();
    let (dtype, bytes) = bytes(array)?;
    Ok((name, dtype, shape, bytes))
}

/// Writes a file completely or not at all.
pub(super) fn write(
    path: &Path,
    tensors: &[Tensor],
    mut metadata: HashMap<String, String>,
    additions: &Additions<'_>,
) -> Result<()> {
    metadata.extend(additions.texts.iter().cloned());
    let metadata = (!metadata.is_empty()).then_some(metadata);
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.clone(), bytes)
                .map(|view| (name.as_str(), view))
                .map_err(|e| {
                    let message = format!("the prompt cache has no place for {name}");
                    Error::new(ErrorKind::Engine, message).with_source(e)
                })
        })
        .collect::<Result<Vec<_>>>()?;
    let dir = parent_of(path);
    let work = WorkDir::new(dir, WORK_PREFIX).map_err(|e| {
        Error::new(ErrorKind::Io, "the file cannot be written")
            .with_path(path)
            .with_source(e)
    })?;
    // The file contains conversations, so only its owner may read it.
    let write = || {
        let file = AtomicFile::create_private_in(work.path(), path)?;
        safetensors::serialize_to_file(views, metadata, file.unfinished())
            .map_err(std::io::Error::other)?;
        (additions.finish)(file.unfinished())?;
        file.commit()
    };
    write().map_err(|e| unwritten(path, e))
}

/// Returns the elements of an array as bytes, row-major.
fn bytes(array: &Array) -> Result<(FileDtype, Vec<u8>)> {
    fn raw<T: mlx_rs_core::Element + bytemuck::Pod>(array: &Array) -> Result<Vec<u8>> {
        let data = array.data::<T>().map_err(engine("prompt cache"))?;
        Ok(bytemuck::cast_slice(&data).to_vec())
    }
    match array.dtype() {
        Dtype::Float32 => Ok((FileDtype::F32, raw::<f32>(array)?)),
        Dtype::Float16 => Ok((FileDtype::F16, raw::<f16>(array)?)),
        Dtype::Bfloat16 => Ok((FileDtype::BF16, raw::<bf16>(array)?)),
        Dtype::Uint32 => Ok((FileDtype::U32, raw::<u32>(array)?)),
        Dtype::Int32 => Ok((FileDtype::I32, raw::<i32>(array)?)),
        other => Err(Error::new(
            ErrorKind::Engine,
            format!("a cache holds {other}, which prompt caches do not store"),
        )),
    }
}

/// Converts a tensor to an array.
pub(super) fn array(
    file: &SafetensorsCheckpoint,
    info: &crate::checkpoint::safetensors::TensorInfo,
) -> Result<Array> {
    let path = file.file_of(info);
    let shape = info
        .shape
        .iter()
        .map(|&d| i32::try_from(d))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| invalid(path, format!("a tensor has shape {:?}", info.shape)))?;
    match info.dtype {
        FileDtype::F32 => Array::from_slice(&file.read::<f32>(info)?, &shape),
        FileDtype::F16 => Array::from_slice(&file.read::<f16>(info)?, &shape),
        FileDtype::BF16 => Array::from_slice(&file.read::<bf16>(info)?, &shape),
        FileDtype::U32 => Array::from_slice(&file.read::<u32>(info)?, &shape),
        FileDtype::I32 => Array::from_slice(&file.read::<i32>(info)?, &shape),
        other => {
            return Err(invalid(
                path,
                format!("a tensor has type {other}, which prompt caches do not have"),
            ));
        }
    }
    .map_err(engine("prompt cache"))
}
