//! Scores a model on examples: batches, sums over batches, and the choice of usable examples.

use std::path::Path;
use std::time::Instant;

use inference::{CancelToken, Error, ErrorKind, Result};

use super::dataset::{
    BadLine, Batch, BatchOptions, Batches, Dataset, Example, Order, Pair, Pairs, Rows, Verdict,
    Verdicts, pack,
};
use super::objective::Objective;
use super::step::{
    ItemEvaluation, JudgedReply, Preference, RelatedTexts, Sequence, evaluate_odds_ratio_on,
    evaluate_on, evaluate_pairs_on, evaluate_similarity_on, evaluate_verdicts_on,
};
use super::train_log::Score;
use crate::engine::Engine;

/// Selects and groups the data for an evaluation.
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
    /// Returns options for batches that together contain every example.
    fn batches(&self) -> BatchOptions {
        BatchOptions::new()
            .with_batch_size(self.batch_size)
            .with_max_seq_length(self.max_seq_length)
            .with_seed(self.seed)
            .with_keep_rest(true)
    }
}

/// Converts the rows of a batch to the trainer's type. Packed examples become separate sequences,
/// so that no example attends to another. Drops rows without targets.
#[must_use]
pub(super) fn sequences(batch: &Batch) -> Vec<Sequence> {
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

/// Returns the examples that have targets after truncation to `max_len` tokens, and notes about the
/// dropped examples.
#[must_use]
pub(super) fn usable(data: &Dataset, max_len: usize, packed: bool) -> (Vec<Example>, Vec<String>) {
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

/// Returns a note about skipped lines; `None` if there are none.
pub(super) fn bad_lines(path: &Path, lines: &[BadLine]) -> Option<String> {
    let first = lines.first()?;
    Some(format!(
        "{}: {} bad lines are left out, the first is line {}: {}",
        path.display(),
        lines.len(),
        first.line,
        first.why
    ))
}

/// Returns the pairs whose replies both have targets after truncation to `max_len` tokens, and
/// notes about the dropped pairs.
#[must_use]
pub(super) fn usable_pairs(data: &Pairs, max_len: usize) -> (Vec<Pair>, Vec<String>) {
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

/// Converts pairs to the trainer's type, truncated to `max_len` tokens.
#[must_use]
pub(super) fn preferences<'a>(
    pairs: impl IntoIterator<Item = &'a Pair>,
    max_len: usize,
) -> Vec<Preference> {
    let one = |pair: &Pair| Preference {
        chosen: truncated(&pair.chosen, max_len),
        rejected: truncated(&pair.rejected, max_len),
    };
    pairs.into_iter().map(one).collect()
}

/// Converts an example to the trainer's type, truncated to `max_len` tokens.
fn truncated(example: &Example, max_len: usize) -> Sequence {
    let mut ids = example.ids.clone();
    ids.truncate(max_len);
    let offset = example.parts.first().map_or(0, |part| part.offset);
    Sequence::new(ids).with_prompt(offset)
}

/// Returns the replies with verdicts that have targets after truncation to `max_len` tokens, and
/// notes about the dropped replies.
#[must_use]
pub(super) fn usable_verdicts(data: &Verdicts, max_len: usize) -> (Vec<Verdict>, Vec<String>) {
    let mut notes: Vec<String> = bad_lines(&data.path, &data.bad_lines).into_iter().collect();
    let file = data.path.display();
    let (usable, lost): (Vec<_>, Vec<_>) = data
        .verdicts
        .iter()
        .zip(&data.lines)
        .partition(|(one, _)| one.example.learned(max_len) > 0);
    if let Some((_, line)) = lost.first() {
        notes.push(format!(
            "{file}: {} replies are left out, the first in line {line}: their prompts fill all \
             {max_len} tokens",
            lost.len()
        ));
    }
    let cut = usable.iter().filter(|(one, _)| one.example.len() > max_len);
    let cut = cut.count();
    if cut > 0 {
        notes.push(format!("{file}: {cut} replies are cut to {max_len} tokens"));
    }
    let usable: Vec<Verdict> = usable.into_iter().map(|(one, _)| one.clone()).collect();
    let good = usable.iter().filter(|one| one.desirable).count();
    if good == 0 || good == usable.len() {
        let all = if good == 0 { "bad" } else { "good" };
        notes.push(format!("{file}: all replies are {all}; kto needs both"));
    }
    (usable, notes)
}

/// Converts replies with verdicts to the trainer's type, truncated to `max_len` tokens.
#[must_use]
pub(super) fn judged<'a>(
    verdicts: impl IntoIterator<Item = &'a Verdict>,
    max_len: usize,
) -> Vec<JudgedReply> {
    let one = |verdict: &Verdict| JudgedReply {
        reply: truncated(&verdict.example, max_len),
        desirable: verdict.desirable,
    };
    verdicts.into_iter().map(one).collect()
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

/// Scores a model on examples, batch by batch.
pub(super) struct Judge<'a> {
    pub engine: &'a Engine,
    pub options: &'a EvalOptions,
    /// The number of batches trained so far, for the report.
    pub step: u64,
    pub cancel: &'a CancelToken,
    /// Receives the number of finished batches and the total number.
    pub on_batch: &'a mut dyn FnMut(u64, u64),
}

impl Judge<'_> {
    /// Sums scores over `per_epoch` batches, or over the number in the options. Returns `None` if
    /// `cancel` is set. `unit` is the name of the counted items.
    fn batches(
        &mut self,
        per_epoch: usize,
        unit: &str,
        mut next: impl FnMut() -> Result<Sums>,
    ) -> Result<Option<Score>> {
        let started = Instant::now();
        let total = self.options.batches.map_or(per_epoch, |n| n.min(per_epoch));
        let mut sum = Sums::default();
        for done in 0..total {
            if self.cancel.is_cancelled() {
                return Ok(None);
            }
            let one = next()?;
            sum.loss += one.loss;
            sum.counted += one.counted;
            sum.correct += one.correct;
            sum.tokens += one.tokens;
            (self.on_batch)(done as u64 + 1, total as u64);
        }
        let loss = sum.loss / sum.counted.max(1) as f64;
        if sum.counted == 0 || !loss.is_finite() {
            return Err(Error::new(
                ErrorKind::Engine,
                format!(
                    "step {}: the mean loss of {} {unit} is {loss}",
                    self.step, sum.counted
                ),
            ));
        }
        Ok(Some(Score {
            step: self.step,
            loss,
            perplexity: None,
            accuracy: sum.correct as f64 / sum.counted as f64,
            tokens: sum.tokens as u64,
            pairs: (unit == PAIRS).then_some(sum.counted as u64),
            seconds: started.elapsed().as_secs_f64(),
        }))
    }

    /// Scores texts and replies; `None` if `cancel` is set.
    pub fn texts(&mut self, examples: &[Example]) -> Result<Option<Score>> {
        let engine = self.engine;
        let mut stream = Batches::new(examples, self.options.batches())?;
        let score = self.batches(stream.per_epoch(), "tokens", || {
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
        })?;
        Ok(score.map(|score| Score {
            perplexity: Some(score.loss.exp()).filter(|p| p.is_finite()),
            ..score
        }))
    }

    /// Scores examples that yield one result each, in the batches of `rows`; `None` if `cancel` is
    /// set.
    fn items(
        &mut self,
        mut rows: Rows,
        mut of_rows: impl FnMut(&[usize]) -> Result<ItemEvaluation>,
    ) -> Result<Option<Score>> {
        self.batches(rows.per_epoch(), PAIRS, || {
            let one = of_rows(rows.next_rows())?;
            Ok(Sums {
                loss: one.loss,
                counted: one.items,
                correct: one.correct,
                tokens: one.tokens,
            })
        })
    }

    /// Scores pairs of replies; `None` if `cancel` is set.
    pub fn pairs(&mut self, pairs: &[Pair], objective: Objective) -> Result<Option<Score>> {
        let lengths: Vec<usize> = pairs.iter().map(Pair::len).collect();
        let rows = Rows::new(&lengths, &self.options.batches())?;
        let (engine, most) = (self.engine, self.options.max_seq_length);
        self.items(rows, |rows| {
            let batch = preferences(rows.iter().filter_map(|row| pairs.get(*row)), most);
            match objective {
                Objective::Dpo {
                    beta,
                    label_smoothing,
                } => evaluate_pairs_on(engine, &batch, beta, label_smoothing),
                Objective::Orpo { beta, learn_prompt } => {
                    evaluate_odds_ratio_on(engine, &batch, beta, learn_prompt)
                }
                other => Err(other.mismatch("pairs of replies")),
            }
        })
    }

    /// Scores replies with verdicts; `None` if `cancel` is set. Drops a last batch of one reply,
    /// because the batch has no other reply to pair its prompt with.
    pub fn verdicts(
        &mut self,
        verdicts: &[Verdict],
        objective: Objective,
    ) -> Result<Option<Score>> {
        let Objective::Kto(kto) = objective else {
            return Err(objective.mismatch("replies with verdicts"));
        };
        let alone = verdicts.len() % self.options.batch_size.max(1) == 1;
        let verdicts = match verdicts.split_last() {
            Some((_, rest)) if alone && !rest.is_empty() => rest,
            _ => verdicts,
        };
        let lengths: Vec<usize> = verdicts.iter().map(|one| one.example.len()).collect();
        let rows = Rows::new(&lengths, &self.options.batches())?;
        let (engine, most) = (self.engine, self.options.max_seq_length);
        self.items(rows, |rows| {
            let batch = judged(rows.iter().filter_map(|row| verdicts.get(*row)), most);
            evaluate_verdicts_on(engine, &batch, kto)
        })
    }

    /// Scores texts that belong together; `None` if `cancel` is set. Batches follow the file's
    /// order. Drops a last batch of one example without negatives, because its loss is 0.
    pub fn related(
        &mut self,
        examples: &[RelatedTexts],
        objective: Objective,
    ) -> Result<Option<Score>> {
        let Objective::Contrastive { scale } = objective else {
            return Err(objective.mismatch("texts that belong together"));
        };
        let alone = examples.len() % self.options.batch_size.max(1) == 1;
        let examples = match examples.split_last() {
            Some((last, rest)) if alone && last.negatives.is_empty() && !rest.is_empty() => rest,
            _ => examples,
        };
        let options = self.options.batches().with_order(Order::AsRead);
        let rows = Rows::new(&vec![0; examples.len()], &options)?;
        let engine = self.engine;
        self.items(rows, |rows| {
            evaluate_similarity_on(engine, &related(examples, rows), scale)
        })
    }
}

/// The unit of examples that yield one result each.
const PAIRS: &str = "pairs";

/// Returns the examples of a batch.
pub(super) fn related(examples: &[RelatedTexts], rows: &[usize]) -> Vec<RelatedTexts> {
    rows.iter()
        .filter_map(|row| examples.get(*row))
        .cloned()
        .collect()
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
