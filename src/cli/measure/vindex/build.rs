//! `mlx vindex build`: writes a model's features and its other weights to files.

use std::path::PathBuf;

use inference_probe::vindex::Level;

use crate::cli::measure::vindex::refuse_changes;
use crate::cli::options::load::{LoadArgs, ModelArgs};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Write a model's features to a directory
///
/// Layers are read from the model's files one by one. The directory gets its name when it is
/// complete.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The directory to create; it must not exist
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// How much of the model to write: `browse` has gates and the tokens of each feature,
    /// `inference` all parts of each feature, `all` every weight
    #[arg(long, value_name = "LEVEL", default_value = "inference")]
    level: Level,
    /// Write numbers as float16, which needs half the space
    #[arg(long)]
    f16: bool,
    /// Number of tokens to store for each feature, those that it makes more likely; 0 saves most of
    /// the time
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u8))]
    down_top_k: u8,
    /// Continue an interrupted build that had this flag, and keep the partial result if this build
    /// is interrupted
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    refuse_changes(&args.load)?;
    #[cfg(feature = "mlx-backend")]
    return engine::build(args, console);
    #[cfg(not(feature = "mlx-backend"))]
    {
        let _ = console;
        let output = args.output.display();
        let kind = (
            args.level,
            args.f16,
            args.down_top_k,
            args.resume,
            &args.model,
        );
        Err(Failure::failed(format!(
            "this program was built without the engine, which reads models ({output}: {kind:?})"
        )))
    }
}

#[cfg(feature = "mlx-backend")]
mod engine {
    use inference::{CancelToken, FeedForwardWeights, Interrupt};
    use inference_formats::footprint::Part;
    use inference_probe::vindex::{
        About, Activation, Biases, Build, Experts, Layer, Level, Numbers, TensorKind, Writer,
    };
    use metal_backend::extract::{Extractor, NamedTensor};

    use super::Args;
    use crate::cli::measure::probe::{failed, identity};
    use crate::cli::options::load::find_model;
    use crate::cli::terminal::console::Console;
    use crate::cli::terminal::failure::Failure;
    use crate::cli::terminal::interrupt::cancel_on_interrupt;

    pub(super) fn build(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
        let backend = args.load.backend()?;
        let options = args.load.checked(backend.name())?;
        let path = find_model(args.model.model.as_deref(), console)?;
        let cancel = CancelToken::new();
        let _caught = cancel_on_interrupt(&cancel);
        let interrupt = Interrupt::new().with_cancel(cancel);
        let from = Extractor::open(&path, &options)?;
        let name = path.file_name().unwrap_or_default();
        let about = About {
            model: name.to_string_lossy().into_owned(),
            identity: identity(&path)?,
            family: from.architecture().to_owned(),
            hidden_size: from.hidden_size(),
            vocab_size: from.vocab_size(),
        };
        let build = Build {
            down_top_k: usize::from(args.down_top_k),
            level: args.level,
            numbers: match args.f16 {
                true => Numbers::Float16,
                false => Numbers::Float32,
            },
            resume: args.resume,
        };
        let mut writer = Writer::begin(&args.output, about, build).map_err(failed)?;
        if !writer.has_file("tokenizer.json") {
            let json = serde_json::to_vec(&from.tokenizer()?)
                .map_err(|e| Failure::failed(format!("tokenizer.json: {e}")))?;
            writer.push_file("tokenizer.json", &json).map_err(failed)?;
        }
        if args.level == Level::All {
            for (name, bytes) in from.text_files()? {
                if !writer.has_file(&name) {
                    writer.push_file(&name, &bytes).map_err(failed)?;
                }
            }
        }
        for tensor in from.ends() {
            interrupt.check()?;
            if args.level == Level::All || tensor.part() == Part::Embedding {
                push(&mut writer, &tensor)?;
            }
        }
        writer.save().map_err(failed)?;
        let layers = from.layers();
        if writer.layers() > 0 {
            console.note(&format!("{} layers are there already", writer.layers()));
        }
        for number in writer.layers()..layers {
            interrupt.check()?;
            let layer = from.layer(number)?;
            let part = part_of(layer.features).ok_or_else(|| {
                Failure::failed(format!(
                    "layer {number} has an activation that is not known"
                ))
            })?;
            if args.level == Level::All {
                for tensor in &layer.tensors {
                    push(&mut writer, tensor)?;
                }
            }
            let top_k = build.down_top_k;
            let tokens = || from.greatest_logits(&part.down, top_k, &interrupt);
            writer.push_with(&part, tokens)?.map_err(failed)?;
            console.note(&format!("layer {} of {layers}", number + 1));
        }
        writer.finish().map_err(failed)?;
        console.line(&args.output.display().to_string())
    }

    /// Writes a tensor, unless the file already has it.
    fn push(writer: &mut Writer, tensor: &NamedTensor) -> Result<(), Failure> {
        if writer.has_tensor(tensor.name()) {
            return Ok(());
        }
        let kind = match tensor.part() {
            Part::Embedding => TensorKind::Embedding,
            Part::Norms => TensorKind::Norm,
            Part::Output => TensorKind::Head,
            Part::FeedForward | Part::Experts => TensorKind::Router,
            _ => TensorKind::Attention,
        };
        let (shape, values) = (tensor.shape(), tensor.values()?);
        let pushed = writer.push_tensor(tensor.name(), kind, &shape, &values);
        pushed.map_err(failed)
    }

    /// The layer in the form of a file; `None` for an activation that the format does not have.
    fn part_of(weights: FeedForwardWeights) -> Option<Layer> {
        let activation = Activation::from_name(&weights.activation)?;
        let zeros = vec![0.0; weights.features];
        let biased = [&weights.gate_bias, &weights.up_bias, &weights.down_bias]
            .iter()
            .any(|bias| bias.is_some());
        let up = weights.up.is_some();
        let outputs = weights.hidden_size * weights.experts.unwrap_or(1);
        let biases = biased.then(|| Biases {
            gate: weights.gate_bias.unwrap_or_else(|| zeros.clone()),
            up: up.then(|| weights.up_bias.unwrap_or(zeros)),
            down: weights.down_bias.unwrap_or_else(|| vec![0.0; outputs]),
        });
        Some(Layer {
            activation,
            gate: weights.gate,
            up: weights.up,
            down: weights.down,
            biases,
            experts: weights.experts.map(|count| Experts {
                count,
                features: weights.features / count.max(1),
            }),
        })
    }
}
