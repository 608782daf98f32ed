//! `/api/version`, `/api/tags`, `/api/ps`, `/api/show`.

use axum::extract::State;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::time;
use crate::api::Json;
use crate::app::App;
use crate::error::ApiError;
use crate::models::ServedModel;

/// When models that stay are unloaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The server's version.
#[utoipa::path(get, path = "/api/version", responses((status = 200, description = "`version`", body = Object)))]
pub(crate) async fn version() -> axum::Json<Value> {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Models that can be asked.
#[utoipa::path(get, path = "/api/tags", responses((status = 200, description = "`models`", body = Object)))]
pub(crate) async fn tags(State(app): State<App>) -> axum::Json<Value> {
    let models: Vec<Value> = app
        .models
        .all()
        .iter()
        .map(|model| {
            let mut fields = fields(model);
            let modified = time::rfc3339(model.created(), 0);
            fields.insert("modified_at".into(), modified.into());
            Value::Object(fields)
        })
        .collect();
    axum::Json(json!({"models": models}))
}

/// Models that are loaded.
#[utoipa::path(get, path = "/api/ps", responses((status = 200, description = "`models`", body = Object)))]
pub(crate) async fn ps(State(app): State<App>) -> axum::Json<Value> {
    let models: Vec<Value> = app
        .models
        .all()
        .iter()
        .map(|model| {
            let info = model.info();
            let on_gpu = if info.device == "cpu" {
                0
            } else {
                info.weight_bytes
            };
            let mut fields = fields(model);
            fields.insert("expires_at".into(), NEVER.into());
            fields.insert("size_vram".into(), on_gpu.into());
            fields.insert("context_length".into(), model.context().into());
            Value::Object(fields)
        })
        .collect();
    axum::Json(json!({"models": models}))
}

/// Which model.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ShowRequest {
    /// The model's name.
    #[serde(alias = "name")]
    model: Option<String>,
}

/// What a model is.
#[utoipa::path(post, path = "/api/show", request_body = ShowRequest, responses(
    (status = 200, description = "what it is", body = Object),
    (status = 404, description = "it is not served", body = Object)))]
pub(crate) async fn show(
    State(app): State<App>,
    Json(request): Json<ShowRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let (_, model) = app.models.find(request.model.as_deref())?;
    let info = model.info();
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
    let (capabilities, format) = (model.capabilities(), model.format());
    let can = [
        ("completion", true),
        ("embedding", capabilities.embeddings),
        ("tools", format.reads_tools()),
        ("thinking", format.reads_reasoning()),
    ];
    let can: Vec<&str> = can.iter().filter_map(|(n, on)| on.then_some(*n)).collect();
    Ok(axum::Json(json!({
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(model),
        "model_info": facts,
        "capabilities": can,
        "modified_at": time::rfc3339(model.created(), 0),
    })))
}

fn fields(model: &ServedModel) -> Map<String, Value> {
    // Clients show it and compare it; files have digests of their own, which are not these.
    let digest = Sha256::digest(model.id().as_bytes());
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut fields = Map::new();
    fields.insert("name".into(), model.id().into());
    fields.insert("model".into(), model.id().into());
    fields.insert("size".into(), model.info().weight_bytes.into());
    fields.insert("digest".into(), digest.into());
    fields.insert("details".into(), details(model));
    fields
}

fn details(model: &ServedModel) -> Value {
    let info = model.info();
    let bits = info.quantization_bits.map(|bits| format!("Q{bits}"));
    let parameters = info.parameters as f64;
    let size = if parameters >= 1e9 {
        format!("{:.1}B", parameters / 1e9)
    } else {
        format!("{:.1}M", parameters / 1e6)
    };
    json!({
        "parent_model": "",
        "format": "",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": size,
        "quantization_level": bits.unwrap_or_default(),
    })
}
