//! Replies as lists of steps, finite or endless.

use std::time::Duration;

use inference::{Error, ErrorKind, Result, Token};

/// One step of a [`Reply`].
#[non_exhaustive]
#[derive(Debug, Clone)]
pub enum Step {
    /// Returns this token, with its text.
    Token(Token),
    /// Returns a token of the vocabulary. `END` ends the reply, unless the request ignores it.
    Id(u32),
    /// Returns no token, like a prefill step of a long prompt.
    Idle,
    /// Waits, and returns no token.
    Wait(Duration),
    /// Ends the reply, even if the request ignores `END`.
    End,
    /// Fails the request.
    Fail(Error),
    /// Fails the request and, in a session, all other requests.
    FailAll(Error),
    /// Panics with this message.
    Panic(String),
}

impl Step {
    /// Fails the request with an error of this kind.
    #[must_use]
    pub fn fail(kind: ErrorKind) -> Self {
        Self::Fail(Error::new(kind, "the script fails here"))
    }

    pub(super) fn is_token(&self) -> bool {
        matches!(self, Self::Token(_) | Self::Id(_))
    }
}

impl From<Result<Token>> for Step {
    fn from(item: Result<Token>) -> Self {
        item.map_or_else(Self::Fail, Self::Token)
    }
}

pub(super) type Steps = Box<dyn Iterator<Item = Step> + Send>;

/// The reply to one request. After the last step, the model returns `END`.
pub struct Reply(pub(super) Steps);

impl Reply {
    /// A reply of these steps. The iterator may be endless, because steps are read one at a time.
    pub fn new<S: Into<Step> + 'static>(
        steps: impl IntoIterator<Item = S, IntoIter: Send + 'static>,
    ) -> Self {
        Self(Box::new(steps.into_iter().map(Into::into)))
    }

    /// A reply of tokens of the vocabulary.
    pub fn ids(ids: impl IntoIterator<Item = u32, IntoIter: Send + 'static>) -> Self {
        Self(Box::new(ids.into_iter().map(Step::Id)))
    }

    /// A reply with one token for each byte of the text.
    #[must_use]
    pub fn text(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        Self::ids(bytes.into_iter().map(u32::from))
    }

    /// A reply of tokens with these texts. Ids count from 0.
    pub fn pieces<S: Into<String>>(pieces: impl IntoIterator<Item = S>) -> Self {
        let tokens = (0..).zip(pieces).map(|(id, piece)| Token::new(id, piece));
        Self(Box::new(
            tokens.map(Step::Token).collect::<Vec<_>>().into_iter(),
        ))
    }

    /// Inserts `step` after `n` tokens, even at the end of a reply with exactly `n` tokens. A
    /// shorter reply does not change.
    #[must_use]
    pub fn after(self, n: usize, step: Step) -> Self {
        let (mut rest, mut emitted, mut step) = (self.0, 0, Some(step));
        Self(Box::new(std::iter::from_fn(move || {
            if emitted == n
                && let Some(step) = step.take()
            {
                return Some(step);
            }
            let next = rest.next()?;
            emitted += usize::from(next.is_token());
            Some(next)
        })))
    }

    /// Inserts `step` before each token.
    #[must_use]
    pub fn before_each(self, step: Step) -> Self {
        Self(Box::new(self.0.flat_map(move |next| {
            let before = next.is_token().then(|| step.clone());
            before.into_iter().chain([next])
        })))
    }

    /// Inserts `n` steps without a token at the start, like the prefill of a long prompt.
    #[must_use]
    pub fn idle(self, n: usize) -> Self {
        Self(Box::new(std::iter::repeat_n(Step::Idle, n).chain(self.0)))
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").finish_non_exhaustive()
    }
}
