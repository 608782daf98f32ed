//! Where models come from that are loaded by name while the server runs.

use inference::{Error, ErrorKind, ModelInfo, Result};

use super::ServedModel;

/// A model that requests may name.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelEntry {
    /// Its name.
    pub name: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// When its files last changed, in seconds since 1970.
    pub modified: u64,
    /// What the headers of its files say.
    pub info: Option<ModelInfo>,
}

impl ModelEntry {
    /// A model of this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Sets the bytes of its files, and when they last changed, in seconds since 1970.
    #[must_use]
    pub fn with_files(mut self, bytes: u64, modified: u64) -> Self {
        (self.bytes, self.modified) = (bytes, modified);
        self
    }

    /// Sets what the headers of its files say.
    #[must_use]
    pub fn with_info(mut self, info: impl Into<Option<ModelInfo>>) -> Self {
        self.info = info.into();
        self
    }
}

/// What a download does now.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// What happens, for a person.
    pub status: String,
    /// The file that is fetched.
    pub file: Option<String>,
    /// Bytes of the file, where they are known.
    pub total: Option<u64>,
    /// Bytes of it that are there.
    pub completed: u64,
}

impl PullProgress {
    /// Something happens.
    #[must_use]
    pub fn new(status: impl Into<String>) -> Self {
        Self {
            status: status.into(),
            ..Self::default()
        }
    }

    /// Sets the file that is fetched.
    #[must_use]
    pub fn with_file(
        mut self,
        file: impl Into<String>,
        completed: u64,
        total: impl Into<Option<u64>>,
    ) -> Self {
        self.file = Some(file.into());
        (self.completed, self.total) = (completed, total.into());
        self
    }
}

/// The models that may be loaded while the server runs: an allow-list, and how to load.
///
/// The server calls it from threads of its own, and never loads two models at a time.
pub trait ModelSource: Send + Sync {
    /// All models that requests may name. Nothing else is ever loaded. Called when a list is asked
    /// for and before a model is loaded; it reads directories at most.
    fn entries(&self) -> Vec<ModelEntry>;

    /// Loads the model of an entry.
    ///
    /// # Errors
    /// Whatever loading returns. After [`ErrorKind::OutOfMemory`] the server unloads an idle model
    /// and tries again.
    fn load(&self, name: &str) -> Result<ServedModel>;

    /// Whether requests may fetch models.
    fn can_pull(&self) -> bool {
        false
    }

    /// Fetches a model by a name that a client sent: it must never be taken for a path. It goes on
    /// when the client leaves.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless it is implemented, and whatever fetching returns.
    fn pull(&self, name: &str, progress: &mut dyn FnMut(PullProgress)) -> Result<()> {
        let _ = (name, progress);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this server fetches no models",
        ))
    }
}
