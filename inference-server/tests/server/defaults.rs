//! Tests that the operator's defaults apply in every API to fields that a request omits, and that
//! the request's fields override them.

use crate::common::{Running, config, serve};
use inference::{GenerateOptions, Parameter, ParameterValue};
use inference_server::RequestDefaults;
use serde_json::{Value, json};

fn defaults() -> RequestDefaults {
    let mut defaults = RequestDefaults::new();
    for (name, value) in [
        ("temperature", 0.25),
        ("top_p", 0.75),
        ("top_k", 11.0),
        ("min_p", 0.125),
        ("repeat_penalty", 1.5),
    ] {
        defaults.parameters.insert(name, value).unwrap();
    }
    defaults.max_tokens = Some(4);
    defaults.prefill_step_size = Some(64);
    defaults
        .template
        .insert("enable_thinking".to_owned(), Value::Bool(false));
    defaults
}

/// Sends a request, and returns the options that the engine received.
fn asked(server: &Running, path: &str, body: &Value) -> GenerateOptions {
    server.client().post(path, body).expect(200);
    server.state.last_options()
}

fn figures(options: &GenerateOptions) -> [f32; 4] {
    [
        options.sampling.temperature,
        options.sampling.top_p,
        options.sampling.min_p,
        options.penalties.repeat_penalty,
    ]
}

/// Each API's path, a request without optional fields, and a request with all of them.
fn requests() -> Vec<(&'static str, Value, Value)> {
    let messages = json!([{"role": "user", "content": "say:abcdefgh"}]);
    vec![
        (
            "/v1/chat/completions",
            json!({"messages": messages}),
            json!({"messages": messages, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5,
                   "repetition_penalty": 1.25, "max_tokens": 2}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "say:abcdefgh"}),
            json!({"prompt": "say:abcdefgh", "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5,
                   "repetition_penalty": 1.25, "max_tokens": 2}),
        ),
        (
            "/completion",
            json!({"prompt": "say:abcdefgh"}),
            json!({"prompt": "say:abcdefgh", "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5,
                   "repeat_penalty": 1.25, "n_predict": 2}),
        ),
        (
            "/api/chat",
            json!({"model": "tiny", "messages": messages, "stream": false}),
            json!({"model": "tiny", "messages": messages, "stream": false, "options": {
                   "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5,
                   "repeat_penalty": 1.25, "num_predict": 2}}),
        ),
    ]
}

#[test]
fn requests_that_say_nothing_have_the_servers_defaults() {
    let server = serve(&config().with_defaults(defaults()));
    for (path, silent, explicit) in requests() {
        let options = asked(&server, path, &silent);
        assert_eq!(figures(&options), [0.25, 0.75, 0.125, 1.5], "{path}");
        assert_eq!(options.sampling.top_k, 11, "{path}");
        assert_eq!(options.max_tokens, 4, "{path}");
        assert_eq!(options.prefill.prefill_step_size, 64, "{path}");
        let options = asked(&server, path, &explicit);
        assert_eq!(figures(&options), [0.5, 0.5, 0.5, 1.25], "{path}");
        assert_eq!(options.sampling.top_k, 3, "{path}");
        assert_eq!(options.max_tokens, 2, "{path}");
    }
    let body = json!({"model": "tiny", "max_tokens": 9,
        "messages": [{"role": "user", "content": "say:abcdefgh"}]});
    let options = asked(&server, "/v1/messages", &body);
    assert_eq!(figures(&options), [0.25, 0.75, 0.125, 1.5]);
    assert_eq!((options.sampling.top_k, options.max_tokens), (11, 9));
    let body = json!({"model": "tiny", "input": "say:abcdefgh"});
    let options = asked(&server, "/v1/responses", &body);
    assert_eq!(figures(&options), [0.25, 0.75, 0.125, 1.5]);
    assert_eq!((options.sampling.top_k, options.max_tokens), (11, 4));

    let props = server.client().get("/props").expect(200);
    let params = &props["default_generation_settings"]["params"];
    assert_eq!(params["top_k"], 11);
    assert_eq!(params["n_predict"], 4);
    assert_eq!(params["repeat_penalty"], 1.5);
}

#[test]
fn without_defaults_each_api_has_its_own() {
    let server = serve(&config());
    for ((path, silent, _), temperature) in requests().into_iter().zip([1.0, 1.0, 0.8, 0.8]) {
        let options = asked(&server, path, &silent);
        assert_eq!(options.sampling.temperature, temperature, "{path}");
        // OpenAI's default for raw completions is 16 tokens.
        let most = match path {
            "/v1/completions" => 16..=16,
            _ => 17..=usize::MAX,
        };
        assert!(most.contains(&options.max_tokens), "{path}");
    }
}

#[test]
fn defaults_that_no_request_may_have_are_refused() {
    let mut wrong = RequestDefaults::new();
    let top_p = Parameter::named("top_p").unwrap();
    wrong.parameters.put(top_p, ParameterValue::Real(2.0));
    let error = config().with_defaults(wrong).validate().unwrap_err();
    assert!(error.message().contains("top_p"), "{error}");
}
