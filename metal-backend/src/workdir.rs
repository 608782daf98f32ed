//! Files that appear as a whole or not at all. They are made in hidden directories and then moved
//! into place. A process that is killed leaves its directory behind; the next one that works beside
//! it removes it.
//!
//! A living process holds a lock on its directory, which the system releases with the process. A
//! process that removes a directory holds its lock. One that makes a directory checks after locking
//! that it still exists. So a living process never loses its own.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use tempfile::TempDir;

/// How often making one is tried: each failure means that another process took it for a leftover.
const TRIES: usize = 16;

/// A directory for files in the making; gone when dropped.
#[derive(Debug)]
pub(crate) struct WorkDir {
    dir: TempDir,
    /// Held as long as the directory is in use; `None` where the system locks no directories.
    _lock: Option<File>,
}

impl WorkDir {
    /// Makes one below `parent` whose name begins with `prefix`, and removes those with this prefix
    /// that dead processes left there.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn new(parent: &Path, prefix: &str) -> io::Result<Self> {
        remove_leftovers(parent, prefix);
        for _ in 0..TRIES {
            let dir = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
            let lock = match File::open(dir.path()) {
                Ok(handle) => handle,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                // Not a system that opens directories.
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

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes the directories of dead processes. A directory that cannot be removed stays; it does no
/// harm.
fn remove_leftovers(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix);
        // Not a link: its target is not ours.
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

/// Replaces a file as a whole, or leaves the old one.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty());
    replace_by(dir.unwrap_or(Path::new(".")), path, content)
}

/// The same, written in `work` first, which is on the same disk.
pub(crate) fn replace_by(work: &Path, path: &Path, content: &[u8]) -> Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any new file; the process's umask takes its part.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let write = || {
        let mut file = builder.tempfile_in(work)?;
        file.write_all(content)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|e| e.error)
    };
    write().map(drop).map_err(|e| {
        Error::new(ErrorKind::Io, format!("cannot write the file: {e}"))
            .with_path(path)
            .with_source(e)
    })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

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
