//! Named, shape-checked weights in the type the model computes in. Each tensor is read when an
//! architecture asks for it, under the shape it expects; what nobody asked for is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use half::{bf16, f16};
use inference::{Error, Result};
use mlx_rs_core::{Array, Dtype, Element, QuantMode, Quantized};
use safetensors::Dtype as FileDtype;

use super::config::{ModelConfig, QuantConfig};
use super::gguf::{Gguf, GgufTensor};
use super::gguf_config::tensor_name;
use super::gguf_quant::{dequantize, repack, unpermute_rows};
use super::safetensors::{SafetensorsCheckpoint, TensorInfo, wrong_tensor};
use crate::error::engine;
use crate::nn::{Embedding, Linear, Weight};

/// Where tensors come from.
enum Source {
    Safetensors(SafetensorsCheckpoint),
    Gguf(Gguf),
}

/// The weights of one checkpoint while a model is built from them.
pub struct Weights {
    source: Source,
    path: PathBuf,
    dtype: Dtype,
    cut: bool,
    config: ModelConfig,
    unused: BTreeSet<String>,
    /// Weights by their bits and group size; the most common stands for the model's.
    quantization: BTreeMap<(u32, u32), u64>,
    parameters: u64,
    bytes: u64,
}

impl Weights {
    /// The weights of a directory of safetensors files, to be used as `dtype`.
    pub fn from_safetensors(
        checkpoint: SafetensorsCheckpoint,
        path: &Path,
        config: &ModelConfig,
        dtype: Dtype,
    ) -> Self {
        let unused = checkpoint.names().map(str::to_owned).collect();
        Self::new(Source::Safetensors(checkpoint), path, config, dtype, unused)
    }

    /// The weights of a GGUF file, to be used as `dtype`.
    pub fn from_gguf(gguf: Gguf, config: &ModelConfig, dtype: Dtype) -> Self {
        let unused = gguf.tensors().keys().cloned().collect();
        let path = gguf.path().to_owned();
        Self::new(Source::Gguf(gguf), &path, config, dtype, unused)
    }

    fn new(
        source: Source,
        path: &Path,
        config: &ModelConfig,
        dtype: Dtype,
        unused: BTreeSet<String>,
    ) -> Self {
        Self {
            source,
            path: path.to_owned(),
            dtype,
            cut: false,
            config: config.clone(),
            unused,
            quantization: BTreeMap::new(),
            parameters: 0,
            bytes: 0,
        }
    }

    /// Lets large quantized matrices be computed in halves on two cores.
    pub fn use_two_cores(&mut self) {
        self.cut = true;
    }

    /// An embedding table below a name.
    ///
    /// # Errors
    /// `InvalidModel` when a part is missing or of another shape or kind.
    pub fn embedding(&mut self, prefix: &str, vocab: i32, hidden: i32) -> Result<Embedding> {
        let table = self.matrix(prefix, vocab, hidden)?;
        Embedding::new(table, self.dtype, self.cut).map_err(engine("weights"))
    }

    /// The type weights are used in.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bits and group size of most quantized weights, when there are any.
    pub fn quantization(&self) -> Option<(u32, u32)> {
        self.quantization
            .iter()
            .max_by_key(|(_, weights)| **weights)
            .map(|(format, _)| *format)
    }

    /// Weights in the network so far, a quantized one counted as one.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Bytes of all weights so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the checkpoint has a tensor of this Hugging Face name.
    pub fn contains(&self, name: &str) -> bool {
        match &self.source {
            Source::Safetensors(c) => c.info(name).is_some(),
            Source::Gguf(g) => tensor_name(name).is_some_and(|n| g.tensors().contains_key(&n)),
        }
    }

    /// The output dimension of a projection, from its stored shape.
    pub fn rows(&self, prefix: &str) -> Option<usize> {
        let name = format!("{prefix}.weight");
        match &self.source {
            Source::Safetensors(c) => c.info(&name)?.shape.first().copied(),
            Source::Gguf(g) => g
                .tensors()
                .get(&tensor_name(&name)?)?
                .shape
                .first()
                .copied(),
        }
    }

    /// Marks what stands below a name as not needed.
    pub fn ignore(&mut self, prefix: &str) {
        self.unused.retain(|name| {
            name != prefix
                && !name
                    .strip_prefix(prefix)
                    .is_some_and(|rest| rest.starts_with('.'))
        });
    }

    /// Checks that every tensor was used.
    ///
    /// # Errors
    /// `InvalidModel` listing what is left over.
    pub fn finish(&self) -> Result<()> {
        if self.unused.is_empty() {
            return Ok(());
        }
        let shown: Vec<_> = self.unused.iter().take(8).map(String::as_str).collect();
        let more = self.unused.len() - shown.len();
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        Err(super::files::invalid(
            &self.path,
            format!(
                "the architecture does not use these tensors: {}{more}; the configuration does not \
                 fit the weights",
                shown.join(", ")
            ),
        ))
    }

    fn missing(&self, name: &str, shape: &[usize]) -> Error {
        wrong_tensor(
            &self.path,
            name,
            format!("missing; expected with shape {shape:?}"),
        )
    }

    fn wrong_shape(&self, name: &str, found: &[usize], expected: &[usize]) -> Error {
        wrong_tensor(
            &self.path,
            name,
            format!("has shape {found:?}, expected {expected:?}"),
        )
    }

    /// A one-axis tensor of `len` elements.
    ///
    /// # Errors
    /// `InvalidModel` when it is missing or of another shape or kind.
    pub fn vector(&mut self, name: &str, len: i32) -> Result<Array> {
        let shape = [dimension(len)];
        let array = match &self.source {
            Source::Safetensors(c) => {
                let info = c.info(name).ok_or_else(|| self.missing(name, &shape))?;
                self.dense(c, name, info, &shape)?
            }
            Source::Gguf(g) => {
                let (stored, tensor) = self.gguf_tensor(g, name, &shape)?;
                self.gguf_dense(g, &stored, tensor, &shape)?
            }
        };
        self.account(name, &[&array], u64::from(len.unsigned_abs()));
        Ok(array)
    }

    /// A one-axis tensor as host values, where there is one.
    ///
    /// # Errors
    /// `InvalidModel` when it is of another shape or kind.
    pub fn optional_host_vector(&mut self, name: &str, len: i32) -> Result<Option<Vec<f32>>> {
        if !self.contains(name) {
            return Ok(None);
        }
        self.vector(name, len)?
            .to_f32_vec()
            .map(Some)
            .map_err(engine("weights"))
    }

    /// A linear layer `inputs -> outputs` below a name, with a bias or without.
    ///
    /// # Errors
    /// `InvalidModel` when a part is missing or of another shape or kind.
    pub fn linear(
        &mut self,
        prefix: &str,
        inputs: i32,
        outputs: i32,
        bias: bool,
    ) -> Result<Linear> {
        let weight = self.matrix(prefix, outputs, inputs)?;
        let bias = if bias {
            Some(self.vector(&format!("{prefix}.bias"), outputs)?)
        } else {
            None
        };
        Linear::new(weight, bias, self.cut).map_err(engine("weights"))
    }

    /// A matrix `[rows, cols]` below a name, dense or quantized.
    ///
    /// # Errors
    /// `InvalidModel` when a part is missing or of another shape or kind.
    pub fn matrix(&mut self, prefix: &str, rows: i32, cols: i32) -> Result<Weight> {
        let name = format!("{prefix}.weight");
        let shape = [dimension(rows), dimension(cols)];
        let weight = match &self.source {
            Source::Safetensors(c) => {
                let info = c.info(&name).ok_or_else(|| self.missing(&name, &shape))?;
                if c.info(&format!("{prefix}.scales")).is_some() {
                    Weight::Quantized(self.quantized(c, prefix, info, shape)?)
                } else {
                    Weight::Dense(self.dense(c, &name, info, &shape)?)
                }
            }
            Source::Gguf(g) => {
                let (stored, tensor) = self.gguf_tensor(g, &name, &shape)?;
                self.gguf_matrix(g, &stored, tensor, &shape)?
            }
        };
        for part in ["scales", "biases"] {
            self.unused.remove(&format!("{prefix}.{part}"));
        }
        if let Weight::Quantized(q) = &weight {
            let format = (q.bits.unsigned_abs(), q.group_size.unsigned_abs());
            *self.quantization.entry(format).or_default() += (shape[0] * shape[1]) as u64;
        }
        self.account(&name, &weight.arrays(), (shape[0] * shape[1]) as u64);
        Ok(weight)
    }

    fn account(&mut self, name: &str, arrays: &[&Array], parameters: u64) {
        self.parameters += parameters;
        self.bytes += arrays.iter().map(|a| a.nbytes() as u64).sum::<u64>();
        match &self.source {
            Source::Safetensors(_) => self.unused.remove(name),
            Source::Gguf(_) => tensor_name(name).is_some_and(|n| self.unused.remove(&n)),
        };
    }

    // ---- safetensors

    fn dense(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        name: &str,
        info: &TensorInfo,
        shape: &[usize],
    ) -> Result<Array> {
        if info.shape != shape {
            return Err(self.wrong_shape(name, &info.shape, shape));
        }
        let shape = mlx_shape(shape);
        match info.dtype {
            FileDtype::F32 => self.array(&checkpoint.read::<f32>(info)?, &shape),
            FileDtype::F16 => self.array(&checkpoint.read::<f16>(info)?, &shape),
            FileDtype::BF16 => self.array(&checkpoint.read::<bf16>(info)?, &shape),
            other => Err(wrong_tensor(
                checkpoint.file_of(info),
                name,
                format!("is {other:?}; float tensors must be F32, F16 or BF16"),
            )),
        }
    }

    /// Values as an array of the computing type. Converted at once, so that the file's copy does
    /// not stay in memory behind a lazy conversion.
    fn array<T: Element + Pod>(&self, values: &[T], shape: &[i32]) -> Result<Array> {
        Array::from_slice(values, shape)
            .and_then(|a| {
                if T::DTYPE == self.dtype {
                    Ok(a)
                } else {
                    a.astype(self.dtype)
                }
            })
            .and_then(|a| a.eval().map(|()| a))
            .map_err(engine("weights"))
    }

    fn quantized(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        prefix: &str,
        info: &TensorInfo,
        [rows, cols]: [usize; 2],
    ) -> Result<Quantized> {
        let config = self.quantization_of(prefix)?;
        let (bits, group) = (dimension(config.bits), dimension(config.group_size));
        let name = format!("{prefix}.weight");
        if cols % group != 0 {
            return Err(wrong_tensor(
                &self.path,
                &name,
                format!("{cols} inputs do not divide into groups of {group}"),
            ));
        }
        let packed = [rows, cols / 32 * bits];
        if info.dtype != FileDtype::U32 {
            return Err(wrong_tensor(
                checkpoint.file_of(info),
                &name,
                format!("is {:?}; packed weights must be U32", info.dtype),
            ));
        }
        if info.shape != packed {
            return Err(self.wrong_shape(&name, &info.shape, &packed));
        }
        let weight = Array::from_slice(&checkpoint.read::<u32>(info)?, &mlx_shape(&packed))
            .map_err(engine("weights"))?;
        let part = |part: &str| {
            let name = format!("{prefix}.{part}");
            let shape = [rows, cols / group];
            let info = checkpoint
                .info(&name)
                .ok_or_else(|| self.missing(&name, &shape))?;
            self.dense(checkpoint, &name, info, &shape)
        };
        Ok(Quantized {
            weight,
            scales: part("scales")?,
            biases: Some(part("biases")?),
            group_size: config.group_size,
            bits: config.bits,
            mode: QuantMode::Affine,
        })
    }

    fn quantization_of(&self, prefix: &str) -> Result<&QuantConfig> {
        let exception = self
            .config
            .quantization_overrides
            .get(prefix)
            .map(Option::as_ref);
        exception
            .unwrap_or(self.config.quantization.as_ref())
            .ok_or_else(|| {
                wrong_tensor(
                    &self.path,
                    &format!("{prefix}.scales"),
                    "is there, but config.json does not say how the weight is quantized",
                )
            })
    }

    // ---- GGUF

    fn gguf_tensor<'a>(
        &self,
        gguf: &'a Gguf,
        name: &str,
        shape: &[usize],
    ) -> Result<(String, &'a GgufTensor)> {
        let stored = tensor_name(name).unwrap_or_else(|| name.to_owned());
        let tensor = gguf
            .tensors()
            .get(&stored)
            .ok_or_else(|| self.missing(&stored, shape))?;
        if tensor.shape != shape {
            return Err(self.wrong_shape(&stored, &tensor.shape, shape));
        }
        Ok((stored, tensor))
    }

    /// A tensor's bytes with rows in Hugging Face's order.
    fn gguf_bytes(&self, gguf: &Gguf, stored: &str, tensor: &GgufTensor) -> Result<Vec<u8>> {
        let bytes = gguf.read(tensor)?;
        let heads = match stored.rsplit('.').nth(1) {
            // Only llama's converter permutes.
            _ if self.config.model_type.as_deref() != Some("llama") => return Ok(bytes),
            Some("attn_q") => self.config.num_attention_heads,
            Some("attn_k") => self.config.num_key_value_heads,
            _ => return Ok(bytes),
        };
        match tensor.shape.first() {
            Some(&rows) if rows % (2 * heads) == 0 => Ok(unpermute_rows(&bytes, rows, heads)),
            _ => Err(wrong_tensor(
                gguf.path(),
                stored,
                format!(
                    "has shape {:?}, which does not divide into {heads} heads",
                    tensor.shape
                ),
            )),
        }
    }

    fn gguf_dense(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize],
    ) -> Result<Array> {
        let bytes = self.gguf_bytes(gguf, stored, tensor)?;
        let values = dequantize(tensor.kind, &bytes).ok_or_else(|| {
            wrong_tensor(
                gguf.path(),
                stored,
                format!(
                    "is stored as {}, which is not supported",
                    tensor.kind.name()
                ),
            )
        })?;
        self.array(&values, &mlx_shape(shape))
    }

    fn gguf_matrix(
        &self,
        gguf: &Gguf,
        stored: &str,
        tensor: &GgufTensor,
        shape: &[usize; 2],
    ) -> Result<Weight> {
        let bytes = self.gguf_bytes(gguf, stored, tensor)?;
        let Some(packed) = repack(tensor.kind, &bytes) else {
            drop(bytes);
            return self
                .gguf_dense(gguf, stored, tensor, shape)
                .map(Weight::Dense);
        };
        let [rows, cols] = *shape;
        let groups = mlx_shape(&[rows, cols / 32]);
        let weight = Array::from_slice(
            &packed.packed,
            &mlx_shape(&[rows, cols / 32 * dimension(packed.bits)]),
        )
        .map_err(engine("weights"))?;
        Ok(Weight::Quantized(Quantized {
            weight,
            scales: self.array(&packed.scales, &groups)?,
            biases: Some(self.array(&packed.biases, &groups)?),
            group_size: 32,
            bits: packed.bits,
            mode: QuantMode::Affine,
        }))
    }
}

/// A checked, non-negative dimension as a size.
fn dimension(n: i32) -> usize {
    n.unsigned_abs() as usize
}

/// Sizes as MLX counts them. Sizes that do not fit become -1, which MLX's side refuses.
fn mlx_shape(shape: &[usize]) -> Vec<i32> {
    shape
        .iter()
        .map(|&d| i32::try_from(d).unwrap_or(-1))
        .collect()
}
