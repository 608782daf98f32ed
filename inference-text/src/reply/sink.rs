//! Collects events, joins adjacent events of one kind, and strips white space at boundaries.

use super::{Diagnosis, Event, Family, Fault, IdGenerator, IdStyle, Limits, Tools};
use std::sync::Arc;

/// Maximum number of bytes of withheld white space. Further white space is treated as text, which
/// bounds memory.
const MAX_HELD_SPACE: usize = 4096;

/// White space of one kind of text. It is withheld until the next text is known.
#[derive(Clone, Debug, Default)]
struct Space {
    held: String,
    /// Whether to drop the white space, because it follows a boundary.
    strip: bool,
    /// Whether something other than white space came after the boundary.
    seen: bool,
}

impl Space {
    fn boundary(&mut self) {
        self.held.clear();
        self.strip = true;
        self.seen = false;
    }

    /// Outputs the withheld white space and then `c`.
    fn push(&mut self, c: char, out: &mut dyn FnMut(&str)) {
        if c.is_whitespace() {
            self.held.push(c);
            if self.held.len() <= MAX_HELD_SPACE {
                return;
            }
            out(&self.held);
            self.held.clear();
            self.seen = true;
            return;
        }
        if !self.held.is_empty() {
            if self.seen || !self.strip {
                out(&self.held);
            }
            self.held.clear();
        }
        self.seen = true;
        out(c.encode_utf8(&mut [0; 4]));
    }
}

/// Collects the events of a parser. Also contains the request's tools, the id generator and the
/// limits.
pub(super) struct Sink {
    events: Vec<Event>,
    content: Space,
    /// White space of the content before the open call. If the call is malformed, it is output.
    before_call: Space,
    reasoning: Space,
    next_index: usize,
    open: Option<usize>,
    /// Whether a call ended since the flag was last taken.
    ended: bool,
    /// The number of bytes of the reply that were read.
    pub(super) offset: usize,
    pub(super) family: Family,
    pub(super) tools: Arc<Tools>,
    pub(super) limits: Limits,
    ids: Box<dyn IdGenerator>,
}

impl Sink {
    pub(super) fn new(
        family: Family,
        tools: Arc<Tools>,
        limits: Limits,
        ids: Box<dyn IdGenerator>,
    ) -> Self {
        Self {
            events: Vec::new(),
            content: Space::default(),
            before_call: Space::default(),
            reasoning: Space {
                strip: true,
                ..Space::default()
            },
            next_index: 0,
            open: None,
            ended: false,
            offset: 0,
            family,
            tools,
            limits,
            ids,
        }
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn content(&mut self, c: char) {
        let events = &mut self.events;
        self.content.push(c, &mut |text| match events.last_mut() {
            Some(Event::Content(last)) => last.push_str(text),
            _ => events.push(Event::Content(text.to_owned())),
        });
    }

    pub(super) fn reasoning(&mut self, c: char) {
        let events = &mut self.events;
        self.reasoning.push(c, &mut |text| match events.last_mut() {
            Some(Event::Reasoning(last)) => last.push_str(text),
            _ => events.push(Event::Reasoning(text.to_owned())),
        });
    }

    /// Marks a boundary, where reasoning or a call starts or ends. White space on both sides is
    /// dropped.
    pub(super) fn boundary(&mut self) {
        self.content.boundary();
        self.reasoning.boundary();
    }

    /// Adds a newline between two messages of content.
    pub(super) fn separate_content(&mut self) {
        self.content.strip = false;
        self.content.held.push('\n');
    }

    /// Adds a newline between two messages of reasoning.
    pub(super) fn separate_reasoning(&mut self) {
        self.reasoning.strip = false;
        self.reasoning.held.push('\n');
    }

    /// Handles the end of the reply. White space after content belongs to the content.
    pub(super) fn end_of_reply(&mut self) {
        let pending = std::mem::take(&mut self.content.held);
        if pending.is_empty() || (self.content.strip && !self.content.seen) {
            return;
        }
        match self.events.last_mut() {
            Some(Event::Content(last)) => last.push_str(&pending),
            _ => self.events.push(Event::Content(pending)),
        }
    }

    /// Checks a function's name.
    pub(super) fn check_name(&self, name: &str) -> Result<(), Fault> {
        if name.is_empty() {
            return Err(Fault::MissingName);
        }
        let usable = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
        if name.len() > self.limits.max_name_bytes || !name.chars().all(usable) {
            return Err(Fault::BadName);
        }
        Ok(())
    }

    /// Starts a call. If there is no id, one is generated.
    pub(super) fn start(&mut self, name: &str, id: Option<String>) -> Result<(), Fault> {
        self.check_name(name)?;
        let style = self.family.id_style();
        let id = match id {
            Some(id) if style == IdStyle::Nine && !is_nine(&id) => self.ids.next_id(style),
            Some(id) if !id.is_empty() => id,
            _ => self.ids.next_id(style),
        };
        self.before_call = self.content.clone();
        self.boundary();
        let index = self.next_index;
        self.next_index += 1;
        self.open = Some(index);
        self.events.push(Event::CallStarted {
            index,
            id,
            name: name.to_owned(),
        });
        Ok(())
    }

    /// Whether a call is open.
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Appends to the arguments of the open call.
    pub(super) fn arguments(&mut self, text: &str) {
        let Some(index) = self.open else { return };
        if text.is_empty() {
            return;
        }
        match self.events.last_mut() {
            Some(Event::ArgumentsDelta { index: last, delta }) if *last == index => {
                delta.push_str(text);
            }
            _ => self.events.push(Event::ArgumentsDelta {
                index,
                delta: text.to_owned(),
            }),
        }
    }

    /// Ends the open call.
    pub(super) fn end(&mut self) {
        if let Some(index) = self.open.take() {
            self.events.push(Event::CallEnded { index });
            self.ended = true;
            self.boundary();
        }
    }

    /// Whether a call has ended since the last call of this function.
    pub(super) fn take_ended(&mut self) -> bool {
        std::mem::take(&mut self.ended)
    }

    /// Reports a fault. If a call is open, it gets no end event.
    pub(super) fn malformed(&mut self, fault: Fault) {
        let index = self.open.take();
        if index.is_some() {
            self.content = std::mem::take(&mut self.before_call);
        }
        let (family, offset) = (self.family, self.offset);
        self.events.push(Event::Malformed(Diagnosis {
            fault,
            family,
            index,
            offset,
        }));
    }

    /// Whether a tool of this name was offered.
    pub(super) fn is_tool(&self, name: &str) -> bool {
        self.tools.get(name).is_some()
    }
}

/// Whether a text is an id that Mistral's templates accept.
fn is_nine(id: &str) -> bool {
    id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric())
}
