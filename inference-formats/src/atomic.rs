//! Files that get their names when they are complete. A reader sees the old file or the new one,
//! and an interrupted writer leaves the old one.

use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

/// An unfinished file. Dropping it removes it.
///
/// ```
/// use std::io::Write;
///
/// use inference_formats::atomic::AtomicFile;
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("answer");
/// let mut file = AtomicFile::create(&path)?;
/// file.write_all(b"42")?;
/// assert!(!path.exists());
/// file.commit()?;
/// assert_eq!(std::fs::read(&path)?, b"42");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct AtomicFile {
    file: NamedTempFile,
    path: PathBuf,
}

impl AtomicFile {
    /// Begins the file `path`, in the same directory. The permissions are those of any new file,
    /// under the process's umask.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_in(parent_of(path), path)
    }

    /// Begins the file `path` in the directory `work`, which must be on the same file system.
    ///
    /// # Errors
    /// If `work` cannot be written.
    pub fn create_in(work: &Path, path: &Path) -> io::Result<Self> {
        // By default, only the owner could access a temporary file.
        Self::create_as(work, path, 0o666)
    }

    /// Begins the file `path` in its directory, with access for its owner alone.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn create_private(path: &Path) -> io::Result<Self> {
        Self::create_private_in(parent_of(path), path)
    }

    /// Begins the file `path` in the directory `work`, with access for its owner alone.
    ///
    /// # Errors
    /// If `work` cannot be written.
    pub fn create_private_in(work: &Path, path: &Path) -> io::Result<Self> {
        Self::create_as(work, path, 0o600)
    }

    fn create_as(work: &Path, path: &Path, mode: u32) -> io::Result<Self> {
        let mut builder = Builder::new();
        builder.prefix(".unfinished-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            builder.permissions(std::fs::Permissions::from_mode(mode));
        }
        #[cfg(not(unix))]
        let _ = mode;
        Ok(Self {
            file: builder.tempfile_in(work)?,
            path: path.to_owned(),
        })
    }

    /// Where the unfinished file is.
    #[must_use]
    pub fn unfinished(&self) -> &Path {
        self.file.path()
    }

    /// The final path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flushes the file to the disk and renames it to its final path. This replaces an existing
    /// file.
    ///
    /// # Errors
    /// If either fails. An existing file then does not change.
    pub fn commit(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.file.persist(&self.path).map_err(|e| e.error)?;
        Ok(())
    }

    /// As [`AtomicFile::commit`], but never replaces an existing file.
    ///
    /// # Errors
    /// As [`AtomicFile::commit`], and `AlreadyExists` if there is a file at the path.
    pub fn commit_new(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.file
            .persist_noclobber(&self.path)
            .map_err(|e| e.error)?;
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for AtomicFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Writes a file completely or not at all.
///
/// # Errors
/// If it cannot be written.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes)?;
    file.commit()
}

/// The directory that a file is in, or will be.
#[must_use]
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, b"old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        assert_eq!(file.unfinished().parent(), Some(dir.path()));
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        // No partial file remains.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(
            file.commit_new().unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        replace(&path, b"newer").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"newer");
        assert!(replace(&dir.path().join("absent/file"), b"").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn permissions_are_those_of_a_new_file_or_of_the_owner_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let plain = dir.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        let ours = dir.path().join("ours");
        replace(&ours, b"").unwrap();
        assert_eq!(mode(&ours), mode(&plain));
        let private = dir.path().join("private");
        let file = AtomicFile::create_private(&private).unwrap();
        file.commit().unwrap();
        assert_eq!(mode(&private), 0o600);
    }
}
