//! Tests that the parser can read the text that a grammar enforces.

use super::harness::{Golden, render};
use inference_text::reply::{CallBody, CallGrammar, Family, Format, GrammarUnavailable, Tools};
use serde_json::{Value, json};

fn tools() -> Value {
    json!([
        {"name": "f", "parameters": {
            "type": "object",
            "$defs": {"x": {"type": "integer"}},
            "properties": {
                "a": {"$ref": "#/$defs/x"},
                "b": {"$ref": "#/properties/a"},
            },
            "required": ["a"],
        }},
        {"name": "g"},
    ])
}

fn grammar(family: Family, named: Option<&str>) -> Result<CallGrammar, GrammarUnavailable> {
    let mut count = 0;
    family.call_grammar(&Tools::from_json(&tools()), named, 0, &mut || {
        count += 1;
        format!("{count:09}")
    })
}

/// A value that fits a schema: constants, ids that match patterns, and fixed arguments.
fn fill(schema: &Value, arguments: &Value) -> Value {
    if let Some(value) = schema.get("const") {
        return value.clone();
    }
    match schema["pattern"].as_str() {
        Some("^[a-zA-Z0-9]{9}$") => return json!("123456789"),
        Some("^[0-9]{1,4}$") => return json!("0"),
        _ => {}
    }
    let properties = schema["properties"].as_object().expect("an object");
    if schema["required"]
        .as_array()
        .is_none_or(|required| required.contains(&json!("a")))
    {
        return arguments.clone();
    }
    properties
        .iter()
        .map(|(key, value)| (key.clone(), fill(value, arguments)))
        .collect()
}

#[test]
fn forced_calls_are_read() {
    let mut possible = 0;
    for family in Family::ALL {
        let Ok(all) = grammar(family, None) else {
            continue;
        };
        assert_eq!(all.shapes.len(), 2, "{family}");
        for named in ["f", "g"] {
            let one = grammar(family, Some(named)).expect("the same family");
            let [shape] = one.shapes.as_slice() else {
                panic!("{family}: one tool, one shape")
            };
            assert_eq!(shape.tool, named);
            let arguments = if named == "f" {
                json!({"a": 1})
            } else {
                json!({})
            };
            let CallBody::Json(schema) = &shape.body else {
                continue;
            };
            possible += 1;
            let json = fill(schema, &arguments).to_string();
            let call = format!("{}{json}{}", shape.prefix, shape.suffix);
            let mut reply = format!("{}{call}", one.open);
            let mut expected = 1;
            if let Some(separator) = &one.separator {
                reply += &format!("{separator}{call}");
                expected = 2;
            }
            reply += &one.close;
            let golden = Golden::new(Format::for_family(family))
                .tools(tools())
                .prompt("<|start|>assistant");
            let lines = render(golden.events(&[(&reply, false)]));
            assert_eq!(lines.len(), expected, "{family}: {reply} {lines:?}");
            for line in lines {
                assert!(line.starts_with("call "), "{family}: {line}");
                assert!(
                    line.ends_with(&format!(" {named} {arguments}")),
                    "{family}: {line}"
                );
            }
        }
    }
    // Two tools for each of twelve families.
    assert_eq!(possible, 24);
}

#[test]
fn call_objects_keep_their_references() {
    let grammar = grammar(Family::Hermes, Some("f")).expect("JSON");
    let CallBody::Json(schema) = &grammar.shapes[0].body else {
        panic!("{grammar:?}")
    };
    assert_eq!(
        *schema,
        json!({
            "type": "object",
            "$defs": {"x": {"type": "integer"}},
            "properties": {
                "name": {"type": "string", "const": "f"},
                "arguments": {
                    "type": "object",
                    "properties": {
                        "a": {"$ref": "#/$defs/x"},
                        "b": {"$ref": "#/properties/arguments/properties/a"},
                    },
                    "required": ["a"],
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": false,
        })
    );
    // The name must be the first field, so that the model writes it first.
    let text = schema["properties"].to_string();
    assert!(text.starts_with("{\"name\""), "{text}");
}

#[test]
fn what_is_impossible_says_so() {
    assert_eq!(
        grammar(Family::None, None),
        Err(GrammarUnavailable::NoToolCalls)
    );
    assert_eq!(
        grammar(Family::Hermes, Some("h")),
        Err(GrammarUnavailable::UnknownTool("h".into()))
    );
    let none = Family::Hermes.call_grammar(&Tools::default(), None, 0, &mut String::new);
    assert_eq!(none, Err(GrammarUnavailable::NoTools));
}
