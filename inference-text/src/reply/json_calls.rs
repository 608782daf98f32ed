//! Parses calls that are JSON objects with a name: `{"name": …, "arguments": {…}}`.
//!
//! The families are Hermes and similar ones, Llama, Mistral Nemo, Command-R and Granite 3. The text
//! is one object or an array of objects. `tool_name`, `parameters` and `tool_call_id` are also
//! accepted.

use super::Fault;
use super::engine::{Body, Step};
use super::json_scan::{JsonScan, Progress, is_space, normalized, unquoted};
use super::sink::Sink;

/// One call or an array of calls.
pub(super) struct JsonCalls {
    at: At,
    in_array: bool,
    /// Whether a call starts only when its id is known or at its end, because the id is the last
    /// field.
    id_last: bool,
    tentative: bool,
}

enum At {
    Start,
    Item { first: bool },
    Object(Box<Object>),
    AfterObject,
}

impl JsonCalls {
    pub(super) fn new(tentative: bool, id_last: bool) -> Self {
        Self {
            at: At::Start,
            in_array: false,
            id_last,
            tentative,
        }
    }

    pub(super) fn boxed(tentative: bool) -> Box<dyn Body> {
        Box::new(Self::new(tentative, false))
    }

    fn object(&self) -> At {
        At::Object(Box::new(Object::new(self.tentative, self.id_last)))
    }
}

impl Body for JsonCalls {
    fn step(&mut self, c: char, sink: &mut Sink) -> Step {
        match &mut self.at {
            At::Start | At::Item { .. } | At::AfterObject if c.is_whitespace() => Step::More,
            At::Start if c == '{' => {
                self.at = self.object();
                Step::More
            }
            At::Start if c == '[' && !self.tentative => {
                self.in_array = true;
                self.at = At::Item { first: true };
                Step::More
            }
            At::Item { .. } if c == '{' => {
                self.at = self.object();
                Step::More
            }
            At::AfterObject if c == ',' => {
                self.at = At::Item { first: false };
                Step::More
            }
            At::AfterObject if c == ']' => Step::Done,
            At::Object(object) => match object.step(c, sink) {
                Ok(false) => Step::More,
                Ok(true) if self.in_array => {
                    self.at = At::AfterObject;
                    Step::More
                }
                Ok(true) => Step::Done,
                Err(fault) => Step::Fail(fault),
            },
            _ => Step::Fail(Fault::Syntax),
        }
    }

    fn finish(&mut self, _: &mut Sink) -> Result<(), Fault> {
        match self.at {
            At::AfterObject | At::Item { first: false } => Ok(()),
            _ => Err(Fault::Unclosed),
        }
    }
}

/// Reads one call object.
struct Object {
    state: State,
    scan: JsonScan,
    /// Text of the value that is being read.
    value: String,
    max_depth: usize,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that precede the name, kept until the call can start.
    arguments: Option<String>,
    started: bool,
    id_last: bool,
    tentative: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    KeyOrEnd,
    Key,
    Colon,
    Value(Field),
    CommaOrEnd,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    Name,
    Id,
    Arguments,
    /// The arguments are JSON inside a JSON string.
    ArgumentsText,
    Other,
}

impl Object {
    fn new(tentative: bool, id_last: bool) -> Self {
        Self {
            state: State::KeyOrEnd,
            scan: JsonScan::new(1),
            value: String::new(),
            max_depth: 0,
            name: None,
            id: None,
            arguments: None,
            started: false,
            id_last,
            tentative,
        }
    }

    /// Reads `c`. Returns true at the end of the object.
    fn step(&mut self, c: char, sink: &mut Sink) -> Result<bool, Fault> {
        self.max_depth = sink.limits.max_depth;
        match self.state {
            State::KeyOrEnd | State::Colon | State::CommaOrEnd if is_space(c) => {}
            State::KeyOrEnd | State::CommaOrEnd if c == '}' => {
                self.end(sink)?;
                return Ok(true);
            }
            State::KeyOrEnd if c == '"' => {
                self.begin_value();
                self.state = State::Key;
                self.scan.step(c, &mut self.value)?;
            }
            State::Key => {
                if self.scan.step(c, &mut self.value)? == Progress::Done {
                    self.state = State::Colon;
                } else if self.value.len() > sink.limits.max_name_bytes {
                    return Err(Fault::TooLarge);
                }
            }
            State::Colon if c == ':' => {
                let key = unquoted(&self.value).ok_or(Fault::Syntax)?;
                let field = match key.as_str() {
                    "name" | "tool_name" => Field::Name,
                    "id" | "tool_call_id" => Field::Id,
                    "arguments" | "parameters" => Field::Arguments,
                    _ => Field::Other,
                };
                if self.tentative && !self.started && field == Field::Other && key != "type" {
                    return Err(Fault::Syntax);
                }
                self.begin_value();
                self.state = State::Value(field);
            }
            State::Value(field) => return self.value(c, field, sink),
            State::CommaOrEnd if c == ',' => self.state = State::KeyOrEnd,
            _ => return Err(Fault::Syntax),
        }
        Ok(false)
    }

    fn begin_value(&mut self) {
        self.scan = JsonScan::new(self.max_depth);
        self.value.clear();
    }

    /// Reads a character of a value. Returns true at the end of the object.
    fn value(&mut self, c: char, field: Field, sink: &mut Sink) -> Result<bool, Fault> {
        let mut field = field;
        if self.scan.is_fresh() && !is_space(c) {
            match (field, c) {
                (Field::Arguments, '{') => {
                    if self.started || self.arguments.is_some() {
                        return Err(Fault::Syntax);
                    }
                    if self.id.is_some() || !self.id_last {
                        self.start(sink)?;
                    }
                }
                (Field::Arguments, '"') => field = Field::ArgumentsText,
                // Null arguments count as absent.
                (Field::Arguments, 'n') => field = Field::Other,
                (Field::Arguments, _) => return Err(Fault::ArgumentsNotObject),
                (Field::Name, c) if c != '"' => return Err(Fault::BadName),
                _ => {}
            }
            self.state = State::Value(field);
        }
        if field == Field::Other {
            // The value of an unused field is checked, but not stored.
            self.value.clear();
        }
        let progress = self.scan.step(c, &mut self.value)?;
        if field == Field::Arguments && self.started {
            sink.arguments(&self.value);
            self.value.clear();
        }
        if progress == Progress::More {
            return Ok(false);
        }
        self.state = State::CommaOrEnd;
        self.take_value(field, sink)?;
        // A number ends before the next comma, bracket or white space, so that character is read
        // again.
        if progress == Progress::DoneBefore {
            self.step(c, sink)
        } else {
            Ok(false)
        }
    }

    fn take_value(&mut self, field: Field, sink: &mut Sink) -> Result<(), Fault> {
        match field {
            Field::Name => {
                let name = unquoted(&self.value).ok_or(Fault::BadName)?;
                sink.check_name(&name)?;
                if self.tentative && !sink.is_tool(&name) {
                    return Err(Fault::BadName);
                }
                self.name = Some(name);
            }
            Field::Id => {
                let id = unquoted(&self.value).unwrap_or_else(|| self.value.clone());
                self.id = Some(id).filter(|id| id.len() <= sink.limits.max_name_bytes);
            }
            Field::Arguments if self.started => {}
            Field::Arguments => self.arguments = Some(std::mem::take(&mut self.value)),
            Field::ArgumentsText => {
                let text = unquoted(&self.value).ok_or(Fault::Syntax)?;
                let json = if text.trim().is_empty() {
                    Some(String::from("{}"))
                } else {
                    normalized(&text, self.max_depth).filter(|json| json.starts_with('{'))
                };
                self.arguments = Some(json.ok_or(Fault::ArgumentsNotObject)?);
            }
            Field::Other => {}
        }
        Ok(())
    }

    /// Starts the call, if its name is known.
    fn start(&mut self, sink: &mut Sink) -> Result<(), Fault> {
        if let Some(name) = &self.name {
            sink.start(name, self.id.take())?;
            self.started = true;
        }
        Ok(())
    }

    fn end(&mut self, sink: &mut Sink) -> Result<(), Fault> {
        if !self.started {
            if self.name.is_none() {
                return Err(Fault::MissingName);
            }
            if self.tentative && self.arguments.is_none() {
                return Err(Fault::Syntax);
            }
            self.start(sink)?;
            sink.arguments(self.arguments.as_deref().unwrap_or("{}"));
        }
        sink.end();
        Ok(())
    }
}
