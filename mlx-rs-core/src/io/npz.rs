//! NPZ, numpy's archive of named NPY arrays: a ZIP file, read and written by the `zip` crate.

use std::collections::BTreeMap;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;

use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::{format_error, in_file, io_error, npy, open, replace};
use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// The maximum number of entries.
const MAX_ENTRIES: usize = 1 << 16;

/// The extension that numpy adds to each array's name.
const EXTENSION: &str = ".npy";

/// The size from which an entry needs ZIP64.
const LARGE: u64 = u32::MAX as u64;

fn zip_error(op: &'static str, e: ZipError) -> Error {
    match e {
        ZipError::Io(e) => io_error(op, &e),
        ZipError::UnsupportedArchive(_) => Error::new(ErrorKind::Unsupported, op, e.to_string()),
        _ => format_error(op, e.to_string()),
    }
}

/// Loads all arrays of an NPZ file by name. The file may be compressed.
///
/// Arrays saved by `numpy.savez` or `mx.savez` without a name are `arr_0`, `arr_1` and so on.
///
/// ```
/// use mlx_rs_core::{array, io};
/// let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("a.npz");
/// io::save_npz(&path, [("x", &array!([1, 2])?)])?;
/// for (name, array) in io::load_npz(&path)? {
///     assert_eq!((name.as_str(), array.shape()), ("x", &[2][..]));
/// }
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`load_npy`](super::load_npy) for each array, with its name; [`ErrorKind::Format`] when the
/// archive is invalid, a checksum is wrong, or a name is repeated; [`ErrorKind::OutOfMemory`] when
/// all arrays together exceed the memory budget.
pub fn load_npz(path: impl AsRef<Path>) -> Result<BTreeMap<String, Array>> {
    let (op, path) = ("load_npz", path.as_ref());
    in_file(path, read(op, path))
}

fn read(op: &'static str, path: &Path) -> Result<BTreeMap<String, Array>> {
    let (file, _) = open(op, path)?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| zip_error(op, e))?;
    if archive.len() > MAX_ENTRIES {
        return Err(format_error(
            op,
            format!(
                "the archive has {} entries; at most {MAX_ENTRIES} are accepted",
                archive.len()
            ),
        ));
    }
    if archive.has_duplicate_names() {
        return Err(format_error(op, "two arrays have the same name"));
    }
    let mut arrays = BTreeMap::new();
    let mut total = 0u64;
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| zip_error(op, e))?;
        let name = entry.name().map_err(|e| zip_error(op, e))?.into_owned();
        let key = name.strip_suffix(EXTENSION).unwrap_or(&name).to_owned();
        let length = entry.size();
        total = total.saturating_add(length);
        if total > memory::budget() {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                op,
                format!(
                    "the arrays up to {key:?} take {total} bytes, more than the memory budget of {}",
                    memory::budget()
                ),
            ));
        }
        let array = npy::read_whole(op, &mut entry, length).map_err(|e| e.context(&key))?;
        if arrays.insert(key, array).is_some() {
            return Err(format_error(
                op,
                format!("two arrays have the name {name:?}, with and without {EXTENSION}"),
            ));
        }
    }
    Ok(arrays)
}

/// Saves named arrays as an uncompressed NPZ file, atomically.
///
/// ```
/// use mlx_rs_core::{array, io};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("a.npz");
/// io::save_npz(&path, [("x", &array!([1, 2])?), ("y", &array!(0.5)?)])?;
/// let arrays = io::load_npz(&path)?;
/// assert_eq!(arrays["x"].to_vec::<i32>()?, [1, 2]);
/// io::save_npz(&path, &arrays)?; // a map is as good
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Io`] when the file cannot be written, [`ErrorKind::Value`] when a name is repeated
/// or empty; MLX's message when evaluation fails.
pub fn save_npz<'a, S: AsRef<str>>(
    path: impl AsRef<Path>,
    arrays: impl IntoIterator<Item = (S, &'a Array)>,
) -> Result<()> {
    save("save_npz", path.as_ref(), arrays, CompressionMethod::Stored)
}

/// As [`save_npz`], compressed.
///
/// ```
/// use mlx_rs_core::{Dtype, io, zeros};
/// let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("a.npz");
/// io::save_npz_compressed(&path, [("zeros", &zeros(&[1000], Dtype::Float32)?)])?;
/// assert!(std::fs::metadata(&path).unwrap().len() < 1000);
/// assert_eq!(io::load_npz(&path)?["zeros"].shape(), [1000]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As [`save_npz`].
pub fn save_npz_compressed<'a, S: AsRef<str>>(
    path: impl AsRef<Path>,
    arrays: impl IntoIterator<Item = (S, &'a Array)>,
) -> Result<()> {
    let op = "save_npz_compressed";
    save(op, path.as_ref(), arrays, CompressionMethod::Deflated)
}

fn save<'a, S: AsRef<str>>(
    op: &'static str,
    path: &Path,
    arrays: impl IntoIterator<Item = (S, &'a Array)>,
    method: CompressionMethod,
) -> Result<()> {
    let mut named = BTreeMap::new();
    for (name, array) in arrays {
        let name = name.as_ref();
        if name.is_empty() || named.insert(name.to_owned(), array).is_some() {
            let message = format!("{name:?} is empty or the name of two arrays");
            return Err(Error::new(ErrorKind::Value, op, message));
        }
    }
    crate::eval(named.values().copied())?;
    let written = replace(op, path, |file| {
        let mut zip = ZipWriter::new(BufWriter::new(file));
        for (name, array) in &named {
            let options = SimpleFileOptions::default()
                .compression_method(method)
                .large_file(npy::bytes_about(array) >= LARGE);
            zip.start_file(format!("{name}{EXTENSION}"), options)
                .map_err(|e| zip_error(op, e))?;
            npy::write(op, &mut zip, array).map_err(|e| e.context(name))?;
        }
        let mut out = zip.finish().map_err(|e| zip_error(op, e))?;
        out.flush().map_err(|e| io_error(op, &e))
    });
    in_file(path, written)
}
