//! The contract between programs and language-model backends.
//!
//! A program chooses a backend **by name** (or lets the registry choose) and talks to the model
//! through [`TextModel`]; a backend crate registers itself by being linked. This crate does not
//! depend on a backend, contains no engine and compiles on all platforms in seconds.
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
//! - [`backends`] lists the linked backends, [`backend()`] finds one by name, and
//!   [`default_backend`] returns the best available one. [`load_model`] selects a backend and loads
//!   a model with it. [`discover()`] finds models on disk.
//! - A [`TokenStream`] is an iterator of `Result<Token>`; dropping it cancels the request, and so
//!   do a [`CancelToken`] and a deadline in [`GenerateOptions`].
//! - Asynchronous programs enable the feature `async`: `AsyncTokens` is a `Stream` of tokens for
//!   any executor.
//! - Optional abilities are separate traits: [`TextModel::as_token_model`] (ids and logits),
//!   [`TextModel::as_trainable`], [`TextModel::as_steerable`], [`TextModel::as_profiled`],
//!   [`TextModel::as_attention_inspector`], [`TextModel::as_embedding_model`] and
//!   [`TextModel::as_rerank_model`]. [`Capabilities`] say beforehand which ones exist.
//! - Programs match on [`ErrorKind`]; the message of an [`Error`] says the fault and the remedy.
//!
//! # Writing a backend
//!
//! Implement [`Backend`], [`TextModel`] and, for its streams, [`TokenSource`]; then register the
//! backend by name. This is a complete backend, whose models recite a text. It passes the
//! conformance suite, the crate `rust-mlx-inference-conformance`, and so should yours. A backend
//! refuses the options that it does not honor ([`GenerateOptions::refuse_all_but`]). The module
//! [`kit`] has the parts that every backend needs.
//!
//! ```
#![doc = include_str!("front_page.rs")]
//!
//! # fn main() -> Result<()> {
//! // And a program that uses it:
//! # let path = std::env::temp_dir().join(format!("front-page-{}.txt", std::process::id()));
//! # let written = std::fs::write(&path, "to be or not to be");
//! # written.map_err(|e| Error::new(ErrorKind::Io, e.to_string()))?;
//! let model = inference::load_model(&path, &LoadOptions::new().with_backend("parrot"))?;
//! let options = GenerateOptions::new().with_stop(vec![String::from(" not")]);
//! let output = model.generate(&Prompt::Tokens(vec![0; 19]), &options)?.collect_output()?;
//! assert_eq!(output.text, "to be or");
//! assert_eq!(output.finish_reason, Some(FinishReason::Stop));
//! # std::fs::remove_file(path).ok();
//! # Ok(()) }
//! ```
//!
//! A crate that nothing refers to may be left out by the linker; `use my_backend as _;` in the
//! program keeps it. A backend that exists only at run time is added by [`register`].

#![forbid(unsafe_code)]
#![deny(missing_docs)]

#[cfg(feature = "async")]
mod async_tokens;
mod backend;
mod batch;
pub mod bindings;
mod cancel;
mod discover;
mod embedding;
mod error;
mod grammar_limits;
mod info;
mod inspect;
pub mod kit;
mod message;
mod metrics;
mod options;
mod profile;
mod prompt;
mod prompt_cache;
mod registry;
mod routed;
mod sampling;
mod steering;
mod token;
mod token_model;
mod train;

#[cfg(feature = "async")]
pub use async_tokens::AsyncTokens;
pub use backend::{Backend, Capabilities, TextModel};
pub use batch::{BatchEvent, BatchSession, Prepared, RequestId};
pub use cancel::{CancelToken, Interrupt};
pub use discover::{Discover, DiscoveredModel, ModelFormat, Quantization, discover};
pub use embedding::{
    EmbedOptions, EmbedPrompt, EmbeddingInfo, EmbeddingModel, Pooling, Ranking, RerankModel,
    RerankOptions,
};
pub use error::{Error, ErrorKind, Result};
pub use inference_formats::SamplingDefaults;
pub use info::ModelInfo;
pub use inspect::{
    AttentionInspector, AttentionProjections, AttentionSnapshot, AttentionWeights,
    FeedForwardActivations, FeedForwardInputs, FeedForwardWeights, HiddenStates, LayerTrace,
    ResidualTrace,
};
pub use message::{ChatEnd, ChatPrompt, ChatStart, Message, Prompt, Tool, ToolCall};
pub use metrics::GenerateMetrics;
pub use options::{
    AttentionSums, ComputeType, ConstraintOptions, FeedForwardPlan, FeedForwardStrategy,
    GenerateOptions, LoadOptions, OutputOptions, Parameter, ParameterRange, ParameterValue,
    ParameterValues, PenaltyOptions, Precision, PrefillOptions, Progress, SamplerOrder,
    SamplingOptions, SpeculativeOptions, Split, StopOptions,
};
pub use profile::{PartTime, ProfiledModel, StepPart, StepProfile};
pub use prompt::PreparedPrompt;
pub use prompt_cache::PromptCacheModel;
pub use registry::{
    BackendRegistration, PREFERENCE, availability, backend, backends, default_backend, duplicates,
    load_model, register,
};
pub use routed::RoutedModel;
pub use sampling::{Grammar, LogitBias, LogitsProcessor, LogitsProcessorFactory};
pub use steering::{
    Edit, EditOperation, EditPositions, Hook, HookStates, LayerHooks, Numbers, SteerableModel,
    Steering, SteeringShape,
};
pub use token::{
    BatchResult, ClassifyResult, FinishReason, Output, StopCause, Token, TokenLogprobs,
    TokenSource, TokenStream, TopLogprob,
};
pub use token_model::{LogitsOutput, TokenModel};
pub use train::{Adapter, LoraConfig, TrainableModel};

/// Re-exported for [`register_backend!`], so that a plugin needs no direct dependency on
/// `inventory`.
pub use inventory;
