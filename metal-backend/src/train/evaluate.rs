//! Computes mean loss, perplexity and accuracy of a model over the target tokens of a data set. No
//! weights change.

use std::path::{Path, PathBuf};
use std::time::Instant;

use inference::{CancelToken, Error, ErrorKind, LoadOptions, Result};

use super::dataset::{
    BadLine, Batch, BatchOptions, Batches, DataOptions, Dataset, Example, Pair, Pairs, Rows, pack,
};
use super::step::{Preference, Sequence, evaluate_on, evaluate_pairs_on};
use super::train_log::Score;
use crate::engine::Engine;

/// Which part of the data is evaluated, and in which batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EvalOptions {
    /// Examples per batch.
    pub batch_size: usize,
    /// The maximum number of batches, sampled with `seed`; `None` for all.
    pub batches: Option<usize>,
    /// The maximum number of tokens in an example; longer examples are truncated.
    pub max_seq_length: usize,
    /// The seed that selects batches.
    pub seed: u32,
}

impl Default for EvalOptions {
    /// All examples, in batches of four, truncated to 2048 tokens.
    fn default() -> Self {
        Self {
            batch_size: 4,
            batches: None,
            max_seq_length: 2048,
            seed: 0,
        }
    }
}

impl EvalOptions {
    /// Options of batches that together contain every example.
    fn batches(&self) -> BatchOptions {
        BatchOptions::new()
            .with_batch_size(self.batch_size)
            .with_max_seq_length(self.max_seq_length)
            .with_seed(self.seed)
            .with_keep_rest(true)
    }
}

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

/// The rows of a batch in the trainer's form. Packed examples are separated, so that no example
/// attends to another. Rows without targets are dropped.
#[must_use]
pub fn sequences(batch: &Batch) -> Vec<Sequence> {
    let rows = batch.tokens.chunks(batch.width.max(1)).zip(&batch.parts);
    rows.flat_map(|(row, parts)| {
        parts.iter().filter_map(move |part| {
            let ids = row.get(part.range.clone())?.to_vec();
            Some(Sequence::new(ids).with_prompt(part.offset))
        })
    })
    .filter(|sequence| sequence.learned() > 0)
    .collect()
}

/// The examples that have targets after truncation to `max_len` tokens, and notes about the others.
#[must_use]
pub fn usable(data: &Dataset, max_len: usize, packed: bool) -> (Vec<Example>, Vec<String>) {
    let mut notes: Vec<String> = bad_lines(&data.path, &data.bad_lines).into_iter().collect();
    let file = data.path.display();
    let empty = data.nothing_learned(max_len);
    if let Some(first) = empty.first() {
        notes.push(format!(
            "{file}: {} examples are left out, the first in line {first}: their prompts fill all \
             {max_len} tokens",
            empty.len()
        ));
    }
    let cut = data.examples.iter().filter(|e| e.len() > max_len).count();
    if cut > empty.len() {
        notes.push(format!(
            "{file}: {} examples are cut to {max_len} tokens",
            cut - empty.len()
        ));
    }
    let usable = data.examples.iter().filter(|e| e.learned(max_len) > 0);
    let usable: Vec<Example> = usable.cloned().collect();
    let usable = if packed {
        pack(&usable, max_len)
    } else {
        usable
    };
    (usable, notes)
}

/// A note about skipped lines.
fn bad_lines(path: &Path, lines: &[BadLine]) -> Option<String> {
    let first = lines.first()?;
    Some(format!(
        "{}: {} bad lines are left out, the first is line {}: {}",
        path.display(),
        lines.len(),
        first.line,
        first.why
    ))
}

/// The pairs whose replies both have targets after truncation to `max_len` tokens, and notes about
/// the other pairs.
#[must_use]
pub fn usable_pairs(data: &Pairs, max_len: usize) -> (Vec<Pair>, Vec<String>) {
    let mut notes: Vec<String> = bad_lines(&data.path, &data.bad_lines).into_iter().collect();
    let file = data.path.display();
    let (usable, lost): (Vec<_>, Vec<_>) = data
        .pairs
        .iter()
        .zip(&data.lines)
        .partition(|(pair, _)| pair.is_usable(max_len));
    if let Some((_, line)) = lost.first() {
        notes.push(format!(
            "{file}: {} pairs are left out, the first in line {line}: their prompts fill all \
             {max_len} tokens",
            lost.len()
        ));
    }
    let cut = usable
        .iter()
        .filter(|(pair, _)| pair.len() > max_len)
        .count();
    if cut > 0 {
        notes.push(format!("{file}: {cut} pairs are cut to {max_len} tokens"));
    }
    (
        usable.into_iter().map(|(pair, _)| pair.clone()).collect(),
        notes,
    )
}

/// Pairs in the trainer's form, truncated to `max_len` tokens.
#[must_use]
pub fn preferences<'a>(
    pairs: impl IntoIterator<Item = &'a Pair>,
    max_len: usize,
) -> Vec<Preference> {
    let sequence = |example: &Example| {
        let mut ids = example.ids.clone();
        ids.truncate(max_len);
        let offset = example.parts.first().map_or(0, |part| part.offset);
        Sequence::new(ids).with_prompt(offset)
    };
    let one = |pair: &Pair| Preference {
        chosen: sequence(&pair.chosen),
        rejected: sequence(&pair.rejected),
    };
    pairs.into_iter().map(one).collect()
}

/// The parameters of direct preference optimization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dpo {
    /// The weight of the deviation from the base model; above 0.
    pub beta: f32,
    /// The assumed fraction of wrongly ordered pairs; from 0 to below 0.5.
    pub label_smoothing: f32,
}

/// Sums of a score over several batches.
#[derive(Default)]
struct Sums {
    loss: f64,
    /// The number of tokens or pairs over which the mean is computed.
    counted: usize,
    correct: usize,
    tokens: usize,
}

/// Sums scores over `per_epoch` batches, or over the number in the options. `None` when cancelled.
/// `unit` is the name of the counted items.
fn score_batches(
    per_epoch: usize,
    (step, unit): (u64, &str),
    options: &EvalOptions,
    cancel: &CancelToken,
    on_batch: &mut dyn FnMut(u64, u64),
    mut next: impl FnMut() -> Result<Sums>,
) -> Result<Option<Score>> {
    let started = Instant::now();
    let total = options.batches.map_or(per_epoch, |n| n.min(per_epoch));
    let mut sum = Sums::default();
    for done in 0..total {
        if cancel.is_cancelled() {
            return Ok(None);
        }
        let one = next()?;
        sum.loss += one.loss;
        sum.counted += one.counted;
        sum.correct += one.correct;
        sum.tokens += one.tokens;
        on_batch(done as u64 + 1, total as u64);
    }
    let loss = sum.loss / sum.counted.max(1) as f64;
    if sum.counted == 0 || !loss.is_finite() {
        return Err(Error::new(
            ErrorKind::Engine,
            format!(
                "step {step}: the mean loss of {} {unit} is {loss}",
                sum.counted
            ),
        ));
    }
    Ok(Some(Score {
        step,
        loss,
        perplexity: None,
        accuracy: sum.correct as f64 / sum.counted as f64,
        tokens: sum.tokens as u64,
        pairs: None,
        seconds: started.elapsed().as_secs_f64(),
    }))
}

/// Scores a model on pairs; `None` when cancelled.
pub(super) fn score_pairs(
    engine: &Engine,
    pairs: &[Pair],
    dpo: Dpo,
    options: &EvalOptions,
    step: u64,
    cancel: &CancelToken,
    on_batch: &mut dyn FnMut(u64, u64),
) -> Result<Option<Score>> {
    let lengths: Vec<usize> = pairs.iter().map(Pair::len).collect();
    let mut rows = Rows::new(&lengths, &options.batches())?;
    let (per_epoch, mut counted) = (rows.per_epoch(), 0);
    let next = || {
        let batch = rows.next_rows().iter().filter_map(|row| pairs.get(*row));
        let batch = preferences(batch, options.max_seq_length);
        let one = evaluate_pairs_on(engine, &batch, dpo.beta, dpo.label_smoothing)?;
        counted += one.pairs as u64;
        Ok(Sums {
            loss: one.loss,
            counted: one.pairs,
            correct: one.correct,
            tokens: one.tokens,
        })
    };
    let score = score_batches(per_epoch, (step, "pairs"), options, cancel, on_batch, next)?;
    Ok(score.map(|score| Score {
        pairs: Some(counted),
        ..score
    }))
}

/// Scores a model on examples; `None` when cancelled. `on_batch` receives the number of finished
/// batches and the total number.
pub(super) fn score(
    engine: &Engine,
    examples: &[Example],
    options: &EvalOptions,
    step: u64,
    cancel: &CancelToken,
    on_batch: &mut dyn FnMut(u64, u64),
) -> Result<Option<Score>> {
    let mut stream = Batches::new(examples, options.batches())?;
    let per_epoch = stream.per_epoch();
    let next = || {
        let batch = sequences(&stream.next_batch());
        if batch.is_empty() {
            return Ok(Sums::default());
        }
        let one = evaluate_on(engine, &batch)?;
        Ok(Sums {
            loss: one.loss,
            counted: one.tokens,
            correct: one.correct,
            tokens: one.tokens,
        })
    };
    let score = score_batches(per_epoch, (step, "tokens"), options, cancel, on_batch, next)?;
    Ok(score.map(|score| Score {
        perplexity: Some(score.loss.exp()).filter(|p| p.is_finite()),
        ..score
    }))
}

/// The test file of a data set: the path itself, or `test.jsonl` if the path is a directory.
fn test_file(data: &Path) -> Result<PathBuf> {
    let file = if data.is_dir() {
        data.join("test.jsonl")
    } else {
        data.to_owned()
    };
    if !file.exists() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "there is no such file; give a JSONL file, or a directory with test.jsonl",
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

/// Loads a model, with the adapter in the options, and evaluates it. `data` is a JSONL file, or a
/// directory with `test.jsonl`.
///
/// # Errors
/// Errors of loading and of reading data; [`ErrorKind::Cancelled`].
pub fn evaluate(
    model: &Path,
    load: &LoadOptions,
    data: &Path,
    reading: &DataOptions,
    options: &EvalOptions,
    cancel: &CancelToken,
    on_batch: &mut dyn FnMut(u64, u64),
) -> Result<EvalReport> {
    let file = test_file(data)?;
    let model = crate::backend::open(model, load)?;
    let engine = model.engine();
    let data = Dataset::read(&file, engine.text(), reading)?;
    let (examples, notes) = usable(&data, options.max_seq_length, false);
    if examples.is_empty() {
        return Err(nothing_to_predict(options, file));
    }
    let score = score(engine, &examples, options, 0, cancel, on_batch)?.ok_or_else(interrupted)?;
    Ok(EvalReport {
        score,
        examples: examples.len(),
        notes,
    })
}

/// As [`evaluate`], for pairs of replies: compares how well the model with its adapter and the base
/// model prefer the better reply.
///
/// # Errors
/// As [`evaluate`].
#[allow(
    clippy::too_many_arguments,
    reason = "those of `evaluate` and one more"
)]
pub fn evaluate_pairs(
    model: &Path,
    load: &LoadOptions,
    data: &Path,
    reading: &DataOptions,
    dpo: Dpo,
    options: &EvalOptions,
    cancel: &CancelToken,
    on_batch: &mut dyn FnMut(u64, u64),
) -> Result<EvalReport> {
    let file = test_file(data)?;
    let model = crate::backend::open(model, load)?;
    let engine = model.engine();
    let data = Pairs::read(&file, engine.text(), reading)?;
    let (pairs, notes) = usable_pairs(&data, options.max_seq_length);
    if pairs.is_empty() {
        return Err(nothing_to_predict(options, file));
    }
    let score =
        score_pairs(engine, &pairs, dpo, options, 0, cancel, on_batch)?.ok_or_else(interrupted)?;
    Ok(EvalReport {
        score,
        examples: pairs.len(),
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_rows_come_apart_and_cut_ones_end() {
        let examples = [
            Example::new(vec![1, 2, 3], 0),
            Example::new(vec![4, 5, 6, 7], 2),
            Example::new(vec![8; 20], 15),
        ];
        let options = |n| {
            BatchOptions::new()
                .with_batch_size(n)
                .with_max_seq_length(10)
        };
        let packed = pack(&examples[..2], 10);
        let mut stream = Batches::new(&packed, options(1)).unwrap();
        let expected = [
            Sequence::new(vec![1, 2, 3]),
            Sequence::new(vec![4, 5, 6, 7]).with_prompt(2),
        ];
        assert_eq!(sequences(&stream.next_batch()), expected);
        // Truncation removes all targets of the third example.
        let mut stream = Batches::new(&examples, options(3)).unwrap();
        assert_eq!(sequences(&stream.next_batch()), expected);
    }
}
