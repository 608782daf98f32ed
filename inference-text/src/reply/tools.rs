//! The tools of a request, and the types of arguments by their schemas.

use super::json_scan::{self, quoted};
use super::literal::{self, Dialect};
use serde_json::Value;
use std::ops::{BitOr, BitOrAssign};

/// Maximum number of consecutive references that are followed.
const MAX_REFERENCES: usize = 16;

/// Maximum number of schemas and `enum` values that are examined for the type of one argument.
/// Schemas are untrusted, and a reply can repeat an argument a hundred thousand times.
const MAX_SCHEMAS: usize = 256;

/// A tool that is offered to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The function's name.
    pub name: String,
    /// The JSON schema of its arguments; `null` if it has none.
    pub parameters: Value,
}

/// The tools of a request.
///
/// Families without JSON arguments write text or literals. The argument's schema determines the
/// type of a value (`type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref`):
///
/// - If the schema allows only strings, the text is the value, whatever its content.
/// - If the schema allows other types, the value is the first of null, boolean, integer, number,
///   array and object that parses. If none parses, it is a string.
/// - Without a schema, all types are allowed: the value is JSON if the text is JSON, and otherwise
///   a string.
///
/// Booleans and null are parsed in any letter case, and `None` means null. Arrays and objects may
/// be JSON or Python literals. Integers keep all their digits. If the model writes an argument
/// twice, the arguments contain it twice; JSON readers use the last value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    list: Vec<Tool>,
}

impl Tools {
    /// A list of tools.
    pub fn new(list: Vec<Tool>) -> Self {
        Self { list }
    }

    /// Parses the tools of a request. Accepts an array of OpenAI's form (`{"type": "function",
    /// "function": {"name", "parameters"}}`), of the inner part of that form, or of Anthropic's
    /// form (`{"name", "input_schema"}`). Entries without a name are omitted.
    pub fn from_json(tools: &Value) -> Self {
        let read = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let parameters = function
                .get("parameters")
                .or_else(|| function.get("input_schema"));
            Some(Tool {
                name: function.get("name")?.as_str()?.to_owned(),
                parameters: parameters.cloned().unwrap_or(Value::Null),
            })
        };
        Self {
            list: tools
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(read)
                .collect(),
        }
    }

    /// All tools, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.list.iter()
    }

    /// The tool with this name.
    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.list.iter().find(|tool| tool.name == name)
    }

    /// Whether there are no tools.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The types that an argument may have.
    pub(super) fn kinds(&self, tool: &str, argument: &str) -> Kinds {
        let Some(tool) = self.get(tool) else {
            return Kinds::ANY;
        };
        let root = &tool.parameters;
        let schema = resolve(root, root)
            .and_then(|schema| schema.get("properties"))
            .and_then(|properties| properties.get(argument));
        match schema.map(|schema| kinds(schema, root)) {
            Some(kinds) if kinds != Kinds::NONE => kinds,
            _ => Kinds::ANY,
        }
    }
}

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kinds(u8);

impl Kinds {
    pub(super) const NONE: Self = Self(0);
    pub(super) const STRING: Self = Self(1);
    pub(super) const INTEGER: Self = Self(2);
    pub(super) const NUMBER: Self = Self(4 | 2);
    pub(super) const BOOLEAN: Self = Self(8);
    pub(super) const NULL: Self = Self(16);
    pub(super) const ARRAY: Self = Self(32);
    pub(super) const OBJECT: Self = Self(64);
    pub(super) const ANY: Self = Self(127);

    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Kinds {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Kinds {
    fn bitor_assign(&mut self, other: Self) {
        *self = *self | other;
    }
}

pub(super) fn of_name(name: &str) -> Kinds {
    match name {
        "string" => Kinds::STRING,
        "integer" => Kinds::INTEGER,
        "number" => Kinds::NUMBER,
        "boolean" => Kinds::BOOLEAN,
        "null" => Kinds::NULL,
        "array" => Kinds::ARRAY,
        "object" => Kinds::OBJECT,
        _ => Kinds::NONE,
    }
}

pub(super) fn of_value(value: &Value) -> Kinds {
    match value {
        Value::Null => Kinds::NULL,
        Value::Bool(_) => Kinds::BOOLEAN,
        Value::Number(number) if number.is_f64() => Kinds::NUMBER,
        Value::Number(_) => Kinds::INTEGER,
        Value::String(_) => Kinds::STRING,
        Value::Array(_) => Kinds::ARRAY,
        Value::Object(_) => Kinds::OBJECT,
    }
}

/// Returns the schema to which local references lead.
pub(super) fn resolve<'a>(schema: &'a Value, root: &'a Value) -> Option<&'a Value> {
    let mut schema = schema;
    for _ in 0..MAX_REFERENCES {
        let Some(reference) = schema.get("$ref") else {
            return Some(schema);
        };
        schema = root.pointer(reference.as_str()?.strip_prefix('#')?)?;
    }
    None
}

/// The types that a schema allows; an empty set if it lists none.
fn kinds(schema: &Value, root: &Value) -> Kinds {
    let mut allowed = Kinds::NONE;
    let mut waiting = vec![schema];
    for _ in 0..MAX_SCHEMAS {
        let Some(schema) = waiting.pop() else { break };
        let Some(schema) = resolve(schema, root) else {
            continue;
        };
        match schema.get("type") {
            Some(Value::String(name)) => {
                allowed |= of_name(name);
                continue;
            }
            Some(Value::Array(names)) => {
                for name in names.iter().take(MAX_SCHEMAS).filter_map(Value::as_str) {
                    allowed |= of_name(name);
                }
                continue;
            }
            _ => {}
        }
        if let Some(value) = schema.get("const") {
            allowed |= of_value(value);
        }
        let values = schema
            .get("enum")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        for value in values.take(MAX_SCHEMAS) {
            allowed |= of_value(value);
        }
        for word in ["anyOf", "oneOf", "allOf"] {
            let parts = schema
                .get(word)
                .and_then(Value::as_array)
                .into_iter()
                .flatten();
            waiting.extend(parts.take(MAX_SCHEMAS.saturating_sub(waiting.len())));
        }
    }
    allowed
}

/// The JSON text of an argument that the model wrote as plain text.
pub(super) fn from_text(text: &str, kinds: Kinds, max_depth: usize) -> String {
    if kinds == Kinds::STRING {
        return quoted(text);
    }
    let word = text.trim();
    if kinds.has(Kinds::NULL)
        && ["null", "none"]
            .iter()
            .any(|n| word.eq_ignore_ascii_case(n))
    {
        return String::from("null");
    }
    if kinds.has(Kinds::BOOLEAN) {
        for name in ["true", "false"] {
            if word.eq_ignore_ascii_case(name) {
                return name.to_owned();
            }
        }
    }
    let first = word.chars().next().unwrap_or(' ');
    let bracket = (kinds.has(Kinds::ARRAY) && matches!(first, '[' | '('))
        || (kinds.has(Kinds::OBJECT) && first == '{');
    if bracket {
        let json = json_scan::normalized(word, max_depth);
        if let Some(json) = json.or_else(|| literal::parse(word, Dialect::PYTHON, max_depth)) {
            return json;
        }
    }
    if kinds.has(Kinds::INTEGER) && (first.is_ascii_digit() || matches!(first, '-' | '+')) {
        let number = json_scan::normalized(word.strip_prefix('+').unwrap_or(word), 0);
        if let Some(number) = number {
            let is_integer = number.bytes().all(|b| b.is_ascii_digit() || b == b'-');
            if is_integer || kinds.has(Kinds::NUMBER) {
                return number;
            }
            if let Some(number) = without_zero_fraction(&number) {
                return number;
            }
        }
    }
    quoted(text)
}

/// The JSON text of an argument that the model wrote as a literal. `json` is the literal's value,
/// and `text` is the text as written.
pub(super) fn from_literal(json: &str, text: &str, kinds: Kinds, max_depth: usize) -> String {
    if json.starts_with('"') {
        if !kinds.has(Kinds::STRING)
            && let Some(inner) = json_scan::unquoted(json)
        {
            return from_text(&inner, kinds, max_depth);
        }
        return json.to_owned();
    }
    if kinds == Kinds::STRING {
        return quoted(text.trim());
    }
    let is_number = json.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    if is_number
        && !kinds.has(Kinds::NUMBER)
        && kinds.has(Kinds::INTEGER)
        && let Some(number) = without_zero_fraction(json)
    {
        return number;
    }
    json.to_owned()
}

/// `3.0` as `3`; `None` if the fraction is not zero.
fn without_zero_fraction(number: &str) -> Option<String> {
    let (integer, fraction) = number.split_once('.')?;
    fraction
        .bytes()
        .all(|b| b == b'0')
        .then(|| integer.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Tools {
        Tools::from_json(
            &json!([{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object",
            "$defs": {"mode": {"enum": ["a", 1]}, "loop": {"$ref": "#/$defs/loop"},
                      "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}]}},
            "properties": {
                "s": {"type": "string"},
                "i": {"type": "integer"},
                "n": {"type": ["number", "null"]},
                "b": {"type": "boolean"},
                "a": {"type": "array"},
                "o": {"type": "object"},
                "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "mode": {"$ref": "#/$defs/mode"},
                "loop": {"$ref": "#/$defs/loop"},
                "tree": {"$ref": "#/$defs/tree"},
            }}}}]),
        )
    }

    #[test]
    fn text_is_typed_by_the_schema() {
        let tools = tools();
        for (argument, text, json) in [
            ("s", "5", r#""5""#),
            ("s", "null", r#""null""#),
            ("s", " a\n", r#"" a\n""#),
            ("i", "5", "5"),
            ("i", " 5.0 ", "5"),
            ("i", "5.5", r#""5.5""#),
            (
                "i",
                "123456789012345678901234567890",
                "123456789012345678901234567890",
            ),
            ("i", "five", r#""five""#),
            ("n", "5.5", "5.5"),
            ("n", "-1e3", "-1e3"),
            ("n", "None", "null"),
            ("b", "True", "true"),
            ("b", "yes", r#""yes""#),
            ("a", "[1, \"x\"]", "[1, \"x\"]"),
            ("a", "['x', None]", r#"["x", null]"#),
            ("a", "{}", r#""{}""#),
            ("o", "{\"k\": [1]}", "{\"k\": [1]}"),
            ("o", "{'k': True}", r#"{"k": true}"#),
            ("o", "{broken", r#""{broken""#),
            ("either", "7", "7"),
            ("either", "seven", r#""seven""#),
            ("mode", "1", "1"),
            ("mode", "a", r#""a""#),
            ("loop", "1", "1"),
            ("tree", "1", "1"),
            ("unknown", "1", "1"),
            ("unknown", "x: 1", r#""x: 1""#),
            ("unknown", "\"x\"", r#""\"x\"""#),
        ] {
            let kinds = tools.kinds("f", argument);
            assert_eq!(from_text(text, kinds, 64), json, "{argument} {text}");
        }
    }

    #[test]
    fn literals_are_typed_by_the_schema() {
        let tools = tools();
        for (argument, value, text, json) in [
            ("s", "94103", "94103", r#""94103""#),
            ("s", "true", "True", r#""True""#),
            ("i", r#""5""#, "'5'", "5"),
            ("i", "5.0", "5.0", "5"),
            ("n", "5.0", "5.0", "5.0"),
            ("unknown", r#""5""#, "'5'", r#""5""#),
        ] {
            let kinds = tools.kinds("f", argument);
            assert_eq!(
                from_literal(value, text, kinds, 64),
                json,
                "{argument} {text}"
            );
        }
    }

    #[test]
    fn forms_of_tool_lists() {
        let tools = Tools::from_json(&json!([
            {"name": "a", "input_schema": {"type": "object"}},
            {"function": {"name": "b"}},
            {"function": {}},
            7,
        ]));
        let names: Vec<_> = tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(
            tools.get("a").map(|tool| &tool.parameters),
            Some(&json!({"type": "object"}))
        );
    }
}
