//! `/rerank` and `/v1/rerank`: documents sorted by relevance to a query. The forms of Jina, Cohere,
//! llama.cpp and text-embeddings-inference are accepted.

use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use inference::{CancelToken, Interrupt, RerankOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::engine::RerankJob;
use crate::error::ApiError;
use crate::pipeline::embeddings::Leaves;
use crate::pipeline::{Work, at_most, prepare};
use crate::state::App;

/// A query, and documents to sort by relevance to it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct RerankRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// The query.
    query: Option<String>,
    /// The documents: texts, or objects with `text`.
    #[schema(value_type = Option<Vec<crate::pipeline::described::TextOrObject>>)]
    documents: Option<Vec<Value>>,
    /// The documents, in text-embeddings-inference's form. The answer is then a list.
    texts: Option<Vec<String>>,
    /// Return only this number of the best documents.
    top_n: Option<usize>,
    /// Whether the answer repeats the documents.
    return_documents: Option<bool>,
    /// The field `return_documents` in text-embeddings-inference's form.
    return_text: Option<bool>,
    /// Return the last layer's scores, instead of numbers from 0 to 1.
    raw_scores: Option<bool>,
    /// Cut documents that are too long, instead of refusing them. The default is true, but false
    /// with `texts`.
    truncate: Option<bool>,
    /// A description of the task, for models that accept an instruction.
    instruction: Option<String>,
    /// Not supported.
    max_tokens_per_doc: Option<usize>,
    /// Not supported.
    #[schema(value_type = Option<Vec<String>>)]
    rank_fields: Option<Value>,
}

#[derive(Serialize)]
struct Item {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Value>,
}

impl RerankRequest {
    /// The texts of the documents, and whether the answer is a list.
    fn documents(&mut self) -> Result<(Vec<String>, bool), ApiError> {
        match (self.documents.take(), self.texts.take()) {
            (Some(documents), None) => {
                let texts = documents.into_iter().enumerate();
                let texts = texts.map(|(i, document)| text_of(document, i));
                Ok((texts.collect::<Result<_, _>>()?, false))
            }
            (None, Some(texts)) => Ok((texts, true)),
            (Some(_), Some(_)) => Err(ApiError::field(
                "texts",
                "give documents or texts, not both",
            )),
            (None, None) => Err(ApiError::field("documents", "documents is missing")),
        }
    }
}

fn text_of(document: Value, i: usize) -> Result<String, ApiError> {
    let text = match document {
        Value::String(text) => Some(text),
        Value::Object(mut map) => match map.remove("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        },
        _ => None,
    };
    text.ok_or_else(|| {
        let message = format!("document {i} must be a text, or an object with a text in `text`");
        ApiError::field("documents", message)
    })
}

/// Sorts documents by relevance to a query.
#[utoipa::path(post, path = "/rerank", request_body = RerankRequest, responses(
    (status = 200, description = "`results` with `index` and `relevance_score`, the best first; with `texts` a list of `index` and `score`", body = inline(crate::pipeline::described::ObjectOrList)),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn rerank(
    State(app): State<App>,
    Work(mut request, places): Work<RerankRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = app.models.get(request.model.as_deref(), None).await?;
    prepare::without_adapter(&model, "reranking")?;
    if model.model().as_rerank_model().is_none() {
        return Err(ApiError::unsupported(
            "model",
            format!(
                "the model {} is not made to score documents; compare vectors of /v1/embeddings, or \
                 serve a cross-encoder",
                model.id()
            ),
        ));
    }
    for (name, given) in [
        ("max_tokens_per_doc", request.max_tokens_per_doc.is_some()),
        ("rank_fields", request.rank_fields.is_some()),
    ] {
        if given {
            let message = format!("{name} is not supported; leave it out");
            return Err(ApiError::unsupported(name, message));
        }
    }
    let (documents, as_list) = request.documents()?;
    let query = match request.query.take().filter(|query| !query.is_empty()) {
        Some(query) => query,
        None => return Err(ApiError::field("query", "query is missing or empty")),
    };
    at_most("documents", documents.len(), app.limits.embedding_inputs)?;
    if documents.is_empty() {
        return Err(ApiError::field("documents", "there are no documents"));
    }
    let bytes: usize = documents.iter().map(String::len).sum();
    prepare::check_bytes(&app, bytes.saturating_add(query.len()))?;
    let cancel = Leaves(CancelToken::new());
    let interrupt = Interrupt::new()
        .with_cancel(cancel.0.clone())
        .with_deadline(arrived + app.limits.request_timeout);
    let job = RerankJob {
        model: model.clone(),
        query,
        documents: documents.clone(),
        options: RerankOptions::new()
            .with_raw_scores(request.raw_scores == Some(true))
            .with_truncate(request.truncate.unwrap_or(!as_list))
            .with_instruction(request.instruction.take()),
        interrupt,
        _place: places,
    };
    let ranking = app.engine.rerank(job).await;
    let ranking = ranking.map_err(|_| ApiError::internal())?;
    let ranking = ranking.map_err(|e| ApiError::of_engine(&e).with_param("documents"))?;
    // JSON has no infinities and no NaN.
    if ranking.scores.iter().any(|score| !score.is_finite()) {
        tracing::error!("a score of {} is not a number", model.id());
        return Err(ApiError::internal());
    }
    let order = ranking.order();
    let best = order.into_iter().take(request.top_n.unwrap_or(usize::MAX));
    let scored = best.map(|i| (i, ranking.scores[i]));
    if as_list {
        let list: Vec<Value> = scored
            .map(|(index, score)| {
                let mut item = Map::new();
                item.insert("index".into(), json!(index));
                item.insert("score".into(), json!(score));
                if request.return_text == Some(true) {
                    item.insert("text".into(), json!(documents[index]));
                }
                Value::Object(item)
            })
            .collect();
        return Ok(axum::Json(list).into_response());
    }
    let results: Vec<Item> = scored
        .map(|(index, relevance_score)| Item {
            index,
            relevance_score,
            document: (request.return_documents == Some(true))
                .then(|| json!({"text": documents[index]})),
        })
        .collect();
    let tokens = ranking.tokens;
    let body = json!({
        "object": "list",
        "model": model.id(),
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    Ok(axum::Json(body).into_response())
}
