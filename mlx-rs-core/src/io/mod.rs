//! Arrays in files: NPY ([`load_npy`]), NPZ ([`load_npz`]) and safetensors ([`load_safetensors`]).
//! Rust code reads and writes them, without MLX.
//!
//! MLX's own readers are not used, because for a truncated file they return arbitrary data. Here
//! every size is compared with the file before anything is allocated, and all bytes are read before
//! an array exists. A mismatch is an error that names the file. To write a file, a temporary file
//! beside the destination is written, flushed to disk, and renamed. So a reader finds the old file
//! or the new one, never a part.
//!
//! ```
//! use mlx_rs_core::{array, io};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?;
//! let path = dir.path().join("layer.safetensors");
//! let (weight, bias) = (array!([[1.0, 2.0], [3.0, 4.0]])?, array!([0.5, 0.5])?);
//! io::save_safetensors(&path, [("weight", &weight), ("bias", &bias)], &[("format", "mlx")])?;
//! let back = io::load_safetensors(&path)?;
//! assert!(back.arrays["weight"].array_equal(&weight)?);
//! assert_eq!(back.metadata["format"], "mlx");
//! # Ok(()) }
//! ```
//!
//! | Python | Rust |
//! |---|---|
//! | `mx.load("a.npy")` | [`load_npy`] |
//! | `mx.load("a.npz")` | [`load_npz`] |
//! | `mx.load("a.safetensors", return_metadata=True)` | [`load_safetensors`]; one tensor at a time: [`SafetensorsFile`] |
//! | `mx.save` | [`save_npy`] |
//! | `mx.savez`, `mx.savez_compressed` | [`save_npz`], [`save_npz_compressed`] |
//! | `mx.save_safetensors` | [`save_safetensors`] |
//!
//! The content of a file is checked against the file's size, and every array against
//! [`memory::budget`](crate::memory::budget). Nothing in a file is ever executed: numpy's object
//! arrays, which are pickles, are refused.

mod mapped_file;
mod npy;
mod npz;
mod safetensors;
#[cfg(unix)]
mod shrinking;
mod values;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use inference_formats::atomic::AtomicFile;

use crate::error::{Error, ErrorKind, Result};

pub use self::mapped_file::{Floats, Halves, MappedFile};
pub use self::npy::{load_npy, read_npy, save_npy, write_npy};
pub use self::npz::{load_npz, save_npz, save_npz_compressed};
pub use self::safetensors::{Safetensors, SafetensorsFile, load_safetensors, save_safetensors};

/// The error for a failed system call, or for data that is truncated or inconsistent.
fn io_error(op: &'static str, e: &std::io::Error) -> Error {
    use std::io::ErrorKind as K;
    match e.kind() {
        K::UnexpectedEof => format_error(op, "the data ends too early; it is truncated"),
        K::InvalidData | K::InvalidInput => format_error(op, e.to_string()),
        _ => Error::new(ErrorKind::Io, op, e.to_string()),
    }
}

fn format_error(op: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Format, op, message)
}

/// Adds the path to the error's message.
fn in_file<T>(path: &Path, result: Result<T>) -> Result<T> {
    result.map_err(|e| e.context(path.display()))
}

fn open(op: &'static str, path: &Path) -> Result<(File, u64)> {
    let file = File::open(path).map_err(|e| io_error(op, &e))?;
    let facts = file.metadata().map_err(|e| io_error(op, &e))?;
    if !facts.is_file() {
        // A directory would fail on the first read, and a pipe has no size to compare with.
        return Err(Error::new(ErrorKind::Io, op, "not a regular file"));
    }
    Ok((file, facts.len()))
}

/// Refuses a destination that is not a regular file, such as a device, because a rename would
/// replace it. A destination that does not exist or cannot be read passes; the write itself then
/// decides.
pub(crate) fn check_replaceable(path: &Path) -> std::result::Result<(), &'static str> {
    match path.metadata() {
        Ok(facts) if facts.is_dir() => Err("it is a directory"),
        Ok(facts) if !facts.is_file() => Err("it is not a regular file"),
        _ => Ok(()),
    }
}

/// Writes a file atomically: beside the destination, flushed to the disk, then renamed.
fn replace(
    op: &'static str,
    path: &Path,
    write: impl FnOnce(&mut AtomicFile) -> Result<()>,
) -> Result<()> {
    let fault = |e: &std::io::Error| Error::new(ErrorKind::Io, op, e.to_string());
    check_replaceable(path).map_err(|why| Error::new(ErrorKind::Io, op, why))?;
    let mut file = AtomicFile::create(path).map_err(|e| fault(&e))?;
    write(&mut file)?;
    file.flush()
        .and_then(|()| file.commit())
        .map_err(|e| fault(&e))
}
