//! Implements the contract's traits for a loaded model. It converts options to messages for the
//! bridge, and messages to results.

use std::sync::Arc;

use inference::{
    BatchResult, BatchSession, ChatEnd, ChatPrompt, ClassifyResult, Error, ErrorKind,
    GenerateMetrics, GenerateOptions, Interrupt, LogitsOutput, Message, ModelInfo, PreparedPrompt,
    Prompt, Result, SamplingDefaults, TextModel, TokenModel, TokenStream,
};
use serde_json::{Value, json};

use crate::options::{asked, native};
use crate::protocol::Reply;
use crate::replies::Replies;
use crate::request::Request;
use crate::session::Session;
use crate::worker::Handle;

/// A model in a Python process.
pub struct MlxLmModel {
    handle: Arc<Handle>,
    info: ModelInfo,
    eos: Vec<u32>,
}

impl MlxLmModel {
    /// The model that `session` has loaded. `loaded` is the bridge's description of the model.
    /// `sampling` is the recommendation in the model's files.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(session: Session, loaded: &Reply, sampling: SamplingDefaults) -> Result<Self> {
        let mut info = loaded.model();
        info.sampling = sampling;
        Ok(Self {
            info,
            eos: loaded.eos.clone(),
            handle: Arc::new(Handle::new(session)?),
        })
    }

    /// Queues a request. `message` contains the prompt.
    fn start(&self, mut message: Value, options: &GenerateOptions) -> Result<TokenStream> {
        options.validate()?;
        if let Value::Object(message) = &mut message {
            message.extend(asked(options)?);
        }
        let core = Arc::clone(self.handle.core());
        let request = Arc::new(Request::new(core, message, options.clone()));
        self.handle.stream(Arc::clone(&request))?;
        let mut replies = Replies::new(request, Arc::clone(&self.handle));
        // Errors of the prompt are returned here, as in other backends.
        replies.accepted()?;
        Ok(TokenStream::new(replies))
    }
}

/// A prompt as a part of a message.
fn prompt_message(op: &str, prompt: &Prompt) -> Result<Value> {
    match prompt {
        Prompt::Text(text) => Ok(json!({"op": op, "prompt": text})),
        Prompt::Tokens(ids) => Ok(json!({"op": op, "tokens": ids})),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            "this kind of prompt is not supported",
        )),
    }
}

impl TextModel for MlxLmModel {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        self.start(prompt_message("generate", prompt)?, options)
    }

    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        let messages: Vec<Value> = messages.iter().map(Message::to_template).collect();
        self.start(json!({"op": "chat", "messages": messages}), options)
    }

    fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
        native("classify")
    }

    fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
        native("batch_generate")
    }

    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        native("batch sessions")
    }

    fn model_type(&self) -> &str {
        &self.info.architecture
    }

    fn info(&self) -> ModelInfo {
        self.info.clone()
    }

    fn metrics(&self) -> GenerateMetrics {
        self.handle.core().metrics()
    }

    fn close(&self) -> Result<()> {
        self.handle.close();
        Ok(())
    }

    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }
}

/// Returns a field that the answer must have, or an error.
fn part<T>(part: Option<T>) -> Result<T> {
    part.ok_or_else(|| {
        Error::new(
            ErrorKind::Engine,
            "mlx_lm: the answer of the Python process lacks what was asked for",
        )
    })
}

impl TokenModel for MlxLmModel {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let ask = json!({"op": "encode", "text": text, "add_special": add_special});
        part(self.handle.ask(ask)?.tokens)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        part(
            self.handle
                .ask(json!({"op": "decode", "tokens": ids}))?
                .text,
        )
    }

    fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        prompt.check_plain()?;
        let messages: Vec<Value> = prompt.messages.iter().map(Message::to_template).collect();
        let answer = self.handle.ask(json!({
            "op": "render",
            "messages": messages,
            "add_generation_prompt": prompt.end == ChatEnd::Reply,
        }))?;
        Ok(PreparedPrompt::new(
            part(answer.text)?,
            part(answer.tokens)?,
        ))
    }

    fn logits(&self, prompt: &Prompt, all: bool, interrupt: &Interrupt) -> Result<LogitsOutput> {
        interrupt.check()?;
        let mut message = prompt_message("logits", prompt)?;
        message["all"] = all.into();
        let rows = self.handle.rows(message)?;
        let expected = if all { rows.tokens.len() } else { 1 };
        if rows.count != expected || rows.count == 0 || rows.values.len() % rows.count != 0 {
            return Err(Error::new(
                ErrorKind::Engine,
                format!(
                    "mlx_lm: {} rows of logits came for {expected} positions, {} numbers in all",
                    rows.count,
                    rows.values.len()
                ),
            ));
        }
        let shape = vec![rows.count, rows.values.len() / rows.count];
        Ok(LogitsOutput::new(rows.tokens, shape, rows.values))
    }

    fn eos_tokens(&self) -> Vec<u32> {
        self.eos.clone()
    }
}
