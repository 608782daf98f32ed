//! The input of a check: the backend, a model that is loaded once, and prompts. Also the results of
//! a check.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use inference::{Backend, Capabilities, LoadOptions, Prompt, TextModel};
use parking_lot::{Mutex, MutexGuard};

/// Why a check did not pass.
#[derive(Debug)]
pub(crate) enum Stop {
    Failed(String),
    Skipped(String),
}

pub(crate) type Verdict = Result<(), Stop>;

/// Fails the check if the condition is false.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {{
        let holds: bool = $condition;
        if !holds {
            return Err($crate::context::Stop::Failed(format!($($message)+)));
        }
    }};
}
pub(crate) use ensure;

pub(crate) fn fail<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Failed(reason.into()))
}

pub(crate) fn skip<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Skipped(reason.into()))
}

pub(crate) struct Context {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) capabilities: Capabilities,
    pub(crate) path: PathBuf,
    pub(crate) load: LoadOptions,
    /// At least two different prompts.
    pub(crate) prompts: Vec<String>,
    pub(crate) timeout: Duration,
    /// The model that all checks share, unless they change it.
    shared: Mutex<Option<Arc<dyn TextModel>>>,
}

impl Context {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        capabilities: Capabilities,
        path: PathBuf,
        load: LoadOptions,
        prompts: Vec<String>,
        timeout: Duration,
    ) -> Self {
        Self {
            backend,
            capabilities,
            path,
            load,
            prompts,
            timeout,
            shared: Mutex::new(None),
        }
    }

    fn shared(&self) -> MutexGuard<'_, Option<Arc<dyn TextModel>>> {
        // The lock is never held while a backend runs, so a panic cannot leave an inconsistent
        // value.
        self.shared.lock()
    }

    /// The shared model. If it does not load, this check is skipped, because the check `load`
    /// reports that failure.
    pub(crate) fn model(&self) -> Result<Arc<dyn TextModel>, Stop> {
        if let Some(model) = self.shared().as_ref() {
            return Ok(Arc::clone(model));
        }
        let model = self.own_model()?;
        *self.shared() = Some(Arc::clone(&model));
        Ok(model)
    }

    /// A separate model, which the check may close or change.
    pub(crate) fn own_model(&self) -> Result<Arc<dyn TextModel>, Stop> {
        match self.backend.load_model(&self.path, &self.load) {
            Ok(model) => Ok(Arc::from(model)),
            Err(e) => skip(format!("the model cannot be loaded: {e}")),
        }
    }

    /// Makes the next check load the model again. After a panic or a timeout, the old model is
    /// unreliable.
    pub(crate) fn forget_model(&self) {
        let model = self.shared().take();
        // Dropping runs code of the backend, which may hang, so another thread does it.
        std::thread::spawn(move || drop(model));
    }

    /// The first prompt.
    pub(crate) fn prompt(&self) -> Prompt {
        Prompt::from(&self.prompts[0])
    }

    /// All prompts of the suite.
    pub(crate) fn all_prompts(&self) -> Vec<Prompt> {
        self.prompts.iter().map(Prompt::from).collect()
    }
}
