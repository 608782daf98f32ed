//! Helpers for the commands' tests: a model with a fixed reply, and streams in memory.

use std::io::Cursor;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use inference::{
    Backend, BatchResult, Capabilities, ChatPrompt, ClassifyResult, Error, ErrorKind, FinishReason,
    GenerateMetrics, GenerateOptions, Interrupt, LoadOptions, LogitsOutput, Message, ModelInfo,
    PreparedPrompt, Prompt, Result, TextModel, Token, TokenLogprobs, TokenModel, TokenSource,
    TokenStream,
};

use crate::cli::terminal::console::Console;

/// Standard streams in memory.
pub struct Streams {
    input: Cursor<Vec<u8>>,
    out: Vec<u8>,
    err: Vec<u8>,
}

impl Streams {
    pub fn new(input: &str) -> Self {
        Self {
            input: Cursor::new(input.into()),
            out: Vec::new(),
            err: Vec::new(),
        }
    }

    pub fn console(&mut self) -> Console<'_> {
        Console {
            input: &mut self.input,
            out: &mut self.out,
            err: &mut self.err,
            in_is_terminal: false,
            out_is_terminal: false,
            err_is_terminal: false,
            quiet: false,
            verbose: false,
            catches_interrupts: false,
        }
    }

    pub fn out(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    pub fn err(&self) -> String {
        String::from_utf8(self.err.clone()).unwrap()
    }
}

/// A model that replies with fixed pieces, whose ids count from 0, and records its requests.
#[derive(Default)]
pub struct Mock {
    pieces: Vec<String>,
    instruct: bool,
    fail: Option<(usize, ErrorKind)>,
    logits: Vec<f32>,
    opaque: bool,
    asked: Mutex<Vec<String>>,
}

impl Mock {
    pub fn base(pieces: &[&str]) -> Self {
        Self {
            pieces: pieces.iter().map(|&piece| piece.into()).collect(),
            ..Self::default()
        }
    }

    pub fn instruct(pieces: &[&str]) -> Self {
        Self {
            instruct: true,
            ..Self::base(pieces)
        }
    }

    /// Makes the stream yield an error of this kind instead of piece `at`.
    pub fn failing_at(mut self, at: usize, kind: ErrorKind) -> Self {
        self.fail = Some((at, kind));
        self
    }

    /// Sets the logits of every position.
    pub fn with_logits(mut self, row: &[f32]) -> Self {
        self.logits = row.to_vec();
        self
    }

    /// Removes the optional `TokenModel`.
    pub fn opaque(mut self) -> Self {
        self.opaque = true;
        self
    }

    pub fn asked(&self) -> Vec<String> {
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn reply(&self, asked: String, options: &GenerateOptions) -> TokenStream {
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(asked);
        let pieces = self.pieces.iter().take(options.max_tokens).cloned();
        TokenStream::new(Source {
            pieces: pieces.collect::<Vec<_>>().into_iter(),
            fail: self.fail,
            given: 0,
            logprobs: options.output.logprobs.is_some(),
            finish: None,
        })
    }
}

struct Source {
    pieces: std::vec::IntoIter<String>,
    fail: Option<(usize, ErrorKind)>,
    given: usize,
    logprobs: bool,
    finish: Option<FinishReason>,
}

impl Iterator for Source {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some((_, kind)) = self.fail.filter(|(at, _)| *at == self.given) {
            self.fail = None;
            self.finish = Some(match kind {
                ErrorKind::Cancelled => FinishReason::Cancelled,
                ErrorKind::DeadlineExceeded => FinishReason::Deadline,
                _ => FinishReason::Error,
            });
            return Some(Err(Error::new(kind, "the mock was told to fail")));
        }
        let Some(text) = self.pieces.next() else {
            self.finish.get_or_insert(FinishReason::Stop);
            return None;
        };
        let mut token = Token::new(self.given as u32, text);
        if self.logprobs {
            token = token.with_logprobs(TokenLogprobs::new(-0.5, Vec::new()));
        }
        self.given += 1;
        Some(Ok(token))
    }
}

impl TokenSource for Source {
    fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    fn metrics(&self) -> GenerateMetrics {
        let mut metrics = GenerateMetrics::default();
        metrics.prompt_tokens = 5;
        metrics.generated_tokens = self.given;
        metrics.prefill_time = Duration::from_millis(10);
        metrics.decode_time = Duration::from_millis(20);
        metrics.total_time = Duration::from_millis(30);
        metrics.time_to_first_token = Duration::from_millis(11);
        metrics.peak_memory_bytes = 3 << 20;
        metrics
    }
}

impl TextModel for Mock {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        let asked = match prompt {
            Prompt::Text(text) => format!("text {text}"),
            Prompt::Tokens(ids) => format!("tokens {ids:?}"),
            _ => "something else".into(),
        };
        Ok(self.reply(asked, options))
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        let messages: Vec<String> = messages
            .iter()
            .map(|message| format!("{}:{}", message.role, message.content))
            .collect();
        Ok(self.reply(format!("chat {}", messages.join("|")), options))
    }

    fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
        Ok(Vec::new())
    }

    fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
        Ok(Vec::new())
    }

    fn model_type(&self) -> &str {
        "mock"
    }

    fn info(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        info.architecture = "mock".into();
        info.vocab_size = 100;
        info.context_length = Some(1024);
        info.has_chat_template = self.instruct;
        info
    }

    fn metrics(&self) -> GenerateMetrics {
        GenerateMetrics::default()
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        (!self.opaque).then_some(self)
    }
}

impl TokenModel for Mock {
    fn encode(&self, _: &str, _: bool) -> Result<Vec<u32>> {
        Ok(vec![1, 2])
    }

    fn decode(&self, _: &[u32]) -> Result<String> {
        Ok(String::new())
    }

    fn prepare_chat(&self, _: &ChatPrompt) -> Result<PreparedPrompt> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "the mock has no ids of conversations",
        ))
    }

    fn logits(&self, prompt: &Prompt, all: bool, _: &Interrupt) -> Result<LogitsOutput> {
        let tokens = match prompt {
            Prompt::Tokens(ids) => ids.clone(),
            _ => vec![1, 2],
        };
        let rows = if all { tokens.len() } else { 1 };
        let shape = vec![rows, self.logits.len()];
        Ok(LogitsOutput::new(tokens, shape, self.logits.repeat(rows)))
    }

    fn eos_tokens(&self) -> Vec<u32> {
        vec![99]
    }
}

/// A backend that loads nothing.
pub struct MockBackend {
    pub name: &'static str,
    pub reason: Option<&'static str>,
}

impl Backend for MockBackend {
    fn name(&self) -> &str {
        self.name
    }

    fn available(&self) -> bool {
        self.reason.is_none()
    }

    fn unavailable_reason(&self) -> Option<String> {
        self.reason.map(String::from)
    }

    fn device(&self) -> String {
        "a mock".into()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.streaming = true;
        capabilities
    }

    fn load_model(&self, _: &std::path::Path, _: &LoadOptions) -> Result<Box<dyn TextModel>> {
        Ok(Box::new(Mock::default()))
    }
}
