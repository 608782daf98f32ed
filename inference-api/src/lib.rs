//! The contract between programs and language-model backends.
//!
//! A program chooses a backend **by name** (or lets the registry choose) and talks to the model
//! through [`TextModel`]; a backend crate registers itself by being linked. This crate knows no
//! backend, contains no engine and compiles anywhere in seconds.
//!
//! # Using a model
//!
//! ```no_run
//! use inference::{GenerateOptions, LoadOptions};
//!
//! fn main() -> inference::Result<()> {
//!     // Link a backend crate somewhere in the program: `use metal_backend as _;`
//!     let model = inference::load_model("path/to/model", &LoadOptions::new())?;
//!     let options = GenerateOptions::new().with_max_tokens(64);
//!     for token in model.generate(&"The capital of France is".into(), &options)? {
//!         print!("{}", token?.text);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! - [`backends`] lists what is linked, [`backend()`] finds one by name, [`default_backend`] takes
//!   the best that works here, [`load_model`] does all of it; [`discover()`] finds models on disk.
//! - A [`TokenStream`] is an iterator of `Result<Token>`; dropping it cancels the request, and so do
//!   a [`CancelToken`] and a deadline in [`GenerateOptions`].
//! - What only some models can do is reached through [`TextModel::as_token_model`] (ids and logits),
//!   [`TextModel::as_trainable`] and [`TextModel::as_attention_inspector`]; [`Capabilities`] tell
//!   beforehand.
//! - Programs decide by [`ErrorKind`]; the text of an [`Error`] says what is wrong and what would
//!   work.
//!
//! # Writing a backend
//!
//! Implement [`Backend`], [`TextModel`] and, for its streams, [`TokenSource`]; then register it by
//! name. This is a whole one, whose model repeats the prompt:
//!
//! ```
//! use std::path::Path;
//!
//! use inference::{
//!     Backend, BatchResult, Capabilities, ClassifyResult, Error, ErrorKind, FinishReason,
//!     GenerateMetrics, GenerateOptions, LoadOptions, Message, ModelInfo, Prompt, Result, TextModel,
//!     Token, TokenSource, TokenStream,
//! };
//!
//! struct Echo;
//!
//! impl Backend for Echo {
//!     fn name(&self) -> &str {
//!         "echo" // the name it is registered by
//!     }
//!     fn available(&self) -> bool {
//!         true // whether its device is there; say why not in `unavailable_reason`
//!     }
//!     fn device(&self) -> String {
//!         String::from("no device at all")
//!     }
//!     fn capabilities(&self) -> Capabilities {
//!         Capabilities::new().with_streaming()
//!     }
//!     fn load_model(&self, _path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
//!         options.validate()?; // a backend may be called directly
//!         Ok(Box::new(EchoModel))
//!     }
//! }
//!
//! inference::register_backend!("echo", || Box::new(Echo));
//!
//! struct EchoModel;
//!
//! impl TextModel for EchoModel {
//!     fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
//!         options.validate()?;
//!         let Prompt::Text(text) = prompt else {
//!             return unsupported("prompts of ids");
//!         };
//!         Ok(TokenStream::new(EchoSource {
//!             words: text.split_inclusive(' ').map(String::from).collect::<Vec<_>>().into_iter(),
//!             options: options.clone(),
//!             metrics: GenerateMetrics::default(),
//!             finish: None,
//!         }))
//!     }
//!     fn model_type(&self) -> &str {
//!         "echo"
//!     }
//!     fn info(&self) -> ModelInfo {
//!         ModelInfo::default()
//!     }
//!     fn metrics(&self) -> GenerateMetrics {
//!         GenerateMetrics::default()
//!     }
//!     fn close(&self) -> Result<()> {
//!         Ok(()) // nothing to give back
//!     }
//!     // What is not declared in the capabilities:
//!     fn chat(&self, _: &[Message], _: &GenerateOptions) -> Result<TokenStream> {
//!         unsupported("chat")
//!     }
//!     fn classify(&self, _: &[Prompt], _: &GenerateOptions, _: bool) -> Result<Vec<ClassifyResult>> {
//!         unsupported("classify")
//!     }
//!     fn batch_generate(&self, _: &[Prompt], _: &GenerateOptions) -> Result<Vec<BatchResult>> {
//!         unsupported("batch_generate")
//!     }
//! }
//!
//! fn unsupported<T>(what: &str) -> Result<T> {
//!     Err(Error::new(ErrorKind::Unsupported, format!("backend `echo` does not have {what}")))
//! }
//!
//! /// One request. Dropping it must end the request: here there is nothing to end.
//! struct EchoSource {
//!     words: std::vec::IntoIter<String>,
//!     options: GenerateOptions,
//!     metrics: GenerateMetrics,
//!     finish: Option<FinishReason>,
//! }
//!
//! impl Iterator for EchoSource {
//!     type Item = Result<Token>;
//!     fn next(&mut self) -> Option<Result<Token>> {
//!         if self.metrics.generated_tokens == self.options.max_tokens {
//!             self.finish = Some(FinishReason::Length);
//!             return None;
//!         }
//!         if let Err(e) = self.options.check_interrupt() {
//!             self.finish = Some(FinishReason::of_error(&e));
//!             return Some(Err(e)); // the stream ends after an error
//!         }
//!         let Some(word) = self.words.next() else {
//!             self.finish = Some(FinishReason::Stop);
//!             return None;
//!         };
//!         self.metrics.generated_tokens += 1;
//!         Some(Ok(Token::new(self.metrics.generated_tokens as u32, word)))
//!     }
//! }
//!
//! impl TokenSource for EchoSource {
//!     fn finish_reason(&self) -> Option<FinishReason> {
//!         self.finish
//!     }
//!     fn metrics(&self) -> GenerateMetrics {
//!         self.metrics.clone()
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! // And a program that uses it:
//! # let path = ".";
//! let model = inference::load_model(path, &LoadOptions::new().with_backend("echo"))?;
//! let stream = model.generate(&"one two three".into(), &GenerateOptions::new().with_max_tokens(2))?;
//! let output = stream.collect_output()?;
//! assert_eq!(output.text, "one two ");
//! assert_eq!(output.finish_reason, Some(FinishReason::Length));
//! # Ok(()) }
//! ```
//!
//! A crate that nothing refers to may be left out by the linker; `use my_backend as _;` in the
//! program keeps it. A backend that exists only at run time is added by [`register`].

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backend;
mod batch;
mod cancel;
mod discover;
mod error;
mod grammar_limits;
mod info;
mod inspect;
mod message;
mod metrics;
mod options;
mod prompt_cache;
mod registry;
mod sampling;
mod token;
mod token_model;
mod train;

pub use backend::{Backend, Capabilities, TextModel};
pub use batch::{BatchEvent, BatchSession, RowId};
pub use cancel::{CancelToken, Interrupt};
pub use discover::{Discover, DiscoveredModel, ModelFormat, Quantization, discover};
pub use error::{Error, ErrorKind, Result};
pub use info::ModelInfo;
pub use inspect::{AttentionInspector, AttentionSnapshot, EmbeddingModel, HiddenStates, Pooling};
pub use message::{Message, Prompt};
pub use metrics::GenerateMetrics;
pub use options::{ComputeType, GenerateOptions, LoadOptions, Progress};
pub use prompt_cache::PromptCacheModel;
pub use registry::{
    BackendRegistration, PREFERENCE, availability, backend, backends, default_backend, duplicates,
    load_model, register,
};
pub use sampling::{Grammar, LogitBias, LogitsProcessor, LogitsProcessorFactory};
pub use token::{
    BatchResult, ClassifyResult, FinishReason, Output, Token, TokenLogprobs, TokenSource,
    TokenStream, TopLogprob,
};
pub use token_model::{LogitsOutput, TokenModel};
pub use train::{Adapter, LoraConfig, TrainableModel};

/// For [`register_backend!`]: a plugin needs no dependency of its own on it.
pub use inventory;
