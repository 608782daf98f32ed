//! Writes the metrics of a run to files for other programs: JSON lines with mlx-lm's names, and
//! TensorBoard event files.
//!
//! `train_log` writes `train_log.jsonl`, which a resumed run reads.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use inference::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::step::PolicyReport;
use super::train_log::Entry;
use crate::workdir::replace_by;

/// The name of the file with JSON lines, in the adapter's directory.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// The name prefix of TensorBoard files.
pub const EVENTS_PREFIX: &str = "events.out.tfevents.";

/// A file format for the metrics of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Report {
    /// [`METRICS_FILE`]: one JSON object per report, with the names that mlx-lm uses for its
    /// trackers.
    Jsonl,
    /// An event file of TensorBoard: scalars for each step.
    TensorBoard,
}

impl std::str::FromStr for Report {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "jsonl" => Ok(Self::Jsonl),
            "tensorboard" => Ok(Self::TensorBoard),
            other => Err(format!(
                "report_to {other:?} is unknown; there are jsonl and tensorboard"
            )),
        }
    }
}

/// Parses `report_to`: a list of names, or comma-separated names as in mlx-lm.
pub(super) mod names {
    use super::Report;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Names {
        None(()),
        Text(String),
        List(Vec<String>),
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(reader: D) -> Result<Vec<Report>, D::Error> {
        let names = match Names::deserialize(reader) {
            Ok(Names::None(())) => Vec::new(),
            Ok(Names::Text(text)) => text.split(',').map(str::to_owned).collect(),
            Ok(Names::List(list)) => list,
            Err(_) => {
                return Err(D::Error::custom(
                    "report_to must be names: jsonl, tensorboard",
                ));
            }
        };
        let mut reports = Vec::new();
        for name in names.iter().filter(|name| !name.trim().is_empty()) {
            let report = name.parse().map_err(D::Error::custom)?;
            if !reports.contains(&report) {
                reports.push(report);
            }
        }
        Ok(reports)
    }

    pub fn serialize<S: Serializer>(reports: &[Report], writer: S) -> Result<S::Ok, S::Error> {
        reports.serialize(writer)
    }
}

fn failed(path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write the report: {e}"))
        .with_path(path)
        .with_source(e)
}

/// The report files of a run.
#[derive(Default)]
pub(super) struct Reports {
    metrics: Option<(PathBuf, File)>,
    events: Option<(PathBuf, File)>,
}

impl Reports {
    /// Opens the files in `dir`, for a run that continues after `step`. `entries` are the earlier
    /// reports.
    pub fn open(
        reports: &[Report],
        work: &Path,
        dir: &Path,
        entries: &[Entry],
        step: u64,
    ) -> Result<Self> {
        let mut open = Self::default();
        if reports.contains(&Report::Jsonl) {
            let path = dir.join(METRICS_FILE);
            let text: String = entries.iter().map(|entry| line(&metrics(entry))).collect();
            replace_by(work, &path, text.as_bytes())?;
            let file = OpenOptions::new().append(true).open(&path);
            let file = file.map_err(|e| failed(&path, e))?;
            open.metrics = Some((path, file));
        }
        if reports.contains(&Report::TensorBoard) {
            let name = format!("{EVENTS_PREFIX}{:010}.{}", now().0, std::process::id());
            let path = dir.join(name);
            let mut file = OpenOptions::new()
                .append(true)
                .create(true)
                .open(&path)
                .map_err(|e| failed(&path, e))?;
            let mut bytes = record(&event(None, &text_field(3, b"brain.Event:2")));
            // Tells TensorBoard to discard later steps of an earlier process.
            bytes.extend(record(&event(Some(step), &text_field(7, &[0x08, 1]))));
            file.write_all(&bytes).map_err(|e| failed(&path, e))?;
            open.events = Some((path, file));
        }
        Ok(open)
    }

    /// Writes one report.
    pub fn add(&mut self, entry: &Entry) -> Result<()> {
        if let Some((path, file)) = &mut self.metrics {
            file.write_all(line(&metrics(entry)).as_bytes())
                .map_err(|e| failed(path, e))?;
        }
        if let Some((path, file)) = &mut self.events {
            let summary: Vec<u8> = scalars(entry)
                .into_iter()
                .flat_map(|(tag, value)| scalar(&tag, value))
                .collect();
            let bytes = record(&event(Some(entry.step()), &text_field(5, &summary)));
            file.write_all(&bytes).map_err(|e| failed(path, e))?;
        }
        Ok(())
    }
}

fn line(value: &Value) -> String {
    format!("{value}\n")
}

/// Converts a report to the names that mlx-lm's callbacks receive. Memory is in GB (10^9 bytes).
fn metrics(entry: &Entry) -> Value {
    match entry {
        Entry::Train(report) => {
            let mut value = json!({
                "iteration": report.step,
                "train_loss": report.loss,
                "learning_rate": report.learning_rate,
                "iterations_per_second": report.steps_per_second,
                "tokens_per_second": report.tokens_per_second,
                "trained_tokens": report.trained_tokens,
                "peak_memory": report.peak_memory_bytes as f64 / 1e9,
            });
            if let Some(norm) = report.gradient_norm {
                value["gradient_norm"] = json!(norm);
            }
            if let Some(rewards) = &report.rewards {
                value["chosen_reward"] = json!(rewards.chosen);
                value["rejected_reward"] = json!(rewards.rejected);
                value["reward_accuracy"] = json!(rewards.accuracy);
            }
            if let Some(policy) = &report.policy {
                for (name, number) in named(policy) {
                    value[name] = json!(number);
                }
            }
            value
        }
        Entry::Validation(score) => json!({
            "iteration": score.step,
            "val_loss": score.loss,
            "val_accuracy": score.accuracy,
            "val_time": score.seconds,
        }),
        Entry::Test(score) => json!({
            "iteration": score.step,
            "test_loss": score.loss,
            "test_accuracy": score.accuracy,
            "test_time": score.seconds,
        }),
    }
}

/// Returns the metrics of generated replies, with TRL's names.
fn named(policy: &PolicyReport) -> Vec<(&'static str, f32)> {
    let mut all = vec![
        ("reward", policy.reward),
        ("reward_std", policy.reward_std),
        ("completion_length", policy.completion_length),
    ];
    all.extend(policy.kl.map(|kl| ("kl", kl)));
    let clipped = policy.clip_ratio;
    all.extend(clipped.map(|ratio| ("clip_ratio", ratio)));
    all
}

/// Returns a report as named scalars.
fn scalars(entry: &Entry) -> Vec<(String, f32)> {
    let mut all = Vec::new();
    let mut add = |tag: &str, value: f64| all.push((tag.to_owned(), value as f32));
    match entry {
        Entry::Train(report) => {
            add("train/loss", report.loss);
            add("train/learning_rate", f64::from(report.learning_rate));
            add("train/steps_per_second", report.steps_per_second);
            add("train/tokens_per_second", report.tokens_per_second);
            add("train/peak_memory_bytes", report.peak_memory_bytes as f64);
            if let Some(norm) = report.gradient_norm {
                add("train/gradient_norm", f64::from(norm));
            }
            if let Some(rewards) = &report.rewards {
                add("rewards/chosen", f64::from(rewards.chosen));
                add("rewards/rejected", f64::from(rewards.rejected));
                add("rewards/accuracy", f64::from(rewards.accuracy));
            }
            if let Some(policy) = &report.policy {
                for (name, number) in named(policy) {
                    add(&format!("train/{name}"), f64::from(number));
                }
            }
        }
        Entry::Validation(score) | Entry::Test(score) => {
            let name = match entry {
                Entry::Validation(_) => "validation",
                _ => "test",
            };
            add(&format!("{name}/loss"), score.loss);
            add(&format!("{name}/accuracy"), score.accuracy);
            if let Some(perplexity) = score.perplexity {
                add(&format!("{name}/perplexity"), perplexity);
            }
        }
    }
    all
}

/// Returns the seconds since 1970, as an integer and with fraction.
fn now() -> (u64, f64) {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    (since.as_secs(), since.as_secs_f64())
}

// The code below writes TensorBoard's file format: records as TensorFlow writes them (`TFRecord`).
// Each record is a message `Event` or `Summary` in the encoding of Protocol Buffers
// (tensorflow/core/util/event.proto and framework/summary.proto).

/// Encodes an integer in groups of seven bits, the lowest group first.
fn varint(mut n: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

/// Encodes a length-delimited field: bytes, a text or a nested message.
fn text_field(number: u64, bytes: &[u8]) -> Vec<u8> {
    let mut field = varint(number << 3 | 2);
    field.extend(varint(bytes.len() as u64));
    field.extend_from_slice(bytes);
    field
}

/// Encodes a message `Event`: wall time (field 1), step (field 2), and content.
fn event(step: Option<u64>, what: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x09];
    bytes.extend(now().1.to_le_bytes());
    if let Some(step) = step {
        bytes.push(0x10);
        bytes.extend(varint(step));
    }
    bytes.extend_from_slice(what);
    bytes
}

/// Encodes a value of a `Summary`: tag (field 1) and float (field 2).
fn scalar(tag: &str, value: f32) -> Vec<u8> {
    let mut bytes = text_field(1, tag.as_bytes());
    bytes.push(0x15);
    bytes.extend(value.to_le_bytes());
    text_field(1, &bytes)
}

/// Encodes a record: length, checksum of the length, data, checksum of the data.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut bytes = length.to_vec();
    bytes.extend(masked(crc32c(&length)).to_le_bytes());
    bytes.extend_from_slice(data);
    bytes.extend(masked(crc32c(data)).to_le_bytes());
    bytes
}

/// Returns TensorFlow's masked checksum. The mask makes checksums of data that contains checksums
/// reliable.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Computes CRC-32C (Castagnoli, RFC 3720). Bit by bit is fast enough, because reports are short
/// and rare.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let odd = crc & 1 == 1;
            crc >>= 1;
            if odd {
                crc ^= 0x82f6_3b78;
            }
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::super::train_log::{Score, TrainReport};
    use super::*;
    use crate::train::PreferenceReport;

    #[test]
    fn checksums_are_those_of_the_rfc() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // Test vectors of RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
    }

    /// Splits a file into records, and checks their checksums.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let n = u64::from_le_bytes(length.try_into().unwrap()) as usize;
            let sum = |bytes: &[u8]| masked(crc32c(bytes)).to_le_bytes();
            assert_eq!(rest[..4], sum(length));
            let data = &rest[4..4 + n];
            assert_eq!(rest[4 + n..8 + n], sum(data));
            all.push(data.to_vec());
            bytes = &rest[8 + n..];
        }
        all
    }

    fn entries() -> [Entry; 3] {
        let score = Score {
            step: 300,
            loss: 2.0,
            perplexity: None,
            accuracy: 0.25,
            tokens: 7,
            pairs: None,
            seconds: 0.5,
        };
        [
            Entry::Train(TrainReport {
                step: 300,
                loss: 1.5,
                learning_rate: 0.25,
                steps_per_second: 2.0,
                tokens_per_second: 100.0,
                trained_tokens: 50,
                peak_memory_bytes: 2_000_000_000,
                gradient_norm: None,
                rewards: Some(PreferenceReport {
                    chosen: 0.5,
                    rejected: -0.5,
                    accuracy: 1.0,
                }),
                policy: Some(PolicyReport {
                    reward: 0.25,
                    reward_std: 0.125,
                    kl: None,
                    clip_ratio: Some(0.5),
                    completion_length: 7.0,
                }),
            }),
            Entry::Validation(score.clone()),
            Entry::Test(score),
        ]
    }

    #[test]
    fn both_files_have_every_report() {
        let dir = tempfile::tempdir().unwrap();
        let all = [Report::Jsonl, Report::TensorBoard];
        let mut reports = Reports::open(&all, dir.path(), dir.path(), &[], 0).unwrap();
        for entry in &entries() {
            reports.add(entry).unwrap();
        }
        let text = std::fs::read_to_string(dir.path().join(METRICS_FILE)).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(
            (&lines[0]["iteration"], &lines[0]["train_loss"]),
            (&json!(300), &json!(1.5))
        );
        assert_eq!(lines[0]["peak_memory"], 2.0);
        assert_eq!(lines[0]["chosen_reward"], 0.5);
        assert_eq!(lines[0]["reward"], 0.25);
        assert!(lines[0].get("kl").is_none());
        assert_eq!(lines[0]["clip_ratio"], 0.5);
        assert_eq!(lines[1]["val_loss"], 2.0);
        assert_eq!(lines[2]["test_accuracy"], 0.25);

        let event_file = || {
            let mut files = std::fs::read_dir(dir.path())
                .unwrap()
                .map(|e| e.unwrap().path());
            files
                .find(|path| {
                    path.file_name()
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .starts_with(EVENTS_PREFIX)
                })
                .unwrap()
        };
        let events = records(&std::fs::read(event_file()).unwrap());
        assert_eq!(events.len(), 5);
        assert_eq!(events[0][9..], text_field(3, b"brain.Event:2"));
        // The event has step 0 and marks the start of a session.
        assert_eq!(events[1][9..], [0x10, 0, 0x3a, 2, 0x08, 1]);
        // Step 300 is encoded as 0xac 0x02. The first scalar is the loss.
        assert_eq!(events[2][9..12], [0x10, 0xac, 0x02]);
        let loss = scalar("train/loss", 1.5);
        assert!(events[2].windows(loss.len()).any(|part| part == loss));
        assert_eq!(loss[..2], [0x0a, 17]);
        let accuracy = scalar("validation/accuracy", 0.25);
        assert!(
            events[3]
                .windows(accuracy.len())
                .any(|part| part == accuracy)
        );

        // A resumed run must keep the earlier reports.
        let mut again =
            Reports::open(&all[..1], dir.path(), dir.path(), &entries()[..1], 300).unwrap();
        again.add(&entries()[1]).unwrap();
        let text = std::fs::read_to_string(dir.path().join(METRICS_FILE)).unwrap();
        assert_eq!(text.lines().count(), 2);
    }
}
