//! `mlx embed`: embeds many texts.

use std::path::Path;
#[cfg(feature = "probe")]
use std::path::PathBuf;

use inference::{CancelToken, EmbedOptions, EmbedPrompt, Interrupt, Pooling, Prompt};
use serde_json::json;

use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::options::records::{InputArgs, Record};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::progress::CountBar;

/// Print a vector for each of many texts, as the embedding model was trained to compute it
///
/// For a model without files of sentence-transformers, the vector is the mean of the last hidden
/// states, scaled to length one.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    vectors: VectorArgs,
    /// Write the vectors to this .npy file (numpy, float32, one row per text) instead of printing
    /// JSON
    #[cfg(feature = "probe")]
    #[arg(long, value_name = "FILE")]
    npy: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArgs,
}

impl Args {
    /// The .npy file for the vectors, if one is given.
    #[cfg(feature = "probe")]
    fn file(&self) -> Option<&Path> {
        self.npy.as_deref()
    }

    /// Always `None`: writing such files needs the feature `probe`.
    #[cfg(not(feature = "probe"))]
    fn file(&self) -> Option<&Path> {
        None
    }
}

/// Writes vectors to a .npy file.
#[cfg(feature = "probe")]
fn write(path: &Path, shape: [usize; 2], values: &[f32]) -> Result<(), Failure> {
    inference_probe::npy::write(path, &shape, values).map_err(|e| Failure::failed(e.to_string()))
}

/// Never called: without the feature `probe`, no flag names such a file.
#[cfg(not(feature = "probe"))]
fn write(path: &Path, _: [usize; 2], _: &[f32]) -> Result<(), Failure> {
    let message = format!("cannot write {}: built without probe", path.display());
    Err(Failure::failed(message))
}

/// The flags for the vectors.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Vectors")]
struct VectorArgs {
    /// How to combine a text's states into one vector: mean, last, cls, max, mean_sqrt_length or
    /// weighted_mean [default: as the model was trained]
    #[arg(long, value_name = "HOW", value_parser = pooling)]
    pooling: Option<Pooling>,
    /// Do not scale vectors to length one
    #[arg(long)]
    no_normalize: bool,
    /// Scale vectors to length one, even if the model does not
    #[arg(long, conflicts_with = "no_normalize")]
    normalize: bool,
    /// Return only the first N elements, for models trained for this (Matryoshka)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    dimensions: Option<usize>,
    /// Maximum tokens of a text; the model's own maximum also applies
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_length: Option<usize>,
    /// Truncate texts that are too long, instead of refusing them
    #[arg(long)]
    truncate: bool,
    /// Put the model's prompt of this name before each text, such as query or document
    #[arg(long, value_name = "NAME", conflicts_with_all = ["prompt", "no_prompt"])]
    prompt_name: Option<String>,
    /// Put this text before each text
    #[arg(long, value_name = "TEXT", conflicts_with = "no_prompt")]
    prompt: Option<String>,
    /// Put nothing before the texts, even if the model has a default prompt
    #[arg(long)]
    no_prompt: bool,
}

fn pooling(text: &str) -> Result<Pooling, String> {
    let names = Pooling::ALL.map(|(name, _)| name).join(", ");
    text.parse().map_err(|_| format!("must be one of {names}"))
}

impl VectorArgs {
    fn options(&self) -> EmbedOptions {
        let normalize = match (self.normalize, self.no_normalize) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        };
        let prompt = match (&self.prompt_name, &self.prompt, self.no_prompt) {
            (Some(name), ..) => EmbedPrompt::Named(name.clone()),
            (_, Some(text), _) => EmbedPrompt::Text(text.clone()),
            (.., true) => EmbedPrompt::None,
            _ => EmbedPrompt::Default,
        };
        EmbedOptions::new()
            .with_pooling(self.pooling)
            .with_normalize(normalize)
            .with_dimensions(self.dimensions)
            .with_max_length(self.max_length)
            .with_truncate(self.truncate)
            .with_prompt(prompt)
    }
}

/// Number of texts per call of the engine, which sorts them by length.
const TOGETHER: usize = 256;

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let records = args.input.read(console)?;
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let embedder = model.as_embedding_model().ok_or_else(|| {
        Failure::failed("this backend makes no embeddings; `mlx backends` shows the others")
    })?;
    let cancel = CancelToken::new();
    let interrupt = Interrupt::new().with_cancel(cancel.clone());
    let _guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    let options = args.vectors.options();
    options.validate(&embedder.embedding_info())?;
    let mut all: Vec<f32> = Vec::new();
    // On a terminal, a progress bar would interrupt the printed results.
    let shown = args.file().is_some() || !console.out_is_terminal;
    let bar = shown.then(|| CountBar::start("texts", records.len() as u64, console));
    for part in records.chunks(TOGETHER) {
        let prompts = part
            .iter()
            .map(|record| record.ask.prompt(model))
            .collect::<inference::Result<Vec<Prompt>>>()?;
        let vectors = embedder.embed(&prompts, &options, &interrupt)?;
        for (record, vector) in part.iter().zip(vectors) {
            if vector.iter().any(|v| !v.is_finite()) {
                return Err(Failure::failed(format!(
                    "the vector of text {} has an element that is not finite",
                    record.index
                )));
            }
            match args.file() {
                Some(_) => all.extend(vector),
                None => print(record, vector, console)?,
            }
        }
        if let Some(bar) = &bar {
            bar.advance(part.len() as u64);
        }
    }
    drop(bar);
    if let Some(path) = args.file() {
        let width = options
            .dimensions
            .unwrap_or_else(|| embedder.embedding_info().dimensions);
        write(path, [records.len(), width], &all)?;
        console.note(&format!(
            "{} vectors of {width} elements are in {}",
            records.len(),
            path.display()
        ));
    }
    Ok(())
}

fn print(record: &Record, vector: Vec<f32>, console: &mut Console<'_>) -> Result<(), Failure> {
    let mut value = json!({"index": record.index});
    if let Some(id) = &record.id {
        value["id"] = id.clone();
    }
    value["embedding"] = vector.into();
    console.json(&value)
}
