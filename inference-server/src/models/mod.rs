//! The served models, by name. `registry.rs` loads and unloads models, `table.rs` stores the loaded
//! models, `lease.rs` keeps a model loaded while it is in use, and `source.rs` lists the models
//! that can be loaded.

mod keep_alive;
mod lease;
mod registry;
mod source;
mod table;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use inference::{
    Capabilities, ComputeType, Error, ErrorKind, ModelInfo, Result, TextModel, TokenModel,
};

use crate::error::ApiError;
use crate::reply::{DetectedFormat, PlainText, ReplyFormat};

pub use keep_alive::parse_keep_alive;
pub(crate) use lease::{KeepAlive, Lease};
pub(crate) use registry::{Listed, Models, Unload};
pub use source::{ModelDescription, ModelEntry, ModelSource, PullProgress};

/// A loaded model with the settings under which it is served.
pub struct ServedModel {
    id: String,
    model: Arc<dyn TextModel>,
    info: ModelInfo,
    capabilities: Capabilities,
    format: Arc<dyn ReplyFormat>,
    context: Option<usize>,
    created: u64,
    files: Option<ModelEntry>,
    /// The model whose weights this one shares. It stays loaded as long as this one.
    base: Option<Lease>,
}

impl ServedModel {
    /// A served model under the name `id`. The backend's information describes the model. The chat
    /// template determines how the model writes tool calls and reasoning.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a name that is empty, too long or has control characters;
    /// [`ErrorKind::Unsupported`] for a model without batch sessions or without access to token
    /// ids.
    pub fn new(
        id: impl Into<String>,
        model: impl Into<Arc<dyn TextModel>>,
        capabilities: Capabilities,
    ) -> Result<Self> {
        let (id, model) = (id.into(), model.into());
        if id.trim().is_empty() || id.len() > 256 || id.chars().any(char::is_control) {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!("{id:?} is no name for a model; use 1 to 256 printable characters"),
            ));
        }
        for (there, what) in [
            (capabilities.batch_sessions, "batch sessions"),
            (model.as_token_model().is_some(), "access to token ids"),
        ] {
            if !there {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("the model {id} cannot be served: its backend has no {what}"),
                ));
            }
        }
        let template = model.as_token_model().and_then(TokenModel::chat_template);
        let format: Arc<dyn ReplyFormat> = match template {
            Some(template) => {
                let format = DetectedFormat::detect(template, model.model_type());
                tracing::info!(model = id, "replies have the format {format}");
                Arc::new(format)
            }
            None => Arc::new(PlainText),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Self {
            id,
            info: model.info(),
            model,
            capabilities,
            format,
            context: None,
            created: now.map_or(0, |d| d.as_secs()),
            files: None,
            base: None,
        })
    }

    /// The model `base` with its adapter `id`. The adapter must already be added to the model.
    pub(crate) fn sharing(base: Lease, id: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            id: id.to_owned(),
            model: Arc::clone(&base.model),
            info: base.info.clone(),
            capabilities: base.capabilities,
            format: Arc::clone(&base.format),
            context: base.context,
            created: now.map_or(0, |d| d.as_secs()),
            files: None,
            base: Some(base),
        }
    }

    /// The model whose weights this one shares.
    pub(crate) fn base(&self) -> Option<&Lease> {
        self.base.as_ref()
    }

    /// The adapter that requests must name.
    pub(crate) fn adapter(&self) -> Option<&str> {
        self.base.as_ref().map(|_| self.id.as_str())
    }

    /// Frees the model, or removes the adapter from the model whose weights it shares.
    pub(crate) fn close(&self) -> Result<()> {
        match self.adapter() {
            Some(adapter) => self.model.drop_adapter(adapter).map(drop),
            None => self.model.close(),
        }
    }

    /// Sets how the model writes tool calls and reasoning. Without this call, the chat template
    /// determines the format.
    #[must_use]
    pub fn with_format(mut self, format: Arc<dyn ReplyFormat>) -> Self {
        self.format = format;
        self
    }

    /// Limits prompt and reply together to fewer tokens than the model's own context.
    #[must_use]
    pub fn with_context(mut self, context: impl Into<Option<usize>>) -> Self {
        self.context = context.into();
        self
    }

    /// Sets the description of the model's files, which model lists show. An entry of the model
    /// source with the same name replaces the description.
    #[must_use]
    pub fn with_files(mut self, files: impl Into<Option<ModelEntry>>) -> Self {
        self.files = files.into();
        self
    }

    pub(crate) fn files(&self) -> Option<&ModelEntry> {
        self.files.as_ref()
    }

    /// Sets the name that requests use.
    pub(crate) fn with_id(mut self, id: &str) -> Self {
        id.clone_into(&mut self.id);
        self
    }

    /// The name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn model(&self) -> &Arc<dyn TextModel> {
        &self.model
    }

    pub(crate) fn info(&self) -> &ModelInfo {
        &self.info
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    pub(crate) fn format(&self) -> &dyn ReplyFormat {
        self.format.as_ref()
    }

    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    /// The maximum number of tokens of prompt and reply together; `None` if it is unknown.
    pub(crate) fn context(&self) -> Option<usize> {
        match (self.context, self.info.context_length) {
            (Some(asked), Some(trained)) => Some(asked.min(trained)),
            (asked, trained) => asked.or(trained),
        }
    }

    /// Upper bound on the KV cache size of one token in bytes. It is an upper bound, because layers
    /// with sliding windows drop old tokens. For a backend that does not report the size, every
    /// layer is assumed to have keys and values of the compute type.
    pub(crate) fn kv_bytes(&self) -> u64 {
        let info = &self.info;
        if let Some(bytes) = info.cache_bytes_per_token {
            return bytes;
        }
        let each = match info.compute_type {
            Some(ComputeType::Float16 | ComputeType::BFloat16) => 2,
            _ => 4,
        };
        let numbers = 2 * info.num_layers * info.num_kv_heads * info.head_dim;
        numbers as u64 * each
    }

    pub(crate) fn tokens(&self) -> std::result::Result<&dyn TokenModel, ApiError> {
        self.model.as_token_model().ok_or_else(ApiError::internal)
    }
}

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedModel").field("id", &self.id).finish()
    }
}
