//! The parser for gpt-oss's harmony format. A reply is a sequence of messages with headers.
//!
//! For example, `<|start|>assistant<|channel|>commentary to=functions.f<|message|>{…}<|call|>`. The
//! channel `analysis` is reasoning. `final`, and `commentary` without a recipient, are content. A
//! message with the recipient `functions.f` is a call, whatever its channel. A line break separates
//! messages of one kind.

use super::hold::Hold;
use super::json_scan::{JsonScan, Progress};
use super::sink::Sink;
use super::{Event, Family, Fault, ParserOptions, Piece, ReplyParser};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
const MARKERS: &[&str] = &[
    START,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    "<|end|>",
    "<|return|>",
    "<|call|>",
];

/// Maximum length of a header in bytes. Longer text is not a header.
const MAX_HEADER: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Reasoning,
    Call,
}

enum State {
    /// In a header, with the header's text so far, markers included.
    Header(String),
    Body {
        kind: Kind,
        empty: bool,
    },
    /// After the end of a message.
    Between,
}

/// Reads replies of gpt-oss.
pub(super) struct Harmony {
    sink: Sink,
    state: State,
    hold: Hold,
    scan: JsonScan,
    /// The text of the call since its header.
    raw: String,
    out: String,
    /// Number of header bytes that are in the prompt, not in the reply.
    in_prompt: usize,
    wrote_content: bool,
    wrote_reasoning: bool,
    finished: bool,
}

impl Harmony {
    pub(super) fn new(options: ParserOptions) -> Self {
        let mut parser = Self {
            sink: Sink::new(Family::Harmony, options.tools, options.limits, options.ids),
            state: State::Header(String::new()),
            hold: Hold::default(),
            scan: JsonScan::new(0),
            raw: String::new(),
            out: String::new(),
            in_prompt: 0,
            wrote_content: false,
            wrote_reasoning: false,
            finished: false,
        };
        // The reply's first header may start in the prompt.
        if let Some((_, header)) = options.prompt_tail.rsplit_once(START) {
            header.chars().for_each(|c| parser.push(c));
            parser.sink.take();
            parser.sink.offset = 0;
            if let State::Header(header) = &parser.state {
                parser.in_prompt = header.len();
            }
        }
        if let Some(open) = options.reasoning_open
            && open != parser.in_reasoning()
        {
            let kind = if open { Kind::Reasoning } else { Kind::Content };
            parser.state = State::Body { kind, empty: true };
        }
        parser
    }

    fn push(&mut self, c: char) {
        let mut text = String::new();
        let marker = if self.hold.passes(c, MARKERS) {
            text.push(c);
            None
        } else {
            self.hold.push(c, MARKERS, &mut |c| text.push(c))
        };
        text.chars().for_each(|c| self.text(c));
        if let Some(marker) = marker {
            self.marker(MARKERS[marker]);
        }
        self.sink.offset += c.len_utf8();
    }

    fn text(&mut self, c: char) {
        match &mut self.state {
            State::Header(header) => {
                header.push(c);
                if header.len() > MAX_HEADER || !may_be_header(header) {
                    self.bad_header();
                }
            }
            State::Between if c.is_whitespace() => {}
            State::Between => {
                self.state = State::Body {
                    kind: Kind::Content,
                    empty: true,
                };
                self.body(c);
            }
            State::Body { .. } => self.body(c),
        }
    }

    fn marker(&mut self, marker: &str) {
        match (&mut self.state, marker) {
            (State::Header(header), MESSAGE) => {
                let header = std::mem::take(header);
                self.message_begins(&header);
            }
            (State::Header(header), CHANNEL | CONSTRAIN) => header.push_str(marker),
            (State::Header(_), START) => {
                self.in_prompt = 0;
                self.state = State::Header(String::new());
            }
            (State::Header(header), _) => {
                // The message ends before its text starts.
                if !header.trim().is_empty() {
                    self.bad_header();
                }
                self.end_message();
            }
            (State::Body { .. }, CONSTRAIN | MESSAGE) => {
                marker.chars().for_each(|c| self.body(c));
            }
            (_, START | CHANNEL) => {
                // The end marker of the previous message may be missing.
                self.end_message();
                let header = if marker == CHANNEL { marker } else { "" };
                self.state = State::Header(header.to_owned());
            }
            (State::Body { .. }, _) => self.end_message(),
            (State::Between, MESSAGE | CONSTRAIN) => {
                self.state = State::Header(String::new());
                self.marker(marker);
            }
            (State::Between, _) => {}
        }
    }

    fn message_begins(&mut self, header: &str) {
        // If a header occurs twice, its last values apply.
        let channel = words_after(header, CHANNEL).last();
        let kind = if channel == Some("analysis") {
            Kind::Reasoning
        } else {
            Kind::Content
        };
        self.state = State::Body { kind, empty: true };
        let mut recipients = words_after(header, "to=")
            .filter(|to| !matches!(*to, "" | "user" | "assistant"))
            .peekable();
        if recipients.peek().is_none() {
            return;
        }
        let name = recipients.find_map(|to| {
            let tool = || self.sink.tools.get(to).map(|_| to);
            to.strip_prefix("functions.").or_else(tool)
        });
        match name.map(|name| self.sink.start(name, None)) {
            None => self.sink.malformed(Fault::UnknownRecipient),
            Some(Err(fault)) => self.sink.malformed(fault),
            Some(Ok(())) => {
                self.raw = format!("{}{MESSAGE}", self.in_reply(header));
                self.scan = JsonScan::new(self.sink.limits.max_depth);
                self.state = State::Body {
                    kind: Kind::Call,
                    empty: true,
                };
            }
        }
    }

    fn body(&mut self, c: char) {
        let State::Body { kind, empty } = &mut self.state else {
            return;
        };
        match kind {
            Kind::Call => {
                *empty &= c.is_whitespace();
                self.call(c);
            }
            // White space at the start of a message is ignored.
            _ if *empty && c.is_whitespace() => {}
            Kind::Content => {
                if *empty && self.wrote_content {
                    self.sink.separate_content();
                }
                *empty = false;
                self.wrote_content = true;
                self.sink.content(c);
            }
            Kind::Reasoning => {
                if *empty && self.wrote_reasoning {
                    self.sink.separate_reasoning();
                }
                *empty = false;
                self.wrote_reasoning = true;
                self.sink.reasoning(c);
            }
        }
    }

    fn call(&mut self, c: char) {
        self.out.clear();
        let fault = if self.raw.len() + c.len_utf8() > self.sink.limits.max_call_bytes {
            Some(Fault::TooLarge)
        } else if self.scan.is_fresh() && !c.is_whitespace() && c != '{' {
            Some(Fault::ArgumentsNotObject)
        } else {
            match self.scan.step(c, &mut self.out) {
                Ok(Progress::DoneBefore) if !c.is_whitespace() => Some(Fault::Syntax),
                Ok(_) => None,
                Err(fault) => Some(fault),
            }
        };
        self.raw.push(c);
        match fault {
            Some(fault) => self.fail(fault),
            None => self.sink.arguments(&self.out),
        }
    }

    /// Returns the call's text with its header as content. The rest of the message also becomes
    /// content.
    fn fail(&mut self, fault: Fault) {
        self.sink.malformed(fault);
        self.state = State::Body {
            kind: Kind::Content,
            empty: true,
        };
        let raw = std::mem::take(&mut self.raw);
        raw.chars().for_each(|c| self.body(c));
    }

    fn bad_header(&mut self) {
        let State::Header(header) = &mut self.state else {
            return;
        };
        let header = std::mem::take(header);
        let header = self.in_reply(&header).to_owned();
        // A reply without any marker is content, and no fault is reported.
        if header.contains("<|") {
            self.sink.malformed(Fault::BadHeader);
        }
        self.state = State::Body {
            kind: Kind::Content,
            empty: true,
        };
        header.chars().for_each(|c| self.body(c));
    }

    fn end_message(&mut self) {
        self.end_call();
        self.sink.boundary();
        self.in_prompt = 0;
        self.state = State::Between;
    }

    /// Ends the call, if the message is a call.
    fn end_call(&mut self) {
        let State::Body {
            kind: Kind::Call,
            empty,
        } = self.state
        else {
            return;
        };
        if empty {
            self.sink.arguments("{}");
        }
        if empty || self.scan.is_complete() {
            self.sink.end();
            self.raw.clear();
        } else {
            self.fail(Fault::Unclosed);
        }
    }

    /// The part of a header that the model wrote.
    fn in_reply<'a>(&self, header: &'a str) -> &'a str {
        header.get(self.in_prompt..).unwrap_or_default()
    }
}

impl ReplyParser for Harmony {
    fn feed(&mut self, piece: Piece<'_>) -> Vec<Event> {
        if !self.finished && (!piece.special || MARKERS.contains(&piece.text.trim())) {
            piece.text.chars().for_each(|c| self.push(c));
        }
        self.sink.take()
    }

    fn finish(&mut self) -> Vec<Event> {
        if self.finished {
            return Vec::new();
        }
        self.finished = true;
        self.hold.take().chars().for_each(|c| self.text(c));
        match &self.state {
            State::Header(header) if !self.in_reply(header).trim().is_empty() => {
                self.bad_header();
            }
            State::Body {
                kind: Kind::Call, ..
            } => self.end_call(),
            _ => {}
        }
        self.sink.end_of_reply();
        self.sink.take()
    }

    fn in_reasoning(&self) -> bool {
        matches!(
            self.state,
            State::Body {
                kind: Kind::Reasoning,
                ..
            }
        )
    }
}

/// The words that follow each occurrence of a key, up to white space or a marker.
fn words_after<'a>(header: &'a str, key: &str) -> impl Iterator<Item = &'a str> {
    header.split(key).skip(1).map(|rest| {
        let end = |c: char| c.is_whitespace() || c == '<';
        rest.trim_start().split(end).next().unwrap_or_default()
    })
}

/// Whether a text can be a reply's header: it has the role, a recipient, or a marker.
fn may_be_header(header: &str) -> bool {
    let begins = |text: &str, word: &str| word.starts_with(text) || text.starts_with(word);
    let header = header.trim_start();
    let rest = header
        .strip_prefix("assistant")
        .unwrap_or(header)
        .trim_start();
    header.contains("<|") || "assistant".starts_with(header) || begins(rest, "to=")
}
