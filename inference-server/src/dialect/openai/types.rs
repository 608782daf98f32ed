//! Requests of OpenAI's API. The structs include fields that this server does not support, so that
//! a request with such a field is refused by name. Unknown fields are ignored, because clients send
//! extra fields.

use std::collections::BTreeMap;

use inference::{Message, Tool};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::parameters::OpenAiParameters;
use crate::pipeline::{OneOrMore, Prompts};

/// Defines a request type with the fields that chats and completions share.
macro_rules! request {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Deserialize, ToSchema)]
        pub(crate) struct $name {
            /// The model's name. Without it, the server uses its first model.
            pub(crate) model: Option<String>,
            $($(#[$field_doc])* pub(crate) $field: $ty,)*
            /// Maximum number of tokens of a reply.
            pub(crate) max_tokens: Option<usize>,
            /// The sampling options; some are not OpenAI's.
            #[serde(flatten)]
            pub(crate) parameters: OpenAiParameters,
            /// Biases by token id, added to the logits.
            pub(crate) logit_bias: Option<BTreeMap<String, f32>>,
            /// Strings that end the reply.
            #[schema(value_type = Option<crate::pipeline::described::OneOrMore>)]
            pub(crate) stop: Option<OneOrMore>,
            /// Tokens that end the reply (not OpenAI's).
            pub(crate) stop_token_ids: Option<Vec<u32>>,
            /// Continue after the model's end-of-text token (not OpenAI's).
            pub(crate) ignore_eos: Option<bool>,
            /// Minimum number of tokens of a reply (not OpenAI's).
            pub(crate) min_tokens: Option<usize>,
            /// The same seed gives the same reply.
            pub(crate) seed: Option<i64>,
            /// The number of replies.
            pub(crate) n: Option<usize>,
            /// Send the reply while it is generated.
            pub(crate) stream: Option<bool>,
            /// The options of a stream.
            pub(crate) stream_options: Option<StreamOptions>,
            /// Reuse cached computations of a common prefix with earlier prompts (not OpenAI's).
            pub(crate) cache_prompt: Option<bool>,
            /// Cached prompt prefixes are shared only between requests with the same salt (from
            /// vLLM).
            pub(crate) cache_salt: Option<String>,
            /// Edits of the model's states, `{"edits": [..]}`, if the server allows them (not
            /// OpenAI's).
            #[schema(value_type = Option<Object>)]
            pub(crate) steering: Option<inference::Steering>,
            /// Not supported.
            pub(crate) grammar: Option<String>,
        }

        impl $name {
            /// Returns the fields that chats and completions share.
            pub(crate) fn sampling(&self) -> Sampling<'_> {
                Sampling {
                    parameters: &self.parameters,
                    logit_bias: self.logit_bias.as_ref(),
                    stop: self.stop.as_ref(),
                    stop_token_ids: self.stop_token_ids.as_deref(),
                    ignore_eos: self.ignore_eos,
                    min_tokens: self.min_tokens,
                    seed: self.seed,
                    n: self.n,
                    stream: self.stream,
                    stream_options: self.stream_options.as_ref(),
                    cache_prompt: self.cache_prompt,
                    cache_salt: self.cache_salt.as_ref(),
                    steering: self.steering.as_ref(),
                    grammar: self.grammar.as_deref(),
                }
            }
        }
    };
}

/// The fields that chats and completions share.
pub(crate) struct Sampling<'a> {
    pub(crate) parameters: &'a OpenAiParameters,
    pub(crate) logit_bias: Option<&'a BTreeMap<String, f32>>,
    pub(crate) stop: Option<&'a OneOrMore>,
    pub(crate) stop_token_ids: Option<&'a [u32]>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) min_tokens: Option<usize>,
    pub(crate) seed: Option<i64>,
    pub(crate) n: Option<usize>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<&'a StreamOptions>,
    pub(crate) cache_prompt: Option<bool>,
    pub(crate) cache_salt: Option<&'a String>,
    pub(crate) steering: Option<&'a inference::Steering>,
    pub(crate) grammar: Option<&'a str>,
}

/// The options of a stream.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Send a last chunk with the counts of tokens.
    pub(crate) include_usage: Option<bool>,
}

request! {
    /// A conversation to answer.
    ChatRequest {
        /// The turns, oldest first: `{"role": .., "content": ..}` and, for tools, `tool_calls` and
        /// `tool_call_id`.
        #[schema(value_type = Vec<Object>)]
        messages: Vec<Message>,
        /// Maximum number of tokens of a reply, reasoning included.
        max_completion_tokens: Option<usize>,
        /// Return log-probabilities.
        logprobs: Option<bool>,
        /// The number of alternatives of each token.
        top_logprobs: Option<usize>,
        /// `text`, `json_object` or `json_schema`.
        #[schema(value_type = Option<Object>)]
        response_format: Option<ResponseFormat>,
        /// A schema in the form of `response_format` (llama.cpp's).
        #[schema(value_type = Option<Object>)]
        json_schema: Option<Value>,
        /// Functions that the model may call.
        #[schema(value_type = Option<Vec<Object>>)]
        tools: Option<Vec<Tool>>,
        /// `auto`, `none`, `required`, or `{"type": "function", "function": {"name": ..}}`.
        #[schema(value_type = Option<crate::pipeline::described::TextOrObject>)]
        tool_choice: Option<Value>,
        /// Whether the reply may have several calls.
        parallel_tool_calls: Option<bool>,
        /// The effort of reasoning, for templates that know `reasoning_effort`.
        reasoning_effort: Option<String>,
        /// More variables for the model's chat template (not OpenAI's).
        #[schema(value_type = Option<Object>)]
        chat_template_kwargs: Option<Map<String, Value>>,
        /// Continue the last message (not OpenAI's).
        continue_final_message: Option<bool>,
        /// End the prompt where the model's answer begins (not OpenAI's); true by default.
        add_generation_prompt: Option<bool>,
        /// Not supported.
        #[schema(value_type = Option<Object>)]
        functions: Option<Value>,
        /// Not supported.
        #[schema(value_type = Option<Object>)]
        function_call: Option<Value>,
        /// Only `text` is supported.
        modalities: Option<Vec<String>>,
        /// Not supported.
        #[schema(value_type = Option<Object>)]
        audio: Option<Value>,
        /// Not supported.
        #[schema(value_type = Option<Object>)]
        web_search_options: Option<Value>,
    }
}

request! {
    /// A text to continue.
    CompletionRequest {
        /// A text, a list of token ids, or a list of texts and of such lists.
        #[schema(value_type = Option<crate::pipeline::described::Prompts>)]
        prompt: Option<Prompts>,
        /// Return log-probabilities, with this number of alternatives of each token.
        logprobs: Option<usize>,
        /// Put the prompt before the reply.
        echo: Option<bool>,
        /// The text after the reply, for models whose vocabulary has tokens for it.
        suffix: Option<String>,
        /// Must equal `n`. Choosing among more replies is not supported.
        best_of: Option<usize>,
    }
}

/// The format that the reply must have.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    Text,
    JsonObject {
        /// The schema of the object (llama.cpp's).
        schema: Option<Value>,
    },
    JsonSchema {
        json_schema: JsonSchema,
    },
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct JsonSchema {
    pub(crate) schema: Option<Value>,
}

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingRequest {
    /// The model's name. Without it, the server uses its first model.
    pub(crate) model: Option<String>,
    /// A text, a list of token ids, or a list of texts and of such lists.
    #[schema(value_type = crate::pipeline::described::Prompts)]
    pub(crate) input: Prompts,
    /// `float` (the default) or `base64`, of little-endian float32.
    pub(crate) encoding_format: Option<String>,
    /// Return only the first elements of each vector, for models trained for that.
    pub(crate) dimensions: Option<usize>,
}
