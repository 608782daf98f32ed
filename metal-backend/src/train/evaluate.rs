//! Computes mean loss, perplexity and accuracy of a model over the target tokens of a data set. It
//! does not change weights.

use std::path::{Path, PathBuf};

use inference::{CancelToken, Error, ErrorKind, LoadOptions, Result};

use super::config::TrainConfig;
use super::dataset::files;
use super::examples::Examples;
pub use super::scoring::EvalOptions;
use super::train_log::Score;

/// The result of [`evaluate`].
#[derive(Debug, Clone, PartialEq)]
pub struct EvalReport {
    /// The metrics.
    pub score: Score,
    /// The number of evaluated examples.
    pub examples: usize,
    /// Notes on the data for the user, such as truncated examples.
    pub notes: Vec<String>,
}

/// Returns the test file of a data set: the path itself, or `test.jsonl` if the path is a
/// directory.
fn test_file(data: &Path) -> Result<PathBuf> {
    let file = if data.is_dir() {
        files::part(data, "test")?.unwrap_or_else(|| data.join("test.jsonl"))
    } else {
        data.to_owned()
    };
    if !file.exists() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "there is no such file; give a JSONL or Parquet file, or a directory with test.jsonl",
        )
        .with_path(file));
    }
    Ok(file)
}

fn nothing_to_predict(options: &EvalOptions, file: PathBuf) -> Error {
    Error::new(
        ErrorKind::InvalidOption,
        format!(
            "no example has a token to predict within {} tokens",
            options.max_seq_length
        ),
    )
    .with_path(file)
}

fn interrupted() -> Error {
    Error::new(ErrorKind::Cancelled, "the evaluation was interrupted")
}

/// Loads a model, with the adapter in the options, and evaluates it. `data` is a file, or a
/// directory with a test file. `config` selects the method, its parameters, and how lines are read.
///
/// # Errors
/// Errors of loading and of reading data; [`ErrorKind::Unsupported`] if the method does not fit the
/// model; [`ErrorKind::Cancelled`].
pub fn evaluate(
    model: &Path,
    load: &LoadOptions,
    data: &Path,
    config: &TrainConfig,
    options: &EvalOptions,
    cancel: &CancelToken,
    on_batch: &mut dyn FnMut(u64, u64),
) -> Result<EvalReport> {
    let file = test_file(data)?;
    let (engine, _model) = crate::backend::open(model, load)?;
    let mut config = config.clone();
    config.max_seq_length = options.max_seq_length;
    config.settle(&engine)?;
    let mut notes = Vec::new();
    let examples = Examples::read(&file, &engine, &config, &mut notes)?;
    if examples.len() == 0 {
        return Err(nothing_to_predict(options, file));
    }
    let score = examples
        .score(&engine, config.objective(), options, 0, cancel, on_batch)?
        .ok_or_else(interrupted)?;
    Ok(EvalReport {
        score,
        examples: examples.len(),
        notes,
    })
}
