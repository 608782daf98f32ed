//! Schemas of calls for the families that write JSON.

use super::super::Tool;
use serde_json::{Map, Value, json};

/// Maximum depth at which references in a tool's schema are found.
const MAX_SCHEMA_DEPTH: usize = 128;

pub(super) fn name_schema(name: &str) -> Value {
    json!({"type": "string", "const": name})
}

/// The schema of a tool's arguments. Without a schema, the arguments are an empty object.
pub(super) fn arguments(tool: &Tool) -> Value {
    match &tool.parameters {
        Value::Object(schema) if !schema.is_empty() => tool.parameters.clone(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

/// The schema of a call object, with the arguments' schema under `key`.
pub(super) fn object(
    tool: &Tool,
    key: &str,
    before: &[(&str, Value)],
    after: &[(&str, Value)],
) -> Value {
    let mut inner = arguments(tool);
    let mut outer = Map::new();
    outer.insert("type".into(), "object".into());
    // References are relative to the root, so the definitions move to the root.
    for word in ["$defs", "definitions"] {
        if let Some(mut definitions) = inner.as_object_mut().and_then(|inner| inner.remove(word)) {
            move_references(&mut definitions, key, MAX_SCHEMA_DEPTH);
            outer.insert(word.into(), definitions);
        }
    }
    move_references(&mut inner, key, MAX_SCHEMA_DEPTH);
    let mut properties = Map::new();
    let fields = before
        .iter()
        .cloned()
        .chain([(key, inner)])
        .chain(after.iter().cloned());
    for (name, schema) in fields {
        properties.insert(name.to_owned(), schema);
    }
    let required: Vec<_> = properties.keys().cloned().collect();
    outer.insert("properties".into(), Value::Object(properties));
    outer.insert("required".into(), required.into());
    outer.insert("additionalProperties".into(), false.into());
    Value::Object(outer)
}

/// Updates references to all parts except definitions, because these parts have moved.
fn move_references(schema: &mut Value, key: &str, depth: usize) {
    if depth == 0 {
        return;
    }
    match schema {
        Value::Object(map) => {
            for (word, value) in map.iter_mut() {
                match value {
                    Value::String(target) if word == "$ref" => {
                        let local = target.strip_prefix('#').filter(|path| {
                            !path.starts_with("/$defs/") && !path.starts_with("/definitions/")
                        });
                        if let Some(path) = local {
                            *target = format!("#/properties/{key}{path}");
                        }
                    }
                    _ => move_references(value, key, depth - 1),
                }
            }
        }
        Value::Array(list) => {
            for value in list {
                move_references(value, key, depth - 1);
            }
        }
        _ => {}
    }
}
