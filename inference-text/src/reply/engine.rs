//! The parser of all families whose replies are text with markers.
//!
//! A [`Spec`] lists a family's markers. A [`Body`] parses one call, or one list of calls, after an
//! opening marker. gpt-oss has messages instead, and a separate parser (`harmony`).

use super::hold::Hold;
use super::sink::Sink;
use super::{Event, Fault, ParserOptions, Piece, ReasoningTags, ReplyParser};

/// The effect of a character on a body.
pub(super) enum Step {
    /// The character belongs to the body, which continues.
    More,
    /// The character is the last one of the body.
    Done,
    /// The body ended before this character, which is read again.
    DoneBefore,
    /// The character is a syntax error. It is read again as content.
    Fail(Fault),
}

impl From<Fault> for Step {
    fn from(fault: Fault) -> Self {
        Self::Fail(fault)
    }
}

/// Parses the text of calls after an opening marker.
pub(super) trait Body: Send {
    /// Reads one character.
    fn step(&mut self, c: char, sink: &mut Sink) -> Step;

    /// Handles the end of the reply inside the body. Returns `Ok` if all calls are complete.
    fn finish(&mut self, sink: &mut Sink) -> Result<(), Fault>;
}

/// Where a marker is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Anywhere in content.
    Always,
    /// Only before any content, directly after the start of the reply, after reasoning or after a
    /// call.
    Fresh,
    /// Directly after a call, ignoring white space.
    AfterCall,
    /// At the end of a section that started with a dropped `Fresh` marker.
    Wrapped,
}

/// The effect of a marker in content.
#[derive(Clone, Copy)]
pub(super) enum Action {
    /// Starts a body.
    Call(fn(tentative: bool) -> Box<dyn Body>),
    /// Removes the marker.
    Drop,
    /// Removes the marker, and treats the following text as the start of a reply.
    Restart,
}

/// A marker in content.
#[derive(Clone, Copy)]
pub(super) struct Marker {
    pub(super) text: &'static str,
    pub(super) when: When,
    pub(super) action: Action,
}

/// The body of calls without a marker. It begins with a certain character at the start of the
/// reply. The parser tries it only if tools are offered. The first call must name one of these
/// tools.
#[derive(Clone, Copy)]
pub(super) struct Unmarked {
    /// Whether a body may begin with this character.
    pub(super) begins: fn(c: char, sink: &Sink) -> bool,
    pub(super) body: fn(tentative: bool) -> Box<dyn Body>,
}

/// The syntax of a family.
#[derive(Clone, Default)]
pub(super) struct Spec {
    pub(super) markers: Vec<Marker>,
    pub(super) unmarked: Option<Unmarked>,
    /// Markers of calls that also end reasoning.
    pub(super) breaks: &'static [&'static str],
    /// Markers inside bodies. A special token with such a text must not be dropped.
    pub(super) inner: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Fresh,
    AfterCall,
    Text,
}

enum State {
    Content,
    /// After the opening tag of reasoning. The string is the part of the label that was read so
    /// far.
    Label(String),
    Reasoning,
    Body(Box<dyn Body>),
}

/// What a marker means in the current state.
#[derive(Clone, Copy)]
enum Meaning {
    Open,
    Close,
    Marker(Marker),
}

/// The parser of a [`Spec`].
pub(super) struct Engine {
    sink: Sink,
    state: State,
    place: Place,
    hold: Hold,
    spec: Spec,
    reasoning: Option<ReasoningTags>,
    in_content: (Vec<&'static str>, Vec<Meaning>),
    in_reasoning: (Vec<&'static str>, Vec<Meaning>),
    /// Text of the body since its opening marker or since its last complete call.
    raw: String,
    /// Whether the body may turn out not to be a call. False after its first complete call.
    tentative: bool,
    /// Whether a marker at the start was dropped. Its closing counterpart must then be dropped,
    /// too.
    wrapped: bool,
    /// Whether the body started inside reasoning.
    from_reasoning: bool,
    finished: bool,
}

impl Engine {
    pub(super) fn new(
        spec: Spec,
        reasoning: Option<ReasoningTags>,
        family: super::Family,
        options: ParserOptions,
    ) -> Self {
        let mut in_content: (Vec<_>, Vec<_>) = spec
            .markers
            .iter()
            .map(|marker| (marker.text, Meaning::Marker(*marker)))
            .unzip();
        let mut in_reasoning: (Vec<_>, Vec<_>) = spec
            .markers
            .iter()
            .filter(|marker| spec.breaks.contains(&marker.text))
            .map(|marker| (marker.text, Meaning::Marker(*marker)))
            .unzip();
        if let Some(tags) = reasoning {
            in_content.0.push(tags.open);
            in_content.1.push(Meaning::Open);
            in_reasoning.0.push(tags.close);
            in_reasoning.1.push(Meaning::Close);
            if !spec.breaks.is_empty() {
                // The call ended the reasoning. The closing tag may still follow, and must not
                // become content.
                in_content.0.push(tags.close);
                let action = Action::Drop;
                let when = When::AfterCall;
                in_content.1.push(Meaning::Marker(Marker {
                    text: tags.close,
                    when,
                    action,
                }));
            }
        }
        let mut engine = Self {
            sink: Sink::new(family, options.tools, options.limits, options.ids),
            state: State::Content,
            place: Place::Fresh,
            hold: Hold::default(),
            spec,
            reasoning,
            in_content,
            in_reasoning,
            raw: String::new(),
            tentative: false,
            wrapped: false,
            from_reasoning: false,
            finished: false,
        };
        let open = options.reasoning_open;
        let by_prompt = |tags: ReasoningTags| tags.is_open_at_end_of(&options.prompt_tail);
        if reasoning.is_some_and(|tags| open.unwrap_or_else(|| by_prompt(tags))) {
            engine.open_reasoning();
        }
        engine
    }

    fn open_reasoning(&mut self) {
        self.sink.boundary();
        self.state = match self.reasoning {
            Some(ReasoningTags { label: Some(_), .. }) => State::Label(String::new()),
            _ => State::Reasoning,
        };
    }

    /// Whether a special token of this text is part of the format.
    fn knows(&self, text: &str) -> bool {
        let text = text.trim();
        self.in_content.0.contains(&text)
            || self.in_reasoning.0.contains(&text)
            || self.spec.inner.contains(&text)
    }

    fn push(&mut self, c: char) {
        // A character is read at most three times: it may be read again after a label and after a
        // body.
        let mut again = true;
        while again {
            again = match &mut self.state {
                State::Content => self.push_content(c),
                State::Label(_) => self.push_label(c),
                State::Reasoning => {
                    self.push_reasoning(c);
                    false
                }
                State::Body(_) => self.push_body(c),
            };
        }
        self.sink.offset += c.len_utf8();
    }

    fn push_content(&mut self, c: char) -> bool {
        if self.hold.is_empty()
            && self.place != Place::Text
            && !self.sink.tools.is_empty()
            && let Some(unmarked) = self.spec.unmarked
            && (unmarked.begins)(c, &self.sink)
        {
            self.begin(unmarked.body, true, "");
            return true;
        }
        if self.hold.passes(c, &self.in_content.0) {
            self.content(c);
            return false;
        }
        let mut text = String::new();
        let marker_index = self.hold.push(c, &self.in_content.0, &mut |c| text.push(c));
        text.chars().for_each(|c| self.content(c));
        let Some(marker_index) = marker_index else {
            return false;
        };
        let meaning = self.in_content.1[marker_index];
        let (when, text) = match meaning {
            Meaning::Open | Meaning::Close => {
                let anywhere = self.reasoning.is_some_and(|tags| tags.anywhere);
                (
                    if anywhere { When::Always } else { When::Fresh },
                    self.in_content.0[marker_index],
                )
            }
            Meaning::Marker(marker) => (marker.when, marker.text),
        };
        let counts = match when {
            When::Always => true,
            When::Fresh => self.place != Place::Text,
            When::AfterCall => self.place == Place::AfterCall,
            When::Wrapped => self.wrapped,
        };
        if !counts {
            for c in text.chars() {
                self.content(c);
            }
            return false;
        }
        match meaning {
            Meaning::Open | Meaning::Close => self.open_reasoning(),
            Meaning::Marker(Marker {
                action: Action::Drop,
                ..
            }) => {
                self.wrapped |= when == When::Fresh;
                self.sink.boundary();
            }
            Meaning::Marker(Marker {
                action: Action::Restart,
                ..
            }) => {
                self.sink.boundary();
                self.place = Place::Fresh;
            }
            Meaning::Marker(Marker {
                action: Action::Call(body),
                ..
            }) => {
                self.begin(body, false, text);
            }
        }
        false
    }

    fn content(&mut self, c: char) {
        if !c.is_whitespace() {
            self.place = Place::Text;
        }
        self.sink.content(c);
    }

    fn push_label(&mut self, c: char) -> bool {
        let State::Label(read) = &mut self.state else {
            return false;
        };
        let label = self
            .reasoning
            .and_then(|tags| tags.label)
            .unwrap_or_default();
        read.push(c);
        if label == read.as_str() {
            self.state = State::Reasoning;
        } else if !label.starts_with(read.as_str()) {
            read.pop();
            let mut read = std::mem::take(read);
            let close = self.reasoning.map(|tags| tags.close).unwrap_or_default();
            if read == label.trim_end() && close.starts_with(c) {
                // The reasoning is closed before the label's newline.
                read.clear();
            }
            self.state = State::Reasoning;
            // The text is not a label, because no closing tag starts like a label.
            read.chars().for_each(|c| self.sink.reasoning(c));
            return true;
        }
        false
    }

    fn push_reasoning(&mut self, c: char) {
        let sink = &mut self.sink;
        let marker = self
            .hold
            .push(c, &self.in_reasoning.0, &mut |c| sink.reasoning(c));
        let Some(marker) = marker else { return };
        match self.in_reasoning.1[marker] {
            Meaning::Marker(Marker {
                action: Action::Call(body),
                text,
                ..
            }) => {
                self.begin(body, true, text);
                self.from_reasoning = true;
            }
            Meaning::Open | Meaning::Close | Meaning::Marker(_) => {
                self.sink.boundary();
                self.state = State::Content;
                self.place = Place::Fresh;
            }
        }
    }

    fn begin(&mut self, body: fn(bool) -> Box<dyn Body>, tentative: bool, marker: &str) {
        self.state = State::Body(body(tentative));
        self.tentative = tentative;
        self.from_reasoning = false;
        self.raw.clear();
        self.raw.push_str(marker);
        self.sink.take_ended();
    }

    fn push_body(&mut self, c: char) -> bool {
        let State::Body(body) = &mut self.state else {
            return false;
        };
        let step = body.step(c, &mut self.sink);
        if self.sink.is_open() {
            self.tentative = false;
        }
        match step {
            Step::More if self.raw.len() + c.len_utf8() > self.sink.limits.max_call_bytes => {
                self.fail(Fault::TooLarge);
                true
            }
            Step::More => {
                self.raw.push(c);
                if self.sink.take_ended() {
                    // The following text may be malformed, but the preceding call is complete.
                    self.raw.clear();
                    self.tentative = false;
                }
                false
            }
            Step::Done | Step::DoneBefore => {
                self.sink.boundary();
                self.sink.take_ended();
                self.raw.clear();
                self.state = State::Content;
                self.place = Place::AfterCall;
                matches!(step, Step::DoneBefore)
            }
            Step::Fail(fault) => {
                self.fail(fault);
                true
            }
        }
    }

    /// Returns the text of the body as content.
    fn fail(&mut self, fault: Fault) {
        if self.sink.take_ended() {
            self.raw.clear();
        }
        if !self.tentative {
            self.sink.malformed(fault);
        }
        let raw = std::mem::take(&mut self.raw);
        if self.tentative && self.from_reasoning {
            self.state = State::Reasoning;
            raw.chars().for_each(|c| self.sink.reasoning(c));
        } else {
            self.state = State::Content;
            raw.chars().for_each(|c| self.sink.content(c));
            // This is set even if no character was read, because this character must not start the
            // same body again.
            self.place = Place::Text;
        }
    }
}

impl ReplyParser for Engine {
    fn feed(&mut self, piece: Piece<'_>) -> Vec<Event> {
        if !self.finished && (!piece.special || self.knows(piece.text)) {
            piece.text.chars().for_each(|c| self.push(c));
        }
        self.sink.take()
    }

    fn finish(&mut self) -> Vec<Event> {
        if self.finished {
            return Vec::new();
        }
        self.finished = true;
        let pending = self.hold.take();
        match &mut self.state {
            State::Content => pending.chars().for_each(|c| self.content(c)),
            State::Reasoning => pending.chars().for_each(|c| self.sink.reasoning(c)),
            State::Label(read) => {
                let read = std::mem::take(read);
                read.chars().for_each(|c| self.sink.reasoning(c));
            }
            State::Body(body) => {
                if let Err(fault) = body.finish(&mut self.sink) {
                    if self.sink.is_open() {
                        self.tentative = false;
                    }
                    self.fail(fault);
                }
            }
        }
        self.sink.end_of_reply();
        self.sink.take()
    }

    fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Label(_) | State::Reasoning)
    }
}

/// The parser of [`super::Format::none`]: all text is content.
pub(super) struct Plain;

impl ReplyParser for Plain {
    fn feed(&mut self, piece: Piece<'_>) -> Vec<Event> {
        if piece.special || piece.text.is_empty() {
            return Vec::new();
        }
        vec![Event::Content(piece.text.to_owned())]
    }

    fn finish(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn in_reasoning(&self) -> bool {
        false
    }
}
