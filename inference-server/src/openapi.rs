//! The description of the API, made of the handlers' own.

use utoipa::OpenApi;

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
    )
)]
struct Description;

/// The description of the API as OpenAPI 3.1 in JSON.
#[must_use]
pub fn openapi_json() -> String {
    // It has no maps with keys other than texts, which is all that could fail.
    Description::openapi().to_json().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

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
            .filter(|(_, path)| !["/v1/health", "/v1/rerank"].contains(path))
            // Files of the page.
            .filter(|(_, path)| !path.starts_with("/ui/"))
            .map(|(method, path)| format!("{method} {}", path.replace("{*", "{")))
            .collect();
        assert_eq!(described, routes);
    }
}
