//! A loaded model: the data that its requests share, and the implementation of the contract.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inference::{
    BatchResult, ChatEnd, ChatPrompt, ClassifyResult, ComputeType, Error, ErrorKind,
    GenerateMetrics, GenerateOptions, Interrupt, LogitsOutput, Message, ModelInfo, PreparedPrompt,
    Prompt, Result, TextModel, Token, TokenModel, TokenSource, TokenStream,
};

use crate::counts::{Counts, END, VOCAB};
use crate::request::Request;
use crate::sampler::{Sampler, logprobs};

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

/// The text of a single token.
pub fn spell(id: u32) -> String {
    match u8::try_from(id) {
        Ok(byte) if byte.is_ascii() => char::from(byte).into(),
        Ok(_) => '\u{fffd}'.into(),
        Err(_) => String::new(),
    }
}

/// Refuses options that this backend does not support, and unknown tokens.
fn check(options: &GenerateOptions) -> Result<()> {
    options.validate()?;
    if options.constraints.grammar.is_some() {
        let message = "backend `echo` has no grammars; leave grammar out";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    if options.steering.is_some() {
        let message = "backend `echo` has no layers to edit; leave steering out";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    if options.adapter.is_some() {
        let message = "backend `echo` has no adapters; leave adapter out";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let ids = options.constraints.logit_bias.keys();
    let mut ids = ids
        .chain(&options.constraints.banned_tokens)
        .chain(&options.constraints.forced_tokens);
    match ids.find(|id| **id as usize >= VOCAB) {
        Some(id) => invalid(format!("token {id} is outside the vocabulary of {VOCAB}")),
        None => Ok(()),
    }
}

/// The data that requests of a model share.
pub struct Shared {
    /// The counts.
    pub counts: Counts,
    closed: AtomicBool,
    context_len: Option<usize>,
    metrics: Mutex<GenerateMetrics>,
}

impl Shared {
    /// An error if the model was closed.
    pub fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(
                ErrorKind::Closed,
                "the model was closed; load it again",
            ));
        }
        Ok(())
    }

    /// Stores the metrics of the request that ended last.
    pub fn publish(&self, metrics: GenerateMetrics) {
        *self.last_metrics() = metrics;
    }

    fn last_metrics(&self) -> MutexGuard<'_, GenerateMetrics> {
        // After a panic of another thread, the plain numbers are still valid.
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ids of a prompt, checked.
    fn prompt(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let ids: Vec<u32> = match prompt {
            Prompt::Text(text) => text.bytes().map(u32::from).collect(),
            Prompt::Tokens(ids) => ids.clone(),
            _ => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "this kind of prompt is not known",
                ));
            }
        };
        if ids.is_empty() {
            return invalid("the prompt is empty; give at least one token".into());
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= VOCAB) {
            return invalid(format!("token {id} is outside the vocabulary of {VOCAB}"));
        }
        Ok(ids)
    }
}

/// A loaded model.
pub struct EchoModel(Arc<Shared>);

impl EchoModel {
    /// A model with these counts.
    pub fn new(counts: Counts, context_len: Option<usize>) -> Self {
        Self(Arc::new(Shared {
            counts,
            closed: AtomicBool::new(false),
            context_len,
            metrics: Mutex::default(),
        }))
    }

    fn request(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<Request> {
        check(options)?;
        self.0.check_open()?;
        let ids = self.0.prompt(prompt)?;
        Ok(Request::new(Arc::clone(&self.0), ids, options.clone()))
    }
}

impl TextModel for EchoModel {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        Ok(TokenStream::new(self.request(prompt, options)?))
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        let prepared = self.prepare_chat(&ChatPrompt::new(messages))?;
        self.generate(&prepared.into(), options)
    }

    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        check(options)?;
        self.0.check_open()?;
        let mut results = Vec::new();
        for prompt in prompts {
            options.check_interrupt()?;
            let ids = self.0.prompt(prompt)?;
            let logits = self.0.counts.logits(&ids);
            let id = Sampler::new(options, ids.len(), END).take(&logits, &ids)?;
            let mut token = Token::new(id, self.decode(&[id])?);
            if let Some(n) = options.output.logprobs {
                token = token.with_logprobs(logprobs(&logits, id, n, spell));
            }
            results.push(ClassifyResult::new(token, return_logits.then_some(logits)));
        }
        Ok(results)
    }

    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>> {
        check(options)?;
        self.0.check_open()?;
        let one = |prompt| {
            let mut request = match self.request(prompt, options) {
                Ok(request) => request,
                Err(e) => return BatchResult::failed(Vec::new(), e),
            };
            let mut tokens = Vec::new();
            for token in request.by_ref() {
                match token {
                    Ok(token) => tokens.push(token),
                    Err(e) => return BatchResult::failed(tokens, e),
                }
            }
            BatchResult::new(tokens, request.finish_reason())
        };
        Ok(prompts.iter().map(one).collect())
    }

    fn model_type(&self) -> &str {
        "trigram"
    }

    fn info(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        info.architecture = String::from("trigram");
        info.vocab_size = VOCAB;
        info.context_length = self.0.context_len;
        info.parameters = self.0.counts.len() as u64;
        info.device = String::from("cpu");
        info.compute_type = Some(ComputeType::Float32);
        info.has_chat_template = true;
        info
    }

    fn metrics(&self) -> GenerateMetrics {
        self.0.last_metrics().clone()
    }

    fn close(&self) -> Result<()> {
        self.0.closed.store(true, Ordering::Release);
        Ok(())
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }
}

impl TokenModel for EchoModel {
    fn encode(&self, text: &str, _add_special: bool) -> Result<Vec<u32>> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut bytes = Vec::new();
        for &id in ids {
            match u8::try_from(id) {
                Ok(byte) => bytes.push(byte),
                Err(_) if id == END => {}
                Err(_) => {
                    return invalid(format!("token {id} is outside the vocabulary of {VOCAB}"));
                }
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        prompt.check_plain()?;
        if prompt.messages.is_empty() {
            return invalid("a conversation needs at least one message".into());
        }
        let mut text = String::new();
        for message in &prompt.messages {
            let mark = match message.role.as_str() {
                "system" => "",
                "user" => "? ",
                "assistant" => "! ",
                role => return invalid(format!("role `{role}` is not system, user or assistant")),
            };
            text.extend([mark, &message.content, "\n"]);
        }
        if prompt.end == ChatEnd::Reply {
            text.push_str("! ");
        }
        let ids = self.encode(&text, true)?;
        Ok(PreparedPrompt::new(text, ids))
    }

    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput> {
        interrupt.check()?;
        self.0.check_open()?;
        let ids = self.0.prompt(prompt)?;
        let from = if all { 1 } else { ids.len() };
        let logits = (from..=ids.len())
            .flat_map(|n| self.0.counts.logits(&ids[..n]))
            .collect();
        let shape = vec![ids.len() + 1 - from, VOCAB];
        Ok(LogitsOutput::new(ids, shape, logits))
    }

    fn eos_tokens(&self) -> Vec<u32> {
        vec![END]
    }
}
