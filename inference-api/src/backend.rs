//! The traits that a backend implements: the backend itself, and the models that it loads.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::batch::{BatchSession, Prepared};
use crate::embedding::{EmbeddingModel, RerankModel};
use crate::error::Result;
use crate::info::ModelInfo;
use crate::inspect::AttentionInspector;
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

/// The capabilities of a backend. A call that needs an undeclared capability must return an error
/// of kind [`crate::ErrorKind::Unsupported`].
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Capabilities {
    /// Tokens are returned one by one during generation.
    pub streaming: bool,
    /// Conversations are formatted with the model's chat template.
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
    /// A seed makes sampling reproducible.
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
    /// Models trained for reranking are [`RerankModel`]s.
    pub reranking: bool,
    /// [`TextModel::add_adapter`] and [`GenerateOptions::adapter`] are honored.
    pub named_adapters: bool,
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

            /// The names of the declared capabilities, in order.
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
    with_reranking => reranking,
    with_named_adapters => named_adapters,
}

impl Capabilities {
    /// Creates an empty set of capabilities.
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
            reranking: false,
            named_adapters: false,
        }
    }
}

/// An engine that loads models. Programs select it by name.
pub trait Backend: Send + Sync {
    /// The backend's name in the registry, in lower case, such as `metal`.
    fn name(&self) -> &str;

    /// Whether the backend can currently work on this machine.
    fn available(&self) -> bool;

    /// Why the backend is unavailable, and a remedy.
    fn unavailable_reason(&self) -> Option<String> {
        None
    }

    /// A description of the device for people.
    fn device(&self) -> String;

    /// The backend's capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Loads the model at `path`: a directory or a file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] with the file and the fault;
    /// [`crate::ErrorKind::Unsupported`] for features that the backend lacks;
    /// [`crate::ErrorKind::OutOfMemory`], before allocation, for a model that does not fit into
    /// memory.
    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>>;
}

/// A loaded language model. Several threads may call it concurrently.
pub trait TextModel: Send + Sync {
    /// Continues a prompt.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidOption`] for invalid options or prompts,
    /// [`crate::ErrorKind::Closed`] after [`TextModel::close`].
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream>;

    /// Answers a conversation, formatted by the model's chat template.
    ///
    /// # Errors
    /// As [`TextModel::generate`], and an error if the template refuses the messages.
    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream>;

    /// The next token of each prompt, in the prompts' order.
    ///
    /// # Errors
    /// As [`TextModel::generate`], for each prompt.
    fn classify(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>>;

    /// Continues several prompts. Each prompt has its own result or error.
    ///
    /// # Errors
    /// If the whole call cannot start, because of invalid options or a closed model.
    fn batch_generate(
        &self,
        prompts: &[Prompt],
        options: &GenerateOptions,
    ) -> Result<Vec<BatchResult>>;

    /// The architecture's name, such as `llama`.
    fn model_type(&self) -> &str;

    /// The model's architecture, sizes and types.
    fn info(&self) -> ModelInfo;

    /// The metrics of the request that ended last. For a specific request, use the metrics of its
    /// stream.
    fn metrics(&self) -> GenerateMetrics;

    /// Closes the model, and frees its memory after running requests have ended. Running requests
    /// and later calls return an error of kind [`crate::ErrorKind::Closed`]. A second close does
    /// nothing.
    ///
    /// # Errors
    /// If the engine cannot free the memory.
    fn close(&self) -> Result<()>;

    /// The training interface, if the model supports it.
    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        None
    }

    /// The inspection interface for attention and hidden states, if supported.
    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        None
    }

    /// Creates a session that runs several requests together.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the backend has no sessions,
    /// [`crate::ErrorKind::Closed`] after [`TextModel::close`].
    fn batch_session(&self) -> Result<Box<dyn BatchSession>> {
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            "this backend has no batch sessions; use batch_generate",
        ))
    }

    /// Adds the adapter in the directory `path`. Requests name it with
    /// [`GenerateOptions::adapter`](crate::GenerateOptions::adapter). All adapters share the
    /// model's weights in memory, and requests with different adapters run in one session.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the model does not support named adapters,
    /// [`crate::ErrorKind::InvalidOption`] if the name is empty or already used,
    /// [`crate::ErrorKind::InvalidModel`] for an adapter that does not fit the model, and
    /// [`crate::ErrorKind::Closed`] after [`TextModel::close`].
    fn add_adapter(&self, name: &str, path: &Path) -> Result<()> {
        let _ = path;
        Err(crate::error::Error::new(
            crate::error::ErrorKind::Unsupported,
            format!("this model cannot add the adapter `{name}`; load it with adapter_path"),
        ))
    }

    /// Removes the adapter that [`TextModel::add_adapter`] added under `name`. Running requests
    /// continue to use it. Returns whether there was such an adapter.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Closed`] after [`TextModel::close`].
    fn drop_adapter(&self, name: &str) -> Result<bool> {
        let _ = name;
        Ok(false)
    }

    /// Does slow work for a request with these options in advance, such as compiling a grammar. The
    /// work runs on the caller's thread, in parallel with session steps. Requests that start while
    /// the result is alive reuse it. A backend without such work does nothing.
    ///
    /// # Errors
    /// As [`TextModel::generate`], for invalid options.
    fn prepare(&self, options: &GenerateOptions) -> Result<Prepared> {
        let _ = options;
        Ok(Prepared::default())
    }

    /// The interface of models that were loaded with a feed-forward plan; `None` without a plan.
    fn as_routed(&self) -> Option<&dyn RoutedModel> {
        None
    }

    /// The profiling interface for decode steps, if supported.
    fn as_profiled(&self) -> Option<&dyn ProfiledModel> {
        None
    }

    /// The interface for edits of activations, if supported.
    fn as_steerable(&self) -> Option<&dyn SteerableModel> {
        None
    }

    /// The embedding interface, if supported.
    fn as_embedding_model(&self) -> Option<&dyn EmbeddingModel> {
        None
    }

    /// The reranking interface, if the model is trained for it.
    fn as_rerank_model(&self) -> Option<&dyn RerankModel> {
        None
    }

    /// The interface for prompt cache files, if supported.
    fn as_prompt_cache(&self) -> Option<&dyn PromptCacheModel> {
        None
    }

    /// The interface for token ids and logits, if supported.
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
