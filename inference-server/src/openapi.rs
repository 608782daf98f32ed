//! The OpenAPI description of the server, generated from the handlers' descriptions.

use utoipa::openapi::{ContentBuilder, Info, ObjectBuilder, RefOr, ResponseBuilder};

/// Errors that every route may return.
const OF_ALL: [(&str, &str); 2] = [
    ("401", "the API key is missing or wrong"),
    (
        "403",
        "the request comes from a web page whose origin is not allowed",
    ),
];

/// Errors that every route with a body may return.
const OF_BODIES: [(&str, &str); 7] = [
    ("400", "the request is not valid"),
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
    let mut api = crate::routes::description();
    api.info = Info::new("inference-server", env!("CARGO_PKG_VERSION"));
    api.info.description =
        Some("Language models over HTTP, for clients of OpenAI, Anthropic and Ollama".to_owned());
    // OpenAPI has no notation for a path parameter that spans several segments.
    let paths = std::mem::take(&mut api.paths.paths);
    api.paths.paths = paths
        .into_iter()
        .map(|(path, item)| (path.replace("{*", "{"), item))
        .collect();
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
    // Serialization fails only for maps with keys that are not strings, and this type has no such
    // map.
    api.to_json().unwrap_or_default()
}

fn error_response(what: &str) -> RefOr<utoipa::openapi::Response> {
    let body = ContentBuilder::new().schema(Some(ObjectBuilder::new().build()));
    let response = ResponseBuilder::new().description(what);
    RefOr::T(response.content("application/json", body.build()).build())
}
