//! Converts prompts and conversations to token ids, with the tokenizer and the chat template.
//!
//! Text of a message never becomes a control token. For example, `<|im_end|>` in a message stays
//! ordinary text.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use inference::{
    ChatEnd, ChatPrompt, ChatStart, Error, ErrorKind, Message, PreparedPrompt, Result,
};
use serde_json::Value as Json;

use super::chat_template::{ChatOptions, ChatTemplate};
use super::detokenizer::Detokenizer;
use super::limits::TextLimits;
use super::tokenizer::Tokenizer;
use inference_formats::GgufTokenizerParts;

/// Converts text to ids and back, and applies the model's chat format.
#[derive(Debug, Clone)]
pub struct TextPipeline {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
}

impl TextPipeline {
    /// Combines a tokenizer and a template.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        Self {
            tokenizer: Arc::new(tokenizer),
            template: template.map(Arc::new),
        }
    }

    /// Loads the tokenizer and the template from a model directory. Without a template, it uses the
    /// format of the family `model_type`.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`] and [`ChatTemplate::from_dir`].
    pub fn from_dir(dir: impl AsRef<Path>, model_type: &str) -> Result<Self> {
        let dir = dir.as_ref();
        let limits = TextLimits::default();
        let tokenizer = Tokenizer::from_dir_with(dir, &limits)?;
        let template = ChatTemplate::from_dir(dir, &limits)?;
        Ok(Self::with_family(tokenizer, template, model_type))
    }

    /// Builds the tokenizer and the template from GGUF metadata. Without a template, it uses the
    /// format of the family `model_type`.
    ///
    /// # Errors
    /// As [`Tokenizer::from_gguf`] and [`ChatTemplate::new`].
    pub fn from_gguf(parts: &GgufTokenizerParts, model_type: &str) -> Result<Self> {
        let tokenizer = Tokenizer::from_gguf(parts)?;
        let compiled = |source: &Option<String>, key: &str| {
            let source = source.as_deref().filter(|t| !t.trim().is_empty());
            source.map(|t| ChatTemplate::new(t, key)).transpose()
        };
        let mut template = compiled(&parts.chat_template, "tokenizer.chat_template")?;
        let key = "tokenizer.chat_template.tool_use";
        if let Some(template) = &mut template
            && let Some(tools) = compiled(&parts.tool_use_template, key)?
        {
            template.set_tool_use(tools);
        }
        Ok(Self::with_family(tokenizer, template, model_type))
    }

    fn with_family(tokenizer: Tokenizer, template: Option<ChatTemplate>, model_type: &str) -> Self {
        let template = template.or_else(|| {
            ChatTemplate::for_family(model_type, |token| tokenizer.id_of(token).is_some())
        });
        Self::new(tokenizer, template)
    }

    /// Replaces the chat template.
    #[must_use]
    pub fn with_template(mut self, template: ChatTemplate) -> Self {
        self.template = Some(Arc::new(template));
        self
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The template, if the model or its family has one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }

    /// A stream of text that ends at any of the strings in `stop`.
    #[must_use]
    pub fn detokenizer(&self, stop: &[String]) -> Detokenizer {
        Detokenizer::new(self.tokenizer.clone(), stop)
    }

    /// Encodes a raw prompt. The tokens that begin a text are added, unless the prompt already
    /// starts with the first of them. Special tokens in the text are recognized, because the caller
    /// wrote the whole prompt.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let bos = self
            .tokenizer
            .bos_id()
            .and_then(|id| self.tokenizer.token_text(id));
        let has_bos = bos.is_some_and(|bos| !bos.is_empty() && text.starts_with(&bos));
        self.tokenizer.encode(text, !has_bos)
    }

    /// [`TextPipeline::encode_prompt`] with at most `most` tokens, as
    /// [`Tokenizer::encode_bounded`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode_bounded`].
    pub fn encode_bounded(
        &self,
        text: &str,
        most: Option<usize>,
        truncate: bool,
    ) -> Result<Vec<u32>> {
        let encoded = self.tokenizer.encode_bounded(text, None, most, truncate)?;
        let mut ids = encoded.ids;
        // The caller's text already starts with the begin-of-text token, so the second one is
        // removed.
        if let (Some(bos), [first, second, ..]) = (self.tokenizer.bos_id(), ids.as_slice())
            && (*first, *second) == (bos, bos)
        {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Renders and encodes a conversation. No text in it, in its tools or in its template variables
    /// becomes a control token.
    ///
    /// # Errors
    /// As [`TextPipeline::prepare_values`]. `InvalidOption` for a reserved template variable, or if
    /// the template omits the message that the model should continue.
    pub fn prepare_chat(&self, prompt: &ChatPrompt) -> Result<PreparedPrompt> {
        let values = prompt.messages.iter().map(Message::to_template).collect();
        self.prepare_values(values, &options_of(prompt)?)
    }

    /// Renders and encodes messages that are JSON objects. The template receives them unchanged.
    ///
    /// If messages contain no control tokens, the ids are those of the whole text, as in Hugging
    /// Face's `apply_chat_template`. Otherwise the control tokens' texts are masked while the
    /// template runs, and encoded as ordinary text.
    ///
    /// # Errors
    /// `Unsupported` without a template; `InvalidOption` for a role or a field name that contains a
    /// control token; otherwise as [`ChatTemplate::render`] and [`Tokenizer::encode_plain`].
    pub fn prepare_values(
        &self,
        mut messages: Vec<Json>,
        options: &ChatOptions,
    ) -> Result<PreparedPrompt> {
        let template = self.require_template()?.for_options(options);
        let controls: Vec<String> = self
            .tokenizer
            .control_texts()
            .filter(|t| !t.is_empty())
            .collect();
        for (n, message) in messages.iter().enumerate() {
            let role = message["role"].as_str().unwrap_or_default();
            if let Some(token) = controls.iter().find(|t| role.contains(t.as_str())) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "the role of message {n} holds the control token {token:?}; use system, user or assistant"
                    ),
                ));
            }
            if let Some(name) = names_of(message)
                .into_iter()
                .find(|name| controls.iter().any(|t| name.contains(t.as_str())))
            {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!("message {n} has a field {name:?}, which spells a control token"),
                ));
            }
        }
        for (name, value) in &options.extra {
            let mut names = names_of(value);
            names.push(name);
            if let Some(name) = names
                .into_iter()
                .find(|name| controls.iter().any(|t| name.contains(t.as_str())))
            {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "tools or template arguments have a field {name:?}, which spells a control token"
                    ),
                ));
            }
        }
        // Tools and call arguments are as untrusted as messages, so they are masked, too.
        let mut options = options.clone();
        let mut suspicious = false;
        let mut check = |text: &mut String| {
            suspicious |= !self.suspicious(text, &controls)?.is_empty();
            Ok(())
        };
        for message in &mut messages {
            for_texts(message, &mut check)?;
        }
        for value in options.extra.values_mut() {
            each_text(value, &mut check)?;
        }
        let [bos, eos] = self.edges();
        if !suspicious && !is_cut(&options) {
            let text = template.render_values(messages, &options, &bos, &eos)?;
            let ids = self.tokenizer.encode(&text, false)?;
            return Ok(PreparedPrompt::new(text, ids));
        }
        let mask = Mask::new(&messages, &options, template.source())?;
        let mut hidden = Vec::new();
        let mut hide = |text: &mut String| {
            let spans = self.suspicious(text, &controls)?;
            *text = mask.hide(text, &spans, &mut hidden);
            Ok(())
        };
        for message in &mut messages {
            for_texts(message, &mut hide)?;
        }
        for value in options.extra.values_mut() {
            each_text(value, &mut hide)?;
        }
        mask.mark_last(&mut messages, &options)?;
        let text = template.render_values(messages, &options, &bos, &eos)?;
        let text = mask.cut(text, &options)?;
        if hidden.is_empty() {
            let ids = self.tokenizer.encode(&text, false)?;
            return Ok(PreparedPrompt::new(text, ids));
        }
        // All remaining control tokens come from the template itself.
        let mut ids = Vec::new();
        let mut at = 0;
        for (id, range) in self.tokenizer.control_spans(&text)? {
            let before = text.get(at..range.start).unwrap_or_default();
            self.tokenizer
                .encode_plain_into(&mask.show(before, &hidden), at == 0, &mut ids)?;
            ids.push(id);
            at = at.max(range.end);
        }
        let rest = text.get(at..).unwrap_or_default();
        self.tokenizer
            .encode_plain_into(&mask.show(rest, &hidden), at == 0, &mut ids)?;
        Ok(PreparedPrompt::new(mask.show(&text, &hidden), ids))
    }

    fn require_template(&self) -> Result<&ChatTemplate> {
        self.template.as_deref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "the model has no chat template and its family has no known format; use generate with a raw prompt",
            )
        })
    }

    /// The texts of the tokens that begin and end a text.
    fn edges(&self) -> [String; 2] {
        [
            self.tokenizer.bos_id(),
            self.tokenizer.eos_ids().first().copied(),
        ]
        .map(|id| {
            id.and_then(|id| self.tokenizer.token_text(id))
                .unwrap_or_default()
        })
    }

    /// The parts of a message that spell a control token, or that could become part of one at the
    /// message's ends.
    fn suspicious(&self, content: &str, controls: &[String]) -> Result<Vec<Range<usize>>> {
        let mut spans: Vec<Range<usize>> = self
            .tokenizer
            .control_spans(content)?
            .into_iter()
            .map(|(_, range)| range)
            .collect();
        // Templates trim messages, so the trimmed ends may be adjacent to markup.
        let start = content.len() - content.trim_start().len();
        let end = content.trim_end().len();
        if start < end {
            let body = &content[start..end];
            let tail = controls.iter().filter_map(|t| overlap(body, t)).max();
            let head = controls.iter().filter_map(|t| overlap(t, body)).max();
            spans.extend(tail.map(|n| end - n..end));
            spans.extend(head.map(|n| start..start + n));
        }
        spans.sort_by_key(|s| (s.start, s.end));
        let mut merged: Vec<Range<usize>> = Vec::new();
        for span in spans {
            match merged.last_mut() {
                Some(last) if span.start < last.end => last.end = last.end.max(span.end),
                _ => merged.push(span),
            }
        }
        Ok(merged)
    }
}

/// Reserved variables: those that the template receives from elsewhere, and those that are call
/// parameters in other engines.
const RESERVED: [&str; 9] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "chat_template",
    "tokenize",
    "return_dict",
];

/// The options for the template from `prompt`.
fn options_of(prompt: &ChatPrompt) -> Result<ChatOptions> {
    let reserved = |name: &&String| RESERVED.contains(&name.as_str()) || name.starts_with("__");
    if let Some(name) = prompt.template.keys().find(reserved) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("the template argument {name:?} cannot be set; it is made of the conversation"),
        ));
    }
    let mut options = ChatOptions::default();
    options.extra.clone_from(&prompt.template);
    options.add_generation_prompt = prompt.end == ChatEnd::Reply;
    options.continue_final_message = prompt.end == ChatEnd::LastMessage;
    options.from_last_message = prompt.start == ChatStart::LastMessage;
    if !prompt.tools.is_empty() {
        let tools = prompt.tools.iter().map(inference::Tool::to_template);
        options.extra.insert("tools".into(), tools.collect());
    }
    Ok(options)
}

/// Visits every text in a value.
fn each_text(value: &mut Json, visit: &mut dyn FnMut(&mut String) -> Result<()>) -> Result<()> {
    match value {
        Json::String(text) => visit(text),
        Json::Array(many) => many.iter_mut().try_for_each(|v| each_text(v, visit)),
        Json::Object(fields) => fields.values_mut().try_for_each(|v| each_text(v, visit)),
        _ => Ok(()),
    }
}

/// Visits every text of a message except its role.
fn for_texts(message: &mut Json, visit: &mut dyn FnMut(&mut String) -> Result<()>) -> Result<()> {
    let Json::Object(fields) = message else {
        return Ok(());
    };
    fields
        .iter_mut()
        .filter(|(name, _)| name.as_str() != "role")
        .try_for_each(|(_, value)| each_text(value, visit))
}

/// The names of all fields of a message, including nested ones.
fn names_of(value: &Json) -> Vec<&str> {
    match value {
        Json::Array(many) => many.iter().flat_map(names_of).collect(),
        Json::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| std::iter::once(name.as_str()).chain(names_of(value)))
            .collect(),
        _ => Vec::new(),
    }
}

/// The longest suffix of `left` that is a proper prefix of `right`. `left` must not contain all of
/// `right`.
fn overlap(left: &str, right: &str) -> Option<usize> {
    (1..=left.len().min(right.len()))
        .rev()
        .filter(|n| left.is_char_boundary(left.len() - n) && right.is_char_boundary(*n))
        .find(|n| left[left.len() - n..] == right[..*n])
}

/// Masks parts of messages while the template runs. A mask is a number between two unused
/// characters.
struct Mask {
    open: char,
    close: char,
    /// Marks the end of the last message.
    end: char,
    /// Marks the start of the last message.
    start: char,
}

/// Whether only a part of the template's output is used.
fn is_cut(options: &ChatOptions) -> bool {
    options.continue_final_message || options.from_last_message
}

impl Mask {
    fn new(messages: &[Json], options: &ChatOptions, template: &str) -> Result<Self> {
        let said = serde_json::to_string(messages).unwrap_or_default();
        let extra = serde_json::to_string(&options.extra).unwrap_or_default();
        let used: std::collections::HashSet<char> = said
            .chars()
            .chain(extra.chars())
            .chain(template.chars())
            .filter(|c| ('\u{E000}'..='\u{F8FF}').contains(c))
            .collect();
        let mut free = ('\u{E000}'..='\u{F8FF}').filter(|c| !used.contains(c));
        match [(); 4].map(|()| free.next()) {
            [Some(open), Some(close), Some(end), Some(start)] => Ok(Self {
                open,
                close,
                end,
                start,
            }),
            _ => Err(Error::new(
                ErrorKind::InvalidOption,
                "the conversation spells control tokens and uses all of Unicode's private characters; leave one out",
            )),
        }
    }

    /// Marks the beginning and end of the last message, if the text is cut there.
    fn mark_last(&self, messages: &mut [Json], options: &ChatOptions) -> Result<()> {
        if !is_cut(options) {
            return Ok(());
        }
        match messages.last_mut().and_then(|m| m.get_mut("content")) {
            Some(Json::String(content)) => {
                if options.continue_final_message {
                    content.push(self.end);
                }
                if options.from_last_message {
                    content.insert(0, self.start);
                }
                Ok(())
            }
            _ => Err(Error::new(
                ErrorKind::InvalidOption,
                "there is no last message with a text to continue",
            )),
        }
    }

    /// Cuts the rendered text: from the start of the last message, or up to its end, depending on
    /// the options.
    fn cut(&self, mut text: String, options: &ChatOptions) -> Result<String> {
        let find = |text: &str, mark: char| {
            text.rfind(mark).ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOption,
                    "the chat template does not write the last message, so that it cannot be continued",
                )
            })
        };
        if options.continue_final_message {
            let end = find(&text, self.end)?;
            text.truncate(end);
        }
        if options.from_last_message {
            let start = find(&text, self.start)?;
            text.drain(..start);
        }
        text.retain(|c| c != self.end && c != self.start);
        Ok(text)
    }

    fn hide(&self, content: &str, spans: &[Range<usize>], hidden: &mut Vec<String>) -> String {
        let mut out = String::with_capacity(content.len());
        let mut at = 0;
        for span in spans {
            out.push_str(content.get(at..span.start).unwrap_or_default());
            out.push(self.open);
            out.push_str(&hidden.len().to_string());
            out.push(self.close);
            hidden.push(content.get(span.clone()).unwrap_or_default().to_owned());
            at = span.end;
        }
        out.push_str(content.get(at..).unwrap_or_default());
        out
    }

    fn show(&self, text: &str, hidden: &[String]) -> String {
        let mut out = String::with_capacity(text.len());
        let mut parts = text.split(self.open);
        out.push_str(parts.next().unwrap_or_default());
        for part in parts {
            // The template may have truncated the message inside a mask. Then the number is gone,
            // together with its text.
            let Some((number, after)) = part.split_once(self.close) else {
                continue;
            };
            if let Some(text) = number.parse::<usize>().ok().and_then(|n| hidden.get(n)) {
                out.push_str(text);
            }
            out.push_str(after);
        }
        out
    }
}

#[cfg(test)]
#[path = "pipeline_tests.rs"]
mod tests;
