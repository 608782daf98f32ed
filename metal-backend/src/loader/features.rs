//! Features of layers from a vindex: matrices in mapped files, verified by their hashes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, FeedForwardPlan, FeedForwardStrategy, LoadOptions, Result};
use inference_formats::files::is_vindex;
use inference_formats::footprint::Footprint;
use inference_probe::files;
use inference_probe::vindex::{Level, MatrixFile, Numbers, Vindex};
use mlx_rs_core::Dtype;
use mlx_rs_core::io::{Floats, MappedFile};

use super::Weights;
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::exec::{FeatureNumbers, FeatureParts, FeatureRows, copies_features};
use crate::nn::Activation;
use crate::nn::feed_forward::FfnPlace;

/// The matrix files, in the order of [`Features::files`].
const FILES: [MatrixFile; 3] = [MatrixFile::Gate, MatrixFile::Up, MatrixFile::Down];

/// The features of a model's layers.
#[derive(Debug)]
pub struct Features {
    vindex: Vindex,
    dir: PathBuf,
    /// The files listed in [`FILES`].
    files: Vec<MappedFile>,
    /// The layers that the loading options compute from features (`walk`).
    layers: BTreeSet<usize>,
    /// Whether these layers read nothing from the model's files, so that the gate also comes from
    /// the vindex.
    only: bool,
}

fn same_place(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    real(a).is_some() && real(a) == real(b)
}

/// Returns the options for a model that is a complete vindex; `None` for other models. The model
/// has no other feed-forward weights, so all its layers use features: those that `options` select,
/// otherwise all. Checks the weights against their hashes.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] for missing or damaged files; [`ErrorKind::InvalidOption`] for
/// options that conflict with a vindex; [`ErrorKind::Unsupported`] for layers with experts.
pub fn options_of_vindex(options: &LoadOptions, model: &Path) -> Result<Option<LoadOptions>> {
    if !is_vindex(model) {
        return Ok(None);
    }
    let mut options = options.clone();
    if options.feed_forward.is_dense() {
        let walk = FeedForwardStrategy::Walk { top_k: usize::MAX };
        options.feed_forward = FeedForwardPlan::uniform(walk);
    }
    options.vindex = Some(model.to_owned());
    options.walk_only = true;
    options.validate().map_err(|e| e.with_path(model))?;
    let vindex = Vindex::open(model).map_err(fault(model))?;
    let layers = vindex.layers().iter();
    if let Some(layer) = layers.map(|l| l.experts).position(|e| e.is_some()) {
        let message = format!(
            "layer {layer} has experts, which do not walk, so that this vindex is no model by \
             itself; give the model's own files"
        );
        return Err(Error::new(ErrorKind::Unsupported, message).with_path(model));
    }
    vindex.verify_weights().map_err(fault(model))?;
    Ok(Some(options))
}

/// Returns the error for a fault in the files, or for a failed read.
fn fault(dir: &Path) -> impl Fn(inference_probe::Error) -> Error {
    move |e| {
        Error::new(ErrorKind::InvalidModel, e.to_string())
            .with_path(dir)
            .context("vindex")
    }
}

impl Features {
    /// Opens the vindex in `options` for the model at `model`, and maps its files. Returns `None`
    /// if no layer uses features.
    ///
    /// # Errors
    /// The errors of [`Self::at`]; [`ErrorKind::InvalidOption`] for unknown layers.
    pub fn open(options: &LoadOptions, model: &Path, config: &ModelConfig) -> Result<Option<Self>> {
        let Some(dir) = options.vindex.as_deref() else {
            return Ok(None);
        };
        let plan = options.feed_forward.for_layers(config.num_hidden_layers)?;
        let walks = |(layer, strategy)| match strategy {
            FeedForwardStrategy::Walk { .. } => Some(layer),
            _ => None,
        };
        let mut features = Self::at(dir, model)?;
        let (about, count) = (features.vindex.about(), features.vindex.layers().len());
        if about.hidden_size != config.hidden_size || count != config.num_hidden_layers {
            return Err(features.other_model());
        }
        features.layers = plan.into_iter().enumerate().filter_map(walks).collect();
        features.only = options.walk_only;
        Ok(Some(features))
    }

    /// Opens the vindex at `dir` for the model at `model`, and maps its files.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for missing or damaged files; [`ErrorKind::InvalidOption`] if
    /// the files belong to another model.
    pub fn at(dir: &Path, model: &Path) -> Result<Self> {
        let vindex = Vindex::open(dir).map_err(fault(dir))?;
        // A complete vindex is the model itself, so its recorded identity cannot differ.
        let identity = match is_vindex(model) && same_place(dir, model) {
            true => vindex.about().identity.clone(),
            false => files::identity(model).map_err(fault(dir))?,
        };
        if vindex.level() < Level::Inference {
            let message = "the vindex has the level browse, which holds only gates; build one of the level \
                           inference";
            return Err(Error::new(ErrorKind::InvalidOption, message).with_path(dir));
        }
        let map = |file: MatrixFile| {
            let path = vindex.path(file);
            MappedFile::open(&path).map_err(|e| engine("vindex")(e).with_path(&path))
        };
        let features = Self {
            files: FILES.into_iter().map(map).collect::<Result<_>>()?,
            dir: dir.to_owned(),
            layers: BTreeSet::new(),
            only: false,
            vindex,
        };
        match identity == features.vindex.about().identity {
            true => Ok(features),
            false => Err(features.other_model()),
        }
    }

    fn other_model(&self) -> Error {
        let message = format!(
            "vindex is of the model {}, or of another version of it; build it again with `mlx \
             vindex build`",
            self.vindex.about().model
        );
        Error::new(ErrorKind::InvalidOption, message).with_path(&self.dir)
    }

    /// Returns the footprint without the model's tensors that the features replace.
    #[must_use]
    pub fn reduce(&self, footprint: Footprint) -> Footprint {
        match self.only {
            true => footprint.without_feed_forward(&self.layers),
            false => footprint,
        }
    }

    /// Excludes the weights that the features replace.
    pub fn leave_out(&self, weights: &mut Weights) {
        if self.only {
            weights.leave_out_feed_forward(&self.layers);
        }
    }

    /// Returns the bytes of features that loading copies as `dtype`. Features are copied unless the
    /// CPU kernels compute. Mapped features do not count, because the system can reclaim their
    /// memory.
    #[must_use]
    pub fn copied_bytes(&self, on_cpu: bool, dtype: Dtype) -> u64 {
        if !copies_features(on_cpu) {
            return 0;
        }
        let size = dtype.size();
        let hidden = self.vindex.about().hidden_size as u64;
        let layers = self.vindex.layers().iter().enumerate();
        let selected = layers.filter(|(layer, _)| self.layers.contains(layer));
        let elements = selected.map(|(_, layer)| {
            let features = layer.num_features as u64;
            // Gate rows if the vindex replaces the model's gate; up rows if the block is gated.
            // Each has a bias.
            let sides = u64::from(self.only) + u64::from(layer.gated);
            let biases = match layer.biased {
                true => sides * features + hidden,
                false => 0,
            };
            (sides + 1) * features * hidden + biases
        });
        elements.sum::<u64>() * size as u64
    }

    /// Returns the features of the layer at `place`, after checking all bytes against their hash.
    /// Includes the gate rows if `gate`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for damaged bytes or an unknown activation.
    pub fn layer(&self, place: FfnPlace, gate: bool) -> Result<FeatureRows> {
        let (layer, with_gate) = (place.layer, gate);
        let fault = fault(&self.dir);
        let invalid = |message: String| {
            Error::new(ErrorKind::InvalidModel, message)
                .with_path(&self.dir)
                .context("vindex")
        };
        let Some(index) = self.vindex.layers().get(layer) else {
            return Err(invalid(format!("there is no layer {layer}")));
        };
        let name = index.activation.name();
        let activation = Activation::from_name(name)
            .ok_or_else(|| invalid(format!("the activation {name} is not known")))?;
        let [gate, up, down] = [0, 1, 2].map(|i| -> Result<Option<FeatureNumbers>> {
            let part = self.vindex.matrix(layer, FILES[i]).map_err(&fault)?;
            let wanted = FILES[i] != MatrixFile::Gate || with_gate;
            let Some(part) = part.filter(|_| wanted) else {
                return Ok(None);
            };
            let (file, range) = (&self.files[i], part.range());
            // A file whose size has changed since it was opened counts as damaged.
            let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let range = at(range.start)..at(range.end);
            let bytes = file.bytes().get(range.clone()).unwrap_or_default();
            part.verify(bytes).map_err(&fault)?;
            let numbers = match part.numbers() {
                Numbers::Float32 => file.floats(range).map(FeatureNumbers::from),
                Numbers::Float16 => file.halves(range).map(FeatureNumbers::from),
            };
            numbers.map(Some).map_err(engine("vindex"))
        });
        let biases = self.vindex.biases(layer).map_err(&fault)?;
        let (gate_bias, up_bias, down_bias) = match biases {
            Some(biases) => (Some(biases.gate), biases.up, Some(biases.down)),
            None => (None, None, None),
        };
        let Some(down) = down? else {
            return Err(invalid(format!("layer {layer} has no features")));
        };
        let parts = FeatureParts {
            shape: [
                i32::try_from(index.num_features).unwrap_or(-1),
                i32::try_from(self.vindex.about().hidden_size).unwrap_or(-1),
            ],
            activation,
            gate: gate?,
            up: up?,
            down,
            gate_bias: gate_bias.filter(|_| with_gate).map(Floats::from),
            up_bias: up_bias.map(Floats::from),
            down_bias: down_bias.map(Floats::from),
        };
        FeatureRows::new(parts, place.on_cpu, place.dtype).map_err(engine("vindex"))
    }
}
