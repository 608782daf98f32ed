//! The table of routes, and what all of them share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use inference::Result;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::api::{anthropic, native, ollama, openai, status};
use crate::auth::{self, Access};
use crate::config::Config;
use crate::defaults::RequestDefaults;
use crate::engine::{Engine, EngineOptions};
use crate::error::{ApiError, Family};
use crate::limits::Limits;
use crate::metrics::{Answer, Metrics};
use crate::models::{ModelSource, Models, ServedModel};
use crate::ui;

/// What handlers share.
#[derive(Clone)]
pub(crate) struct App(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) models: Arc<Models>,
    pub(crate) engine: Arc<Engine>,
    /// Requests that run together.
    pub(crate) parallel: usize,
    pub(crate) limits: Limits,
    /// What holds for a request that does not say it.
    pub(crate) defaults: RequestDefaults,
    /// Bytes that bodies and their values may take together.
    pub(crate) bodies: Arc<tokio::sync::Semaphore>,
    /// One model is fetched at a time.
    pub(crate) pulls: Arc<tokio::sync::Semaphore>,
    pub(crate) access: Access,
    pub(crate) metrics: Arc<Metrics>,
    /// Whether requests may edit the model's states.
    pub(crate) steering: bool,
    /// Whether there is a page.
    pub(crate) ui: bool,
    origins: Vec<String>,
    names: AtomicU64,
    /// Makes names that cannot be guessed.
    hasher: std::hash::RandomState,
}

impl std::ops::Deref for App {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl App {
    pub(crate) fn new(
        config: &Config,
        models: Vec<ServedModel>,
        source: Option<Arc<dyn ModelSource>>,
    ) -> Result<Self> {
        let metrics = Arc::new(Metrics::new());
        let options = EngineOptions {
            parallel: config.parallel,
            max_queue: config.max_queue,
            kv_budget: config.kv_budget,
            buffered: config.limits.buffered_tokens,
            stall: config.limits.stall,
        };
        let engine = Arc::new(Engine::start(&options, Arc::clone(&metrics))?);
        let models = Models::new(models, source, config, Arc::clone(&engine))?;
        Ok(Self(Arc::new(Inner {
            models,
            engine,
            parallel: config.parallel,
            limits: config.limits.clone(),
            defaults: config.defaults.clone(),
            bodies: Arc::new(tokio::sync::Semaphore::new(config.limits.all_bodies_bytes)),
            pulls: Arc::new(tokio::sync::Semaphore::new(1)),
            access: Access::new(config),
            metrics,
            steering: config.steering,
            ui: config.ui,
            origins: config.allowed_origins.clone(),
            names: AtomicU64::new(0),
            hasher: std::hash::RandomState::new(),
        })))
    }

    /// A new name for an answer: `prefix` and 24 hexadecimal digits.
    pub(crate) fn name(&self, prefix: &str) -> String {
        use std::hash::BuildHasher;
        let n = self.names.fetch_add(1, Ordering::Relaxed);
        let noise = self.hasher.hash_one(n);
        format!("{prefix}{noise:016x}{:08x}", n & 0xFFFF_FFFF)
    }
}

/// A route: method, path, whether it needs no key, and its handler.
struct Route {
    method: &'static str,
    path: &'static str,
    public: bool,
    handler: fn() -> MethodRouter<App>,
}

macro_rules! routes {
    ($($method:ident $path:literal $(($public:ident))? => $handler:path;)*) => {
        const ROUTES: &[Route] = &[$(Route {
            method: stringify!($method),
            path: $path,
            public: routes!(@public $($public)?),
            handler: || $method($handler),
        }),*];
    };
    (@public) => { false };
    (@public public) => { true };
}

routes! {
    get "/" (public) => status::root;
    get "/ui/app.js" (public) => ui::script;
    get "/ui/markdown.js" (public) => ui::markdown;
    get "/ui/style.css" (public) => ui::style;
    get "/health" (public) => status::health;
    get "/v1/health" (public) => status::health;
    get "/ready" (public) => status::ready;
    get "/metrics" => status::metrics;
    get "/openapi.json" => status::openapi;
    get "/v1/models" => openai::models::list;
    get "/models" => openai::models::list;
    get "/v1/models/{*id}" => openai::models::one;
    post "/v1/chat/completions" => openai::chat::create;
    post "/chat/completions" => openai::chat::create;
    post "/v1/chat/completions/input_tokens" => openai::chat::count_tokens;
    post "/chat/completions/input_tokens" => openai::chat::count_tokens;
    post "/v1/completions" => openai::completions::create;
    post "/v1/responses" => openai::responses::create;
    post "/responses" => openai::responses::create;
    post "/v1/embeddings" => openai::embeddings::create;
    post "/v1/messages" => anthropic::create;
    post "/v1/messages/count_tokens" => anthropic::count_tokens;
    post "/v1/infer" => native::infer::infer;
    post "/completion" => native::completion::create;
    post "/completions" => native::completion::create;
    post "/infill" => native::infill::create;
    post "/tokenize" => native::text::tokenize;
    post "/detokenize" => native::text::detokenize;
    post "/apply-template" => native::text::apply_template;
    post "/embedding" => native::text::embedding;
    post "/embeddings" => native::text::embedding;
    post "/rerank" => native::rerank::rerank;
    post "/v1/rerank" => native::rerank::rerank;
    post "/reranking" => native::rerank::rerank;
    post "/v1/reranking" => native::rerank::rerank;
    get "/props" => native::state::props;
    get "/slots" => native::state::slots;
    get "/api/version" => ollama::models::version;
    get "/api/tags" => ollama::models::tags;
    get "/api/ps" => ollama::models::ps;
    post "/api/show" => ollama::models::show;
    post "/api/chat" => ollama::generate::chat;
    post "/api/generate" => ollama::generate::generate;
    post "/api/embed" => ollama::embed::create;
    post "/api/embeddings" => ollama::embed::create_old;
    post "/api/pull" => ollama::models::pull;
    delete "/api/delete" => ollama::manage::delete;
    post "/api/copy" => ollama::manage::copy;
    post "/api/create" => ollama::manage::create;
}

/// Methods and paths of the table.
#[cfg(test)]
pub(crate) fn table() -> impl Iterator<Item = (&'static str, &'static str)> {
    ROUTES.iter().map(|route| (route.method, route.path))
}

/// The whole service.
pub(crate) fn router(app: &App) -> Router {
    let (mut public, mut guarded) = (Router::new(), Router::new());
    for Route {
        method,
        path,
        public: free,
        handler,
        ..
    } in ROUTES
    {
        if path.starts_with("/ui/") && !app.ui {
            continue;
        }
        tracing::debug!(method, path, "route");
        if *free {
            public = public.route(path, handler());
        } else {
            guarded = guarded.route(path, handler());
        }
    }
    // On matched routes: how a path is spelled cannot lead around it.
    let key = middleware::from_fn_with_state(app.clone(), auth::check_key);
    let mut router = public
        .merge(guarded.route_layer(key))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(app.clone(), refuse_bodies));
    if !app.origins.is_empty() {
        router = router.layer(cors(&app.origins));
    }
    router
        .layer(middleware::from_fn_with_state(
            app.clone(),
            auth::check_source,
        ))
        .layer(CatchPanicLayer::custom(
            |_: Box<dyn std::any::Any + Send>| ApiError::internal().into_response(),
        ))
        .layer(middleware::from_fn_with_state(app.clone(), observe))
        .with_state(app.clone())
}

fn cors(origins: &[String]) -> CorsLayer {
    let allowed = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        let values = origins.iter().filter_map(|o| HeaderValue::from_str(o).ok());
        AllowOrigin::list(values)
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .max_age(Duration::from_secs(600))
}

async fn unknown(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(100).collect();
    ApiError::new(
        StatusCode::NOT_FOUND,
        "invalid_request_error",
        format!("there is no {path:?}; /openapi.json lists what there is"),
    )
    .with_code("not_found")
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "invalid_request_error",
        format!("the method {} is not for this path", request.method()),
    )
    .with_code("method_not_allowed")
}

/// Refuses bodies that are announced to be too large, or that are compressed, before they are read.
async fn refuse_bodies(State(app): State<App>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let length = headers.get(header::CONTENT_LENGTH);
    let length: Option<u64> = length.and_then(|v| v.to_str().ok()?.parse().ok());
    if length.is_some_and(|n| n > app.limits.body_bytes as u64) {
        return crate::api::body_too_large(app.limits.body_bytes).into_response();
    }
    let plain = |v: &HeaderValue| v.as_bytes().eq_ignore_ascii_case(b"identity");
    if !headers.get_all(header::CONTENT_ENCODING).iter().all(plain) {
        return ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "compressed bodies are not accepted",
        )
        .into_response();
    }
    next.run(request).await
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names the request, counts its answer, and gives errors the shape of the path's family.
async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or_else(|| String::from("none"), |path| path.as_str().to_owned());
    let family = Family::of(request.uri().path());
    let given = request.headers().get(REQUEST_ID).cloned();
    let given = given.filter(|id| id.len() <= 128 && id.to_str().is_ok());
    let id = given.unwrap_or_else(|| {
        let name = app.name("req-");
        HeaderValue::from_str(&name).unwrap_or(HeaderValue::from_static("req"))
    });
    let mut response = next.run(request).await;
    if family != Family::OpenAi
        && let Some(error) = response.extensions_mut().remove::<ApiError>()
    {
        response = error.response(family);
    }
    if app.engine.is_draining() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    let headers = response.headers_mut();
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(REQUEST_ID, id.clone());
    let status = response.status().as_u16();
    tracing::info!(request = ?id, route, status, "answered");
    let answer = Answer { route, status };
    app.metrics.answers.get_or_create(&answer).inc();
    response
}
