//! Calls of FunctionGemma and Gemma 4: `call:f{k:<escape>v<escape>,n:1}`.
//!
//! Strings are raw text between two marks. The parser returns an argument when it is complete. A
//! value that is not a literal becomes a string.

use super::Fault;
use super::engine::{Body, Step};
use super::hold::Hold;
use super::json_scan::quoted;
use super::literal::{self, Dialect};
use super::sink::Sink;
use super::tools::{from_literal, from_text};

enum State {
    Call,
    Name,
    KeyOrEnd,
    Key,
    Value,
}

/// Reads one call.
pub(super) struct GemmaCall {
    /// The mark before and after a string.
    mark: &'static str,
    state: State,
    hold: Hold,
    name: String,
    key: String,
    value: String,
    in_string: bool,
    open: Vec<char>,
    first: bool,
}

impl GemmaCall {
    fn boxed(mark: &'static str) -> Box<dyn Body> {
        Box::new(Self {
            mark,
            state: State::Call,
            hold: Hold::default(),
            name: String::new(),
            key: String::new(),
            value: String::new(),
            in_string: false,
            open: Vec::new(),
            first: true,
        })
    }

    /// The body after `<start_function_call>`.
    pub(super) fn function_gemma(_: bool) -> Box<dyn Body> {
        Self::boxed("<escape>")
    }

    /// The body after `<|tool_call>`.
    pub(super) fn gemma4(_: bool) -> Box<dyn Body> {
        Self::boxed("<|\"|>")
    }

    fn try_step(&mut self, c: char, sink: &mut Sink) -> Result<Step, Fault> {
        let max_name = sink.limits.max_name_bytes;
        match self.state {
            State::Call => {
                let mut stray = false;
                let marker = self
                    .hold
                    .push(c, &["call:"], &mut |c| stray |= !c.is_whitespace());
                if stray {
                    return Err(Fault::Syntax);
                }
                if marker.is_some() {
                    self.state = State::Name;
                }
            }
            State::Name if c == '{' => {
                self.name = self.name.trim().to_owned();
                sink.start(&self.name, None)?;
                sink.arguments("{");
                self.state = State::KeyOrEnd;
            }
            State::Name => {
                self.name.push(c);
                if self.name.len() > max_name {
                    return Err(Fault::BadName);
                }
            }
            State::KeyOrEnd if c == '}' => return Ok(Self::end(sink)),
            State::KeyOrEnd if c.is_whitespace() => {}
            State::KeyOrEnd | State::Key if c == ':' => {
                let key = self.key.trim();
                let key = key
                    .strip_prefix(self.mark)
                    .and_then(|key| key.strip_suffix(self.mark))
                    .unwrap_or(key);
                if key.is_empty() {
                    return Err(Fault::Syntax);
                }
                sink.arguments(if self.first { "" } else { ", " });
                self.first = false;
                sink.arguments(&quoted(key));
                sink.arguments(": ");
                self.key = key.to_owned();
                self.state = State::Value;
            }
            State::KeyOrEnd | State::Key if matches!(c, '{' | '}' | ',' | '[' | ']') => {
                return Err(Fault::Syntax);
            }
            State::KeyOrEnd | State::Key => {
                self.key.push(c);
                self.state = State::Key;
                if self.key.len() > max_name {
                    return Err(Fault::BadName);
                }
            }
            State::Value => return self.value(c, sink),
        }
        Ok(Step::More)
    }

    fn value(&mut self, c: char, sink: &mut Sink) -> Result<Step, Fault> {
        let mut text = String::new();
        if self.hold.passes(c, &[self.mark]) {
            text.push(c);
        } else if self
            .hold
            .push(c, &[self.mark], &mut |c| text.push(c))
            .is_some()
        {
            self.in_string = !self.in_string;
            self.value.push_str(self.mark);
            return Ok(Step::More);
        }
        if self.in_string {
            self.value.push_str(&text);
            return Ok(Step::More);
        }
        for c in text.chars() {
            match c {
                ',' | '}' if self.open.is_empty() => {
                    self.value_ended(sink)?;
                    if c == '}' {
                        return Ok(Self::end(sink));
                    }
                    self.key.clear();
                    self.state = State::KeyOrEnd;
                    continue;
                }
                '[' | '{' if self.open.len() >= sink.limits.max_depth => {
                    return Err(Fault::TooDeep);
                }
                '[' => self.open.push(']'),
                '{' => self.open.push('}'),
                ']' | '}' if self.open.pop() != Some(c) => return Err(Fault::Syntax),
                _ => {}
            }
            self.value.push(c);
        }
        Ok(Step::More)
    }

    fn value_ended(&mut self, sink: &mut Sink) -> Result<(), Fault> {
        let value = std::mem::take(&mut self.value);
        let text = value.trim();
        if text.is_empty() {
            return Err(Fault::Syntax);
        }
        let depth = sink.limits.max_depth;
        let kinds = sink.tools.kinds(&self.name, &self.key);
        let json = match literal::parse(text, Dialect::raw(self.mark), depth) {
            Some(json) => from_literal(&json, text, kinds, depth),
            None => from_text(text, kinds, depth),
        };
        sink.arguments(&json);
        Ok(())
    }

    fn end(sink: &mut Sink) -> Step {
        sink.arguments("}");
        sink.end();
        Step::Done
    }
}

impl Body for GemmaCall {
    fn step(&mut self, c: char, sink: &mut Sink) -> Step {
        self.try_step(c, sink).unwrap_or_else(Step::Fail)
    }

    fn finish(&mut self, _: &mut Sink) -> Result<(), Fault> {
        Err(Fault::Unclosed)
    }
}
