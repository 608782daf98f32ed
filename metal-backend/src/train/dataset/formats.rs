//! Converts a line of a data file to an example: chat, completions or text, optionally with tools.
//!
//! The ids, and the number of ids that the loss excludes, equal those of Python mlx-lm 0.30.7
//! (`tuner/datasets.py`), with one difference: text in a message never becomes a control token.
//! `load` reads files.

use inference::{Error, ErrorKind, Result};
use serde_json::{Map, Value as Json, json};

use super::Example;
use crate::text::{ChatOptions, TextPipeline};

/// The format of a file's lines.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `{"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}`; `tools` may be
    /// absent.
    Chat,
    /// `{"prompt": "...", "completion": "..."}`: a chat of one question and its answer.
    Completions,
    /// `{"text": "..."}`: tokenized without a chat template.
    Text,
}

/// The names of fields in lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldNames {
    /// The messages of a chat.
    pub chat: String,
    /// The question.
    pub prompt: String,
    /// The answer.
    pub completion: String,
    /// A text.
    pub text: String,
}

impl Default for FieldNames {
    fn default() -> Self {
        let [chat, prompt, completion, text] =
            ["messages", "prompt", "completion", "text"].map(String::from);
        Self {
            chat,
            prompt,
            completion,
            text,
        }
    }
}

pub(super) fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

pub(super) fn text<'a>(line: &'a Map<String, Json>, name: &str) -> Result<&'a str> {
    match line.get(name) {
        Some(Json::String(text)) => Ok(text),
        Some(_) => Err(bad(format!("{name:?} is not a text"))),
        None => Err(bad(format!(
            "{name:?} is missing; the first line of the file has it, so every line must"
        ))),
    }
}

/// Returns the field `name` of a line. If it is missing, the error is `needs`.
pub(super) fn required<'a>(
    line: &'a Map<String, Json>,
    name: &str,
    needs: &str,
) -> Result<&'a Json> {
    line.get(name).ok_or_else(|| {
        let fields: Vec<&str> = line.keys().take(8).map(String::as_str).collect();
        bad(format!("the line has the fields {fields:?}; {needs}"))
    })
}

/// Returns the messages of a prompt: the field `system` if there is one, then the field `name`,
/// which is text or a list of messages.
pub(super) fn prompt_of(line: &Map<String, Json>, name: &str) -> Result<Vec<Json>> {
    let mut messages = Vec::new();
    if line.contains_key("system") {
        messages.push(json!({"role": "system", "content": text(line, "system")?}));
    }
    match line.get(name) {
        Some(list @ Json::Array(_)) => messages.extend(messages_of(list, name)?),
        _ => messages.push(json!({"role": "user", "content": text(line, name)?})),
    }
    Ok(messages)
}

impl Format {
    /// Detects the format of a file from the fields of its first line.
    ///
    /// # Errors
    /// `InvalidOption` if the fields match no format, or if `mask_prompt` is set for plain text.
    pub fn from_line(
        line: &Map<String, Json>,
        names: &FieldNames,
        mask_prompt: bool,
    ) -> Result<Self> {
        let has = |name: &String| line.contains_key(name);
        if has(&names.prompt) && has(&names.completion) {
            Ok(Self::Completions)
        } else if has(&names.chat) {
            Ok(Self::Chat)
        } else if has(&names.text) {
            if mask_prompt {
                return Err(bad(
                    "lines of plain text have no prompt to mask; leave mask_prompt out or give chats or completions",
                ));
            }
            Ok(Self::Text)
        } else {
            let fields: Vec<&str> = line.keys().take(8).map(String::as_str).collect();
            Err(bad(format!(
                "the line has the fields {fields:?}; it needs {:?} (chat), {:?} and {:?} (completions) or {:?} (text)",
                names.chat, names.prompt, names.completion, names.text
            )))
        }
    }

    /// Converts one line to an example. With `mask_prompt`, the loss covers only the last message
    /// or the completion.
    ///
    /// # Errors
    /// `InvalidOption` if a field is missing, of another type, or has no target; otherwise as
    /// [`TextPipeline::prepare_values`] and [`crate::text::Tokenizer::encode`].
    pub fn example(
        self,
        line: &Map<String, Json>,
        names: &FieldNames,
        mask_prompt: bool,
        text_to_ids: &TextPipeline,
    ) -> Result<Example> {
        let messages = match self {
            Self::Text => return plain(text(line, &names.text)?, text_to_ids),
            Self::Completions => vec![
                json!({"role": "user", "content": text(line, &names.prompt)?}),
                json!({"role": "assistant", "content": text(line, &names.completion)?}),
            ],
            Self::Chat => messages(line, &names.chat)?,
        };
        let mut options = ChatOptions::default();
        match line.get("tools") {
            None | Some(Json::Null) => {}
            Some(tools @ Json::Array(_)) => options = options.with_extra("tools", tools.clone()),
            Some(_) => return Err(bad("\"tools\" is not a list")),
        }
        let offset = if mask_prompt {
            let Some((last, before)) = messages.split_last() else {
                return Err(bad("there are no messages"));
            };
            if before.is_empty() {
                return Err(bad(
                    "the only message is the last one: with mask_prompt there must be one before it",
                ));
            }
            let prompt = options
                .clone()
                .with_add_generation_prompt(last["role"] == "assistant");
            text_to_ids
                .prepare_values(before.to_vec(), &prompt)?
                .ids
                .len()
        } else {
            0
        };
        let ids = text_to_ids.prepare_values(messages, &options)?.ids;
        learnable(Example::new(ids, offset))
    }
}

/// Converts plain text to an example, with the model's start tokens before it and the end token
/// after it.
fn plain(text: &str, text_to_ids: &TextPipeline) -> Result<Example> {
    if text.is_empty() {
        return Err(bad("the text is empty"));
    }
    let mut ids = text_to_ids.tokenizer().encode(text, true)?;
    if let Some(&eos) = text_to_ids.tokenizer().eos_ids().first()
        && ids.last() != Some(&eos)
    {
        ids.push(eos);
    }
    learnable(Example::new(ids, 0))
}

fn learnable(example: Example) -> Result<Example> {
    if example.learned(usize::MAX) == 0 {
        let (ids, masked) = (example.len(), example.parts[0].offset);
        return Err(bad(format!(
            "nothing is left to learn: {ids} tokens, of which the prompt takes {masked}"
        )));
    }
    Ok(example)
}

fn messages(line: &Map<String, Json>, name: &str) -> Result<Vec<Json>> {
    let Some(value) = line.get(name) else {
        return Err(bad(format!(
            "{name:?} is missing; the first line of the file has it, so every line must"
        )));
    };
    messages_of(value, name)
}

/// Returns the messages in the field `name`.
pub(super) fn messages_of(value: &Json, name: &str) -> Result<Vec<Json>> {
    let Json::Array(messages) = value else {
        return Err(bad(format!("{name:?} is not a list of messages")));
    };
    if messages.is_empty() {
        return Err(bad(format!("{name:?} is empty")));
    }
    for (n, message) in messages.iter().enumerate() {
        let Json::Object(fields) = message else {
            return Err(bad(format!("message {n} is not an object")));
        };
        if !matches!(fields.get("role"), Some(Json::String(role)) if !role.trim().is_empty()) {
            return Err(bad(format!(
                "message {n} has no \"role\"; use system, user, assistant or tool"
            )));
        }
        if !fields.contains_key("content") && !fields.contains_key("tool_calls") {
            return Err(bad(format!(
                "message {n} has neither \"content\" nor \"tool_calls\""
            )));
        }
    }
    Ok(messages.clone())
}

#[cfg(test)]
#[path = "formats_tests.rs"]
mod tests;
