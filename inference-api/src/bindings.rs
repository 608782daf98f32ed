//! Parts that bindings for other languages need: options, prompts, replies and backends as JSON.
//! The C interface and the Python module use them, so both have the same names and errors.
//!
//! Generation options are named as in [`GenerateOptions::to_flat_json`] and in the HTTP API.
//! Command-line flags have the same names, with hyphens in place of underscores:
//!
//! ```
//! use inference::bindings::{Input, generate_options, object};
//!
//! let fields = object("options", r#"{"max_tokens": 8, "temp": 0.5, "stop": "\n"}"#)?;
//! let options = generate_options(&fields)?;
//! assert_eq!((options.max_tokens, options.sampling.temperature), (8, 0.5));
//! assert_eq!(options.stop.stop_strings, ["\n"]);
//!
//! let input = Input::from_json(serde_json::json!([{"role": "user", "content": "Hello"}]))?;
//! assert!(matches!(input, Input::Chat(chat) if chat.messages[0].content == "Hello"));
//! assert!(generate_options(&object("options", r#"{"top_kk": 3}"#)?).is_err());
//! # Ok::<(), inference::Error>(())
//! ```

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::backend::TextModel;
use crate::embedding::EmbedOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{ChatEnd, ChatPrompt, Message, Prompt, Tool};
use crate::metrics::GenerateMetrics;
use crate::options::{GROUPS, GenerateOptions, LoadOptions, Parameter};
use crate::registry::{availability, backends, default_backend, question};
use crate::token::{FinishReason, StopCause, Token, TokenLogprobs, TokenStream};

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Parses a JSON object. An empty text is an object without fields.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] if the text is not a JSON object. The message begins with `what`.
pub fn object(what: &str, text: &str) -> Result<Map<String, Value>> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(text)
        .map_err(|e| invalid(format!("{what} must be a JSON object")).with_source(e))
}

/// A description of a backend.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendInfo {
    /// The name by which a program selects the backend.
    pub name: String,
    /// Whether the backend works on this machine.
    pub available: bool,
    /// Whether a program that names no backend gets this one.
    pub default: bool,
    /// Why the backend is unavailable.
    pub reason: Option<String>,
    /// The device on which the backend computes.
    pub device: String,
    /// The names of its [`Capabilities`](crate::Capabilities).
    pub capabilities: Vec<String>,
}

/// Describes all linked backends, available or not, sorted by name.
#[must_use]
pub fn backend_infos() -> Vec<BackendInfo> {
    let default = default_backend().ok();
    let info = |backend: &std::sync::Arc<dyn crate::backend::Backend>| {
        let available = availability(backend.as_ref());
        BackendInfo {
            name: backend.name().to_owned(),
            available: available.is_ok(),
            default: default.as_ref().is_some_and(|d| d.name() == backend.name()),
            reason: available.err(),
            device: backend.device(),
            capabilities: (backend.capabilities().names().into_iter())
                .map(str::to_owned)
                .collect(),
        }
    };
    backends().iter().map(info).collect()
}

/// The default options as JSON, in groups.
fn defaults<T: Default + Serialize>() -> Result<Map<String, Value>> {
    match serde_json::to_value(T::default()) {
        Ok(Value::Object(fields)) => Ok(fields),
        other => Err(Error::new(
            ErrorKind::Engine,
            format!("the default options are not a JSON object: {other:?}"),
        )),
    }
}

/// Checks the type of one option. The error names the option. `group` is the group that contains
/// it.
fn check<T: DeserializeOwned>(group: Option<&str>, name: &str, value: &Value) -> Result<()> {
    let mut single = Map::from_iter([(name.to_owned(), value.clone())]);
    if let Some(group) = group {
        single = Map::from_iter([(group.to_owned(), Value::Object(single))]);
    }
    match serde_json::from_value::<T>(Value::Object(single)) {
        Ok(_) => Ok(()),
        Err(e) => Err(invalid(format!("{name} is {}: {e}", excerpt(value)))),
    }
}

/// A value as JSON, shortened for a message.
fn excerpt(value: &Value) -> String {
    const MOST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// The field that has this name or alias: `temperature` for `temp`, and `stop_strings` for `stop`.
fn canonical(name: &str) -> &str {
    if name == "stop" {
        return "stop_strings";
    }
    Parameter::all()
        .find(|parameter| parameter.aliases().contains(&name))
        .map_or(name, |parameter| parameter.name())
}

/// Reads generation options by their names, without groups. Names of other tools
/// ([`Parameter::aliases`]) and OpenAI's `stop` are accepted, and so are groups as in the JSON of
/// [`GenerateOptions`]. `null` means the default.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for a name that is unknown or given twice, and for a value of the
/// wrong type or out of range.
pub fn generate_options(fields: &Map<String, Value>) -> Result<GenerateOptions> {
    let known = defaults::<GenerateOptions>()?;
    let group_of = |name: &str| {
        let has = |group: &&&str| known.get(**group).is_some_and(|g| g.get(name).is_some());
        GROUPS.iter().find(has).copied()
    };
    // The given options, each with its group.
    let mut given: BTreeMap<&str, (Option<&str>, Value)> = BTreeMap::new();
    let mut put = |written: &'static str, group, name, value: &Value| {
        check::<GenerateOptions>(group, name, value)?;
        match given.insert(name, (group, value.clone())) {
            None => Ok(()),
            Some(_) => Err(invalid(format!("{name} is given twice{written}"))),
        }
    };
    for (written, value) in fields {
        if value.is_null() {
            continue;
        }
        let is_group = GROUPS.contains(&written.as_str());
        if let (true, Value::Object(members)) = (is_group, value) {
            for (name, value) in members.iter().filter(|(_, value)| !value.is_null()) {
                put(", alone and in its group", Some(written), name, value)?;
            }
            continue;
        }
        let name = canonical(written);
        let one = |text: &String| Value::Array(vec![Value::String(text.clone())]);
        let list = match value {
            Value::String(text) if name == "stop_strings" => Some(one(text)),
            _ => None,
        };
        let value = list.as_ref().unwrap_or(value);
        let group = group_of(name);
        if group.is_none() && !matches!(name, "max_tokens" | "steering" | "adapter") {
            let groups = GROUPS
                .iter()
                .filter_map(|group| known.get(*group)?.as_object());
            let names = groups.flat_map(|group| group.keys().map(String::as_str));
            let names: Vec<&str> = names
                .chain(["max_tokens", "steering", "adapter", "stop"])
                .collect();
            return Err(invalid(format!(
                "there is no option `{written}`{}; there are {}",
                question(written, names.iter().copied()),
                names.join(", ")
            )));
        }
        put(", by two of its names", group, name, value)?;
    }
    let mut nested = Map::new();
    for (name, (group, value)) in given {
        match group {
            None => drop(nested.insert(name.to_owned(), value)),
            Some(group) => {
                let members = nested
                    .entry(group)
                    .or_insert_with(|| Value::Object(Map::new()));
                if let Value::Object(members) = members {
                    members.insert(name.to_owned(), value);
                }
            }
        }
    }
    let read = serde_json::from_value::<GenerateOptions>(Value::Object(nested));
    let options = read.map_err(|e| invalid("the options cannot be read").with_source(e))?;
    options.validate()?;
    Ok(options)
}

/// Reads options without groups. `null` means the default.
fn flat<T: Default + Serialize + DeserializeOwned>(fields: &Map<String, Value>) -> Result<T> {
    let known = defaults::<T>()?;
    let mut given = Map::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        if !known.contains_key(name) {
            let names: Vec<&str> = known.keys().map(String::as_str).collect();
            return Err(invalid(format!(
                "there is no option `{name}`{}; there are {}",
                question(name, names.iter().copied()),
                names.join(", ")
            )));
        }
        check::<T>(None, name, value)?;
        given.insert(name.clone(), value.clone());
    }
    serde_json::from_value(Value::Object(given))
        .map_err(|e| invalid("the options cannot be read").with_source(e))
}

/// Reads load options: the fields of [`LoadOptions`].
///
/// # Errors
/// As [`generate_options`].
pub fn load_options(fields: &Map<String, Value>) -> Result<LoadOptions> {
    let options: LoadOptions = flat(fields)?;
    options.validate()?;
    Ok(options)
}

/// Reads options of embeddings: the fields of [`EmbedOptions`]. `prompt_name` is the name of one of
/// the model's prompts, as in sentence-transformers.
///
/// # Errors
/// As [`generate_options`]. The model checks ranges.
pub fn embed_options(fields: &Map<String, Value>) -> Result<EmbedOptions> {
    let mut fields = fields.clone();
    match fields.remove("prompt_name") {
        None | Some(Value::Null) => {}
        Some(Value::String(name)) => {
            let named = serde_json::json!({ "named": name });
            if fields.insert("prompt".to_owned(), named).is_some() {
                return Err(invalid(
                    "prompt and prompt_name are given; leave one of them out",
                ));
            }
        }
        Some(other) => {
            return Err(invalid(format!(
                "prompt_name is {}; it must be a text",
                excerpt(&other)
            )));
        }
    }
    flat(&fields)
}

/// The input of a reply.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A prompt that the model continues.
    Prompt(Prompt),
    /// A conversation that the model answers.
    Chat(ChatPrompt),
}

/// The fields of a conversation, with the names of OpenAI's chat API and of vLLM.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Conversation {
    messages: Vec<Value>,
    #[serde(default)]
    tools: Option<Vec<Tool>>,
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(default)]
    continue_final_message: bool,
}

impl Input {
    /// Reads a text, a list of token ids, a list of messages, or an object with `messages` and
    /// optionally `tools`, `chat_template_kwargs` and `continue_final_message`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for any other value. The message gives the index of a faulty
    /// element.
    pub fn from_json(value: Value) -> Result<Self> {
        match value {
            Value::String(text) => Ok(Self::Prompt(text.into())),
            Value::Array(items) if items.iter().any(Value::is_object) => {
                Ok(Self::Chat(ChatPrompt::new(messages(items)?)))
            }
            Value::Array(items) => {
                let id = |(i, item): (usize, &Value)| {
                    let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
                    id.ok_or_else(|| {
                        invalid(format!(
                            "prompt[{i}] is {}; it must be a token id or a message",
                            excerpt(item)
                        ))
                    })
                };
                let ids: Result<Vec<u32>> = items.iter().enumerate().map(id).collect();
                Ok(Self::Prompt(ids?.into()))
            }
            Value::Object(_) => {
                let read: Conversation = serde_json::from_value(value)
                    .map_err(|e| invalid(format!("the prompt is not a conversation: {e}")))?;
                let mut chat = ChatPrompt::new(messages(read.messages)?)
                    .with_tools(read.tools.unwrap_or_default());
                chat.template = read.chat_template_kwargs.unwrap_or_default();
                if read.continue_final_message {
                    chat.end = ChatEnd::LastMessage;
                }
                Ok(Self::Chat(chat))
            }
            other => Err(invalid(format!(
                "the prompt is {}; it must be a text, a list of token ids, a list of messages, or \
                 an object with messages",
                excerpt(&other)
            ))),
        }
    }

    /// Starts the reply.
    ///
    /// # Errors
    /// As [`TextModel::generate`] and [`TextModel::chat`]; [`ErrorKind::Unsupported`] for tools and
    /// template arguments if the model is not a [`TokenModel`](crate::TokenModel), and for the
    /// option `logits`, because a [`Reply`] has none.
    pub fn start(&self, model: &dyn TextModel, options: &GenerateOptions) -> Result<TokenStream> {
        if options.output.logits {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "logits are not returned here; leave the option out, or use logprobs",
            ));
        }
        match self {
            Self::Prompt(prompt) => model.generate(prompt, options),
            Self::Chat(chat) if chat.is_plain() => model.chat(&chat.messages, options),
            Self::Chat(chat) => match model.as_token_model() {
                Some(tokens) => {
                    let prepared = tokens.prepare_chat(chat)?;
                    model.generate(&prepared.into(), options)
                }
                None => {
                    chat.check_plain()?;
                    model.chat(&chat.messages, options)
                }
            },
        }
    }
}

/// Reads a list of prompts. Each element is a text or a list of token ids.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] with the index of the faulty element.
pub fn prompts(value: Value) -> Result<Vec<Prompt>> {
    let Value::Array(items) = value else {
        return Err(invalid(format!(
            "the texts are {}; they must be a list of texts or of lists of token ids",
            excerpt(&value)
        )));
    };
    let prompt = |(i, item): (usize, Value)| match Input::from_json(item) {
        Ok(Input::Prompt(prompt)) => Ok(prompt),
        Ok(Input::Chat(_)) => Err(invalid(format!(
            "texts[{i}] is a conversation; it must be a text or a list of token ids"
        ))),
        Err(e) => Err(e.context(format!("texts[{i}]"))),
    };
    items.into_iter().enumerate().map(prompt).collect()
}

fn messages(items: Vec<Value>) -> Result<Vec<Message>> {
    let message = |(i, item): (usize, Value)| {
        serde_json::from_value(item).map_err(|e| invalid(format!("messages[{i}]: {e}")))
    };
    items.into_iter().enumerate().map(message).collect()
}

/// A whole reply.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reply {
    /// The text.
    pub text: String,
    /// The ids of its tokens.
    pub tokens: Vec<u32>,
    /// Why the reply ended.
    pub finish_reason: Option<FinishReason>,
    /// The token or string that stopped the reply.
    pub stop: Option<StopCause>,
    /// The log-probabilities of the reply's tokens, if the option `logprobs` is set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
    /// The metrics, with the numbers of tokens of the prompt and of the reply.
    pub metrics: GenerateMetrics,
}

impl Reply {
    /// Adds a token.
    pub fn push(&mut self, token: &Token) {
        self.text.push_str(&token.text);
        self.tokens.push(token.id);
        self.logprobs.extend(token.logprobs.clone());
    }

    /// Sets the reason, the cause and the metrics of a stream that has ended.
    pub fn finish(&mut self, stream: &TokenStream) {
        self.finish_reason = stream.finish_reason();
        self.stop = stream.stop_cause();
        self.metrics = stream.metrics();
    }

    /// Generates to the end, or until `on_token` returns `false`. If `on_token` ends it, the reply
    /// contains the tokens so far, and its finish reason is [`FinishReason::Cancelled`]. A
    /// cancellation by a [`CancelToken`](crate::CancelToken) has the same result.
    ///
    /// # Errors
    /// The first error of the stream, except a cancellation.
    pub fn collect(
        mut stream: TokenStream,
        mut on_token: impl FnMut(&Token) -> bool,
    ) -> Result<Self> {
        let mut reply = Self::default();
        let mut stopped = false;
        for token in stream.by_ref() {
            let token = match token {
                Ok(token) => token,
                Err(e) if e.kind() == ErrorKind::Cancelled => break,
                Err(e) => return Err(e),
            };
            reply.push(&token);
            if !on_token(&token) {
                stopped = true;
                break;
            }
        }
        reply.finish(&stream);
        if stopped && reply.finish_reason.is_none() {
            reply.finish_reason = Some(FinishReason::Cancelled);
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<GenerateOptions> {
        generate_options(value.as_object().unwrap())
    }

    #[test]
    fn every_flat_option_is_read_back() {
        let options = GenerateOptions::new()
            .with_max_tokens(7)
            .with_temperature(0.5)
            .with_repeat_penalty(1.25)
            .with_stop(vec![String::from("x")])
            .with_logprobs(2)
            .with_cache_prompt(false)
            .with_prompt_lookup(3)
            .with_seed(11)
            .with_banned_tokens([5])
            .with_logit_bias([(3, 0.5)]);
        let fields = options.to_flat_json().unwrap();
        let again = generate_options(&fields).unwrap();
        assert_eq!(again.to_flat_json().unwrap(), fields);
        let groups = serde_json::to_value(&options).unwrap();
        assert_eq!(read(groups).unwrap().to_flat_json().unwrap(), fields);
    }

    #[test]
    fn other_names_mean_the_same_and_null_means_the_default() {
        let options = read(json!({
            "temp": 0.5, "repetition_penalty": 1.5, "stop": ["a", "b"], "seed": null, "top_k": 4,
        }))
        .unwrap();
        assert_eq!(options.sampling.temperature, 0.5);
        assert_eq!(options.penalties.repeat_penalty, 1.5);
        assert_eq!(options.stop.stop_strings, ["a", "b"]);
        assert_eq!((options.sampling.seed, options.sampling.top_k), (None, 4));
        let options = read(json!({"stop": {"stop_tokens": [2]}})).unwrap();
        assert_eq!(options.stop.stop_tokens, [2]);
    }

    #[test]
    fn wrong_options_are_named() {
        for (fields, part) in [
            (json!({"temprature": 1}), "did you mean `temperature`"),
            (json!({"temperature": "hot"}), "temperature is \"hot\""),
            (json!({"temperature": -1}), "temperature is -1"),
            (json!({"temp": 1, "temperature": 1}), "given twice"),
            (json!({"top_k": 1, "sampling": {"top_k": 1}}), "given twice"),
            (json!({"sampling": {"topk": 1}}), "topk"),
            (json!({"max_tokens": -1}), "max_tokens is -1"),
            (json!({"stop": [""]}), "stop_strings[0]"),
        ] {
            let error = read(fields).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
            assert!(format!("{error:#}").contains(part), "{error:#}");
        }
        let load = |value: Value| load_options(value.as_object().unwrap());
        assert_eq!(load(json!({"kv_bits": 8})).unwrap().kv_bits, Some(8));
        for (fields, part) in [
            (json!({"kv_bits": 7}), "kv_bits is 7"),
            (json!({"kv_bit": 8}), "did you mean `kv_bits`"),
            (json!({"dtype": "int8"}), "dtype is \"int8\""),
        ] {
            let error = load(fields).unwrap_err();
            assert!(error.message().contains(part), "{error}");
        }
        let embed = |value: Value| embed_options(value.as_object().unwrap());
        let named = embed(json!({"prompt_name": "query"})).unwrap();
        let query = crate::embedding::EmbedPrompt::Named(String::from("query"));
        assert_eq!(named.prompt, query);
        assert!(embed(json!({"prompt_name": 1})).is_err());
        assert!(embed(json!({"prompt_name": "a", "prompt": "none"})).is_err());
        assert!(object("options", "[1]").is_err());
        assert!(object("options", " ").unwrap().is_empty());
    }

    #[test]
    fn inputs_are_told_apart() {
        let read = |value| Input::from_json(value).unwrap();
        assert_eq!(read(json!("a")), Input::Prompt("a".into()));
        assert_eq!(read(json!([1, 2])), Input::Prompt([1, 2].into()));
        let Input::Chat(chat) = read(json!({
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"enable_thinking": false},
            "continue_final_message": true,
        })) else {
            panic!("no chat")
        };
        assert_eq!(chat.template["enable_thinking"], false);
        assert_eq!(chat.end, ChatEnd::LastMessage);
        for (value, part) in [
            (json!(3), "the prompt is 3"),
            (json!([1, "x"]), "prompt[1] is \"x\""),
            (json!([-1]), "prompt[0]"),
            (json!([{"role": "user", "content": "x"}, 3]), "messages[1]"),
            (json!({"messages": [], "message": 1}), "unknown field"),
        ] {
            let error = Input::from_json(value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
            assert!(error.message().contains(part), "{error}");
        }
        let two = prompts(json!(["a", [1]])).unwrap();
        assert_eq!(two, ["a".into(), Prompt::Tokens(vec![1])]);
        for (value, part) in [
            (json!("a"), "the texts are \"a\""),
            (json!(["a", 3]), "texts[1]"),
            (json!([[{"role": "user", "content": "x"}]]), "texts[0]"),
        ] {
            let error = prompts(value).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
