//! Asynchronous token streams (feature `async`). A generation becomes a [`Stream`] for any
//! executor.
//!
//! Generation blocks, so it runs on a separate thread, which sends its tokens to the stream.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_core::stream::{FusedStream, Stream};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::backend::TextModel;
use crate::cancel::CancelToken;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Message, Prompt};
use crate::metrics::GenerateMetrics;
use crate::options::GenerateOptions;
use crate::token::{FinishReason, StopCause, Token, TokenStream};

/// Capacity of the queue between generation and reader. Generation waits while the queue is full.
const AHEAD: usize = 32;

/// The reply of a running generation as a [`Stream`] of [`Result`]`<`[`Token`]`>`. It ends after an
/// error, and dropping it cancels the request.
///
/// Any executor can poll the stream. At most 32 tokens are computed ahead of the reader.
///
/// ```
/// use std::sync::Arc;
/// use inference::{AsyncTokens, GenerateOptions, Message, Result, TextModel};
///
/// async fn answer(model: Arc<dyn TextModel>, question: &str) -> Result<String> {
///     let options = GenerateOptions::new().with_max_tokens(64);
///     let mut tokens = AsyncTokens::chat(model, [Message::user(question)], options);
///     let mut text = String::new();
///     while let Some(token) = tokens.next_token().await {
///         text.push_str(&token?.text);
///     }
///     Ok(text)
/// }
/// ```
#[derive(Debug)]
pub struct AsyncTokens {
    shared: Arc<Shared>,
    /// The flag that cancels the prefill when the stream is dropped. `None` if the caller set a
    /// cancel token.
    own_cancel: Option<CancelToken>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when the reader has received a token or was dropped.
    room: Condvar,
}

#[derive(Debug, Default)]
struct State {
    tokens: VecDeque<Result<Token>>,
    waker: Option<Waker>,
    /// Whether the generation has ended.
    done: bool,
    /// Whether the reader was dropped.
    left: bool,
    finish_reason: Option<FinishReason>,
    stop_cause: Option<StopCause>,
    metrics: GenerateMetrics,
}

impl AsyncTokens {
    /// Continues a prompt, like [`TextModel::generate`].
    ///
    /// An error at the start is the stream's first item. Dropping the stream during prefill ends
    /// the request at once, unless [`GenerateOptions::interrupt`] has a cancel token. With a cancel
    /// token, the request ends at its first token, or when the caller sets the cancel token.
    pub fn generate(
        model: Arc<dyn TextModel>,
        prompt: impl Into<Prompt>,
        options: GenerateOptions,
    ) -> Self {
        let prompt = prompt.into();
        Self::cancelled(options, move |options| model.generate(&prompt, options))
    }

    /// Answers a conversation, like [`TextModel::chat`]. Errors and cancellation are those of
    /// [`AsyncTokens::generate`].
    pub fn chat(
        model: Arc<dyn TextModel>,
        messages: impl Into<Vec<Message>>,
        options: GenerateOptions,
    ) -> Self {
        let messages = messages.into();
        Self::cancelled(options, move |options| model.chat(&messages, options))
    }

    fn cancelled(
        mut options: GenerateOptions,
        begin: impl FnOnce(&GenerateOptions) -> Result<TokenStream> + Send + 'static,
    ) -> Self {
        let token = options.interrupt.cancel.is_none().then(CancelToken::new);
        if token.is_some() {
            options.interrupt.cancel.clone_from(&token);
        }
        let mut tokens = Self::start(move || begin(&options));
        tokens.own_cancel = token;
        tokens
    }

    /// Calls `begin` on a separate thread, and reads its stream there. So `begin` may block.
    pub fn start(begin: impl FnOnce() -> Result<TokenStream> + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(String::from("inference-tokens"));
        let spawned = thread.spawn(move || {
            // If the backend panics, the reader must not wait forever.
            let ended = catch_unwind(AssertUnwindSafe(|| theirs.run(begin)));
            let error = ended
                .err()
                .map(|_| Error::new(ErrorKind::Engine, "the backend panicked while it generated"));
            theirs.end(error);
        });
        if let Err(e) = spawned {
            let error = Error::new(ErrorKind::Engine, format!("cannot start a thread: {e}"));
            shared.end(Some(error.with_source(e)));
        }
        Self {
            shared,
            own_cancel: None,
        }
    }

    /// The next token; `None` at the end.
    pub async fn next_token(&mut self) -> Option<Result<Token>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }

    /// Why the reply ended; `None` while it continues.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        let state = self.shared.state();
        state.finish_reason.filter(|_| state.is_over())
    }

    /// Same as [`TokenStream::stop_cause`].
    #[must_use]
    pub fn stop_cause(&self) -> Option<StopCause> {
        let state = self.shared.state();
        state.stop_cause.clone().filter(|_| state.is_over())
    }

    /// The metrics of this request up to the last computed token.
    #[must_use]
    pub fn metrics(&self) -> GenerateMetrics {
        self.shared.state().metrics.clone()
    }
}

impl TokenStream {
    /// Converts the rest of this reply into an asynchronous stream.
    #[must_use]
    pub fn into_async(self) -> AsyncTokens {
        AsyncTokens::start(move || Ok(self))
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.done && self.tokens.is_empty()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Queues a token. Returns false if the reader was dropped.
    fn put(&self, token: Result<Token>, stream: &TokenStream) -> bool {
        let mut state = self.state();
        state.tokens.push_back(token);
        state.metrics = stream.metrics();
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        let mut state = self.state();
        while !state.left && state.tokens.len() >= AHEAD {
            self.room.wait(&mut state);
        }
        !state.left
    }

    fn run(&self, begin: impl FnOnce() -> Result<TokenStream>) {
        let mut stream = match begin() {
            Ok(stream) => stream,
            Err(error) => {
                let mut state = self.state();
                state.finish_reason = Some(FinishReason::of_error(&error));
                state.tokens.push_back(Err(error));
                return;
            }
        };
        while let Some(token) = stream.next() {
            if !self.put(token, &stream) {
                // Returning drops the token stream, which cancels the request.
                return;
            }
        }
        let mut state = self.state();
        state.metrics = stream.metrics();
        state.finish_reason = stream.finish_reason();
        state.stop_cause = stream.stop_cause();
    }

    fn end(&self, error: Option<Error>) {
        let mut state = self.state();
        if let Some(error) = error {
            state.finish_reason = Some(FinishReason::Error);
            state.tokens.push_back(Err(error));
        }
        state.done = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Stream for AsyncTokens {
    type Item = Result<Token>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.shared.state();
        if let Some(token) = state.tokens.pop_front() {
            drop(state);
            self.shared.room.notify_one();
            return Poll::Ready(Some(token));
        }
        if state.done {
            return Poll::Ready(None);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl FusedStream for AsyncTokens {
    fn is_terminated(&self) -> bool {
        self.shared.state().is_over()
    }
}

impl Drop for AsyncTokens {
    fn drop(&mut self) {
        if let Some(cancel) = &self.own_cancel {
            cancel.cancel();
        }
        self.shared.state().left = true;
        self.shared.room.notify_one();
    }
}
