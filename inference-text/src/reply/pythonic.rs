//! Parses calls in Python's syntax: `[f(a="x", b=1), g()]`.
//!
//! The families are Llama 3.2 and 4, LFM2, and OLMo 3 (one call per line, without brackets). The
//! parser returns an argument when it is complete. A value that is not a literal becomes a string.

use super::Fault;
use super::engine::{Body, Step};
use super::json_scan::quoted;
use super::literal::{self, Dialect};
use super::sink::Sink;
use super::tools::{from_literal, from_text};

enum State {
    Start,
    /// Before a call.
    Item,
    Name,
    /// Before an argument, if there is any.
    Argument,
    Key,
    /// Between a key and its `=`.
    Equals,
    Value(Capture),
    AfterCall,
}

/// Reads calls.
pub(super) struct Pythonic {
    state: State,
    bracket: bool,
    name: String,
    key: String,
    first: bool,
    tentative: bool,
}

impl Pythonic {
    pub(super) fn boxed(tentative: bool) -> Box<dyn Body> {
        Box::new(Self {
            state: State::Start,
            bracket: false,
            name: String::new(),
            key: String::new(),
            first: true,
            tentative,
        })
    }

    fn try_step(&mut self, c: char, sink: &mut Sink) -> Result<Step, Fault> {
        let max_name = sink.limits.max_name_bytes;
        match &mut self.state {
            State::Start | State::Item | State::Argument | State::Equals | State::AfterCall
                if c.is_whitespace() => {}
            State::Start if c == '[' => {
                self.bracket = true;
                self.state = State::Item;
            }
            State::AfterCall if self.bracket && c == ',' => self.state = State::Item,
            State::AfterCall if self.bracket && c == ']' => return Ok(Step::Done),
            State::AfterCall if !self.bracket && matches!(c, ',' | ';') => {}
            State::AfterCall if !self.bracket && c == '<' => return Ok(Step::DoneBefore),
            // Python allows a comma after the last call.
            State::Item if c == ']' && !self.first => return Ok(Step::Done),
            State::Start | State::Item | State::AfterCall if is_name_start(c) => {
                if matches!(self.state, State::AfterCall) && self.bracket {
                    return Err(Fault::Syntax);
                }
                self.name.clear();
                self.name.push(c);
                self.state = State::Name;
            }
            State::Name if c == '(' => {
                if self.tentative && !sink.is_tool(&self.name) {
                    return Err(Fault::BadName);
                }
                self.first = true;
                self.state = State::Argument;
            }
            State::Name if is_name(c) || c == '-' => {
                self.name.push(c);
                if self.name.len() > max_name {
                    return Err(Fault::BadName);
                }
            }
            State::Argument if c == ')' => {
                if self.first {
                    sink.start(&self.name, None)?;
                    sink.arguments("{");
                }
                self.end_call(sink);
            }
            State::Argument if is_name_start(c) => {
                self.key.clear();
                self.key.push(c);
                self.state = State::Key;
            }
            State::Key | State::Equals if c == '=' => {
                // Only here the text is certainly a call, and not a link or a formula.
                if self.first {
                    sink.start(&self.name, None)?;
                    sink.arguments("{");
                } else {
                    sink.arguments(", ");
                }
                self.first = false;
                sink.arguments(&quoted(&self.key));
                sink.arguments(": ");
                self.state = State::Value(Capture::default());
            }
            State::Key if c.is_whitespace() => self.state = State::Equals,
            State::Key if is_name(c) => {
                self.key.push(c);
                if self.key.len() > max_name {
                    return Err(Fault::BadName);
                }
            }
            State::Value(capture) => {
                if capture.push(c, sink.limits.max_depth)? {
                    let text = std::mem::take(&mut capture.text);
                    self.value_ended(&text, sink)?;
                    if c == ')' {
                        self.end_call(sink);
                    } else {
                        self.state = State::Argument;
                    }
                }
            }
            _ => return Err(Fault::Syntax),
        }
        Ok(Step::More)
    }

    fn value_ended(&mut self, text: &str, sink: &mut Sink) -> Result<(), Fault> {
        let text = text.trim();
        if text.is_empty() {
            return Err(Fault::Syntax);
        }
        let depth = sink.limits.max_depth;
        let kinds = sink.tools.kinds(&self.name, &self.key);
        let json = match literal::parse(text, Dialect::PYTHON, depth) {
            Some(json) => from_literal(&json, text, kinds, depth),
            None => from_text(text, kinds, depth),
        };
        sink.arguments(&json);
        Ok(())
    }

    fn end_call(&mut self, sink: &mut Sink) {
        sink.arguments("}");
        sink.end();
        self.first = false;
        self.state = State::AfterCall;
    }
}

impl Body for Pythonic {
    fn step(&mut self, c: char, sink: &mut Sink) -> Step {
        self.try_step(c, sink).unwrap_or_else(Step::Fail)
    }

    fn finish(&mut self, _: &mut Sink) -> Result<(), Fault> {
        match self.state {
            State::AfterCall => Ok(()),
            _ => Err(Fault::Unclosed),
        }
    }
}

fn is_name_start(c: char) -> bool {
    c.is_alphabetic() || c == '_'
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.')
}

/// Collects the text of a value, which ends at a comma or a closing parenthesis outside strings and
/// brackets.
#[derive(Default)]
struct Capture {
    text: String,
    /// The closing brackets that are still missing.
    open: Vec<char>,
    string: Quoted,
}

#[derive(Clone, Copy, Default)]
enum Quoted {
    #[default]
    No,
    /// After one or two quotes at the start. The value is a string, an empty string, or a string
    /// with triple quotes.
    Opening { mark: char, two: bool },
    Inside {
        mark: char,
        triple: bool,
        escaped: bool,
        run: u8,
    },
}

impl Capture {
    /// Reads `c`. Returns true if `c` ends the value; `c` is then not part of it.
    fn push(&mut self, c: char, max_depth: usize) -> Result<bool, Fault> {
        match self.string {
            Quoted::No => return self.outside(c, max_depth),
            Quoted::Opening { mark, two: false } if c == mark => {
                self.string = Quoted::Opening { mark, two: true };
            }
            Quoted::Opening { mark, two: true } if c == mark => {
                self.string = Quoted::Inside {
                    mark,
                    triple: true,
                    escaped: false,
                    run: 0,
                };
            }
            Quoted::Opening { two: true, .. } => {
                self.string = Quoted::No;
                return self.outside(c, max_depth);
            }
            Quoted::Opening { mark, two: false } => {
                let escaped = c == '\\';
                self.string = Quoted::Inside {
                    mark,
                    triple: false,
                    escaped,
                    run: 0,
                };
            }
            Quoted::Inside {
                mark,
                triple,
                escaped,
                run,
            } => {
                let ends = !escaped && c == mark;
                let run = if ends { run + 1 } else { 0 };
                self.string = if ends && (!triple || run == 3) {
                    Quoted::No
                } else {
                    Quoted::Inside {
                        mark,
                        triple,
                        escaped: !escaped && c == '\\',
                        run,
                    }
                };
            }
        }
        self.text.push(c);
        Ok(false)
    }

    fn outside(&mut self, c: char, max_depth: usize) -> Result<bool, Fault> {
        match c {
            ',' | ')' if self.open.is_empty() => return Ok(true),
            '\'' | '"' => {
                self.string = Quoted::Opening {
                    mark: c,
                    two: false,
                }
            }
            '[' | '{' | '(' if self.open.len() >= max_depth => return Err(Fault::TooDeep),
            '[' => self.open.push(']'),
            '{' => self.open.push('}'),
            '(' => self.open.push(')'),
            ']' | '}' | ')' if self.open.pop() != Some(c) => return Err(Fault::Syntax),
            _ => {}
        }
        self.text.push(c);
        Ok(false)
    }
}
