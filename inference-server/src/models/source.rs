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
    /// The format of its files, such as `gguf` or `safetensors`; empty where it is not known.
    pub format: String,
    /// How its weights are stored, such as `Q4_K_M` or `4-bit`; empty where it is not known.
    pub quantization: String,
    /// The name under which the same files are listed already. Requests may use both names; lists
    /// have the other one.
    pub same_as: Option<String>,
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

    /// Sets the format of its files and how its weights are stored.
    #[must_use]
    pub fn with_format(
        mut self,
        format: impl Into<String>,
        quantization: impl Into<String>,
    ) -> Self {
        (self.format, self.quantization) = (format.into(), quantization.into());
        self
    }

    /// Sets the name under which the same files are listed already.
    #[must_use]
    pub fn with_same_as(mut self, name: impl Into<Option<String>>) -> Self {
        self.same_as = name.into();
        self
    }
}

/// What one model's files say, for `/api/show`.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelDescription {
    /// What the headers say.
    pub info: Option<ModelInfo>,
    /// The text of the license, or its name.
    pub license: Option<String>,
    /// The chat template.
    pub template: Option<String>,
}

impl ModelDescription {
    /// A model of which nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets what the headers say.
    #[must_use]
    pub fn with_info(mut self, info: impl Into<Option<ModelInfo>>) -> Self {
        self.info = info.into();
        self
    }

    /// Sets the text of the license, or its name.
    #[must_use]
    pub fn with_license(mut self, license: impl Into<Option<String>>) -> Self {
        self.license = license.into();
        self
    }

    /// Sets the chat template.
    #[must_use]
    pub fn with_template(mut self, template: impl Into<Option<String>>) -> Self {
        self.template = template.into();
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

    /// What the files of a model say: of an entry, or of a model that the server was started with.
    /// It reads headers, and is called for one model at a time.
    fn describe(&self, name: &str) -> Option<ModelDescription> {
        let _ = name;
        None
    }

    /// Whether requests may delete models.
    fn can_delete(&self) -> bool {
        false
    }

    /// Deletes the files of an entry, which is not loaded.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless it is implemented, and for a model whose files are not the
    /// source's to delete; and whatever deleting returns.
    fn delete(&self, name: &str) -> Result<()> {
        let _ = name;
        Err(Error::new(
            ErrorKind::Unsupported,
            "this server deletes no models",
        ))
    }

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
