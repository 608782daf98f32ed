//! Rules for values in JSON, in Python's literals, and in Gemma's notation.

use super::lark::{escaped, literal, regex, without};
use super::schema::{ANY, Alternative, Members, alternatives};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fmt::Write;

/// How values are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Notation {
    /// JSON without the text `</`, which could end the argument. Strings can contain it as
    /// `\u003c/`.
    Json,
    /// Literals of Python.
    Python,
    /// Strings between two of these marks, and keys without marks.
    Gemma(&'static str),
}

/// Maximum length of the rules of one call in bytes. Engines have lower limits for grammars, so
/// this one only bounds the work of writing them.
const MAX_BYTES: usize = 256 << 10;

/// Maximum length of an argument's name in bytes, the default of the parsers.
pub(super) const MAX_KEY: usize = 256;

/// Writes rules of one tool's values.
pub(super) struct Values<'a> {
    pub(super) root: &'a Value,
    notation: Notation,
    index: usize,
    count: usize,
    text: String,
    /// The rules of schemas that have been requested.
    known: HashMap<*const Value, String>,
    /// Rules that are requested and not yet written.
    waiting: Vec<(String, &'a Value)>,
}

impl<'a> Values<'a> {
    pub(super) fn new(root: &'a Value, notation: Notation, index: usize) -> Self {
        Self {
            root,
            notation,
            index,
            count: 0,
            text: String::new(),
            known: HashMap::new(),
            waiting: Vec::new(),
        }
    }

    /// A name for a rule of this tool.
    pub(super) fn name(&mut self, what: &str) -> String {
        self.count += 1;
        format!("{what}_{}_{}", self.index, self.count)
    }

    pub(super) fn rule(&mut self, name: &str, expansion: &str) {
        let _ = writeln!(self.text, "{name}: {}", expansion.trim());
    }

    /// Writes the rules of all requested values, and returns the text.
    pub(super) fn finish(mut self) -> Result<String, String> {
        while let Some((name, schema)) = self.waiting.pop() {
            let mut options = Vec::new();
            for alternative in alternatives(schema, self.root)? {
                options.push(self.alternative(&alternative)?);
            }
            if options.is_empty() {
                return Err(String::from("a schema allows no value"));
            }
            self.rule(&name, &options.join(" |"));
            self.check_size()?;
        }
        Ok(self.text)
    }

    /// Refuses rules that are too long.
    pub(super) fn check_size(&self) -> Result<(), String> {
        match self.text.len() {
            0..=MAX_BYTES => Ok(()),
            _ => Err(String::from("its schema needs too many rules")),
        }
    }

    /// The name of the rule of a schema. A schema that contains itself has one rule.
    pub(super) fn value(&mut self, schema: &'a Value) -> String {
        let key = std::ptr::from_ref(schema);
        if let Some(name) = self.known.get(&key) {
            return name.clone();
        }
        let name = self.name("value");
        self.known.insert(key, name.clone());
        self.waiting.push((name.clone(), schema));
        name
    }

    /// A space and the expansion of one alternative.
    pub(super) fn alternative(&mut self, alternative: &Alternative<'a>) -> Result<String, String> {
        Ok(match alternative {
            Alternative::Any => {
                let kinds = [
                    Alternative::String(0, None),
                    Alternative::Number(json!({"type": "number"})),
                    Alternative::Boolean,
                    Alternative::Null,
                    Alternative::Array {
                        items: &ANY,
                        least: 0,
                        most: None,
                    },
                    Alternative::Object(Members {
                        named: Vec::new(),
                        others: Some(&ANY),
                    }),
                ];
                let mut options = Vec::new();
                for kind in &kinds {
                    options.push(self.alternative(kind)?);
                }
                options.join(" |")
            }
            Alternative::Constant(value) => literal(&self.notation.constant(value)?),
            Alternative::String(least, most) => self.notation.string(*least, *most)?,
            Alternative::Number(schema) => {
                let name = self.name("number");
                let mut schema = schema.clone();
                schema["x-guidance"] = json!({"whitespace_flexible": false});
                self.rule(&name, &format!("%json {}", escaped(&schema)));
                format!(" {name}")
            }
            Alternative::Boolean => {
                let [yes, no] = [true, false].map(|value| self.notation.boolean(value));
                format!(" \"{yes}\" | \"{no}\"")
            }
            Alternative::Null => format!(" \"{}\"", self.notation.null()),
            Alternative::Array { items, least, most } => {
                let list = self.list(items, *least, *most)?;
                format!(" \"[\"{list} \"]\"")
            }
            Alternative::Object(members) => {
                let name = self.name("members");
                let list = self.members(&name, members, false)?;
                self.rule(&name, &list);
                format!(" \"{{\" {name} \"}}\"")
            }
        })
    }

    fn list(&mut self, items: &'a Value, least: u64, most: Option<u64>) -> Result<String, String> {
        if most.is_some_and(|most| most < least) {
            return Err(String::from("'minItems' is greater than 'maxItems'"));
        }
        // An array that must be empty has no rule for its items.
        if most == Some(0) || *items == Value::Bool(false) && least == 0 {
            return Ok(String::new());
        }
        let item = self.value(items);
        let comma = self.notation.comma();
        let more = repeat(least.saturating_sub(1), most.map(|most| most - 1));
        let rest = match more {
            None => String::new(),
            Some(more) => format!(" ({comma} {item}){more}"),
        };
        Ok(match least {
            0 => format!(" ({item}{rest})?"),
            _ => format!(" {item}{rest}"),
        })
    }

    /// The members of an object, or the arguments of a call, without brackets. `name` is the rule
    /// that will contain them.
    pub(super) fn members(
        &mut self,
        name: &str,
        members: &Members<'a>,
        arguments: bool,
    ) -> Result<String, String> {
        let comma = self.notation.comma();
        if members.named.is_empty() {
            let Some(others) = members
                .others
                .filter(|schema| **schema != Value::Bool(false))
            else {
                return Ok(String::new());
            };
            let value = self.value(others);
            let key = self.notation.any_key()?;
            let colon = self.notation.colon();
            return Ok(format!(
                "({key} {colon} {value} ({comma}{key} {colon} {value})*)?"
            ));
        }
        let mut named = members.named.clone();
        if matches!(self.notation, Notation::Gemma(_)) {
            // Gemma's chat templates sort the keys, whatever their case.
            named.sort_by_key(|member| member.0.to_lowercase());
        }
        let mut pairs = Vec::new();
        for (key, schema, _) in &named {
            let key = match (arguments, self.notation) {
                (true, Notation::Python) => literal(&format!("{key}=")),
                _ => format!(
                    "{} {}",
                    literal(&self.notation.key(key)?),
                    self.notation.colon()
                ),
            };
            pairs.push(format!("{key} {}", self.value(schema)));
        }
        // Rule `i` writes pair `i` and the later pairs, each after a comma. No comma precedes the
        // first pair, so there is no rule 0.
        let tail = |i: usize| format!(" {name}_{i}");
        for (i, pair) in pairs.iter().enumerate().skip(1) {
            let next = if i + 1 < pairs.len() {
                tail(i + 1)
            } else {
                String::new()
            };
            let optional = if named[i].2 { "" } else { "?" };
            self.rule(
                &format!("{name}_{i}"),
                &format!("({comma}{pair}){optional}{next}"),
            );
        }
        let mut options = Vec::new();
        let mut all_optional = true;
        for (i, pair) in pairs.iter().enumerate() {
            let next = if i + 1 < pairs.len() {
                tail(i + 1)
            } else {
                String::new()
            };
            options.push(format!("{}{next}", pair.trim()));
            if named[i].2 {
                all_optional = false;
                break;
            }
        }
        let options = options.join(" | ");
        Ok(if all_optional {
            format!("({options})?")
        } else {
            options
        })
    }
}

/// The repetition operator for a count; `None` if there is nothing to repeat.
fn repeat(least: u64, most: Option<u64>) -> Option<String> {
    match (least, most) {
        (_, Some(0)) => None,
        (0, None) => Some(String::from("*")),
        (least, None) => Some(format!("{{{least},}}")),
        (least, Some(most)) => Some(format!("{{{least},{most}}}")),
    }
}

/// The repetition operator of a regular expression.
pub(super) fn times(least: u64, most: Option<u64>) -> Result<String, String> {
    match most {
        Some(most) if most < least => Err(String::from("'minLength' is greater than 'maxLength'")),
        Some(most) => Ok(format!("{{{least},{most}}}")),
        None => Ok(format!("{{{least},}}")),
    }
}

impl Notation {
    fn boolean(self, value: bool) -> &'static str {
        match (self, value) {
            (Self::Python, true) => "True",
            (Self::Python, false) => "False",
            (_, true) => "true",
            (_, false) => "false",
        }
    }

    fn null(self) -> &'static str {
        match self {
            Self::Python => "None",
            _ => "null",
        }
    }

    /// A space and the separator of pairs and elements.
    fn comma(self) -> &'static str {
        match self {
            Self::Gemma(_) => " \",\"",
            _ => " /,[ ]?/",
        }
    }

    fn colon(self) -> &'static str {
        match self {
            Self::Gemma(_) => "\":\"",
            _ => "/:[ ]?/",
        }
    }

    /// A space and the pattern of a string with its quotes.
    fn string(self, least: u64, most: Option<u64>) -> Result<String, String> {
        let free = least == 0 && most.is_none();
        let times = times(least, most)?;
        Ok(match self {
            Self::Json if free => {
                let escape = r#"\\(?:["\\\/bfnrt]|u[0-9a-fA-F]{4})"#;
                let plain = r#"["\\<\x00-\x1f]"#.replace('[', "[^");
                let inner = r#"["\\<\/\x00-\x1f]"#.replace('[', "[^");
                format!(r#" /"(?:{plain}|{escape}|<+(?:{inner}|{escape}))*<*"/"#)
            }
            Self::Json => {
                format!(r#" /"(?:[^"\\<\x00-\x1f]|\\["\\\/bfnrt]){times}"/"#)
            }
            Self::Python => {
                let one = |quote: &str| {
                    format!(r#" /{quote}(?:[^{quote}\\\x00-\x1f]|\\["'\\nrt]){times}{quote}/"#)
                };
                format!("{} |{}", one("\""), one("'"))
            }
            Self::Gemma(mark) => {
                let text = match free {
                    true => without(mark, ""),
                    false => format!("[^<]{times}"),
                };
                let mark = regex(mark);
                format!(" /{mark}{text}{mark}/")
            }
        })
    }

    /// A space and the pattern of a key that the schema does not name.
    fn any_key(self) -> Result<String, String> {
        match self {
            Self::Gemma(_) => Ok(String::from(" /[A-Za-z_][0-9A-Za-z_.\\-]*/")),
            _ => Ok(format!(" ({})", self.string(0, None)?)),
        }
    }

    fn key(self, key: &str) -> Result<String, String> {
        match self {
            Self::Gemma(_) if is_bare(key) => Ok(key.to_owned()),
            _ => self.constant(&Value::from(key)),
        }
    }

    /// The text of a value.
    pub(super) fn constant(self, value: &Value) -> Result<String, String> {
        Ok(match value {
            Value::Null => self.null().to_owned(),
            Value::Bool(value) => self.boolean(*value).to_owned(),
            Value::Number(number) => number.to_string(),
            Value::String(text) => match self {
                Self::Json => Value::from(text.as_str())
                    .to_string()
                    .replace("</", "\\u003c/"),
                Self::Python => python(text),
                Self::Gemma(mark) if text.contains(mark) => {
                    return Err(format!("the text '{text}' contains '{mark}'"));
                }
                Self::Gemma(mark) => format!("{mark}{text}{mark}"),
            },
            Value::Array(list) => {
                let list = list.iter().map(|value| self.constant(value));
                format!(
                    "[{}]",
                    list.collect::<Result<Vec<_>, _>>()?
                        .join(self.written_comma())
                )
            }
            Value::Object(map) => {
                let colon = if matches!(self, Self::Gemma(_)) {
                    ":"
                } else {
                    ": "
                };
                let pair = |(key, value): (&String, &Value)| {
                    Ok(format!(
                        "{}{colon}{}",
                        self.key(key)?,
                        self.constant(value)?
                    ))
                };
                let list = map.iter().map(pair).collect::<Result<Vec<_>, String>>()?;
                format!("{{{}}}", list.join(self.written_comma()))
            }
        })
    }

    fn written_comma(self) -> &'static str {
        match self {
            Self::Gemma(_) => ",",
            _ => ", ",
        }
    }
}

/// A string of Python.
fn python(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c < ' ' => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Whether Gemma can write a key without marks.
pub(super) fn is_bare(key: &str) -> bool {
    !key.is_empty()
        && key.trim() == key
        && !key.contains([':', ',', '{', '}', '[', ']', '<', '\n', '\r'])
}
