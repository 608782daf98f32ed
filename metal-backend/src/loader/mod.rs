//! Named, shape-checked weights in the type that the model computes in. An architecture asks for
//! each tensor with the shape it expects. A tensor that no one asked for is an error.

mod experts;
mod features;
mod from_gguf;
mod from_safetensors;
mod gguf_packed;
mod part;
mod stage;
mod streaming;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use inference::{AttentionSums, Error, Result};
use inference_formats::footprint::{WeightStorage, feed_forward_layer};
use mlx_rs_core::{Array, Dtype};

use crate::checkpoint::files::{invalid, wrong_tensor};
use crate::checkpoint::gguf_config::GgufNames;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo, TensorNames};
use crate::checkpoint::{Gguf, ModelConfig};
use crate::error::engine;
use crate::exec::{self, Prompts};
use crate::nn::adapter::{ParamSlot, SlotKind, SlotView};
use crate::nn::{Embedding, ExpertLinear, Linear, Weight};

pub use experts::ExpertNames;
pub use features::{Features, options_of_vindex};
pub use part::Member;
pub use stage::{OwnStage, StageReads};

use part::Part;

/// Where tensors come from.
enum Source {
    Safetensors(SafetensorsCheckpoint, TensorNames),
    Gguf(Gguf, GgufNames),
}

/// The weights of one checkpoint while a model is built from them.
pub struct Weights {
    source: Source,
    path: PathBuf,
    dtype: Dtype,
    on_cpu: bool,
    /// What inputs of quantized matrices become in prompts.
    prompts: Prompts,
    /// The type that dense matrices are rounded to and kept in for the kernels, whatever type they
    /// are stored in.
    half: Option<Dtype>,
    /// How attention layers sum.
    sums: AttentionSums,
    /// About how many stored bytes of a tensor are read at a time.
    chunk_bytes: usize,
    config: ModelConfig,
    unused: BTreeSet<String>,
    /// Weights by their bits and group size; the most common stands for the model's.
    quantization: BTreeMap<(u32, u32), u64>,
    parameters: u64,
    bytes: u64,
    /// The layers that adapters can replace.
    slots: Vec<Arc<ParamSlot>>,
    /// This process, where several compute the model.
    member: Option<Member>,
    /// The layers that are read, where others have the rest.
    stage: Option<OwnStage>,
    /// Layers whose feed-forward parts are not read.
    unread: BTreeSet<usize>,
    /// What was fetched by its name, where it is kept.
    fetched: Option<Vec<(String, Weight)>>,
}

impl Weights {
    /// The weights of a directory of safetensors files, to be used as `dtype`.
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

    /// The weights of a GGUF file, to be used as `dtype`.
    pub fn from_gguf(gguf: Gguf, config: &ModelConfig, dtype: Dtype) -> Self {
        // The configuration has read the factors of LongRoPE.
        let read = |name: &&String| !name.starts_with("rope_factors_");
        let unused = gguf.tensors().keys().filter(read).cloned().collect();
        let path = gguf.path().to_owned();
        let names = GgufNames::new(config.model_type.as_deref().unwrap_or_default());
        Self::new(Source::Gguf(gguf, names), &path, config, dtype, unused)
    }

    /// The weights of another directory, to be used like these.
    pub fn beside(
        &self,
        checkpoint: SafetensorsCheckpoint,
        path: &Path,
        config: &ModelConfig,
    ) -> Self {
        let mut own = Self::from_safetensors(checkpoint, path, config, self.dtype);
        (own.on_cpu, own.prompts, own.half) = (self.on_cpu, self.prompts, self.half);
        own.sums = self.sums;
        own
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
            prompts: Prompts::Float32,
            half: None,
            sums: AttentionSums::Native,
            chunk_bytes: streaming::CHUNK_BYTES,
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

    /// Keeps what is fetched from now on, for [`Self::fetched`]. It shares the model's memory.
    pub fn keep_fetched(&mut self) {
        self.fetched = Some(Vec::new());
    }

    /// The tensors that were fetched, by their names in transformers, in the numbers that the model
    /// computes with.
    pub fn fetched(&mut self) -> Vec<(String, Weight)> {
        self.fetched.take().unwrap_or_default()
    }

    /// How tensors are held in memory when the model computes in `dtype`, for estimates: what
    /// [`Self::matrix`] and [`Self::tensor`] do. `on_cpu` as in [`Self::use_cpu`].
    pub fn storage(on_cpu: bool, dtype: Dtype) -> WeightStorage {
        exec::storage(on_cpu, dtype)
    }

    /// Holds matrices in the layout of the CPU kernels, where the kernels have their format. Prompts
    /// meet them as `prompts` says.
    pub fn use_cpu(&mut self, prompts: Prompts) {
        self.on_cpu = true;
        self.prompts = prompts;
    }

    /// Whether the model computes on a processor.
    pub fn is_on_cpu(&self) -> bool {
        self.on_cpu
    }

    /// Rounds dense matrices to a half type and keeps them in it, where the CPU kernels multiply with
    /// it.
    pub fn keep_half(&mut self, half: Dtype) {
        self.half = Some(half);
    }

    /// Sets how attention layers sum.
    pub fn set_attention_sums(&mut self, sums: AttentionSums) {
        self.sums = sums;
    }

    /// How attention layers sum.
    pub fn attention_sums(&self) -> AttentionSums {
        self.sums
    }

    /// An embedding table below a name.
    ///
    /// # Errors
    /// `InvalidModel` when a part is missing or of another shape or kind.
    pub fn embedding(&mut self, prefix: &str, vocab: i32, hidden: i32) -> Result<Embedding> {
        let table = self.matrix(prefix, vocab, hidden)?;
        let table = table.in_layout(self.on_cpu).map_err(engine("weights"))?;
        let table = table.with_prompts(self.prompts);
        let slot = self.slot(prefix, SlotKind::Table, &table);
        let embedding =
            Embedding::new(table, self.dtype, self.on_cpu).map_err(engine("weights"))?;
        Ok(embedding.at(SlotView::new(slot, None)))
    }

    /// The type weights are used in.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bits and group size of most quantized weights; `None` without quantized weights.
    pub fn quantization(&self) -> Option<(u32, u32)> {
        self.quantization
            .iter()
            .max_by_key(|(_, weights)| **weights)
            .map(|(format, _)| *format)
    }

    /// Weights fetched so far, by this process. A quantized weight counts as one.
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
            Source::Safetensors(_, names) => names.stored(name).is_some(),
            Source::Gguf(g, names) => names
                .tensor(name)
                .is_some_and(|n| g.tensors().contains_key(&n)),
        }
    }

    /// The names of all tensors: the usual ones of safetensors files, and those in a GGUF file.
    pub fn names(&self) -> Vec<String> {
        match &self.source {
            Source::Safetensors(_, names) => names.all().map(str::to_owned).collect(),
            Source::Gguf(g, _) => g.tensors().keys().cloned().collect(),
        }
    }

    /// Whether the checkpoint is a GGUF file. Converters to GGUF change some numbers (the norms of
    /// Gemma, the layout of GPT-2), so architectures must know.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf(..))
    }

    /// The output dimension of a projection, from its stored shape.
    pub fn rows(&self, prefix: &str) -> Option<usize> {
        self.shape(&format!("{prefix}.weight"))?.first().copied()
    }

    /// The stored shape of a tensor; packed weights have their packed one.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match &self.source {
            Source::Safetensors(c, names) => Some(&c.info(names.stored(name)?)?.shape),
            Source::Gguf(g, names) => Some(&g.tensors().get(&names.tensor(name)?)?.shape),
        }
    }

    /// Marks the tensors below a name as not needed.
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

    /// Does not read the feed-forward parts of these layers: what is asked for is absent.
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

    /// Whether what is below this name is not read.
    pub fn leaves_out(&self, prefix: &str) -> bool {
        let name = format!("{prefix}.weight");
        let layer = feed_forward_layer(&name);
        layer.is_some_and(|layer| self.unread.contains(&layer))
            || self.stage.as_ref().is_some_and(|own| !own.reads(&name))
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
        self.tensor(name, &[len])
    }

    /// A dense tensor of any shape.
    ///
    /// # Errors
    /// `InvalidModel` when it is missing or of another shape or kind.
    pub fn tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        self.dense_tensor(name, shape, false)
    }

    /// A dense matrix `[outputs, inputs]` whose stored form is `[inputs, outputs]`.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn turned_matrix(&mut self, prefix: &str, outputs: i32, inputs: i32) -> Result<Weight> {
        let stored = format!("{prefix}.weight");
        self.dense_tensor(&stored, &[inputs, outputs], self.on_cpu)?
            .swap_axes(0, 1)
            .map(Weight::Dense)
            .map_err(engine("weights"))
    }

    /// A dense stack of matrices of experts. Numbers of 16 bits stay so where the kernels multiply
    /// with them.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn expert_tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        self.dense_tensor(name, shape, self.on_cpu)
    }

    /// Experts from parts that were fetched before.
    ///
    /// # Errors
    /// When the weight is not a stack of matrices.
    pub fn expert_layer(&self, weight: Weight, bias: Option<Array>) -> Result<ExpertLinear> {
        // The kernels compute in float32.
        let on_cpu = self.on_cpu && self.dtype == Dtype::Float32;
        let layer = ExpertLinear::new(weight, bias, on_cpu).map_err(engine("weights"))?;
        Ok(layer.with_prompts(self.prompts))
    }

    fn dense_tensor(&mut self, name: &str, shape: &[i32], for_kernels: bool) -> Result<Array> {
        let shape: Vec<usize> = shape.iter().map(|&d| dimension(d)).collect();
        let array = match &self.source {
            Source::Safetensors(c, names) => {
                let part = self.part(name, &shape)?;
                let (stored, info) = self.stored_tensor(c, names, name, &shape)?;
                self.dense_matrix(c, stored, info, &part, for_kernels)?
            }
            Source::Gguf(g, names) => {
                let (stored, tensor) = self.gguf_tensor(g, names, name, &shape)?;
                let dtype = self.gguf_float_type(tensor, &shape, for_kernels);
                self.gguf_dense(g, &stored, tensor, &shape, dtype)?
            }
        };
        self.account(name, &[&array], elements(&shape));
        if let Some(fetched) = &mut self.fetched {
            fetched.push((name.to_owned(), Weight::Dense(array.clone())));
        }
        Ok(array)
    }

    /// A one-axis tensor as values of the host; `None` when the file lacks it. These are facts of
    /// the configuration, such as factors of rotary positions, and count as no weights.
    ///
    /// # Errors
    /// `InvalidModel` when it is of another shape or kind.
    pub fn optional_host_vector(&mut self, name: &str, len: i32) -> Result<Option<Vec<f32>>> {
        if !self.contains(name) {
            return Ok(None);
        }
        let before = (self.parameters, self.bytes);
        let vector = self.vector(name, len)?;
        (self.parameters, self.bytes) = before;
        vector.to_f32_vec().map(Some).map_err(engine("weights"))
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

    /// The slot of a bias that was fetched below a name, where there is one.
    pub fn bias_slot(&mut self, prefix: &str, bias: Option<&Array>) -> Option<Arc<ParamSlot>> {
        let bias = Weight::Dense(bias?.clone());
        Some(self.slot(prefix, SlotKind::Bias, &bias))
    }

    /// The slot of a weight that was fetched below a name.
    pub fn slot(&mut self, prefix: &str, kind: SlotKind, weight: &Weight) -> Arc<ParamSlot> {
        let slot = ParamSlot::new(prefix, kind, weight.clone());
        self.slots.push(Arc::clone(&slot));
        slot
    }

    /// The slots of all layers that were fetched so far.
    pub fn slots(&self) -> &[Arc<ParamSlot>] {
        &self.slots
    }

    /// A linear layer from parts that were fetched before.
    ///
    /// # Errors
    /// When the weight is not a matrix.
    pub fn layer(&self, weight: Weight, bias: Option<Array>) -> Result<Linear> {
        let weight = weight.in_layout(self.on_cpu).map_err(engine("weights"))?;
        let weight = weight.with_prompts(self.prompts);
        Linear::new(weight, bias, self.on_cpu).map_err(engine("weights"))
    }

    /// A matrix `[rows, cols]` below a name, dense or quantized.
    ///
    /// # Errors
    /// `InvalidModel` when a part is missing or of another shape or kind.
    pub fn matrix(&mut self, prefix: &str, rows: i32, cols: i32) -> Result<Weight> {
        let shape = [dimension(rows), dimension(cols)];
        // Converted to the layout of the kernels here, so that no second form exists.
        let weight = self.fetch(prefix, &shape, self.on_cpu)?;
        self.count(prefix, &weight, elements(&shape));
        Ok(weight)
    }

    /// Matrices `[.., rows, cols]` below a name, dense or quantized.
    ///
    /// # Errors
    /// `InvalidModel` when a part is missing or of another shape or kind.
    pub fn stack(&mut self, prefix: &str, shape: &[i32]) -> Result<Weight> {
        let shape: Vec<usize> = shape.iter().map(|&d| dimension(d)).collect();
        let weight = self.fetch(prefix, &shape, self.on_cpu)?;
        self.count(prefix, &weight, elements(&shape));
        Ok(weight)
    }

    /// The weight below a name, in the layout of the kernels if `for_kernels` and they have its
    /// format.
    fn fetch(&self, prefix: &str, shape: &[usize], for_kernels: bool) -> Result<Weight> {
        let name = format!("{prefix}.weight");
        let weight = match &self.source {
            Source::Safetensors(c, names) => {
                let part = self.part(&name, shape)?;
                let (stored, info) = self.stored_tensor(c, names, &name, shape)?;
                if names.stored(&format!("{prefix}.scales")).is_some() {
                    self.quantized(c, names, prefix, info, &part, for_kernels)?
                } else {
                    Weight::Dense(self.dense_matrix(c, stored, info, &part, for_kernels)?)
                }
            }
            Source::Gguf(g, names) => {
                let (stored, tensor) = self.gguf_tensor(g, names, &name, shape)?;
                self.gguf_matrix(g, &stored, tensor, shape, for_kernels)?
            }
        };
        Ok(weight.with_prompts(self.prompts))
    }

    /// A tensor of bytes.
    ///
    /// # Errors
    /// `InvalidModel` when it is missing or of another shape or kind.
    pub fn byte_tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        let array = self.stored_bytes(name, shape, |c, stored, info, part| {
            self.raw_bytes(c, stored, info, part)
        })?;
        self.account(name, &[&array], 0);
        Ok(array)
    }

    /// A tensor of bytes as little-endian words. The last axis gets a quarter of its length.
    ///
    /// # Errors
    /// `InvalidModel` when it is missing or of another shape or kind.
    pub fn words(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        let array = self.stored_bytes(name, shape, |c, stored, info, part| {
            self.packed_words(c, stored, info, part)
        })?;
        let weights = elements(&shape.iter().map(|&d| dimension(d)).collect::<Vec<_>>());
        self.account(name, &[&array], weights.saturating_mul(2));
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

    /// A weight that was fetched before, as plain numbers. Its bytes are counted as such.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn plain(&mut self, weight: &Weight) -> Result<Array> {
        let packed: u64 = weight.arrays().iter().map(|a| a.nbytes() as u64).sum();
        let plain = weight.dense(self.dtype).map_err(engine("weights"))?;
        self.bytes = self.bytes.saturating_sub(packed) + plain.nbytes() as u64;
        Ok(plain)
    }

    /// Counts the weight that was fetched below a name.
    fn count(&mut self, prefix: &str, weight: &Weight, parameters: u64) {
        for part in ["scales", "biases"] {
            self.unused.remove(&format!("{prefix}.{part}"));
        }
        if let Some((bits, group)) = weight.format() {
            let format = (bits.unsigned_abs(), group.unsigned_abs());
            *self.quantization.entry(format).or_default() += parameters;
        }
        self.account(&format!("{prefix}.weight"), &weight.arrays(), parameters);
        if let Some(fetched) = &mut self.fetched {
            fetched.push((format!("{prefix}.weight"), weight.clone()));
        }
    }

    fn account(&mut self, name: &str, arrays: &[&Array], parameters: u64) {
        self.parameters += parameters;
        self.bytes += arrays.iter().map(|a| a.nbytes() as u64).sum::<u64>();
        match &self.source {
            Source::Safetensors(..) => self.unused.remove(name),
            Source::Gguf(_, names) => names.tensor(name).is_some_and(|n| self.unused.remove(&n)),
        };
    }
}

/// Elements of a shape that was checked before.
fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64))
}

/// A checked, non-negative dimension as a size.
fn dimension(n: i32) -> usize {
    n.unsigned_abs() as usize
}

/// Sizes in the type of MLX. A size that does not fit becomes -1, which MLX refuses.
fn mlx_shape(shape: &[usize]) -> Vec<i32> {
    shape
        .iter()
        .map(|&d| i32::try_from(d).unwrap_or(-1))
        .collect()
}
