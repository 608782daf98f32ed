//! Renders conversations as text, in the format with which the model was trained.
//!
//! A template comes from the model's files, or is the published format of its family. It is
//! untrusted, so it runs with limits: see `template_env` and `template_guard`. The module
//! `pipeline` encodes the text safely.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use inference::{Error, ErrorKind, Message, Result};
use minijinja::Environment;
use minijinja::value::Serde;
use serde_json::{Map, Value as Json};

use super::limits::TextLimits;
use super::template_defaults::family_format;
use super::template_env::{NOW, Raised, environment};
use super::template_guard::guard;
use super::tokenizer_files::{read_bounded, read_json};

/// The name under which the template is compiled.
const NAME: &str = "chat_template";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    origin: String,
    text_bytes: usize,
    /// The separate template for conversations with tools, if the model has one.
    tool_use: Option<Box<ChatTemplate>>,
}

/// The input of a template in addition to the messages.
#[non_exhaustive]
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// Whether the text ends at the point where the model's answer begins.
    pub add_generation_prompt: bool,
    /// Further variables for the template, such as `enable_thinking` (Qwen 3).
    pub extra: Map<String, Json>,
    /// The time for `strftime_now`, in seconds since 1970 (UTC). `None` means the current time.
    pub now: Option<u64>,
    /// Whether the text ends inside the last message, which the model continues.
    pub continue_final_message: bool,
    /// Whether the text begins at the last message.
    pub from_last_message: bool,
}

impl ChatOptions {
    /// Creates the options for a prompt that ends where the model's answer begins.
    #[must_use]
    pub fn answer() -> Self {
        Self {
            add_generation_prompt: true,
            ..Self::default()
        }
    }

    /// Sets [`ChatOptions::add_generation_prompt`].
    #[must_use]
    pub fn with_add_generation_prompt(mut self, yes: bool) -> Self {
        self.add_generation_prompt = yes;
        self
    }

    /// Adds one variable for the template.
    #[must_use]
    pub fn with_extra(mut self, name: impl Into<String>, value: impl Into<Json>) -> Self {
        self.extra.insert(name.into(), value.into());
        self
    }

    /// Sets [`ChatOptions::now`].
    #[must_use]
    pub fn with_now(mut self, seconds: u64) -> Self {
        self.now = Some(seconds);
        self
    }
}

impl ChatTemplate {
    /// Compiles a template. `origin` is its name in error messages.
    ///
    /// # Errors
    /// `InvalidModel`, with the line, if the template is too long or does not parse. `Unsupported`
    /// if it includes other templates, or if a tag is too large.
    pub fn new(source: impl Into<String>, origin: impl Into<String>) -> Result<Self> {
        Self::with_limits(source, origin, &TextLimits::default())
    }

    /// [`ChatTemplate::new`] with other limits.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub fn with_limits(
        source: impl Into<String>,
        origin: impl Into<String>,
        limits: &TextLimits,
    ) -> Result<Self> {
        let (source, origin) = (source.into(), origin.into());
        let context = || format!("chat template from {origin}");
        if source.len() > limits.template_bytes {
            let (have, most) = (source.len(), limits.template_bytes);
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!("the template has {have} bytes; at most {most} are compiled"),
            )
            .context(context()));
        }
        let mut env = environment(limits).map_err(|e| explain(&e).context(context()))?;
        let guarded = guard(&source, limits).map_err(|e| e.context(context()))?;
        shielded(|| env.add_template_owned(NAME, guarded))
            .map_err(|e| explain(&e).context(context()))?;
        Ok(Self {
            env,
            source,
            origin,
            text_bytes: limits.text_bytes,
            tool_use: None,
        })
    }

    /// The template of a model directory. It is in `chat_template.jinja`, otherwise in
    /// `chat_template.json`, otherwise in `tokenizer_config.json`. If a file contains several
    /// templates, the one named `default` is used. `None` if there is no template.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`], and `Io` or `InvalidModel` for files that cannot be read. Each
    /// error names the file.
    pub fn from_dir(dir: impl AsRef<Path>, limits: &TextLimits) -> Result<Option<Self>> {
        let dir = dir.as_ref();
        let path = dir.join("chat_template.jinja");
        if let Some(bytes) = read_bounded(&path, limits.config_bytes)? {
            let source = String::from_utf8(bytes).map_err(|e| {
                Error::new(ErrorKind::InvalidModel, "the template is not UTF-8")
                    .with_path(&path)
                    .with_source(e)
            })?;
            let mut template = Self::with_limits(source, "chat_template.jinja", limits)
                .map_err(|e| e.with_path(path))?;
            // transformers 4.52 and later write further templates to this directory.
            let path = dir.join("additional_chat_templates").join("tool_use.jinja");
            if let Some(bytes) = read_bounded(&path, limits.config_bytes)? {
                let source = String::from_utf8(bytes).map_err(|e| {
                    Error::new(ErrorKind::InvalidModel, "the template is not UTF-8")
                        .with_path(&path)
                        .with_source(e)
                })?;
                let tool_use = Self::with_limits(source, "tool_use.jinja", limits)
                    .map_err(|e| e.with_path(path))?;
                template.set_tool_use(tool_use);
            }
            return Ok(Some(template));
        }
        for file in ["chat_template.json", "tokenizer_config.json"] {
            let path = dir.join(file);
            let Some(json) = read_json(&path, limits)? else {
                continue;
            };
            if let Some(source) = choose(&json["chat_template"]).map_err(|e| e.with_path(&path))? {
                let mut template =
                    Self::with_limits(source, file, limits).map_err(|e| e.with_path(&path))?;
                if let Some(source) = tool_use(&json["chat_template"]) {
                    let tool_use =
                        Self::with_limits(source, file, limits).map_err(|e| e.with_path(path))?;
                    template.set_tool_use(tool_use);
                }
                return Ok(Some(template));
            }
        }
        Ok(None)
    }

    /// Sets the template for conversations with tools.
    pub(crate) fn set_tool_use(&mut self, template: Self) {
        self.tool_use = Some(Box::new(template));
    }

    /// The published format of a family. `model_type` selects the format; for an unknown family,
    /// the tokens of the vocabulary do. `knows` tests whether the vocabulary has a token.
    #[must_use]
    pub fn for_family(model_type: &str, knows: impl Fn(&str) -> bool) -> Option<Self> {
        let (name, source) = family_format(model_type, knows)?;
        Self::new(source, format!("the {name} format")).ok()
    }

    /// The source of the template, unchanged.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The origin of the template: a file name, GGUF metadata, or the name of a format.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The template for conversations with tools. If there is only one template, returns this one.
    #[must_use]
    pub fn for_tools(&self) -> &Self {
        self.tool_use.as_deref().unwrap_or(self)
    }

    /// The template to render with `options`: the one for tools, if `options` contain tools.
    #[must_use]
    pub(crate) fn for_options(&self, options: &ChatOptions) -> &Self {
        let tools = options.extra.get("tools").and_then(Json::as_array);
        match &self.tool_use {
            Some(template) if tools.is_some_and(|tools| !tools.is_empty()) => template,
            _ => self,
        }
    }

    /// Renders a conversation. `bos` and `eos` are the texts of the tokens that begin and end a
    /// text.
    ///
    /// # Errors
    /// `InvalidOption` if there is no message, if a role is empty, or if the template rejects the
    /// conversation. `InvalidModel` if the template fails or exceeds its limits. Errors of the
    /// template contain the line.
    pub fn render(
        &self,
        messages: &[Message],
        options: &ChatOptions,
        bos: &str,
        eos: &str,
    ) -> Result<String> {
        let values = messages.iter().map(Message::to_template).collect();
        self.render_values(values, options, bos, eos)
    }

    /// [`ChatTemplate::render`] for messages with additional fields, such as `tool_calls`. The
    /// template receives the objects unchanged.
    pub(crate) fn render_values(
        &self,
        messages: Vec<Json>,
        options: &ChatOptions,
        bos: &str,
        eos: &str,
    ) -> Result<String> {
        validate(&messages, self.text_bytes)?;
        let mut names: Map<String, Json> = Map::new();
        // Hugging Face passes null for variables that the caller does not set.
        names.insert("tools".into(), Json::Null);
        names.insert("documents".into(), Json::Null);
        names.extend(
            options
                .extra
                .iter()
                .filter(|(k, _)| !k.starts_with("__"))
                .map(|(k, v)| (k.clone(), v.clone())),
        );
        names.insert("messages".into(), Json::Array(messages));
        names.insert(
            "add_generation_prompt".into(),
            options.add_generation_prompt.into(),
        );
        names.insert("bos_token".into(), bos.into());
        names.insert("eos_token".into(), eos.into());
        if let Some(now) = options.now {
            names.insert(NOW.into(), now.into());
        }
        let failed = |e: &minijinja::Error| {
            explain(e).context(format!("chat template from {}", self.origin))
        };
        let template = self.env.get_template(NAME).map_err(|e| failed(&e))?;
        let mut out = Capped {
            bytes: Vec::new(),
            most: self.text_bytes,
        };
        shielded(|| {
            template
                .render_captured_to(Serde(names), &mut out)
                .map(drop)
        })
        .map_err(|e| failed(&e))?;
        String::from_utf8(out.bytes).map_err(|e| {
            Error::new(
                ErrorKind::InvalidModel,
                "the template writes bytes that are no text",
            )
            .with_source(e)
        })
    }
}

/// Runs the template engine, and converts its panics to errors. For example, it panics when it
/// iterates over an empty list in reverse.
fn shielded<T>(
    run: impl FnOnce() -> std::result::Result<T, minijinja::Error>,
) -> std::result::Result<T, minijinja::Error> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        Err(minijinja::Error::new(
            minijinja::ErrorKind::InvalidOperation,
            "the template engine fails here; a list or text that is read backwards must not be empty",
        ))
    })
}

/// Checks that there is a message, that each has a role, and that their total length is allowed.
fn validate(messages: &[Json], most: usize) -> Result<()> {
    let bad = |what: String| Err(Error::new(ErrorKind::InvalidOption, what));
    if messages.is_empty() {
        return bad("the conversation has no messages; give at least one from the user".to_owned());
    }
    if let Some(n) = messages
        .iter()
        .position(|m| m["role"].as_str().unwrap_or_default().trim().is_empty())
    {
        return bad(format!(
            "message {n} has no role; use system, user or assistant"
        ));
    }
    let bytes = messages
        .iter()
        .fold(0usize, |sum, m| sum.saturating_add(text_bytes(m)));
    if bytes > most {
        return bad(format!(
            "the conversation has {bytes} bytes; at most {most} are rendered at once"
        ));
    }
    Ok(())
}

/// Total length of all texts in a value in bytes, without field names.
fn text_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(many) => many.iter().map(text_bytes).sum(),
        Json::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 0,
    }
}

/// The template in the field `chat_template`, which contains a text or a list of named texts.
fn choose(value: &Json) -> Result<Option<String>> {
    match value {
        Json::Null => Ok(None),
        Json::String(source) => Ok(Some(source.clone())),
        Json::Array(many) => {
            let named: Vec<(&str, &str)> = many
                .iter()
                .filter_map(|t| Some((t["name"].as_str()?, t["template"].as_str()?)))
                .collect();
            match named.as_slice() {
                [] if many.is_empty() => Ok(None),
                [(_, only)] => Ok(Some((*only).to_owned())),
                several => match several.iter().find(|(name, _)| *name == "default") {
                    Some((_, source)) => Ok(Some((*source).to_owned())),
                    None => Err(Error::new(
                        ErrorKind::InvalidModel,
                        format!(
                            "of the chat templates none is named default; there are: {}",
                            several
                                .iter()
                                .map(|(name, _)| *name)
                                .collect::<Vec<_>>()
                                .join(", ")
                        ),
                    )),
                },
            }
        }
        _ => Err(Error::new(
            ErrorKind::InvalidModel,
            "chat_template is neither a text nor a list of named texts",
        )),
    }
}

/// The template for conversations with tools, if there are several templates.
fn tool_use(value: &Json) -> Option<String> {
    let named = value.as_array()?.iter();
    let mut named = named.filter(|t| t["name"].as_str() == Some("tool_use"));
    named.next()?["template"].as_str().map(str::to_owned)
}

/// Converts an error of the template engine. The message contains the line in the template.
fn explain(error: &minijinja::Error) -> Error {
    let mut deepest = error;
    let mut raised = None;
    let mut source: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(inner) = inner.downcast_ref::<minijinja::Error>() {
            deepest = inner;
        }
        raised = raised.or_else(|| inner.downcast_ref::<Raised>());
        source = inner.source();
    }
    let line = deepest
        .line()
        .or(error.line())
        .map_or_else(String::new, |n| format!("line {n}: "));
    if let Some(Raised(message)) = raised {
        return Error::new(
            ErrorKind::InvalidOption,
            format!("{line}the template refuses the conversation: {message}"),
        );
    }
    let what = match deepest.kind() {
        minijinja::ErrorKind::OutOfFuel => {
            "the template takes more steps than a chat template may".to_owned()
        }
        minijinja::ErrorKind::WriteFailure => {
            "the text grows beyond what a template may build".to_owned()
        }
        kind => match deepest.detail() {
            Some(detail) => format!("{kind}: {detail}"),
            None => kind.to_string(),
        },
    };
    Error::new(ErrorKind::InvalidModel, format!("{line}{what}"))
}

/// A buffer with a fixed capacity. A write beyond it fails.
struct Capped {
    bytes: Vec<u8>,
    most: usize,
}

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.most.saturating_sub(self.bytes.len()) {
            return Err(io::Error::other("the text is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "chat_template_tests.rs"]
mod tests;
