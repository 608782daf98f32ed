//! Named weights with checked shapes, in the model's compute type. An architecture requests each
//! tensor with the expected shape. Loading fails if a tensor is never requested.

mod experts;
mod features;
mod fp8;
mod from_gguf;
mod from_safetensors;
mod gguf_mapped;
mod gguf_packed;
mod gguf_part;
mod gptq_awq;
mod part;
mod stage;
mod streaming;

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use inference::{AttentionSums, Error, Result};
use inference_formats::footprint::{WeightStorage, feed_forward_layer};
use mlx_rs_core::io::MappedFile;
use mlx_rs_core::{Array, Dtype};
use safetensors::Dtype as FileDtype;

use crate::checkpoint::files::{invalid, wrong_tensor};
use crate::checkpoint::gguf_config::{GgufNames, predicts_further};
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};
use crate::checkpoint::{Gguf, ModelConfig};
use crate::error::engine;
use crate::exec::{self, Packer, PrefillInputs};
use crate::nn::adapter::{ParamSlot, SlotKind, SlotView};
use crate::nn::{Embedding, ExpertLinear, Linear, Weight};

pub use experts::ExpertNames;
pub use features::{Features, options_of_vindex};
pub use part::Member;
pub use stage::{OwnStage, StageReads};

use part::Part;

/// Whether a matrix is stored as `[inputs, outputs]`.
#[derive(Debug, Clone, Copy)]
struct Turned(bool);

/// The files that contain the tensors.
enum Source {
    Safetensors(SafetensorsCheckpoint, TensorNames),
    Gguf(Arc<Gguf>, GgufNames),
}

/// The weights of one checkpoint while a model is built from them.
pub struct Weights {
    source: Source,
    path: PathBuf,
    dtype: Dtype,
    on_cpu: bool,
    /// The type to which inputs of quantized matrices are converted in prefill.
    prefill_inputs: PrefillInputs,
    /// The half type in which dense matrices are stored for the kernels, regardless of their type
    /// in the file.
    half: Option<Dtype>,
    /// The type in which attention layers sum.
    sums: AttentionSums,
    /// The approximate number of stored bytes per read operation.
    chunk_bytes: usize,
    /// Packs matrices in the background, after they were fetched.
    packer: Packer,
    /// The mapped GGUF file; the cell contains `None` if it cannot be mapped.
    mapped: OnceCell<Option<MappedFile>>,
    /// The size of the smallest mapped matrix, in bytes.
    least_mapped: usize,
    config: ModelConfig,
    unused: BTreeSet<String>,
    /// The number of weights per format (bits, group size), for reporting the most common format.
    quantization: BTreeMap<(u32, u32), u64>,
    parameters: u64,
    bytes: u64,
    /// The slots where adapters can be applied.
    slots: Vec<Arc<ParamSlot>>,
    /// The role of this process in a tensor-parallel group.
    member: Option<Member>,
    /// The layers to read in a pipeline.
    stage: Option<OwnStage>,
    /// Layers whose feed-forward weights are not read.
    unread: BTreeSet<usize>,
    /// The weights fetched so far by name, if [`Self::keep_fetched`] was called.
    fetched: Option<Vec<(String, Weight)>>,
}

impl Weights {
    /// Opens the weights in a directory of safetensors files, for computation in `dtype`.
    pub fn from_safetensors(
        checkpoint: SafetensorsCheckpoint,
        path: &Path,
        config: &ModelConfig,
        dtype: Dtype,
    ) -> Self {
        let names = TensorNames::new(
            checkpoint.names(),
            config.model_type.as_deref().unwrap_or_default(),
        );
        let unused = names.all().map(str::to_owned).collect();
        let source = Source::Safetensors(checkpoint, names);
        Self::new(source, path, config, dtype, unused)
    }

    /// Opens the weights of a GGUF file, for computation in `dtype`.
    pub fn from_gguf(gguf: Gguf, config: &ModelConfig, dtype: Dtype) -> Self {
        // Reading the configuration already used these tensors, the factors of LongRoPE.
        let read = |name: &&String| {
            !name.starts_with("rope_factors_") && !predicts_further(&config.fields, name)
        };
        let unused = gguf.tensors().keys().filter(read).cloned().collect();
        let path = gguf.path().to_owned();
        let names = GgufNames::new(config.model_type.as_deref().unwrap_or_default());
        Self::new(
            Source::Gguf(Arc::new(gguf), names),
            &path,
            config,
            dtype,
            unused,
        )
    }

    /// Opens the weights of another directory, with the same settings.
    pub fn beside(
        &self,
        checkpoint: SafetensorsCheckpoint,
        path: &Path,
        config: &ModelConfig,
    ) -> Self {
        let mut beside = Self::from_safetensors(checkpoint, path, config, self.dtype);
        (beside.on_cpu, beside.prefill_inputs, beside.half) =
            (self.on_cpu, self.prefill_inputs, self.half);
        beside.sums = self.sums;
        beside
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
            on_cpu: false,
            prefill_inputs: PrefillInputs::Float32,
            half: None,
            sums: AttentionSums::Native,
            chunk_bytes: streaming::CHUNK_BYTES,
            packer: Packer::default(),
            mapped: OnceCell::new(),
            least_mapped: gguf_mapped::LEAST_BYTES,
            config: config.clone(),
            unused,
            quantization: BTreeMap::new(),
            parameters: 0,
            bytes: 0,
            slots: Vec::new(),
            member: None,
            stage: None,
            unread: BTreeSet::new(),
            fetched: None,
        }
    }

    /// Records the weights that are fetched from now on, for [`Self::fetched`]. The records share
    /// the model's memory.
    pub fn keep_fetched(&mut self) {
        self.fetched = Some(Vec::new());
    }

    /// Returns the recorded weights with their names in transformers. Their values are those with
    /// which the model computes.
    pub fn fetched(&mut self) -> Vec<(String, Weight)> {
        self.fetched.take().unwrap_or_default()
    }

    /// Returns how tensors are stored in memory for a model that computes in `dtype`, for
    /// estimates. Must agree with [`Self::matrix`] and [`Self::tensor`]. `on_cpu` means the same as
    /// in [`Self::use_cpu`].
    pub fn storage(on_cpu: bool, dtype: Dtype) -> WeightStorage {
        exec::storage(on_cpu, dtype)
    }

    /// Stores matrices in the CPU kernels' layout, if the kernels support their format. Prefill
    /// converts inputs to the type `prefill_inputs`.
    pub fn use_cpu(&mut self, prefill_inputs: PrefillInputs) {
        self.on_cpu = true;
        self.prefill_inputs = prefill_inputs;
    }

    /// Whether the model computes on a CPU.
    pub fn is_on_cpu(&self) -> bool {
        self.on_cpu
    }

    /// Makes dense matrices be rounded to a half type and stored in it, if the CPU kernels can
    /// multiply by this type.
    pub fn keep_half(&mut self, half: Dtype) {
        self.half = Some(half);
    }

    /// Sets the type in which attention layers sum.
    pub fn set_attention_sums(&mut self, sums: AttentionSums) {
        self.sums = sums;
    }

    /// The type in which attention layers sum.
    pub fn attention_sums(&self) -> AttentionSums {
        self.sums
    }

    /// Loads the embedding at `prefix`.
    pub fn embedding(&mut self, prefix: &str, vocab: i32, hidden: i32) -> Result<Embedding> {
        let table = self.matrix(prefix, vocab, hidden)?;
        let table = table.in_layout(self.on_cpu).map_err(engine("weights"))?;
        let table = table.with_prefill_inputs(self.prefill_inputs);
        let slot = self.slot(prefix, SlotKind::Table, &table);
        let embedding =
            Embedding::new(table, self.dtype, self.on_cpu).map_err(engine("weights"))?;
        Ok(embedding.at(SlotView::new(slot, None)))
    }

    /// The compute type of weights.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the most common bits and group size; `None` without quantized weights.
    pub fn quantization(&self) -> Option<(u32, u32)> {
        self.quantization
            .iter()
            .max_by_key(|(_, weights)| **weights)
            .map(|(format, _)| *format)
    }

    /// The number of weights that this process fetched so far. A quantized weight counts as one.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Bytes of all weights fetched so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the checkpoint has a tensor with this Hugging Face name.
    pub fn contains(&self, name: &str) -> bool {
        match &self.source {
            Source::Safetensors(_, names) => {
                let packed = || names.stored(&packed_name(name)?);
                names.stored(name).or_else(packed).is_some()
            }
            Source::Gguf(g, names) => names
                .tensor(name)
                .is_some_and(|n| g.tensors().contains_key(&n)),
        }
    }

    /// The names of all tensors: Hugging Face names for safetensors, GGUF names for GGUF.
    pub fn names(&self) -> Vec<String> {
        match &self.source {
            Source::Safetensors(_, names) => names.all().map(str::to_owned).collect(),
            Source::Gguf(g, _) => g.tensors().keys().cloned().collect(),
        }
    }

    /// Whether the checkpoint is a GGUF file. Architectures need this, because conversion to GGUF
    /// changes some values (norms of Gemma, layout of GPT-2).
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf(..))
    }

    /// The output dimension of the projection at `prefix`, from its stored shape.
    pub fn rows(&self, prefix: &str) -> Option<usize> {
        let matrix = self.shape(&format!("{prefix}.weight"));
        // GPTQ and AWQ store scales as [groups, outputs].
        let scales = || self.shape(&format!("{prefix}.scales"))?.last();
        matrix.map_or_else(scales, <[usize]>::first).copied()
    }

    /// Returns the stored shape of a tensor; for quantized weights, the shape of the packed words.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match &self.source {
            Source::Safetensors(c, names) => Some(&c.info(names.stored(name)?)?.shape),
            Source::Gguf(g, names) => Some(&g.tensors().get(&names.tensor(name)?)?.shape),
        }
    }

    /// Marks tensors whose names start with `prefix` as used, without reading them.
    pub fn ignore(&mut self, prefix: &str) {
        let below = |name: &str, prefix: &str| {
            name.strip_prefix(prefix)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let stored = match &self.source {
            Source::Gguf(_, names) => names.tensor(&format!("{prefix}.weight")),
            Source::Safetensors(..) => None,
        };
        self.unused
            .retain(|name| !below(name, prefix) && stored.as_ref() != Some(name));
    }

    /// Excludes the feed-forward weights of these layers. Fetching them returns absent weights.
    pub fn leave_out_feed_forward(&mut self, layers: &BTreeSet<usize>) {
        let source = &self.source;
        self.unused.retain(|stored| {
            let usual = match source {
                Source::Gguf(_, names) => names.usual(stored),
                Source::Safetensors(..) => None,
            };
            let layer = feed_forward_layer(usual.as_deref().unwrap_or(stored));
            layer.is_none_or(|layer| !layers.contains(&layer))
        });
        self.unread.clone_from(layers);
    }

    /// Whether tensors whose names start with `prefix` are excluded.
    pub fn leaves_out(&self, prefix: &str) -> bool {
        let name = format!("{prefix}.weight");
        let layer = feed_forward_layer(&name);
        layer.is_some_and(|layer| self.unread.contains(&layer))
            || self.stage.as_ref().is_some_and(|stage| !stage.reads(&name))
    }

    /// Checks that every tensor was requested or ignored.
    ///
    /// # Errors
    /// `InvalidModel`, with a list of the unused tensors.
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
        Err(invalid(
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

    fn wrong_shape(&self, name: &str, actual: &[usize], expected: &[usize]) -> Error {
        wrong_tensor(
            &self.path,
            name,
            format!("has shape {actual:?}, expected {expected:?}"),
        )
    }

    /// Loads a one-axis tensor of `len` elements.
    pub fn vector(&mut self, name: &str, len: i32) -> Result<Array> {
        self.tensor(name, &[len])
    }

    /// Loads a dense tensor of any shape.
    pub fn tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        self.dense_tensor(name, shape, (Turned(false), false))
    }

    /// Loads a dense matrix `[outputs, inputs]` that is stored as `[inputs, outputs]`.
    pub fn turned_matrix(&mut self, prefix: &str, outputs: i32, inputs: i32) -> Result<Weight> {
        let stored = format!("{prefix}.weight");
        self.dense_tensor(&stored, &[inputs, outputs], (Turned(true), self.on_cpu))?
            .swap_axes(0, 1)
            .map(Weight::Dense)
            .map_err(engine("weights"))
    }

    /// Loads a dense stack of expert matrices. 16-bit elements keep their type if the kernels can
    /// multiply by them.
    pub fn expert_tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        self.dense_tensor(name, shape, (Turned(false), self.on_cpu))
    }

    /// Loads a stack as [`Self::expert_tensor`], from matrices stored as `[inputs, outputs]`.
    pub fn turned_experts(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        self.dense_tensor(name, shape, (Turned(true), self.on_cpu))
    }

    /// Builds an expert layer from a fetched weight.
    pub fn expert_layer(&self, weight: Weight, bias: Option<Array>) -> Result<ExpertLinear> {
        // The expert kernels compute in float32.
        let on_cpu = self.on_cpu && self.dtype == Dtype::Float32;
        let layer = ExpertLinear::new(weight, bias, on_cpu).map_err(engine("weights"))?;
        Ok(layer.with_prefill_inputs(self.prefill_inputs))
    }

    fn dense_tensor(
        &mut self,
        name: &str,
        shape: &[i32],
        (turned, for_kernels): (Turned, bool),
    ) -> Result<Array> {
        let shape: Vec<usize> = shape.iter().map(|&d| dimension(d)).collect();
        let array = match &self.source {
            Source::Safetensors(c, names) => {
                let part = self.part_of(name, &shape, turned)?;
                let (stored, info) = self.stored_tensor(c, names, name, &shape)?;
                self.dense_matrix(c, stored, info, &part, for_kernels)?
            }
            Source::Gguf(g, names) => {
                let tensor = self.gguf_tensor(g, names, name, &shape)?;
                let dtype = self.gguf_float_type(&tensor, &shape, for_kernels);
                self.gguf_dense(&tensor, &shape, dtype)?
            }
        };
        self.account(name, array.nbytes(), elements(&shape));
        if let Some(fetched) = &mut self.fetched {
            fetched.push((name.to_owned(), Weight::Dense(array.clone())));
        }
        Ok(array)
    }

    /// Loads a one-axis tensor as values on the host; `None` if the file lacks it. Such tensors
    /// belong to the configuration (for example rotary factors), and do not count as weights.
    ///
    /// # Errors
    /// `InvalidModel` if the tensor has another shape or type.
    pub fn optional_host_vector(&mut self, name: &str, len: i32) -> Result<Option<Vec<f32>>> {
        if !self.contains(name) {
            return Ok(None);
        }
        let before = (self.parameters, self.bytes);
        let vector = self.vector(name, len)?;
        (self.parameters, self.bytes) = before;
        vector.to_f32_vec().map(Some).map_err(engine("weights"))
    }

    /// Loads the linear layer `inputs -> outputs` at `prefix`, with an optional bias.
    pub fn linear(
        &mut self,
        prefix: &str,
        inputs: i32,
        outputs: i32,
        bias: bool,
    ) -> Result<Linear> {
        if self.leaves_out(prefix) {
            return Ok(Linear::absent());
        }
        let weight = self.matrix(prefix, outputs, inputs)?;
        let bias = if bias {
            Some(self.vector(&format!("{prefix}.bias"), outputs)?)
        } else {
            None
        };
        let slot = SlotView::new(self.slot(prefix, SlotKind::Matrix, &weight), None);
        let bias_slot = self.bias_slot(prefix, bias.as_ref());
        let bias_slot = bias_slot.map(|slot| SlotView::new(slot, None));
        let layer = self.layer(weight, bias)?;
        let layer = layer.summed_over(self.summed_over(prefix));
        Ok(layer.at(slot).with_bias_at(bias_slot))
    }

    /// Creates the slot of the bias at `prefix`, if there is a bias.
    pub fn bias_slot(&mut self, prefix: &str, bias: Option<&Array>) -> Option<Arc<ParamSlot>> {
        let bias = Weight::Dense(bias?.clone());
        Some(self.slot(prefix, SlotKind::Bias, &bias))
    }

    /// Creates the slot of the weight at `prefix`.
    pub fn slot(&mut self, prefix: &str, kind: SlotKind, weight: &Weight) -> Arc<ParamSlot> {
        let slot = ParamSlot::of_part(
            prefix,
            kind,
            weight.clone(),
            self.window(prefix, kind, weight),
        );
        self.slots.push(Arc::clone(&slot));
        slot
    }

    /// The slots of all layers fetched so far.
    pub fn slots(&self) -> &[Arc<ParamSlot>] {
        &self.slots
    }

    /// Builds a linear layer from a fetched weight and bias.
    pub fn layer(&self, weight: Weight, bias: Option<Array>) -> Result<Linear> {
        let weight = weight.in_layout(self.on_cpu).map_err(engine("weights"))?;
        let weight = weight.with_prefill_inputs(self.prefill_inputs);
        Linear::new(weight, bias, self.on_cpu).map_err(engine("weights"))
    }

    /// Loads a matrix `[rows, cols]` at `prefix`, dense or quantized.
    pub fn matrix(&mut self, prefix: &str, rows: i32, cols: i32) -> Result<Weight> {
        let shape = [dimension(rows), dimension(cols)];
        // Converts directly to the kernels' layout, which avoids a second copy of the weight.
        let weight = self.fetch(prefix, &shape, self.on_cpu)?;
        self.count(prefix, &weight, elements(&shape));
        Ok(weight)
    }

    /// Loads a stack of matrices `[.., rows, cols]` at `prefix`, dense or quantized.
    pub fn stack(&mut self, prefix: &str, shape: &[i32]) -> Result<Weight> {
        let shape: Vec<usize> = shape.iter().map(|&d| dimension(d)).collect();
        let weight = self.fetch(prefix, &shape, self.on_cpu)?;
        self.count(prefix, &weight, elements(&shape));
        Ok(weight)
    }

    /// Loads the weight at `prefix`. It gets the kernels' layout if `for_kernels` and the kernels
    /// support its format.
    fn fetch(&self, prefix: &str, shape: &[usize], for_kernels: bool) -> Result<Weight> {
        let name = format!("{prefix}.weight");
        let weight = match &self.source {
            Source::Safetensors(c, names) => {
                if let Some(weight) = self.gptq_or_awq(c, names, prefix, shape, for_kernels)? {
                    return Ok(weight.with_prefill_inputs(self.prefill_inputs));
                }
                let part = self.part(&name, shape)?;
                let (stored, info) = self.stored_tensor(c, names, &name, shape)?;
                if info.dtype == FileDtype::F8_E4M3 {
                    self.fp8(c, names, (prefix, stored), info, (shape, for_kernels))?
                } else if names.stored(&format!("{prefix}.scales")).is_some() {
                    self.quantized(c, names, prefix, info, &part, for_kernels)?
                } else {
                    Weight::Dense(self.dense_matrix(c, stored, info, &part, for_kernels)?)
                }
            }
            Source::Gguf(g, names) => {
                let tensor = self.gguf_tensor(g, names, &name, shape)?;
                self.gguf_matrix(&tensor, shape, for_kernels)?
            }
        };
        Ok(weight.with_prefill_inputs(self.prefill_inputs))
    }

    /// Loads a tensor of bytes.
    pub fn byte_tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        let array = self.stored_bytes(name, shape, |c, stored, info, part| {
            self.raw_bytes(c, stored, info, part)
        })?;
        self.account(name, array.nbytes(), 0);
        Ok(array)
    }

    /// Loads a tensor of bytes, combined into little-endian words. The last axis becomes a quarter
    /// as long.
    pub fn words(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        let array = self.stored_bytes(name, shape, |c, stored, info, part| {
            self.packed_words(c, stored, info, part)
        })?;
        let weights = elements(&shape.iter().map(|&d| dimension(d)).collect::<Vec<_>>());
        self.account(name, array.nbytes(), weights.saturating_mul(2));
        Ok(array)
    }

    fn stored_bytes(
        &self,
        name: &str,
        shape: &[i32],
        read: impl Fn(&SafetensorsCheckpoint, &str, &TensorInfo, &Part) -> Result<Array>,
    ) -> Result<Array> {
        let shape: Vec<usize> = shape.iter().map(|&d| dimension(d)).collect();
        match &self.source {
            Source::Safetensors(c, names) => {
                let part = self.part(name, &shape)?;
                let (stored, info) = self.stored_tensor(c, names, name, &shape)?;
                read(c, stored, info, &part)
            }
            Source::Gguf(..) => Err(self.missing(name, &shape)),
        }
    }

    /// Dequantizes a fetched weight. Updates the statistics to the dequantized bytes.
    pub fn plain(&mut self, weight: &Weight) -> Result<Array> {
        let packed = weight.nbytes() as u64;
        let plain = weight.dense(self.dtype).map_err(engine("weights"))?;
        self.bytes = self.bytes.saturating_sub(packed) + plain.nbytes() as u64;
        Ok(plain)
    }

    /// Adds the weight at `prefix` to the statistics.
    fn count(&mut self, prefix: &str, weight: &Weight, parameters: u64) {
        for part in OTHER_PARTS {
            self.unused.remove(&format!("{prefix}.{part}"));
        }
        if let Some((bits, group)) = weight.format() {
            let format = (bits.unsigned_abs(), group.unsigned_abs());
            *self.quantization.entry(format).or_default() += parameters;
        }
        self.account(&format!("{prefix}.weight"), weight.nbytes(), parameters);
        if let Some(fetched) = &mut self.fetched {
            fetched.push((format!("{prefix}.weight"), weight.clone()));
        }
    }

    fn account(&mut self, name: &str, nbytes: usize, parameters: u64) {
        self.parameters += parameters;
        self.bytes += nbytes as u64;
        match &self.source {
            Source::Safetensors(..) => self.unused.remove(name),
            Source::Gguf(_, names) => names.tensor(name).is_some_and(|n| self.unused.remove(&n)),
        };
    }
}

/// The suffixes of the other tensors of a quantized matrix, besides `weight`: those of MLX, of GPTQ
/// and AWQ, and of FP8.
const OTHER_PARTS: [&str; 6] = [
    "scales",
    "biases",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_scale_inv",
];

/// Returns the name of the tensor that GPTQ and AWQ store instead of this matrix.
fn packed_name(matrix: &str) -> Option<String> {
    Some(format!("{}.qweight", matrix.strip_suffix(".weight")?))
}

/// Returns the number of elements of a shape. Saturates instead of overflowing.
fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64))
}

/// Converts a dimension to a size. It was checked before, so it is not negative.
fn dimension(n: i32) -> usize {
    n.unsigned_abs() as usize
}

/// Converts sizes to `i32`, as MLX requires. A size that does not fit becomes -1, for which MLX
/// returns an error.
fn mlx_shape(shape: &[usize]) -> Vec<i32> {
    shape
        .iter()
        .map(|&d| i32::try_from(d).unwrap_or(-1))
        .collect()
}
