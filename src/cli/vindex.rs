//! `mlx vindex`: the features of feed-forward parts as files, and which of them answer to a prompt.

use std::path::PathBuf;

use inference::{
    AttentionInspector, CancelToken, FeedForwardWeights, Interrupt, Prompt, TextModel, TokenModel,
};
use inference_probe::vindex::{About, Activation, Biases, Layer, Tokens, Vindex, Writer};
use serde::Serialize;

use super::console::Console;
use super::failure::Failure;
use super::interrupt::cancel_on_interrupt;
use super::load::{LoadArgs, Loaded, ModelArgs, at_least_one, load};
use super::probe::{failed, identity};
use super::prompt::RawPromptArgs;
use super::trace::{Layers, greatest};
use super::{vindex_sweep, vindex_weights};

/// Write the features of a model's feed-forward parts to files, and find those that answer
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Command {
    Build(Box<BuildArgs>),
    Info(InfoArgs),
    Walk(Box<WalkArgs>),
    Sweep(Box<vindex_sweep::Args>),
    #[command(flatten)]
    Weights(vindex_weights::Command),
}

/// Write a model's features to a directory
#[derive(Debug, Clone, clap::Args)]
struct BuildArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The directory, which must not be there
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Of each feature keep this many tokens that it makes more likely; 0 saves most of the time
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u8))]
    down_top_k: u8,
    #[command(flatten)]
    load: LoadArgs,
}

/// Show what a directory of features holds, and whether it is whole
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

/// Show which features answer to the last token of a prompt, layer by layer
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

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    match &args.command {
        Command::Build(args) => build(args, console),
        Command::Info(args) => info(args, console),
        Command::Walk(args) => walk(args, console),
        Command::Sweep(args) => vindex_sweep::run(args, console),
        Command::Weights(command) => vindex_weights::run(command, console),
    }
}

fn inspector(model: &dyn TextModel) -> Result<&dyn AttentionInspector, Failure> {
    model.as_attention_inspector().ok_or_else(|| {
        Failure::failed("this backend does not look inside models; `mlx backends` shows which do")
    })
}

/// What tells the model from others.
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

/// Features are those of the model's own files, and what they answer to is the dense pass.
fn refuse_changes(load: &LoadArgs) -> Result<(), Failure> {
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

fn build(args: &BuildArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    refuse_changes(&args.load)?;
    let loaded = load(&args.model, &args.load, console)?;
    let inspector = inspector(loaded.model.as_ref())?;
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let interrupt = Interrupt::new().with_cancel(cancel);
    let kept = usize::from(args.down_top_k);
    let mut writer = Writer::create(&args.output, about(&loaded)?, kept).map_err(failed)?;
    let layers = loaded.model.info().num_layers;
    for layer in 0..layers {
        interrupt.check()?;
        let weights = inspector.feed_forward_weights(layer)?;
        let tokens = said(inspector, &weights, kept, &interrupt)?;
        let part = part_of(weights).ok_or_else(|| {
            Failure::failed(format!("layer {layer} has an activation that is not known"))
        })?;
        writer.push(&part, &tokens).map_err(failed)?;
        console.note(&format!("layer {} of {layers}", layer + 1));
    }
    writer.finish().map_err(failed)?;
    console.line(&args.output.display().to_string())
}

/// What each feature would say: the greatest logits that the model's norm and head give its column.
fn said(
    inspector: &dyn AttentionInspector,
    weights: &FeedForwardWeights,
    kept: usize,
    interrupt: &Interrupt,
) -> Result<Vec<Tokens>, Failure> {
    /// Features at a time: logits are many bytes.
    const TOGETHER: usize = 64;
    if kept == 0 {
        return Ok(vec![Tokens::new(); weights.features]);
    }
    let mut all = Vec::with_capacity(weights.features);
    for columns in weights.down.chunks(TOGETHER * weights.hidden_size) {
        interrupt.check()?;
        for logits in inspector.unembed(columns)? {
            let ids = greatest(&logits, kept).into_iter();
            all.push(ids.map(|id| (id, logits[id as usize])).collect());
        }
    }
    Ok(all)
}

/// The layer as a file has it. `None` for an activation that files do not name.
fn part_of(weights: FeedForwardWeights) -> Option<Layer> {
    let activation = Activation::from_name(&weights.activation)?;
    let zeros = vec![0.0; weights.features];
    let biased = [&weights.gate_bias, &weights.up_bias, &weights.down_bias]
        .iter()
        .any(|bias| bias.is_some());
    let up = weights.up.is_some();
    let biases = biased.then(|| Biases {
        gate: weights.gate_bias.unwrap_or_else(|| zeros.clone()),
        up: up.then(|| weights.up_bias.unwrap_or(zeros)),
        down: (weights.down_bias).unwrap_or_else(|| vec![0.0; weights.hidden_size]),
    });
    Some(Layer {
        activation,
        gate: weights.gate,
        up: weights.up,
        down: weights.down,
        biases,
    })
}

#[derive(Debug, Serialize)]
struct Summary<'a> {
    #[serde(flatten)]
    about: &'a About,
    layers: usize,
    features: usize,
    down_top_k: usize,
    bytes: u64,
    verified: bool,
}

fn info(args: &InfoArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let vindex = Vindex::open(&args.dir).map_err(failed)?;
    if args.verify {
        vindex.verify().map_err(failed)?;
    }
    let summary = Summary {
        about: vindex.about(),
        layers: vindex.layers().len(),
        features: vindex.layers().iter().map(|l| l.num_features).sum(),
        down_top_k: vindex.down_top_k(),
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
    console.line(&format!("bytes     {}", summary.bytes))?;
    console.line(match args.verify {
        true => "every byte is as it was written",
        false => "the sizes are right; --verify compares the bytes",
    })
}

#[derive(Debug, Serialize)]
struct Answer {
    feature: usize,
    /// Before the activation.
    gate: f32,
    /// What the feature's column is multiplied with.
    activation: f32,
    /// Tokens that the column makes more likely where the activation is positive, and less likely
    /// where it is negative.
    tokens: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Answers {
    layer: usize,
    /// How far the sum of the shown features is from that of all, as a part of the latter's length.
    error: f64,
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
        layers.check(count)?;
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
    let mut walked = Walked {
        tokens: inputs.tokens,
        layers: Vec::new(),
    };
    for (layer, input) in inputs.layers.iter().enumerate() {
        interrupt.check()?;
        if args.layers.as_ref().is_none_or(|layers| layers.has(layer)) {
            let answers = answers(&vindex, layer, input, args.top, tokens)?;
            walked.layers.push(answers);
        }
    }
    if args.json {
        return console.json(&walked);
    }
    for layer in &walked.layers {
        console.line(&format!(
            "layer {:>3}  {:.1} % of the whole is missing",
            layer.layer,
            100.0 * layer.error
        ))?;
        for answer in &layer.features {
            let shown: Vec<String> = answer.tokens.iter().map(|t| format!("{t:?}")).collect();
            console.line(&format!(
                "  feature {:>6}  gate {:>+9.3}  activation {:>+9.3}  {}",
                answer.feature,
                answer.gate,
                answer.activation,
                shown.join(" ")
            ))?;
        }
    }
    Ok(())
}

/// The features of a layer that answer to its input.
fn answers(
    vindex: &Vindex,
    layer: usize,
    input: &[f32],
    top: usize,
    tokens: &dyn TokenModel,
) -> Result<Answers, Failure> {
    let part = vindex.layer(layer).map_err(failed)?;
    let said = vindex.tokens(layer).map_err(failed)?;
    let nearest = part.nearest(input, top).map_err(failed)?;
    let (few, taken) = part.walk(input, top).map_err(failed)?;
    let (all, _) = part.walk(input, usize::MAX).map_err(failed)?;
    let length = |values: &mut dyn Iterator<Item = f32>| {
        let squares = values.map(|v| f64::from(v) * f64::from(v));
        squares.sum::<f64>().sqrt()
    };
    let missing = length(&mut few.iter().zip(&all).map(|(a, b)| a - b));
    let whole = length(&mut all.iter().copied());
    let features = nearest
        .iter()
        .zip(taken)
        .map(|(hit, (feature, activation))| Answer {
            feature,
            gate: hit.gate,
            activation,
            tokens: (said.get(feature).into_iter().flatten())
                .map(|(id, _)| tokens.decode(&[*id]).unwrap_or_default())
                .collect(),
        });
    Ok(Answers {
        layer,
        error: if whole > 0.0 { missing / whole } else { 0.0 },
        features: features.collect(),
    })
}
