//! What a backend implements: itself, and the models it loads.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::batch::{BatchSession, Prepared};
use crate::error::Result;
use crate::info::ModelInfo;
use crate::inspect::{AttentionInspector, EmbeddingModel};
use crate::message::{Message, Prompt};
use crate::metrics::GenerateMetrics;
use crate::options::{GenerateOptions, LoadOptions};
use crate::profile::ProfiledModel;
use crate::prompt_cache::PromptCacheModel;
use crate::routed::RoutedModel;
use crate::steering::SteerableModel;
use crate::token::{BatchResult, ClassifyResult, TokenStream};
use crate::token_model::TokenModel;
use crate::train::TrainableModel;

/// What a backend can do. A capability that is not declared must answer with an error of kind
/// [`crate::ErrorKind::Unsupported`].
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Capabilities {
    /// Tokens are handed out as they are generated.
    pub streaming: bool,
    /// Conversations are formatted by the model's template.
    pub chat: bool,
    /// [`TextModel::classify`] works.
    pub classify: bool,
    /// [`TextModel::batch_generate`] works.
    pub batch_generate: bool,
    /// Models are [`TrainableModel`]s.
    pub training: bool,
    /// Models are [`AttentionInspector`]s.
    pub attention_inspection: bool,
    /// Models are [`TokenModel`]s.
    pub logits: bool,
    /// [`LoadOptions::adapter_path`] is honored.
    pub adapters: bool,
    /// GGUF files can be loaded.
    pub gguf: bool,
    /// Directories with safetensors files can be loaded.
    pub safetensors: bool,
    /// The same seed gives the same reply.
    pub seeds: bool,
    /// [`OutputOptions::logprobs`](crate::OutputOptions::logprobs) is honored.
    pub logprobs: bool,
    /// [`ConstraintOptions::grammar`](crate::ConstraintOptions::grammar) is honored.
    pub grammars: bool,
    /// [`TextModel::batch_session`] works.
    pub batch_sessions: bool,
    /// Models are [`EmbeddingModel`]s.
    pub embeddings: bool,
    /// Models are [`PromptCacheModel`]s.
    pub prompt_cache: bool,
    /// [`AttentionInspector::hidden_states`] works.
    pub hidden_states: bool,
    /// [`Split::Tensor`](crate::Split::Tensor) is honored.
    pub tensor_parallel: bool,
    /// [`Split::Pipeline`](crate::Split::Pipeline) is honored.
    pub pipeline_parallel: bool,
    /// [`GenerateOptions::steering`] is honored.
    pub steering: bool,
}

macro_rules! capabilities {
    ($($with:ident => $field:ident),* $(,)?) => {
        impl Capabilities {
            $(
                #[doc = concat!("Declares `", stringify!($field), "`.")]
                #[must_use]
                pub const fn $with(mut self) -> Self {
                    self.$field = true;
                    self
                }
            )*

            /// The names of the declared ones, in order.
            #[must_use]
            pub fn names(&self) -> Vec<&'static str> {
                [$((stringify!($field), self.$field)),*]
                    .into_iter()
                    .filter_map(|(name, on)| on.then_some(name))
                    .collect()
            }
        }
    };
}

capabilities! {
    with_streaming => streaming,
    with_chat => chat,
    with_classify => classify,
    with_batch_generate => batch_generate,
    with_training => training,
    with_attention_inspection => attention_inspection,
    with_logits => logits,
    with_adapters => adapters,
    with_gguf => gguf,
    with_safetensors => safetensors,
    with_seeds => seeds,
    with_logprobs => logprobs,
    with_grammars => grammars,
    with_batch_sessions => batch_sessions,
    with_embeddings => embeddings,
    with_prompt_cache => prompt_cache,
    with_hidden_states => hidden_states,
    with_tensor_parallel => tensor_parallel,
    with_pipeline_parallel => pipeline_parallel,
    with_steering => steering,
}

impl Capabilities {
    /// Nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            streaming: false,
            chat: false,
            classify: false,
            batch_generate: false,
            training: false,
            attention_inspection: false,
            logits: false,
            adapters: false,
            gguf: false,
            safetensors: false,
            seeds: false,
            logprobs: false,
            grammars: false,
            batch_sessions: false,
            embeddings: false,
            prompt_cache: false,
            hidden_states: false,
            tensor_parallel: false,
            pipeline_parallel: false,
            steering: false,
        }
    }
}

/// An engine that loads models, known by name.
pub trait Backend: Send + Sync {
    /// Its name in the registry: lower case, such as `metal`.
    fn name(&self) -> &str;

    /// Whether it can work on this machine now.
    fn available(&self) -> bool;

    /// Why it cannot, and a remedy.
    fn unavailable_reason(&self) -> Option<String> {
        None
    }

    /// The device it runs on, for people.
    fn device(&self) -> String;

    /// Its capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Loads the model at `path`: a directory or a file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] naming the file and the fault,
    /// [`crate::ErrorKind::Unsupported`] for what the backend does not have,
    /// [`crate::ErrorKind::OutOfMemory`] before anything is allocated that would not fit.
    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>>;
}

/// A loaded language model. Calls from several threads at once are allowed.
pub trait TextModel: Send + Sync {
    /// Continues a prompt.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for bad options or prompts,
    /// [`crate::ErrorKind::Closed`] after [`TextModel::close`].
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream>;

    /// Answers a conversation, formatted by the model's template.
    ///
    /// # Errors
    /// As [`TextModel::generate`], and when the template refuses the messages.
    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream>;

    /// The next token of each prompt, in the prompts' order.
    ///
    /// # Errors
    /// As [`TextModel::generate`], for any of the prompts.
    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>>;

    /// Continues many prompts; each result has its own error.
    ///
    /// # Errors
    /// When the call as a whole cannot start: bad options, a closed model.
    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>>;

    /// The architecture's name, such as `llama`.
    fn model_type(&self) -> &str;

    /// What the model is.
    fn info(&self) -> ModelInfo;

    /// The figures of the request that ended last. A stream carries its own.
    fn metrics(&self) -> GenerateMetrics;

    /// Frees the model's memory once running requests have ended. They end with an error of kind
    /// [`crate::ErrorKind::Closed`], as do later calls. Closing twice is fine.
    ///
    /// # Errors
    /// When the engine fails to free.
    fn close(&self) -> Result<()>;

    /// The model as one that can be trained, where it is.
    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        None
    }

    /// The model as one whose attention can be looked at, where it is.
    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        None
    }

    /// A session in which many requests run together.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] where there is none, [`crate::ErrorKind::Closed`] after
    /// [`TextModel::close`].
    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend has no batch sessions; use batch_generate",
        ))
    }

    /// Does the slow work of starting a request with these options, such as compiling its grammar.
    /// It runs on the caller's thread, beside steps of sessions. Requests that start while its
    /// result lives find the work done. A backend without such work does nothing.
    ///
    /// # Errors
    /// As [`TextModel::generate`], for the options.
    fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        let _ = options;
        Ok(Prepared::default())
    }

    /// The model as one that was loaded with a plan for its feed-forward parts, where it was.
    fn as_routed(&self) -> Option<&dyn RoutedModel> {
        None
    }

    /// The model as one that measures its steps, where it does.
    fn as_profiled(&self) -> Option<&dyn ProfiledModel> {
        None
    }

    /// The model as one that takes edits, where it does.
    fn as_steerable(&self) -> Option<&dyn SteerableModel> {
        None
    }

    /// The model as one that makes vectors of texts, where it is.
    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        None
    }

    /// The model as one that keeps computed prompts in files, where it is.
    fn as_prompt_cache(&self) -> Option<&dyn PromptCacheModel> {
        None
    }

    /// The model as one that shows ids and logits, where it is.
    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_list_what_is_declared() {
        let c = Capabilities::new().with_chat().with_gguf();
        assert_eq!(c.names(), ["chat", "gguf"]);
        assert_eq!(Capabilities::default(), Capabilities::new());
    }
}
