//! A limit on the number of reasoning tokens. At the limit, the reply is forced to end its
//! reasoning in the model's own format. Then it continues with the answer.

use std::sync::Arc;

use inference::{LogitsProcessor, LogitsProcessorFactory, Result, TextModel};

/// The texts that mark reasoning in a reply format.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningMarks {
    /// The text that begins reasoning.
    pub open: String,
    /// The text that ends reasoning.
    pub close: String,
    /// The text that the reply is forced to write at the limit. It starts with `close`.
    pub ending: String,
    /// Like `ending`, but for reasoning that starts again after the first limit.
    pub last_ending: String,
    /// Whether reasoning may also start after content.
    pub anywhere: bool,
    /// Whether the prompt has already opened the reasoning.
    pub is_open: bool,
}

impl ReasoningMarks {
    /// Marks of reasoning that the reply opens before all content.
    pub fn new(open: impl Into<String>, close: impl Into<String>) -> Self {
        let close = close.into();
        let ending = format!("{close}\n\n");
        Self {
            open: open.into(),
            close,
            last_ending: ending.clone(),
            ending,
            anywhere: false,
            is_open: false,
        }
    }
}

/// Number of last tokens of a reply in which marks are searched.
const TAIL: usize = 32;

/// Limits the reasoning of `model`'s replies to `most` tokens, not counting the marks.
///
/// # Errors
/// If the model's tokenizer cannot encode the marks.
pub(crate) fn bound(
    model: &Arc<dyn TextModel>,
    marks: ReasoningMarks,
    most: usize,
) -> Result<Option<LogitsProcessorFactory>> {
    let Some(tokens) = model.as_token_model() else {
        return Ok(None);
    };
    let open = tokens.encode(&marks.open, false)?;
    let close = tokens.encode(&marks.close, false)?;
    let ending = tokens.encode(&marks.ending, false)?;
    let last_ending = tokens.encode(&marks.last_ending, false)?;
    let (model, marks) = (Arc::clone(model), Arc::new(marks));
    let make = move || Budget {
        model: Arc::clone(&model),
        marks: Arc::clone(&marks),
        open: open.clone(),
        close: close.clone(),
        ending: ending.clone(),
        last_ending: last_ending.clone(),
        most,
        spent: 0,
        seen: 0,
        state: match marks.is_open {
            true => State::Open { from: 0 },
            false => State::Waiting { from: 0 },
        },
    };
    Ok(Some(LogitsProcessorFactory::new(make)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Outside reasoning. `from` is the first token to search for an opening mark.
    Waiting { from: usize },
    /// Inside reasoning, which started at the token `from`.
    Open { from: usize },
    /// The reply has written this number of the forced ending's tokens.
    Ending { said: usize },
    /// No further reasoning can start.
    Over,
}

struct Budget {
    model: Arc<dyn TextModel>,
    marks: Arc<ReasoningMarks>,
    open: Vec<u32>,
    close: Vec<u32>,
    /// The tokens of the ending that the next reasoning is forced to write.
    ending: Vec<u32>,
    last_ending: Vec<u32>,
    /// Maximum number of reasoning tokens, and the number so far.
    most: usize,
    spent: usize,
    /// Number of reply tokens read so far.
    seen: usize,
    state: State,
}

impl Budget {
    /// Whether these tokens end with a mark. The mark may be separate tokens or part of the text,
    /// because a tokenizer may merge a part of the mark with adjacent text.
    fn ends_with(&self, tokens: &[u32], ids: &[u32], mark: &str) -> Result<bool> {
        if !ids.is_empty() && tokens.ends_with(ids) {
            return Ok(true);
        }
        Ok(self.text(tokens)?.contains(mark))
    }

    /// The decoded text of the last tokens, without special tokens.
    fn text(&self, tokens: &[u32]) -> Result<String> {
        match self.model.as_token_model() {
            Some(model) => model.decode(&tokens[tokens.len().saturating_sub(TAIL)..]),
            None => Ok(String::new()),
        }
    }

    /// Processes the token before position `end`.
    fn read(&mut self, reply: &[u32], end: usize) -> Result<()> {
        self.state = match self.state {
            State::Waiting { from } => {
                let tokens = &reply[from..end];
                if self.ends_with(tokens, &self.open, &self.marks.open)? {
                    State::Open { from: end }
                } else if self.marks.anywhere {
                    self.state
                } else {
                    // After content, reasoning cannot start.
                    let text = self.text(tokens)?;
                    match self.marks.open.starts_with(text.trim()) {
                        true => self.state,
                        false => State::Over,
                    }
                }
            }
            State::Open { from } => {
                if self.ends_with(&reply[from..end], &self.close, &self.marks.close)? {
                    // Tokens of the closing mark do not count as reasoning, so they are subtracted.
                    self.spent = self
                        .spent
                        .saturating_sub(self.close.len().saturating_sub(1));
                    self.closed(end)
                } else {
                    self.spent += 1;
                    self.state
                }
            }
            State::Ending { said } if said + 1 < self.ending.len() => {
                State::Ending { said: said + 1 }
            }
            State::Ending { .. } => {
                self.ending.clone_from(&self.last_ending);
                self.closed(end)
            }
            State::Over => State::Over,
        };
        Ok(())
    }

    /// Whether the tokens end with an incomplete closing mark.
    fn is_closing(&self, tokens: &[u32]) -> Result<bool> {
        let text = self.text(tokens)?;
        let mark = &self.marks.close;
        let mut parts = mark.char_indices().skip(1).map(|(at, _)| &mark[..at]);
        Ok(self.close.len() > 1 && parts.any(|part| text.ends_with(part)))
    }

    fn closed(&self, end: usize) -> State {
        match self.marks.anywhere {
            true => State::Waiting { from: end },
            false => State::Over,
        }
    }
}

impl LogitsProcessor for Budget {
    fn process(&mut self, _: &[u32], reply: &[u32], logits: &mut [f32]) -> Result<()> {
        while self.seen < reply.len() {
            self.seen += 1;
            self.read(reply, self.seen)?;
        }
        if let State::Open { from } = self.state
            && self.spent >= self.most
            && !self.is_closing(&reply[from..])?
        {
            self.state = State::Ending { said: 0 };
        }
        if let State::Ending { said } = self.state
            && let Some(&id) = self.ending.get(said)
            && let Some(logit) = logits.get(id as usize).copied()
        {
            logits.fill(f32::NEG_INFINITY);
            // All other tokens have probability 0, so any finite logit makes this token certain.
            logits[id as usize] = if logit.is_finite() { logit } else { 0.0 };
        }
        Ok(())
    }
}
