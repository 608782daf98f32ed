//! The log files of a run: one JSON line per report, and a plot of the losses.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use inference_probe::chart::{Curve, losses};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::step::{PolicyReport, PreferenceReport};
use crate::workdir::replace_by;

/// The log's file name, in the adapter's directory.
pub const LOG_FILE: &str = "train_log.jsonl";
/// The plot's file name, in the adapter's directory.
pub const PLOT_FILE: &str = "loss.svg";
/// The maximum size of a log that is read, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// One line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Entry {
    /// The mean loss since the last report.
    Train(TrainReport),
    /// Validation on `valid.jsonl`.
    Validation(Score),
    /// Test on `test.jsonl` at the end.
    Test(Score),
}

/// Mean values since the last report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainReport {
    /// Batches processed so far.
    pub step: u64,
    /// Mean of the batches' losses, each before its update.
    pub loss: f64,
    /// The learning rate of the last step.
    pub learning_rate: f32,
    /// Steps per second.
    pub steps_per_second: f64,
    /// Target tokens per second.
    pub tokens_per_second: f64,
    /// Target tokens processed so far.
    pub trained_tokens: u64,
    /// Peak device memory, in bytes.
    pub peak_memory_bytes: u64,
    /// Gradient norm of the last update, if gradients are clipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_norm: Option<f32>,
    /// The rewards of the last batch of preferences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<PreferenceReport>,
    /// The rewards of the last batch of generated replies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyReport>,
}

/// The score of the model on validation or test data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The number of batches processed before the evaluation.
    pub step: u64,
    /// Mean cross-entropy of the targets, in nats; for preferences, the mean loss per pair.
    pub loss: f64,
    /// `exp(loss)`; absent on overflow, and for preferences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Fraction of targets that have the greatest logit. For preferences: the fraction of pairs
    /// whose better reply has the greater reward.
    pub accuracy: f64,
    /// The number of targets.
    pub tokens: u64,
    /// The number of pairs; `None` if the data are not preferences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<u64>,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Score {
    /// The score as a JSON object, as `mlx train --json` and `mlx evaluate --json` print it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut value = json!({
            "loss": self.loss,
            "perplexity": self.perplexity,
            "accuracy": self.accuracy,
            "tokens": self.tokens,
            "seconds": self.seconds,
        });
        if let Some(pairs) = self.pairs {
            value["pairs"] = pairs.into();
        }
        value
    }
}

impl Entry {
    /// The number of batches processed before this entry.
    #[must_use]
    pub fn step(&self) -> u64 {
        match self {
            Self::Train(report) => report.step,
            Self::Validation(score) | Self::Test(score) => score.step,
        }
    }
}

/// The log of a run, stored in a file and in memory.
pub struct TrainLog {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
}

fn failed(path: &Path, doing: &str, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot {doing}"))
        .with_path(path)
        .with_source(e)
}

impl TrainLog {
    /// Opens the log in a directory. Keeps existing entries up to step `keep`; a resumed run writes
    /// the later entries again. Drops all entries if `keep` is `None`.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn open(dir: &Path, keep: Option<u64>) -> Result<Self> {
        Self::open_by(dir, dir, keep)
    }

    /// Opens the log as [`Self::open`], with temporary files in `work`.
    pub(super) fn open_by(work: &Path, dir: &Path, keep: Option<u64>) -> Result<Self> {
        let path = dir.join(LOG_FILE);
        let mut entries = Vec::new();
        if let Some(step) = keep
            && path.is_file()
        {
            let mut text = Vec::new();
            File::open(&path)
                .and_then(|f| f.take(MAX_BYTES).read_to_end(&mut text))
                .map_err(|e| failed(&path, "read the log", e))?;
            // A crash may have truncated the last line, so a line that cannot be parsed is dropped.
            let lines = text.split(|b| *b == b'\n');
            entries = lines
                .filter_map(|line| serde_json::from_slice::<Entry>(line).ok())
                .filter(|entry| entry.step() <= step && !matches!(entry, Entry::Test(_)))
                .collect();
        }
        let mut text = String::new();
        for entry in &entries {
            text.push_str(&line(entry)?);
        }
        replace_by(work, &path, text.as_bytes())?;
        let file = OpenOptions::new()
            .append(true)
            .open(&path)
            .map_err(|e| failed(&path, "open the log", e))?;
        Ok(Self {
            path,
            file,
            entries,
        })
    }

    /// Writes an entry as one line.
    ///
    /// # Errors
    /// If writing fails.
    pub fn add(&mut self, entry: Entry) -> Result<()> {
        let line = line(&entry)?;
        self.file
            .write_all(line.as_bytes())
            .map_err(|e| failed(&self.path, "write the log", e))?;
        self.entries.push(entry);
        Ok(())
    }

    /// The entries written so far.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

fn line(entry: &Entry) -> Result<String> {
    let text = serde_json::to_string(entry).map_err(|e| {
        Error::new(ErrorKind::Engine, "a line of the log cannot be written").with_source(e)
    })?;
    Ok(text + "\n")
}

/// Draws the losses of a log as an SVG image. Does nothing if there are fewer than two steps.
///
/// # Errors
/// If the file cannot be written.
pub fn plot(entries: &[Entry], path: &Path) -> Result<()> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty());
    plot_by(dir.unwrap_or(Path::new(".")), entries, path)
}

/// Draws as [`plot`], with the temporary file in `work`.
pub(super) fn plot_by(work: &Path, entries: &[Entry], path: &Path) -> Result<()> {
    let curve = |name: &str, point_of: fn(&Entry) -> Option<(u64, f64)>| {
        let points = entries.iter().filter_map(point_of);
        let finite = points.filter(|(_, loss)| loss.is_finite());
        Curve {
            name: name.to_owned(),
            points: finite.map(|(step, loss)| (step as f64, loss)).collect(),
        }
    };
    let curves = [
        curve("training", |entry| match entry {
            Entry::Train(report) => Some((report.step, report.loss)),
            _ => None,
        }),
        curve("validation", |entry| match entry {
            Entry::Validation(score) => Some((score.step, score.loss)),
            _ => None,
        }),
    ];
    let steps = curves.iter().flat_map(|curve| &curve.points);
    if steps.map(|point| point.0).fold(0.0, f64::max) == 0.0 {
        return Ok(());
    }
    let picture = losses("Loss", "loss (nats per token)", &curves);
    replace_by(work, path, picture.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: u64, loss: f64) -> Entry {
        Entry::Train(TrainReport {
            step,
            loss,
            learning_rate: 1e-5,
            steps_per_second: 2.0,
            tokens_per_second: 100.0,
            trained_tokens: step * 50,
            peak_memory_bytes: 1,
            gradient_norm: None,
            rewards: None,
            policy: None,
        })
    }

    fn score(step: u64, loss: f64) -> Score {
        Score {
            step,
            loss,
            perplexity: Some(loss.exp()),
            accuracy: 0.5,
            tokens: 10,
            pairs: None,
            seconds: 0.1,
        }
    }

    #[test]
    fn a_run_that_goes_on_writes_no_line_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOG_FILE);
        let mut log = TrainLog::open(dir.path(), None).unwrap();
        log.add(Entry::Validation(score(0, 3.0))).unwrap();
        for step in 1..=4 {
            log.add(report(step, 2.0)).unwrap();
        }
        log.add(Entry::Test(score(2, 1.0))).unwrap();
        drop(log);
        // A crash might leave the last line incomplete.
        let mut text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 6);
        text.push_str("{\"event\": \"train\", \"st");
        std::fs::write(&path, text).unwrap();
        let mut log = TrainLog::open(dir.path(), Some(2)).unwrap();
        assert_eq!(log.entries().len(), 3);
        log.add(report(3, 1.0)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let entries: Vec<Entry> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(entries, log.entries());
        let steps: Vec<u64> = entries.iter().map(Entry::step).collect();
        assert_eq!(steps, [0, 1, 2, 3]);
        assert!(
            TrainLog::open(dir.path(), None)
                .unwrap()
                .entries()
                .is_empty()
        );
    }

    #[test]
    fn a_line_is_read_to_the_bit() {
        let mut loss = 2.0 / 3.0;
        for step in 0..2000 {
            // Values with many digits, as in real losses and rates, must survive a round trip.
            loss = (loss * 1.618_033_988_749_895 + 0.1) % 7.0;
            let first = line(&report(step, loss)).unwrap();
            let again: Entry = serde_json::from_str(&first).unwrap();
            assert_eq!(line(&again).unwrap(), first);
        }
    }

    #[test]
    fn losses_are_drawn() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PLOT_FILE);
        plot(&[], &path).unwrap();
        plot(&[Entry::Validation(score(0, 3.0))], &path).unwrap();
        assert!(!path.exists());
        let mut entries = vec![Entry::Validation(score(0, 3.0))];
        entries.extend((1..20).map(|n| report(n, 3.0 / n as f64)));
        entries.push(report(20, f64::NAN));
        plot(&entries, &path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
        for part in ["training", "validation", "<path", ">step<"] {
            assert!(picture.contains(part), "{part}");
        }
        assert!(!picture.contains("NaN"));
    }

    /// Returns the texts of an image that have an attribute, each with its vertical position.
    fn texts<'a>(picture: &'a str, attribute: &str) -> Vec<(f64, &'a str)> {
        let texts = picture.split("<text ").skip(1).filter_map(|rest| {
            let (head, rest) = rest.split_once('>')?;
            let y = head.split_once("y=\"")?.1.split_once('"')?.0;
            let text = rest.split_once("</text>")?.0.trim();
            head.contains(attribute).then(|| (y.parse().unwrap(), text))
        });
        texts.collect()
    }

    #[test]
    fn marks_are_whole_steps_and_no_curve_crosses_the_legend() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PLOT_FILE);
        for steps in [1, 3, 4, 7, 20, 1000] {
            // A rising curve ends in the upper right corner of the plot, where the legend could
            // overlap it.
            let mut entries: Vec<_> = (1..=steps).map(|n| report(n, n as f64)).collect();
            entries.push(Entry::Validation(score(steps, 1.0)));
            plot(&entries, &path).unwrap();
            let picture = std::fs::read_to_string(&path).unwrap();
            let marks = texts(&picture, "text-anchor=\"middle\"");
            let marks: Vec<_> = marks.iter().map(|(_, text)| *text).collect();
            let numbers = marks
                .iter()
                .filter(|text| text.starts_with(|c: char| c.is_ascii_digit()));
            let integers = numbers.clone().filter(|text| text.parse::<u64>().is_ok());
            assert!(integers.count() >= 2, "{steps}: {marks:?}");
            assert!(
                numbers.clone().all(|text| text.parse::<u64>().is_ok()),
                "{steps}: {marks:?}"
            );
            // The legend must be to the right of all curves.
            let legend: Vec<f64> = picture
                .split("<text x=\"")
                .skip(1)
                .filter(|text| text.contains(">training<") || text.contains(">validation<"))
                .map(|text| text.split_once('"').unwrap().0.parse().unwrap())
                .collect();
            assert_eq!(legend.len(), 2, "{picture}");
            let curves = picture.split("<path d=\"").skip(1);
            for curve in curves.map(|rest| rest.split_once('"').unwrap().0) {
                for point in curve.split(['M', 'L']).skip(1) {
                    let x: f64 = point.split_once(' ').unwrap().0.parse().unwrap();
                    assert!(legend.iter().all(|left| x < *left), "{steps}: {curve}");
                }
            }
        }
    }
}
