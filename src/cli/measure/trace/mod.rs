//! `mlx trace`: shows the contribution of each layer to the answer, and the attention of the last
//! token.

pub mod patch;
mod plot;
mod save;

use inference::{
    AttentionInspector, AttentionWeights, CancelToken, FeedForwardActivations, Interrupt, Prompt,
    ResidualTrace, SteerableModel, Steering, TokenModel,
};
use inference_probe::divergence::softmax;
use inference_probe::vindex::greatest_by_magnitude;
use serde::Serialize;

use crate::cli::measure::trace::patch::{Asked, PatchArgs};
use crate::cli::measure::trace::save::SaveArgs;
use crate::cli::options::load::{LoadArgs, ModelArgs, load};
use crate::cli::options::prompt::RawPromptArgs;
use crate::cli::options::steer::{SteerArgs, steerable};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::{Failure, of_options};
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Show how the answer to a prompt develops from layer to layer, and what each part adds to it
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: RawPromptArgs,
    /// The answer to follow: the first token of this text; if there are more tokens, a warning
    /// names the first. Start with a space if the model would [default: the model's most likely
    /// token]
    #[arg(long = "for", value_name = "TEXT", allow_hyphen_values = true)]
    answer: Option<String>,
    /// Show this many of the most likely tokens of each layer
    #[arg(long, value_name = "N", default_value_t = 3)]
    top: usize,
    /// Layers to show, such as `0-5,11`; the embedding is `e` [default: all]
    #[arg(long, value_name = "LIST")]
    layers: Option<Layers>,
    /// Also show the attention weights of the last token, head by head
    #[arg(long)]
    attention: bool,
    /// Also show this number of features of each layer's feed-forward part: those with the greatest
    /// magnitude of `act(gate) * up` at the last token
    #[arg(long, value_name = "K")]
    activations: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    save: SaveArgs,
    #[command(flatten)]
    patch: PatchArgs,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// The layers to show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    embedding: bool,
    blocks: Vec<(usize, usize)>,
}

impl std::str::FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut layers = Layers {
            embedding: false,
            blocks: Vec::new(),
        };
        for part in text.split(',').map(str::trim) {
            if part == "e" {
                layers.embedding = true;
                continue;
            }
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let number = |n: &str| {
                n.trim()
                    .parse::<usize>()
                    .map_err(|_| format!("`{part}` is neither a layer nor a range such as 0-5"))
            };
            let range = (number(from)?, number(to)?);
            if range.0 > range.1 {
                return Err(format!("`{part}` ends before it begins"));
            }
            layers.blocks.push(range);
        }
        Ok(layers)
    }
}

impl Layers {
    /// Whether to show this block.
    pub fn has(&self, block: usize) -> bool {
        self.blocks.iter().any(|(a, b)| (*a..=*b).contains(&block))
    }

    /// Checks that each layer in `flag` is below `count`.
    pub fn check(&self, flag: &str, count: usize) -> Result<(), Failure> {
        match self.blocks.iter().find(|(_, to)| *to >= count) {
            None => Ok(()),
            Some((_, to)) => Err(Failure::usage(format!(
                "{flag} names layer {to}; the model has {count}, from 0"
            ))),
        }
    }
}

/// The prediction after a layer.
#[derive(Debug, Serialize)]
struct Step {
    /// The layer; `None` is the embedding.
    layer: Option<usize>,
    /// The answer's rank among all tokens; 1 is the most likely.
    rank: usize,
    probability: f64,
    /// The answer's logit.
    logit: f32,
    /// Change of the answer's logit by attention or a recurrent mixer.
    mixer_logit: f32,
    /// Change of the answer's logit by the rest of the block.
    feed_forward_logit: f32,
    residual_norm: f64,
    mixer_norm: f64,
    feed_forward_norm: f64,
    top: Vec<Likely>,
}

#[derive(Debug, Serialize)]
struct Likely {
    token: u32,
    text: String,
    probability: f64,
}

#[derive(Debug, Serialize)]
struct Attended {
    layer: usize,
    /// `[head][position]`.
    weights: Vec<Vec<f32>>,
}

#[derive(Debug, Serialize)]
struct Activated {
    layer: usize,
    /// Number of features in the layer.
    features: usize,
    /// The features to show.
    top: Vec<Feature>,
}

#[derive(Debug, Serialize)]
struct Feature {
    feature: usize,
    activation: f32,
}

#[derive(Debug, Serialize)]
struct Report {
    tokens: Vec<u32>,
    pieces: Vec<String>,
    answer: Likely,
    steps: Vec<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<Vec<Attended>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<Vec<Activated>>,
}

/// Runs one prompt in the model, with or without edits, and inspects it.
struct Look<'a> {
    inspector: &'a dyn AttentionInspector,
    steered: Option<(&'a dyn SteerableModel, &'a Steering)>,
    prompt: &'a Prompt,
    interrupt: &'a Interrupt,
}

impl Look<'_> {
    fn residuals(&self, positions: &[usize]) -> Result<ResidualTrace, Failure> {
        let (prompt, interrupt) = (self.prompt, self.interrupt);
        match self.steered {
            Some((model, steering)) => model
                .steered_residuals(prompt, positions, steering, interrupt)
                .map_err(of_options),
            None => Ok(self
                .inspector
                .trace_residuals(prompt, positions, interrupt)?),
        }
    }

    fn attention(&self, layers: Option<&[usize]>) -> Result<AttentionWeights, Failure> {
        let (prompt, interrupt) = (self.prompt, self.interrupt);
        match self.steered {
            Some((model, steering)) => model
                .steered_attention_weights(prompt, layers, steering, interrupt)
                .map_err(of_options),
            None => Ok(self
                .inspector
                .attention_weights(prompt, layers, interrupt)?),
        }
    }

    fn activations(&self, positions: &[usize]) -> Result<FeedForwardActivations, Failure> {
        let (prompt, interrupt) = (self.prompt, self.interrupt);
        match self.steered {
            Some((model, steering)) => model
                .steered_activations(prompt, positions, steering, interrupt)
                .map_err(of_options),
            None => {
                let inspector = self.inspector;
                Ok(inspector.feed_forward_activations(prompt, positions, interrupt)?)
            }
        }
    }
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let prompt = args.prompt.read(console)?;
    let steering = args.steer.read()?;
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let (Some(inspector), Some(tokens)) = (model.as_attention_inspector(), model.as_token_model())
    else {
        return Err(Failure::failed(
            "this backend does not look inside models; `mlx backends` shows which do",
        ));
    };
    let count = model.info().num_layers;
    if let Some(layers) = &args.layers {
        layers.check("--layers", count)?;
    }
    let saved_layers = args.save.layers(count)?;
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let interrupt = Interrupt::new().with_cancel(cancel);

    let ids = match prompt {
        Prompt::Tokens(ids) => ids,
        Prompt::Text(text) => tokens.encode(&text, true)?,
        _ => return Err(Failure::failed("this kind of prompt cannot be traced")),
    };
    if let Some(corrupted) = &args.patch.patch {
        let asked = Asked {
            tokens: ids,
            answer: args.answer.as_deref(),
            layers: args.layers.as_ref(),
            json: args.json,
        };
        return patch::run(&args.patch, corrupted, &asked, model, &interrupt, console);
    }
    let length = ids.len();
    let prompt = Prompt::Tokens(ids);
    let positions = args.save.positions(length);
    let steered = match &steering {
        Some(steering) => Some((steerable(model)?, steering)),
        None => None,
    };
    let look = Look {
        inspector,
        steered,
        prompt: &prompt,
        interrupt: &interrupt,
    };
    let trace = look.residuals(&positions)?;
    args.save.write(&trace, saved_layers.as_deref())?;
    let answer = args.answer.as_deref();
    let answer = answer
        .map(|text| first_token(tokens, text, "--for", console))
        .transpose()?;
    let (answer, steps) = trajectory(args, answer, inspector, tokens, &trace)?;
    let attention = args
        .attention
        .then(|| attention(args, &look, count))
        .transpose()?;
    let last = length.saturating_sub(1);
    let activations = (args.activations)
        .map(|top| activations(args, &look, last, top))
        .transpose()?;
    let pieces = trace.tokens.iter().map(|id| piece(tokens, *id)).collect();
    let report = Report {
        tokens: trace.tokens,
        pieces,
        answer,
        steps,
        attention,
        activations,
    };
    if let Some(path) = &args.patch.plot {
        plot::write(path, &report)?;
    }
    if args.json {
        return console.json(&report);
    }
    print(&report, console)
}

fn piece(tokens: &dyn TokenModel, id: u32) -> String {
    tokens.decode(&[id]).unwrap_or_default()
}

/// The first token of the text in `flag`. If the text has more tokens, a warning reports that the
/// trace ignores them.
///
/// # Errors
/// If the text has no token.
pub fn first_token(
    tokens: &dyn TokenModel,
    text: &str,
    flag: &str,
    console: &mut Console<'_>,
) -> Result<u32, Failure> {
    let ids = tokens.encode(text, false)?;
    let first = *ids
        .first()
        .ok_or_else(|| Failure::usage(format!("{flag} is empty; give a text")))?;
    if ids.len() > 1 {
        console.warn(&format!(
            "warning: {flag} {text:?} is {} tokens; the first alone is followed: {:?}",
            ids.len(),
            piece(tokens, first)
        ));
    }
    Ok(first)
}

fn norm(vector: &[f32]) -> f64 {
    let squares = vector.iter().map(|v| f64::from(*v) * f64::from(*v));
    squares.sum::<f64>().sqrt()
}

/// The model's prediction after each layer, at the last position.
fn trajectory(
    args: &Args,
    answer: Option<u32>,
    inspector: &dyn AttentionInspector,
    tokens: &dyn TokenModel,
    trace: &ResidualTrace,
) -> Result<(Likely, Vec<Step>), Failure> {
    let width = trace.hidden_size;
    let last = |all: &[f32]| all[all.len().saturating_sub(width)..].to_vec();
    let logits = |state: &[f32]| -> Result<Vec<f32>, Failure> {
        let all = inspector.unembed(state)?;
        all.into_iter()
            .next()
            .ok_or_else(|| Failure::failed("the model gave no logits"))
    };
    let end = trace
        .layers
        .last()
        .map_or(&trace.embedding, |l| &l.residual);
    let final_logits = logits(&last(end))?;
    let best = || greatest(&final_logits, 1).first().copied().unwrap_or(0);
    let answer = answer.unwrap_or_else(best);
    let likely = |token: u32, shares: &[f64]| Likely {
        token,
        text: piece(tokens, token),
        probability: shares.get(token as usize).copied().unwrap_or(0.0),
    };
    let answered = likely(
        answer,
        &probabilities(&final_logits, "after the last layer")?,
    );

    let mut steps = Vec::new();
    let mut before = 0.0;
    let nodes = std::iter::once(None).chain((0..trace.layers.len()).map(Some));
    for layer in nodes {
        let shown = match (&args.layers, layer) {
            (None, _) => true,
            (Some(layers), None) => layers.embedding,
            (Some(layers), Some(block)) => layers.has(block),
        };
        let node = layer.and_then(|l| trace.layers.get(l));
        let residual = last(node.map_or(&trace.embedding, |n| &n.residual));
        let here = logits(&residual)?;
        let logit = *here.get(answer as usize).unwrap_or(&f32::NAN);
        let between = match layer.and_then(|l| trace.between(l)) {
            None => logit,
            Some(between) => *logits(&last(&between))?
                .get(answer as usize)
                .unwrap_or(&f32::NAN),
        };
        let from = if layer.is_none() { logit } else { before };
        before = logit;
        if !shown {
            continue;
        }
        let at = match layer {
            None => String::from("of the embedding"),
            Some(layer) => format!("after layer {layer}"),
        };
        let shares = probabilities(&here, &at)?;
        let answer_share = shares.get(answer as usize).copied().unwrap_or(0.0);
        steps.push(Step {
            layer,
            rank: 1 + shares.iter().filter(|p| **p > answer_share).count(),
            probability: answer_share,
            logit,
            mixer_logit: between - from,
            feed_forward_logit: logit - between,
            residual_norm: norm(&residual),
            mixer_norm: node.map_or(0.0, |n| norm(&last(&n.mixer))),
            feed_forward_norm: node.map_or(0.0, |n| norm(&last(&n.feed_forward))),
            top: greatest(&here, args.top)
                .into_iter()
                .map(|id| likely(id, &shares))
                .collect(),
        });
    }
    Ok((answered, steps))
}

/// The softmax of the logits. Returns an error if the greatest logit is not finite, for example
/// because a weight is NaN. Otherwise all tokens would seem equally likely. `at` names the logits
/// in the error.
pub fn probabilities(logits: &[f32], at: &str) -> Result<Vec<f64>, Failure> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match logits.iter().find(|logit| logit.is_nan()) {
        None if greatest.is_finite() => Ok(softmax(logits)),
        nan => Err(Failure::failed(format!(
            "the logits {at} hold no probabilities: the greatest is {}; check the model's weights",
            nan.copied().unwrap_or(greatest)
        ))),
    }
}

/// The `n` tokens with the greatest logits, in descending order. Among equal logits, the lower id
/// comes first.
pub fn greatest(logits: &[f32], n: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..u32::try_from(logits.len()).unwrap_or(u32::MAX)).collect();
    ids.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    ids.truncate(n);
    ids
}

fn attention(args: &Args, look: &Look<'_>, count: usize) -> Result<Vec<Attended>, Failure> {
    let chosen: Option<Vec<usize>> = args
        .layers
        .as_ref()
        .map(|layers| (0..count).filter(|l| layers.has(*l)).collect());
    let attention = look.attention(chosen.as_deref())?;
    let pairs = attention.layers.into_iter().zip(attention.weights);
    Ok(pairs
        .map(|(layer, weights)| Attended { layer, weights })
        .collect())
}

/// The features with the greatest activations at the last token, layer by layer.
fn activations(
    args: &Args,
    look: &Look<'_>,
    last: usize,
    top: usize,
) -> Result<Vec<Activated>, Failure> {
    let activations = look.activations(&[last])?;
    let layers = activations.layers.into_iter().enumerate();
    let shown = layers.filter(|(layer, all)| {
        !all.is_empty() && args.layers.as_ref().is_none_or(|l| l.has(*layer))
    });
    Ok(shown
        .map(|(layer, all)| {
            let sizes: Vec<f64> = all.iter().copied().map(f64::from).collect();
            let best = greatest_by_magnitude(&sizes, top).into_iter();
            Activated {
                layer,
                features: all.len(),
                top: best
                    .map(|feature| Feature {
                        feature,
                        activation: all[feature],
                    })
                    .collect(),
            }
        })
        .collect())
}

/// The report as tables.
fn print(report: &Report, console: &mut Console<'_>) -> Result<(), Failure> {
    let quoted = |text: &str| format!("{text:?}");
    console.line(&format!(
        "answer {} (token {}), probability {:.4}",
        quoted(&report.answer.text),
        report.answer.token,
        report.answer.probability
    ))?;
    console.line(&format!(
        "{:>5} {:>6} {:>8} {:>9} {:>9} {:>9} {:>9}  most likely",
        "layer", "rank", "prob", "logit", "mixer", "mlp", "|x|"
    ))?;
    for step in &report.steps {
        let layer = step
            .layer
            .map_or_else(|| String::from("e"), |l| l.to_string());
        let top: Vec<String> = step
            .top
            .iter()
            .map(|t| format!("{} {:.3}", quoted(&t.text), t.probability))
            .collect();
        console.line(&format!(
            "{layer:>5} {:>6} {:>8.4} {:>9.3} {:>+9.3} {:>+9.3} {:>9.2}  {}",
            step.rank,
            step.probability,
            step.logit,
            step.mixer_logit,
            step.feed_forward_logit,
            step.residual_norm,
            top.join(", ")
        ))?;
    }
    for layer in report.activations.iter().flatten() {
        let shown = layer.top.iter();
        let shown: Vec<String> = shown
            .map(|f| format!("{} {:+.3}", f.feature, f.activation))
            .collect();
        console.line(&format!(
            "layer {:>3} features  {}",
            layer.layer,
            shown.join(", ")
        ))?;
    }
    for attended in report.attention.iter().flatten() {
        for (head, weights) in attended.weights.iter().enumerate() {
            let mut order: Vec<usize> = (0..weights.len()).collect();
            order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
            let most: Vec<String> = order
                .into_iter()
                .take(4)
                .map(|p| {
                    let piece = report.pieces.get(p).map_or("", String::as_str);
                    format!("{p} {} {:.3}", quoted(piece), weights[p])
                })
                .collect();
            console.line(&format!(
                "layer {:>3} head {head:>3}  {}",
                attended.layer,
                most.join(", ")
            ))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_has_no_probability() {
        let even = probabilities(&[1.0, 1.0, f32::NEG_INFINITY], "here").unwrap();
        assert_eq!(even, [0.5, 0.5, 0.0]);
        for bad in [f32::NAN, f32::INFINITY] {
            let why = probabilities(&[1.0, bad, 3.0], "after layer 2").unwrap_err();
            let why = why.report().unwrap();
            assert!(
                why.contains("after layer 2") && why.contains(&bad.to_string()),
                "{why}"
            );
        }
        assert!(probabilities(&[f32::NEG_INFINITY; 2], "here").is_err());
    }

    #[test]
    fn lists_of_layers() {
        let layers: Layers = "0-2, 5,e".parse().unwrap();
        assert!(layers.embedding && layers.has(2) && layers.has(5) && !layers.has(3));
        assert!(layers.check("--layers", 6).is_ok());
        let text = layers.check("--layers", 5).unwrap_err().report().unwrap();
        assert!(text.contains("layer 5; the model has 5"), "{text}");
        for bad in ["", "3-1", "a", "1-", "-1"] {
            assert!(bad.parse::<Layers>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_greatest_come_first() {
        assert_eq!(greatest(&[0.0, 2.0, f32::NEG_INFINITY, 2.0], 3), [1, 3, 0]);
        assert_eq!(greatest(&[1.0], 5), [0]);
    }
}
