//! A training run, from its options to its files: data, steps, reports, validations and saves. A
//! resumed run has the same result as an uninterrupted run. `step.rs` implements a step.

use std::path::Path;
use std::time::Instant;

use inference::{Adapter as _, CancelToken, Error, ErrorKind, LoadOptions, Result};
use mlx_rs_core::memory;

use super::config::{Method, TrainConfig};
use super::dataset::files;
use super::examples::{Examples, Parts, Stream};
pub use super::progress::{BestScore, Event, Summary};
use super::replies::Replies;
use super::report::Reports;
use super::reward::Reward;
pub use super::run_dir::{BEST_DIR, Start, check_start};
use super::run_dir::{keep_numbered, publish, remove_earlier};
use super::scoring::EvalOptions;
use super::settings::settings;
use super::state::{self, Best, Place};
use super::step::{StepReport, Trainer};
use super::together::Together;
use super::train_log::{Entry, PLOT_FILE, Score, TrainLog, TrainReport, plot_by};
use super::{begin, plan};
use crate::adapter::{CONFIG_FILE, WEIGHTS_FILE};
use crate::workdir::{WorkDir, replace_by};

/// The config file in which a run's options are saved, in the adapter's directory.
pub const OPTIONS_FILE: &str = "training_config.yaml";

/// The name prefix of a run's hidden directories.
const WORK_PREFIX: &str = ".mlx-train-";

/// A run that is ready to start or resume.
pub struct Run {
    trainer: Trainer,
    config: TrainConfig,
    parts: Parts,
    notes: Vec<String>,
    place: Place,
    start: Start,
    /// The hidden directory for unfinished files, inside the adapter's directory.
    work: WorkDir,
    /// The group for data-parallel training.
    together: Option<Together>,
    stopped_early: bool,
    /// Generated replies, and the reward that judges them.
    replies: Replies,
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

impl Run {
    /// Loads a model and the data, and applies an adapter. The adapter is new, or comes from
    /// [`TrainConfig::resume_adapter_file`]. With [`Start::Resume`], the run in
    /// [`TrainConfig::adapter_path`] continues with its adapter; the options must be the same.
    ///
    /// # Errors
    /// Errors of loading and of reading data; [`ErrorKind::InvalidOption`], with the option;
    /// [`ErrorKind::Io`] if [`check_start`] returns an error for the directory.
    pub fn prepare(
        model: &Path,
        load: &LoadOptions,
        mut config: TrainConfig,
        start: Start,
    ) -> Result<Self> {
        plan::check(&config)?;
        let tuning = plan::tuning(&config)?;
        let data = config
            .data
            .clone()
            .ok_or_else(|| bad("data is missing; give a directory with train.jsonl"))?;
        if !data.is_dir() && !files::is_file(&data) {
            return Err(
                bad("there is no such directory; data is a directory with train.jsonl")
                    .with_path(data),
            );
        }
        let dir = &config.adapter_path;
        let io = |e: std::io::Error| {
            Error::new(ErrorKind::Io, "cannot make the directory")
                .with_path(dir)
                .with_source(e)
        };
        check_start(dir, start)?;
        // If the directory cannot be written, the error must occur now, not after hours of
        // training.
        std::fs::create_dir_all(dir).map_err(io)?;
        let work = WorkDir::new(dir, WORK_PREFIX).map_err(io)?;

        let mut load = load.clone();
        let staged = config
            .resume_adapter_file
            .as_deref()
            .map(|path| begin::stage(path, &config))
            .transpose()?;
        load.adapter_path = staged.as_ref().map(|s| s.path().to_owned());
        let (engine, model) = crate::backend::open(model, &load)?;
        config.settle(&engine)?;
        if let (Some(_), Some(adapter)) = (&staged, engine.adapter()) {
            begin::agree(&mut config, &adapter, engine.passes())?;
        }
        let kind = plan::kind(&config);
        let note = staged.as_ref().and_then(|staged| staged.note());
        let mut notes: Vec<String> = note.map(str::to_owned).into_iter().collect();
        let parts = Parts::read(&data, &engine, &config, &mut notes)?;
        if config.early_stopping_patience.is_some() && parts.valid.len() == 0 {
            return Err(bad("early_stopping_patience needs valid.jsonl in the data"));
        }
        let batches = parts.train_stream(&config)?;
        if batches.left_over() > 0 {
            notes.push(format!(
                "{} of {} examples do not fill a batch and are left out, as in mlx-lm",
                batches.left_over(),
                parts.train.len()
            ));
        }
        let rest = config.iters % config.grad_accumulation_steps as u64;
        if rest > 0 {
            notes.push(format!(
                "the gradients of the last {rest} batches are too few for a step and are dropped"
            ));
        }
        let lora = plan::lora(&config, &engine.layer_names())?;
        let mut trainer = Trainer::new((engine, model), &lora, kind, tuning)?;
        let settings = settings(&trainer, &config, &parts.train)?;
        let mut replies = Replies::default();
        let place = if start == Start::Resume {
            state::load(&mut trainer, &mut replies, &settings, &config.adapter_path)?
        } else {
            Place::start(settings)
        };
        Ok(Self {
            trainer,
            config,
            parts,
            notes,
            place,
            start,
            work,
            together: None,
            stopped_early: false,
            replies,
        })
    }

    /// Makes this process train on its share of each batch, and averages gradients over a group of
    /// processes. All processes must be prepared with the same options and data.
    ///
    /// Each process writes the same files to its own [`TrainConfig::adapter_path`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] if a batch has fewer rows than there are processes.
    pub fn with_others(mut self, together: Together) -> Result<Self> {
        let method = self.config.method;
        if matches!(method, Method::Contrastive | Method::Grpo) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("method {} runs in one process", method.name()),
            ));
        }
        let (rows, size) = (self.config.batch_size, together.size());
        if rows < size {
            return Err(bad(format!(
                "batch_size is {rows}, too small to be divided among {size} processes; it must be \
                 at least {size}"
            )));
        }
        self.trainer = self.trainer.with_others(together);
        self.together = Some(together);
        Ok(self)
    }

    /// Judges generated replies with `reward`, instead of [`TrainConfig::reward_command`].
    #[must_use]
    pub fn with_reward(mut self, reward: impl Reward + 'static) -> Self {
        self.replies.judge_with(reward);
        self
    }

    /// Notes about the data and the options, to show before training.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The number of batches processed.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.place.step
    }

    /// The options.
    #[must_use]
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The trainer, whose model serves requests with its current parameters.
    #[must_use]
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// Returns the number of examples for training, validation and test.
    #[must_use]
    pub fn examples(&self) -> [usize; 3] {
        [&self.parts.train, &self.parts.valid, &self.parts.test].map(Examples::len)
    }

    /// Trains until [`TrainConfig::iters`] batches or until `cancel` is set, and saves. `on_event`
    /// receives the progress events.
    ///
    /// # Errors
    /// If a step or a save fails. Earlier saves remain, and the run can be resumed from them.
    pub fn train(
        &mut self,
        cancel: &CancelToken,
        on_event: &mut dyn FnMut(&Event<'_>),
    ) -> Result<Summary> {
        if self.config.method == Method::Grpo {
            self.replies.start(self.config.reward_command.as_deref())?;
        }
        let dir = self.config.adapter_path.clone();
        let keep = (self.start == Start::Resume).then_some(self.place.step);
        if self.start == Start::Overwrite {
            remove_earlier(&dir)?;
        }
        let log = TrainLog::open_by(self.work.path(), &dir, keep)?;
        let reports = Reports::open(
            &self.config.report_to,
            self.work.path(),
            &dir,
            log.entries(),
            self.place.step,
        )?;
        let mut log = Told { log, reports };
        let options = serde_json::to_vec_pretty(&self.config).map_err(|e| {
            Error::new(ErrorKind::Engine, "the options cannot be written").with_source(e)
        })?;
        replace_by(self.work.path(), &dir.join(OPTIONS_FILE), &options)?;
        // The peak is only shown to the user, so an error does not matter.
        let _ = memory::reset_peak();

        let parts = std::mem::take(&mut self.parts);
        let done = self.steps(&parts, &mut log, cancel, on_event);
        self.parts = parts;
        let interrupted = !done?;

        if !interrupted && self.parts.test.len() > 0 {
            let options = self.eval_options(self.config.test_batches);
            if let Some(score) = self.evaluate(&self.parts.test, &options, cancel, on_event)? {
                on_event(&Event::Test(&score));
                log.add(Entry::Test(score))?;
            }
        }
        Ok(self.summary(log.log.entries(), interrupted))
    }

    /// Runs the steps. Returns whether the run was completed.
    fn steps(
        &mut self,
        parts: &Parts,
        log: &mut Told,
        cancel: &CancelToken,
        on_event: &mut dyn FnMut(&Event<'_>),
    ) -> Result<bool> {
        let (iters, accumulation) = (
            self.config.iters,
            self.config.grad_accumulation_steps as u64,
        );
        let mut batches: Stream<'_> = parts.train_stream(&self.config)?;
        batches.skip(self.place.drawn);
        if self.place.validation_due {
            self.validate(&parts.valid, log, cancel, on_event)?;
            if self.ends_early()? {
                return self.stop_early(&log.log, on_event);
            }
        }
        let objective = self.config.objective();
        let (mut since, mut due, mut ending) = (Since::default(), false, false);
        while self.place.step < iters {
            // The resume state does not contain accumulated gradients, so a run can stop only after
            // an update.
            let between = self.place.step.is_multiple_of(accumulation);
            let cancelled = cancel.is_cancelled();
            // All processes must stop together, because the others would wait forever for one that
            // stopped.
            let cancelled = match &self.together {
                Some(together) => together.any(cancelled)?,
                None => cancelled,
            };
            if cancelled && between {
                self.save(&log.log, on_event)?;
                return Ok(false);
            }
            let started = Instant::now();
            let (trainer, replies) = (&mut self.trainer, &mut self.replies);
            let (drawn, report) = batches.step(trainer, objective, replies)?;
            self.place.drawn += drawn;
            let Some(report) = report else { continue };
            let seconds = started.elapsed().as_secs_f64();
            self.place.count(&report, seconds);
            since.count(&report, seconds);
            let step = self.place.step;
            on_event(&Event::Step {
                step,
                iters,
                report: &report,
                tokens_per_second: since.tokens as f64 / since.seconds.max(1e-9),
                memory: memory::active().unwrap_or(0) as u64,
            });
            let last = step == iters;
            if last || step.is_multiple_of(self.config.steps_per_report) {
                let step_report = self.report(&report, &since);
                on_event(&Event::Train(&step_report));
                log.add(Entry::Train(step_report))?;
                (since, self.place.window) = (Since::default(), state::Window::default());
            }
            if last || step.is_multiple_of(self.config.steps_per_eval) {
                // A resumed run repeats a canceled validation, and must repeat it with the same
                // model. But a run stops only after an update, which changes the model. So while
                // gradients are being accumulated, the validation ignores cancellation.
                let going_on = CancelToken::new();
                let between = step.is_multiple_of(accumulation);
                let cancel = if between { cancel } else { &going_on };
                self.validate(&parts.valid, log, cancel, on_event)?;
                ending |= self.ends_early()?;
            }
            // A run can end only after an update.
            let stops = ending && step.is_multiple_of(accumulation);
            if stops && !last {
                return self.stop_early(&log.log, on_event);
            }
            due |= step.is_multiple_of(self.config.save_every);
            if last || (due && step.is_multiple_of(accumulation)) {
                self.save(&log.log, on_event)?;
                due = false;
            }
        }
        Ok(true)
    }

    fn report(&self, last: &StepReport, since: &Since) -> TrainReport {
        let window = &self.place.window;
        TrainReport {
            step: self.place.step,
            loss: window.loss / window.batches.max(1) as f64,
            learning_rate: last.rate,
            steps_per_second: since.steps as f64 / since.seconds.max(1e-9),
            tokens_per_second: since.tokens as f64 / since.seconds.max(1e-9),
            trained_tokens: self.place.tokens,
            peak_memory_bytes: memory::peak().unwrap_or(0) as u64,
            gradient_norm: last.norm,
            rewards: last.preference,
            policy: last.policy,
        }
    }

    fn eval_options(&self, batches: i64) -> EvalOptions {
        EvalOptions {
            batch_size: self.config.batch_size,
            batches: usize::try_from(batches).ok(),
            max_seq_length: self.config.max_seq_length,
            seed: self.config.seed,
        }
    }

    fn evaluate(
        &self,
        examples: &Examples,
        options: &EvalOptions,
        cancel: &CancelToken,
        on_event: &mut dyn FnMut(&Event<'_>),
    ) -> Result<Option<Score>> {
        let (engine, step) = (self.trainer.engine(), self.place.step);
        let mut judging = |done, total| on_event(&Event::Judging { done, total });
        let objective = self.config.objective();
        examples.score(engine, objective, options, step, cancel, &mut judging)
    }

    fn validate(
        &mut self,
        valid: &Examples,
        log: &mut Told,
        cancel: &CancelToken,
        on_event: &mut dyn FnMut(&Event<'_>),
    ) -> Result<()> {
        self.place.validation_due = valid.len() > 0;
        if valid.len() == 0 {
            return Ok(());
        }
        let options = self.eval_options(self.config.val_batches);
        if let Some(score) = self.evaluate(valid, &options, cancel, on_event)? {
            on_event(&Event::Validation(&score));
            let (step, loss) = (score.step, score.loss);
            log.add(Entry::Validation(score))?;
            self.place.validation_due = false;
            let threshold = self.config.early_stopping_threshold;
            // The validation before the first step scores the base model, so there is no adapter to
            // save.
            if step > 0 && Best::follow(&mut self.place.best, (step, loss), threshold) {
                self.keep_best(on_event)?;
            }
        }
        Ok(())
    }

    /// Writes the adapter of the validation with the lowest loss.
    fn keep_best(&self, on_event: &mut dyn FnMut(&Event<'_>)) -> Result<()> {
        let dir = self.config.adapter_path.join(BEST_DIR);
        std::fs::create_dir_all(&dir).map_err(|e| {
            Error::new(ErrorKind::Io, "cannot make the directory")
                .with_path(&dir)
                .with_source(e)
        })?;
        let work = self.work.path();
        self.trainer.save(work)?;
        publish(work, &dir, CONFIG_FILE)?;
        publish(work, &dir, WEIGHTS_FILE)?;
        let step = self.place.step;
        on_event(&Event::Best { step, dir: &dir });
        Ok(())
    }

    /// Saves the state, and ends the run before its last step. Always returns `true`, because the
    /// run is then complete.
    fn stop_early(&mut self, log: &TrainLog, on_event: &mut dyn FnMut(&Event<'_>)) -> Result<bool> {
        let step = self.place.step;
        on_event(&Event::StoppedEarly { step });
        self.save(log, on_event)?;
        self.stopped_early = true;
        Ok(true)
    }

    /// Whether too many validations in sequence did not lower the loss enough.
    fn ends_early(&self) -> Result<bool> {
        let Some(patience) = self.config.early_stopping_patience else {
            return Ok(false);
        };
        let best = self.place.best.as_ref();
        let enough = best.is_some_and(|best| best.since >= patience);
        match &self.together {
            // Rounding may differ between machines, but all processes must end at the same step.
            Some(together) => together.any(enough),
            None => Ok(enough),
        }
    }

    /// Saves the adapter, then a copy with the step in its name (as in mlx-lm), then the resume
    /// state. With this order, the state is never newer than the adapter. Returns an error if the
    /// adapter contains a value that is not finite.
    fn save(&self, log: &TrainLog, on_event: &mut dyn FnMut(&Event<'_>)) -> Result<()> {
        let dir = &self.config.adapter_path;
        let step = self.place.step;
        let work = self.work.path();
        // Training checks only losses, so the result of the last update is not checked yet.
        if let Some(name) = self.trainer.not_finite()? {
            let message = format!(
                "step {step}: {name} is not finite any more, and the run ends; what was saved \
                 before stays; lower the learning rate, or clip the gradients (max_grad_norm)"
            );
            return Err(Error::new(ErrorKind::Engine, message).with_path(dir));
        }
        self.trainer.save(work)?;
        publish(work, dir, CONFIG_FILE)?;
        publish(work, dir, WEIGHTS_FILE)?;
        keep_numbered(work, dir, step)?;
        let iterations = self.config.num_iterations;
        let replies = self.trainer.engine().scope(|| {
            let replies = &self.replies;
            replies.to_arrays(step, &self.trainer, iterations)
        })?;
        state::save(&self.trainer, &self.place, &replies, work)?;
        publish(work, dir, state::STATE_FILE)?;
        plot_by(work, log.entries(), &dir.join(PLOT_FILE))?;
        on_event(&Event::Saved { step, dir });
        Ok(())
    }

    fn summary(&self, entries: &[Entry], interrupted: bool) -> Summary {
        let validations = || {
            entries.iter().filter_map(|entry| match entry {
                Entry::Validation(score) => Some(score.clone()),
                _ => None,
            })
        };
        let train_loss = entries.iter().rev().find_map(|entry| match entry {
            Entry::Train(report) => Some(report.loss),
            _ => None,
        });
        let test = entries.iter().rev().find_map(|entry| match entry {
            Entry::Test(score) => Some(score.clone()),
            _ => None,
        });
        let best = self.place.best.as_ref().map(|best| BestScore {
            step: best.step,
            loss: best.loss,
            adapter_path: self.config.adapter_path.join(BEST_DIR),
        });
        Summary {
            step: self.place.step,
            interrupted,
            stopped_early: self.stopped_early,
            best,
            train_loss,
            base: validations().find(|score| score.step == 0),
            validation: validations().next_back(),
            test,
            trained_tokens: self.place.tokens,
            trainable_parameters: self.trainer.adapter().num_parameters(),
            seconds: self.place.seconds,
            peak_memory: memory::peak().unwrap_or(0) as u64,
        }
    }
}

/// The outputs of a run: log and reports.
struct Told {
    log: TrainLog,
    reports: Reports,
}

impl Told {
    fn add(&mut self, entry: Entry) -> Result<()> {
        self.reports.add(&entry)?;
        self.log.add(entry)
    }
}

/// Counts of this process since the last report.
#[derive(Default)]
struct Since {
    steps: u64,
    tokens: u64,
    seconds: f64,
}

impl Since {
    fn count(&mut self, report: &StepReport, seconds: f64) {
        self.steps += 1;
        self.tokens += report.tokens as u64;
        self.seconds += seconds;
    }
}
