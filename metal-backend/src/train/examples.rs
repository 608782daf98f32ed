//! The examples of a run, read for its objective, and the stream of batches of these examples.

use std::path::Path;

use inference::{CancelToken, Result};

use super::config::{BatchOrder, Method, TrainConfig};
use super::dataset::related::Encoding;
use super::dataset::{
    Batches, DataDir, Dataset, Example, Pair, Pairs, PromptLine, Prompts, RelatedFile, Rows,
    Validations, Verdict, Verdicts,
};
use super::objective::Objective;
use super::plan::bad;
use super::replies::Replies;
use super::scoring::{
    EvalOptions, Judge, bad_lines, judged, preferences, related, sequences, usable, usable_pairs,
    usable_verdicts,
};
use super::step::{RelatedTexts, StepReport, Trainer};
use super::train_log::Score;
use crate::engine::Engine;

/// The examples for one training objective.
pub(super) enum Examples {
    /// Texts and replies.
    Texts(Vec<Example>),
    /// Pairs of replies.
    Pairs(Vec<Pair>),
    /// Replies with verdicts.
    Verdicts(Vec<Verdict>),
    /// Prompts to which the model replies.
    Prompts(Vec<PromptLine>),
    /// Texts that belong together.
    Related(Vec<RelatedTexts>),
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
            Self::Verdicts(verdicts) => verdicts.len(),
            Self::Prompts(prompts) => prompts.len(),
            Self::Related(examples) => examples.len(),
        }
    }

    /// Reads the usable examples of a file for the method of `config`. Adds notes about unusable
    /// examples to `notes`.
    pub fn read(
        path: &Path,
        engine: &Engine,
        config: &TrainConfig,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let (reading, text) = (config.data_options(), engine.text());
        let most = config.max_seq_length;
        Ok(match config.method {
            Method::Sft => of_texts(&Dataset::read(path, text, &reading)?, most, false, notes),
            Method::Dpo | Method::Orpo => {
                of_pairs(&Pairs::read(path, text, &reading)?, most, notes)
            }
            Method::Kto => of_verdicts(&Verdicts::read(path, text, &reading)?, most, notes),
            Method::Grpo => return Err(bad("generated replies are not evaluated")),
            Method::Contrastive => {
                let file = RelatedFile::read(path, &encoding(engine, config), &reading)?;
                of_related(file, config, notes)?
            }
        })
    }

    /// Scores a model on the examples; `None` if `cancel` is set.
    pub fn score(
        &self,
        engine: &Engine,
        objective: Objective,
        options: &EvalOptions,
        step: u64,
        cancel: &CancelToken,
        on_batch: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<Score>> {
        let mut judge = Judge {
            engine,
            options,
            step,
            cancel,
            on_batch,
        };
        match self {
            Self::Texts(examples) => judge.texts(examples),
            Self::Pairs(pairs) => judge.pairs(pairs, objective),
            Self::Verdicts(verdicts) => judge.verdicts(verdicts, objective),
            Self::Prompts(_) => Err(bad("generated replies are not evaluated")),
            Self::Related(examples) => judge.related(examples, objective),
        }
    }
}

fn of_texts(data: &Dataset, most: usize, packed: bool, notes: &mut Vec<String>) -> Examples {
    let (examples, said) = usable(data, most, packed);
    notes.extend(said);
    Examples::Texts(examples)
}

fn of_pairs(data: &Pairs, most: usize, notes: &mut Vec<String>) -> Examples {
    let (pairs, said) = usable_pairs(data, most);
    notes.extend(said);
    Examples::Pairs(pairs)
}

fn of_verdicts(data: &Verdicts, most: usize, notes: &mut Vec<String>) -> Examples {
    let (verdicts, said) = usable_verdicts(data, most);
    notes.extend(said);
    Examples::Verdicts(verdicts)
}

/// Returns the prompts of at most `most` tokens. A longer prompt is dropped, because truncation
/// would change its meaning.
fn short(data: Prompts, most: usize, notes: &mut Vec<String>) -> Vec<PromptLine> {
    let all = data.prompts.len();
    let mut prompts = data.prompts;
    prompts.retain(|prompt| prompt.ids.len() <= most);
    if prompts.len() < all {
        notes.push(format!(
            "{}: {} prompts of more than {most} tokens are left out",
            data.path.display(),
            all - prompts.len()
        ));
    }
    prompts
}

/// Returns an error if an example would be alone in its batch and has no negatives, because its
/// loss would be 0.
fn of_related(
    file: RelatedFile,
    config: &TrainConfig,
    notes: &mut Vec<String>,
) -> Result<Examples> {
    let lonely = config.batch_size == 1 || file.examples.len() == 1;
    if lonely && file.examples.iter().any(|one| one.negatives.is_empty()) {
        let message = "an example without \"negative\" is alone in its batch, so nothing is to be \
                       told apart; use a batch_size of at least 2 and more lines, or give negatives";
        return Err(bad(message).with_path(file.path));
    }
    notes.extend(bad_lines(&file.path, &file.bad_lines));
    Ok(Examples::Related(file.examples))
}

/// Returns how an encoder's texts become token ids.
fn encoding<'a>(engine: &'a Engine, config: &TrainConfig) -> Encoding<'a> {
    Encoding {
        sentence: engine.sentence(),
        text: engine.text(),
        anchor_prompt: config.anchor_prompt_name.clone(),
        positive_prompt: config.positive_prompt_name.clone(),
        max_len: config.max_seq_length,
    }
}

/// The data of a run: training, validation and test.
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
    /// Reads the data of a run. Adds notes about the data to `notes`.
    pub fn read(
        dir: &Path,
        engine: &Engine,
        config: &TrainConfig,
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let (reading, text) = (config.data_options(), engine.text());
        let most = config.max_seq_length;
        match config.method {
            Method::Sft => {
                let data = DataDir::read(dir, text, &reading)?;
                let mlx_lm = config.batch_order == BatchOrder::MlxLm;
                let fields = data.train.as_ref().map(|train| train.fields.clone());
                let valid_lines = data.valid.as_ref().map_or(0, |data| data.examples.len());
                let parts = Self::of(data, config, |data, in_training| {
                    Ok(match in_training && mlx_lm {
                        // mlx-lm's order includes every line, even lines without targets.
                        true => Examples::Texts(data.examples),
                        false => of_texts(&data, most, in_training && config.pack, notes),
                    })
                })?;
                Ok(Self {
                    fields: fields.unwrap_or_default(),
                    valid_lines,
                    ..parts
                })
            }
            Method::Dpo | Method::Orpo => {
                let data = DataDir::read_pairs(dir, text, &reading)?;
                Self::of(data, config, |data, _| Ok(of_pairs(&data, most, notes)))
            }
            Method::Kto => {
                let data = DataDir::read_verdicts(dir, text, &reading)?;
                Self::of(data, config, |data, _| Ok(of_verdicts(&data, most, notes)))
            }
            Method::Grpo => {
                let data = DataDir::read_prompts(dir, text, &reading)?;
                if data.valid.is_some() {
                    let note = "valid.jsonl is not used, because grpo has no validations";
                    notes.push(String::from(note));
                }
                Self::of(data, config, |data, in_training| {
                    if !in_training {
                        return Ok(Examples::default());
                    }
                    notes.extend(bad_lines(&data.path, &data.bad_lines));
                    Ok(Examples::Prompts(short(data, most, notes)))
                })
            }
            Method::Contrastive => {
                let data = DataDir::read_related(dir, &encoding(engine, config), &reading)?;
                Self::of(data, config, |data, _| of_related(data, config, notes))
            }
        }
    }

    /// Converts the data that the run uses. `examples` converts a file; its second argument says
    /// whether the file is for training.
    fn of<T>(
        data: DataDir<T>,
        config: &TrainConfig,
        mut examples: impl FnMut(T, bool) -> Result<Examples>,
    ) -> Result<Self> {
        let train = data
            .train
            .ok_or_else(|| bad("train.jsonl is missing in the data"))?;
        if config.test && data.test.is_none() {
            return Err(bad("test is set, and test.jsonl is missing in the data"));
        }
        let train = examples(train, true)?;
        let mut part = |data: Option<T>, used: bool| match data {
            Some(data) if used => examples(data, false),
            _ => Ok(Examples::default()),
        };
        Ok(Self {
            train,
            valid: part(data.valid, config.val_batches != 0)?,
            test: part(data.test, config.test)?,
            ..Self::default()
        })
    }

    /// Returns the stream of training batches, from its start.
    pub fn train_stream(&self, config: &TrainConfig) -> Result<Stream<'_>> {
        let options = config.batch_options();
        let most = options.max_seq_length;
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
                let rows = Rows::new(&lengths, &options)?;
                Ok(Stream::Items(self, rows, most))
            }
            Examples::Verdicts(verdicts) => {
                let lengths: Vec<usize> = verdicts.iter().map(|one| one.example.len()).collect();
                let rows = Rows::new(&lengths, &options)?;
                Ok(Stream::Items(self, rows, most))
            }
            Examples::Prompts(prompts) => {
                let lengths: Vec<usize> = prompts.iter().map(|one| one.ids.len()).collect();
                let rows = Rows::new(&lengths, &options)?;
                Ok(Stream::Items(self, rows, most))
            }
            Examples::Related(examples) => {
                let lengths: Vec<usize> = examples.iter().map(RelatedTexts::tokens).collect();
                let rows = Rows::new(&lengths, &options)?;
                Ok(Stream::Items(self, rows, most))
            }
        }
    }
}

/// An endless stream of batches.
pub(super) enum Stream<'a> {
    /// Batches of texts.
    Texts(Batches<'a>),
    /// Batches of other training examples: the data, lists of row indices, and the maximum number
    /// of tokens per row.
    Items(&'a Parts, Rows, usize),
}

impl Stream<'_> {
    /// Returns the number of examples that are in no batch.
    pub fn left_over(&self) -> usize {
        match self {
            Self::Texts(batches) => batches.left_over(),
            Self::Items(_, rows, _) => rows.left_over(),
        }
    }

    /// Skips `batches` batches.
    pub fn skip(&mut self, batches: u64) {
        match self {
            Self::Texts(stream) => stream.skip_batches(batches),
            Self::Items(_, rows, _) => rows.skip_batches(batches),
        }
    }

    /// Trains on the next batch. Returns the number of batches taken from the data, and the report;
    /// the report is `None` if the batch has no targets.
    pub fn step(
        &mut self,
        trainer: &mut Trainer,
        objective: Objective,
        replies: &mut Replies,
    ) -> Result<(u64, Option<StepReport>)> {
        let (parts, rows, most) = match self {
            Self::Texts(batches) => {
                let batch = sequences(&batches.next_batch());
                if batch.is_empty() {
                    return Ok((1, None));
                }
                return trainer.step(&batch).map(|report| (1, Some(report)));
            }
            Self::Items(parts, rows, most) => (parts, rows, *most),
        };
        if let (Examples::Prompts(prompts), Objective::Grpo(grpo, sampling)) =
            (&parts.train, objective)
        {
            let next = || {
                let rows = rows.next_rows();
                rows.iter().filter_map(|row| prompts.get(*row)).collect()
            };
            let (drawn, report) = replies.step(trainer, (grpo, sampling), next)?;
            return Ok((drawn, Some(report)));
        }
        let rows = rows.next_rows();
        match (&parts.train, objective) {
            (Examples::Pairs(pairs), objective) => {
                let batch = preferences(rows.iter().filter_map(|row| pairs.get(*row)), most);
                match objective {
                    Objective::Dpo {
                        beta,
                        label_smoothing,
                    } => trainer.step_by_preference(&batch, beta, label_smoothing),
                    Objective::Orpo { beta, learn_prompt } => {
                        trainer.step_by_odds_ratio(&batch, beta, learn_prompt)
                    }
                    other => Err(other.mismatch("pairs of replies")),
                }
            }
            (Examples::Verdicts(verdicts), Objective::Kto(options)) => {
                let batch = rows.iter().filter_map(|row| verdicts.get(*row));
                trainer.step_by_verdict(&judged(batch, most), options)
            }
            (Examples::Related(examples), Objective::Contrastive { scale }) => {
                trainer.step_by_similarity(&related(examples, rows), scale)
            }
            (_, other) => Err(other.mismatch("these examples")),
        }
        .map(|report| (1, Some(report)))
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
        let options = inference::LoadOptions::new().with_backend("cpu");
        let (engine, _model) = crate::backend::open(model.as_ref(), &options).unwrap();
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
            let parts = Parts::read(dir.path(), &engine, &config, &mut Vec::new()).unwrap();
            let expected = case["batches"].as_array().unwrap();
            assert_eq!(expected.len() as u64, config.iters);
            // A run starts at the first batch, or resumes after five batches.
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
