//! All routes, as a router and as an API description.

use axum::Router;
use axum::middleware;
use axum::response::IntoResponse;
use axum::routing::get;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::dialect::{anthropic, llama_cpp, native, ollama, openai, responses};
use crate::error::ApiError;
use crate::middleware::{
    check_key, check_source, cors, observe, refuse_bodies, unknown, wrong_method,
};
use crate::state::App;
use crate::{status, ui};

/// The routes that need the API key, if one is set.
fn guarded() -> OpenApiRouter<App> {
    status::routes()
        .merge(openai::routes())
        .merge(responses::routes())
        .merge(anthropic::routes())
        .merge(ollama::routes())
        .merge(llama_cpp::routes())
        .merge(native::routes())
}

/// The description of all routes, built from the descriptions of the handlers.
pub(crate) fn description() -> OpenApi {
    status::public_routes().merge(guarded()).into_openapi()
}

/// The whole service.
pub(crate) fn router(app: &App) -> Router {
    let (mut public, _) = status::public_routes().split_for_parts();
    if app.ui {
        public = public
            .route("/ui/app.js", get(ui::script))
            .route("/ui/markdown.js", get(ui::markdown))
            .route("/ui/style.css", get(ui::style));
    }
    let (guarded, _) = guarded().split_for_parts();
    // This check runs after routing, so no alternative spelling of a path can bypass it.
    let key = middleware::from_fn_with_state(app.clone(), check_key);
    let mut router = public
        .merge(guarded.route_layer(key))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(app.clone(), refuse_bodies));
    if !app.origins.is_empty() {
        router = router.layer(cors(&app.origins));
    }
    router
        .layer(middleware::from_fn_with_state(app.clone(), check_source))
        .layer(CatchPanicLayer::custom(
            |_: Box<dyn std::any::Any + Send>| ApiError::internal().into_response(),
        ))
        .layer(middleware::from_fn_with_state(app.clone(), observe))
        .with_state(app.clone())
}
