//! Writes entries on a separate thread, so that no request waits for the disk.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use mlx_rs_core::Stream;

use super::entry::{self, About};
use super::{Shared, file};
use crate::cache::Caches;
use crate::cache::file_tensors::Additions;
use crate::error::engine;

/// Limits of the queue: the number of entries, and the bytes of their copies in memory.
const MOST_WAITING: usize = 8;
const MOST_BYTES: usize = 1 << 30;

/// Entries that wait to be written, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: VecDeque<Job>,
    is_closed: bool,
    /// Whether an entry is being written.
    is_busy: bool,
}

#[derive(Debug)]
struct Job {
    about: About,
    caches: Caches,
    bytes: usize,
}

/// Whether the entry `longer` makes the entry `about` redundant.
fn replaces(longer: &About, about: &About) -> bool {
    longer.cuts && longer.is_akin(about) && longer.tokens.starts_with(&about.tokens)
}

impl Shared {
    /// Adds an entry to the queue. Drops queued entries that it replaces. If the limits are
    /// exceeded, also drops the oldest entries.
    pub(super) fn enqueue(&self, about: About, caches: Caches) {
        let bytes = caches.iter().map(|layer| layer.nbytes()).sum();
        let mut queue = self.queue.lock();
        if queue.is_closed {
            return;
        }
        queue.waiting.retain(|job| !replaces(&about, &job.about));
        queue.waiting.push_back(Job {
            about,
            caches,
            bytes,
        });
        let all = |queue: &Queue| queue.waiting.iter().map(|job| job.bytes).sum::<usize>();
        while queue.waiting.len() > MOST_WAITING
            || (queue.waiting.len() > 1 && all(&queue) > MOST_BYTES)
        {
            queue.waiting.pop_front();
            tracing::debug!("a computed prompt is not written: the disk is too slow");
        }
        self.changed.notify_all();
    }

    /// Makes the thread end once it has written all queued entries.
    pub(super) fn close(&self) {
        self.queue.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Returns the next entry to write; `None` once the queue is closed and empty.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        queue.is_busy = false;
        self.changed.notify_all();
        loop {
            if let Some(job) = queue.waiting.pop_front() {
                queue.is_busy = true;
                return Some(job);
            }
            if queue.is_closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    /// Waits until all queued entries are written.
    #[cfg(test)]
    pub(super) fn until_idle(&self) {
        let mut queue = self.queue.lock();
        while queue.is_busy || !queue.waiting.is_empty() {
            self.changed.wait(&mut queue);
        }
    }

    /// Writes entries until the queue is closed and empty.
    pub(super) fn write_all(&self) {
        while let Some(job) = self.next() {
            if let Err(e) = self.write(job) {
                self.warn(&format!("cannot keep a computed prompt: {e:#}"));
            }
        }
    }

    /// Writes one entry, unless an equal or longer entry exists.
    fn write(&self, job: Job) -> inference::Result<()> {
        let path = &self.dir.path;
        let unread = |e: io::Error| {
            inference::Error::new(inference::ErrorKind::Io, "cannot read the directory")
                .with_path(path)
                .with_source(e)
        };
        // Another process may have written the entry.
        self.refresh().map_err(unread)?;
        if let Some(name) = self.covering(&job.about) {
            self.touch(&name);
            return Ok(());
        }
        let (about, name) = (&job.about, job.about.name());
        let texts = about.texts().map_err(|e| {
            let message = "the prompt cache cannot be described";
            inference::Error::new(inference::ErrorKind::Engine, message).with_source(e)
        })?;
        let finish = |unfinished: &Path| -> io::Result<()> {
            let bytes = fs::metadata(unfinished)?.len();
            if !self.make_room(bytes, about)? {
                return Err(io::Error::other(format!(
                    "its {bytes} bytes do not fit the {} of cache_dir_bytes, beside the files of \
                     other models; set it higher, or remove files",
                    self.dir.bytes
                )));
            }
            entry::seal(unfinished)
        };
        let additions = Additions {
            texts: &texts,
            finish: &finish,
        };
        let stream = Stream::default_of(self.computation.device).map_err(engine("prompt cache"))?;
        let names = (about.identity(), self.computation.source.as_str());
        stream.scope(|| {
            let to = path.join(&name);
            let names = (names.0.as_str(), names.1);
            file::save_with(&to, names, &about.tokens, &job.caches, &additions)
        })?;
        self.add_written(name, job.about);
        Ok(())
    }

    /// Adds an entry whose file is written, and removes the entries that it replaces.
    pub(super) fn add_written(&self, name: String, about: About) {
        let mut index = self.index.lock();
        // A request may have read the directory after the file got its name. Then the entry is
        // already in the index, and it must not remove its own file.
        let replaced: Vec<String> = (index.entries.iter())
            .filter(|(other, known)| **other != name && replaces(&about, known))
            .map(|(other, _)| other.clone())
            .collect();
        for other in replaced {
            index.entries.remove(&other);
            let _ = fs::remove_file(self.dir.path.join(other));
        }
        index.entries.insert(name, Arc::new(about));
    }

    /// Removes entries of this model until `bytes` more fit: first those that `about` replaces,
    /// then the least recently used. Removes nothing and returns false if `bytes` can never fit.
    fn make_room(&self, bytes: u64, about: &About) -> io::Result<bool> {
        let (seen, _) = self.refresh()?;
        let mut index = self.index.lock();
        let mut all = seen.iter().map(|seen| seen.bytes).sum::<u64>();
        let mut own: Vec<_> = (seen.iter())
            .filter_map(|seen| Some((seen, Arc::clone(index.entries.get(&seen.name)?))))
            .collect();
        let others = all - own.iter().map(|(seen, _)| seen.bytes).sum::<u64>();
        if others.saturating_add(bytes) > self.dir.bytes {
            return Ok(false);
        }
        own.sort_by_key(|(seen, other)| (Reverse(replaces(about, other)), seen.used));
        for (seen, _) in own {
            if all.saturating_add(bytes) <= self.dir.bytes {
                break;
            }
            index.entries.remove(&seen.name);
            match fs::remove_file(self.dir.path.join(&seen.name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => all -= seen.bytes,
            }
        }
        Ok(true)
    }
}
