//! `mlx perplexity`: measures how well a model predicts a text.

use std::path::{Path, PathBuf};

use inference::{CancelToken, Interrupt, Prompt};
use serde_json::json;

use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::options::prompt::read_text;
use crate::cli::options::steer::{self, SteerArgs};
use crate::cli::terminal::bounded;
use crate::cli::terminal::bounded::MAX_INPUT;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::progress::TokenBar;

/// Measure how well a model predicts a text: exp of the mean negative log-probability
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("source").required(true)))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The text, in a file
    #[arg(long, short, group = "source", value_name = "FILE")]
    file: Option<PathBuf>,
    /// The text; `-` reads it from standard input
    #[arg(
        long,
        short,
        group = "source",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// A data set as for `mlx train`: a JSONL or Parquet file, or a directory with train.jsonl
    #[cfg(feature = "mlx-backend")]
    #[arg(long, group = "source", value_name = "PATH")]
    data_path: Option<PathBuf>,
    /// Number of pieces of the data set to measure; -1 means all
    #[cfg(feature = "mlx-backend")]
    #[arg(long, value_name = "N", default_value_t = 256, conflicts_with_all = ["file", "prompt"])]
    num_samples: i64,
    /// Seed of the order in which examples of the data set are taken
    #[cfg(feature = "mlx-backend")]
    #[arg(long, value_name = "N", default_value_t = 123, conflicts_with_all = ["file", "prompt"])]
    seed: u32,
    /// mlx-lm's number of pieces per forward pass; it changes no result
    #[arg(long, value_name = "N", hide = true, value_parser = at_least_one)]
    batch_size: Option<usize>,
    /// Number of tokens in a piece. The first token of a piece is not measured. A shorter last
    /// piece is ignored, unless it is the only one
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_two)]
    sequence_length: usize,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    pub load: LoadArgs,
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n >= 2 => Ok(n),
        Ok(_) => Err("must be at least 2".into()),
        Err(e) => Err(format!("{e}")),
    }
}

impl Args {
    /// The text to measure; `None` if the source is a data set.
    fn text(&self, console: &mut Console<'_>) -> Result<Option<String>, Failure> {
        match (&self.file, &self.prompt) {
            (Some(path), None) => bounded::read_text(path, MAX_INPUT)
                .map(Some)
                .map_err(|e| Failure::failed(format!("cannot read {}: {e}", path.display()))),
            (None, Some(prompt)) => read_text(prompt, console).map(Some),
            _ => Ok(None),
        }
    }

    /// Joins examples of the data set in mlx-lm's order, until there are enough tokens for the
    /// pieces.
    #[cfg(feature = "mlx-backend")]
    fn examples(&self, model: &Path) -> Result<Vec<u32>, Failure> {
        use metal_backend::train::dataset::shuffle::Shuffler;
        use metal_backend::train::dataset::{DataOptions, Dataset, files};
        let Some(path) = &self.data_path else {
            return Err(Failure::usage(
                "give one of --file, --prompt and --data-path",
            ));
        };
        let file = files::file_of(path, "train")?;
        let text = crate::cli::options::files::Files::read(model, None)?.text;
        let data = Dataset::read(file, &text, &DataOptions::new())?;
        let most = match usize::try_from(self.num_samples) {
            Ok(0) => {
                return Err(Failure::usage(
                    "--num-samples must be 1 or more, or -1 for all",
                ));
            }
            Ok(n) => n.saturating_mul(self.sequence_length),
            Err(_) => usize::MAX,
        };
        let count = u32::try_from(data.examples.len())
            .map_err(|_| Failure::failed("the data set has too many examples"))?;
        let mut ids = Vec::new();
        for at in Shuffler::new(self.seed).permutation(count) {
            if ids.len() >= most {
                break;
            }
            if let Some(example) = data.examples.get(at as usize) {
                ids.extend(&example.ids);
            }
        }
        ids.truncate(most);
        Ok(ids)
    }

    /// Returns an error, because the program cannot read data sets without the engine.
    #[cfg(not(feature = "mlx-backend"))]
    fn examples(&self, _: &Path) -> Result<Vec<u32>, Failure> {
        Err(Failure::usage("give one of --file and --prompt"))
    }
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let steering = args.steer.read()?;
    let text = args.text(console)?;
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded
        .model
        .as_token_model()
        .ok_or_else(|| Failure::failed("this backend does not give probabilities"))?;
    let ids = match text {
        Some(text) => model.encode(&text, true)?,
        None => args.examples(&loaded.path)?,
    };
    if ids.len() < 2 {
        return Err(Failure::failed(
            "the text has fewer than two tokens: there is nothing to predict",
        ));
    }
    // As in mlx-lm, only whole pieces count. Tokens of a shorter last piece would have less
    // context, but equal weight.
    let evaluated = ids.len() / args.sequence_length * args.sequence_length;
    let (counted, rest) = match evaluated {
        0 => (ids.as_slice(), 0),
        n => (&ids[..n], ids.len() - n),
    };
    let cancel = CancelToken::new();
    let interrupt = Interrupt::new().with_cancel(cancel.clone());
    let _guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    let bar = TokenBar::start("reading", counted.len() as u64, console);
    let (mut total, mut count, mut squares) = (0.0f64, 0usize, 0.0f64);
    for piece in counted.chunks(args.sequence_length) {
        let prompt = Prompt::Tokens(piece.to_vec());
        let logprobs = match &steering {
            Some(steering) => {
                steer::logprobs(loaded.model.as_ref(), &prompt, steering, &interrupt)?
            }
            None => model.token_logprobs(&prompt, &interrupt)?,
        };
        for logprob in logprobs {
            let nll = -f64::from(logprob);
            total += nll;
            squares += nll * nll;
            count += 1;
        }
        bar.advance(piece.len() as u64);
    }
    drop(bar);
    let mean = total / count.max(1) as f64;
    if !mean.is_finite() {
        return Err(Failure::failed(
            "the model's probabilities are not finite; check its weights",
        ));
    }
    // The sample variance, divided by n - 1 as in mlx-lm. The sum of squared deviations is the sum
    // of squares minus n times the squared mean.
    let spread = (squares - count as f64 * mean * mean).max(0.0);
    let error = (spread / count.saturating_sub(1).max(1) as f64 / count.max(1) as f64).sqrt();
    console.json(&json!({
        "perplexity": mean.exp(),
        "standard_error": mean.exp() * error,
        "mean_negative_log_probability": mean,
        "tokens": count,
        "skipped_tokens": rest,
    }))
}
