//! A hash that identifies a model, for files that belong to one model.

use std::path::Path;

use crate::error::Result;
use sha2::{Digest, Sha256};

use super::files::{CheckedFile, ModelDir, ModelFiles, locate};

/// Bytes in one sample of a file.
const SAMPLE: usize = 4096;
/// Samples of each file, evenly spaced.
const SAMPLES: u64 = 64;

/// A SHA-256 hash that identifies the model at `path`, in hexadecimal. It covers the sizes of the
/// files and samples of their bytes, but not their location or time of change.
///
/// # Errors
/// When there is no model, or a file cannot be read.
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
    Ok(hex(&digest.finalize()))
}

/// Bytes in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
