//! Sources from which the server loads models by name at run time.

use inference::{Error, ErrorKind, ModelInfo, Result, TextModel};

use super::ServedModel;

/// A model that requests may name.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelEntry {
    /// The name.
    pub name: String,
    /// Total size of the model's files in bytes.
    pub bytes: u64,
    /// Time of the last change of the model's files, in seconds since 1970.
    pub modified: u64,
    /// The information in the headers of its files.
    pub info: Option<ModelInfo>,
    /// The file format, such as `gguf` or `safetensors`; empty if unknown.
    pub format: String,
    /// How the weights are stored, such as `Q4_K_M` or `4-bit`; empty if unknown.
    pub quantization: String,
    /// The main name of the same files, if this entry is an alias. Requests may use both names;
    /// model lists show only the main name.
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

    /// Sets the total size of the files in bytes, and the time of their last change in seconds
    /// since 1970.
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

    /// Sets the file format, and how the weights are stored.
    #[must_use]
    pub fn with_format(
        mut self,
        format: impl Into<String>,
        quantization: impl Into<String>,
    ) -> Self {
        (self.format, self.quantization) = (format.into(), quantization.into());
        self
    }

    /// Sets the main name, if this entry is an alias of files that are already listed.
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
    /// Creates a progress report with this activity, without a file.
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

/// The models that the server may load at run time: an allow-list, and the functions that load
/// them.
///
/// The server calls these functions from several threads, but never loads two models concurrently.
pub trait ModelSource: Send + Sync {
    /// All models that requests may name. The server loads no other model. It calls this function
    /// for each model list and before each load, so the function should at most read directories.
    fn entries(&self) -> Vec<ModelEntry>;

    /// Loads the model of an entry.
    ///
    /// # Errors
    /// Any error of loading. After [`ErrorKind::OutOfMemory`], the server unloads an idle model and
    /// tries again.
    fn load(&self, name: &str) -> Result<ServedModel>;

    /// The model whose weights an entry shares: the entry is this model with an adapter. `None` if
    /// the entry is not an adapter.
    fn base_of(&self, name: &str) -> Option<String> {
        let _ = name;
        None
    }

    /// Adds the adapter of an entry to the loaded model [`Self::base_of`], by
    /// [`TextModel::add_adapter`] with the entry's name. If the model cannot share its weights, the
    /// server calls [`Self::load`] instead, which loads them again.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model cannot share its weights; otherwise any error of
    /// loading.
    fn add_adapter(&self, name: &str, model: &dyn TextModel) -> Result<()> {
        let _ = (name, model);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this source has no adapters",
        ))
    }

    /// Describes the files of an entry, or of a model that was loaded at startup. The function
    /// reads only headers. The server calls it for one model at a time.
    fn describe(&self, name: &str) -> Option<ModelDescription> {
        let _ = name;
        None
    }

    /// Whether requests may delete models.
    fn can_delete(&self) -> bool {
        false
    }

    /// Deletes the files of an entry. The server unloads the model before this call.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the source does not implement deletion or does not own the
    /// files. Otherwise any error of deleting.
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

    /// Downloads a model by a name that a client sent. The name must never be used as a path. The
    /// download continues when the client disconnects.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the source does not implement downloads; otherwise any error
    /// of downloading.
    fn pull(&self, name: &str, progress: &mut dyn FnMut(PullProgress)) -> Result<()> {
        let _ = (name, progress);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this server fetches no models",
        ))
    }
}
