//! The conversation of `mlx chat`: messages, commands and replies.

mod rounds;

use std::path::PathBuf;

use inference::{
    CancelToken, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Message, Prompt,
    TextModel, ToolCall,
};

use crate::cli::options::dialog::{self, Dialog, DialogArgs};
use crate::cli::options::load::{Loaded, find_preset};
use crate::cli::options::mcp::Mcp;
use crate::cli::options::modelfile;
use crate::cli::options::preset::{self, Preset};
use crate::cli::options::sampling::{Habit, SamplingArgs};
use crate::cli::options::settings;
use crate::cli::options::tools;
use crate::cli::talk::chat_commands::{HELP, QUOTES, is_command, read_quoted, split_word, unquote};
use crate::cli::talk::context;
use crate::cli::talk::reply::{Reply, statistics};
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::{Failure, chain, of_options};
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::lines::{Line, Lines};
use crate::cli::terminal::progress::PrefillBar;
use crate::cli::terminal::screen::Screen;
use crate::cli::terminal::tty::NoEcho;

/// The limit of a reply that may fill the context.
pub const UNBOUNDED: usize = usize::MAX;
/// Maximum number of tokens in prompt and reply, if the model's context is unknown.
const UNKNOWN_CONTEXT: usize = 8192;

/// A model that the session owns or borrows.
pub enum Held<'a> {
    /// A model that the session owns. `/load` replaces it.
    Owned(Box<dyn TextModel>),
    /// A borrowed model.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests lend a mock"))]
    Lent(&'a dyn TextModel),
}

/// Where the model comes from.
#[derive(Default)]
pub struct Source {
    /// The path of its files.
    pub path: PathBuf,
    /// The name under which the model can be loaded again.
    pub from: String,
    pub adapter: Option<String>,
    /// The licenses of the preset.
    pub license: Vec<String>,
}

/// Loads the model of a preset.
pub type Open<'a> = dyn Fn(&Preset, &mut Console<'_>) -> Result<Loaded, Failure> + 'a;

/// A conversation with its model and settings.
pub struct Session<'a> {
    model: Held<'a>,
    pub dialog: Dialog,
    pub source: Source,
    /// The function that loads another model for `/load`.
    pub open: Option<&'a Open<'a>>,
    /// The file in which the conversation is saved for `/resume`.
    pub last_chat: Option<PathBuf>,
    /// The MCP servers that run tools.
    pub mcp: Option<Mcp>,
    pub sampling: Option<&'a SamplingArgs>,
    /// The defaults of the generation options.
    pub habit: Habit,
    pub ctx_size: Option<usize>,
    options: GenerateOptions,
    pub system: Option<String>,
    /// The messages without the system message.
    pub messages: Vec<Message>,
    /// Whether words are wrapped at the terminal's width.
    pub word_wrap: bool,
    /// Whether statistics follow each reply.
    verbose: bool,
    last: Option<(GenerateMetrics, Option<FinishReason>)>,
    replies: usize,
    generated_tokens: usize,
}

/// How the conversation continues after a command.
enum Next {
    Continue,
    Leave,
}

impl<'a> Session<'a> {
    /// A new conversation.
    pub fn new(model: Held<'a>, options: GenerateOptions) -> Self {
        Self {
            model,
            dialog: Dialog::default(),
            source: Source::default(),
            open: None,
            last_chat: None,
            mcp: None,
            sampling: None,
            habit: Habit::Greedy,
            ctx_size: None,
            options,
            system: None,
            messages: Vec::new(),
            word_wrap: true,
            verbose: false,
            last: None,
            replies: 0,
            generated_tokens: 0,
        }
    }

    fn model(&self) -> &dyn TextModel {
        match &self.model {
            Held::Owned(model) => model.as_ref(),
            Held::Lent(model) => *model,
        }
    }

    /// Prints the number of messages and the start of the last message, if there is one.
    pub fn remind(&self, console: &mut Console<'_>) {
        if let Some(message) = self.messages.last() {
            let line = message.content.lines().next().unwrap_or_default();
            let line: String = line.chars().take(60).collect();
            let n = self.messages.len();
            console.note(&format!("{n} messages so far; the last: {line}"));
        }
    }

    /// Reads lines until one ends the conversation.
    pub fn run(&mut self, lines: &mut dyn Lines, console: &mut Console<'_>) -> Result<(), Failure> {
        loop {
            let line = match lines.next(">>> ", console)? {
                Line::Text(line) => line,
                Line::Interrupted => {
                    console.warn("Ctrl-D or /bye leaves");
                    continue;
                }
                Line::End => return Ok(()),
            };
            let trimmed = line.trim();
            if trimmed.is_empty() {
                continue;
            }
            if let Some(first) = trimmed.strip_prefix(QUOTES) {
                if let Some(text) = read_quoted(first, lines, console)? {
                    self.say(text, console)?;
                }
            } else if is_command(trimmed) {
                match self.command(trimmed, console) {
                    Next::Continue => {}
                    Next::Leave => return Ok(()),
                }
            } else {
                self.say(line, console)?;
            }
        }
    }

    /// Answers a single message. Returns an error if there is no reply.
    pub fn answer(&mut self, text: String, console: &mut Console<'_>) -> Result<(), Failure> {
        self.messages.push(Message::user(text));
        let reply = self.rounds(true, console)?;
        self.print_calls(&reply, console)?;
        if console.verbose {
            console.warn(&statistics(&reply.metrics, reply.finish_reason));
        }
        reply.error.map_or(Ok(()), |e| Err(e.into()))
    }

    /// Sends a message and shows the reply. On a terminal, a failed reply is reported and the chat
    /// continues. In a script, a failed reply ends the chat.
    fn say(&mut self, text: String, console: &mut Console<'_>) -> Result<(), Failure> {
        self.ask(Message::user(text), console)
    }

    /// The tool calls without a result, oldest first.
    fn open_calls(&self) -> Vec<ToolCall> {
        let answered = |id: &str| {
            let mut messages = self.messages.iter().rev();
            messages
                .by_ref()
                .take_while(|message| message.role == "tool")
                .any(|message| message.tool_call_id.as_deref() == Some(id))
        };
        let last = self.messages.iter().rev().find(|m| m.role != "tool");
        let calls = last.map(|message| message.tool_calls.as_slice());
        let open = calls.unwrap_or_default().iter();
        open.filter(|call| !answered(&call.id)).cloned().collect()
    }

    /// `/tool`: sets the result of the oldest call without one. After the last result, the model
    /// continues.
    fn answer_call(&mut self, text: &str, console: &mut Console<'_>) -> Result<(), Failure> {
        let open = self.open_calls();
        let Some(call) = open.first() else {
            return Err(Failure::usage(
                "the model is not waiting for the result of a tool",
            ));
        };
        let message = Message::tool(&call.id, unquote(text)).with_name(&call.name);
        if open.len() > 1 {
            self.messages.push(message);
            console.note(&format!("{} more to answer", open.len() - 1));
            return Ok(());
        }
        self.ask(message, console)
    }

    /// Prints a line of JSON for each call of a reply.
    fn print_calls(&self, reply: &Reply, console: &mut Console<'_>) -> Result<(), Failure> {
        for call in &reply.calls {
            console.json(&tools::call(call))?;
        }
        Ok(())
    }

    fn ask(&mut self, message: Message, console: &mut Console<'_>) -> Result<(), Failure> {
        let before = self.messages.len();
        self.messages.push(message);
        let outcome = self.rounds(false, console);
        let reply = match outcome {
            Ok(reply) => reply,
            Err(failure) => {
                self.messages.truncate(before);
                return self.survive(failure, console);
            }
        };
        self.replies += 1;
        self.generated_tokens += reply.metrics.generated_tokens;
        let interrupted = reply.was_interrupted();
        self.print_calls(&reply, console)?;
        let empty = reply.text.is_empty() && reply.calls.is_empty();
        if empty || (reply.error.is_some() && !interrupted) {
            // Nothing was generated. A question without an answer would confuse the chat template,
            // so the question is removed.
            self.messages.truncate(before);
        } else {
            // A partial reply stays in the conversation, because the user has seen it and may refer
            // to it.
            self.messages
                .push(Message::assistant(reply.text).with_tool_calls(reply.calls));
        }
        if self.verbose {
            console.warn(&statistics(&reply.metrics, reply.finish_reason));
        }
        self.last = Some((reply.metrics, reply.finish_reason));
        self.keep(console);
        match reply.error {
            Some(e) if interrupted => console.warn(&format!("(stopped: {e:#})")),
            Some(e) => return self.survive(e.into(), console),
            None => {}
        }
        Ok(())
    }

    /// Generates the reply to the conversation. If the model has no chat template, a single message
    /// is continued as plain text.
    fn reply(&self, once: bool, console: &mut Console<'_>) -> Result<Reply, Failure> {
        let cancel = CancelToken::new();
        let mut options = self.options.clone();
        options.interrupt.cancel = Some(cancel.clone());
        options.interrupt.deadline = self.sampling.and_then(SamplingArgs::start);
        let _guard = console
            .catches_interrupts
            .then(|| cancel_on_interrupt(&cancel));
        let _no_echo = NoEcho::start(console.in_is_terminal);
        let system = self.system.as_ref().map(Message::system);
        let messages: Vec<Message> = system.into_iter().chain(self.messages.clone()).collect();
        let info = self.model().info();
        if let Some(flag) = self.dialog.needs_template()
            && !(info.has_chat_template || self.dialog.has_template())
        {
            return Err(Failure::failed(format!(
                "{flag}: this model has no chat template"
            )));
        }
        let ready = match messages.as_slice() {
            [only] if once && !info.has_chat_template && self.dialog.is_plain() => {
                Some((dialog::ids_of(self.model(), only.content.clone()), None))
            }
            all => self
                .dialog
                .prepare(self.model(), all)?
                .map(|(prepared, reader)| (Prompt::from(prepared), reader)),
        };
        let length = match &ready {
            Some((Prompt::Tokens(ids), _)) => ids.len(),
            _ => 0,
        };
        context::check(&info, length, self.ctx_size)?;
        if options.max_tokens == UNBOUNDED {
            let context = self
                .ctx_size
                .or(info.context_length)
                .unwrap_or(UNKNOWN_CONTEXT);
            options.max_tokens = context.saturating_sub(length).max(1);
        }
        let bar = PrefillBar::start(&mut options, console);
        let (stream, reader) = match ready {
            Some((prompt, reader)) => (self.model().generate(&prompt, &options), reader),
            None => (self.model().chat(&messages, &options), None),
        };
        let stream = stream.map_err(of_options)?;
        let screen = Screen::on(console, self.word_wrap);
        let reply = Reply::draw(stream, true, screen, reader, console)?;
        drop(bar);
        if reply.finish_reason == Some(FinishReason::Length) {
            let how = if once {
                "--max-tokens"
            } else {
                "/set max_tokens"
            };
            console.note(&format!(
                "(cut after {} tokens; {how} N allows more)",
                reply.metrics.generated_tokens
            ));
        }
        let all = reply.metrics.prompt_tokens + reply.metrics.generated_tokens;
        if let Some(warning) = context::beyond(&info, all, self.ctx_size) {
            console.warn(&warning);
        }
        Ok(reply)
    }

    fn survive(&self, failure: Failure, console: &mut Console<'_>) -> Result<(), Failure> {
        match failure {
            Failure::Failed(error) if console.in_is_terminal && !is_final(&error) => {
                console.warn(&format!("error: {}", chain(error.as_ref())));
                Ok(())
            }
            Failure::Usage(message) if console.in_is_terminal => {
                console.warn(&format!("error: {message}"));
                Ok(())
            }
            other => Err(other),
        }
    }

    fn command(&mut self, line: &str, console: &mut Console<'_>) -> Next {
        let (name, rest) = split_word(line);
        let done = match name {
            "/bye" | "/exit" | "/quit" => return Next::Leave,
            "/help" | "/?" => {
                console.warn(HELP);
                Ok(())
            }
            "/clear" => {
                self.messages.clear();
                console.note("the conversation is forgotten");
                Ok(())
            }
            "/system" => {
                self.set_system(rest, console);
                Ok(())
            }
            "/set" => {
                self.set(rest, console);
                Ok(())
            }
            "/stats" => {
                self.stats(console);
                Ok(())
            }
            "/show" => {
                self.show(rest, console);
                Ok(())
            }
            "/template" => self.template(rest, console),
            "/tool" => self.answer_call(rest, console),
            "/save" => self.save(rest, console),
            "/load" => self.load(rest, console),
            "/resume" => self.resume(console),
            _ => {
                console.warn(&format!("no command {name}; /help lists what there is"));
                Ok(())
            }
        };
        // A failed command must not end the conversation.
        match done {
            Ok(()) => {}
            Err(Failure::Usage(message)) => console.warn(&format!("error: {message}")),
            Err(failure) => {
                console.warn(&format!("error: {}", failure.report().unwrap_or_default()));
            }
        }
        Next::Continue
    }

    /// The options before the user changes any.
    fn base(&self) -> GenerateOptions {
        self.habit.options(&self.model().info().sampling)
    }

    /// The conversation with its settings.
    fn preset(&self) -> Preset {
        let mut parameters = settings::changed(&self.options, &self.base());
        if let Some(n) = self.ctx_size {
            parameters.push(("num_ctx".into(), n.to_string()));
        }
        Preset {
            from: self.source.from.clone(),
            system: self.system.clone(),
            template: self.dialog.template().map(str::to_owned),
            adapter: self.source.adapter.clone(),
            parameters,
            license: self.source.license.clone(),
            messages: self.messages.clone(),
        }
    }

    /// Saves the conversation for `/resume`.
    fn keep(&mut self, console: &mut Console<'_>) {
        let Some(path) = &self.last_chat else { return };
        if let Err(failure) = preset::write(path, &self.preset()) {
            // The warning appears only once, so that it does not disturb the chat.
            console.warn(&format!(
                "warning: the conversation is not kept: {}",
                failure.report().unwrap_or_default()
            ));
            self.last_chat = None;
        }
    }

    fn save(&self, name: &str, console: &mut Console<'_>) -> Result<(), Failure> {
        if name.is_empty() {
            return Err(Failure::usage("/save NAME: a name is missing"));
        }
        preset::save(name, &self.preset())?;
        console.note(&format!(
            "saved; `/load {name}` and `mlx run {name}` go on from here"
        ));
        Ok(())
    }

    fn load(&mut self, name: &str, console: &mut Console<'_>) -> Result<(), Failure> {
        if name.is_empty() {
            return Err(Failure::usage("/load NAME: a name is missing"));
        }
        let preset = find_preset(Some(name))?.unwrap_or_else(|| Preset {
            from: name.to_owned(),
            ..Preset::default()
        });
        self.adopt(preset, console)?;
        console.note(&format!("{name} is loaded"));
        self.remind(console);
        Ok(())
    }

    fn resume(&mut self, console: &mut Console<'_>) -> Result<(), Failure> {
        let last_chat = self.last_chat.as_deref().map(preset::read).transpose()?;
        let last_chat = last_chat
            .flatten()
            .filter(|last_chat| !last_chat.messages.is_empty());
        let last_chat =
            last_chat.ok_or_else(|| Failure::failed("there is no conversation to go on with"))?;
        self.adopt(last_chat, console)?;
        self.remind(console);
        Ok(())
    }

    /// Continues with a preset. If the preset has another model, loads it.
    fn adopt(&mut self, preset: Preset, console: &mut Console<'_>) -> Result<(), Failure> {
        // The preset is checked before another model is loaded.
        preset.apply(&mut GenerateOptions::default())?;
        let same = preset.from == self.source.from
            && preset.adapter == self.source.adapter
            && (preset.ctx_size().is_none() || preset.ctx_size() == self.ctx_size);
        let loaded = match self.open {
            _ if same => None,
            Some(open) => Some(open(&preset, console)?),
            None => return Err(Failure::failed("no other model can be loaded here")),
        };
        let path = loaded
            .as_ref()
            .map_or(&self.source.path, |loaded| &loaded.path);
        let dialog = Dialog::new(&DialogArgs::default(), Some(&preset), path)?;
        if let Some(loaded) = loaded {
            self.source.path = loaded.path;
            self.model = Held::Owned(loaded.model);
            self.ctx_size = preset.ctx_size();
        }
        self.dialog = dialog;
        self.options = self.base();
        self.options.max_tokens = UNBOUNDED;
        preset.apply(&mut self.options)?;
        self.source.from = preset.from;
        self.source.adapter = preset.adapter;
        self.source.license = preset.license;
        self.system = preset.system;
        self.messages = preset.messages;
        Ok(())
    }

    /// `/template`: shows the chat template, or replaces it by a file.
    fn template(&mut self, file: &str, console: &mut Console<'_>) -> Result<(), Failure> {
        if file.is_empty() {
            match self
                .dialog
                .template()
                .map(str::to_owned)
                .or(self.source.template())
            {
                Some(template) => console.warn(template.trim_end()),
                None => console.warn("no chat template is known"),
            }
            return Ok(());
        }
        let template = dialog::compiled(unquote(file))?;
        self.dialog.set_template(template, &self.source.path)?;
        console.note("another template is used from here on");
        Ok(())
    }

    fn set_system(&mut self, text: &str, console: &mut Console<'_>) {
        if text.is_empty() {
            let system = self.system.as_deref().unwrap_or("no instructions");
            console.warn(system);
        } else {
            self.system = Some(unquote(text).to_owned());
            console.note("instructions set");
        }
    }

    fn set(&mut self, rest: &str, console: &mut Console<'_>) {
        let (mut name, mut value) = split_word(rest);
        match name {
            "" => return console.warn(&settings::list(&self.options)),
            "system" => return self.set_system(value, console),
            "parameter" => (name, value) = split_word(value),
            "verbose" | "quiet" if value.is_empty() => {
                self.verbose = name == "verbose";
                return console.note(&format!("{name} from here on"));
            }
            "wordwrap" | "nowordwrap" if value.is_empty() => {
                self.word_wrap = name == "wordwrap";
                return console.note(&format!("{name} from here on"));
            }
            _ => {}
        }
        match settings::set(&mut self.options, name, unquote(value)) {
            Ok(()) => console.note(&format!("{name} is now {value}")),
            Err(e) => console.warn(&e),
        }
    }

    fn stats(&self, console: &mut Console<'_>) {
        match &self.last {
            Some((metrics, reason)) => console.warn(&statistics(metrics, *reason)),
            None => console.warn("no reply yet"),
        }
        console.warn(&format!(
            "chat: {} messages, {} replies, {} tokens generated",
            self.messages.len(),
            self.replies,
            self.generated_tokens
        ));
    }

    fn show(&self, what: &str, console: &mut Console<'_>) {
        let told = match what {
            "" | "info" => return self.info(console),
            "system" => self.system.clone(),
            "parameters" => Some(settings::list(&self.options)),
            "license" => Some(self.source.license.join("\n")).filter(|text| !text.is_empty()),
            "template" => self
                .dialog
                .template()
                .map(str::to_owned)
                .or(self.source.template()),
            "modelfile" => Some(modelfile::write(&self.preset())),
            _ => Some(String::from(
                "/show knows info, system, parameters, template, license and modelfile",
            )),
        };
        console.warn(told.as_deref().map_or("none", str::trim_end));
    }

    fn info(&self, console: &mut Console<'_>) {
        let info = self.model().info();
        let context = info
            .context_length
            .map_or("unknown".into(), |n| format!("{n} tokens"));
        console.warn(&format!(
            "architecture {}, {:.1} M parameters, {} layers, hidden size {}, vocabulary {}, context {context}, weights {}, device {}",
            info.architecture,
            info.parameters as f64 / 1e6,
            info.num_layers,
            info.hidden_size,
            info.vocab_size,
            bytes(info.weight_bytes),
            info.device,
        ));
    }
}

impl Source {
    /// The model's own chat template, read from its files.
    #[cfg(feature = "mlx-backend")]
    fn template(&self) -> Option<String> {
        let files = crate::cli::options::files::Files::read(&self.path, None).ok()?;
        Some(files.text.template()?.source().to_owned())
    }

    /// Returns `None`, because the program cannot read model files without the engine.
    #[cfg(not(feature = "mlx-backend"))]
    fn template(&self) -> Option<String> {
        None
    }
}

/// Whether an error means that all later replies will fail, too.
fn is_final(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<inference::Error>()
        .is_some_and(|e| e.kind() == ErrorKind::Closed)
}

#[cfg(test)]
mod tests;
