//! Embeddings of texts, for all APIs.

use std::time::Instant;

use inference::{CancelToken, EmbedOptions, Interrupt, Prompt};

use super::{at_most, prepare};
use crate::engine::{EmbedJob, Places};
use crate::error::ApiError;
use crate::models::Lease;
use crate::state::App;

/// Cancels its token when it is dropped, which happens when the client disconnects.
pub(crate) struct Leaves(pub(crate) CancelToken);

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The vectors of texts, and the total number of their tokens.
pub(crate) async fn vectors(
    app: &App,
    model: &Lease,
    places: Places,
    prompts: Vec<Prompt>,
    options: EmbedOptions,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let arrived = Instant::now();
    if !model.capabilities().embeddings {
        return Err(prepare::no_embeddings(model));
    }
    // The embeddings APIs return normalized vectors.
    let options = options.with_normalize(true);
    at_most("input", prompts.len(), app.limits.embedding_inputs)?;
    if prompts.is_empty() {
        return Err(ApiError::field("input", "there is no input"));
    }
    let texts = ("input", prompts);
    let (place, ids) = prepare::texts(app, model, places, texts, options.clone()).await?;
    let tokens = ids.iter().map(Vec::len).sum();
    let cancel = Leaves(CancelToken::new());
    let interrupt = Interrupt::new()
        .with_cancel(cancel.0.clone())
        .with_deadline(arrived + app.limits.request_timeout);
    let job = EmbedJob {
        model: model.clone(),
        prompts: ids,
        options,
        interrupt,
        _place: place,
    };
    let vectors = app.engine.embed(job).await;
    let vectors = vectors.map_err(|_| ApiError::internal())?;
    let vectors = vectors.map_err(|e| ApiError::of_engine(&e))?;
    // JSON can represent neither infinities nor NaN.
    if vectors.iter().flatten().any(|v| !v.is_finite()) {
        tracing::error!(
            "a vector of {} has an element that is not a number",
            model.id()
        );
        return Err(ApiError::internal());
    }
    Ok((vectors, tokens))
}

/// The requested number of elements, if the model supports it.
pub(crate) fn dimensions(model: &Lease, asked: Option<usize>) -> Result<Option<usize>, ApiError> {
    let Some(embedder) = model.model().as_embedding_model() else {
        return Ok(asked);
    };
    let size = embedder.embedding_info().dimensions;
    match asked {
        Some(n) if n == 0 || n > size => Err(ApiError::unsupported(
            "dimensions",
            format!("dimensions is {n}; vectors of this model have {size} elements"),
        )),
        _ => Ok(asked),
    }
}
