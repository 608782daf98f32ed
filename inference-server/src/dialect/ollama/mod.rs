//! Ollama's API: chat, generate, embed, and the list of models and its changes.

mod embed;
mod generate;
mod manage;
mod models;
mod time;
mod types;

use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::state::App;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(models::version))
        .routes(routes!(models::tags))
        .routes(routes!(models::ps))
        .routes(routes!(models::show))
        .routes(routes!(models::pull))
        .routes(routes!(generate::chat))
        .routes(routes!(generate::generate))
        .routes(routes!(embed::create))
        .routes(routes!(embed::create_old))
        .routes(routes!(manage::delete))
        .routes(routes!(manage::copy))
        .routes(routes!(manage::create))
}
