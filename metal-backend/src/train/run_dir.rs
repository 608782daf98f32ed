//! The directory of a run: its permitted contents at the start, and how saves replace files.

use std::path::Path;

use inference::{Error, ErrorKind, Result};

use super::report::{EVENTS_PREFIX, METRICS_FILE};
use super::state;
use super::train_log::PLOT_FILE;
use crate::adapter::{CONFIG_FILE, WEIGHTS_FILE};

/// The subdirectory with the adapter whose validation had the lowest loss.
pub const BEST_DIR: &str = "best";

/// How a run treats files of an earlier run in [`super::config::TrainConfig::adapter_path`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// Starts a new run. The directory must not contain an adapter.
    #[default]
    Fresh,
    /// Starts a new run, and replaces the adapter of an earlier run.
    Overwrite,
    /// Resumes the interrupted run.
    Resume,
}

/// Returns an error if the directory does not permit this kind of start. It needs no model, so a
/// program can call it before a download.
///
/// # Errors
/// [`ErrorKind::Io`] for [`Start::Fresh`] if an adapter exists, [`ErrorKind::InvalidOption`] for
/// [`Start::Resume`] if there is no saved run.
pub fn check_start(dir: &Path, start: Start) -> Result<()> {
    match start {
        Start::Resume if !dir.join(state::STATE_FILE).is_file() => {
            let message = format!(
                "there is no {} here to resume from; begin without resume",
                state::STATE_FILE
            );
            Err(Error::new(ErrorKind::InvalidOption, message).with_path(dir))
        }
        Start::Fresh => match [state::STATE_FILE, WEIGHTS_FILE, CONFIG_FILE]
            .into_iter()
            .find(|name| dir.join(name).exists())
        {
            Some(name) => Err(Error::new(
                ErrorKind::Io,
                format!(
                    "the directory holds {name} of an earlier run; --resume goes on with that run, --overwrite \
                     replaces it"
                ),
            )
            .with_path(dir)),
            None => Ok(()),
        },
        Start::Resume | Start::Overwrite => Ok(()),
    }
}

/// Removes the resume state of an earlier run, so that two runs do not mix. The adapter remains
/// until the first save replaces it.
pub(super) fn remove_earlier(dir: &Path) -> Result<()> {
    let failed = |path: &Path, e: std::io::Error| {
        Error::new(ErrorKind::Io, "cannot remove the file")
            .with_path(path)
            .with_source(e)
    };
    // The user may have other files in the directory of the best adapter, so only files of a run
    // are removed.
    let best = dir.join(BEST_DIR);
    for path in [WEIGHTS_FILE, CONFIG_FILE].map(|name| best.join(name)) {
        if path.is_file() {
            std::fs::remove_file(&path).map_err(|e| failed(&path, e))?;
        }
    }
    let entries = std::fs::read_dir(dir).map_err(|e| failed(dir, e))?;
    for entry in entries {
        let entry = entry.map_err(|e| failed(dir, e))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let numbered = name
            .strip_suffix(WEIGHTS_FILE)
            .and_then(|front| front.strip_suffix('_'))
            .is_some_and(|n| n.len() == 7 && n.bytes().all(|b| b.is_ascii_digit()));
        let is_log = name == METRICS_FILE || name.starts_with(EVENTS_PREFIX);
        if numbered || is_log || name == state::STATE_FILE || name == PLOT_FILE {
            std::fs::remove_file(entry.path()).map_err(|e| failed(&entry.path(), e))?;
        }
    }
    Ok(())
}

/// Moves a complete file to its destination.
pub(super) fn publish(work: &Path, dir: &Path, name: &str) -> Result<()> {
    let to = dir.join(name);
    std::fs::rename(work.join(name), &to).map_err(|e| {
        Error::new(ErrorKind::Io, "cannot put the file in its place")
            .with_path(&to)
            .with_source(e)
    })
}

/// Adds a hard link to the saved adapter (or a copy), with the step in its name. A link is safe,
/// because saves replace the adapter's file and never modify it.
pub(super) fn keep_numbered(work: &Path, dir: &Path, step: u64) -> Result<()> {
    let path = dir.join(format!("{step:07}_{WEIGHTS_FILE}"));
    let failed = |e: std::io::Error| {
        Error::new(ErrorKind::Io, "cannot keep the adapter of this step")
            .with_path(&path)
            .with_source(e)
    };
    let fresh = work.join("numbered");
    let from = dir.join(WEIGHTS_FILE);
    std::fs::hard_link(&from, &fresh)
        .or_else(|_| std::fs::copy(&from, &fresh).map(drop))
        .and_then(|()| std::fs::rename(&fresh, &path))
        .map_err(failed)
}
