//! `mlx infer`: shows the most probable next tokens of a prompt. Walking layers, the dense pass, or
//! both compute them.

use std::time::Instant;

use inference::{CancelToken, Interrupt, LogitsOutput, Prompt, TextModel};
use serde::Serialize;

use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::options::prompt::RawPromptArgs;
use crate::cli::options::steer::{self, SteerArgs};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Show the most probable next tokens of a prompt; can compare two ways to compute feed-forward
/// parts
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: RawPromptArgs,
    /// Number of tokens to show
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    top: usize,
    /// Compare the plan of --ffn with the dense pass
    #[arg(long)]
    compare: bool,
    /// Print one JSON object, in the form of `/v1/infer` of `mlx serve`
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct Prediction {
    token: String,
    probability: f64,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Answer {
    One {
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt: Option<String>,
        predictions: Vec<Prediction>,
        mode: &'static str,
        latency_ms: f64,
    },
    Both {
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt: Option<String>,
        walk: Vec<Prediction>,
        walk_ms: f64,
        dense: Vec<Prediction>,
        dense_ms: f64,
        latency_ms: f64,
    },
}

fn milliseconds(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 1e4).round() / 10.0
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let prompt = args.prompt.read(console)?;
    if args.compare && !args.load.feed_forward.is_given() {
        return Err(Failure::usage(
            "--compare is about a plan beside the dense pass; give one with --ffn",
        ));
    }
    let steering = args.steer.read()?;
    if args.compare && steering.is_some() {
        return Err(Failure::usage(
            "--compare is about the plan alone; leave --steer or --compare out",
        ));
    }
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let interrupt = Interrupt::new().with_cancel(cancel);
    let text = match &prompt {
        Prompt::Text(text) => Some(text.clone()),
        _ => None,
    };
    let started = Instant::now();
    let answer = if args.compare {
        let routed = model.as_routed().ok_or_else(|| {
            Failure::usage("--compare is about a plan other than dense; give one with --ffn")
        })?;
        if !routed.has_dense() {
            return Err(Failure::usage(
                "--compare needs the dense feed-forward parts; leave --walk-only out",
            ));
        }
        let timed = |dense: bool| {
            let since = Instant::now();
            let logits = routed.routed_logits(&prompt, dense, &interrupt)?;
            let predicted = predictions(model, &logits, args.top)?;
            Ok::<_, Failure>((predicted, milliseconds(since)))
        };
        let (walk, walk_ms) = timed(false)?;
        let (dense, dense_ms) = timed(true)?;
        Answer::Both {
            prompt: text,
            walk,
            walk_ms,
            dense,
            dense_ms,
            latency_ms: milliseconds(started),
        }
    } else {
        let logits = steer::logits(model, &prompt, false, steering.as_ref(), &interrupt)?;
        Answer::One {
            prompt: text,
            predictions: predictions(model, &logits, args.top)?,
            mode: match model.as_routed() {
                Some(routed) if routed.feed_forward_plan().walks() => "walk",
                Some(_) => "plan",
                None => "dense",
            },
            latency_ms: milliseconds(started),
        }
    };
    if args.json {
        return console.json(&answer);
    }
    match &answer {
        Answer::One { predictions, .. } => {
            for p in predictions {
                console.line(&format!("{:.4}  {:?}", p.probability, p.token))?;
            }
        }
        Answer::Both {
            walk,
            walk_ms,
            dense,
            dense_ms,
            ..
        } => {
            let side = |p: &Prediction| format!("{:.4}  {:?}", p.probability, p.token);
            let width = walk
                .iter()
                .map(|p| side(p).len())
                .max()
                .unwrap_or(0)
                .max(24);
            let head = format!("{} in {walk_ms} ms", args.load.feed_forward.shown());
            console.line(&format!("{head:<width$}  dense in {dense_ms} ms"))?;
            for (walk, dense) in walk.iter().zip(dense) {
                console.line(&format!("{:<width$}  {}", side(walk), side(dense)))?;
            }
        }
    }
    Ok(())
}

/// The most probable tokens, with probabilities rounded to four digits. Among equal probabilities,
/// the lower id comes first.
fn predictions(
    model: &dyn TextModel,
    output: &LogitsOutput,
    top: usize,
) -> Result<Vec<Prediction>, Failure> {
    let tokens = model.as_token_model();
    let logits = &output.logits;
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !greatest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
        return Err(Failure::failed(
            "the model's probabilities are not finite; check its weights",
        ));
    }
    let power = |x: f32| f64::from(x - greatest).exp();
    let sum: f64 = logits.iter().map(|x| power(*x)).sum();
    let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    order.truncate(top);
    let one = |(id, logit): (u32, f32)| Prediction {
        token: (tokens.and_then(|tokens| tokens.decode(&[id]).ok())).unwrap_or_default(),
        probability: (power(logit) / sum * 1e4).round() / 1e4,
    };
    Ok(order.into_iter().map(one).collect())
}
