//! The description of the API, made of the handlers' own.

use utoipa::OpenApi;
use utoipa::openapi::{ContentBuilder, ObjectBuilder, RefOr, ResponseBuilder};

use crate::api::{anthropic, native, ollama, openai, status};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "inference-server",
        description = "Language models over HTTP, for clients of OpenAI, Anthropic and Ollama"
    ),
    paths(
        status::root,
        status::health,
        status::ready,
        status::metrics,
        status::openapi,
        openai::models::list,
        openai::models::one,
        openai::chat::create,
        openai::chat::count_tokens,
        openai::completions::create,
        openai::responses::create,
        openai::embeddings::create,
        native::infer::infer,
        native::completion::create,
        native::infill::create,
        native::text::tokenize,
        native::text::detokenize,
        native::text::apply_template,
        native::text::embedding,
        native::rerank::rerank,
        native::state::props,
        native::state::slots,
        anthropic::create,
        anthropic::count_tokens,
        ollama::models::version,
        ollama::models::tags,
        ollama::models::ps,
        ollama::models::show,
        ollama::generate::chat,
        ollama::generate::generate,
        ollama::embed::create,
        ollama::embed::create_old,
        ollama::models::pull,
        ollama::manage::delete,
        ollama::manage::copy,
        ollama::manage::create,
    )
)]
struct Description;

/// Errors that every route can answer with.
const OF_ALL: [(&str, &str); 2] = [
    ("401", "the API key is missing or wrong"),
    ("403", "the request comes from a web page that may not ask"),
];

/// Errors that every route with a body can answer with.
const OF_BODIES: [(&str, &str); 7] = [
    ("400", "the request cannot be served as it is"),
    ("404", "the model is not served"),
    ("408", "the body took too long to arrive"),
    ("413", "the body is too large"),
    ("415", "the body is compressed"),
    ("429", "the queue is full"),
    ("503", "the server stops, or memory does not suffice"),
];

/// The description of the API as OpenAPI 3.1 in JSON.
#[must_use]
pub fn openapi_json() -> String {
    let mut api = Description::openapi();
    for item in api.paths.paths.values_mut() {
        let operations = [
            (&mut item.get, &[][..]),
            (&mut item.post, &OF_BODIES[..]),
            (&mut item.delete, &OF_BODIES[..]),
        ];
        for (operation, more) in operations {
            let Some(operation) = operation else { continue };
            for (status, what) in OF_ALL.iter().chain(more) {
                let responses = &mut operation.responses.responses;
                responses
                    .entry((*status).to_owned())
                    .or_insert_with(|| error_response(what));
            }
        }
    }
    // It has no maps with keys other than texts, which is all that could fail.
    api.to_json().unwrap_or_default()
}

fn error_response(what: &str) -> RefOr<utoipa::openapi::Response> {
    let body = ContentBuilder::new().schema(Some(ObjectBuilder::new().build()));
    let response = ResponseBuilder::new().description(what);
    RefOr::T(response.content("application/json", body.build()).build())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Of llama.cpp's server, mostly.
    const SECOND_NAMES: [&str; 10] = [
        "/v1/health",
        "/v1/rerank",
        "/reranking",
        "/v1/reranking",
        "/models",
        "/chat/completions",
        "/chat/completions/input_tokens",
        "/responses",
        "/completions",
        "/embeddings",
    ];

    #[test]
    fn every_route_is_described_and_every_description_is_a_route() {
        let json: serde_json::Value = serde_json::from_str(&openapi_json()).unwrap();
        let mut described = BTreeSet::new();
        for (path, methods) in json["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                described.insert(format!("{method} {path}"));
            }
        }
        let routes: BTreeSet<String> = crate::app::table()
            // The same handlers under second names.
            .filter(|(_, path)| !SECOND_NAMES.contains(path))
            // Files of the page.
            .filter(|(_, path)| !path.starts_with("/ui/"))
            .map(|(method, path)| format!("{method} {}", path.replace("{*", "{")))
            .collect();
        assert_eq!(described, routes);
    }
}
