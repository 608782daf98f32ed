//! Reads untrusted files: only regular files, of limited size, with exact reads at given positions.
//! Names cannot leave the directory of a model. This module knows nothing about formats.

mod locate;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{ErrorKind as IoKind, Read};
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use bytemuck::Pod;

pub(crate) use locate::MANIFEST;
pub use locate::{ModelFiles, is_vindex, locate};

/// The largest accepted JSON or template file of a model, in bytes.
pub const MAX_TEXT_FILE: u64 = 256 << 20;

/// The error for a file that is at fault.
pub(crate) fn invalid(path: &Path, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message).with_path(path)
}

/// The error for a failed call to the operating system.
fn io(path: &Path, doing: &str, e: std::io::Error) -> Error {
    let kind = if e.kind() == IoKind::NotFound {
        ErrorKind::NotFound
    } else {
        ErrorKind::Io
    };
    Error::new(kind, doing).with_path(path).with_source(e)
}

/// Opens a regular file. A pipe or a device could block or have no end.
fn open_regular(path: &Path) -> Result<(File, u64)> {
    let not_regular = || invalid(path, "not a regular file");
    // Checked before opening, because opening a pipe blocks, and again after it, because another
    // file may have taken the name.
    if !fs::metadata(path)
        .map_err(|e| io(path, "cannot open", e))?
        .is_file()
    {
        return Err(not_regular());
    }
    let file = File::open(path).map_err(|e| io(path, "cannot open", e))?;
    let metadata = file
        .metadata()
        .map_err(|e| io(path, "cannot read the size", e))?;
    if !metadata.is_file() {
        return Err(not_regular());
    }
    Ok((file, metadata.len()))
}

/// The bytes of a file with at most `cap` bytes.
///
/// # Errors
/// When the file is missing, larger than `cap`, not regular or unreadable.
pub fn read_capped(path: &Path, cap: u64) -> Result<Vec<u8>> {
    let (file, len) = open_regular(path)?;
    let too_large = |len: u64| {
        invalid(
            path,
            format!("the file has {len} bytes; at most {cap} are accepted for it"),
        )
    };
    if len > cap {
        return Err(too_large(len));
    }
    let mut bytes = Vec::new();
    file.take(cap.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|e| io(path, "cannot read", e))?;
    if bytes.len() as u64 > cap {
        return Err(too_large(bytes.len() as u64)); // it grew after it was measured
    }
    Ok(bytes)
}

/// The text of a file of at most `cap` bytes.
///
/// # Errors
/// As for [`read_capped`], and when it is not UTF-8.
pub fn read_text(path: &Path, cap: u64) -> Result<String> {
    String::from_utf8(read_capped(path, cap)?)
        .map_err(|e| invalid(path, "the file is not UTF-8").with_source(e))
}

/// An open regular file, with its length when it was opened. Each read states its position, so
/// threads can share the file. A read past the end is an error.
#[derive(Debug)]
pub struct CheckedFile {
    path: PathBuf,
    len: u64,
    #[cfg(unix)]
    file: File,
    #[cfg(not(unix))]
    file: parking_lot::Mutex<File>,
}

impl CheckedFile {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// When it is missing, not a regular file or not readable.
    pub fn open(path: &Path) -> Result<Self> {
        let (file, len) = open_regular(path)?;
        #[cfg(not(unix))]
        let file = parking_lot::Mutex::new(file);
        Ok(Self {
            path: path.to_owned(),
            len,
            file,
        })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length in bytes when it was opened.
    #[allow(clippy::len_without_is_empty, reason = "a file, not a collection")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns another handle to the same open file, for example to map the file.
    ///
    /// # Errors
    /// When the system has no handle left.
    pub fn handle(&self) -> Result<File> {
        #[cfg(unix)]
        let file = self.file.try_clone();
        #[cfg(not(unix))]
        let file = self.file.lock().try_clone();
        file.map_err(|e| io(&self.path, "cannot open", e))
    }

    /// Fills `buffer` with the bytes from `offset` on.
    ///
    /// # Errors
    /// When the range lies outside the file, the file shrank, or reading failed.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        if offset
            .checked_add(buffer.len() as u64)
            .is_none_or(|end| end > self.len)
        {
            return Err(invalid(
                &self.path,
                format!(
                    "{} bytes at {offset} lie outside the file of {} bytes",
                    buffer.len(),
                    self.len
                ),
            ));
        }
        self.read_at(buffer, offset).map_err(|e| {
            if e.kind() == IoKind::UnexpectedEof {
                invalid(&self.path, "the file became shorter while it was read")
            } else {
                io(&self.path, "cannot read", e)
            }
        })
    }

    #[cfg(unix)]
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, offset)
    }

    #[cfg(not(unix))]
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        use std::io::{Seek, SeekFrom};
        let mut file = self.file.lock();
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(buffer)
    }

    /// The `nbytes` bytes at `offset` as elements of `T`, read without a copy.
    ///
    /// # Errors
    /// When `nbytes` is not a multiple of the element's size, memory is short, or reading fails.
    pub fn read_vec<T: Pod>(&self, offset: u64, nbytes: usize) -> Result<Vec<T>> {
        let size = size_of::<T>();
        if size == 0 || !nbytes.is_multiple_of(size) {
            return Err(invalid(
                &self.path,
                format!("{nbytes} bytes are not a whole number of {size}-byte elements"),
            ));
        }
        // Checked before allocating, so that a wrong length cannot use up memory.
        if offset
            .checked_add(nbytes as u64)
            .is_none_or(|end| end > self.len)
        {
            self.read_exact_at(&mut [], u64::MAX)?;
        }
        let mut out = Vec::new();
        out.try_reserve_exact(nbytes / size).map_err(|e| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("no memory for {nbytes} bytes of weights"),
            )
            .with_path(&self.path)
            .with_source(e)
        })?;
        out.resize(nbytes / size, T::zeroed());
        self.read_exact_at(bytemuck::cast_slice_mut(&mut out), offset)?;
        Ok(out)
    }
}

/// The directory of a model. No name can lead out of it.
#[derive(Debug, Clone)]
pub struct ModelDir {
    root: PathBuf,
    /// The directory, and for a Hugging Face cache also the blobs that its links point to.
    allowed: Vec<PathBuf>,
}

/// The longest accepted file name, in bytes.
const MAX_NAME: usize = 1024;

impl ModelDir {
    /// The directory at `path`.
    ///
    /// # Errors
    /// When there is no such directory, or it cannot be resolved.
    pub fn open(path: &Path) -> Result<Self> {
        let real = path
            .canonicalize()
            .map_err(|e| io(path, "cannot open", e))?;
        if !real.is_dir() {
            return Err(invalid(path, "not a directory"));
        }
        let mut allowed = vec![real.clone()];
        // The Hugging Face cache has `<model>/snapshots/<revision>/<file>`, where each file is a
        // link into `<model>/blobs`.
        let snapshots = real
            .ancestors()
            .find(|a| a.file_name().is_some_and(|n| n == "snapshots"));
        if let Some(model) = snapshots.and_then(Path::parent)
            && let Ok(blobs) = model.join("blobs").canonicalize()
            && blobs.parent() == Some(model)
        {
            allowed.push(blobs);
        }
        Ok(Self {
            root: path.to_owned(),
            allowed,
        })
    }

    /// The path of the directory, as given.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The path of the file `name` in the directory; `None` when there is no such file.
    ///
    /// # Errors
    /// When the name, or a link at it, leads out of the directory.
    pub fn find(&self, name: &str) -> Result<Option<PathBuf>> {
        check_name(name).map_err(|why| {
            invalid(
                &self.root,
                format!("the file name {name:?} is refused: {why}"),
            )
        })?;
        let path = self.root.join(name);
        let real = match path.canonicalize() {
            Ok(real) => real,
            // A broken link is reported as an error below, not as a missing file.
            Err(e) if e.kind() == IoKind::NotFound && path.symlink_metadata().is_err() => {
                return Ok(None);
            }
            Err(e) => return Err(io(&path, "cannot open", e)),
        };
        if !self.allowed.iter().any(|dir| real.starts_with(dir)) {
            return Err(invalid(
                &path,
                "a link that leads out of the model's directory is not followed; copy the file",
            ));
        }
        Ok(Some(path))
    }

    /// The path of the file `name` in the directory.
    ///
    /// # Errors
    /// As for [`Self::find`], and when there is no such file.
    pub fn require(&self, name: &str) -> Result<PathBuf> {
        self.find(name)?
            .ok_or_else(|| invalid(&self.root, format!("the file {name} is missing")))
    }

    /// The names in the directory that end in `.extension`, sorted.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub fn with_extension(&self, extension: &str) -> Result<Vec<String>> {
        let list = |e| io(&self.root, "cannot list", e);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(list)? {
            let name = entry.map_err(list)?.file_name();
            let matches = Path::new(&name)
                .extension()
                .is_some_and(|e| e.eq_ignore_ascii_case(extension));
            if let (true, Some(name)) = (matches, name.to_str())
                && !name.starts_with('.')
            {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }
}

/// Checks that `name` is relative and stays inside the directory, on every platform.
fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() {
        return Err("it is empty");
    }
    if name.len() > MAX_NAME {
        return Err("it is too long");
    }
    if name.chars().any(char::is_control) {
        return Err("it holds a control character");
    }
    if name.contains('\\') || name.contains(':') {
        return Err("it holds a backslash or a colon");
    }
    if !Path::new(name)
        .components()
        .all(|c| matches!(c, Component::Normal(_)))
    {
        return Err("it is absolute or leads out of the directory");
    }
    Ok(())
}
