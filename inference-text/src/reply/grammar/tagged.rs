//! Rules for arguments between tags: raw text for strings, and JSON for other values.

use super::super::tools::{Kinds, Tools, from_text};
use super::lark::{literal, regex, without};
use super::schema::{Alternative, Members, alternatives};
use super::values::{MAX_KEY, Notation, Values, times};
use serde_json::Value;

/// Maximum depth of constants, the default of the parsers.
const MAX_DEPTH: usize = 64;

/// The tags of a family, with the white space that it writes.
pub(super) struct Tags {
    /// Before and after the tool's name.
    before_name: &'static str,
    after_name: &'static str,
    /// Before a key, and between the key and its value.
    before_key: &'static str,
    after_key: &'static str,
    /// Newlines between the tags and the value, if the family writes them.
    line: &'static str,
    /// The tag after a value. A value cannot contain it.
    close: &'static str,
    /// After the last argument.
    pub(super) foot: &'static str,
}

impl Tags {
    pub(super) const QWEN: Self = Self {
        before_name: "<tool_call>\n<function=",
        after_name: ">\n",
        before_key: "<parameter=",
        after_key: ">",
        line: "\n",
        close: "</parameter>",
        foot: "</function>\n</tool_call>",
    };

    pub(super) const GLM: Self = Self {
        before_name: "<tool_call>",
        after_name: "\n",
        before_key: "<arg_key>",
        after_key: "</arg_key>\n<arg_value>",
        line: "",
        close: "</arg_value>",
        foot: "</tool_call>",
    };

    pub(super) const MINIMAX: Self = Self {
        before_name: "<invoke name=\"",
        after_name: "\">\n",
        before_key: "<parameter name=\"",
        after_key: "\">",
        line: "",
        close: "</parameter>",
        foot: "</invoke>\n",
    };

    /// The text before the arguments.
    pub(super) fn head(&self, name: &str) -> Result<String, String> {
        self.check(name, "the tool's name")?;
        Ok(format!("{}{name}{}", self.before_name, self.after_name))
    }

    /// The arguments. Those that are not required may be missing.
    pub(super) fn arguments<'a>(
        &self,
        values: &mut Values<'a>,
        tools: &Tools,
        tool: &str,
        members: &Members<'a>,
    ) -> Result<String, String> {
        let mut list = String::new();
        for (key, schema, required) in &members.named {
            self.check(key, "the property")?;
            let name = values.name("argument");
            let kinds = tools.kinds(tool, key);
            let options = alternatives(schema, values.root)?;
            let mut texts = Vec::new();
            for option in &options {
                let text = self.value(values, option, &options, kinds);
                texts.push(text.map_err(|what| format!("property '{key}': {what}"))?);
            }
            if texts.is_empty() {
                return Err(format!("the schema of property '{key}' allows no value"));
            }
            let open = format!("{}{key}{}{}", self.before_key, self.after_key, self.line);
            let text = format!("{} ({})", literal(&open), texts.join(" |").trim());
            values.rule(&name, &text);
            values.check_size()?;
            list.push_str(&format!(" {name}{}", if *required { "" } else { "?" }));
        }
        Ok(list)
    }

    /// The text after a value. A line break belongs to it.
    fn end(&self) -> String {
        format!("{}{}\n", self.line, self.close)
    }

    /// A space, one alternative of a value, and the tag after the value.
    fn value<'a>(
        &self,
        values: &mut Values<'a>,
        option: &Alternative<'a>,
        all: &[Alternative<'a>],
        kinds: Kinds,
    ) -> Result<String, String> {
        match option {
            Alternative::Any => Ok(self.text(0, None, "")?),
            Alternative::String(least, most) => self.text(*least, *most, &mistaken(all, kinds)),
            Alternative::Constant(value) => self.constant(value, kinds),
            other => {
                let json = values.alternative(other)?;
                Ok(format!(" ({}){}", json.trim(), literal(&self.end())))
            }
        }
    }

    /// Raw text. It begins with none of the characters `not_first`.
    fn text(&self, least: u64, most: Option<u64>, not_first: &str) -> Result<String, String> {
        let end = regex(&self.end());
        if least == 0 && most.is_none() {
            return Ok(format!(" /{}{end}/", without(self.close, not_first)));
        }
        // The parser removes one line break at each end of a value. If the family writes no line
        // breaks there, a text of limited length must not contain any.
        let no = if self.line.is_empty() { "<\\n" } else { "<" };
        if not_first.is_empty() {
            return Ok(format!(" /[^{no}]{}{end}/", times(least, most)?));
        }
        times(least, most)?;
        if most == Some(0) {
            return Ok(literal(&self.end()));
        }
        let rest = times(least.saturating_sub(1), most.map(|most| most - 1))?;
        let optional = if least == 0 { "?" } else { "" };
        Ok(format!(
            " /(?:[^{no}{not_first}][^{no}]{rest}){optional}{end}/"
        ))
    }

    /// A constant. The parser must read the same value.
    fn constant(&self, value: &Value, kinds: Kinds) -> Result<String, String> {
        let text = match value {
            Value::String(text) => text.clone(),
            other => Notation::Json.constant(other)?,
        };
        let read = from_text(&text, kinds, MAX_DEPTH);
        let same = serde_json::from_str::<Value>(&read).is_ok_and(|read| read == *value);
        if !same || text.contains(self.close) {
            return Err(format!(
                "the value {value} of 'enum' or 'const' cannot be written"
            ));
        }
        let line = match self.line.is_empty() && (text.starts_with('\n') || text.ends_with('\n')) {
            true => "\n",
            false => "",
        };
        Ok(literal(&format!("{line}{text}{line}{}", self.end())))
    }

    /// Refuses a name that the tags cannot contain.
    fn check(&self, name: &str, what: &str) -> Result<(), String> {
        let usable = !name.is_empty()
            && name.len() <= MAX_KEY
            && name.trim() == name
            && !name.contains(['<', '>', '"', '\'', '\n']);
        if usable {
            Ok(())
        } else {
            Err(format!(
                "{what} '{name}' cannot be written between the tags"
            ))
        }
    }
}

/// Returns the characters with which a string value must not begin, in the syntax of a character
/// class of a regular expression. With such a character, the parser might read the value as another
/// type, which the schema may not allow.
fn mistaken(all: &[Alternative<'_>], kinds: Kinds) -> String {
    let mut first = String::new();
    let any = all.iter().any(|option| matches!(option, Alternative::Any));
    if kinds == Kinds::STRING || any {
        return first;
    }
    if kinds.has(Kinds::INTEGER) {
        first.push_str("0-9+\\-");
    }
    if kinds.has(Kinds::ARRAY) {
        first.push_str("\\[\\(");
    }
    if kinds.has(Kinds::OBJECT) {
        first.push_str("\\{");
    }
    let allows = |kind: fn(&Alternative<'_>) -> bool| all.iter().any(kind);
    if kinds.has(Kinds::BOOLEAN) && !allows(|option| matches!(option, Alternative::Boolean)) {
        first.push_str("tTfF");
    }
    let null = |option: &Alternative<'_>| {
        matches!(
            option,
            Alternative::Null | Alternative::Constant(Value::Null)
        )
    };
    if kinds.has(Kinds::NULL) && !all.iter().any(null) {
        first.push_str("nN");
    }
    // The parser ignores white space before values of other types.
    first.push_str("\\s");
    first
}
