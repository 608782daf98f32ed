//! `mlx perplexity`: how well a model foresees a text.

use std::path::PathBuf;

use inference::Prompt;
use serde_json::json;

use super::console::Console;
use super::failure::Failure;
use super::load::{LoadArgs, ModelArgs, load};
use super::progress::TokenBar;
use super::prompt::read_text;

/// Measure how well a model foresees a text: exp of the mean negative log-probability
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("source").required(true).args(["file", "prompt"])))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The text, in a file
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The text; `-` reads it from standard input
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The text is cut into pieces of this many tokens, of which the first is given; what is left over at
    /// its end is not counted, unless it is all there is
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_two)]
    sequence_length: usize,
    #[command(flatten)]
    load: LoadArgs,
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n >= 2 => Ok(n),
        Ok(_) => Err("must be at least 2".into()),
        Err(e) => Err(format!("{e}")),
    }
}

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let text = match (&args.file, &args.prompt) {
        (Some(path), None) => std::fs::read_to_string(path)
            .map_err(|e| Failure::failed(format!("cannot read {}: {e}", path.display())))?,
        (None, Some(prompt)) => read_text(prompt, console)?,
        _ => return Err(Failure::usage("give one of --file and --prompt")),
    };
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded
        .model
        .as_token_model()
        .ok_or_else(|| Failure::failed("this backend does not give probabilities"))?;
    let ids = model.encode(&text, true)?;
    if ids.len() < 2 {
        return Err(Failure::failed(
            "the text has fewer than two tokens: there is nothing to foresee",
        ));
    }
    // Of whole pieces only, as mlx-lm: tokens that are foreseen from little would count as the others.
    let whole = ids.len() / args.sequence_length * args.sequence_length;
    let (counted, rest) = match whole {
        0 => (ids.as_slice(), 0),
        n => (&ids[..n], ids.len() - n),
    };
    let bar = TokenBar::start("reading", counted.len() as u64, console);
    let (mut total, mut count, mut squares) = (0.0f64, 0usize, 0.0f64);
    for piece in counted.chunks(args.sequence_length) {
        for logprob in model.token_logprobs(&Prompt::Tokens(piece.to_vec()))? {
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
        return Err(Failure::failed("the model's probabilities are no numbers"));
    }
    // The variance of a sample, with n - 1, as mlx-lm has it: sum of squares less n times the mean's.
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
