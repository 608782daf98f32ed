//! The first characters of the JSON texts that match a schema. These characters distinguish such a
//! text from a call.

use super::super::tools::{Kinds, of_name, of_value, resolve};
use serde_json::Value;

/// Maximum number of schemas that are examined. Beyond it, all values count as allowed.
const MAX_SCHEMAS: usize = 256;

/// Maximum depth of nested alternatives. Beyond it, all values count as allowed.
const MAX_DEPTH: usize = 16;

/// The first characters that a JSON text may have. The set may be larger than the schema requires,
/// but never smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonStart(Kinds);

impl JsonStart {
    /// The first characters of the texts that match `schema`, without leading white space. Only the
    /// keywords `type`, `const`, `enum`, `anyOf`, `oneOf` and local `$ref` at the root restrict
    /// them.
    pub fn of(schema: &Value) -> Self {
        let mut left = MAX_SCHEMAS;
        Self(kinds(schema, schema, MAX_DEPTH, &mut left))
    }

    /// Whether a text may begin with `c`.
    pub fn allows(self, c: char) -> bool {
        let kind = match c {
            '"' => Kinds::STRING,
            '-' | '0'..='9' => Kinds::INTEGER,
            't' | 'f' => Kinds::BOOLEAN,
            'n' => Kinds::NULL,
            '[' => Kinds::ARRAY,
            '{' => Kinds::OBJECT,
            _ => return false,
        };
        self.0.has(kind)
    }
}

/// The types that a schema allows, or more.
fn kinds(schema: &Value, root: &Value, depth: usize, left: &mut usize) -> Kinds {
    if depth == 0 || *left == 0 {
        return Kinds::ANY;
    }
    *left -= 1;
    let Some(schema) = resolve(schema, root) else {
        return Kinds::ANY;
    };
    let union = |all: &mut dyn Iterator<Item = Kinds>| all.fold(Kinds::NONE, |a, b| a | b);
    let mut names = match schema.get("type") {
        Some(Value::String(name)) => vec![name.as_str()],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    names.truncate(MAX_SCHEMAS);
    if !names.is_empty() {
        return union(&mut names.into_iter().map(of_name));
    }
    if let Some(value) = schema.get("const") {
        return of_value(value);
    }
    if let Some(Value::Array(values)) = schema.get("enum") {
        return union(&mut values.iter().map(of_value));
    }
    for word in ["anyOf", "oneOf"] {
        if let Some(Value::Array(parts)) = schema.get(word) {
            let mut parts = parts
                .iter()
                .map(|part| kinds(part, root, depth - 1, &mut *left));
            return union(&mut parts);
        }
    }
    Kinds::ANY
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn first_characters_follow_the_types() {
        let all = "\"-0tn[{";
        for (schema, first) in [
            (json!({"type": "object"}), "{"),
            (json!({"type": ["string", "null"]}), "\"n"),
            (json!({"type": "integer"}), "-0"),
            (json!({"const": [1]}), "["),
            (json!({"enum": ["a", true]}), "\"t"),
            (
                json!({"anyOf": [{"type": "object"}, {"type": "array"}]}),
                "[{",
            ),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}),
                "{",
            ),
            // A branch without a type allows everything.
            (json!({"oneOf": [{"type": "object"}, {}]}), all),
            (json!({"properties": {}}), all),
            (json!({"$ref": "#/nothing"}), all),
            (json!({"$ref": "#"}), all),
            (json!(true), all),
        ] {
            let start = JsonStart::of(&schema);
            let allowed: String = all.chars().filter(|c| start.allows(*c)).collect();
            assert_eq!(allowed, first, "{schema}");
            assert!(!start.allows('<') && !start.allows(' '), "{schema}");
        }
    }

    #[test]
    fn a_schema_of_endless_alternatives_allows_everything() {
        let twice = json!({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]});
        let schema = json!({"$ref": "#/$defs/a", "$defs": {"a": twice}});
        assert_eq!(JsonStart::of(&schema), JsonStart(Kinds::ANY));
    }
}
