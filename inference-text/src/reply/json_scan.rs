//! An incremental parser of one JSON value (RFC 8259), character by character.
//!
//! It checks the syntax, and outputs an equal value, so the output is valid JSON at the end. It
//! repairs two common faults of models: it escapes raw control characters inside strings, and
//! replaces lone surrogates by U+FFFD. It builds no tree.

use super::Fault;
use std::fmt::Write;

/// The effect of a character on the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The value continues.
    More,
    /// The value is complete, and the character belongs to it.
    Done,
    /// The value was complete before this character. Only top-level numbers end in this way.
    DoneBefore,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value must follow.
    Value,
    /// A value or `]` must follow.
    ValueOrEnd,
    /// A key or `}` must follow.
    KeyOrEnd,
    /// A key must follow.
    Key,
    /// `:` must follow.
    Colon,
    /// `,` or the closing bracket must follow.
    CommaOrEnd,
    /// Inside a string. `key` says whether the string is a key.
    String {
        key: bool,
    },
    /// After a backslash.
    Escape {
        key: bool,
    },
    /// In the four digits of `\u`.
    Hex {
        key: bool,
        digits: u8,
        value: u16,
    },
    Number(Number),
    /// In `true`, `false` or `null`: the letters that must follow.
    Word(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Number {
    fn is_complete(self) -> bool {
        matches!(
            self,
            Self::Zero | Self::Integer | Self::Fraction | Self::Exponent
        )
    }

    fn step(self, c: char) -> Option<Self> {
        Some(match (self, c) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus, '1'..='9') | (Self::Integer, '0'..='9') => Self::Integer,
            (Self::Zero | Self::Integer, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Integer | Self::Fraction, 'e' | 'E') => Self::E,
            (Self::E, '+' | '-') => Self::Sign,
            (Self::E | Self::Sign | Self::Exponent, '0'..='9') => Self::Exponent,
            _ => return None,
        })
    }
}

/// Reads one value.
#[derive(Debug)]
pub(super) struct JsonScan {
    state: State,
    /// The open brackets; true for objects.
    open: Vec<bool>,
    max_depth: usize,
    /// A high surrogate, whose low surrogate must follow.
    high: Option<u16>,
    done: bool,
}

impl JsonScan {
    pub(super) fn new(max_depth: usize) -> Self {
        Self {
            state: State::Value,
            open: Vec::new(),
            max_depth,
            high: None,
            done: false,
        }
    }

    /// Whether only white space was read so far.
    pub(super) fn is_fresh(&self) -> bool {
        self.state == State::Value && self.open.is_empty() && !self.done
    }

    /// Whether the value is complete, or would be if the text ended here.
    pub(super) fn is_complete(&self) -> bool {
        self.done
            || (self.open.is_empty()
                && matches!(self.state, State::Number(number) if number.is_complete()))
    }

    /// Reads `c`, and appends its output to `out`. White space between tokens is kept, but white
    /// space before the value is not.
    pub(super) fn step(&mut self, c: char, out: &mut String) -> Result<Progress, Fault> {
        if self.done {
            return Ok(Progress::DoneBefore);
        }
        match self.state {
            State::Value => self.value(c, out),
            State::ValueOrEnd if c == ']' => self.close(out, c),
            State::ValueOrEnd => self.value(c, out),
            State::KeyOrEnd if c == '}' => self.close(out, c),
            State::KeyOrEnd | State::Key => {
                out.push(c);
                if c == '"' {
                    self.state = State::String { key: true };
                } else if !is_space(c) {
                    return Err(Fault::Syntax);
                }
                Ok(Progress::More)
            }
            State::Colon => {
                out.push(c);
                if c == ':' {
                    self.state = State::Value;
                } else if !is_space(c) {
                    return Err(Fault::Syntax);
                }
                Ok(Progress::More)
            }
            State::CommaOrEnd => self.comma_or_end(c, out),
            State::String { key } => Ok(self.string(c, key, out)),
            State::Escape { key } => self.escape(c, key, out),
            State::Hex { key, digits, value } => self.hex(c, key, digits, value, out),
            State::Number(number) => match number.step(c) {
                Some(next) => {
                    out.push(c);
                    self.state = State::Number(next);
                    Ok(Progress::More)
                }
                None if number.is_complete() => {
                    if self.value_ended() == Progress::Done {
                        Ok(Progress::DoneBefore)
                    } else {
                        self.comma_or_end(c, out)
                    }
                }
                None => Err(Fault::Syntax),
            },
            State::Word(rest) => {
                if !rest.starts_with(c) {
                    return Err(Fault::Syntax);
                }
                out.push(c);
                let rest = &rest[1..];
                if rest.is_empty() {
                    return Ok(self.value_ended());
                }
                self.state = State::Word(rest);
                Ok(Progress::More)
            }
        }
    }

    fn value(&mut self, c: char, out: &mut String) -> Result<Progress, Fault> {
        if is_space(c) {
            if !self.open.is_empty() {
                out.push(c);
            }
            return Ok(Progress::More);
        }
        self.state = match c {
            '{' | '[' => {
                if self.open.len() >= self.max_depth {
                    return Err(Fault::TooDeep);
                }
                self.open.push(c == '{');
                if c == '{' {
                    State::KeyOrEnd
                } else {
                    State::ValueOrEnd
                }
            }
            '"' => State::String { key: false },
            '-' => State::Number(Number::Minus),
            '0' => State::Number(Number::Zero),
            '1'..='9' => State::Number(Number::Integer),
            't' => State::Word("rue"),
            'f' => State::Word("alse"),
            'n' => State::Word("ull"),
            _ => return Err(Fault::Syntax),
        };
        out.push(c);
        Ok(Progress::More)
    }

    fn comma_or_end(&mut self, c: char, out: &mut String) -> Result<Progress, Fault> {
        let Some(&object) = self.open.last() else {
            return Ok(Progress::DoneBefore);
        };
        match c {
            ',' => {
                out.push(c);
                self.state = if object { State::Key } else { State::Value };
                Ok(Progress::More)
            }
            '}' if object => self.close(out, c),
            ']' if !object => self.close(out, c),
            c if is_space(c) => {
                out.push(c);
                Ok(Progress::More)
            }
            _ => Err(Fault::Syntax),
        }
    }

    fn close(&mut self, out: &mut String, c: char) -> Result<Progress, Fault> {
        out.push(c);
        self.open.pop();
        Ok(self.value_ended())
    }

    fn value_ended(&mut self) -> Progress {
        self.state = State::CommaOrEnd;
        self.done = self.open.is_empty();
        if self.done {
            Progress::Done
        } else {
            Progress::More
        }
    }

    fn string(&mut self, c: char, key: bool, out: &mut String) -> Progress {
        if c == '\\' {
            // The surrogate is kept, because its low surrogate may follow.
            self.state = State::Escape { key };
            return Progress::More;
        }
        self.lone_surrogate(out);
        match c {
            '"' => {
                out.push(c);
                if !key {
                    return self.value_ended();
                }
                self.state = State::Colon;
            }
            c if c < ' ' => push_escaped(c, out),
            c => out.push(c),
        }
        Progress::More
    }

    fn escape(&mut self, c: char, key: bool, out: &mut String) -> Result<Progress, Fault> {
        if c == 'u' {
            self.state = State::Hex {
                key,
                digits: 0,
                value: 0,
            };
            return Ok(Progress::More);
        }
        self.lone_surrogate(out);
        if !matches!(c, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') {
            return Err(Fault::Syntax);
        }
        out.push('\\');
        out.push(c);
        self.state = State::String { key };
        Ok(Progress::More)
    }

    fn hex(
        &mut self,
        c: char,
        key: bool,
        digits: u8,
        value: u16,
        out: &mut String,
    ) -> Result<Progress, Fault> {
        let digit = c.to_digit(16).ok_or(Fault::Syntax)?;
        let value = value * 16 + digit as u16;
        if digits < 3 {
            self.state = State::Hex {
                key,
                digits: digits + 1,
                value,
            };
            return Ok(Progress::More);
        }
        self.state = State::String { key };
        match (self.high, value) {
            (Some(high), 0xDC00..=0xDFFF) => {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{high:04x}\\u{value:04x}");
                self.high = None;
            }
            (_, 0xD800..=0xDBFF) => {
                self.lone_surrogate(out);
                self.high = Some(value);
            }
            (_, 0xDC00..=0xDFFF) => out.push_str("\\ufffd"),
            _ => {
                self.lone_surrogate(out);
                let _ = write!(out, "\\u{value:04x}");
            }
        }
        Ok(Progress::More)
    }

    fn lone_surrogate(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push_str("\\ufffd");
        }
    }
}

/// White space of JSON.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

/// Appends one character of a string, escaped where JSON requires it.
pub(super) fn push_escaped(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{:04x}", u32::from(c));
        }
        c => out.push(c),
    }
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        push_escaped(c, &mut out);
    }
    out.push('"');
    out
}

/// Parses a text that is a single value, with optional white space around it. `None` if the text is
/// not JSON.
pub(super) fn normalized(text: &str, max_depth: usize) -> Option<String> {
    let mut scan = JsonScan::new(max_depth);
    let mut out = String::new();
    for c in text.trim_matches(is_space).chars() {
        if scan.step(c, &mut out).ok()? == Progress::DoneBefore {
            return None;
        }
    }
    scan.is_complete().then_some(out)
}

/// The text of a JSON string that [`JsonScan`] has read.
pub(super) fn unquoted(json: &str) -> Option<String> {
    serde_json::from_str(json).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repairs_what_models_get_wrong() {
        assert_eq!(normalized("\"a\nb\"", 8).as_deref(), Some("\"a\\nb\""));
        assert_eq!(
            normalized(r#""\ud83d\ude00""#, 8).as_deref(),
            Some(r#""\ud83d\ude00""#)
        );
        assert_eq!(
            normalized(r#""\ud83d!""#, 8).as_deref(),
            Some(r#""\ufffd!""#)
        );
        assert_eq!(
            normalized(r#""\ud83d\n""#, 8).as_deref(),
            Some(r#""\ufffd\n""#)
        );
        assert_eq!(
            normalized(r#""\ud83d\u0041""#, 8).as_deref(),
            Some(r#""\ufffd\u0041""#)
        );
        assert_eq!(
            normalized(r#""\ud83d\ud83d\ude00""#, 8).as_deref(),
            Some(r#""\ufffd\ud83d\ude00""#)
        );
        assert_eq!(normalized(r#""\ude00""#, 8).as_deref(), Some(r#""\ufffd""#));
    }

    #[test]
    fn refuses_what_is_no_json() {
        for text in [
            "",
            "{",
            "[1,]",
            "{\"a\" 1}",
            "{a:1}",
            "01",
            "1.",
            "1e",
            "-",
            "tru",
            "[1 2]",
            "1 2",
            "\"\\x41\"",
            "\"\\u12g4\"",
            "{\"a\":1,}",
            "'a'",
            "{\"a\":1]",
            "nul l",
            "+1",
            ".5",
        ] {
            assert_eq!(normalized(text, 8), None, "{text}");
        }
        assert_eq!(normalized("[[[]]]", 3).as_deref(), Some("[[[]]]"));
        assert_eq!(normalized("[[[[]]]]", 3), None);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig {
            cases: 4000, failure_persistence: None, ..Default::default()
        })]

        /// The parser must accept the texts that an independent parser accepts.
        #[test]
        fn agrees_with_serde_json(text in r#"[-\[\]{}",:0-9.eE+tfn \\ruals]{0,12}"#) {
            let ours = normalized(&text, 64);
            let theirs = serde_json::from_str::<serde::de::IgnoredAny>(&text);
            proptest::prop_assert_eq!(ours.is_some(), theirs.is_ok(), "{} {:?}", text, theirs);
            if let Some(ours) = ours {
                proptest::prop_assert_eq!(ours, text.trim_matches(is_space));
            }
        }
    }
}
