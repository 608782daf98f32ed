//! `mlx vindex`: the features of feed-forward parts as files, and the features that respond to a
//! prompt.

mod build;
mod sweep;
mod weights;

use std::path::PathBuf;

use inference::{AttentionInspector, CancelToken, Interrupt, Prompt, TextModel, TokenModel};
use inference_probe::vindex::{About, Experts, Layer, Level, Numbers, Vindex};
#[cfg(feature = "mlx-backend")]
use metal_backend::gate_scores::GateScores;
use serde::Serialize;

use crate::cli::measure::probe::{failed, identity};
use crate::cli::measure::trace::Layers;
use crate::cli::options::load::{LoadArgs, Loaded, ModelArgs, at_least_one, load};
use crate::cli::options::prompt::RawPromptArgs;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Write the features of a model's feed-forward parts to files, and show which of them a prompt
/// activates
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Command {
    Build(Box<build::Args>),
    Info(InfoArgs),
    Walk(Box<WalkArgs>),
    Sweep(Box<sweep::Args>),
    #[command(flatten)]
    Weights(weights::Command),
}

/// Describe a directory of features, and check whether it is complete
#[derive(Debug, Clone, clap::Args)]
struct InfoArgs {
    /// The directory
    dir: PathBuf,
    /// Compare every byte with its hash
    #[arg(long)]
    verify: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Show which features the last token of a prompt activates, layer by layer
#[derive(Debug, Clone, clap::Args)]
struct WalkArgs {
    /// The directory
    dir: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: RawPromptArgs,
    /// Show this many features of each layer
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    top: usize,
    /// Layers to show, such as `0-5,11` [default: all]
    #[arg(long, value_name = "LIST")]
    layers: Option<Layers>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    match &args.command {
        Command::Build(args) => build::run(args, console),
        Command::Info(args) => info(args, console),
        Command::Walk(args) => walk(args, console),
        Command::Sweep(args) => sweep::run(args, console),
        Command::Weights(command) => weights::run(command, console),
    }
}

fn inspector(model: &dyn TextModel) -> Result<&dyn AttentionInspector, Failure> {
    model.as_attention_inspector().ok_or_else(|| {
        Failure::failed("this backend does not look inside models; `mlx backends` shows which do")
    })
}

/// The model's description for a vindex.
fn about(loaded: &Loaded) -> Result<About, Failure> {
    let info = loaded.model.info();
    let name = loaded.path.file_name().unwrap_or_default();
    Ok(About {
        model: name.to_string_lossy().into_owned(),
        identity: identity(&loaded.path)?,
        family: info.architecture.clone(),
        hidden_size: info.hidden_size,
        vocab_size: info.vocab_size,
    })
}

/// Refuses flags that change the model: a vindex has the features of the model's own files, and its
/// reference is the dense pass.
pub(super) fn refuse_changes(load: &LoadArgs) -> Result<(), Failure> {
    if load.adapter_path.is_some() {
        return Err(Failure::usage(
            "features are of a model without an adapter; put it into the model with `mlx fuse`, \
             and leave --adapter-path out",
        ));
    }
    if load.feed_forward.is_given() {
        return Err(Failure::usage(
            "this command computes feed-forward parts as they were trained; leave --ffn, --vindex \
             and --walk-only out",
        ));
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Summary<'a> {
    #[serde(flatten)]
    about: &'a About,
    layers: usize,
    features: usize,
    /// The number of layers whose features belong to experts.
    layers_with_experts: usize,
    level: Level,
    dtype: Numbers,
    down_top_k: usize,
    /// The number of tensors other than features.
    tensors: usize,
    bytes: u64,
    verified: bool,
}

fn info(args: &InfoArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let vindex = Vindex::open(&args.dir).map_err(failed)?;
    if args.verify {
        vindex.verify().map_err(failed)?;
    }
    let experts = vindex.layers().iter().filter(|l| l.experts.is_some());
    let summary = Summary {
        about: vindex.about(),
        layers: vindex.layers().len(),
        features: vindex.layers().iter().map(|l| l.num_features).sum(),
        layers_with_experts: experts.count(),
        level: vindex.level(),
        dtype: vindex.numbers(),
        down_top_k: vindex.down_top_k(),
        tensors: vindex.tensors().len(),
        bytes: vindex.nbytes(),
        verified: args.verify,
    };
    if args.json {
        return console.json(&summary);
    }
    console.line(&format!(
        "model     {} ({})",
        summary.about.model, summary.about.family
    ))?;
    console.line(&format!("layers    {}", summary.layers))?;
    console.line(&format!(
        "features  {} of {} elements",
        summary.features, summary.about.hidden_size
    ))?;
    let dtype = match summary.dtype {
        Numbers::Float32 => "float32",
        Numbers::Float16 => "float16",
    };
    let level = summary.level.name();
    console.line(&format!("level     {level}, in {dtype}"))?;
    console.line(&format!("bytes     {}", summary.bytes))?;
    console.line(match args.verify {
        true => "every byte is as it was written",
        false => "the sizes are right; --verify compares the bytes",
    })
}

#[derive(Debug, Serialize)]
struct Answer {
    feature: usize,
    /// The expert of the feature, in a layer with experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert: Option<usize>,
    /// The value before the activation.
    gate: f32,
    /// The factor of the feature's column; `None` if the files have gates only.
    activation: Option<f32>,
    /// Tokens that the column makes more likely if the activation is positive, and less likely if
    /// it is negative.
    tokens: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Answers {
    layer: usize,
    /// The distance between the sum of the shown features and the sum of all features, relative to
    /// the length of the latter. `None` if the files have gates only, or if a router chooses the
    /// features (a layer with experts).
    error: Option<f64>,
    features: Vec<Answer>,
}

#[derive(Debug, Serialize)]
struct Walked {
    tokens: Vec<u32>,
    layers: Vec<Answers>,
}

fn walk(args: &WalkArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    refuse_changes(&args.load)?;
    let vindex = Vindex::open(&args.dir).map_err(failed)?;
    let count = vindex.layers().len();
    if let Some(layers) = &args.layers {
        layers.check("--layers", count)?;
    }
    let prompt = args.prompt.read(console)?;
    let loaded = load(&args.model, &args.load, console)?;
    if !about(&loaded)?.is_same_model(vindex.about()) {
        return Err(Failure::failed(format!(
            "{} is of the model {}, or of another version of it; build it again",
            args.dir.display(),
            vindex.about().model
        )));
    }
    let model = loaded.model.as_ref();
    let inspector = inspector(model)?;
    let Some(tokens) = model.as_token_model() else {
        return Err(Failure::failed("this backend has no tokens to show"));
    };
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let interrupt = Interrupt::new().with_cancel(cancel);
    let ids = match prompt {
        Prompt::Tokens(ids) => ids,
        Prompt::Text(text) => tokens.encode(&text, true)?,
        _ => return Err(Failure::failed("this kind of prompt cannot be walked")),
    };
    let last = ids.len().saturating_sub(1);
    let inputs = inspector.feed_forward_inputs(&Prompt::Tokens(ids), &[last], &interrupt)?;
    let gates = GateScores::open(&vindex)?;
    let mut walked = Walked {
        tokens: inputs.tokens,
        layers: Vec::new(),
    };
    for (layer, input) in inputs.layers.iter().enumerate() {
        interrupt.check()?;
        if args.layers.as_ref().is_none_or(|layers| layers.has(layer)) {
            let answers = answers((&vindex, &gates), layer, input, args.top, tokens)?;
            walked.layers.push(answers);
        }
    }
    if args.json {
        return console.json(&walked);
    }
    for layer in &walked.layers {
        console.line(&match layer.error {
            Some(error) => format!(
                "layer {:>3}  {:.1} % of the whole is missing",
                layer.layer,
                100.0 * error
            ),
            None => format!("layer {:>3}", layer.layer),
        })?;
        for answer in &layer.features {
            let shown: Vec<String> = answer.tokens.iter().map(|t| format!("{t:?}")).collect();
            let of = |expert| format!("expert {expert:>3}  ");
            let activation = |a| format!("activation {a:>+9.3}  ");
            console.line(&format!(
                "  {}feature {:>6}  gate {:>+9.3}  {}{}",
                answer.expert.map(of).unwrap_or_default(),
                answer.feature,
                answer.gate,
                answer.activation.map(activation).unwrap_or_default(),
                shown.join(" ")
            ))?;
        }
    }
    Ok(())
}

/// The features of a layer that respond to its input.
fn answers(
    (vindex, gates): (&Vindex, &GateScores),
    layer: usize,
    input: &[f32],
    top: usize,
    tokens: &dyn TokenModel,
) -> Result<Answers, Failure> {
    let said = vindex.tokens(layer).map_err(failed)?;
    let gates = gates.of(layer, input)?;
    let nearest = vindex.nearest_of(layer, &gates, top).map_err(failed)?;
    let nearest = nearest.into_iter().next().unwrap_or_default();
    let experts = vindex.layers().get(layer).and_then(|l| l.experts);
    let (error, taken) = match vindex.level() {
        Level::Browse => (None, Vec::new()),
        _ => {
            let part = vindex.layer(layer).map_err(failed)?;
            let taken = part.activations(input, &nearest).map_err(failed)?;
            match experts {
                Some(_) => (None, taken),
                None => (Some(missing(&part, input, &gates, top)?), taken),
            }
        }
    };
    let features = nearest.iter().enumerate().map(|(i, hit)| Answer {
        feature: experts.map_or(hit.feature, |e: Experts| hit.feature % e.features.max(1)),
        expert: experts.map(|e| hit.feature / e.features.max(1)),
        gate: hit.gate,
        activation: taken.get(i).map(|(_, activation)| *activation),
        tokens: (said.get(hit.feature).into_iter().flatten())
            .map(|(id, _)| tokens.decode(&[*id]).unwrap_or_default())
            .collect(),
    });
    Ok(Answers {
        layer,
        error,
        features: features.collect(),
    })
}

/// The relative distance between the sum of the `top` features with the largest gate magnitudes and
/// the sum of all features.
fn missing(part: &Layer, input: &[f32], gates: &[f32], top: usize) -> Result<f64, Failure> {
    let walk = |top| part.walk_from(input, gates, top).map_err(failed);
    let ((few, _), (all, _)) = (walk(top)?, walk(usize::MAX)?);
    let length = |values: &mut dyn Iterator<Item = f32>| {
        let squares = values.map(|v| f64::from(v) * f64::from(v));
        squares.sum::<f64>().sqrt()
    };
    let missing = length(&mut few.iter().zip(&all).map(|(a, b)| a - b));
    let total = length(&mut all.iter().copied());
    Ok(if total > 0.0 { missing / total } else { 0.0 })
}

/// Without the engine, `inference_probe` computes the gates with sums in float64.
#[cfg(not(feature = "mlx-backend"))]
struct GateScores(Vindex);

#[cfg(not(feature = "mlx-backend"))]
impl GateScores {
    fn open(vindex: &Vindex) -> Result<Self, Failure> {
        Ok(Self(vindex.clone()))
    }

    fn of(&self, layer: usize, input: &[f32]) -> Result<Vec<f32>, Failure> {
        let features = self.0.layers().get(layer).map_or(0, |l| l.num_features);
        let hits = self.0.nearest(layer, input, usize::MAX).map_err(failed)?;
        let mut gates = vec![0.0; features];
        for hit in hits.into_iter().flatten() {
            gates[hit.feature] = hit.gate;
        }
        Ok(gates)
    }
}
