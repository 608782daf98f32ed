//! Reads the JSON schema of an argument as a list of alternatives. A keyword that the grammars
//! cannot express is an error.

use serde_json::{Map, Value};

/// The schema that allows every value.
pub(super) static ANY: Value = Value::Bool(true);

/// Maximum number of nested references and alternatives of one value.
const MAX_DEPTH: usize = 32;

/// Maximum number of schemas that are read for the alternatives of one value. Without a limit,
/// references that double at each step would take exponential time.
const MAX_SCHEMAS: usize = 4_000;

/// Maximum length of a string and of an array with limits. Greater maximums are reduced.
pub(super) const MAX_LENGTH: u64 = 65_536;

/// Keywords that restrict values and that are not supported.
const UNSUPPORTED: &[&str] = &[
    "pattern",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "prefixItems",
    "additionalItems",
    "uniqueItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Keywords of objects, of arrays, of strings and of numbers.
const OF_OBJECT: &[&str] = &["properties", "required", "additionalProperties"];
const OF_ARRAY: &[&str] = &["items", "minItems", "maxItems"];
const OF_STRING: &[&str] = &["minLength", "maxLength"];
const OF_NUMBER: &[&str] = &[
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
const OF_ANY: &[&str] = &["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"];

/// One kind of values that a schema allows.
#[derive(Clone, Debug)]
pub(super) enum Alternative<'a> {
    Any,
    Constant(&'a Value),
    /// A string with a minimum and a maximum length.
    String(u64, Option<u64>),
    /// A number of this schema, whose keywords are only those of numbers.
    Number(Value),
    Boolean,
    Null,
    Array {
        items: &'a Value,
        least: u64,
        most: Option<u64>,
    },
    Object(Members<'a>),
}

/// The members of an object.
#[derive(Clone, Debug)]
pub(super) struct Members<'a> {
    /// Name, schema, and whether the member is required.
    pub(super) named: Vec<(&'a str, &'a Value, bool)>,
    /// The schema of members with any name. It applies only if no members are named.
    pub(super) others: Option<&'a Value>,
}

/// The alternatives of a schema. The list is empty if no value is allowed.
pub(super) fn alternatives<'a>(
    schema: &'a Value,
    root: &'a Value,
) -> Result<Vec<Alternative<'a>>, String> {
    let mut found = Vec::new();
    let mut budget = MAX_SCHEMAS;
    collect(schema, root, MAX_DEPTH, &mut budget, &mut found)?;
    Ok(found)
}

/// The members of the arguments. References lead to the schema with the members.
pub(super) fn arguments<'a>(root: &'a Value) -> Result<Members<'a>, String> {
    let mut schema = root;
    for _ in 0..MAX_DEPTH {
        let Value::Object(map) = schema else {
            return Ok(Members {
                named: Vec::new(),
                others: None,
            });
        };
        let Some(reference) = map.get("$ref") else {
            supported(map)?;
            only(map, OF_OBJECT)?;
            match map.get("type") {
                None => {}
                Some(Value::String(name)) if name == "object" => {}
                Some(_) => return Err(String::from("the arguments must have the type object")),
            }
            return members(map);
        };
        only(map, &["$ref"])?;
        schema = target(reference, root)?;
    }
    Err(String::from("the references ($ref) form a cycle"))
}

fn collect<'a>(
    schema: &'a Value,
    root: &'a Value,
    depth: usize,
    budget: &mut usize,
    found: &mut Vec<Alternative<'a>>,
) -> Result<(), String> {
    if depth == 0 {
        return Err(String::from(
            "references ($ref) form a cycle, or nest too deeply",
        ));
    }
    *budget = budget
        .checked_sub(1)
        .ok_or("there are too many alternatives (anyOf, oneOf, $ref)")?;
    let map = match schema {
        Value::Bool(false) => return Ok(()),
        Value::Object(map) => map,
        _ => {
            found.push(Alternative::Any);
            return Ok(());
        }
    };
    supported(map)?;
    if let Some(reference) = map.get("$ref") {
        only(map, &["$ref"])?;
        return collect(target(reference, root)?, root, depth - 1, budget, found);
    }
    for word in ["anyOf", "oneOf", "allOf"] {
        let Some(parts) = map.get(word) else { continue };
        only(map, &[word])?;
        let parts = parts.as_array().map(Vec::as_slice).unwrap_or_default();
        if word == "allOf" && parts.len() != 1 {
            return Err(String::from("the keyword 'allOf' with several schemas"));
        }
        for part in parts {
            collect(part, root, depth - 1, budget, found)?;
        }
        return Ok(());
    }
    let types: Option<Vec<&str>> = match map.get("type") {
        None => None,
        Some(Value::String(name)) => Some(vec![name]),
        Some(Value::Array(names)) => Some(names.iter().filter_map(Value::as_str).collect()),
        Some(_) => return Err(String::from("the keyword 'type' has no name")),
    };
    let constant = map.get("const").map(std::slice::from_ref);
    let list = map.get("enum").and_then(Value::as_array).map(Vec::as_slice);
    if let Some(values) = constant.or(list) {
        only(map, &["enum", "const"])?;
        let both = constant.is_some() && list.is_some();
        for value in values {
            let fits = types
                .as_ref()
                .is_none_or(|names| names.iter().any(|name| has_type(value, name)));
            if fits && !(both && list.is_some_and(|list| !list.contains(value))) {
                found.push(Alternative::Constant(value));
            }
        }
        return Ok(());
    }
    let types = types.unwrap_or_else(|| {
        // Without a type, the keywords say which type is meant.
        let has = |words: &[&str]| words.iter().any(|word| map.contains_key(*word));
        let kinds = [
            ("object", has(OF_OBJECT)),
            ("array", has(OF_ARRAY)),
            ("string", has(OF_STRING)),
            ("number", has(OF_NUMBER)),
        ];
        kinds
            .iter()
            .filter(|kind| kind.1)
            .map(|kind| kind.0)
            .collect()
    });
    if types.is_empty() {
        found.push(Alternative::Any);
    }
    for name in types {
        found.push(match name {
            "string" => Alternative::String(
                count(map, "minLength")?.unwrap_or(0),
                count(map, "maxLength")?,
            ),
            "integer" | "number" => {
                let mut number = Map::new();
                number.insert("type".into(), name.into());
                for word in OF_NUMBER {
                    if let Some(value) = map.get(*word) {
                        number.insert((*word).into(), value.clone());
                    }
                }
                Alternative::Number(Value::Object(number))
            }
            "boolean" => Alternative::Boolean,
            "null" => Alternative::Null,
            "array" => Alternative::Array {
                items: match map.get("items") {
                    None => &ANY,
                    Some(Value::Array(_)) => {
                        return Err(String::from("the keyword 'items' with a list"));
                    }
                    Some(items) => items,
                },
                least: count(map, "minItems")?.unwrap_or(0),
                most: count(map, "maxItems")?,
            },
            "object" => Alternative::Object(members(map)?),
            other => return Err(format!("the type '{other}' is unknown")),
        });
    }
    Ok(())
}

/// A length keyword. Values beyond the maximum of the grammars are errors for a minimum, and are
/// reduced for a maximum.
fn count(map: &Map<String, Value>, word: &str) -> Result<Option<u64>, String> {
    let Some(value) = map.get(word) else {
        return Ok(None);
    };
    let whole = value.as_f64().filter(|n| *n >= 0.0 && n.fract() == 0.0);
    let n = whole.ok_or_else(|| format!("the keyword '{word}' is not a count"))? as u64;
    if n > MAX_LENGTH && word.starts_with("min") {
        return Err(format!("the keyword '{word}' is greater than {MAX_LENGTH}"));
    }
    Ok(Some(n.min(MAX_LENGTH)))
}

fn members<'a>(map: &'a Map<String, Value>) -> Result<Members<'a>, String> {
    let required: Vec<&str> = map
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let properties = map.get("properties").and_then(Value::as_object);
    let mut named: Vec<(&str, &Value, bool)> = properties
        .into_iter()
        .flatten()
        .map(|(name, schema)| (name.as_str(), schema, required.contains(&name.as_str())))
        .collect();
    // A member that is false must be missing.
    named.retain(|(_, schema, required)| *required || **schema != Value::Bool(false));
    let others = match map.get("additionalProperties") {
        None => Some(&ANY),
        Some(Value::Bool(false)) => None,
        Some(schema) => Some(schema),
    };
    for name in required {
        if named.iter().all(|member| member.0 != name) {
            let Some(schema) = others else {
                return Err(format!(
                    "'required' names '{name}', which 'additionalProperties' forbids"
                ));
            };
            named.push((name, schema, true));
        }
    }
    Ok(Members { named, others })
}

/// The schema that a reference names.
fn target<'a>(reference: &Value, root: &'a Value) -> Result<&'a Value, String> {
    let name = reference.as_str().unwrap_or_default();
    name.strip_prefix('#')
        .and_then(|pointer| root.pointer(pointer))
        .ok_or_else(|| format!("the reference ($ref) '{name}' is not in the schema"))
}

/// Refuses keywords that are not supported. Those that restrict nothing are ignored.
fn supported(map: &Map<String, Value>) -> Result<(), String> {
    for word in UNSUPPORTED {
        let harmless = match (*word, map.get(*word)) {
            (_, None) => true,
            ("uniqueItems", Some(value)) => *value == Value::Bool(false),
            // No members or elements beyond the named ones are written.
            ("unevaluatedProperties" | "unevaluatedItems", Some(Value::Bool(_))) => true,
            ("minProperties", Some(value)) => value.as_u64() == Some(0),
            _ => false,
        };
        if !harmless {
            return Err(format!("the keyword '{word}' is not supported"));
        }
    }
    Ok(())
}

/// Refuses keywords beside `allowed` and `type` that restrict values.
fn only(map: &Map<String, Value>, allowed: &[&str]) -> Result<(), String> {
    let lists = [OF_ANY, OF_OBJECT, OF_ARRAY, OF_STRING, OF_NUMBER];
    let type_too = !allowed.iter().any(|word| OF_ANY[3..].contains(word));
    let other = lists.into_iter().flatten().find(|word| {
        map.contains_key(**word) && !allowed.contains(word) && !(type_too && **word == "type")
    });
    match (other, allowed.first()) {
        (None, _) => Ok(()),
        (Some(word), Some(&beside)) if map.contains_key(beside) => Err(format!(
            "the keyword '{word}' beside '{beside}' is not supported"
        )),
        (Some(word), _) => Err(format!("the keyword '{word}' is not supported here")),
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|n| n.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}
