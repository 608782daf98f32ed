//! Connections in the weights of a model, computed without a forward pass: edges from token to
//! token through the features of feed-forward parts ([`edges`]), circuits of attention heads
//! ([`circuits`]), and vectors as lines of JSON ([`vectors`]).
//!
//! An engine computes the dot products of token embeddings with vectors. This module derives the
//! results from them.

pub mod circuits;
pub mod edges;
pub mod vectors;

use std::cmp::Ordering;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use inference_formats::atomic::AtomicFile;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A token, or another element of a list, and its score.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// The index in the list.
    pub id: u32,
    /// The score.
    pub score: f32,
}

/// The sort order: larger scores first, equal scores by id.
fn better(a: &Scored, b: &Scored) -> Ordering {
    b.score.total_cmp(&a.score).then(a.id.cmp(&b.id))
}

/// The `k` largest of the `scores` that are at least `least`, in decreasing order. Equal scores are
/// in order of their index. NaN is never included.
///
/// ```
/// use inference_probe::walkers::top_k;
/// let best = top_k(&[0.5, 2.0, -1.0, 2.0], 3, 0.0);
/// assert_eq!(best.iter().map(|s| s.id).collect::<Vec<_>>(), [1, 3, 0]);
/// ```
#[must_use]
pub fn top_k(scores: &[f32], k: usize, least: f32) -> Vec<Scored> {
    let all = (0u32..)
        .zip(scores)
        .map(|(id, &score)| Scored { id, score });
    let mut candidates: Vec<Scored> = all.filter(|s| s.score >= least).collect();
    if k == 0 {
        return Vec::new();
    }
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k - 1, better);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by(better);
    candidates
}

/// `x` rounded to `digits` decimal places. Ties round away from zero. Values that are not finite
/// are unchanged.
///
/// ```
/// assert_eq!(inference_probe::walkers::round(0.123_456, 4), 0.1235);
/// ```
#[must_use]
pub fn round(x: f64, digits: u32) -> f64 {
    let scale = 10f64.powi(i32::try_from(digits).unwrap_or(i32::MAX));
    let scaled = x * scale;
    // Numbers too large for this computation have no decimal places.
    if scaled.is_finite() && scale.is_finite() {
        scaled.round() / scale
    } else {
        x
    }
}

/// For each of `thresholds`, the number of `values` that are at least as large.
///
/// ```
/// use inference_probe::walkers::counts;
/// assert_eq!(counts(&[0.1, 0.5, 0.9], &[0.0, 0.5, 1.0]), [3, 2, 0]);
/// ```
#[must_use]
pub fn counts(values: &[f64], thresholds: &[f64]) -> Vec<usize> {
    let at_least = |t: &f64| values.iter().filter(|v| *v >= t).count();
    thresholds.iter().map(at_least).collect()
}

/// A file with one JSON value per line. It appears under its name only when it is complete.
#[derive(Debug)]
pub struct Lines {
    file: BufWriter<AtomicFile>,
    path: PathBuf,
}

impl Lines {
    /// Starts the file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(path: &Path) -> Result<Self> {
        let file = AtomicFile::create(path).map_err(|e| Error::io(path, e))?;
        Ok(Self {
            file: BufWriter::new(file),
            path: path.to_owned(),
        })
    }

    /// Adds a line.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Data`] for values that JSON cannot represent.
    pub fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let text = to_line(value)?;
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|e| Error::io(&self.path, e))
    }

    /// Completes the file and renames it to its final name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(self) -> Result<()> {
        let file = self
            .file
            .into_inner()
            .map_err(std::io::IntoInnerError::into_error);
        file.and_then(AtomicFile::commit)
            .map_err(|e| Error::io(&self.path, e))
    }
}

/// A value as a line.
fn to_line(value: &impl Serialize) -> Result<String> {
    let mut text = serde_json::to_string(value).map_err(|e| Error::data(e.to_string()))?;
    text.push('\n');
    Ok(text)
}
