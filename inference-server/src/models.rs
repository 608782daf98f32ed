//! The models that are served, by name. A name in a request is looked up here and nowhere else. It
//! is never a path, and nothing is fetched or loaded for it.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use inference::{Capabilities, Error, ErrorKind, ModelInfo, Result, TextModel, TokenModel};

use crate::error::ApiError;
use crate::reply::{DetectedFormat, PlainText, ReplyFormat};

/// A loaded model and how it is served.
pub struct ServedModel {
    id: String,
    model: Arc<dyn TextModel>,
    info: ModelInfo,
    capabilities: Capabilities,
    format: Arc<dyn ReplyFormat>,
    context: Option<usize>,
    created: u64,
}

impl ServedModel {
    /// A model under a name for requests, with what its backend declares. Its chat template tells
    /// how it writes tool calls and reasoning.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a name that is empty, long or has control characters;
    /// [`ErrorKind::Unsupported`] for a model without batch sessions or without access to ids.
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
                let format = DetectedFormat::of(template, model.model_type());
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
        })
    }

    /// Sets how the model writes tool calls and reasoning, instead of what its template tells.
    #[must_use]
    pub fn with_format(mut self, format: Arc<dyn ReplyFormat>) -> Self {
        self.format = format;
        self
    }

    /// Bounds the tokens of prompt and reply together, below the model's own context.
    #[must_use]
    pub fn with_context(mut self, context: impl Into<Option<usize>>) -> Self {
        self.context = context.into();
        self
    }

    /// Its name.
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

    /// Tokens of prompt and reply together; `None` where nothing says.
    pub(crate) fn context(&self) -> Option<usize> {
        match (self.context, self.info.context_length) {
            (Some(asked), Some(trained)) => Some(asked.min(trained)),
            (asked, trained) => asked.or(trained),
        }
    }

    /// The tokenizer.
    pub(crate) fn tokens(&self) -> std::result::Result<&dyn TokenModel, ApiError> {
        self.model.as_token_model().ok_or_else(ApiError::internal)
    }
}

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedModel").field("id", &self.id).finish()
    }
}

/// All of them, in the order given; the first is the default.
pub(crate) struct Models(Vec<ServedModel>);

impl Models {
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for none, or two of one name.
    pub(crate) fn new(models: Vec<ServedModel>) -> Result<Self> {
        if models.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "there is no model to serve; name at least one",
            ));
        }
        for (i, model) in models.iter().enumerate() {
            if models[..i].iter().any(|other| other.id == model.id) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!("two models have the name {}; serve one of them", model.id),
                ));
            }
        }
        Ok(Self(models))
    }

    pub(crate) fn all(&self) -> &[ServedModel] {
        &self.0
    }

    /// The model of a name, and its place. No name is the first.
    pub(crate) fn find(
        &self,
        name: Option<&str>,
    ) -> std::result::Result<(usize, &ServedModel), ApiError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return self
                .0
                .iter()
                .enumerate()
                .next()
                .ok_or_else(ApiError::internal);
        };
        // Ollama's clients add a tag.
        let bare = name.strip_suffix(":latest");
        let found = self.0.iter().enumerate().find(|(_, m)| m.id == name);
        let found = found.or_else(|| {
            self.0
                .iter()
                .enumerate()
                .find(|(_, m)| Some(m.id.as_str()) == bare)
        });
        found.ok_or_else(|| {
            let shown: String = name.chars().take(100).collect();
            let names: Vec<&str> = self.0.iter().map(ServedModel::id).collect();
            let message = format!(
                "the model {shown:?} is not served here; there are: {}",
                names.join(", ")
            );
            let kind = "invalid_request_error";
            ApiError::new(StatusCode::NOT_FOUND, kind, message)
                .with_code("model_not_found")
                .with_param("model")
        })
    }
}
