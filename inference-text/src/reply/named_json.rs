//! Parses calls whose name precedes JSON arguments.
//!
//! Families: Mistral (`f[CALL_ID]…[ARGS]{…}`), Kimi K2, DeepSeek and GLM-4-0414.

use super::Fault;
use super::engine::{Body, Step};
use super::hold::Hold;
use super::json_calls::JsonCalls;
use super::json_scan::{JsonScan, Progress};
use super::sink::Sink;

/// What follows the end of a name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Id,
    /// DeepSeek V3 writes a type before the name; later models do not.
    TypeOrName,
    Arguments,
    /// The end marker of the name is the first character of the arguments.
    Brace,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Syntax {
    Mistral,
    Kimi,
    DeepSeek,
    Glm,
}

impl Syntax {
    fn ends(self) -> (&'static [&'static str], &'static [Next]) {
        match self {
            Self::Mistral => (
                &["[CALL_ID]", "[ARGS]", "{"],
                &[Next::Id, Next::Arguments, Next::Brace],
            ),
            Self::Kimi => (&["<|tool_call_argument_begin|>"], &[Next::Arguments]),
            Self::DeepSeek => (
                &["<｜tool▁sep｜>", "\n```json\n"],
                &[Next::TypeOrName, Next::Arguments],
            ),
            Self::Glm => (&["\n"], &[Next::Arguments]),
        }
    }
}

enum State {
    /// At the start. Mistral's older models write an array of objects here.
    Start,
    Array(JsonCalls),
    Name,
    Id,
    Arguments,
}

/// Reads one call.
pub(super) struct NamedJson {
    syntax: Syntax,
    state: State,
    hold: Hold,
    name: String,
    id: String,
    scan: JsonScan,
    out: String,
    started: bool,
    tentative: bool,
}

impl NamedJson {
    fn boxed(syntax: Syntax, tentative: bool) -> Box<dyn Body> {
        Box::new(Self {
            syntax,
            state: State::Start,
            hold: Hold::default(),
            name: String::new(),
            id: String::new(),
            scan: JsonScan::new(0),
            out: String::new(),
            started: false,
            tentative,
        })
    }

    /// The body after `[TOOL_CALLS]`.
    pub(super) fn mistral(tentative: bool) -> Box<dyn Body> {
        Self::boxed(Syntax::Mistral, tentative)
    }

    /// The body after `<|tool_call_begin|>`.
    pub(super) fn kimi(tentative: bool) -> Box<dyn Body> {
        Self::boxed(Syntax::Kimi, tentative)
    }

    /// The body after `<｜tool▁call▁begin｜>`.
    pub(super) fn deepseek(tentative: bool) -> Box<dyn Body> {
        Self::boxed(Syntax::DeepSeek, tentative)
    }

    /// The body at the start of a reply: a name and a newline.
    pub(super) fn glm(tentative: bool) -> Box<dyn Body> {
        Self::boxed(Syntax::Glm, tentative)
    }

    fn name(&mut self, c: char, sink: &mut Sink) -> Step {
        let (ends, next) = self.syntax.ends();
        let name = &mut self.name;
        let Some(end) = self.hold.push(c, ends, &mut |c| name.push(c)) else {
            let begins = |tool: &super::Tool| tool.name.starts_with(self.name.as_str());
            let by_tool = self.tentative && self.syntax == Syntax::Glm;
            let too_long = self.name.len() > sink.limits.max_name_bytes;
            return if too_long || by_tool && !sink.tools.iter().any(begins) {
                Step::Fail(Fault::BadName)
            } else {
                Step::More
            };
        };
        if next[end] == Next::TypeOrName && self.name.trim() == "function" {
            self.name.clear();
            return Step::More;
        }
        if self.syntax == Syntax::Kimi {
            let id = self.name.trim().to_owned();
            self.name = kimi_name(&id).to_owned();
            self.id = id;
        } else {
            self.name = self.name.trim().to_owned();
        }
        if let Err(fault) = sink.check_name(&self.name) {
            return Step::Fail(fault);
        }
        if self.tentative && self.syntax == Syntax::Glm && !sink.is_tool(&self.name) {
            return Step::Fail(Fault::BadName);
        }
        self.scan = JsonScan::new(sink.limits.max_depth);
        match next[end] {
            Next::Id => self.state = State::Id,
            Next::Arguments | Next::TypeOrName => self.state = State::Arguments,
            Next::Brace => {
                self.state = State::Arguments;
                return self.arguments(c, sink);
            }
        }
        Step::More
    }

    fn arguments(&mut self, c: char, sink: &mut Sink) -> Step {
        if self.scan.is_fresh() && !c.is_whitespace() {
            if c != '{' {
                return Step::Fail(Fault::ArgumentsNotObject);
            }
            let id = Some(self.id.trim().to_owned()).filter(|id| !id.is_empty());
            if let Err(fault) = sink.start(&self.name, id) {
                return Step::Fail(fault);
            }
            self.started = true;
        }
        self.out.clear();
        match self.scan.step(c, &mut self.out) {
            Err(fault) => Step::Fail(fault),
            Ok(progress) => {
                sink.arguments(&self.out);
                if progress == Progress::More {
                    return Step::More;
                }
                sink.end();
                Step::Done
            }
        }
    }
}

impl Body for NamedJson {
    fn step(&mut self, c: char, sink: &mut Sink) -> Step {
        match &mut self.state {
            State::Start if c.is_whitespace() => Step::More,
            State::Start if c == '[' && self.syntax == Syntax::Mistral => {
                let mut array = JsonCalls::new(false, true);
                let step = array.step(c, sink);
                self.state = State::Array(array);
                step
            }
            State::Start => {
                self.state = State::Name;
                self.name(c, sink)
            }
            State::Array(array) => array.step(c, sink),
            State::Name => self.name(c, sink),
            State::Id => {
                let id = &mut self.id;
                if self
                    .hold
                    .push(c, &["[ARGS]"], &mut |c| id.push(c))
                    .is_some()
                {
                    self.state = State::Arguments;
                } else if self.id.len() > sink.limits.max_name_bytes {
                    return Step::Fail(Fault::Syntax);
                }
                Step::More
            }
            State::Arguments => self.arguments(c, sink),
        }
    }

    fn finish(&mut self, sink: &mut Sink) -> Result<(), Fault> {
        match &mut self.state {
            State::Array(array) => array.finish(sink),
            _ => Err(Fault::Unclosed),
        }
    }
}

/// The name in an id of Kimi K2: `get_time` in `functions.get_time:0`.
fn kimi_name(id: &str) -> &str {
    let name = id.strip_prefix("functions.").unwrap_or(id);
    match name.rsplit_once(':') {
        Some((name, count)) if count.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => name,
    }
}
