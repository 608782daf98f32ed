//! `mlx vindex sweep`: measures a model's answers when its layers use the strategy `walk`. It
//! varies the number of features, and the first layer that walks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use inference::{
    Backend, CancelToken, FeedForwardPlan, FeedForwardStrategy, GenerateOptions, Interrupt,
    LoadOptions, Prompt, TextModel, TokenModel,
};
use inference_probe::chart::{Curve, lines_at};
use inference_probe::files::write_whole;
use inference_probe::vindex::Vindex;
use serde::Serialize;

use crate::cli::measure::probe::failed;
use crate::cli::options::load::{
    LoadArgs, Loaded, ModelArgs, at_least_one, find_model, load_with_options,
};
use crate::cli::terminal::bounded;
use crate::cli::terminal::bounded::MAX_INPUT;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// The default prompts, which `--prompts` replaces. The expected answer of each is one token.
const PROMPTS: [&str; 5] = [
    "The capital of France is",
    "The capital of Germany is",
    "The capital of Japan is",
    "The capital of Italy is",
    "The largest planet in our solar system is",
];

/// The number of rounds of a measurement. The best one counts, since other programs only slow it
/// down.
const ROUNDS: usize = 3;

/// Show how a model's answers change when its layers walk: by the number of features, and by the
/// first layer that walks
///
/// In the first table, all layers walk. It counts how often the most probable token is that of the
/// dense pass, and measures perplexity, speeds, and the bytes that a token reads. In the second
/// table, the layers from a boundary on walk. With all features, each answer must be that of the
/// dense pass; any other answer is a failure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The directory that `mlx vindex build` wrote
    dir: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Numbers of features to compare [default: from one in 32 to all]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = at_least_one)]
    top_k: Vec<usize>,
    /// First layers that walk, one per measurement; `none` omits the second table [default: each
    /// layer]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    boundaries: Vec<String>,
    /// Number of features of the walking layers in the second table [default: all]
    #[arg(long, value_name = "K", value_parser = at_least_one)]
    boundary_top_k: Option<usize>,
    /// A file of prompts, one per line, instead of the built-in ones
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// A text for the first table [default: the prompts]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Number of tokens of the text, and of the reply whose speed is measured
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    tokens: usize,
    /// Draw the first table as curves into this SVG file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// A model's speeds of prefill and decode, in tokens per second.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Speed {
    prompt: f64,
    reply: f64,
}

impl Speed {
    /// The greater value of each speed.
    fn or(self, other: Self) -> Self {
        Self {
            prompt: self.prompt.max(other.prompt),
            reply: self.reply.max(other.reply),
        }
    }
}

/// The results of the dense pass.
#[derive(Debug, Serialize)]
struct Dense {
    perplexity: f64,
    /// The bytes of all feed-forward weights, which each token reads.
    bytes_per_token: u64,
}

/// The results with this number of features in all layers.
#[derive(Debug, Serialize)]
struct Width {
    top_k: usize,
    /// The share of positions with the dense pass's most probable token.
    agreement: f64,
    perplexity: f64,
    /// The bytes of feed-forward weights that a token reads.
    bytes_per_token: u64,
    speed: Speed,
    /// The speed of the dense pass, measured alternately with this one.
    dense_speed: Speed,
}

/// The results if layers below `boundary` are dense and all others walk.
#[derive(Debug, Serialize)]
struct Boundary {
    boundary: usize,
    /// The percentage of layers that walk.
    walking: f64,
    /// The number of prompts with the dense pass's most probable token.
    identical: usize,
    prompts: usize,
    /// The mean probability of the dense pass's token.
    probability: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    layers: usize,
    features: usize,
    /// The number of positions for agreement and perplexity.
    positions: usize,
    dense: Dense,
    widths: Vec<Width>,
    boundary_top_k: usize,
    boundaries: Vec<Boundary>,
}

/// The common data of all measurements.
struct Sweep<'a> {
    args: &'a Args,
    vindex: Vindex,
    backend: Arc<dyn Backend>,
    path: PathBuf,
    options: LoadOptions,
    interrupt: Interrupt,
}

impl Sweep<'_> {
    /// Loads the model with this plan.
    fn load(&self, plan: FeedForwardPlan, console: &mut Console<'_>) -> Result<Loaded, Failure> {
        self.interrupt.check()?;
        let walks = plan.walks();
        let options = (self.options.clone().with_feed_forward(plan))
            .with_vindex(walks.then(|| self.args.dir.clone()))
            .with_walk_only(walks && self.options.walk_only);
        load_with_options(Arc::clone(&self.backend), &self.path, &options, console)
    }

    fn walking(
        &self,
        first: usize,
        top_k: usize,
        console: &mut Console<'_>,
    ) -> Result<Loaded, Failure> {
        let walk = FeedForwardStrategy::Walk { top_k };
        self.load(
            FeedForwardPlan::dense().with_layers(first, None, walk)?,
            console,
        )
    }
}

fn tokens_of(model: &dyn TextModel) -> Result<&dyn TokenModel, Failure> {
    (model.as_token_model())
        .ok_or_else(|| Failure::failed("this backend does not give probabilities"))
}

/// The index of the greatest value. Of equal ones, the first counts.
fn best(logits: &[f32]) -> usize {
    let better = |best: (usize, f32), (i, x): (usize, &f32)| match *x > best.1 {
        true => (i, *x),
        false => best,
    };
    let all = logits.iter().enumerate();
    all.fold((0, f32::NEG_INFINITY), better).0
}

/// The natural logarithm of a token's probability.
fn log_probability(logits: &[f32], token: usize) -> f64 {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers = logits.iter().map(|x| f64::from(x - greatest).exp());
    let logit = logits.get(token).copied().unwrap_or(f32::NEG_INFINITY);
    f64::from(logit - greatest) - powers.sum::<f64>().ln()
}

/// A model's predictions at each position: the best token, and the sum of the negative logarithms
/// of the actual tokens' probabilities.
#[derive(Default)]
struct Expected {
    best: Vec<usize>,
    nll: f64,
    foreseen: usize,
}

impl Expected {
    fn compute(
        model: &dyn TextModel,
        sequences: &[Vec<u32>],
        interrupt: &Interrupt,
    ) -> Result<Self, Failure> {
        let tokens = tokens_of(model)?;
        let mut expected = Self::default();
        for ids in sequences {
            let prompt = Prompt::Tokens(ids.clone());
            let all = tokens.logits(&prompt, true, interrupt)?;
            let width = all.shape.last().copied().unwrap_or(1).max(1);
            for (i, row) in all.logits.chunks_exact(width).enumerate() {
                expected.best.push(best(row));
                if let Some(next) = ids.get(i + 1) {
                    expected.nll -= log_probability(row, *next as usize);
                    expected.foreseen += 1;
                }
            }
        }
        Ok(expected)
    }

    fn perplexity(&self) -> f64 {
        (self.nll / self.foreseen.max(1) as f64).exp()
    }
}

/// The speed at which the model reads `ids` and continues.
fn speed(
    model: &dyn TextModel,
    ids: &[u32],
    count: usize,
    cancel: &CancelToken,
) -> Result<Speed, Failure> {
    let mut options = GenerateOptions::new()
        .with_max_tokens(count)
        .with_cache_prompt(false)
        .with_cancel(cancel.clone());
    options.stop.ignore_eos = true;
    let prompt = Prompt::Tokens(ids.to_vec());
    model.generate(&prompt, &options)?.collect_output()?;
    let metrics = model.metrics();
    let rate = |tokens: usize, time: Duration| match time.as_secs_f64() {
        0.0 => 0.0,
        seconds => tokens as f64 / seconds,
    };
    Ok(Speed {
        prompt: rate(metrics.prompt_tokens, metrics.prefill_time),
        reply: metrics.decode_tokens_per_second(),
    })
}

/// The bytes of features in all layers that a token reads, including the gate.
fn bytes_read(vindex: &Vindex, top_k: usize, walk_only: bool, dense: u64) -> u64 {
    let hidden = vindex.about().hidden_size as u64;
    let layers = vindex.layers().len().max(1) as u64;
    let of = |layer: &inference_probe::vindex::LayerIndex| {
        let features = layer.num_features as u64;
        let matrices = 1 + u64::from(layer.gated);
        let rows = matrices * (top_k as u64).min(features) * hidden * 4;
        let gate = match walk_only {
            true => features * hidden * 4,
            // Without a gate, the up matrix is read whole, and only down rows are chosen. The
            // matrices of a layer have one size and, in most models, one format.
            false => dense / layers / (matrices + 1),
        };
        rows + gate
    };
    vindex.layers().iter().map(of).sum()
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let mut load = args.load.clone();
    let walk_only = load.feed_forward.without_plan()?;
    let vindex = Vindex::open(&args.dir).map_err(failed)?;
    let layers = vindex.layers().len();
    let boundaries = boundaries(&args.boundaries, layers)?;
    let lines = |path: &PathBuf| {
        bounded::read_text(path, MAX_INPUT)
            .map_err(|e| Failure::failed(format!("cannot read {}: {e}", path.display())))
    };
    let prompts: Vec<String> = match &args.prompts {
        Some(path) => (lines(path)?.lines().filter(|line| !line.trim().is_empty()))
            .map(str::to_owned)
            .collect(),
        None => PROMPTS.map(str::to_owned).to_vec(),
    };
    let text = args.file.as_ref().map(lines).transpose()?;
    let backend = load.backend()?;
    let options = (load.checked(backend.name())?).with_walk_only(walk_only);
    let path = find_model(args.model.model.as_deref(), console)?;
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let sweep = Sweep {
        args,
        vindex,
        backend,
        path,
        options,
        interrupt: Interrupt::new().with_cancel(cancel.clone()),
    };
    let dense = sweep.load(FeedForwardPlan::dense(), console)?;
    let dense_model = dense.model.as_ref();
    let encode = |text: &String| -> Result<Vec<u32>, Failure> {
        let ids = tokens_of(dense_model)?.encode(text, true)?;
        match ids.is_empty() {
            true => Err(Failure::failed("a prompt has no tokens")),
            false => Ok(ids),
        }
    };
    let prompts: Vec<Vec<u32>> = prompts.iter().map(encode).collect::<Result<_, _>>()?;
    let texts = match &text {
        Some(text) => {
            let mut ids = encode(text)?;
            ids.truncate(args.tokens);
            vec![ids]
        }
        None => prompts.clone(),
    };
    let (Some(read), false) = (texts.first(), prompts.is_empty()) else {
        return Err(Failure::failed("there is no prompt"));
    };
    let expected = Expected::compute(dense_model, &texts, &sweep.interrupt)?;
    let features = (sweep.vindex.layers().iter().map(|l| l.num_features)).max();
    let features = features.unwrap_or(0);
    let part_bytes = feed_forward_bytes(&sweep)?;
    let mut report = Report {
        layers,
        features,
        positions: expected.best.len(),
        dense: Dense {
            perplexity: expected.perplexity(),
            bytes_per_token: part_bytes,
        },
        widths: Vec::new(),
        boundary_top_k: args.boundary_top_k.unwrap_or(features).min(features),
        boundaries: Vec::new(),
    };
    for top_k in widths(&args.top_k, features) {
        let few = sweep.walking(0, top_k, console)?;
        let actual = Expected::compute(few.model.as_ref(), &texts, &sweep.interrupt)?;
        let same = actual
            .best
            .iter()
            .zip(&expected.best)
            .filter(|(a, b)| a == b);
        let agreement = same.count() as f64 / expected.best.len().max(1) as f64;
        let (mut own_speed, mut dense_speed) = (Speed::default(), Speed::default());
        for _ in 0..ROUNDS {
            let of = |model: &dyn TextModel| speed(model, read, args.tokens, &cancel);
            own_speed = own_speed.or(of(few.model.as_ref())?);
            dense_speed = dense_speed.or(of(dense_model)?);
        }
        report.widths.push(Width {
            top_k,
            agreement,
            perplexity: actual.perplexity(),
            bytes_per_token: bytes_read(&sweep.vindex, top_k, sweep.options.walk_only, part_bytes),
            speed: own_speed,
            dense_speed,
        });
        console.note(&format!("{top_k} of {features} features"));
    }
    let answers = answers(dense_model, &prompts, None, &sweep.interrupt)?;
    drop(dense);
    for boundary in boundaries {
        let top_k = args.boundary_top_k.unwrap_or(usize::MAX);
        let model = sweep.walking(boundary, top_k, console)?;
        let wanted: Vec<usize> = answers.iter().map(|(best, _)| *best).collect();
        let measured = self::answers(
            model.model.as_ref(),
            &prompts,
            Some(&wanted),
            &sweep.interrupt,
        )?;
        let same = measured.iter().zip(&wanted).filter(|((a, _), b)| a == *b);
        report.boundaries.push(Boundary {
            boundary,
            walking: 100.0 * (layers - boundary) as f64 / layers as f64,
            identical: same.count(),
            prompts: prompts.len(),
            probability: measured.iter().map(|(_, p)| p).sum::<f64>()
                / measured.len().max(1) as f64,
        });
        console.note(&format!("boundary {boundary} of {layers}"));
    }
    if let Some(path) = &args.plot {
        write_whole(path, plot(&report).as_bytes()).map_err(failed)?;
    }
    print(&report, args.json, console)?;
    let all = report.boundary_top_k == features;
    let other = (report.boundaries.iter()).find(|b| all && b.identical < b.prompts);
    match other {
        Some(b) => Err(Failure::failed(format!(
            "with all features from layer {} on, {} of {} answers are not those of the dense pass",
            b.boundary,
            b.prompts - b.identical,
            b.prompts
        ))),
        None => Ok(()),
    }
}

/// The most probable next token of each prompt, and the probability of `wanted` or else of that
/// token.
fn answers(
    model: &dyn TextModel,
    prompts: &[Vec<u32>],
    wanted: Option<&[usize]>,
    interrupt: &Interrupt,
) -> Result<Vec<(usize, f64)>, Failure> {
    let tokens = tokens_of(model)?;
    let one = |(i, ids): (usize, &Vec<u32>)| {
        let prompt = Prompt::Tokens(ids.clone());
        let all = tokens.logits(&prompt, false, interrupt)?;
        let best_token = best(&all.logits);
        let wanted = wanted.and_then(|wanted| wanted.get(i).copied());
        let probability = log_probability(&all.logits, wanted.unwrap_or(best_token)).exp();
        Ok((best_token, probability))
    };
    prompts.iter().enumerate().map(one).collect()
}

/// The bytes of the feed-forward weights in memory.
fn feed_forward_bytes(sweep: &Sweep<'_>) -> Result<u64, Failure> {
    #[cfg(feature = "mlx-backend")]
    {
        let name = Some(sweep.backend.name());
        let report =
            metal_backend::model_report::ModelReport::read(&sweep.path, name, sweep.options.dtype)?;
        let parts = report.parts.iter();
        let feed_forward = parts.filter(|part| part.name == "feed-forward");
        Ok(feed_forward.map(|part| part.loaded_bytes).sum())
    }
    #[cfg(not(feature = "mlx-backend"))]
    {
        let _ = sweep;
        Ok(0)
    }
}

/// The numbers of features to compare, in ascending order.
fn widths(given: &[usize], features: usize) -> Vec<usize> {
    let mut all: Vec<usize> = match given {
        [] => [32, 16, 8, 6, 4, 3, 2, 1]
            .map(|part| (features / part).max(1))
            .to_vec(),
        given => given.iter().map(|k| (*k).min(features)).collect(),
    };
    all.sort_unstable();
    all.dedup();
    all
}

/// The boundaries to measure, in ascending order: the first layers that walk.
fn boundaries(given: &[String], layers: usize) -> Result<Vec<usize>, Failure> {
    let mut all = Vec::new();
    match given {
        [] => all.extend(0..layers),
        [none] if none == "none" => {}
        given => {
            for text in given {
                match text.trim().parse::<usize>() {
                    Ok(layer) if layer < layers => all.push(layer),
                    _ => {
                        return Err(Failure::usage(format!(
                            "--boundaries: {text:?} is no layer of 0 to {}",
                            layers.saturating_sub(1)
                        )));
                    }
                }
            }
        }
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// A plot of agreement and speed over the number of features.
fn plot(report: &Report) -> String {
    let names: Vec<String> = report.widths.iter().map(|w| w.top_k.to_string()).collect();
    let curve =
        |name: &str, of: &dyn Fn(&Width) -> f64| Curve::new(name, report.widths.iter().map(of));
    let curves = [
        curve("agreement", &|w| w.agreement),
        curve("reply speed", &|w| w.speed.reply / w.dense_speed.reply),
        curve("prompt speed", &|w| w.speed.prompt / w.dense_speed.prompt),
    ];
    let places = ("features of each layer", names.as_slice());
    let title = "Layers that walk beside the dense pass";
    lines_at(title, places, "part of the dense pass", &curves)
}

fn print(report: &Report, json: bool, console: &mut Console<'_>) -> Result<(), Failure> {
    if json {
        return console.json(report);
    }
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    console.line(&format!(
        "dense: perplexity {:.3}, {:.2} MB of feed-forward weights a token; {} positions",
        report.dense.perplexity,
        megabytes(report.dense.bytes_per_token),
        report.positions
    ))?;
    if !report.widths.is_empty() {
        console.line(
            "features  agreement  perplexity  MB a token  prompt tok/s  (dense)  reply tok/s  (dense)",
        )?;
    }
    for width in &report.widths {
        console.line(&format!(
            "{:>8}  {:>8.1} %  {:>10.3}  {:>10.2}  {:>12.1}  {:>7.1}  {:>11.1}  {:>7.1}",
            width.top_k,
            100.0 * width.agreement,
            width.perplexity,
            megabytes(width.bytes_per_token),
            width.speed.prompt,
            width.dense_speed.prompt,
            width.speed.reply,
            width.dense_speed.reply
        ))?;
    }
    if !report.boundaries.is_empty() {
        console.line("boundary  walking  answers as dense  mean probability")?;
    }
    for b in &report.boundaries {
        console.line(&format!(
            "{:>8}  {:>5.0} %  {:>16}  {:>16.4}",
            b.boundary,
            b.walking,
            format!("{} of {}", b.identical, b.prompts),
            b.probability
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_and_boundaries_are_ascending_and_within_the_model() {
        assert_eq!(widths(&[], 96), [3, 6, 12, 16, 24, 32, 48, 96]);
        assert_eq!(widths(&[], 2), [1, 2]);
        assert_eq!(widths(&[9, 500, 3, 9], 96), [3, 9, 96]);
        let of = |list: &[&str]| {
            let list: Vec<String> = list.iter().map(|s| (*s).to_owned()).collect();
            boundaries(&list, 4).ok()
        };
        assert_eq!(of(&[]), Some(vec![0, 1, 2, 3]));
        assert_eq!(of(&["none"]), Some(vec![]));
        assert_eq!(of(&["3", "0", "3"]), Some(vec![0, 3]));
        for wrong in ["4", "-1", "x", ""] {
            assert_eq!(of(&[wrong]), None, "{wrong}");
        }
        assert_eq!(of(&["none", "1"]), None);
    }

    #[test]
    fn logarithms_are_those_of_the_softmax() {
        let logits = [1.0, 3.0, 3.0, -2.0];
        assert_eq!(best(&logits), 1);
        let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let wanted = f64::from(logits[3]) - sum.ln();
        assert!((log_probability(&logits, 3) - wanted).abs() < 1e-12);
        assert_eq!(log_probability(&logits, 9), f64::NEG_INFINITY);
    }
}
