//! Hidden directories in which files are made before they are put in their place. A process that is killed
//! leaves its own behind; the next one that works beside it removes it.
//!
//! A living process holds a lock on its directory, which the system releases with the process. Whoever
//! removes a directory holds its lock, and whoever makes one checks after locking that it is still there, so
//! a living process never loses its own.

use std::fs::{self, File};
use std::io;
use std::path::Path;

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
    /// Makes one below `parent` whose name begins with `prefix`, and removes those with this prefix that
    /// dead processes left there.
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
            "another process removes what is made here",
        ))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes the directories of dead processes. What cannot be removed stays: it is in nobody's way.
fn remove_leftovers(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix);
        // Not a link: what it leads to is not ours.
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
