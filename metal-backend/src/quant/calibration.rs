//! Calibration data: token sequences of equal length from text or a data set.

use std::path::Path;

use inference::{Error, ErrorKind, Result};

use crate::checkpoint::files::{MAX_TEXT_FILE, read_text};
use crate::text::TextPipeline;
use crate::train::dataset::shuffle::Shuffler;
use crate::train::dataset::{DataOptions, Dataset, files};

/// Selects the calibration data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    /// A text file; a JSONL or Parquet file of examples, as for training; or a directory with
    /// `train.jsonl` or `train.parquet`.
    pub data: std::path::PathBuf,
    /// The number of sequences; `None` means all.
    pub num_samples: Option<usize>,
    /// The number of tokens in a sequence.
    pub sequence_length: usize,
    /// The seed of the order in which sequences are taken.
    pub seed: u32,
}

impl Calibration {
    /// Uses 128 sequences of 512 tokens from the data at `data`, in the order of seed 123.
    #[must_use]
    pub fn new(data: &Path) -> Self {
        Self {
            data: data.to_owned(),
            num_samples: Some(128),
            sequence_length: 512,
            seed: 123,
        }
    }

    /// Returns the sequences in random order. As in mlx-lm, the tokens are cut into sequences that
    /// do not overlap. A shorter last sequence is used only if it is the only one.
    pub(super) fn read(&self, text: &TextPipeline) -> Result<Vec<Vec<u32>>> {
        let bad = |message: String| {
            Error::new(ErrorKind::InvalidOption, message).with_path(self.data.clone())
        };
        if self.num_samples == Some(0) {
            return Err(bad(String::from(
                "num_samples is 0; it must be at least 1, or -1 for all",
            )));
        }
        if self.sequence_length < 2 {
            return Err(bad(format!(
                "sequence_length is {}; it must be at least 2",
                self.sequence_length
            )));
        }
        let ids = self.tokens(text)?;
        let mut all: Vec<Vec<u32>> = ids
            .chunks_exact(self.sequence_length)
            .map(<[u32]>::to_vec)
            .collect();
        if all.is_empty() {
            if ids.len() < 2 {
                return Err(bad(format!(
                    "the calibration data have {} tokens; give a longer text",
                    ids.len()
                )));
            }
            all.push(ids);
        }
        let count = u32::try_from(all.len())
            .map_err(|_| bad(String::from("the calibration data have too many sequences")))?;
        let order = Shuffler::new(self.seed).permutation(count);
        let most = self.num_samples.unwrap_or(usize::MAX);
        Ok(order
            .into_iter()
            .take(most)
            .filter_map(|at| all.get(at as usize).cloned())
            .collect())
    }

    fn tokens(&self, text: &TextPipeline) -> Result<Vec<u32>> {
        let file = files::file_of(&self.data, "train")?;
        if files::has_examples(&file) {
            let data = Dataset::read(file, text, &DataOptions::new())?;
            return Ok(data.examples.into_iter().flat_map(|e| e.ids).collect());
        }
        text.encode_prompt(&read_text(&file, MAX_TEXT_FILE)?)
    }
}
