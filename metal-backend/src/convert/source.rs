//! The checkpoint to convert: tensors with transformers' names, and functions that read rows.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use inference::Result;
use safetensors::Dtype;
use serde_json::{Map, Value};

use super::faults::wrong;
use super::float_type::FloatType;
use super::gguf;
use super::joined;
use super::tensor::{Stored, Tensor, Values};
use crate::checkpoint::files::{invalid, read_capped};
use crate::checkpoint::gguf::{GgmlType, Gguf, GgufTensor};
use crate::checkpoint::quantization::{self, AffinePacked, unpermute_rows};
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::checkpoint::{Family, ModelConfig, ModelFiles, locate, python_json};

/// The maximum size of an accepted `config.json`, in bytes.
const MAX_CONFIG: u64 = 4 << 20;

/// The checkpoint that is converted.
pub(super) struct Source {
    /// The directory, or the GGUF file.
    pub path: PathBuf,
    /// The content of `config.json`, or its equivalent from a GGUF file's metadata.
    pub config: Map<String, Value>,
    pub tensors: Vec<Tensor>,
    files: Files,
}

enum Files {
    Safetensors(SafetensorsCheckpoint),
    Gguf(Gguf),
}

/// Values in a float type.
pub(super) enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Floats {
    pub(super) fn to_f32(&self) -> Vec<f32> {
        match self {
            Floats::F32(v) => v.clone(),
            Floats::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Floats::BF16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Rounds the values to another type.
    pub(super) fn cast(self, to: FloatType) -> Self {
        match (self, to) {
            (Floats::F32(v), FloatType::F32) => Floats::F32(v),
            (Floats::F16(v), FloatType::F16) => Floats::F16(v),
            (Floats::BF16(v), FloatType::BF16) => Floats::BF16(v),
            (other, FloatType::F32) => Floats::F32(other.to_f32()),
            (other, FloatType::F16) => {
                Floats::F16(other.to_f32().into_iter().map(f16::from_f32).collect())
            }
            (other, FloatType::BF16) => {
                Floats::BF16(other.to_f32().into_iter().map(bf16::from_f32).collect())
            }
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Floats::F32(v) => bytemuck::cast_slice(v).to_vec(),
            Floats::F16(v) => bytemuck::cast_slice(v).to_vec(),
            Floats::BF16(v) => bytemuck::cast_slice(v).to_vec(),
        }
    }

    /// Transposes `[rows, cols]` to `[cols, rows]`.
    pub(super) fn transposed(self, rows: usize, cols: usize) -> Self {
        fn turn<T: Copy>(v: &[T], rows: usize, cols: usize) -> Vec<T> {
            (0..cols)
                .flat_map(|c| (0..rows).filter_map(move |r| v.get(r * cols + c).copied()))
                .collect()
        }
        match self {
            Floats::F32(v) => Floats::F32(turn(&v, rows, cols)),
            Floats::F16(v) => Floats::F16(turn(&v, rows, cols)),
            Floats::BF16(v) => Floats::BF16(turn(&v, rows, cols)),
        }
    }
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Self> {
        match locate(path)? {
            ModelFiles::Directory(dir) => Self::directory(&dir),
            ModelFiles::Gguf(file) => {
                let gguf = Gguf::open(&file)?;
                let config = gguf::config(&gguf)?;
                let tensors = gguf::tensors(&gguf, &config)?;
                Ok(Self {
                    path: file,
                    config,
                    tensors,
                    files: Files::Gguf(gguf),
                })
            }
        }
    }

    fn directory(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let config = match python_json::from_slice(&read_capped(&path, MAX_CONFIG)?) {
            Ok(Value::Object(config)) => config,
            Ok(_) => return Err(invalid(&path, "the file is not a JSON object")),
            Err(e) => return Err(invalid(&path, "not valid JSON").with_source(e)),
        };
        let checkpoint = SafetensorsCheckpoint::open(dir)?;
        let tensors = checkpoint
            .names()
            .filter_map(|name| {
                let info = checkpoint.info(name)?;
                Some(Tensor {
                    name: name.to_owned(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    stored: Stored::Safetensors,
                })
            })
            .collect();
        let family = (config.get("model_type").and_then(Value::as_str)).and_then(Family::of);
        let tensors = match family {
            Some(family) => {
                let read = ModelConfig::from_map(config.clone());
                let width = read.ok().map(|config| config.intermediate_size);
                joined::separate(tensors, family.joined_experts, width, dir)?
            }
            None => tensors,
        };
        Ok(Self {
            path: dir.to_owned(),
            config,
            tensors,
            files: Files::Safetensors(checkpoint),
        })
    }

    /// The GGUF file; `None` if the checkpoint is a directory.
    pub(super) fn gguf(&self) -> Option<&Gguf> {
        match &self.files {
            Files::Gguf(gguf) => Some(gguf),
            Files::Safetensors(_) => None,
        }
    }

    /// Returns rows of a tensor as stored: little-endian elements, or complete blocks.
    pub(super) fn raw(&self, tensor: &Tensor, first: usize, rows: usize) -> Result<Vec<u8>> {
        let missing = || wrong(&self.path, &tensor.name, "is gone");
        match (&self.files, &tensor.stored) {
            (Files::Safetensors(c), Stored::Safetensors) => {
                let info = c.info(&tensor.name).ok_or_else(missing)?;
                let (all, _) = tensor.rows_and_cols();
                let row = info.nbytes / all.max(1);
                Ok(c.read_part(info, first * row, rows * row)?)
            }
            (Files::Safetensors(c), Stored::Slice { name, slice }) => {
                let info = c.info(name).ok_or_else(missing)?;
                let (_, cols) = tensor.rows_and_cols();
                let element = tensor.dtype.bitsize() / 8;
                // One row of the tensor may consist of several rows of the slice.
                let each = cols / slice.width().max(1);
                let wanted = (first * each, rows * each);
                slice.bytes(element * slice.width(), wanted, |at, length| {
                    Ok(c.read_part(info, at, length)?)
                })
            }
            (
                Files::Gguf(g),
                Stored::Gguf {
                    name,
                    permuted,
                    slice,
                    first_row,
                    ..
                },
            ) => {
                let gguf_info = g.tensors().get(name).ok_or_else(missing)?;
                match slice {
                    Some(slice) => {
                        let all = gguf_info.shape.iter().rev().skip(1).product::<usize>();
                        let row_bytes = gguf_info.nbytes / all.max(1);
                        slice.bytes(row_bytes, (first, rows), |at, length| {
                            Ok(g.read_bytes(gguf_info, at, length)?)
                        })
                    }
                    None => {
                        let cols = tensor.shape.last().copied().unwrap_or(1).max(1);
                        self.gguf_rows(g, gguf_info, (*permuted, cols), first_row + first, rows)
                    }
                }
            }
            _ => Err(missing()),
        }
    }

    fn gguf_rows(
        &self,
        gguf: &Gguf,
        tensor: &GgufTensor,
        (permuted, cols): (Option<usize>, usize),
        first: usize,
        rows: usize,
    ) -> Result<Vec<u8>> {
        let all = tensor.shape.iter().product::<usize>() / cols;
        if let Some(heads) = permuted {
            // Biases are permuted, too; each element counts as a row.
            let units = if tensor.shape.len() == 1 {
                tensor.shape[0]
            } else {
                all
            };
            let bytes = gguf.read(tensor)?;
            return Ok(unpermute_rows(&bytes, units, heads));
        }
        let row = tensor.nbytes / all.max(1);
        Ok(gguf.read_bytes(tensor, first * row, rows * row)?)
    }

    /// Returns rows of a tensor as floats.
    pub(super) fn floats(&self, tensor: &Tensor, first: usize, rows: usize) -> Result<Floats> {
        let bytes = self.raw(tensor, first, rows)?;
        let kind = match &tensor.stored {
            Stored::Gguf { kind, .. } => *kind,
            _ => GgmlType::F32,
        };
        if let Stored::Gguf { values, .. } = &tensor.stored
            && *values != Values::Same
            && let Some(stored) = quantization::dequantize(kind, &bytes)
        {
            let own = stored.into_iter().map(|x| values.of_directory(x));
            return Ok(Floats::F32(own.collect()));
        }
        let is_plain = matches!(kind, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
        match tensor.dtype {
            Dtype::F16 => Ok(Floats::F16(elements(&bytes, f16::from_le_bytes))),
            Dtype::BF16 => Ok(Floats::BF16(elements(&bytes, bf16::from_le_bytes))),
            Dtype::F32 if is_plain => Ok(Floats::F32(elements(&bytes, f32::from_le_bytes))),
            _ => quantization::dequantize(kind, &bytes)
                .map(Floats::F32)
                .ok_or_else(|| {
                    wrong(
                        &self.path,
                        &tensor.name,
                        format!("is stored as {}, which is not read", kind.name()),
                    )
                }),
        }
    }

    /// Returns rows of a GGUF tensor in MLX's layout; `None` if MLX has no equal format.
    pub(super) fn packed(
        &self,
        tensor: &Tensor,
        first: usize,
        rows: usize,
    ) -> Result<AffinePacked> {
        let bytes = self.raw(tensor, first, rows)?;
        let packed = match &tensor.stored {
            Stored::Gguf { kind, .. } => quantization::repack(*kind, &bytes),
            _ => None,
        };
        packed.ok_or_else(|| wrong(&self.path, &tensor.name, "cannot be repacked"))
    }
}

fn elements<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|b| decode(*b))
        .collect()
}
