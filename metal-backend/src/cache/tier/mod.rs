//! Stores caches of computed prompts on disk, for later processes. They are files of
//! `cache/file.rs` in one directory with a size limit.
//!
//! Several processes may share a directory. A file gets its name only when it is complete, its
//! content determines the name, and it never changes. A process reads the directory again when its
//! modification time has changed. The modification time of a file is the time of its last use, so
//! that all processes know it.

mod entry;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::SystemTime;

use inference::{Error, ErrorKind, Result};
use inference_formats::atomic::private_dir;
use mlx_rs_core::Device;
use parking_lot::{Condvar, Mutex};

use self::entry::{About, Fault};
use self::writer::Queue;
use super::prefix::common;
use super::{Caches, copy_prefix, eval_caches, file, offset, trim};
use crate::error::engine;

/// An entry with `n` tokens is read only if it saves the computation of at least `n / LEAST_PART`
/// tokens.
const LEAST_PART: usize = 16;

/// The identity of the computation, apart from the adapter.
#[derive(Debug, Clone)]
pub struct Computation {
    /// The identity of the model's files.
    pub model: String,
    /// A description of all other settings that change the computed values.
    pub variant: String,
    /// The name of the model for mlx-lm.
    pub source: String,
    /// The device of the model.
    pub device: Device,
}

/// The identity of a request's caches: the adapter, and the salt.
#[derive(Debug, Clone, Copy)]
pub struct Of<'a> {
    /// The hash of the adapter's files.
    pub adapter: Option<&'a str>,
    /// The salt. Only requests with an equal salt may use the caches.
    pub salt: Option<&'a str>,
}

/// A directory that exists and can be written.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    bytes: u64,
}

impl Directory {
    /// Creates the directory if it is missing, and checks that it can be written. `bytes` limits
    /// the total size of its files.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if it cannot be created or written.
    pub fn open(path: &Path, bytes: u64) -> Result<Self> {
        private_dir(path).map_err(|e| {
            let message = "the directory of cache_dir cannot be made or written";
            Error::new(ErrorKind::Io, message)
                .with_path(path)
                .with_source(e)
        })?;
        Ok(Self {
            path: path.to_owned(),
            bytes,
        })
    }
}

/// The prompts of one model in a directory. Dropping the tier waits until all prompts are written.
#[derive(Debug)]
pub struct Tier {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    dir: Directory,
    computation: Computation,
    index: Mutex<Index>,
    queue: Mutex<Queue>,
    /// Signals changes of the queue.
    changed: Condvar,
    has_warned: AtomicBool,
}

/// The known files of the directory, by name.
#[derive(Debug, Default)]
struct Index {
    /// The entries of this model.
    entries: BTreeMap<String, Arc<About>>,
    /// Files of other models, and unusable files.
    others: BTreeSet<String>,
    /// The directory's modification time before it was last read.
    changed: Option<SystemTime>,
}

/// A file of the directory.
#[derive(Debug)]
struct Seen {
    name: String,
    bytes: u64,
    used: SystemTime,
}

impl Tier {
    /// Opens the entries of `computation` in `dir`. Reads the headers of the files.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the directory cannot be read, or no thread can be started.
    pub fn new(dir: Directory, computation: Computation) -> Result<Self> {
        let path = dir.path.clone();
        let fault = |what: &str, e| {
            let message = format!("{what} (cache_dir)");
            (Error::new(ErrorKind::Io, message).with_path(&path)).with_source(e)
        };
        let shared = Arc::new(Shared {
            dir,
            computation,
            index: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            has_warned: AtomicBool::new(false),
        });
        let (_, foreign) = (shared.refresh()).map_err(|e| fault("cannot read the directory", e))?;
        if foreign > 0 {
            tracing::warn!(
                "{} has {foreign} other files, which are ignored",
                path.display()
            );
        }
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("prompt cache".to_owned())
            .spawn(move || of_thread.write_all())
            .map_err(|e| fault("cannot start a thread for the directory", e))?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Waits until all entries are written, and makes later calls write nothing.
    pub fn close(&self) {
        self.shared.close();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that writes computed prompts failed");
        }
    }

    /// Describes caches like `like` that contain `tokens`.
    fn about(&self, of: Of<'_>, like: &Caches, tokens: Vec<u32>) -> About {
        let computation = &self.shared.computation;
        let kinds: Vec<String> = like.iter().map(|layer| layer.kind()).collect();
        About {
            model: computation.model.clone(),
            adapter: of.adapter.map(str::to_owned),
            variant: computation.variant.clone(),
            salt: of.salt.map(|salt| entry::hash(["salt", salt])),
            kinds: entry::hash(kinds.iter().map(String::as_str)),
            stretch: like.stretch(),
            tokens,
            ..About::default()
        }
    }

    /// Writes `caches`, which contain `tokens`, on another thread. Writes nothing if an equal or
    /// longer entry exists. Removes shorter entries that the new entry can replace.
    ///
    /// The caches are copied, because later requests change them in place. Call this function in
    /// the scope of their device.
    pub fn put(&self, of: Of<'_>, tokens: &[u32], caches: &Caches) {
        let n = offset(caches);
        let is_whole = usize::try_from(n) == Ok(tokens.len());
        if tokens.is_empty() || !is_whole || caches.changes_gradually() {
            return;
        }
        let mut about = self.about(of, caches, tokens.to_vec());
        about.cuts = caches.iter().all(|layer| layer.can_trim(n - 1));
        if let Some(name) = self.shared.covering(&about) {
            self.shared.touch(&name);
            return;
        }
        let copy = copy_prefix(caches, n).and_then(|copy| match copy {
            // A file does not record the expected length of the sequence, so the copy gets the
            // length of its tokens.
            Some(copy) => {
                let copy = copy.for_sequence(tokens.len());
                eval_caches(&copy)?;
                Ok(Some(copy))
            }
            None => Ok(None),
        });
        match copy {
            Ok(Some(copy)) if copy.stretch() == about.stretch => self.shared.enqueue(about, copy),
            Ok(_) => {}
            Err(e) => self.shared.warn(&e.to_string()),
        }
    }

    /// Returns caches with the longest common prefix with `prompt`, truncated to that prefix, and
    /// its length. Returns `None` if reading would not save enough tokens over the `have` tokens
    /// that the caller already has. `like` are empty caches for the prompt, and `empty` creates
    /// others. `one` computes caches of one token.
    ///
    /// Call this function in the scope of the caches' device.
    pub fn take(
        &self,
        of: Of<'_>,
        prompt: &[u32],
        (like, have): (&Caches, usize),
        (empty, one): (&dyn Fn() -> Caches, &mut dyn FnMut() -> Result<Caches>),
    ) -> Option<(Caches, usize)> {
        if like.changes_gradually() {
            return None;
        }
        self.shared.catch_up();
        let wanted = self.about(of, like, Vec::new());
        let reach = usize::try_from(like.reach()).unwrap_or(0);
        // Each iteration forgets an entry or returns, so the loop ends.
        loop {
            let (name, about, n) = self.shared.best(&wanted, prompt, have)?;
            let path = self.shared.dir.path.join(&name);
            let read = entry::verify(&path).and_then(|()| {
                let kept = file::load(&path, &about.identity(), empty(), one)
                    .map_err(|e| Fault::Foreign(format!("{e:#}")))?;
                match kept.tokens.as_ref() == Some(&about.tokens) {
                    true => Ok(kept.caches),
                    false => Err(Fault::Foreign("it holds other tokens".to_owned())),
                }
            });
            let mut caches = match read {
                Ok(caches) => caches,
                Err(fault) => {
                    self.shared.forget(&name, fault);
                    continue;
                }
            };
            let surplus = i32::try_from(about.tokens.len() - n).unwrap_or(i32::MAX);
            let is_cut = surplus == 0 || trim(&mut caches, surplus);
            let caches = caches.for_sequence(reach);
            if !is_cut || !super::alike(&caches, like) {
                let why = "it cannot be used for its beginning".to_owned();
                self.shared.forget(&name, Fault::Foreign(why));
                continue;
            }
            if let Err(e) = eval_caches(&caches).map_err(engine("prompt cache")) {
                self.shared.forget(&name, Fault::Foreign(e.to_string()));
                continue;
            }
            self.shared.touch(&name);
            tracing::debug!(tokens = n, path = %path.display(), "read a computed prompt");
            return Some((caches, n));
        }
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Logs a warning of the first failure. Later failures probably have the same cause.
    fn warn(&self, message: &str) {
        let dir = self.dir.path.display();
        match self.has_warned.swap(true, Ordering::Relaxed) {
            false => tracing::warn!(
                "{dir}: {message}; requests go on without it, and later failures are not reported"
            ),
            true => tracing::debug!("{dir}: {message}"),
        }
    }

    /// Returns the name of a known entry that makes `about` redundant.
    fn covering(&self, about: &About) -> Option<String> {
        let index = self.index.lock();
        let covers = |other: &About| {
            let is_longer = other.cuts && other.tokens.starts_with(&about.tokens);
            other.is_akin(about) && (is_longer || other.tokens == about.tokens)
        };
        let mut entries = index.entries.iter();
        let found = entries.find(|(_, other)| covers(other));
        found.map(|(name, _)| name.clone())
    }

    /// Returns the entry with the most usable tokens for `prompt`, as in [`Tier::take`].
    fn best(
        &self,
        wanted: &About,
        prompt: &[u32],
        have: usize,
    ) -> Option<(String, Arc<About>, usize)> {
        let index = self.index.lock();
        let usable = |about: &About| -> usize {
            if !about.is_akin(wanted) {
                return 0;
            }
            // The last token is never taken from an entry, because its pass computes the first
            // logits.
            let n = common(&about.tokens, prompt).min(prompt.len().saturating_sub(1));
            let is_whole = n == about.tokens.len();
            let saved = n.saturating_sub(have);
            let is_worth = saved > 0 && saved.saturating_mul(LEAST_PART) >= about.tokens.len();
            if is_worth && (is_whole || about.cuts) {
                n
            } else {
                0
            }
        };
        index
            .entries
            .iter()
            .map(|(name, about)| (name, about, usable(about)))
            .filter(|(.., n)| *n > 0)
            // If several entries are equal, the shorter file is read.
            .max_by_key(|(_, about, n)| (*n, std::cmp::Reverse(about.tokens.len())))
            .map(|(name, about, n)| (name.clone(), Arc::clone(about), n))
    }

    /// Marks an entry as used now. A failure does no harm.
    fn touch(&self, name: &str) {
        let path = self.dir.path.join(name);
        let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// Forgets an unusable entry, and removes its file if it is damaged.
    fn forget(&self, name: &str, fault: Fault) {
        let path = self.dir.path.join(name);
        let mut index = self.index.lock();
        index.entries.remove(name);
        match fault {
            Fault::Gone => return,
            Fault::Damaged(why) => {
                tracing::warn!("{} is removed: {why}", path.display());
                if fs::remove_file(&path).is_ok() {
                    return;
                }
            }
            Fault::Foreign(why) => tracing::warn!("{} is ignored: {why}", path.display()),
        }
        index.others.insert(name.to_owned());
    }

    /// Returns the directory's modification time, if the system provides it.
    fn changed_at(&self) -> Option<SystemTime> {
        fs::metadata(&self.dir.path).ok()?.modified().ok()
    }

    /// Updates the index if other processes have written or removed files.
    fn catch_up(&self) {
        let changed = self.changed_at();
        if changed.is_some() && self.index.lock().changed == changed {
            return;
        }
        if let Err(e) = self.refresh() {
            self.warn(&format!("cannot read the directory: {e}"));
        }
    }

    /// Reads the directory, and the headers of new files. Returns the files with names of entries,
    /// and the number of other files.
    fn refresh(&self) -> std::io::Result<(Vec<Seen>, usize)> {
        let changed = self.changed_at();
        let (mut seen, mut foreign) = (Vec::new(), 0);
        for found in fs::read_dir(&self.dir.path)? {
            let found = found?;
            let name = found.file_name();
            let Some(name) = name.to_str().filter(|name| entry::is_entry(name)) else {
                // Hidden files are still being written, so they are not counted.
                let is_hidden = name.to_string_lossy().starts_with('.');
                foreign += usize::from(!is_hidden);
                continue;
            };
            // Another process may have removed the file.
            let Ok(metadata) = found.metadata() else {
                continue;
            };
            if metadata.is_file() {
                seen.push(Seen {
                    name: name.to_owned(),
                    bytes: metadata.len(),
                    used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                });
            }
        }
        let new: Vec<String> = {
            let mut index = self.index.lock();
            index.changed = changed;
            let names: BTreeSet<&str> = seen.iter().map(|seen| seen.name.as_str()).collect();
            index
                .entries
                .retain(|name, _| names.contains(name.as_str()));
            index.others.retain(|name| names.contains(name.as_str()));
            let is_known =
                |name: &str| index.entries.contains_key(name) || index.others.contains(name);
            let new = names.iter().filter(|name| !is_known(name));
            new.map(|name| (*name).to_owned()).collect()
        };
        for name in new {
            match entry::read(&self.dir.path.join(&name), &name) {
                Ok(about) if about.model == self.computation.model => {
                    self.index.lock().entries.insert(name, Arc::new(about));
                }
                Ok(_) => {
                    self.index.lock().others.insert(name);
                }
                Err(fault) => {
                    self.forget(&name, fault);
                    let index = self.index.lock();
                    if !index.others.contains(&name) {
                        seen.retain(|seen| seen.name != name);
                    }
                }
            }
        }
        Ok((seen, foreign))
    }
}

#[cfg(test)]
mod tests;
