//! Writes a grammar of calls in Lark's syntax, as the crate `llguidance` reads it.

use super::{CallBody, CallGrammar, JsonStart};
use serde_json::{Value, json};

/// White space between the parts of JSON: a space, or a line feed with some indentation. The length
/// is limited, so that a model cannot write white space forever. Engines that do not know this
/// schema key ignore it.
const JSON_SPACE: &str = r"( |\n[ \t]{0,40})";

impl CallGrammar {
    /// The grammar in Lark's syntax. `lead` is literal text before the calls. With `one`, the reply
    /// contains one call.
    pub fn lark(&self, lead: &str, one: bool) -> String {
        self.rules("start", lead, one)
    }

    /// A grammar for replies that are either calls or JSON of `schema`, in Lark's syntax. `lead`
    /// and `one` are as in [`Self::lark`].
    ///
    /// A reader can tell the two apart only if [`Self::begins_like`] is false.
    pub fn lark_or_json(&self, lead: &str, one: bool, schema: &Value) -> String {
        let lead = literal(lead);
        let calls = self.rules("calls", "", one);
        let json = json_rule("answer", schema);
        format!("start:{lead} (calls | answer)\n{calls}{json}")
    }

    /// Whether a call may begin like a JSON text.
    pub fn begins_like(&self, json: JsonStart) -> bool {
        self.shapes.iter().any(|shape| {
            let body = match &shape.body {
                CallBody::Json(_) => "{",
                // The syntax of arguments always follows a literal.
                CallBody::Rules { .. } => "",
            };
            let text = [self.open.as_str(), &shape.prefix, body].concat();
            let first = text.chars().find(|c| !c.is_whitespace());
            first.is_none_or(|first| json.allows(first))
        })
    }

    /// The rule `name` of the calls, and the rules that it uses.
    fn rules(&self, name: &str, lead: &str, one: bool) -> String {
        let list = match &self.separator {
            None => String::from(" call"),
            Some(_) if one => String::from(" call"),
            Some(separator) => format!(" call ({} call)*", literal(separator)),
        };
        let open = format!("{lead}{}", self.open);
        let mut text = format!("{name}:{}{list}{}\n", literal(&open), literal(&self.close));
        let shapes = 0..self.shapes.len();
        let names: Vec<String> = shapes.map(|i| format!("call_{i}")).collect();
        text.push_str(&format!("call: {}\n", names.join(" | ")));
        for (i, shape) in self.shapes.iter().enumerate() {
            let (prefix, suffix) = (literal(&shape.prefix), literal(&shape.suffix));
            match &shape.body {
                CallBody::Rules { start, rules } => {
                    text.push_str(&format!("call_{i}:{prefix} {start}{suffix}\n{rules}"));
                }
                CallBody::Json(schema) => {
                    text.push_str(&format!("call_{i}:{prefix} json_{i}{suffix}\n"));
                    text.push_str(&json_rule(&format!("json_{i}"), schema));
                }
            }
        }
        text
    }
}

/// A rule for JSON of a schema.
fn json_rule(name: &str, schema: &Value) -> String {
    let mut schema = match schema {
        // `true` allows all values. The syntax has only objects.
        Value::Object(_) => schema.clone(),
        _ => json!({}),
    };
    if let Value::Object(schema) = &mut schema {
        let space = json!({"whitespace_pattern": JSON_SPACE});
        schema.entry("x-guidance").or_insert(space);
    }
    format!("{name}: %json {}\n", escaped(&schema))
}

/// JSON without `&`, which Lark reads as an operator. In JSON, `&` occurs only inside strings,
/// where it can be escaped.
pub(super) fn escaped(json: &Value) -> String {
    json.to_string().replace('&', "\\u0026")
}

/// Returns a space and `text` as a Lark literal, or an empty string if `text` is empty.
pub(super) fn literal(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!(" {}", escaped(&Value::from(text))),
    }
}

/// The text as a regular expression.
pub(super) fn regex(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        push_char(c, &mut out);
    }
    out
}

/// Appends a character in the syntax of regular expressions, also inside a class.
fn push_char(c: char, out: &mut String) {
    match c {
        '\n' => out.push_str("\\n"),
        '\\' | '/' | '|' | '.' | '+' | '*' | '?' | '(' | ')' | '[' | ']' | '{' | '}' | '^'
        | '$' | '-' => {
            out.push('\\');
            out.push(c);
        }
        _ => out.push(c),
    }
}

/// A regular expression of the texts that do not contain `mark` and that begin with none of the
/// characters `not_first` (in the syntax of a character class). `mark` begins with its only `<`.
pub(super) fn without(mark: &str, not_first: &str) -> String {
    // Each `<` is followed by a text without `<` that does not begin with the rest of the mark.
    let mut rest = String::new();
    for (i, c) in mark
        .chars()
        .skip(1)
        .enumerate()
        .collect::<Vec<_>>()
        .iter()
        .rev()
    {
        let mut escaped = String::new();
        push_char(*c, &mut escaped);
        let last = *i + 2 == mark.chars().count();
        rest = if last {
            format!("(?:[^<{escaped}][^<]*)?")
        } else {
            format!("(?:[^<{escaped}][^<]*|{escaped}{rest})?")
        };
    }
    let first = match not_first {
        "" => String::from("[^<]*"),
        _ => format!("(?:[^<{not_first}][^<]*)?"),
    };
    format!("{first}(?:<{rest})*")
}
