//! A backend that loads scripted models or others, under any name.

use std::path::Path;

use inference::{Backend, Capabilities, Error, ErrorKind, LoadOptions, Result, TextModel};

use super::Scripted;

type Load = dyn Fn(&Path, &LoadOptions) -> Result<Box<dyn TextModel>> + Send + Sync;

/// A backend with a name. [`ScriptedBackend::loading`] sets which models it loads; by default it
/// loads none.
pub struct ScriptedBackend {
    name: String,
    reason: Option<String>,
    capabilities: Capabilities,
    load: Option<Box<Load>>,
}

impl ScriptedBackend {
    /// An available backend of this name, without capabilities.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            reason: None,
            capabilities: Capabilities::new(),
            load: None,
        }
    }

    /// Makes the backend unavailable, for this reason.
    #[must_use]
    pub fn unavailable(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Declares capabilities. They must match the models that the backend loads.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Sets the function that loads a model. The load options are validated before the call.
    #[must_use]
    pub fn loading<M: Into<Box<dyn TextModel>>>(
        mut self,
        load: impl Fn(&Path, &LoadOptions) -> Result<M> + Send + Sync + 'static,
    ) -> Self {
        self.load = Some(Box::new(move |path, options| {
            load(path, options).map(Into::into)
        }));
        self
    }
}

impl From<Scripted> for Box<dyn TextModel> {
    fn from(model: Scripted) -> Self {
        Box::new(model)
    }
}

impl Backend for ScriptedBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn available(&self) -> bool {
        self.reason.is_none()
    }

    fn unavailable_reason(&self) -> Option<String> {
        self.reason.clone()
    }

    fn device(&self) -> String {
        String::from("a script")
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
        options.validate()?;
        let Some(load) = &self.load else {
            let message = format!("backend `{}` loads nothing", self.name);
            return Err(Error::new(ErrorKind::Unsupported, message).with_path(path));
        };
        load(path, options)
    }
}
