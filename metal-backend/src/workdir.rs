//! Files that are written atomically. They are created in hidden directories, and then moved to
//! their destination. A killed process leaves its hidden directory behind. The next process that
//! works in the same place removes it.
//!
//! A running process locks its directory, and the system releases the lock when the process ends. A
//! process must lock a leftover directory before it removes the directory. A process that creates a
//! directory locks it, and then checks that the directory still exists. So a running process never
//! loses its directory.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use inference_formats::atomic::AtomicFile;
pub(crate) use inference_formats::atomic::parent_of;
use tempfile::TempDir;

/// The maximum number of attempts. An attempt fails if another process removes the new directory as
/// a leftover.
const TRIES: usize = 16;

/// A directory for unfinished files. Dropping it removes the directory.
#[derive(Debug)]
pub(crate) struct WorkDir {
    dir: TempDir,
    /// The lock on the directory; `None` on systems that cannot lock directories.
    _lock: Option<File>,
}

impl WorkDir {
    /// Creates a directory in `parent` with the name prefix `prefix`. Also removes the directories
    /// of dead processes that have this prefix.
    ///
    /// # Errors
    /// If the directory cannot be created.
    pub(crate) fn new(parent: &Path, prefix: &str) -> io::Result<Self> {
        remove_leftovers(parent, prefix);
        for _ in 0..TRIES {
            let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
            let lock = match File::open(dir.path()) {
                Ok(handle) => handle,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                // This system cannot open directories, so it cannot lock them.
                Err(_) => return Ok(Self { dir, _lock: None }),
            };
            match lock.try_lock() {
                Ok(()) if dir.path().is_dir() => {
                    let _lock = Some(lock);
                    return Ok(Self { dir, _lock });
                }
                Ok(()) | Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(_)) => return Ok(Self { dir, _lock: None }),
            }
        }
        Err(io::Error::other(
            "another process removes the directory in use",
        ))
    }

    /// The path of the directory.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes the directories of dead processes. A directory that cannot be removed stays, which does
/// no harm.
fn remove_leftovers(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix);
        // A link is not followed, because its target does not belong to us.
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let path = entry.path();
        let dead = File::open(&path).is_ok_and(|handle| match handle.try_lock() {
            Ok(()) => fs::remove_dir_all(&path).is_ok(),
            Err(_) => false,
        });
        if dead {
            tracing::info!(path = %path.display(), "removed what a killed process left");
        }
    }
}

/// Replaces a file atomically.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<()> {
    replace_by(parent_of(path), path, content)
}

/// Replaces a file as [`replace`] does. The temporary file is in `work`, which must be on the same
/// file system.
pub(crate) fn replace_by(work: &Path, path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        let mut file = AtomicFile::create_in(work, path)?;
        file.write_all(content)?;
        file.commit()
    };
    write().map_err(|e| unwritten(path, e))
}

/// Returns the error for a file that cannot be written.
pub(crate) fn unwritten(path: &Path, e: io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot write the file")
        .with_path(path)
        .with_source(e)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_named_once() {
        let dir = tempfile::tempdir().unwrap();
        let error = replace(&dir.path().join("absent/file"), b"x").unwrap_err();
        let message = format!("{error:#}");
        assert!(message.starts_with("cannot write the file"), "{message}");
        assert_eq!(message.matches("absent/file").count(), 1, "{message}");
    }

    #[test]
    fn the_dead_leave_nothing_and_the_living_keep_theirs() {
        let parent = tempfile::tempdir().unwrap();
        let dead = parent.path().join(".work-dead");
        fs::create_dir_all(dead.join("inside")).unwrap();
        fs::write(dead.join("inside/file"), "x").unwrap();
        let other = parent.path().join(".other-dead");
        fs::create_dir(&other).unwrap();
        let file = parent.path().join(".work-file");
        fs::write(&file, "x").unwrap();
        let linked = parent.path().join(".work-link");
        std::os::unix::fs::symlink(&other, &linked).unwrap();

        let living = WorkDir::new(parent.path(), ".work-").unwrap();
        assert!(!dead.exists());
        assert!(other.exists() && file.exists() && linked.exists());
        let second = WorkDir::new(parent.path(), ".work-").unwrap();
        assert!(living.path().is_dir() && second.path().is_dir());
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists() && second.path().is_dir());
    }
}
