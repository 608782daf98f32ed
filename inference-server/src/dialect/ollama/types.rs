//! Requests of Ollama's API.

use std::time::Duration;

use inference::{
    GenerateOptions, Grammar, Message, Parameter, ParameterValue, SamplingDefaults, Tool, ToolCall,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::models::{KeepAlive, ServedModel, parse_keep_alive};
use crate::pipeline::parameters::{self, Dialect, Parameters};
use crate::pipeline::{OneOrMore, prepare};
use crate::state::App;

/// A conversation to answer.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ollama::ChatRequest)]
pub(crate) struct ChatRequest {
    /// The model's name.
    pub(super) model: Option<String>,
    /// The turns, oldest first. Without any, the request only loads or unloads the model.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    pub(super) messages: Vec<Turn>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(super) tools: Option<Vec<Tool>>,
    #[serde(flatten)]
    pub(super) rest: Rest,
}

/// A text to answer. With `raw`, a text to continue.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct GenerateRequest {
    /// The model's name.
    pub(super) model: Option<String>,
    /// The text. Without one, the request only loads or unloads the model.
    #[serde(default)]
    pub(super) prompt: String,
    /// An instruction.
    pub(super) system: Option<String>,
    /// Continue the prompt without a chat template.
    pub(super) raw: Option<bool>,
    /// Not supported.
    pub(super) template: Option<String>,
    /// Not supported.
    pub(super) suffix: Option<String>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub(super) context: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub(super) images: Option<Value>,
    #[serde(flatten)]
    pub(super) rest: Rest,
}

/// The fields that both requests have.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Rest {
    /// Send the reply while it is generated; true by default.
    pub(super) stream: Option<bool>,
    /// `json`, or a JSON schema.
    #[schema(value_type = Option<crate::pipeline::described::TextOrObject>)]
    pub(super) format: Option<Value>,
    /// The sampling options.
    pub(super) options: Option<Options>,
    /// Whether the model reasons before its answer.
    #[schema(value_type = Option<crate::pipeline::described::BoolOrText>)]
    pub(super) think: Option<Value>,
    /// Cached prompt prefixes are shared only between requests with the same salt (from vLLM).
    pub(super) cache_salt: Option<String>,
    /// Not supported.
    pub(super) logprobs: Option<bool>,
    /// How long the model stays loaded after this request: `5m`, or seconds. A negative value means
    /// forever.
    #[schema(value_type = Option<crate::pipeline::described::NumberOrText>)]
    pub(super) keep_alive: Option<Value>,
}

impl Rest {
    /// Checks the types of fields, also in requests that only load a model. Returns the requested
    /// keep-alive time.
    pub(super) fn check(&self) -> Result<Option<KeepAlive>, ApiError> {
        let think = self.think.as_ref();
        if !think.is_none_or(|v| v.is_boolean() || v.is_string() || v.is_null()) {
            let message = "think must be true, false, or a level such as \"high\"";
            return Err(ApiError::field("think", message));
        }
        let format = self.format.as_ref();
        if !format.is_none_or(|v| v.is_object() || v.is_string() || v.is_null()) {
            return Err(ApiError::field(
                "format",
                "format must be \"json\" or a schema",
            ));
        }
        if let Some(options) = &self.options {
            options.parameters.numbers()?;
        }
        keep_alive(self.keep_alive.as_ref())
    }
}

/// The keep-alive time, if the request sets one.
pub(super) fn keep_alive(value: Option<&Value>) -> Result<Option<KeepAlive>, ApiError> {
    let bad = || {
        let message = "keep_alive must be a number of seconds or a duration such as \"5m\"";
        ApiError::field("keep_alive", message)
    };
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Number(n)) => {
            let seconds = n.as_f64().ok_or_else(bad)?;
            if seconds < 0.0 {
                return Ok(Some(None));
            }
            let time = Duration::try_from_secs_f64(seconds).map_err(|_| bad())?;
            Ok(Some(Some(time)))
        }
        Some(Value::String(text)) => parse_keep_alive(text).map(Some).map_err(|_| bad()),
        Some(_) => Err(bad()),
    }
}

/// Ollama's fields and defaults.
#[derive(Debug)]
pub(crate) struct Ollama;

/// An alias without generic parameters, because the derived OpenAPI schemas require one.
pub(crate) type OllamaParameters = Parameters<Ollama>;

impl Dialect for Ollama {
    const NAME: &'static str = "ollama";
    const PREFIX: &'static str = "options.";

    fn default_of(parameter: &Parameter) -> Option<ParameterValue> {
        Some(match parameter.name() {
            "temperature" => ParameterValue::Real(0.8),
            "top_k" => ParameterValue::Count(40),
            "top_p" => ParameterValue::Real(0.9),
            "repeat_penalty" => ParameterValue::Real(1.1),
            _ => return None,
        })
    }

    fn takes(parameter: &Parameter) -> bool {
        // Ollama's own field `repeat_last_n` replaces this parameter, because its value 0 has
        // another meaning.
        parameter.name() != "repeat_window"
    }
}

/// The sampling options.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Options {
    /// Maximum number of tokens of a reply. A negative number means as many as fit.
    num_predict: Option<i64>,
    /// Maximum number of tokens of prompt and reply.
    pub(super) num_ctx: Option<usize>,
    #[serde(flatten)]
    parameters: OllamaParameters,
    seed: Option<i64>,
    #[schema(value_type = Option<crate::pipeline::described::OneOrMore>)]
    stop: Option<OneOrMore>,
    /// The number of last tokens that the repetition penalty counts; 0 turns it off, -1 counts all.
    repeat_last_n: Option<i64>,
    /// Not supported.
    mirostat: Option<i64>,
    /// Only 1 is supported.
    tfs_z: Option<f32>,
    /// All other options.
    #[serde(flatten)]
    #[schema(ignore)]
    more: Map<String, Value>,
}

/// Ollama options that have no effect here. Most of them configure the engine, which only the
/// operator can do. Prompts are never cut. The Mirostat parameters have no effect, because requests
/// with Mirostat are refused.
const NO_EFFECT: [&str; 16] = [
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "mirostat_eta",
    "mirostat_tau",
    "num_batch",
    "num_gpu",
    "num_gqa",
    "num_keep",
    "num_thread",
    "numa",
    "penalize_newline",
    "use_mlock",
    "use_mmap",
    "vocab_only",
];

#[derive(Debug, Deserialize)]
pub(crate) struct Turn {
    role: String,
    #[serde(default)]
    content: String,
    thinking: Option<String>,
    images: Option<Vec<Value>>,
    tool_calls: Option<Vec<Call>>,
    tool_name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Call {
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: Map<String, Value>,
}

/// The messages of a conversation.
pub(super) fn messages(turns: Vec<Turn>) -> Result<Vec<Message>, ApiError> {
    let mut all = Vec::new();
    for (n, turn) in turns.into_iter().enumerate() {
        if turn.images.is_some_and(|images| !images.is_empty()) {
            return Err(ApiError::unsupported(
                format!("messages[{n}].images"),
                "images are not supported",
            ));
        }
        let mut message = Message::new(turn.role, turn.content);
        message.reasoning = turn.thinking;
        message.name = turn.tool_name;
        let calls = turn.tool_calls.unwrap_or_default();
        message.tool_calls = calls
            .into_iter()
            .enumerate()
            .map(|(i, call)| {
                let id = format!("call_{n}_{i}");
                ToolCall::new(id, call.function.name, call.function.arguments)
            })
            .collect();
        all.push(message);
    }
    Ok(all)
}

impl Rest {
    /// The options that the request describes, with Ollama's defaults.
    pub(super) fn options(&self, app: &App) -> Result<GenerateOptions, ApiError> {
        let none = Options::default();
        let options = self.options.as_ref().unwrap_or(&none);
        let not = |value: Option<f32>| value.is_some_and(|v| v != 1.0);
        for (name, there) in [
            ("mirostat", options.mirostat.is_some_and(|n| n != 0)),
            ("tfs_z", not(options.tfs_z)),
        ] {
            if there {
                let message = format!("{name} is not supported; leave it out");
                return Err(ApiError::unsupported(format!("options.{name}"), message));
            }
        }
        let unknown = |name: &&String| !NO_EFFECT.contains(&name.as_str());
        if let Some(name) = options.more.keys().find(unknown) {
            let name: String = name.chars().take(40).collect();
            let message = format!("the option {name:?} is not known");
            return Err(ApiError::unsupported(format!("options.{name}"), message));
        }
        if self.logprobs == Some(true) {
            return Err(ApiError::unsupported(
                "logprobs",
                "logprobs are not supported here; use /v1/chat/completions",
            ));
        }
        let mut o = parameters::base::<Ollama>(app, &SamplingDefaults::default())?;
        o.prefill.cache_salt = prepare::salt(self.cache_salt.as_ref())?;
        options.parameters.apply(&mut o)?;
        match options.repeat_last_n {
            // In the contract, a window of 0 means all tokens. In Ollama, 0 disables the penalty.
            Some(0) => o.penalties.repeat_penalty = 1.0,
            Some(n) => o.penalties.repeat_window = usize::try_from(n).unwrap_or(0),
            None => {}
        }
        o.sampling.seed = options.seed.map(i64::cast_unsigned);
        if let Some(stop) = &options.stop {
            o.stop.stop_strings = prepare::stops(app, "options.stop", stop.list())?;
        }
        Ok(o)
    }

    /// The request's maximum number of tokens, if it sets one.
    pub(super) fn asked(&self) -> Option<usize> {
        let predict = self.options.as_ref()?.num_predict?;
        usize::try_from(predict).ok()
    }

    /// The grammar that the reply must match.
    pub(super) fn grammar(
        &self,
        app: &App,
        model: &ServedModel,
    ) -> Result<Option<Grammar>, ApiError> {
        match &self.format {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text.is_empty() => Ok(None),
            Some(Value::String(text)) if text == "json" => {
                prepare::grammar(app, model, "format", &json!({"type": "object"})).map(Some)
            }
            Some(schema @ Value::Object(_)) => {
                prepare::grammar(app, model, "format", schema).map(Some)
            }
            Some(_) => Err(ApiError::field(
                "format",
                "format must be \"json\" or a JSON schema, an object",
            )),
        }
    }

    /// Variables for the chat template.
    pub(super) fn template(&self, model: &ServedModel) -> Result<Map<String, Value>, ApiError> {
        let mut names = Map::new();
        match &self.think {
            None | Some(Value::Null) => {}
            Some(Value::Bool(false)) => {
                names.insert("enable_thinking".into(), false.into());
            }
            Some(_) if !model.format().reads_reasoning() => {
                return Err(ApiError::unsupported(
                    "think",
                    format!(
                        "the model {} has no reasoning that can be separated from its answer; leave think out",
                        model.id()
                    ),
                ));
            }
            Some(Value::String(effort)) => {
                names.insert("reasoning_effort".into(), effort.as_str().into());
            }
            Some(_) => {
                names.insert("enable_thinking".into(), true.into());
            }
        }
        Ok(names)
    }
}
