//! Tests of `strict` tools in the APIs that support them. If a call is forced, a grammar enforces
//! the schema. With `auto`, the server passes on the call unchecked.

use crate::common::{Running, Script, config, serve_script};
use inference::Grammar;
use serde_json::{Value, json};

/// A chat template with the markers that identify Qwen's format.
const HERMES: &str = "<think></think> <tool_call>{{ call | tojson }}</tool_call>";

/// A call whose arguments violate the schema: a number instead of a text, and an extra field.
const SAID: &str =
    r#"say:<tool_call>{"name": "f", "arguments": {"city": 7, "more": []}}</tool_call>"#;

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}},
        "required": ["city"], "additionalProperties": false})
}

fn server() -> Running {
    serve_script(&config(), Script::writing(HERMES, &[]), |model| {
        model.with_context(2000)
    })
}

/// A path, a body with one strict tool, and the path of the arguments in the answer.
fn requests(choice: &str) -> [(&'static str, Value, &'static str); 2] {
    let spec = json!({"name": "f", "parameters": schema(), "strict": true});
    let mut flat = spec.clone();
    flat["type"] = "function".into();
    let chat = json!({"messages": [{"role": "user", "content": SAID}], "tool_choice": choice,
        "tools": [{"type": "function", "function": spec}]});
    let responses = json!({"input": SAID, "tool_choice": choice, "tools": [flat]});
    [
        (
            "/v1/chat/completions",
            chat,
            "/choices/0/message/tool_calls/0/function/arguments",
        ),
        ("/v1/responses", responses, "/output/0/arguments"),
    ]
}

/// The arguments' schema in the grammar of the last request.
fn held_to(server: &Running) -> Value {
    let Some(Grammar::Lark(text)) = server.state.last_options().constraints.grammar else {
        panic!("no grammar")
    };
    let rule = text.lines().find_map(|l| l.strip_prefix("json_0: %json "));
    let grammar: Value = serde_json::from_str(rule.unwrap()).unwrap();
    // In this format, the whole call is a JSON object.
    let mut arguments = grammar["properties"]["arguments"].clone();
    assert_eq!(grammar["properties"]["name"]["const"], "f", "{text}");
    arguments.as_object_mut().unwrap().remove("x-guidance");
    arguments
}

#[test]
fn a_forced_call_is_held_to_the_schema() {
    let server = server();
    for (path, body, _) in requests("required") {
        server.client().post(path, &body).expect(200);
        assert_eq!(held_to(&server), schema(), "{path}");
    }
    let named = json!({"type": "function", "function": {"name": "f"}});
    let [(path, mut body, _), _] = requests("auto");
    body["tool_choice"] = named;
    server.client().post(path, &body).expect(200);
    assert_eq!(held_to(&server), schema());
}

#[test]
fn a_call_by_choice_of_the_model_is_passed_on_as_it_is() {
    let server = server();
    for (path, body, place) in requests("auto") {
        let reply = server.client().post(path, &body).expect(200);
        let arguments = reply.pointer(place).unwrap_or_else(|| panic!("{reply}"));
        let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"city": 7, "more": []}), "{path}");
        assert_eq!(server.state.last_options().constraints.grammar, None);
    }
}

/// In a format whose arguments are not JSON, the grammar has a rule for each argument. For a strict
/// tool, it allows only the arguments that the schema names.
#[test]
fn a_forced_call_without_json_is_held_to_the_schema() {
    let template = "<function=f><parameter=city>";
    let server = serve_script(&config(), Script::writing(template, &[]), |model| {
        model.with_context(2000)
    });
    for (path, body, _) in requests("required") {
        server.client().post(path, &body).expect(200);
        let Some(Grammar::Lark(text)) = server.state.last_options().constraints.grammar else {
            panic!("no grammar")
        };
        let rule = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        assert_eq!(
            rule("arguments_0_1: "),
            Some("argument_0_2"),
            "{path}: {text}"
        );
        let argument = rule("argument_0_2: ").unwrap();
        assert!(
            argument.starts_with(r#""<parameter=city>\n" (/"#),
            "{path}: {text}"
        );
        assert_eq!(text.matches("<parameter=").count(), 1, "{path}: {text}");
    }
}
