//! A reply: prints its tokens as they arrive, and its statistics.

use inference::{
    Error, ErrorKind, FinishReason, GenerateMetrics, Token, TokenLogprobs, TokenStream, ToolCall,
};
use serde_json::{Value, json};

use crate::cli::options::tools::Reader;
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::screen::Screen;

/// The result of a generation, complete or not.
pub struct Reply {
    /// The text so far. If a reader separates reasoning and calls, the text does not contain them.
    pub text: String,
    /// The reasoning that a reader found.
    pub reasoning: String,
    /// The calls of tools that a reader found.
    pub calls: Vec<ToolCall>,
    /// All token ids so far.
    pub tokens: Vec<u32>,
    /// Log-probabilities of the tokens, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why the reply ended.
    pub finish_reason: Option<FinishReason>,
    pub metrics: GenerateMetrics,
    /// The error that ended the reply early.
    pub error: Option<Error>,
}

impl Reply {
    /// Reads a stream to its end. If `show` is set, prints the text as it arrives: rendered by
    /// `screen`, or raw without a screen. A `reader` separates reasoning and tool calls from the
    /// text.
    ///
    /// # Errors
    /// Only errors of writing. An error of the stream becomes part of the reply.
    pub fn draw(
        mut stream: TokenStream,
        show: bool,
        mut screen: Option<Screen>,
        reader: Option<Reader>,
        console: &mut Console<'_>,
    ) -> Result<Self, Failure> {
        let (mut text, mut tokens, mut error) = (String::new(), Vec::new(), None);
        let mut logprobs = Vec::new();
        let mut parts = Parts::new(reader);
        let mut write = |piece: &str, screen: &mut Option<Screen>| {
            text.push_str(piece);
            match screen {
                Some(screen) if show => console.drawn(&screen.push(piece)),
                _ if show => console.text(piece),
                _ => Ok(()),
            }
        };
        for token in stream.by_ref() {
            match token {
                Ok(token) => {
                    tracing::trace!(id = token.id, text = token.text, "token");
                    tokens.push(token.id);
                    write(&parts.feed(&token), &mut screen)?;
                    logprobs.extend(token.logprobs);
                }
                Err(e) => {
                    error = Some(e);
                    break;
                }
            }
        }
        write(&parts.finish(), &mut screen)?;
        // On a terminal and in a pipe, the next output must start on a new line.
        if let Some(screen) = &mut screen {
            console.drawn(&screen.end())?;
        } else if show && !text.is_empty() && !text.ends_with('\n') {
            console.text("\n")?;
        }
        tracing::debug!(metrics = ?stream.metrics(), "the reply");
        Ok(Self {
            finish_reason: stream.finish_reason(),
            metrics: stream.metrics(),
            text,
            reasoning: parts.reasoning,
            calls: parts.calls,
            tokens,
            logprobs,
            error,
        })
    }

    /// Whether Ctrl-C or the deadline stopped the reply.
    pub fn was_interrupted(&self) -> bool {
        let on_request =
            |e: &Error| matches!(e.kind(), ErrorKind::Cancelled | ErrorKind::DeadlineExceeded);
        self.error.as_ref().is_some_and(on_request)
    }
}

/// The parts of a reply besides its text.
#[derive(Default)]
struct Parts {
    reader: Option<Reader>,
    reasoning: String,
    calls: Vec<ToolCall>,
    #[cfg(feature = "mlx-backend")]
    open: Vec<inference_text::reply::Event>,
}

impl Parts {
    fn new(reader: Option<Reader>) -> Self {
        Self {
            reader,
            ..Self::default()
        }
    }

    /// The text that a token completes.
    #[cfg(feature = "mlx-backend")]
    fn feed(&mut self, token: &Token) -> String {
        match &mut self.reader {
            None => token.text.clone(),
            Some(reader) => {
                let events = reader.feed(token);
                self.take(events)
            }
        }
    }

    /// Returns the withheld text.
    #[cfg(feature = "mlx-backend")]
    fn finish(&mut self) -> String {
        match &mut self.reader {
            None => String::new(),
            Some(reader) => {
                let events = reader.finish();
                self.take(events)
            }
        }
    }

    #[cfg(feature = "mlx-backend")]
    fn take(&mut self, events: Vec<inference_text::reply::Event>) -> String {
        use inference_text::reply::{Event, Reply as Whole};
        let mut text = String::new();
        for event in events {
            match event {
                Event::Content(more) => text.push_str(&more),
                Event::Reasoning(more) => self.reasoning.push_str(&more),
                Event::Malformed(diagnosis) => {
                    self.open.clear();
                    tracing::warn!("a tool call is printed as text: {diagnosis}");
                }
                end @ Event::CallEnded { .. } => {
                    self.open.push(end);
                    let collected = Whole::collect(self.open.drain(..));
                    self.calls
                        .extend(collected.calls.into_iter().map(ToolCall::from));
                }
                part => self.open.push(part),
            }
        }
        text
    }

    #[cfg(not(feature = "mlx-backend"))]
    fn feed(&mut self, token: &Token) -> String {
        token.text.clone()
    }

    #[cfg(not(feature = "mlx-backend"))]
    fn finish(&mut self) -> String {
        let _ = &self.reader;
        String::new()
    }
}

/// The metrics of a generation as JSON. Without any token there was no prefill, so the prefill
/// speed is omitted.
pub fn figures(metrics: &GenerateMetrics) -> Value {
    let mut figures = json!(metrics);
    if metrics.generated_tokens == 0 {
        figures["prefill_tokens_per_second"] = json!(0.0);
    }
    figures
}

/// The statistics of a generation in one line.
pub fn statistics(metrics: &GenerateMetrics, finish_reason: Option<FinishReason>) -> String {
    let mut line = format!("prompt: {} tokens", metrics.prompt_tokens);
    if metrics.generated_tokens > 0 {
        let rate = metrics.prefill_tokens_per_second();
        line.push_str(&format!(", {rate:.1} tok/s"));
    }
    line.push_str(&format!(
        " | generated: {} tokens",
        metrics.generated_tokens
    ));
    if metrics.generated_tokens > 0 {
        let rate = metrics.decode_tokens_per_second();
        line.push_str(&format!(", {rate:.1} tok/s"));
    }
    line.push_str(&format!(
        " | {:.2} s | peak memory: {}",
        metrics.total_time.as_secs_f64(),
        bytes(metrics.peak_memory_bytes)
    ));
    if metrics.cached_tokens > 0 {
        line.push_str(&format!(" | reused: {} tokens", metrics.cached_tokens));
    }
    if metrics.draft_tokens > 0 {
        let share = 100.0 * metrics.draft_acceptance();
        line.push_str(&format!(" | guessed right: {share:.0} %"));
    }
    if let Some(reason) = finish_reason {
        line.push_str(" | ended by: ");
        line.push_str(reason.as_str());
    }
    line
}
