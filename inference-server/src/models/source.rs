//! Sources of models that the server loads by name while it runs.

use inference::{Error, ErrorKind, ModelInfo, Result};

use super::ServedModel;

/// A model that requests may name.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelEntry {
    /// The name.
    pub name: String,
    /// The bytes of its files.
    pub bytes: u64,
    /// When its files last changed, in seconds since 1970.
    pub modified: u64,
    /// The information in the headers of its files.
    pub info: Option<ModelInfo>,
    /// The format of its files, such as `gguf` or `safetensors`; empty where it is not known.
    pub format: String,
    /// How its weights are stored, such as `Q4_K_M` or `4-bit`; empty where it is not known.
    pub quantization: String,
    /// Another name under which the same files are already listed. Requests may use both names;
    /// lists have only the other one.
    pub same_as: Option<String>,
}

impl ModelEntry {
    /// An entry with this name.
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

    /// Sets the information in the headers of its files.
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

/// The description of one model's files, for `/api/show`.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelDescription {
    /// The information in the headers.
    pub info: Option<ModelInfo>,
    /// The text of the license, or its name.
    pub license: Option<String>,
    /// The chat template.
    pub template: Option<String>,
}

impl ModelDescription {
    /// An empty description.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the information in the headers.
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

/// The progress of a download.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// The current activity, in words for a person.
    pub status: String,
    /// The file that is being fetched.
    pub file: Option<String>,
    /// The bytes of the file, if they are known.
    pub total: Option<u64>,
    /// The bytes of the file that have arrived.
    pub completed: u64,
}

impl PullProgress {
    /// Progress with this activity and nothing else.
    #[must_use]
    pub fn new(status: impl Into<String>) -> Self {
        Self {
            status: status.into(),
            ..Self::default()
        }
    }

    /// Sets the file that is being fetched.
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

/// The models that the server may load while it runs: an allow-list, and the functions that load
/// them.
///
/// The server calls it from its own threads, and never loads two models at a time.
pub trait ModelSource: Send + Sync {
    /// All models that requests may name. No other model is ever loaded. The server calls this for
    /// each list and before each load, so it should read directories at most.
    fn entries(&self) -> Vec<ModelEntry>;

    /// Loads the model of an entry.
    ///
    /// # Errors
    /// Any error of loading. After [`ErrorKind::OutOfMemory`] the server unloads an idle model and
    /// tries again.
    fn load(&self, name: &str) -> Result<ServedModel>;

    /// Describes the files of an entry, or of a model that the server was started with. It reads
    /// headers only, and is called for one model at a time.
    fn describe(&self, name: &str) -> Option<ModelDescription> {
        let _ = name;
        None
    }

    /// Whether requests may delete models.
    fn can_delete(&self) -> bool {
        false
    }

    /// Deletes the files of an entry. The server has unloaded the model.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless it is implemented, or if the source does not own the
    /// files; any error of deleting.
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

    /// Fetches a model by a name that a client sent. The name must never be used as a path. The
    /// download continues when the client disconnects.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless it is implemented; any error of fetching.
    fn pull(&self, name: &str, progress: &mut dyn FnMut(PullProgress)) -> Result<()> {
        let _ = (name, progress);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this server fetches no models",
        ))
    }
}
