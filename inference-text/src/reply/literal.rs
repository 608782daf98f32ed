//! Converts literals of Python and of Gemma's call syntax to JSON.
//!
//! The functions parse complete literals only. Callers determine where a literal ends.

use super::json_scan::{normalized, push_escaped, quoted};

/// The syntax of strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dialect {
    /// The mark around raw strings; Python's quotes if `None`.
    quote: Option<&'static str>,
}

impl Dialect {
    /// Python strings: `'a'`, `"a"`, `'''a'''`, with escapes.
    pub(super) const PYTHON: Self = Self { quote: None };

    /// Raw strings between two marks. Keys of objects may have no marks.
    pub(super) const fn raw(mark: &'static str) -> Self {
        Self { quote: Some(mark) }
    }
}

/// The JSON text of a literal. `text` must be a single literal; otherwise returns `None`.
pub(super) fn parse(text: &str, dialect: Dialect, max_depth: usize) -> Option<String> {
    let mut reader = Reader {
        rest: text,
        dialect,
        out: String::new(),
    };
    reader.space();
    reader.value(max_depth)?;
    reader.space();
    reader.rest.is_empty().then_some(reader.out)
}

struct Reader<'a> {
    rest: &'a str,
    dialect: Dialect,
    out: String,
}

impl<'a> Reader<'a> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        let first = self.rest.chars().next()?;
        if let Some(text) = self.string()? {
            self.out.push_str(&quoted(&text));
            return Some(());
        }
        match first {
            '[' | '(' | '{' if depth == 0 => None,
            '[' => self.sequence("]", depth),
            '(' if self.dialect == Dialect::PYTHON => self.sequence(")", depth),
            '{' => self.mapping(depth),
            _ => self.word(),
        }
    }

    fn sequence(&mut self, close: &str, depth: usize) -> Option<()> {
        self.rest = &self.rest[1..];
        self.out.push('[');
        let mut first = true;
        loop {
            self.space();
            if self.eat(close) {
                self.out.push(']');
                return Some(());
            }
            if !first {
                self.out.push_str(", ");
            }
            first = false;
            self.value(depth - 1)?;
            self.space();
            if !self.eat(",") && !self.rest.starts_with(close) {
                return None;
            }
        }
    }

    fn mapping(&mut self, depth: usize) -> Option<()> {
        self.rest = &self.rest[1..];
        self.out.push('{');
        let mut first = true;
        loop {
            self.space();
            if self.eat("}") {
                self.out.push('}');
                return Some(());
            }
            if !first {
                self.out.push_str(", ");
            }
            first = false;
            let key = match self.string()? {
                Some(key) => key,
                None => self.bare(&[':', ',', '{', '}', '[', ']'])?.to_owned(),
            };
            self.out.push_str(&quoted(&key));
            self.space();
            if !self.eat(":") {
                return None;
            }
            self.out.push_str(": ");
            self.space();
            self.value(depth - 1)?;
            self.space();
            if !self.eat(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
    }

    /// Text without quotes, up to one of the characters `ends`.
    fn bare(&mut self, ends: &[char]) -> Option<&'a str> {
        let end = self.rest.find(ends).unwrap_or(self.rest.len());
        let (text, rest) = self.rest.split_at(end);
        self.rest = rest;
        Some(text.trim()).filter(|text| !text.is_empty())
    }

    fn word(&mut self) -> Option<()> {
        let word = self.bare(&[',', ':', '{', '}', '[', ']', '(', ')'])?;
        let json = match word {
            "True" | "true" => "true".into(),
            "False" | "false" => "false".into(),
            "None" | "null" => "null".into(),
            _ => match number(word) {
                Some(number) => number,
                None if self.dialect == Dialect::PYTHON => return None,
                None => quoted(word),
            },
        };
        self.out.push_str(&json);
        Some(())
    }

    /// A string, if one starts here. The outer `None` means that the string has no end.
    fn string(&mut self) -> Option<Option<String>> {
        if let Some(mark) = self.dialect.quote {
            let Some(rest) = self.rest.strip_prefix(mark) else {
                return Some(None);
            };
            let (text, rest) = rest.split_once(mark)?;
            self.rest = rest;
            return Some(Some(text.to_owned()));
        }
        for quote in ["\"\"\"", "'''", "\"", "'"] {
            if let Some(rest) = self.rest.strip_prefix(quote) {
                let (text, rest) = python_string(rest, quote)?;
                self.rest = rest;
                return Some(Some(text));
            }
        }
        Some(None)
    }
}

/// Reads a Python string. `text` begins after the opening quote. Returns the string's content, and
/// the text after the closing quote. As in Python, unknown escapes stay unchanged.
fn python_string<'a>(text: &'a str, quote: &str) -> Option<(String, &'a str)> {
    let mut out = String::new();
    let mut rest = text;
    loop {
        if let Some(rest) = rest.strip_prefix(quote) {
            return Some((out, rest));
        }
        let mut chars = rest.chars();
        let c = chars.next()?;
        rest = chars.as_str();
        if c != '\\' {
            out.push(c);
            continue;
        }
        let escape = chars.next()?;
        rest = chars.as_str();
        let digits = match escape {
            'n' => {
                out.push('\n');
                continue;
            }
            't' => {
                out.push('\t');
                continue;
            }
            'r' => {
                out.push('\r');
                continue;
            }
            '\n' => continue,
            '\\' | '\'' | '"' | '/' => {
                out.push(escape);
                continue;
            }
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        match code_point(rest, digits) {
            // Combines two escapes that form a surrogate pair.
            Some((high @ 0xD800..=0xDBFF, after)) => {
                let low = after
                    .strip_prefix("\\u")
                    .and_then(|after| code_point(after, 4));
                match low {
                    Some((low @ 0xDC00..=0xDFFF, after)) => {
                        let code = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
                        out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                        rest = after;
                    }
                    _ => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        rest = after;
                    }
                }
            }
            Some((code, after)) => {
                out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                rest = after;
            }
            None => {
                out.push('\\');
                out.push(escape);
            }
        }
    }
}

/// A number of exactly `digits` hexadecimal digits, and the rest.
fn code_point(text: &str, digits: usize) -> Option<(u32, &str)> {
    let (hex, rest) = text.split_at_checked(digits)?;
    let all = !hex.is_empty() && hex.bytes().all(|b| b.is_ascii_hexdigit());
    Some((u32::from_str_radix(hex, 16).ok().filter(|_| all)?, rest))
}

/// Converts a Python number to JSON: `1_000`, `.5`, `1.`, `0x1f`.
fn number(word: &str) -> Option<String> {
    if !word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) {
        return None;
    }
    let (sign, digits) = match word.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", word.strip_prefix('+').unwrap_or(word)),
    };
    let digits = digits.replace('_', "");
    if let Some(hex) = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"))
    {
        let all = hex.bytes().all(|b| b.is_ascii_hexdigit());
        return u128::from_str_radix(hex, 16)
            .ok()
            .filter(|_| all)
            .map(|n| format!("{sign}{n}"));
    }
    let mut out = String::from(sign);
    if digits.starts_with('.') {
        out.push('0');
    }
    let (mantissa, exponent) = match digits.find(['e', 'E']) {
        Some(at) => digits.split_at(at),
        None => (digits.as_str(), ""),
    };
    for c in mantissa.chars() {
        push_escaped(c, &mut out);
    }
    if mantissa.ends_with('.') {
        out.push('0');
    }
    out.push_str(exponent);
    // JSON's syntax rejects texts like `1.0.0` and `2024-01-01`, which are not numbers.
    normalized(&out, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_literals() {
        for (text, json) in [
            ("'a'", r#""a""#),
            (r#""it's""#, r#""it's""#),
            (r"'it\'s \x41\u00e9\U0001F600\n\q'", r#""it's Aé😀\n\\q""#),
            (r"'\ud83d\ude00 \ud83d'", "\"😀 \u{FFFD}\""),
            ("'''a 'b' c'''", r#""a 'b' c""#),
            (
                "[1, -2.5, .5, 1., 1_000, 0x1F, 1e5]",
                "[1, -2.5, 0.5, 1.0, 1000, 31, 1e5]",
            ),
            ("(1, 'a',)", r#"[1, "a"]"#),
            (
                "{'a': None, \"b\": [True, false, null], 3: {}}",
                r#"{"a": null, "b": [true, false, null], "3": {}}"#,
            ),
            ("  [ ]  ", "[]"),
        ] {
            assert_eq!(
                parse(text, Dialect::PYTHON, 8).as_deref(),
                Some(json),
                "{text}"
            );
        }
        for text in [
            "",
            "'a",
            "[1",
            "[1 2]",
            "{'a'}",
            "foo",
            "f(1)",
            "1.0.0",
            "2024-01-01",
            "'a' 'b'",
            "[[[[[[[[[1]]]]]]]]]",
            "--1",
            "0x",
            r"'\",
        ] {
            assert_eq!(parse(text, Dialect::PYTHON, 8), None, "{text}");
        }
    }

    #[test]
    fn gemma_literals() {
        let dialect = Dialect::raw("<|\"|>");
        for (text, json) in [
            (r#"<|"|>a "b" {c}<|"|>"#, r#""a \"b\" {c}""#),
            (
                r#"{k:<|"|>v<|"|>,<|"|>n n<|"|>:[1,true]}"#,
                r#"{"k": "v", "n n": [1, true]}"#,
            ),
            ("bare words", r#""bare words""#),
            ("None", "null"),
            ("[]", "[]"),
        ] {
            assert_eq!(parse(text, dialect, 8).as_deref(), Some(json), "{text}");
        }
        for text in ["<|\"|>a", "{k}", "[1,", "{k:}"] {
            assert_eq!(parse(text, dialect, 8), None, "{text}");
        }
    }
}
