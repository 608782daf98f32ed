//! `/api/version`, `/api/tags`, `/api/ps`, `/api/show`, `/api/pull`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use inference::{ErrorKind, ModelInfo, ParameterValues};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use utoipa::ToSchema;

use super::time;
use crate::error::{ApiError, Family};
use crate::models::{Listed, ModelDescription, ModelEntry, PullProgress};
use crate::pipeline::Json;
use crate::state::App;

/// The expiry time of models that are never unloaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The server's version.
#[utoipa::path(get, path = "/api/version", responses((status = 200, description = "`version`", body = Object)))]
pub(crate) async fn version() -> axum::Json<Value> {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// The models that requests may name.
#[utoipa::path(get, path = "/api/tags", responses((status = 200, description = "`models`", body = Object)))]
pub(crate) async fn tags(State(app): State<App>) -> axum::Json<Value> {
    let tag = |listed: &Listed| {
        let mut fields = fields(listed);
        let modified = time::rfc3339(modified(listed), 0);
        fields.insert("modified_at".into(), modified.into());
        Value::Object(fields)
    };
    let models: Vec<Value> = app.models.list().await.iter().map(tag).collect();
    axum::Json(json!({"models": models}))
}

/// The models that are loaded.
#[utoipa::path(get, path = "/api/ps", responses((status = 200, description = "`models`", body = Object)))]
pub(crate) async fn ps(State(app): State<App>) -> axum::Json<Value> {
    let mut models = Vec::new();
    for listed in &app.models.list().await {
        let Some(model) = &listed.loaded else {
            continue;
        };
        let info = model.info();
        let on_gpu = if info.device == "cpu" {
            0
        } else {
            info.weight_bytes
        };
        let expires = listed.stays.map_or_else(|| NEVER.to_owned(), time::after);
        let mut fields = fields(listed);
        fields.insert("expires_at".into(), expires.into());
        fields.insert("size_vram".into(), on_gpu.into());
        fields.insert("context_length".into(), model.context().into());
        models.push(Value::Object(fields));
    }
    axum::Json(json!({"models": models}))
}

/// The modification time of the model's files or, if that is unknown, the time of loading. In
/// seconds since 1970.
fn modified(listed: &Listed) -> u64 {
    let of_files = listed.entry.as_ref().map(|e| e.modified);
    let loaded = listed.loaded.as_ref().map(|m| m.created());
    of_files.or(loaded).unwrap_or_default()
}

/// The model information that is known without loading the model.
fn info(listed: &Listed) -> ModelInfo {
    let of_files = || listed.entry.as_ref().and_then(|e| e.info.clone());
    match &listed.loaded {
        Some(model) => model.info().clone(),
        None => of_files().unwrap_or_default(),
    }
}

/// The model to describe.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ShowRequest {
    /// The model's name.
    #[serde(alias = "name")]
    model: Option<String>,
}

/// Describes a model.
#[utoipa::path(post, path = "/api/show", request_body = ShowRequest, responses(
    (status = 200, description = "what it is", body = Object),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 404, description = "it is not served", body = Object)))]
pub(crate) async fn show(
    State(app): State<App>,
    Json(request): Json<ShowRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let listed = app.models.look(request.model.as_deref()).await?;
    let described = described(&app, &listed.name).await;
    let loaded = listed.loaded.as_ref().map(|model| model.info().clone());
    let info = loaded
        .or_else(|| described.info.clone())
        .unwrap_or_else(|| info(&listed));
    let architecture = &info.architecture;
    let mut facts = Map::new();
    facts.insert("general.architecture".into(), architecture.as_str().into());
    facts.insert("general.parameter_count".into(), info.parameters.into());
    for (name, value) in [
        ("context_length", info.context_length),
        ("embedding_length", Some(info.hidden_size)),
        ("block_count", Some(info.num_layers)),
        ("attention.head_count", Some(info.num_heads)),
        ("attention.head_count_kv", Some(info.num_kv_heads)),
        ("vocab_size", Some(info.vocab_size)),
    ] {
        facts.insert(format!("{architecture}.{name}"), value.into());
    }
    // The template's capabilities are unknown until the model is loaded.
    let model = listed.loaded.as_deref();
    let template = model.and_then(|m| Some(m.tokens().ok()?.chat_template()?.to_owned()));
    let can = [
        ("completion", true),
        (
            "embedding",
            model.is_some_and(|m| m.capabilities().embeddings),
        ),
        ("tools", model.is_some_and(|m| m.format().reads_tools())),
        (
            "thinking",
            model.is_some_and(|m| m.format().reads_reasoning()),
        ),
    ];
    let can: Vec<&str> = can.iter().filter_map(|(n, on)| on.then_some(*n)).collect();
    Ok(axum::Json(json!({
        "license": described.license.unwrap_or_default(),
        "modelfile": "",
        "parameters": parameters(&info),
        "template": template.or(described.template).unwrap_or_default(),
        "details": details(&info, listed.entry.as_ref()),
        "model_info": facts,
        "capabilities": can,
        "modified_at": time::rfc3339(modified(&listed), 0),
    })))
}

/// The description from the model's files, if the source has one.
async fn described(app: &App, name: &str) -> ModelDescription {
    let Some(source) = app.models.source().cloned() else {
        return ModelDescription::default();
    };
    let wanted = name.to_owned();
    let described = tokio::task::spawn_blocking(move || source.describe(&wanted)).await;
    match described {
        Ok(described) => described.unwrap_or_default(),
        Err(e) => {
            tracing::error!(model = name, "describing it failed: {e}");
            ModelDescription::default()
        }
    }
}

/// The sampling that the files recommend, one option on each line, as in Ollama's Modelfiles.
fn parameters(info: &ModelInfo) -> String {
    let values = ParameterValues::recommended(&info.sampling);
    let lines: Vec<String> = values
        .iter()
        .map(|(parameter, value)| format!("{:<30} {value}", parameter.name()))
        .collect();
    lines.join("\n")
}

/// The model to fetch.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct PullRequest {
    /// A known name, or `owner/name` on the Hugging Face Hub.
    #[serde(alias = "name")]
    model: Option<String>,
    /// Send progress while it fetches; true by default.
    stream: Option<bool>,
}

/// Fetches a model, if the server was started to allow it. The download continues when the client
/// disconnects.
#[utoipa::path(post, path = "/api/pull", request_body = PullRequest, responses(
    (status = 200, description = "lines of JSON, or with `stream` false one", content((Object = "application/json"), (String = "application/x-ndjson"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 403, description = "this server fetches no models", body = Object),
    (status = 429, description = "another model is fetched", body = Object)))]
pub(crate) async fn pull(
    State(app): State<App>,
    Json(request): Json<PullRequest>,
) -> Result<Response, ApiError> {
    let source = app.models.source().filter(|source| source.can_pull());
    let Some(source) = source.cloned() else {
        let message = "this server fetches no models; start it with --allow-pull";
        let kind = "invalid_request_error";
        return Err(ApiError::new(StatusCode::FORBIDDEN, kind, message));
    };
    let name = request.model.unwrap_or_default();
    if name.is_empty() || name.len() > 256 || name.chars().any(char::is_control) {
        let message = "the name of a model to fetch has 1 to 256 printable characters";
        return Err(ApiError::field("model", message));
    }
    let turn = Arc::clone(&app.pulls).try_acquire_owned();
    let turn = turn.map_err(|_| ApiError::busy())?;
    let (tell, mut reports) = mpsc::channel(64);
    tokio::task::spawn_blocking(move || {
        let mut progress = |progress: PullProgress| {
            // If a slow reader's buffer is full, a progress report is dropped. The next report
            // supersedes it.
            let _ = tell.try_send(Ok(progress));
        };
        let fetched = source.pull(&name, &mut progress);
        let last = match fetched {
            Ok(()) => Ok(PullProgress::new("success")),
            Err(e) => {
                tracing::error!("fetching {name:?} failed: {e}");
                Err(match e.kind() {
                    ErrorKind::ModelNotFound => {
                        let message = "there is no such model";
                        let kind = "invalid_request_error";
                        ApiError::new(StatusCode::NOT_FOUND, kind, message)
                    }
                    _ => ApiError::of_engine(&e),
                })
            }
        };
        // The download permit is released before the last report is sent, because the client may
        // start another download right after that report.
        drop(turn);
        let _ = tell.blocking_send(last);
    });
    if request.stream == Some(false) {
        while let Some(progress) = reports.recv().await {
            if progress?.status == "success" {
                return Ok(axum::Json(json!({"status": "success"})).into_response());
            }
        }
        return Err(ApiError::internal());
    }
    let lines = stream::unfold(reports, |mut reports| async {
        let line = match reports.recv().await? {
            Ok(progress) => progress_line(&progress),
            Err(error) => error.body(Family::Ollama),
        };
        Some((
            Ok::<_, Infallible>(Bytes::from(format!("{line}\n"))),
            reports,
        ))
    });
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(lines)).into_response())
}

fn progress_line(progress: &PullProgress) -> Value {
    let mut line = Map::new();
    line.insert("status".into(), progress.status.as_str().into());
    if let Some(file) = &progress.file {
        line.insert("digest".into(), file.as_str().into());
        line.insert("total".into(), progress.total.into());
        line.insert("completed".into(), progress.completed.into());
    }
    Value::Object(line)
}

fn fields(listed: &Listed) -> Map<String, Value> {
    // Clients display and compare this digest. It is the digest of the name, not of the files.
    let digest = Sha256::digest(listed.name.as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let info = info(listed);
    let bytes = listed.entry.as_ref().map(|e| e.bytes);
    let mut fields = Map::new();
    fields.insert("name".into(), listed.name.as_str().into());
    fields.insert("model".into(), listed.name.as_str().into());
    fields.insert("size".into(), bytes.unwrap_or(info.weight_bytes).into());
    fields.insert("digest".into(), digest.into());
    fields.insert("details".into(), details(&info, listed.entry.as_ref()));
    fields
}

fn details(info: &ModelInfo, files: Option<&ModelEntry>) -> Value {
    let bits = || info.quantization_bits.map(|bits| format!("{bits}-bit"));
    let stored = files.map(|files| files.quantization.clone());
    let stored = stored.filter(|stored| !stored.is_empty()).or_else(bits);
    json!({
        "parent_model": "",
        "format": files.map_or("", |files| files.format.as_str()),
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": size_of(info.parameters),
        "quantization_level": stored.unwrap_or_default(),
    })
}

/// A parameter count in Ollama's notation; empty if unknown.
fn size_of(parameters: u64) -> String {
    let n = parameters as f64;
    match parameters {
        0 => String::new(),
        1..1_000_000 => format!("{:.1}K", n / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", n / 1e6),
        _ => format!("{:.1}B", n / 1e9),
    }
}
