//! Compares `/openapi.json` with the server's behavior. `tools/serve_schema.py` checks more cases
//! with schemathesis.

use crate::common::{Reply, Running, config, serve};
use serde_json::{Value, json};

fn description(server: &Running) -> Value {
    server.client().get("/openapi.json").expect(200)
}

/// The schema to which `schema` refers, or `schema` itself.
fn resolved<'a>(all: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        Some(path) => resolved(all, all.pointer(&path[1..]).unwrap()),
        None => schema,
    }
}

/// The JSON types that a schema allows at the top level.
fn types(all: &Value, schema: &Value) -> Vec<String> {
    let schema = resolved(all, schema);
    let mut type_names = Vec::new();
    for key in ["oneOf", "anyOf"] {
        for part in schema[key].as_array().into_iter().flatten() {
            type_names.extend(types(all, part));
        }
    }
    match &schema["type"] {
        Value::String(name) => type_names.push(name.clone()),
        Value::Array(names) => {
            let names = names.iter().filter_map(Value::as_str);
            type_names.extend(names.map(String::from));
        }
        _ => {}
    }
    type_names
}

/// All properties of a schema, including those of its parts.
fn properties(all: &Value, schema: &Value) -> serde_json::Map<String, Value> {
    let schema = resolved(all, schema);
    let mut merged = schema["properties"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    for part in schema["allOf"].as_array().into_iter().flatten() {
        merged.extend(properties(all, part));
    }
    merged
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Checks that status, content type and JSON type of an answer match the description.
#[track_caller]
fn is_described(all: &Value, operation: &Value, reply: &Reply) {
    let place = &operation["operationId"];
    let described = &operation["responses"][reply.status.to_string()];
    assert!(described.is_object(), "{place}: status {}", reply.status);
    let kind = reply.header("content-type").unwrap();
    let kind = kind.split(';').next().unwrap();
    let content = &described["content"][kind];
    assert!(content.is_object(), "{place}: {kind} is not described");
    if kind == "application/json" {
        let (types, is) = (types(all, &content["schema"]), type_name(&reply.json()));
        assert!(
            types.iter().any(|t| t == is),
            "{place}: {is}, not {types:?}"
        );
    }
}

#[test]
fn answers_are_described() {
    let server = serve(&config());
    let all = description(&server);
    for (path, methods) in all["paths"].as_object().unwrap() {
        if let Some(operation) = methods.get("get") {
            let path = path.replace("{id}", "tiny");
            is_described(&all, operation, &server.client().get(&path));
        }
        if let Some(operation) = methods.get("post") {
            // Each route must answer an empty body with an error.
            is_described(&all, operation, &server.client().ask("POST", path, b""));
        }
    }
    let completion = &all["paths"]["/completion"]["post"];
    for prompt in [json!("say:a"), json!(["say:a", "say:b"])] {
        let reply = server
            .client()
            .post("/completion", &json!({"prompt": prompt}));
        is_described(&all, completion, &reply);
    }
    for (path, body) in [
        ("/api/generate", json!({"prompt": "say:a"})),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "say:a"}]}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "say:a", "stream": true}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "say:a", "model": "none"}),
        ),
        ("/v1/responses", json!({"input": "say:a", "stream": true})),
        ("/rerank", json!({"query": "a", "documents": ["b"]})),
    ] {
        let reply = server.client().post(path, &body);
        is_described(&all, &all["paths"][path]["post"], &reply);
    }
    let embedding = &all["paths"]["/embedding"]["post"];
    let reply = server
        .client()
        .post("/embedding", &json!({"content": "abc"}));
    is_described(&all, embedding, &reply);
}

/// Requests that only load a model are checked, too.
#[test]
fn ollama_requests_of_wrong_types_are_refused() {
    let server = serve(&config());
    for path in ["/api/chat", "/api/generate"] {
        for body in [
            json!({"think": {}}),
            json!({"format": 1}),
            json!({"keep_alive": []}),
        ] {
            server.client().post(path, &body).expect(400);
        }
        let body = json!({"think": null, "format": null, "keep_alive": null});
        server.client().post(path, &body).expect(200);
    }
}

/// Two types with one name would overwrite each other in the description.
#[test]
fn each_route_has_its_own_request() {
    let server = serve(&config());
    let all = description(&server);
    for (path, field, values) in [
        ("/v1/chat/completions", "messages", "array"),
        ("/v1/chat/completions", "max_completion_tokens", "integer"),
        ("/v1/chat/completions", "tool_choice", "object string"),
        ("/v1/completions", "prompt", "array object string"),
        ("/v1/completions", "best_of", "integer"),
        ("/v1/embeddings", "input", "array object string"),
        ("/v1/responses", "input", "array string"),
        ("/v1/messages", "system", "array string"),
        ("/completion", "prompt", "array object string"),
        ("/completion", "n_predict", "integer"),
        ("/completion", "logit_bias", "array object"),
        ("/embedding", "content", "array object string"),
        ("/api/chat", "keep_alive", "number string"),
        ("/api/chat", "think", "boolean string"),
        ("/api/generate", "format", "object string"),
        ("/api/embed", "keep_alive", "number string"),
    ] {
        let body = &all["paths"][path]["post"]["requestBody"]["content"]["application/json"];
        let fields = properties(&all, &body["schema"]);
        let mut type_names = types(&all, fields.get(field).unwrap_or(&Value::Null));
        type_names.sort();
        type_names.dedup();
        type_names.retain(|t| t != "null");
        assert_eq!(type_names.join(" "), values, "{path}: {field}");
    }
}
