//! Loads tensors of safetensors files: dense tensors, and matrices in MLX's quantization.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use inference::Result;
use mlx_rs_core::{Array, Dtype, QuantMode, Quantized};
use safetensors::Dtype as FileDtype;

use super::experts::{kernel_rows, packed_weight};
use super::part::Part;
use super::streaming::{
    PartLayout, Scratch, StoredRows, all_of, cast, no_parts, one, rows_and_cols, sized,
    sized_bytes, store,
};
use super::{Weights, dimension, mlx_shape};
use crate::checkpoint::config::QuantConfig;
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};
use crate::error::engine;
use crate::exec;
use crate::nn::Weight;

impl Weights {
    /// Looks up a tensor. Returns the tensor and its name in the files.
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

    /// Loads a dense matrix. 16-bit elements keep their type if the kernels can multiply by them.
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

    /// Returns the type in memory of a dense tensor that is stored as `stored`.
    pub(super) fn matrix_type(&self, stored: Dtype, shape: &[usize], for_kernels: bool) -> Dtype {
        let stored = self.half.unwrap_or(stored);
        // The kernels multiply a stack only if each expert's rows are a multiple of a row block.
        // MLX multiplies other stacks in float32.
        let has_kernel_rows = kernel_rows(shape).is_some();
        let stays = for_kernels && has_kernel_rows && exec::keeps_half(stored, self.dtype);
        if stays { stored } else { self.dtype }
    }

    /// Loads a tensor as an array of `dtype`.
    pub(super) fn dense_of(
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
        let file_type = match info.dtype {
            FileDtype::F32 => Dtype::Float32,
            FileDtype::F16 => Dtype::Float16,
            FileDtype::BF16 => Dtype::Bfloat16,
            other => {
                return Err(wrong_tensor(
                    checkpoint.file_of(info),
                    name,
                    format!("is {other:?}; float tensors must be F32, F16 or BF16"),
                ));
            }
        };
        let (rows, cols) = rows_and_cols(&part.shape);
        let stored = StoredRows {
            rows,
            nbytes: part.nbytes(info),
            together: 1,
        };
        let layout = [PartLayout::rows(cols, dtype)];
        let parts = self.in_chunks(stored, &layout, |rows, out, scratch| {
            let [out] = out else { return Err(no_parts()) };
            let Scratch { stored, values, .. } = scratch;
            let size = file_type.size();
            let read = |at: usize, out: &mut [u8]| Ok(checkpoint.read_into(info, at, out)?);
            if file_type == dtype {
                let mut cut = Vec::new();
                return part.read_into(read, (size, rows), out, &mut cut);
            }
            let n = rows.len() * cols;
            let mut own_bytes = std::mem::take(stored);
            let bytes = sized_bytes(&mut own_bytes, n * size);
            let mut cut = Vec::new();
            part.read_into(read, (size, rows), bytes, &mut cut)?;
            let values = sized(values, n);
            match file_type {
                Dtype::Float16 => cast::<f16>(bytes).convert_to_f32_slice(values),
                Dtype::Bfloat16 => cast::<bf16>(bytes).convert_to_f32_slice(values),
                _ => values.copy_from_slice(cast(bytes)),
            }
            store(values, dtype, out);
            *stored = own_bytes;
            Ok(())
        })?;
        one(parts, &part.shape)
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
        let stored = StoredRows {
            rows: count_of_rows,
            nbytes: packed.nbytes(info),
            together: 1,
        };
        let weight = self.in_chunks(stored, &[layout], |rows, out, scratch| {
            let [out] = out else { return Err(no_parts()) };
            let size = Dtype::Uint32.size();
            let read = |at: usize, out: &mut [u8]| Ok(checkpoint.read_into(info, at, out)?);
            packed.read_into(read, (size, rows), out, &mut scratch.stored)
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
                    .reshape(&mlx_shape(&[count_of_rows, groups.in_memory.1]))
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
                    .reshape(&mlx_shape(&[count_of_rows, groups.in_memory.1]))
                    .and_then(exec::factors);
                all.map_err(engine("weights"))
            };
            // Reads one after the other, so that only one of them is completely in memory.
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

    /// Loads a tensor of bytes, such as the scales of `mxfp4`, without conversion.
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

    /// Combines each four bytes along the last axis into a little-endian word.
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

    /// Returns the quantization of a matrix. The configuration may list exceptions by the stored
    /// name or by the usual name.
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
