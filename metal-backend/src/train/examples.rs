//! The examples of a run (texts or pairs of replies), and the stream of their batches.

use std::path::Path;

use inference::{CancelToken, Result};

use super::config::{BatchOrder, Method, TrainConfig};
use super::dataset::{Batches, DataDir, Dataset, Example, Pair, Pairs, Rows, Validations};
use super::evaluate::{
    Dpo, EvalOptions, preferences, score, score_pairs, sequences, usable, usable_pairs,
};
use super::plan::bad;
use super::step::{StepReport, Trainer};
use super::train_log::Score;
use crate::engine::Engine;
use crate::text::TextPipeline;

/// The examples for one training objective.
pub(super) enum Examples {
    /// Texts and replies.
    Texts(Vec<Example>),
    /// Pairs of replies.
    Pairs(Vec<Pair>),
}

impl Default for Examples {
    fn default() -> Self {
        Self::Texts(Vec::new())
    }
}

impl Examples {
    /// The number of examples.
    pub fn len(&self) -> usize {
        match self {
            Self::Texts(examples) => examples.len(),
            Self::Pairs(pairs) => pairs.len(),
        }
    }

    /// Scores a model on the examples; `None` when cancelled.
    pub fn score(
        &self,
        engine: &Engine,
        dpo: Dpo,
        options: &EvalOptions,
        step: u64,
        cancel: &CancelToken,
        on_batch: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<Score>> {
        match self {
            Self::Texts(examples) => score(engine, examples, options, step, cancel, on_batch),
            Self::Pairs(pairs) => score_pairs(engine, pairs, dpo, options, step, cancel, on_batch),
        }
    }
}

/// The three parts of a run's data.
#[derive(Default)]
pub(super) struct Parts {
    /// The training examples.
    pub train: Examples,
    /// The validation examples; may be empty.
    pub valid: Examples,
    /// The test examples; may be empty.
    pub test: Examples,
    /// The number of fields in each training line.
    fields: Vec<usize>,
    /// The number of lines in the validation data.
    valid_lines: usize,
}

impl Parts {
    /// Reads the data of a run. Notes about the data are added to `notes`.
    pub fn read(
        dir: &Path,
        text: &TextPipeline,
        config: &TrainConfig,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let reading = config.data_options();
        let no_train = || bad("train.jsonl is missing in the data");
        let no_test = || bad("test is set, and test.jsonl is missing in the data");
        let most = config.max_seq_length;
        match config.method {
            Method::Sft => {
                let data = DataDir::read(dir, text, &reading)?;
                let train = data.train.ok_or_else(no_train)?;
                if config.test && data.test.is_none() {
                    return Err(no_test());
                }
                let mut part = |data: Option<&Dataset>, packed: bool| {
                    let (examples, said) =
                        data.map_or_else(Default::default, |data| usable(data, most, packed));
                    notes.extend(said);
                    Examples::Texts(examples)
                };
                let mlx_lm = config.batch_order == BatchOrder::MlxLm;
                let valid_lines = data.valid.as_ref().map_or(0, |data| data.examples.len());
                let learned = match mlx_lm {
                    // mlx-lm's order includes every line, even lines without targets.
                    true => Examples::Texts(train.examples),
                    false => part(Some(&train), config.pack),
                };
                Ok(Self {
                    train: learned,
                    valid: part(
                        data.valid.as_ref().filter(|_| config.val_batches != 0),
                        false,
                    ),
                    test: part(data.test.as_ref().filter(|_| config.test), false),
                    fields: train.fields,
                    valid_lines,
                })
            }
            Method::Dpo => {
                let data = DataDir::read_pairs(dir, text, &reading)?;
                let train = data.train.ok_or_else(no_train)?;
                if config.test && data.test.is_none() {
                    return Err(no_test());
                }
                let mut part = |data: Option<&Pairs>| {
                    let (pairs, said) =
                        data.map_or_else(Default::default, |data| usable_pairs(data, most));
                    notes.extend(said);
                    Examples::Pairs(pairs)
                };
                Ok(Self {
                    train: part(Some(&train)),
                    valid: part(data.valid.as_ref().filter(|_| config.val_batches != 0)),
                    test: part(data.test.as_ref().filter(|_| config.test)),
                    fields: Vec::new(),
                    valid_lines: 0,
                })
            }
        }
    }

    /// The stream of training batches, from its start.
    pub fn train_stream(&self, config: &TrainConfig) -> Result<Stream<'_>> {
        let options = config.batch_options();
        match &self.train {
            Examples::Texts(examples) if config.batch_order == BatchOrder::MlxLm => {
                let batches = self.valid_lines / config.batch_size.max(1);
                let validations = (config.val_batches != 0 && batches > 0).then(|| {
                    let batches = u32::try_from(batches).unwrap_or(u32::MAX);
                    Validations::new(batches, config.steps_per_eval, config.iters)
                });
                let options = options.with_validations(validations);
                Batches::by_keys(examples, &self.fields, options).map(Stream::Texts)
            }
            Examples::Texts(examples) => Batches::new(examples, options).map(Stream::Texts),
            Examples::Pairs(pairs) => {
                let lengths: Vec<usize> = pairs.iter().map(Pair::len).collect();
                let (rows, most) = (Rows::new(&lengths, &options)?, options.max_seq_length);
                Ok(Stream::Pairs { pairs, rows, most })
            }
        }
    }
}

/// An endless stream of batches.
pub(super) enum Stream<'a> {
    /// Batches of texts.
    Texts(Batches<'a>),
    /// Batches of pairs.
    Pairs {
        /// All pairs.
        pairs: &'a [Pair],
        /// The batches as lists of indices.
        rows: Rows,
        /// The maximum ids per row.
        most: usize,
    },
}

impl Stream<'_> {
    /// The number of examples that are in no batch.
    pub fn left_over(&self) -> usize {
        match self {
            Self::Texts(batches) => batches.left_over(),
            Self::Pairs { rows, .. } => rows.left_over(),
        }
    }

    /// Skips `batches` batches.
    pub fn skip(&mut self, batches: u64) {
        match self {
            Self::Texts(stream) => stream.skip_batches(batches),
            Self::Pairs { rows, .. } => rows.skip_batches(batches),
        }
    }

    /// Trains on the next batch; `None` if it has no targets.
    pub fn step(&mut self, trainer: &mut Trainer, dpo: Dpo) -> Result<Option<StepReport>> {
        match self {
            Self::Texts(batches) => {
                let batch = sequences(&batches.next_batch());
                if batch.is_empty() {
                    return Ok(None);
                }
                trainer.step(&batch).map(Some)
            }
            Self::Pairs { pairs, rows, most } => {
                let batch = rows.next_rows().iter().filter_map(|row| pairs.get(*row));
                let batch = preferences(batch, *most);
                trainer
                    .step_by_preference(&batch, dpo.beta, dpo.label_smoothing)
                    .map(Some)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Batches must equal those of mlx-lm's `train` (`tools/golden/batch_order.py`), with
    /// validations that use the same generator.
    #[test]
    fn batches_are_those_of_mlx_lm_s_train() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let path = format!("{root}/metal-backend/tests/fixtures/batch_order.json");
        let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let model = format!("{root}/{}", golden["model"].as_str().unwrap());
        let text = TextPipeline::from_dir(model, "llama").unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let dir = tempfile::tempdir().unwrap();
            for name in ["train", "valid"] {
                let lines = case[name].as_array().unwrap();
                if !lines.is_empty() {
                    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
                    std::fs::write(dir.path().join(format!("{name}.jsonl")), lines).unwrap();
                }
            }
            let number = |name: &str| case[name].as_i64().unwrap();
            let config = TrainConfig {
                batch_order: BatchOrder::MlxLm,
                batch_size: number("batch_size") as usize,
                iters: number("iters") as u64,
                steps_per_eval: number("steps_per_eval") as u64,
                val_batches: number("val_batches"),
                seed: number("seed") as u32,
                max_seq_length: 64,
                ..TrainConfig::default()
            };
            let parts = Parts::read(dir.path(), &text, &config, &mut Vec::new()).unwrap();
            let expected = case["batches"].as_array().unwrap();
            assert_eq!(expected.len() as u64, config.iters);
            // From the start, and from the batch at which a resumed run continues.
            for skipped in [0, 5] {
                let Stream::Texts(mut batches) = parts.train_stream(&config).unwrap() else {
                    panic!("no texts")
                };
                batches.skip_batches(skipped as u64);
                for (n, expected) in expected.iter().enumerate().skip(skipped) {
                    let batch = batches.next_batch();
                    let rows: Vec<Value> = batch
                        .tokens
                        .chunks(batch.width)
                        .zip(&batch.spans)
                        .map(|(row, [_, length])| row[..*length as usize].into())
                        .collect();
                    assert_eq!(&Value::from(rows), expected, "batch {n} of {case}");
                }
            }
        }
    }
}
