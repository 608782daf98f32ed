//! OpenAI's API: models, chat completions, completions, embeddings.

pub(crate) mod chat;
mod completions;
mod embeddings;
mod models;
pub(crate) mod options;
pub(crate) mod parameters;
mod stream;
pub(crate) mod types;

use axum::routing::{get, post};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::state::App;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(models::list))
        .routes(routes!(models::one))
        .routes(routes!(chat::create))
        .routes(routes!(chat::count_tokens))
        .routes(routes!(completions::create))
        .routes(routes!(embeddings::create))
        // Aliases that llama.cpp's server has.
        .route("/models", get(models::list))
        .route("/chat/completions", post(chat::create))
        .route("/chat/completions/input_tokens", post(chat::count_tokens))
}
