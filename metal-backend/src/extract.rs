//! Reads weights from a model's files layer by layer: feed-forward features, the tokens that these
//! features promote, and the other tensors. Holds only one layer and the head in memory if the
//! family supports loading single layers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use inference::{Error, ErrorKind, FeedForwardWeights, Interrupt, LoadOptions, Result};
use inference_formats::footprint::Part;
use inference_formats::pipeline::PipelineSplit;
use mlx_rs_core::distributed::{self, Group};
use mlx_rs_core::{Array, Dtype, Stream, eval, memory};
use serde_json::{Map, Value};

use crate::arch::{self, Decoder};
use crate::backend::{Place, open_weights};
use crate::checkpoint::files::{MAX_TEXT_FILE, ModelDir, read_capped};
use crate::checkpoint::{Gguf, ModelConfig, ModelFiles, locate, python_json};
use crate::convert::{text_files, tokenizer_files};
use crate::error::engine;
use crate::exec::{self, Weight};
use crate::inspect::features_of;
use crate::loader::{OwnStage, StageReads};
use crate::nn::FeedForward;
use crate::text::TextPipeline;

/// The number of states per call if the decoder computes the greatest logits without storing all
/// logits.
const STATES: usize = 4096;

/// The maximum bytes of logits computed at a time. Each block of the head is dequantized once per
/// call, so larger is faster.
const LOGIT_BYTES: usize = 48 << 20;

/// A tensor that is not part of the feed-forward features.
#[derive(Debug, Clone)]
pub struct NamedTensor {
    name: String,
    weight: Weight,
}

impl NamedTensor {
    /// Returns the tensor's name in transformers.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The part of the network to which the tensor belongs.
    #[must_use]
    pub fn part(&self) -> Part {
        Part::from_name(&self.name)
    }

    /// The sizes of its axes.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        let sizes = self.weight.shape();
        sizes.iter().map(|d| d.unsigned_abs() as usize).collect()
    }

    /// Returns the values as float32, row-major. Quantized weights are dequantized.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn values(&self) -> Result<Vec<f32>> {
        let dense = self.weight.dense(Dtype::Float32);
        dense
            .and_then(|dense| dense.to_f32_vec())
            .map_err(engine("weights"))
    }
}

/// The content of one layer.
#[derive(Debug)]
pub struct ExtractedLayer {
    /// The feed-forward part.
    pub features: FeedForwardWeights,
    /// The layer's other tensors. In a layer with experts, these include the router and the shared
    /// expert.
    pub tensors: Vec<NamedTensor>,
}

/// A pipeline split into single layers. The group contains only this process, so nothing is sent.
type Division = (Arc<PipelineSplit>, Group);

/// A decoder, or a part of one.
struct Opened {
    decoder: Box<dyn Decoder>,
    tensors: Vec<NamedTensor>,
}

/// A model's files, opened for reading its layers.
pub struct Extractor {
    path: PathBuf,
    options: LoadOptions,
    place: Place,
    stream: Stream,
    config: ModelConfig,
    architecture: String,
    /// The division into single layers; `None` if the family does not support it.
    split: Option<Division>,
    /// Norm, head and token embedding; the whole model if it is not divided into layers.
    ends: Opened,
}

impl std::fmt::Debug for Extractor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Extractor({})", self.path.display())
    }
}

impl Extractor {
    /// Opens the model at `path` with the backend and type in the options. Other options must have
    /// their defaults.
    ///
    /// # Errors
    /// The errors of [`inference::load_model`].
    pub fn open(path: &Path, options: &LoadOptions) -> Result<Self> {
        options.validate()?;
        if let Some(name) = options.first_not_of(&["dtype", "precision"])? {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("{name} has no effect when a model's numbers are read; leave it out"),
            ));
        }
        let place = Place::named_or_best(options.backend.as_deref());
        let stream = Stream::default_of(place.device()).map_err(engine("device"))?;
        let (config, split, (architecture, ends)) = stream.scope(|| {
            let (config, _) = open_weights(path, options, place)?;
            let split = match PipelineSplit::new(&config, config.num_hidden_layers) {
                Ok(split) => {
                    let group = distributed::init(false).map_err(engine("group"))?;
                    Some((Arc::new(split), group))
                }
                Err(_) => None,
            };
            let ends = split.as_ref().map(|split| (split, 0, StageReads::Ends));
            let ends = opened(path, options, place, ends)?;
            Ok::<_, Error>((config, split, ends))
        })?;
        Ok(Self {
            path: path.to_owned(),
            options: options.clone(),
            place,
            stream,
            config,
            architecture,
            split,
            ends,
        })
    }

    /// The architecture's name.
    #[must_use]
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// The number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.config.num_hidden_layers
    }

    /// The number of elements of a hidden state.
    #[must_use]
    pub fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    /// The number of tokens in the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    /// Whether layers are read one at a time. Otherwise the whole model is in memory.
    #[must_use]
    pub fn reads_layers(&self) -> bool {
        self.split.is_some()
    }

    /// A layer's features and other tensors.
    ///
    /// # Errors
    /// The errors of [`inference::AttentionInspector::feed_forward_weights`].
    pub fn layer(&self, layer: usize) -> Result<ExtractedLayer> {
        if layer >= self.layers() {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("there is no layer {layer}; the model has {}", self.layers()),
            ));
        }
        let read = self.stream.scope(|| {
            let Some(split) = &self.split else {
                return self.extracted(&self.ends, layer, layer);
            };
            let part = Some((split, layer, StageReads::Layers));
            let (_, opened) = opened(&self.path, &self.options, self.place, part)?;
            self.extracted(&opened, 0, layer)
        });
        // The next layer may need buffers of other sizes, so cached buffers are freed.
        memory::clear_cache().map_err(engine("weights"))?;
        read
    }

    /// Returns the features and tensors of `layer`, which has the index `at` in the decoder `from`.
    fn extracted(&self, from: &Opened, at: usize, layer: usize) -> Result<ExtractedLayer> {
        let part = from.decoder.feed_forward(at).map(FeedForward::trained);
        let mixes = matches!(part, Some(FeedForward::Mixture(_)));
        let features = features_of(part, layer, self.hidden_size())?;
        let infix = format!(".{layer}.");
        let mut tensors = from.tensors.clone();
        tensors.retain(|tensor| {
            let feature = match tensor.part() {
                Part::FeedForward => !mixes,
                Part::Experts => true,
                _ => false,
            };
            !feature && of_layer(tensor) && tensor.name.contains(&infix)
        });
        Ok(ExtractedLayer { features, tensors })
    }

    /// Returns the tensors outside the layers: the token embedding, the last norm, and the head if
    /// it is not tied.
    #[must_use]
    pub fn ends(&self) -> Vec<NamedTensor> {
        let all = self.ends.tensors.iter();
        all.filter(|tensor| !of_layer(tensor)).cloned().collect()
    }

    /// Returns the `k` greatest logits of each hidden state in descending order, with their tokens.
    /// The logits come from the model's last norm and head. `states` is `[states, hidden]`,
    /// row-major.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if the length of `states` is not a multiple of the hidden size;
    /// lack of memory; an interrupt.
    pub fn greatest_logits(
        &self,
        states: &[f32],
        k: usize,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<(u32, f32)>>> {
        let (hidden, vocab) = (self.hidden_size(), self.vocab_size());
        if hidden == 0 || !states.len().is_multiple_of(hidden) {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "{} numbers are not a whole number of states of {hidden} elements",
                    states.len()
                ),
            ));
        }
        let k = k.min(vocab);
        let mut all = Vec::with_capacity(states.len() / hidden);
        if k == 0 {
            all.resize(states.len() / hidden, Vec::new());
            return Ok(all);
        }
        self.stream.scope(|| {
            for part in states.chunks(STATES * hidden) {
                interrupt.check()?;
                let fused = self.greatest(part, k).map_err(engine("unembed"))?;
                if let Some(logits) = fused {
                    all.extend(logits);
                    continue;
                }
                let rows = (LOGIT_BYTES / (4 * vocab.max(1))).clamp(16, 512);
                for part in part.chunks(rows * hidden) {
                    interrupt.check()?;
                    all.extend(self.greatest_of_all(part, k).map_err(engine("unembed"))?);
                }
            }
            Ok(all)
        })
    }

    /// Converts the states `[states, hidden]` to an array `[1, states, hidden]`.
    fn states(&self, states: &[f32]) -> mlx_rs_core::Result<Array> {
        let size = |n: usize| i32::try_from(n).unwrap_or(-1);
        let hidden = self.hidden_size();
        Array::from_slice(states, &[1, size(states.len() / hidden), size(hidden)])
    }

    /// Computes the greatest logits without storing all logits; `None` if the model does not
    /// support it.
    fn greatest(&self, states: &[f32], k: usize) -> mlx_rs_core::Result<Option<Vec<Greatest>>> {
        let greatest = self
            .ends
            .decoder
            .greatest_logits(&self.states(states)?, k)?;
        greatest.map(|greatest| pairs(greatest, k)).transpose()
    }

    fn greatest_of_all(&self, states: &[f32], k: usize) -> mlx_rs_core::Result<Vec<Greatest>> {
        let x = self.states(states)?;
        let logits = self.ends.decoder.unembed(&x)?.astype(Dtype::Float32)?;
        let logits = logits.reshape(&[-1, logits.dim(-1)?])?; // [states, vocab]
        let greatest = exec::sampling::greatest_of_rows(&logits, k, self.place == Place::Cpu)?;
        pairs(greatest, k)
    }

    /// Returns `config.json` (without its quantization) and the tokenizer's files, each with its
    /// file name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for a file that cannot be read.
    pub fn text_files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        text_files(&self.path)
    }

    /// The content of `tokenizer.json`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for a file that cannot be read.
    pub fn tokenizer(&self) -> Result<Value> {
        match locate(&self.path)? {
            ModelFiles::Gguf(file) => {
                let files = tokenizer_files(&Gguf::open(&file)?, &Map::new())?;
                let file = files
                    .into_iter()
                    .find(|(name, _)| *name == "tokenizer.json");
                Ok(file.map(|(_, json)| json).unwrap_or_default())
            }
            ModelFiles::Directory(dir) => {
                if let Some(path) = ModelDir::open(&dir)?.find("tokenizer.json")? {
                    let bytes = read_capped(&path, MAX_TEXT_FILE)?;
                    return python_json::from_slice(&bytes).map_err(|e| {
                        Error::new(ErrorKind::InvalidModel, "not valid JSON")
                            .with_path(path)
                            .with_source(e)
                    });
                }
                let model_type = self.config.model_type.as_deref().unwrap_or_default();
                Ok(TextPipeline::from_dir(&dir, model_type)?
                    .tokenizer()
                    .to_json()?)
            }
        }
    }
}

/// The greatest logits of a state, with their tokens.
type Greatest = Vec<(u32, f32)>;

/// Converts arrays `[states, k]` to pairs of token and logit for each state.
fn pairs((values, ids): (Array, Array), k: usize) -> mlx_rs_core::Result<Vec<Greatest>> {
    eval([&values, &ids])?;
    let (values, ids) = (values.to_vec::<f32>()?, ids.to_vec::<u32>()?);
    let pairs: Vec<(u32, f32)> = ids.into_iter().zip(values).collect();
    Ok(pairs.chunks_exact(k).map(<[_]>::to_vec).collect())
}

/// Whether a tensor belongs to a layer.
fn of_layer(tensor: &NamedTensor) -> bool {
    let mut parts = tensor.name.split('.');
    parts.any(|part| part.parse::<usize>().is_ok())
}

/// Builds the decoder for `part` of the model, or for all of it.
fn opened(
    path: &Path,
    options: &LoadOptions,
    place: Place,
    part: Option<(&Division, usize, StageReads)>,
) -> Result<(String, Opened)> {
    let (config, mut weights) = open_weights(path, options, place)?;
    weights.keep_fetched();
    if let Some(((split, group), rank, reads)) = part {
        weights.use_stage(OwnStage {
            split: Arc::clone(split),
            rank,
            group: *group,
            reads,
        });
    }
    let loaded = arch::load(&config, &mut weights).map_err(|e| e.with_path(path));
    let (architecture, decoder) = loaded?;
    let tensors = weights.fetched().into_iter();
    let tensors = tensors.map(|(name, weight)| NamedTensor { name, weight });
    let opened = Opened {
        decoder,
        tensors: tensors.collect(),
    };
    Ok((architecture, opened))
}
