//! Converts a conversation to a prompt when flags change the conversion. Flags can set another chat
//! template, template variables, the start of the reply, or further end tokens.

use std::path::Path;
use std::str::FromStr;

use inference::{ChatEnd, ChatPrompt, ErrorKind, Message, PreparedPrompt, Prompt, TextModel, Tool};
use serde_json::{Map, Value};

use crate::cli::options::preset::Preset;
use crate::cli::options::tools::{self, Reader};
use crate::cli::terminal::failure::Failure;

#[cfg(feature = "mlx-backend")]
use inference_text::{ChatTemplate, TextPipeline};

/// Maximum size of a template file in bytes.
#[cfg(any(feature = "mlx-backend", feature = "serve"))]
const MAX_FILE: u64 = 4 << 20;

/// The flags for the conversion of a conversation.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Conversation")]
pub struct DialogArgs {
    /// A chat template instead of the model's: a file with Jinja, or the template itself
    #[arg(long, alias = "chat-template-file", value_name = "FILE")]
    pub chat_template: Option<String>,
    /// Variables for the chat template, as a JSON object: `{"enable_thinking": false}`
    #[arg(long, aliases = ["chat-template-args", "chat-template-kwargs"], value_name = "JSON")]
    pub chat_template_config: Option<Names>,
    /// Let the model reason before it answers: `--think`, `--think=false`, or an effort such as
    /// `--think=high`. The flag sets `enable_thinking` or `reasoning_effort` for the chat template
    #[arg(
        long,
        value_name = "HOW",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = think
    )]
    pub think: Option<Think>,
    /// Tools that the model may call: a JSON file with a list of them in OpenAI's form. The program
    /// prints a call as a line of JSON, and omits reasoning
    #[arg(long, value_name = "FILE")]
    pub tools: Option<std::path::PathBuf>,
    /// Start the reply with this text, which is not printed
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prefill_response: Option<String>,
    /// More tokens that end the reply, by their texts or ids
    #[arg(long, value_name = "TOKEN", num_args = 1..)]
    pub extra_eos_token: Vec<String>,
}

/// Variables of a template and their values.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Names(Map<String, Value>);

/// The reasoning mode, in the values of ollama's `--think`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Think {
    /// Whether the model reasons before its answer.
    Switch(bool),
    /// The effort of reasoning.
    Effort(&'static str),
}

fn think(text: &str) -> Result<Think, String> {
    match text {
        "true" => Ok(Think::Switch(true)),
        "false" => Ok(Think::Switch(false)),
        text => ["low", "medium", "high"]
            .into_iter()
            .find(|effort| *effort == text)
            .map(Think::Effort)
            .ok_or_else(|| "must be true, false, low, medium or high".into()),
    }
}

impl From<Names> for Map<String, Value> {
    fn from(names: Names) -> Self {
        names.0
    }
}

impl FromStr for Names {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match serde_json::from_str(text) {
            Ok(Value::Object(names)) => Ok(Self(names)),
            Ok(_) => Err("must be a JSON object".into()),
            Err(e) => Err(format!("is not JSON: {e}")),
        }
    }
}

/// Converts conversations to prompts.
#[derive(Default)]
pub struct Dialog {
    #[cfg(feature = "mlx-backend")]
    text: Option<TextPipeline>,
    names: Map<String, Value>,
    tools: Vec<Tool>,
    /// Tools of MCP servers, and whether they are offered to the model.
    mcp: (Vec<Tool>, bool),
    prefill: Option<String>,
}

impl Dialog {
    /// The conversion that the flags require, for the model at `path`.
    pub fn new(args: &DialogArgs, preset: Option<&Preset>, path: &Path) -> Result<Self, Failure> {
        let mut names = args.chat_template_config.clone().unwrap_or_default().0;
        match args.think {
            None => {}
            Some(Think::Switch(on)) => {
                names.insert("enable_thinking".into(), on.into());
            }
            Some(Think::Effort(effort)) => {
                names.insert("reasoning_effort".into(), effort.into());
            }
        }
        let mut dialog = Self {
            names,
            tools: tools::of(args.tools.as_ref())?,
            prefill: args
                .prefill_response
                .clone()
                .filter(|text| !text.is_empty()),
            ..Self::default()
        };
        let of_preset = preset.and_then(|preset| preset.template.as_deref());
        match (&args.chat_template, of_preset) {
            (Some(template), _) => dialog.set_template(compiled(template)?, path)?,
            (None, Some(template)) => dialog.set_template(inline(template, "TEMPLATE")?, path)?,
            (None, None) => {}
        }
        Ok(dialog)
    }

    /// Whether no flag changes the model's own conversion.
    pub fn is_plain(&self) -> bool {
        !self.has_template() && self.prefill.is_none() && self.names.is_empty() && !self.has_tools()
    }

    /// The first given flag that needs a chat template.
    pub fn needs_template(&self) -> Option<&'static str> {
        let given = [
            (!self.names.is_empty(), "--chat-template-config, --think"),
            (!self.tools.is_empty(), "--tools"),
            (!self.mcp.0.is_empty(), "--mcp"),
            (self.prefill.is_some(), "--prefill-response"),
        ];
        given
            .iter()
            .find(|(given, _)| *given)
            .map(|(_, flag)| *flag)
    }

    pub fn has_tools(&self) -> bool {
        !self.tools.is_empty() || (self.mcp.1 && !self.mcp.0.is_empty())
    }

    /// Offers tools of MCP servers to the model. A tool of `--tools` hides one of the same name.
    pub fn offer(&mut self, mut tools: Vec<Tool>) {
        tools.retain(|tool| self.tools.iter().all(|own| own.name != tool.name));
        self.mcp = (tools, true);
    }

    /// Whether an MCP server has this tool, and the tool is offered to the model.
    pub fn is_of_mcp(&self, name: &str) -> bool {
        self.mcp.1 && self.mcp.0.iter().any(|tool| tool.name == name)
    }

    /// Sets whether the tools of MCP servers are offered to the model.
    pub fn show_mcp(&mut self, shown: bool) {
        self.mcp.1 = shown;
    }

    /// All tools that are offered to the model.
    fn all_tools(&self) -> Vec<Tool> {
        let mcp = self.mcp.0.iter().filter(|_| self.mcp.1);
        self.tools.iter().chain(mcp).cloned().collect()
    }

    /// Whether another template replaces the model's.
    #[cfg(feature = "mlx-backend")]
    pub fn has_template(&self) -> bool {
        self.text.is_some()
    }

    #[cfg(not(feature = "mlx-backend"))]
    pub fn has_template(&self) -> bool {
        false
    }

    /// Replaces the model's template.
    #[cfg(feature = "mlx-backend")]
    pub fn set_template(&mut self, template: ChatTemplate, path: &Path) -> Result<(), Failure> {
        self.text = Some(crate::cli::options::files::Files::read(path, Some(template))?.text);
        Ok(())
    }

    /// The template in use, if the user has replaced the model's.
    #[cfg(feature = "mlx-backend")]
    pub fn template(&self) -> Option<&str> {
        let template = self.text.as_ref()?.template()?;
        Some(template.source())
    }

    #[cfg(not(feature = "mlx-backend"))]
    pub fn template(&self) -> Option<&str> {
        None
    }

    #[cfg(not(feature = "mlx-backend"))]
    pub fn set_template(&mut self, _: (), _: &Path) -> Result<(), Failure> {
        Err(Failure::failed(
            "templates need the MLX engine, which is not built in",
        ))
    }

    /// Renders and tokenizes the conversation. If there are tools, returns a reader of the reply,
    /// too. Returns `None` if the backend does not report ids; the caller then uses
    /// [`TextModel::chat`].
    ///
    /// # Errors
    /// If the template refuses the conversation, which is not an error of the command line.
    pub fn prepare(
        &self,
        model: &dyn TextModel,
        messages: &[Message],
    ) -> Result<Option<(PreparedPrompt, Option<Reader>)>, Failure> {
        if !self.is_plain() {
            return self.written(model, &self.chat_prompt(messages)).map(Some);
        }
        let Some(tokens) = model.as_token_model() else {
            return Ok(None);
        };
        match tokens.prepare_chat(&ChatPrompt::new(messages)) {
            Ok(prepared) => Ok(Some((prepared, None))),
            Err(e) if e.kind() == ErrorKind::InvalidOption => Err(e.into()),
            // The caller then calls `chat`, which reports this error.
            Err(_) => Ok(None),
        }
    }

    /// The conversation with all variables of a template.
    fn chat_prompt(&self, messages: &[Message]) -> ChatPrompt {
        let mut messages = messages.to_vec();
        let mut end = ChatEnd::Reply;
        if let Some(prefill) = &self.prefill {
            messages.push(Message::assistant(prefill));
            end = ChatEnd::LastMessage;
        }
        let mut prompt = ChatPrompt::new(messages)
            .with_tools(self.all_tools())
            .with_end(end);
        prompt.template.clone_from(&self.names);
        prompt
    }

    /// Renders and tokenizes the conversation. Returns a reader of the reply only if there are
    /// tools, because otherwise the whole reply is text.
    #[cfg(feature = "mlx-backend")]
    fn written(
        &self,
        model: &dyn TextModel,
        prompt: &ChatPrompt,
    ) -> Result<(PreparedPrompt, Option<Reader>), Failure> {
        use inference_text::reply;
        let tokens = token_model(model)?;
        let prepare = |prompt: &ChatPrompt| match &self.text {
            Some(text) => text.prepare_chat(prompt),
            None => tokens.prepare_chat(prompt),
        };
        if prompt.tools.is_empty() {
            return Ok((prepare(prompt)?, None));
        }
        let template = match &self.text {
            Some(text) => text.template().map(|parsed| parsed.for_tools().source()),
            None => tokens.chat_template(),
        };
        let template = template.unwrap_or_default();
        let format = reply::Format::detect(template, Some(model.model_type()));
        let prepared = reply::written(format, prompt, prepare)?;
        let reader = reply::reader(format, prompt, &prepared.text);
        Ok((prepared, Some(reader)))
    }

    #[cfg(not(feature = "mlx-backend"))]
    fn written(
        &self,
        model: &dyn TextModel,
        prompt: &ChatPrompt,
    ) -> Result<(PreparedPrompt, Option<Reader>), Failure> {
        Ok((token_model(model)?.prepare_chat(prompt)?, None))
    }
}

/// Converts a text to token ids. If the backend has no tokens or cannot encode the text, the text
/// is returned, and running it reports the error.
pub fn ids_of(model: &dyn TextModel, text: String) -> Prompt {
    let tokens = model.as_token_model();
    match tokens.and_then(|tokens| tokens.encode(&text, true).ok()) {
        Some(ids) => Prompt::Tokens(ids),
        None => Prompt::Text(text),
    }
}

/// The ids of `--extra-eos-token`.
pub fn eos_ids(tokens: &[String], model: &dyn TextModel) -> Result<Vec<u32>, Failure> {
    let mut ids = Vec::with_capacity(tokens.len());
    for token in tokens {
        if let Ok(id) = token.parse() {
            ids.push(id);
            continue;
        }
        match token_model(model)?.encode(token, false)?[..] {
            [id] => ids.push(id),
            ref many => {
                return Err(Failure::usage(format!(
                    "--extra-eos-token {token:?} is {} tokens of this model; --stop ends a reply at a text",
                    many.len()
                )));
            }
        }
    }
    Ok(ids)
}

fn token_model(model: &dyn TextModel) -> Result<&dyn inference::TokenModel, Failure> {
    model
        .as_token_model()
        .ok_or_else(|| Failure::failed("this backend does not turn texts into tokens"))
}

/// A template from a file. If the argument contains template tags, it is the template itself.
#[cfg(feature = "mlx-backend")]
pub fn compiled(template: &str) -> Result<ChatTemplate, Failure> {
    let (text, origin) = read(template)?;
    inline(&text, origin)
}

/// The text of a template. If the argument contains template tags, it is the template itself;
/// otherwise it names a file. The MLX engine's templates are Jinja, so with that engine the text is
/// checked.
#[cfg(feature = "serve")]
pub fn source(template: &str) -> Result<String, Failure> {
    let (text, origin) = read(template)?;
    inline(&text, origin)?;
    Ok(text)
}

/// The text of a template and its origin.
#[cfg(any(feature = "mlx-backend", feature = "serve"))]
fn read(template: &str) -> Result<(String, &str), Failure> {
    use std::io::Read;
    if template.contains("{%") || template.contains("{{") {
        return Ok((template.to_owned(), "--chat-template"));
    }
    let fail = |why: String| Failure::usage(format!("--chat-template {template}: {why}"));
    let mut text = String::new();
    std::fs::File::open(template)
        .and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
        .map_err(|e| fail(e.to_string()))?;
    Ok((text, template))
}

#[cfg(not(feature = "mlx-backend"))]
pub fn compiled(_: &str) -> Result<(), Failure> {
    Ok(())
}

#[cfg(not(feature = "mlx-backend"))]
pub fn inline(_: &str, _: &str) -> Result<(), Failure> {
    Ok(())
}

/// A template from text; `origin` names its source in errors.
#[cfg(feature = "mlx-backend")]
pub fn inline(template: &str, origin: &str) -> Result<ChatTemplate, Failure> {
    // In Go's templates, names start with a dot. Jinja would report such names without a useful
    // message.
    let go = [
        "{{ .",
        "{{.",
        "{{- .",
        "{{ if .",
        "{{- if .",
        "{{- range",
        "{{ range",
    ];
    if go.iter().any(|mark| template.contains(mark)) {
        return Err(Failure::usage(format!(
            "{origin}: this is a template in Go's language, as ollama has them; templates here are Jinja, as in \
             the model's tokenizer_config.json"
        )));
    }
    ChatTemplate::new(template, origin)
        .map_err(|e| Failure::usage(crate::cli::terminal::failure::chain(&e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock;

    #[test]
    fn names_are_an_object() {
        let names: Names = r#"{"enable_thinking": false}"#.parse().unwrap();
        assert_eq!(names.0["enable_thinking"], false);
        assert_eq!(think("false"), Ok(Think::Switch(false)));
        assert_eq!(think("high"), Ok(Think::Effort("high")));
        assert!(think("much").is_err());
        for bad in ["", "[]", "1", "{enable_thinking: false}"] {
            assert!(bad.parse::<Names>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn eos_tokens_are_ids_or_single_tokens() {
        let model = mock::instruct(&[]);
        assert_eq!(eos_ids(&["7".into(), "8".into()], &model).unwrap(), [7, 8]);
        // The mock has one token per byte, so this text has three tokens.
        let failure = eos_ids(&["END".into()], &model).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        let failure = eos_ids(&["END".into()], &mock::base(&[]).opaque()).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
    }

    #[cfg(feature = "mlx-backend")]
    #[test]
    fn templates_are_jinja_in_a_file_or_as_they_are() {
        assert_eq!(
            compiled("{{ messages }}").unwrap().source(),
            "{{ messages }}"
        );
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t.jinja");
        std::fs::write(&file, "{% for m in messages %}{% endfor %}").unwrap();
        assert!(
            compiled(file.to_str().unwrap())
                .unwrap()
                .source()
                .contains("for m")
        );
        for (bad, says) in [
            ("{{ .System }} {{ .Prompt }}", "Go"),
            ("{% for %}", "template"),
            ("no-such-file.jinja", "no-such-file.jinja"),
        ] {
            let failure = compiled(bad).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            let said = failure.report().unwrap();
            assert!(said.contains(says), "{said}");
        }
    }
}
