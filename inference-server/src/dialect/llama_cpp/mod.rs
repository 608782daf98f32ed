//! The routes of llama.cpp's server that its own clients use.

mod completion;
mod infill;
mod rerank;
mod state;
mod text;

use axum::routing::post;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::state::App;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(completion::create))
        .routes(routes!(infill::create))
        .routes(routes!(text::tokenize))
        .routes(routes!(text::detokenize))
        .routes(routes!(text::apply_template))
        .routes(routes!(text::embedding))
        .routes(routes!(rerank::rerank))
        .routes(routes!(state::props))
        .routes(routes!(state::slots))
        // Aliases that llama.cpp's server has.
        .route("/completions", post(completion::create))
        .route("/embeddings", post(text::embedding))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/reranking", post(rerank::rerank))
        .route("/v1/reranking", post(rerank::rerank))
}
