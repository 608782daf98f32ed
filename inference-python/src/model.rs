//! Loading a model, and its calls.

use std::sync::Arc;

use inference::bindings::{
    Input, backend_infos, embed_options, generate_options, load_options, object, prompts,
};
use inference::{CancelToken, Error, ErrorKind, Interrupt, Result, TokenModel};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rust_mlx::hub;
use serde_json::Value;

use crate::error::{no_thread, raised};
use crate::shared::Shared;
use crate::stream::Stream;
use crate::worker::{Report, Worker};

/// A loaded model.
#[pyclass(frozen, module = "rust_mlx._native")]
pub(crate) struct Model {
    pub(crate) shared: Arc<Shared>,
}

fn json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| {
        Error::new(ErrorKind::Engine, "the result cannot be written as JSON").with_source(e)
    })
}

fn parsed(name: &str, text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| {
        Error::new(ErrorKind::InvalidOption, format!("{name} is not JSON")).with_source(e)
    })
}

/// Describes all backends, as JSON.
#[pyfunction]
pub(crate) fn backends(py: Python<'_>) -> PyResult<String> {
    let infos = py.detach(|| json(&backend_infos()));
    raised(py, infos)
}

/// Loads a model by a path or a name. The options are JSON.
#[pyfunction]
pub(crate) fn load(
    py: Python<'_>,
    model: String,
    backend: Option<String>,
    options: &str,
) -> PyResult<Model> {
    let load = || {
        let mut options = load_options(&object("options", options)?)?;
        if backend.is_some() {
            options.backend = backend;
        }
        let named = options.backend.as_deref().unwrap_or_default();
        let backend = inference::backend(named)?;
        options.backend = Some(backend.name().to_owned());
        let loaded = hub::load(Some(&model), &options, &mut hub::Silent)?;
        Ok(Shared {
            model: loaded,
            name: model,
            options,
        })
    };
    let shared = py.detach(load);
    let shared = Arc::new(raised(py, shared)?);
    Ok(Model { shared })
}

impl Model {
    fn tokens(&self) -> Result<&dyn TokenModel> {
        self.shared.model.as_token_model().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "this backend does not give access to the tokenizer",
            )
        })
    }
}

#[pymethods]
impl Model {
    /// The path or name by which the model was loaded.
    #[getter]
    fn name(&self) -> &str {
        &self.shared.name
    }

    /// The name of the model's backend.
    #[getter]
    fn backend(&self) -> Option<&str> {
        self.shared.options.backend.as_deref()
    }

    /// The model's properties, as JSON.
    fn info(&self, py: Python<'_>) -> PyResult<String> {
        raised(py, json(&self.shared.model.info()))
    }

    fn tokenize(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        let ids = py.detach(|| self.tokens()?.encode(text, add_special));
        raised(py, ids)
    }

    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        let text = py.detach(|| self.tokens()?.decode(&ids));
        raised(py, text)
    }

    /// Starts a reply. The prompt and the options are JSON.
    fn stream(&self, py: Python<'_>, prompt: &str, options: &str) -> PyResult<Stream> {
        let read = || {
            let options = generate_options(&object("options", options)?)?;
            Ok((Input::from_json(parsed("prompt", prompt)?)?, options))
        };
        let (input, options) = raised(py, read())?;
        Stream::start(Arc::clone(&self.shared), input, options).map_err(no_thread)
    }

    /// Embeds texts: float32 values in the machine's byte order, the number of vectors, and the
    /// elements of each. Texts and options are JSON.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: &str,
        options: &str,
    ) -> PyResult<(Bound<'py, PyBytes>, usize, usize)> {
        let read = || {
            let options = embed_options(&object("options", options)?)?;
            Ok((prompts(parsed("texts", texts)?)?, options))
        };
        let (texts, options) = raised(py, read())?;
        let (shared, cancel) = (Arc::clone(&self.shared), CancelToken::new());
        let interrupt = Interrupt::new().with_cancel(cancel.clone());
        let worker = Worker::start(cancel, move |_| {
            let model = shared.model.as_embedding_model().ok_or_else(|| {
                Error::new(
                    ErrorKind::Unsupported,
                    "this backend does not embed texts with this model",
                )
            })?;
            model.embed(&texts, &options, &interrupt)
        });
        let worker: Worker<(), Result<Vec<Vec<f32>>>> = worker.map_err(no_thread)?;
        let mut vectors = Vec::new();
        while let Some(report) = worker.next(py)? {
            if let Report::Done(done) = report {
                vectors = raised(py, done)?;
            }
        }
        let width = vectors.first().map_or(0, Vec::len);
        let bytes: Vec<u8> = (vectors.iter().flatten())
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        Ok((PyBytes::new(py, &bytes), vectors.len(), width))
    }

    /// Trains an adapter. The options are JSON. `start` is `fresh`, `resume` or `overwrite`.
    /// `callback` receives each event as JSON. Returns the summary as JSON.
    fn train(
        &self,
        py: Python<'_>,
        options: &str,
        start: &str,
        apply: bool,
        callback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        crate::train::train(py, &self.shared, options, start, apply, callback)
    }

    /// Frees the model's memory after running calls have ended. Later calls are errors.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let closed = py.detach(|| self.shared.model.close());
        raised(py, closed)
    }
}
