//! Tensors of safetensors files as arrays: dense ones, and matrices quantized as MLX writes them.

use bytemuck::Pod;
use half::{bf16, f16};
use inference::Result;
use mlx_rs_core::{Array, Dtype, Element, QuantMode, Quantized};
use safetensors::Dtype as FileDtype;

use super::experts::{kernel_rows, packed_weight};
use super::part::Part;
use super::streaming::{PartLayout, all_of, one, rows_and_cols};
use super::{Weights, dimension, mlx_shape};
use crate::checkpoint::config::QuantConfig;
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};
use crate::error::engine;
use crate::exec;
use crate::nn::Weight;

impl Weights {
    /// A tensor and its name in the files.
    pub(super) fn stored_tensor<'a>(
        &self,
        checkpoint: &'a SafetensorsCheckpoint,
        names: &'a TensorNames,
        name: &str,
        shape: &[usize],
    ) -> Result<(&'a str, &'a TensorInfo)> {
        let stored = names
            .stored(name)
            .ok_or_else(|| self.missing(name, shape))?;
        let info = checkpoint
            .info(stored)
            .ok_or_else(|| self.missing(stored, shape))?;
        Ok((stored, info))
    }

    pub(super) fn dense(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        name: &str,
        info: &TensorInfo,
        part: &Part,
    ) -> Result<Array> {
        self.dense_of(checkpoint, name, info, part, self.dtype)
    }

    /// A matrix. Numbers of 16 bits stay so where the kernels multiply with them.
    pub(super) fn dense_matrix(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        name: &str,
        info: &TensorInfo,
        part: &Part,
        for_kernels: bool,
    ) -> Result<Array> {
        let stored = match info.dtype {
            FileDtype::F16 => Dtype::Float16,
            FileDtype::BF16 => Dtype::Bfloat16,
            _ => self.dtype,
        };
        let dtype = self.matrix_type(stored, &part.shape, for_kernels);
        self.dense_of(checkpoint, name, info, part, dtype)
    }

    /// The type in memory of a dense tensor with numbers of type `stored`.
    pub(super) fn matrix_type(&self, stored: Dtype, shape: &[usize], for_kernels: bool) -> Dtype {
        let stays =
            for_kernels && matches!(shape.len(), 2 | 3) && exec::keeps_half(stored, self.dtype);
        if stays { stored } else { self.dtype }
    }

    /// A tensor as an array of `dtype`.
    fn dense_of(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        name: &str,
        info: &TensorInfo,
        part: &Part,
        dtype: Dtype,
    ) -> Result<Array> {
        let shape = part.stored_shape();
        if info.shape != shape {
            return Err(self.wrong_shape(name, &info.shape, &shape));
        }
        match info.dtype {
            FileDtype::F32 => self.dense_as::<f32>(checkpoint, info, part, dtype),
            FileDtype::F16 => self.dense_as::<f16>(checkpoint, info, part, dtype),
            FileDtype::BF16 => self.dense_as::<bf16>(checkpoint, info, part, dtype),
            other => Err(wrong_tensor(
                checkpoint.file_of(info),
                name,
                format!("is {other:?}; float tensors must be F32, F16 or BF16"),
            )),
        }
    }

    /// Numbers stored as `T`, as an array of `dtype`.
    fn dense_as<T: Element + Pod>(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        info: &TensorInfo,
        part: &Part,
        dtype: Dtype,
    ) -> Result<Array> {
        let (rows, cols) = rows_and_cols(&part.shape);
        let parts = self.in_chunks(
            rows,
            part.nbytes(info),
            &[PartLayout::rows(cols, dtype)],
            |first, count| {
                let values = part.read::<T>(checkpoint, info, first, count)?;
                Ok(vec![self.array_of(
                    &values,
                    &mlx_shape(&[count, cols]),
                    dtype,
                )?])
            },
        )?;
        one(parts, &part.shape)
    }

    /// Values as an array of the type that the model computes in.
    pub(super) fn array<T: Element + Pod>(&self, values: &[T], shape: &[i32]) -> Result<Array> {
        self.array_of(values, shape, self.dtype)
    }

    /// Values as an array of `dtype`. Evaluated at once: a lazy conversion would keep the copy of
    /// the file's bytes in memory.
    pub(super) fn array_of<T: Element + Pod>(
        &self,
        values: &[T],
        shape: &[i32],
        dtype: Dtype,
    ) -> Result<Array> {
        Array::from_slice(values, shape)
            .and_then(|a| {
                if T::DTYPE == dtype {
                    Ok(a)
                } else {
                    a.astype(dtype)
                }
            })
            .and_then(|a| a.eval().map(|()| a))
            .map_err(engine("weights"))
    }

    pub(super) fn quantized(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        names: &TensorNames,
        prefix: &str,
        info: &TensorInfo,
        numbers: &Part,
        for_kernels: bool,
    ) -> Result<Weight> {
        let name = names.stored(&format!("{prefix}.weight")).unwrap_or(prefix);
        let stored_prefix = name.strip_suffix(".weight").unwrap_or(name);
        let config = self.quantization_of(prefix, stored_prefix)?;
        let (bits, stored_group) = (dimension(config.bits), dimension(config.group_size));
        let shape = numbers.shape.as_slice();
        let Some(mode) = QuantMode::from_name(&config.mode) else {
            return Err(wrong_tensor(
                &self.path,
                name,
                format!("is quantized as {:?}, which is unknown", config.mode),
            ));
        };
        let groups = self.groups(name, numbers, mode, (bits, stored_group))?;
        let packed = numbers.with_columns(&groups.words);
        if info.dtype != FileDtype::U32 {
            return Err(wrong_tensor(
                checkpoint.file_of(info),
                name,
                format!("is {:?}; packed weights must be U32", info.dtype),
            ));
        }
        if info.shape != packed.stored_shape() {
            return Err(self.wrong_shape(name, &info.shape, &packed.stored_shape()));
        }
        let group_size = mlx_shape(&[groups.size])[0];
        let (count_of_rows, words) = rows_and_cols(&packed.shape);
        let kernel_rows = kernel_rows(shape);
        let kernel = for_kernels
            && kernel_rows.is_some()
            && exec::keeps_packed(mode, config.bits, group_size, self.dtype);
        let layout = PartLayout {
            interleaved: kernel,
            ..PartLayout::rows(words, Dtype::Uint32)
        };
        let stored_bytes = packed.nbytes(info);
        let weight = self.in_chunks(count_of_rows, stored_bytes, &[layout], |first, count| {
            let values = packed.read::<u32>(checkpoint, info, first, count)?;
            let rows = Array::from_slice(&values, &mlx_shape(&[count, words]))
                .and_then(|rows| layout.ordered(rows));
            Ok(vec![rows.map_err(engine("weights"))?])
        })?;
        let scales = numbers.with_columns(&groups.scales);
        let part = |part: &str| -> Result<Array> {
            let name = format!("{prefix}.{part}");
            let (stored, info) = self.stored_tensor(checkpoint, names, &name, &scales.shape)?;
            let read = if mode == QuantMode::Affine {
                self.dense(checkpoint, stored, info, &scales)?
            } else {
                self.raw_bytes(checkpoint, stored, info, &scales)?
            };
            groups.divided(read, stored_group)
        };
        if kernel {
            let [words] = all_of(weight)?;
            let rows = mlx_shape(&[count_of_rows])[0];
            if mode != QuantMode::Affine {
                let bytes = part("scales")?
                    .reshape(&mlx_shape(&[count_of_rows, groups.kept.1]))
                    .and_then(|bytes| exec::interleaved(&bytes));
                let bytes = bytes.map_err(engine("weights"))?;
                let matrix = Weight::from_float_codes([words, bytes], rows, mode)
                    .map_err(engine("weights"))?;
                let lost = || wrong_tensor(&self.path, name, "is in no format of the kernels");
                return Ok(packed_weight(matrix.ok_or_else(lost)?, shape));
            }
            let format = (rows, config.bits, group_size);
            let factors = |name: &str| -> Result<Array> {
                let all = part(name)?
                    .reshape(&mlx_shape(&[count_of_rows, groups.kept.1]))
                    .and_then(exec::factors);
                all.map_err(engine("weights"))
            };
            // One after the other, so that only one of them is in memory in full.
            let factors = [factors("scales")?, factors("biases")?];
            return Weight::from_interleaved(words, factors, format)
                .map(|rows| packed_weight(rows, shape))
                .map_err(engine("weights"));
        }
        Ok(Weight::Quantized(Quantized {
            weight: one(weight, &packed.shape)?,
            scales: part("scales")?,
            biases: (mode == QuantMode::Affine)
                .then(|| part("biases"))
                .transpose()?,
            group_size,
            bits: config.bits,
            mode,
        }))
    }

    /// A tensor of bytes, such as the scales of `mxfp4`.
    pub(super) fn raw_bytes(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        stored: &str,
        info: &TensorInfo,
        part: &Part,
    ) -> Result<Array> {
        let shape = part.stored_shape();
        if info.shape != shape {
            return Err(self.wrong_shape(stored, &info.shape, &shape));
        }
        if info.dtype != FileDtype::U8 {
            return Err(wrong_tensor(
                checkpoint.file_of(info),
                stored,
                format!("is {:?}; it must be U8", info.dtype),
            ));
        }
        let (rows, _) = rows_and_cols(&part.shape);
        let bytes = part.read::<u8>(checkpoint, info, 0, rows)?;
        Array::from_slice(&bytes, &mlx_shape(&part.shape)).map_err(engine("weights"))
    }

    /// Bytes read as little-endian words, four to each along the last axis.
    pub(super) fn packed_words(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        stored: &str,
        info: &TensorInfo,
        part: &Part,
    ) -> Result<Array> {
        let shape = part.stored_shape();
        if info.shape != shape || info.dtype != FileDtype::U8 {
            return Err(wrong_tensor(
                checkpoint.file_of(info),
                stored,
                format!(
                    "is {:?} {:?}; it must be U8 {shape:?}",
                    info.dtype, info.shape
                ),
            ));
        }
        let mut shape = mlx_shape(&part.shape);
        if let Some(last) = shape.last_mut() {
            *last /= 4;
        }
        let (rows, _) = rows_and_cols(&part.shape);
        let bytes = part.read::<u8>(checkpoint, info, 0, rows)?;
        let words: Vec<u32> = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| u32::from_le_bytes(b))
            .collect();
        Array::from_slice(&words, &shape).map_err(engine("weights"))
    }

    /// How a matrix is quantized. Exceptions are listed under the stored or the usual name.
    fn quantization_of(&self, prefix: &str, stored: &str) -> Result<&QuantConfig> {
        let overrides = &self.config.quantization_overrides;
        let exception = overrides
            .get(stored)
            .or_else(|| overrides.get(prefix))
            .map(Option::as_ref);
        exception
            .unwrap_or(self.config.quantization.as_ref())
            .ok_or_else(|| {
                wrong_tensor(
                    &self.path,
                    &format!("{stored}.scales"),
                    "is there, but config.json does not say how the weight is quantized",
                )
            })
    }
}
