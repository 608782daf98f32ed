//! Atomic file replacement. A file gets its final name only when it is complete. Readers see either
//! the old file or the new one, and an interrupted writer leaves the old one.
//!
//! A killed process leaves its unfinished file. The next write to that directory removes the file
//! if it is older than a day and no process has locked it.

use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

/// Prefix of the names of unfinished files. [`RANDOM`] letters and digits follow.
const PREFIX: &str = ".unfinished-mlx-";
const RANDOM: usize = 12;

/// An unfinished file may be removed only after this time since its last write. A lock alone does
/// not suffice, because on some file systems other machines do not see it.
#[cfg(unix)]
const STALE: std::time::Duration = std::time::Duration::from_secs(24 * 60 * 60);

/// An unfinished file. Dropping the value removes the file.
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
    /// Creates an unfinished file in the directory of `path`. It has the permissions of any new
    /// file under the process's umask.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_in(parent_of(path), path)
    }

    /// Creates an unfinished file for `path` in the directory `work`, which must be on the file
    /// system of `path`.
    ///
    /// # Errors
    /// If `work` cannot be written.
    pub fn create_in(work: &Path, path: &Path) -> io::Result<Self> {
        // By default, only the owner could access a temporary file.
        Self::create_as(work, path, 0o666)
    }

    /// Creates an unfinished file in the directory of `path`, with access only for its owner.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn create_private(path: &Path) -> io::Result<Self> {
        Self::create_private_in(parent_of(path), path)
    }

    /// Creates an unfinished file for `path` in the directory `work`, with access only for its
    /// owner.
    ///
    /// # Errors
    /// If `work` cannot be written.
    pub fn create_private_in(work: &Path, path: &Path) -> io::Result<Self> {
        Self::create_as(work, path, 0o600)
    }

    fn create_as(work: &Path, path: &Path, mode: u32) -> io::Result<Self> {
        #[cfg(unix)]
        remove_stale(work);
        let mut builder = Builder::new();
        builder.prefix(PREFIX).rand_bytes(RANDOM);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            builder.permissions(std::fs::Permissions::from_mode(mode));
        }
        #[cfg(not(unix))]
        let _ = mode;
        let file = builder.tempfile_in(work)?;
        // Other processes remove unfinished files that are not locked, so the lock protects this
        // one. Only Unix has the lock: elsewhere this process could not open a locked file again,
        // and no process removes files.
        #[cfg(unix)]
        let _ = file.as_file().try_lock();
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    /// The path of the unfinished file.
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
    /// If flushing or renaming fails. An existing file then stays unchanged.
    pub fn commit(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.file.persist(&self.path).map_err(|e| e.error)?;
        Ok(())
    }

    /// Like [`AtomicFile::commit`], but never replaces an existing file.
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

/// Removes the unfinished files of killed processes from a directory. Errors are ignored; the files
/// then stay.
#[cfg(unix)]
fn remove_stale(dir: &Path) {
    let is_ours = |name: &str| {
        name.strip_prefix(PREFIX).is_some_and(|random| {
            random.len() == RANDOM && random.bytes().all(|b| b.is_ascii_alphanumeric())
        })
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_ours)
            && entry.file_type().is_ok_and(|kind| kind.is_file())
        {
            let _ = remove_if_stale(&entry.path());
        }
    }
}

#[cfg(unix)]
fn remove_if_stale(path: &Path) -> io::Result<()> {
    let age = std::fs::metadata(path)?.modified()?.elapsed();
    if age.is_ok_and(|age| age > STALE) {
        // Also opened for writing, because opening a pipe only for reading would block.
        let file = std::fs::File::options().read(true).write(true).open(path)?;
        // The owner keeps the lock until it ends, so an error means that the file is in use.
        file.try_lock()?;
        std::fs::remove_file(path)?;
    }
    Ok(())
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

/// Makes a directory with access for its owner alone, if it is missing, and checks that it can be
/// written.
///
/// # Errors
/// If it cannot be made or written.
pub fn private_dir(path: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)?;
    AtomicFile::create_private(&path.join("writable")).map(drop)
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
    fn a_private_directory_can_be_written_by_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er");
        private_dir(&path).unwrap();
        private_dir(&path).unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
        }
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        for bad in [&file, &file.join("below")] {
            assert!(private_dir(bad).is_err(), "{}", bad.display());
        }
    }

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
    fn old_files_of_ended_processes_are_removed_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let old = std::time::SystemTime::now() - 2 * STALE;
        let age = |path: &Path| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_modified(old).unwrap();
        };
        // Imitates a killed process: no destructor runs, and the lock is released.
        let killed = || {
            let file = AtomicFile::create(&path).unwrap();
            file.file.keep().unwrap().1
        };
        let (stale, recent) = (killed(), killed());
        age(&stale);
        let living = AtomicFile::create(&path).unwrap();
        age(living.unfinished());
        let others = [
            ".unfinished-mlx-note",
            ".unfinished-mlx-0123456789ab.txt",
            "unfinished",
        ];
        for name in others {
            std::fs::write(dir.path().join(name), "").unwrap();
            age(&dir.path().join(name));
        }
        let directory = dir.path().join(".unfinished-mlx-abcdefghijkl");
        std::fs::create_dir(&directory).unwrap();
        replace(&path, b"new").unwrap();
        assert!(!stale.exists());
        assert!(recent.exists() && directory.exists());
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
        // The file of a living process can still be committed.
        living.commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
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
