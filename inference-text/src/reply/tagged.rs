//! Parses calls whose arguments are separate texts between tags.
//!
//! Families: Qwen3-Coder (`<function=f><parameter=k>v</parameter></function>`), MiniMax
//! (`<invoke name="f"><parameter name="k">v</parameter></invoke>`) and GLM-4.5 to 4.7
//! (`f<arg_key>k</arg_key><arg_value>v</arg_value>`).
//!
//! If the schema says that a value is a string, the parser returns it while reading. It returns
//! other values at their end. One newline at each end of a value belongs to the syntax, not to the
//! value.

use super::engine::{Body, Step};
use super::hold::Hold;
use super::json_scan::{push_escaped, quoted};
use super::sink::Sink;
use super::tools::{Kinds, from_text};
use super::{Fault, Limits};

/// The tags of a family. An empty list means that the family lacks this part.
#[derive(Clone, Copy)]
struct Tags {
    /// Tags before the name.
    head: &'static [&'static str],
    /// Tags after the name. If empty, the name ends at the first possible following tag.
    name_end: &'static [&'static str],
    /// Tags before a key, and tags that end the call.
    next: &'static [&'static str],
    key_end: &'static [&'static str],
    /// Tags between a key and its value.
    value_begin: &'static [&'static str],
    value_end: &'static [&'static str],
}

static QWEN: Tags = Tags {
    head: &["<function="],
    name_end: &[">"],
    next: &["<parameter=", "</function>"],
    key_end: &[">"],
    value_begin: &[],
    value_end: &["</parameter>"],
};

static MINIMAX: Tags = Tags {
    head: &["<invoke name="],
    name_end: &[">"],
    next: &["<parameter name=", "</invoke>"],
    key_end: &[">"],
    value_begin: &[],
    value_end: &["</parameter>"],
};

static GLM: Tags = Tags {
    head: &[],
    name_end: &[],
    next: &["<arg_key>", "</tool_call>"],
    key_end: &["</arg_key>"],
    value_begin: &["<arg_value>"],
    value_end: &["</arg_value>"],
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    Name,
    Next,
    Key,
    ValueBegin,
    Value,
}

/// Reads one call.
pub(super) struct TaggedCall {
    tags: &'static Tags,
    state: State,
    hold: Hold,
    name: String,
    key: String,
    value: Value,
    first: bool,
}

impl TaggedCall {
    fn boxed(tags: &'static Tags, state: State) -> Box<dyn Body> {
        Box::new(Self {
            tags,
            state,
            hold: Hold::default(),
            name: String::new(),
            key: String::new(),
            value: Value::new(Kinds::ANY),
            first: true,
        })
    }

    /// The body after `<tool_call>`.
    pub(super) fn qwen(_: bool) -> Box<dyn Body> {
        Self::boxed(&QWEN, State::Head)
    }

    /// The body after `<function=`, if `<tool_call>` is missing.
    pub(super) fn qwen_function(_: bool) -> Box<dyn Body> {
        Self::boxed(&QWEN, State::Name)
    }

    /// The body after `<minimax:tool_call>`.
    pub(super) fn minimax(_: bool) -> Box<dyn Body> {
        Self::boxed(&MINIMAX, State::Head)
    }

    /// The body after `<invoke name=` of a further call.
    pub(super) fn minimax_invoke(_: bool) -> Box<dyn Body> {
        Self::boxed(&MINIMAX, State::Name)
    }

    /// The body after `<tool_call>`.
    pub(super) fn glm(_: bool) -> Box<dyn Body> {
        Self::boxed(&GLM, State::Name)
    }

    fn name_ended(&mut self, sink: &mut Sink) -> Result<(), Fault> {
        let name = without_quotes(self.name.trim()).to_owned();
        sink.start(&name, None)?;
        sink.arguments("{");
        self.name = name;
        Ok(())
    }

    /// Handles a marker of `next`.
    fn next_found(&mut self, marker: usize, sink: &mut Sink) -> Step {
        if marker == 0 {
            self.key.clear();
            self.state = State::Key;
            return Step::More;
        }
        sink.arguments("}");
        sink.end();
        Step::Done
    }

    fn value_begins(&mut self, sink: &mut Sink) {
        let key = without_quotes(self.key.trim());
        let separator = if self.first { "" } else { ", " };
        self.first = false;
        sink.arguments(separator);
        sink.arguments(&quoted(key));
        sink.arguments(": ");
        self.value = Value::new(sink.tools.kinds(&self.name, key));
        self.state = State::Value;
    }

    /// Reads until one of `markers`. Only white space may precede the marker.
    fn expect(&mut self, c: char, markers: &[&str]) -> Result<Option<usize>, Fault> {
        let mut stray = false;
        let marker = self
            .hold
            .push(c, markers, &mut |c| stray |= !c.is_whitespace());
        if stray {
            Err(Fault::Syntax)
        } else {
            Ok(marker)
        }
    }

    /// Reads a name or a key up to one of `markers`.
    fn word(
        hold: &mut Hold,
        c: char,
        markers: &[&str],
        word: &mut String,
        limits: Limits,
    ) -> Result<Option<usize>, Fault> {
        let marker = hold.push(c, markers, &mut |c| word.push(c));
        if word.len() > limits.max_name_bytes {
            return Err(Fault::BadName);
        }
        Ok(marker)
    }

    fn try_step(&mut self, c: char, sink: &mut Sink) -> Result<Step, Fault> {
        let tags = self.tags;
        match self.state {
            State::Head => {
                if self.expect(c, tags.head)?.is_some() {
                    self.state = State::Name;
                }
            }
            State::Name => {
                let own_end = !tags.name_end.is_empty();
                let ends = if own_end { tags.name_end } else { tags.next };
                let marker = Self::word(&mut self.hold, c, ends, &mut self.name, sink.limits)?;
                if let Some(marker) = marker {
                    self.name_ended(sink)?;
                    self.state = State::Next;
                    if !own_end {
                        return Ok(self.next_found(marker, sink));
                    }
                }
            }
            State::Next => {
                if let Some(marker) = self.expect(c, tags.next)? {
                    return Ok(self.next_found(marker, sink));
                }
            }
            State::Key => {
                let ends = tags.key_end;
                let marker = Self::word(&mut self.hold, c, ends, &mut self.key, sink.limits)?;
                if marker.is_some() {
                    if tags.value_begin.is_empty() {
                        self.value_begins(sink);
                    } else {
                        self.state = State::ValueBegin;
                    }
                }
            }
            State::ValueBegin => {
                if self.expect(c, tags.value_begin)?.is_some() {
                    self.value_begins(sink);
                }
            }
            State::Value => {
                let value = &mut self.value;
                let marker = self.hold.push(c, tags.value_end, &mut |c| value.push(c));
                sink.arguments(&std::mem::take(&mut self.value.ready));
                if marker.is_some() {
                    let rest = self.value.end(sink.limits.max_depth);
                    sink.arguments(&rest);
                    self.state = State::Next;
                }
            }
        }
        Ok(Step::More)
    }
}

impl Body for TaggedCall {
    fn step(&mut self, c: char, sink: &mut Sink) -> Step {
        self.try_step(c, sink).unwrap_or_else(Step::Fail)
    }

    fn finish(&mut self, _: &mut Sink) -> Result<(), Fault> {
        Err(Fault::Unclosed)
    }
}

/// The value of an argument.
struct Value {
    kinds: Kinds,
    text: String,
    /// JSON text that is ready to be returned.
    ready: String,
    begun: bool,
    /// Whether a newline is withheld. It is part of the value only if more text follows.
    line_break: bool,
}

impl Value {
    fn new(kinds: Kinds) -> Self {
        let (text, ready) = (String::new(), String::new());
        Self {
            kinds,
            text,
            ready,
            begun: false,
            line_break: false,
        }
    }

    fn push(&mut self, c: char) {
        let first = !self.begun;
        self.begun = true;
        if first && self.kinds == Kinds::STRING {
            self.ready.push('"');
        }
        if first && c == '\n' {
            return;
        }
        if std::mem::take(&mut self.line_break) {
            self.append('\n');
        }
        if c == '\n' {
            self.line_break = true;
        } else {
            self.append(c);
        }
    }

    fn append(&mut self, c: char) {
        if self.kinds == Kinds::STRING {
            push_escaped(c, &mut self.ready);
        } else {
            self.text.push(c);
        }
    }

    /// Returns the rest of the JSON text.
    fn end(&mut self, max_depth: usize) -> String {
        if self.kinds != Kinds::STRING {
            return from_text(&self.text, self.kinds, max_depth);
        }
        String::from(if self.begun { "\"" } else { "\"\"" })
    }
}

/// A name without the quotes around it.
fn without_quotes(name: &str) -> &str {
    for quote in ['"', '\''] {
        if let Some(inner) = name
            .strip_prefix(quote)
            .and_then(|name| name.strip_suffix(quote))
        {
            return inner;
        }
    }
    name
}
