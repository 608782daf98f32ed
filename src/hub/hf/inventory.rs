//! Lists and removes models of the shared cache.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use inference::{Error, ErrorKind, Result};
use serde::Serialize;

use super::layout::{Repository, failed};
use super::names::{is_plain, is_revision};
use super::{HfHub, ModelSpec, select};

/// A revision of a model in the cache.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CachedModel {
    /// The repository: `owner/name`.
    pub id: String,
    /// The commit.
    pub commit: String,
    /// The branches and tags that name this commit.
    pub refs: Vec<String>,
    /// Size of its files in bytes, including files that other revisions share.
    pub bytes: u64,
    /// Number of its files.
    pub files: usize,
    /// Whether the cache contains all files that the model needs.
    pub complete: bool,
    /// The directory.
    pub path: PathBuf,
    /// The time of its files' last change, in seconds since 1970.
    pub modified: Option<u64>,
}

/// The result of a removal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Removed {
    /// The commits.
    pub commits: Vec<String>,
    /// The freed bytes.
    pub bytes: u64,
}

impl HfHub {
    /// The models in the cache, one entry per revision, sorted by name. Repositories that are not
    /// models are omitted.
    ///
    /// # Errors
    /// If the cache exists but cannot be listed.
    pub fn list(&self) -> Result<Vec<CachedModel>> {
        let entries = match fs::read_dir(&self.cache) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed("cannot list the cache", &self.cache, e)),
        };
        let mut models = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let parts = name.to_str().and_then(|n| n.strip_prefix("models--"));
            let id = parts.and_then(|parts| parts.split_once("--"));
            let spec = id.and_then(|(owner, name)| ModelSpec::parse(&format!("{owner}/{name}")));
            if let Some(spec) = spec {
                models.extend(self.revisions(&spec));
            }
        }
        models.sort_by(|a, b| (&a.id, &a.commit).cmp(&(&b.id, &b.commit)));
        Ok(models)
    }

    /// The cached revisions of a repository.
    fn revisions(&self, spec: &ModelSpec) -> Vec<CachedModel> {
        let repository = Repository::new(&self.cache, spec);
        let refs = refs(&repository.root().join("refs"));
        commits(&repository)
            .into_iter()
            .map(|commit| {
                let path = repository.snapshot(&commit);
                let (mut bytes, mut modified) = (0u64, None::<SystemTime>);
                let files = files_below(&path);
                for file in &files {
                    if let Ok(metadata) = fs::metadata(file) {
                        bytes = bytes.saturating_add(metadata.len());
                        modified = modified.max(metadata.modified().ok());
                    }
                }
                CachedModel {
                    id: spec.id(),
                    refs: refs
                        .iter()
                        .filter(|(_, c)| **c == commit)
                        .map(|(r, _)| r.clone())
                        .collect(),
                    bytes,
                    files: files.len(),
                    complete: select::complete(&path, None).is_some()
                        || files
                            .iter()
                            .any(|f| f.extension().is_some_and(|e| e == "gguf")),
                    path,
                    modified: modified
                        .and_then(|m| m.duration_since(SystemTime::UNIX_EPOCH).ok())
                        .map(|d| d.as_secs()),
                    commit,
                }
            })
            .collect()
    }

    /// The revisions that [`Self::remove`] would delete, and the number of bytes that it would
    /// free.
    ///
    /// # Errors
    /// [`ErrorKind::ModelNotFound`] if the cache does not have the model.
    pub fn would_remove(&self, spec: &ModelSpec) -> Result<Removed> {
        let repository = Repository::new(&self.cache, spec);
        let all = commits(&repository);
        let nothing = || {
            Error::new(
                ErrorKind::ModelNotFound,
                format!("{spec} is not in the cache {}", self.cache.display()),
            )
        };
        if !spec.has_revision() {
            if !repository.root().is_dir() {
                return Err(nothing());
            }
            let blobs = files_below(&repository.root().join("blobs"));
            return Ok(Removed {
                commits: all,
                bytes: total(blobs.iter()),
            });
        }
        let commit = repository.commit_of(spec.revision()).ok_or_else(nothing)?;
        let bytes = total(own_blobs(&repository, &commit, &all).iter());
        Ok(Removed {
            commits: vec![commit],
            bytes,
        })
    }

    /// Deletes a model from the cache. If `spec` has a revision, deletes that revision and the
    /// files that only it uses; otherwise deletes the whole repository. The file name in `spec` is
    /// ignored.
    ///
    /// # Errors
    /// [`ErrorKind::ModelNotFound`] if the cache does not contain the model, [`ErrorKind::Io`] if
    /// it cannot be deleted.
    pub fn remove(&self, spec: &ModelSpec) -> Result<Removed> {
        let removed = self.would_remove(spec)?;
        let repository = Repository::new(&self.cache, spec);
        let root = repository.root();
        let all_revisions = !spec.has_revision() || removed.commits == commits(&repository);
        if all_revisions {
            remove_tree(&self.cache, root)?;
            if repository.locks().is_dir() {
                remove_tree(&self.cache, repository.locks())?;
            }
            return Ok(removed);
        }
        let Some(commit) = removed.commits.first() else {
            return Ok(removed);
        };
        let unshared = own_blobs(&repository, commit, &commits(&repository));
        for (name, _) in refs(&root.join("refs"))
            .iter()
            .filter(|(_, c)| *c == commit)
        {
            let path = root.join("refs").join(name);
            fs::remove_file(&path).map_err(|e| failed("cannot remove the revision", &path, e))?;
        }
        remove_tree(&self.cache, &repository.snapshot(commit))?;
        for blob in unshared {
            fs::remove_file(&blob).map_err(|e| failed("cannot remove the file", &blob, e))?;
        }
        Ok(removed)
    }
}

/// Deletes a directory. For other processes, it disappears in one step.
fn remove_tree(cache: &Path, dir: &Path) -> Result<()> {
    let cannot = |e| failed("cannot remove it from the cache", dir, e);
    let holder = tempfile::Builder::new()
        .prefix(".rm-")
        .tempdir_in(cache)
        .map_err(cannot)?;
    fs::rename(dir, holder.path().join("x")).map_err(cannot)?;
    holder.close().map_err(cannot)
}

/// The blobs to which only `commit` links. `all` lists all commits.
fn own_blobs(repository: &Repository, commit: &str, all: &[String]) -> BTreeSet<PathBuf> {
    let blobs = repository.root().join("blobs");
    let of = |commit: &str| -> BTreeSet<PathBuf> {
        let files = files_below(&repository.snapshot(commit));
        let targets = files.iter().filter_map(|f| fs::read_link(f).ok());
        // A link's target is `.../blobs/<etag>`. Only the last component is used, so that nothing
        // outside the directory is deleted.
        let names = targets.filter_map(|t| t.file_name()?.to_str().map(str::to_owned));
        names
            .filter(|n| is_plain(n))
            .map(|n| blobs.join(n))
            .filter(|b| b.is_file())
            .collect()
    };
    let mut unshared = of(commit);
    for other in all.iter().filter(|other| *other != commit) {
        for blob in of(other) {
            unshared.remove(&blob);
        }
    }
    unshared
}

fn total<'a>(files: impl Iterator<Item = &'a PathBuf>) -> u64 {
    files
        .filter_map(|f| fs::metadata(f).ok())
        .map(|m| m.len())
        .sum()
}

fn commits(repository: &Repository) -> Vec<String> {
    let mut commits: Vec<String> = fs::read_dir(repository.root().join("snapshots"))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.path().is_dir())
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|name| is_plain(name))
        .collect();
    commits.sort();
    commits
}

/// The commits of all branches and tags, by name.
fn refs(dir: &Path) -> BTreeMap<String, String> {
    let mut refs = BTreeMap::new();
    for file in files_below(dir) {
        let name = file.strip_prefix(dir).ok().and_then(Path::to_str);
        let name = name.map(|n| n.replace(std::path::MAIN_SEPARATOR, "/"));
        let small = fs::metadata(&file).is_ok_and(|m| m.len() <= 256);
        if let (Some(name), true, Ok(commit)) = (name, small, fs::read_to_string(&file))
            && is_revision(&name)
        {
            refs.insert(name, commit.trim().to_owned());
        }
    }
    refs
}

/// Files and links below a directory. Links to directories are not followed.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut open = vec![(dir.to_owned(), 0)];
    while let Some((dir, depth)) = open.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && depth < 16 => open.push((entry.path(), depth + 1)),
                Ok(kind) if !kind.is_dir() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files
}
