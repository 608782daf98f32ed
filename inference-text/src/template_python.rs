//! Python features for chat templates: text forms of values, numbers and JSON, and string methods
//! that the template engine lacks. `template_env` defines the limits.

use std::fmt::{self, Write};

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

/// A string with a fixed capacity. A write beyond it fails.
pub(crate) struct Bounded {
    /// The text so far.
    pub(crate) text: String,
    /// The maximum length in bytes.
    pub(crate) most: usize,
}

impl Write for Bounded {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        if s.len() > self.most.saturating_sub(self.text.len()) {
            return Err(fmt::Error);
        }
        self.text.push_str(s);
        Ok(())
    }
}

/// Writes a value as Python's `str`. If `inner` is true, writes it as `repr`.
pub(crate) fn write(out: &mut Bounded, value: &Value, inner: bool) -> fmt::Result {
    let items = |value: &Value| value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String if inner => {
            let text = value.as_str().unwrap_or_default();
            let quote = if text.contains('\'') && !text.contains('"') {
                '"'
            } else {
                '\''
            };
            out.write_char(quote)?;
            for c in text.chars() {
                match c {
                    '\n' => out.write_str("\\n")?,
                    '\r' => out.write_str("\\r")?,
                    '\t' => out.write_str("\\t")?,
                    '\\' => out.write_str("\\\\")?,
                    c if c == quote => std::write!(out, "\\{c}")?,
                    c => out.write_char(c)?,
                }
            }
            out.write_char(quote)
        }
        ValueKind::Seq => {
            out.write_char('[')?;
            for (n, item) in items(value).enumerate() {
                out.write_str(if n > 0 { ", " } else { "" })?;
                write(out, &item, true)?;
            }
            out.write_char(']')
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (n, key) in items(value).enumerate() {
                out.write_str(if n > 0 { ", " } else { "" })?;
                write(out, &key, true)?;
                out.write_str(": ")?;
                write(out, &value.get_item(&key).unwrap_or_default(), true)?;
            }
            out.write_char('}')
        }
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(x) => float(out, x),
            Err(_) => std::write!(out, "{value}"),
        },
        _ => std::write!(out, "{value}"),
    }
}

/// Writes a number as Python's `repr`: the shortest digits that parse to an equal number. An
/// exponent is used below 1e-4 and from 1e16 on.
fn float(out: &mut Bounded, x: f64) -> fmt::Result {
    let shortest = format!("{x:e}");
    match shortest.split_once('e') {
        Some((digits, exponent)) => match exponent.parse::<i32>() {
            Ok(n) if !(-4..16).contains(&n) => {
                let sign = if n < 0 { '-' } else { '+' };
                std::write!(out, "{digits}e{sign}{:02}", n.unsigned_abs())
            }
            _ => std::write!(out, "{x:?}"),
        },
        // The number is NaN or infinite.
        None if x.is_nan() => out.write_str("nan"),
        None if x > 0.0 => out.write_str("inf"),
        None => out.write_str("-inf"),
    }
}

/// The string methods of [`call_method`].
const METHODS: [&str; 6] = [
    "index",
    "partition",
    "removeprefix",
    "removesuffix",
    "rpartition",
    "rsplit",
];

/// Whether [`call_method`] supports the method.
pub(crate) fn has_method(name: &str) -> bool {
    METHODS.contains(&name)
}

/// Calls a method of Python's `str`. No supported method makes a text longer.
pub(crate) fn call_method(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let three = |before: &str, by: &str, after: &str| {
        Value::from([before, by, after].map(Value::from).to_vec())
    };
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, what.to_owned()));
    if method == "rsplit" {
        let (by, most): (Option<&str>, Option<i64>) = from_args(args)?;
        let most = most.and_then(|n| usize::try_from(n).ok());
        return match by {
            Some("") => refuse("a text cannot be split by nothing"),
            Some(by) => Ok(split_from_end(text, most, |text| {
                text.rsplit_once(by)
                    .map(|(before, after)| (before, after.to_owned()))
            })),
            None => Ok(words_from_end(text, most)),
        };
    }
    let (other,): (&str,) = from_args(args)?;
    Ok(match method {
        "removeprefix" => text.strip_prefix(other).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(other).unwrap_or(text).into(),
        "index" => match text.find(other) {
            Some(at) => text[..at].chars().count().into(),
            None => return refuse("the text to be found is not there"),
        },
        _ if other.is_empty() => return refuse("a text cannot be parted by nothing"),
        "partition" => match text.split_once(other) {
            Some((before, after)) => three(before, other, after),
            None => three(text, "", ""),
        },
        _ => match text.rsplit_once(other) {
            Some((before, after)) => three(before, other, after),
            None => three("", "", text),
        },
    })
}

/// Splits off up to `most` pieces from the end.
fn split_from_end(
    text: &str,
    most: Option<usize>,
    cut: impl Fn(&str) -> Option<(&str, String)>,
) -> Value {
    let mut rest = text;
    let mut pieces = Vec::new();
    while most.is_none_or(|most| pieces.len() < most)
        && let Some((before, piece)) = cut(rest)
    {
        pieces.push(Value::from(piece));
        rest = before;
    }
    pieces.push(rest.into());
    pieces.reverse();
    Value::from(pieces)
}

/// Splits off up to `most` words from the end. The remaining text is one piece.
fn words_from_end(text: &str, most: Option<usize>) -> Value {
    let mut rest = text.trim_end();
    let mut words = Vec::new();
    while !rest.is_empty() && most.is_none_or(|most| words.len() < most) {
        let (before, word) = rest.rsplit_once(char::is_whitespace).unwrap_or(("", rest));
        words.push(Value::from(word));
        rest = before.trim_end();
    }
    if !rest.is_empty() {
        words.push(rest.into());
    }
    words.reverse();
    Value::from(words)
}

/// The form of JSON, with the options of Python's `json.dumps`.
pub(crate) struct Json {
    /// Number of spaces per level; `None` writes a single line.
    pub(crate) indent: Option<usize>,
    /// Whether to escape all characters outside ASCII.
    pub(crate) ascii: bool,
    /// Whether to sort keys.
    pub(crate) sort: bool,
    /// The separators between items and after names; `None` for Python's defaults.
    pub(crate) separators: Option<(String, String)>,
}

impl Json {
    /// Writes `value`, which is nested `depth` levels deep.
    pub(crate) fn write(
        &self,
        out: &mut Bounded,
        value: &serde_json::Value,
        depth: usize,
    ) -> fmt::Result {
        use serde_json::Value as J;
        match value {
            J::Array(items) if !items.is_empty() => {
                out.write_char('[')?;
                for (n, item) in items.iter().enumerate() {
                    self.separate(out, n, depth + 1)?;
                    self.write(out, item, depth + 1)?;
                }
                self.line(out, depth)?;
                out.write_char(']')
            }
            J::Object(items) if !items.is_empty() => {
                let mut items: Vec<_> = items.iter().collect();
                if self.sort {
                    items.sort_by_key(|(key, _)| *key);
                }
                out.write_char('{')?;
                for (n, (key, item)) in items.into_iter().enumerate() {
                    self.separate(out, n, depth + 1)?;
                    self.text(out, key)?;
                    out.write_str(self.separators.as_ref().map_or(": ", |s| &s.1))?;
                    self.write(out, item, depth + 1)?;
                }
                self.line(out, depth)?;
                out.write_char('}')
            }
            J::String(text) => self.text(out, text),
            J::Number(n) if n.is_f64() => match n.as_f64() {
                Some(x) => float(out, x),
                None => std::write!(out, "{n}"),
            },
            other => std::write!(out, "{other}"),
        }
    }

    fn separate(&self, out: &mut Bounded, n: usize, depth: usize) -> fmt::Result {
        let usual = if self.indent.is_some() { "," } else { ", " };
        if n > 0 {
            out.write_str(self.separators.as_ref().map_or(usual, |s| &s.0))?;
        }
        self.line(out, depth)
    }

    fn line(&self, out: &mut Bounded, depth: usize) -> fmt::Result {
        match self.indent {
            Some(width) => std::write!(out, "\n{:1$}", "", width * depth),
            None => Ok(()),
        }
    }

    fn text(&self, out: &mut Bounded, text: &str) -> fmt::Result {
        let quoted = serde_json::to_string(text).map_err(|_| fmt::Error)?;
        if !self.ascii {
            return out.write_str(&quoted);
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.write_char(c)?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    std::write!(out, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}
