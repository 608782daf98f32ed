//! Reads and writes whole files, and identifies models by their files.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Maximum size of a text file: stimuli, metadata or results.
#[cfg(feature = "statistics")]
pub(crate) const MAX_TEXT: u64 = 64 << 20;

/// Reads a text file of at most `limit` bytes. The path may be a pipe.
///
/// # Errors
/// [`Error::Io`], and [`Error::File`] if the file is longer.
#[cfg(feature = "statistics")]
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(limit.saturating_add(1)).read_to_end(&mut bytes))
        .map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > limit {
        return Err(Error::file(path, format!("it has more than {limit} bytes")));
    }
    Ok(bytes)
}

/// Reads a file of values completely. Only the file's size bounds the memory, so the file must be a
/// regular file.
///
/// # Errors
/// [`Error::Io`], and [`Error::File`] for pipes, devices and directories.
pub(crate) fn read_numbers(path: &Path) -> Result<Vec<u8>> {
    let io = |e| Error::io(path, e);
    // The type is checked before opening, because opening a pipe blocks.
    let metadata = std::fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return Err(Error::file(path, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(metadata.len()).read_to_end(&mut bytes))
        .map_err(io)?;
    Ok(bytes)
}

/// Writes a file completely or not at all.
///
/// # Errors
/// [`Error::Io`].
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    inference_formats::atomic::replace(path, bytes).map_err(|e| Error::io(path, e))
}

/// The bytes of SHA-256.
pub(crate) const HASH: usize = 32;

/// SHA-256 of a file in which the last [`HASH`] bytes of the header are zero.
fn hash_of(bytes: &[u8], header: usize) -> [u8; HASH] {
    let (head, rest) = bytes.split_at(header);
    Sha256::new()
        .chain_update(&head[..header - HASH])
        .chain_update([0; HASH])
        .chain_update(rest)
        .finalize()
        .into()
}

/// Computes a file's hash, and writes it to the last bytes of the header. `bytes` must contain the
/// whole file.
pub(crate) fn put_hash(bytes: &mut [u8], header: usize) {
    let hash = hash_of(bytes, header);
    bytes[header - HASH..header].copy_from_slice(&hash);
}

/// Checks the hash in a file. Files of other writers have zeros instead, and are accepted.
pub(crate) fn check_hash(bytes: &[u8], header: usize) -> std::result::Result<(), String> {
    let stored = &bytes[header - HASH..header];
    if stored.iter().all(|b| *b == 0) || stored == hash_of(bytes, header) {
        return Ok(());
    }
    Err(String::from(
        "the bytes are not those that were written (SHA-256)",
    ))
}

/// Number of bytes that a thread hashes as one part.
const PART: u64 = 16 << 20;

/// A hash that identifies a model, in hexadecimal: SHA-256 of all bytes of its safetensors, GGUF
/// and JSON files, in the order of their names. `model` is a directory or a file. The hash does not
/// depend on the model's location, on the directory's name, or on the name of a single file.
///
/// # Errors
/// [`Error::Io`].
pub fn identity(model: &Path) -> Result<String> {
    let mut files = vec![model.to_owned()];
    let is_dir = model.is_dir();
    if is_dir {
        files = std::fs::read_dir(model)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
            .map_err(|e| Error::io(model, e))?;
        files.retain(|file| {
            let kind = file.extension().and_then(|e| e.to_str());
            matches!(kind, Some("safetensors" | "gguf" | "json"))
        });
        files.sort();
    }
    let mut hash = Sha256::new();
    for file in files {
        let (size, parts) = parts_of(&file).map_err(|e| Error::io(&file, e))?;
        if is_dir {
            hash.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        }
        hash.update([0]);
        hash.update(size.to_le_bytes());
        for part in parts {
            hash.update(part);
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// The size of a file, and the SHA-256 of each [`PART`] of it. All cores are used.
fn parts_of(path: &Path) -> std::io::Result<(u64, Vec<[u8; 32]>)> {
    let size = std::fs::metadata(path)?.len();
    let count = size.div_ceil(PART);
    let threads = std::thread::available_parallelism()?.get() as u64;
    let threads = threads.min(count).max(1);
    let hash_some = |first: u64| -> std::io::Result<Vec<(u64, [u8; 32])>> {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; 1 << 16];
        let mut done = Vec::new();
        for part in (first..count).step_by(threads as usize) {
            file.seek(SeekFrom::Start(part * PART))?;
            let mut left = (&file).take(PART.min(size - part * PART));
            let mut hash = Sha256::new();
            loop {
                match left.read(&mut buffer)? {
                    0 => break,
                    n => hash.update(&buffer[..n]),
                }
            }
            if left.limit() > 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            done.push((part, hash.finalize().into()));
        }
        Ok(done)
    };
    let mut parts = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|first| scope.spawn(move || hash_some(first)))
            .collect();
        let mut parts = Vec::new();
        for worker in workers {
            let done = worker.join().map_err(|_| std::io::ErrorKind::Other)?;
            parts.extend(done?);
        }
        Ok::<_, std::io::Error>(parts)
    })?;
    parts.sort_unstable();
    Ok((size, parts.into_iter().map(|(_, hash)| hash).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_tells_a_model_from_others_and_its_place_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        // The file is longer than one part, and longer than the samples that earlier versions
        // hashed.
        let mut weights = vec![7u8; PART as usize + 100];
        for model in [&a, &b] {
            std::fs::create_dir(model).unwrap();
            std::fs::write(model.join("model.safetensors"), &weights).unwrap();
            std::fs::write(model.join("config.json"), "{}").unwrap();
            std::fs::write(model.join("README.md"), model.display().to_string()).unwrap();
        }
        let first = identity(&a).unwrap();
        assert_eq!(first, identity(&b).unwrap());
        for at in [0, (1 << 20) + 1, PART as usize - 1, weights.len() - 1] {
            weights[at] ^= 1;
            std::fs::write(b.join("model.safetensors"), &weights).unwrap();
            assert_ne!(first, identity(&b).unwrap(), "byte {at}");
            weights[at] ^= 1;
        }
        // For a single file, the hash depends on its bytes but not on its name.
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            identity(&path).unwrap()
        };
        assert_eq!(file("x.gguf", b"GGUF1"), file("y.gguf", b"GGUF1"));
        assert_ne!(file("x.gguf", b"GGUF1"), file("y.gguf", b"GGUF2"));
        assert!(identity(&dir.path().join("absent")).is_err());
    }

    #[cfg(all(unix, feature = "statistics"))]
    #[test]
    fn reading_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), b"12345");
        let why = read_text(&path, 4).unwrap_err().to_string();
        assert!(why.contains("text: it has more than 4 bytes"), "{why}");
        let zero = Path::new("/dev/zero");
        let why = crate::stimuli::Stimuli::read(zero, None).unwrap_err();
        assert!(why.to_string().contains("more than"), "{why}");
        for why in [
            crate::activations::Activations::read(zero).unwrap_err(),
            crate::trace_store::TraceStore::read(zero)
                .map(drop)
                .unwrap_err(),
        ] {
            assert!(why.to_string().contains("not a regular file"), "{why}");
        }
    }
}
