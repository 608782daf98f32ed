//! The resume state of a run in one file: trainable parameters, optimizer state, and position. The
//! file is written atomically. `run.rs` runs the training; `adapter/` writes adapters that other
//! programs can read.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, eval, io};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::replies::Replies;
use super::{StepReport, Trainer};
use crate::adapter::Params;
use crate::checkpoint::files::invalid;
use crate::error::engine;

/// The file name, in the adapter's directory.
pub const STATE_FILE: &str = "training_state.safetensors";
/// The version of the file format. Files of other versions are an error.
const VERSION: u32 = 1;
/// The metadata key of [`Place`].
const KEY: &str = "run";
const PARAM: &str = "param/";
const OPTIMIZER: &str = "optimizer/";
const REPLIES: &str = "replies/";

/// Sums of losses since the last report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Sum of the batches' mean losses.
    pub loss: f64,
    /// The number of batches.
    pub batches: u64,
    /// Target tokens processed.
    pub tokens: u64,
}

/// The validation with the lowest loss, except the validation before the first step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Batches processed before the validation.
    pub step: u64,
    /// The loss of the validation.
    pub loss: f64,
    /// The number of validations in sequence that did not lower the best loss by more than the
    /// threshold.
    pub since: u64,
}

impl Best {
    /// Adds a validation with `(step, loss)`. Returns whether its loss is the lowest so far.
    pub(super) fn follow(
        best: &mut Option<Self>,
        (step, loss): (u64, f64),
        threshold: f64,
    ) -> bool {
        let Some(best) = best else {
            let since = 0;
            *best = Some(Self { step, loss, since });
            return true;
        };
        best.since = match loss < best.loss - threshold {
            true => 0,
            false => best.since + 1,
        };
        let is_lowest = loss < best.loss;
        if is_lowest {
            (best.step, best.loss) = (step, loss);
        }
        is_lowest
    }
}

/// The position of a run. The order of batches derives from the seed and [`Self::drawn`], dropout
/// from the seed and [`Self::step`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    version: u32,
    /// Batches processed.
    pub step: u64,
    /// Batches taken from the data.
    pub drawn: u64,
    /// Updates of the optimizer.
    pub updates: u64,
    /// Target tokens processed.
    pub tokens: u64,
    /// Seconds of training, without validations and saves.
    pub seconds: f64,
    /// Counts since the last report.
    pub window: Window,
    /// Whether the validation after the last step was canceled and must be repeated.
    pub validation_due: bool,
    /// The validation with the lowest loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// The options that must not change, because they determine the run's result.
    pub settings: Value,
}

impl Place {
    /// Returns the position at the start of a run.
    #[must_use]
    pub fn start(settings: Value) -> Self {
        Self {
            version: VERSION,
            step: 0,
            drawn: 0,
            updates: 0,
            tokens: 0,
            seconds: 0.0,
            window: Window::default(),
            validation_due: true,
            best: None,
            settings,
        }
    }

    /// Adds a processed batch to the counts.
    pub(super) fn count(&mut self, report: &StepReport, seconds: f64) {
        self.step += 1;
        self.updates += u64::from(report.updated);
        self.tokens += report.tokens as u64;
        self.seconds += seconds;
        self.window.loss += f64::from(report.loss);
        self.window.batches += 1;
        self.window.tokens += report.tokens as u64;
    }

    /// Returns an error if the settings differ from `now`, and names the first difference.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`], with both values.
    pub fn same_settings(&self, now: &Value) -> Result<()> {
        // The saved settings were parsed from text, which may turn an integer into a float. So
        // `now` is converted to text and parsed, too.
        let now: Value = serde_json::from_str(&now.to_string()).map_err(|e| {
            Error::new(ErrorKind::Engine, "the settings cannot be read back").with_source(e)
        })?;
        let empty = serde_json::Map::new();
        let (then, now) = (
            self.settings.as_object().unwrap_or(&empty),
            now.as_object().unwrap_or(&empty),
        );
        for name in now.keys().chain(then.keys()) {
            let (old, new) = (then.get(name), now.get(name));
            if old != new {
                let shown = |v: Option<&Value>| v.map_or(String::from("absent"), Value::to_string);
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "the run to resume had {name} {}, this one has {}; resume with the same, or begin a new \
                         run from its adapter (resume_adapter_file)",
                        shown(old),
                        shown(new)
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Writes the state of `trainer` to a directory, with the generated replies that the next step
/// uses.
///
/// # Errors
/// If writing fails. An earlier file remains unchanged.
pub(super) fn save(
    trainer: &Trainer,
    place: &Place,
    replies: &Params,
    dir: &Path,
) -> Result<PathBuf> {
    let path = dir.join(STATE_FILE);
    let params = trainer.params();
    let optimizer = trainer.optimizer().state();
    let arrays = [(PARAM, &params), (OPTIMIZER, optimizer), (REPLIES, replies)];
    let arrays = arrays.into_iter().flat_map(|(prefix, all)| {
        all.iter()
            .map(move |(name, a)| (format!("{prefix}{name}"), a))
    });
    let text = serde_json::to_string(place)
        .map_err(|e| Error::new(ErrorKind::Engine, "the run cannot be described").with_source(e))?;
    let written = trainer
        .engine()
        .scope(|| io::save_safetensors(&path, arrays, &[(KEY, &text)]));
    written.map_err(|e| {
        Error::new(ErrorKind::Io, "cannot write the state of the run")
            .with_path(&path)
            .with_source(e)
    })?;
    Ok(path)
}

/// Restores `trainer` and `replies` from the file in a directory, and returns the position.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] if there is no file, or its settings differ from `settings`;
/// [`ErrorKind::InvalidModel`] if the file is damaged.
pub(super) fn load(
    trainer: &mut Trainer,
    replies: &mut Replies,
    settings: &Value,
    dir: &Path,
) -> Result<Place> {
    let path = dir.join(STATE_FILE);
    if !path.is_file() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("there is no {STATE_FILE} here to resume from; begin without resume"),
        )
        .with_path(dir));
    }
    let loaded = trainer
        .engine()
        .scope(|| io::load_safetensors(&path))
        .map_err(|e| invalid(&path, "the tensors cannot be read").with_source(e))?;
    let text = loaded
        .metadata
        .get(KEY)
        .ok_or_else(|| invalid(&path, "it does not say which step the run has reached"))?;
    let place: Place = serde_json::from_str(text)
        .map_err(|e| invalid(&path, "the state of the run cannot be read").with_source(e))?;
    if place.version != VERSION {
        return Err(invalid(
            &path,
            format!(
                "it has form {}; this program reads {VERSION}",
                place.version
            ),
        ));
    }
    place
        .same_settings(settings)
        .map_err(|e| e.with_path(&path))?;
    let (mut params, mut optimizer, mut kept) = (Params::new(), Params::new(), Params::new());
    for (name, array) in loaded.arrays {
        if let Some(name) = name.strip_prefix(PARAM) {
            params.insert(name.to_owned(), array);
        } else if let Some(name) = name.strip_prefix(OPTIMIZER) {
            optimizer.insert(name.to_owned(), array);
        } else if let Some(name) = name.strip_prefix(REPLIES) {
            kept.insert(name.to_owned(), array);
        } else {
            return Err(invalid(
                &path,
                format!("`{name}` is not part of a run's state"),
            ));
        }
    }
    let all = params.values().chain(optimizer.values());
    let all = all.chain(kept.values());
    let all: Vec<&Array> = all.collect();
    trainer
        .engine()
        .scope(|| eval(all))
        .map_err(engine("resume"))?;
    trainer
        .engine()
        .scope(|| replies.restore(&kept))
        .ok_or_else(|| invalid(&path, "the generated replies cannot be read"))?;
    trainer
        .restore(&params, optimizer, place.updates, place.step)
        .map_err(|e| invalid(&path, "it does not fit the model").with_source(e))?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_that_differ_are_named() {
        let place = Place::start(json!({"seed": 1, "rank": 8}));
        place.same_settings(&json!({"rank": 8, "seed": 1})).unwrap();
        let error = |now: Value| place.same_settings(&now).unwrap_err().to_string();
        assert!(error(json!({"seed": 2, "rank": 8})).contains("seed 1, this one has 2"));
        assert!(error(json!({"seed": 1})).contains("rank 8, this one has absent"));
    }

    #[test]
    fn the_best_validation_is_followed() {
        let mut best = None;
        let mut follow = |step, loss, threshold| {
            let lowest = Best::follow(&mut best, (step, loss), threshold);
            (lowest, best.unwrap().step, best.unwrap().since)
        };
        assert_eq!(follow(1, 3.0, 0.0), (true, 1, 0));
        assert_eq!(follow(2, 2.0, 0.0), (true, 2, 0));
        assert_eq!(follow(3, 2.0, 0.0), (false, 2, 1));
        assert_eq!(follow(4, 2.5, 0.0), (false, 2, 2));
        // The loss is lower, but by less than the threshold: it becomes the best loss, and `since`
        // grows.
        assert_eq!(follow(5, 1.9, 0.5), (true, 5, 3));
        assert_eq!(follow(6, 1.0, 0.5), (true, 6, 0));
        assert_eq!(follow(7, f64::NAN, 0.0), (false, 6, 1));
    }

    #[test]
    fn a_place_is_read_as_it_was_written() {
        let mut place = Place::start(json!({"seed": 1}));
        (place.step, place.seconds, place.window.loss) = (7, 0.1, 1.0 / 3.0);
        let text = serde_json::to_string(&place).unwrap();
        assert_eq!(serde_json::from_str::<Place>(&text).unwrap(), place);
    }
}
