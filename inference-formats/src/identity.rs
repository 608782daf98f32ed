//! What tells one model from another, for files that belong to one of them.

use std::path::Path;

use crate::error::Result;
use sha2::{Digest, Sha256};

use super::files::{CheckedFile, ModelDir, ModelFiles, locate};

/// Bytes of a weights file that are looked at, in each of several places.
const SAMPLE: usize = 4096;
/// Places of a file that are looked at.
const SAMPLES: u64 = 64;

/// Tells a model from others by its files: their sizes, and samples of their bytes. Where the files are and
/// when they were written does not matter.
///
/// # Errors
/// When a file cannot be read.
pub fn identity(path: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    let files = match locate(path)? {
        ModelFiles::Gguf(file) => vec![file],
        ModelFiles::Directory(dir) => {
            let mut files: Vec<_> = ModelDir::open(&dir)?
                .with_extension("safetensors")?
                .iter()
                .map(|name| dir.join(name))
                .collect();
            files.push(dir.join("config.json"));
            files.sort();
            files
        }
    };
    for file in files {
        let file = CheckedFile::open(&file)?;
        digest.update(file.len().to_le_bytes());
        let mut buffer = vec![0; SAMPLE.min(usize::try_from(file.len()).unwrap_or(SAMPLE))];
        let last = file.len() - buffer.len() as u64;
        for i in 0..SAMPLES {
            let at = (u128::from(last) * u128::from(i) / u128::from(SAMPLES - 1)) as u64;
            file.read_exact_at(&mut buffer, at)?;
            digest.update(&buffer);
        }
    }
    Ok(digest
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect())
}
