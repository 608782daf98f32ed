//! The layout of a repository in the shared cache, as in Python's `huggingface_hub`: files in
//! `blobs/<etag>`, links to them in `snapshots/<commit>/<file>`, a commit in each
//! `refs/<revision>`, and locks.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use inference_formats::atomic;

use super::ModelSpec;
use super::names::{is_plain, is_revision};
use crate::hub::progress::{Progress, Stage};

/// The maximum size of a file in `refs`, in bytes.
const MAX_REF: u64 = 256;

/// The paths of a repository in the cache.
pub(super) struct Repository {
    root: PathBuf,
    locks: PathBuf,
}

impl Repository {
    /// The paths of `spec`'s repository. Nothing is created.
    pub(super) fn new(cache: &Path, spec: &ModelSpec) -> Self {
        let folder = format!("models--{}--{}", spec.owner(), spec.name());
        Self {
            root: cache.join(&folder),
            locks: cache.join(".locks").join(folder),
        }
    }

    /// The directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of its locks.
    pub(super) fn locks(&self) -> &Path {
        &self.locks
    }

    /// The path of the content with this ETag.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// The path of the incomplete content with this ETag.
    pub(super) fn partial(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// The directory of a commit's files.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// The commit of a revision, according to the cache.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        if is_plain(revision) && self.snapshot(revision).is_dir() {
            return Some(revision.to_owned());
        }
        if !is_revision(revision) {
            return None;
        }
        let path = self.root.join("refs").join(revision);
        if fs::metadata(&path).ok()?.len() > MAX_REF {
            return None;
        }
        let commit = fs::read_to_string(path).ok()?;
        let commit = commit.trim();
        (is_plain(commit) && self.snapshot(commit).is_dir()).then(|| commit.to_owned())
    }

    /// Records that `revision` is `commit`.
    pub(super) fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(revision);
        let write = || -> io::Result<()> {
            let dir = path.parent().unwrap_or(&self.root);
            fs::create_dir_all(dir)?;
            atomic::replace(&path, commit.as_bytes())
        };
        write().map_err(|e| failed("cannot write the revision", &path, e))
    }

    /// Makes the file `name` of `commit` a link to the content `etag`.
    pub(super) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<PathBuf> {
        let path = self.snapshot(commit).join(name);
        // The relative path from `snapshots/<commit>/<dirs>/` up to the repository's directory.
        let up = "../".repeat(2 + name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        let link = || -> io::Result<()> {
            if fs::read_link(&path).is_ok_and(|current| current == target) {
                return Ok(());
            }
            let dir = path.parent().unwrap_or(&self.root);
            fs::create_dir_all(dir)?;
            // The link is created under a temporary name and then renamed, so that it appears
            // atomically.
            let holder = tempfile::Builder::new().prefix(".link-").tempdir_in(dir)?;
            let fresh = holder.path().join("l");
            make_link(&target, &self.blob(etag), &fresh)?;
            fs::rename(&fresh, &path)
        };
        link().map_err(|e| failed("cannot link the file into the cache", &path, e))?;
        Ok(path)
    }

    /// Waits for the lock of a content and acquires it. Dropping the file releases the lock.
    pub(super) fn lock(&self, etag: &str, progress: &mut dyn Progress) -> Result<File> {
        let path = self.locks.join(format!("{etag}.lock"));
        let open = || {
            fs::create_dir_all(&self.locks)?;
            fs::create_dir_all(self.root.join("blobs"))?;
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true).open(&path)
        };
        let file = open().map_err(|e| {
            failed(
                "cannot write to the cache (HF_HUB_CACHE can name another)",
                &path,
                e,
            )
        })?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.begin(Stage::Waiting, etag, 0);
                let locked = file.lock();
                progress.end();
                locked.map_err(|e| failed("cannot lock", &path, e))?;
            }
            // Some network file systems have no locks. Without a lock, atomic renames still keep
            // the cache consistent.
            Err(TryLockError::Error(e)) => {
                tracing::warn!(path = %path.display(), "no lock on this file system: {e}");
            }
        }
        Ok(file)
    }
}

#[cfg(unix)]
fn make_link(target: &Path, _: &Path, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

/// On this system, creating links needs a privilege. Like Python's client, this creates a hard link
/// or a copy.
#[cfg(not(unix))]
fn make_link(_: &Path, blob: &Path, at: &Path) -> io::Result<()> {
    fs::hard_link(blob, at).or_else(|_| fs::copy(blob, at).map(|_| ()))
}

pub(super) fn failed(what: &str, path: &Path, e: io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("{what}: {e}"))
        .with_path(path)
        .with_source(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_followed_to_what_is_there_only() {
        let cache = tempfile::tempdir().unwrap();
        let spec = ModelSpec::parse("own/tiny.model").unwrap();
        let repository = Repository::new(cache.path(), &spec);
        assert!(repository.root().ends_with("models--own--tiny.model"));
        fs::create_dir_all(repository.snapshot("abc123")).unwrap();
        repository.write_ref("main", "abc123").unwrap();
        repository.write_ref("refs/pr/1", "abc123").unwrap();
        for revision in ["main", "refs/pr/1", "abc123"] {
            assert_eq!(repository.commit_of(revision).as_deref(), Some("abc123"));
        }
        assert_eq!(repository.commit_of("other"), None);
        assert_eq!(repository.commit_of("../main"), None);
        for lie in ["../../..", "..", "", "gone"] {
            fs::write(repository.root().join("refs/main"), lie).unwrap();
            assert_eq!(repository.commit_of("main"), None, "{lie:?}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_are_relative_and_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let repository = Repository::new(cache.path(), &ModelSpec::parse("o/m").unwrap());
        fs::create_dir_all(repository.root().join("blobs")).unwrap();
        for etag in ["e1", "e2"] {
            fs::write(repository.blob(etag), etag).unwrap();
            for name in ["x", "a/b/x"] {
                let path = repository.link("c", name, etag).unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), etag);
                assert!(fs::read_link(&path).unwrap().is_relative());
            }
        }
        // No temporary files may remain.
        let left = fs::read_dir(repository.snapshot("c")).unwrap().count();
        assert_eq!(left, 2);
    }
}
