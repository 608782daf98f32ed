//! `mlx chat`: a conversation, line by line.
//!
//! Replies go to standard output; prompts, messages and statistics do not, so that a chat can be
//! scripted: with standard input not a terminal each line is a message.

use std::path::Path;

use inference::{
    CancelToken, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Message, Prompt,
    TextModel,
};

use super::console::{Console, bytes};
use super::context::{self, Counted};
use super::dialog::{self, Dialog, DialogArgs};
use super::engine::{DraftArgs, EngineArgs};
use super::failure::{Failure, chain, of_options};
use super::interrupt::cancel_on_interrupt;
use super::lines::{Edited, Line, Lines, Plain, Words};
use super::load::{LoadArgs, Loaded, ModelArgs, find_preset, load_drafted, load_preset};
use super::progress::PrefillBar;
use super::reply::{Reply, statistics};
use super::sampling::SamplingArgs;
use super::settings;
use super::terminal::NoCaret;

const HELP: &str = r#"/clear               forget the conversation
/system TEXT         instructions for the model, from here on; without TEXT show them
/set                 show the parameters
/set NAME VALUE      set one: temperature, top_p, top_k, min_p, repeat_penalty, max_tokens, seed, stop
                     (also: /set parameter NAME VALUE, /set system TEXT)
/stats               what the last reply and the whole chat took
/show                what the model is
/help, /?            this
/bye, /exit          leave; so does Ctrl-D
"""                  begins and ends a message of several lines
Ctrl-C               stops a reply"#;

/// A reply goes on to the end of the context.
const UNBOUNDED: usize = usize::MAX;
/// Tokens of prompt and reply where the model does not tell its context.
const UNKNOWN_CONTEXT: usize = 8192;

/// What Tab completes, besides the names of parameters.
const COMMANDS: [&str; 10] = [
    "/bye",
    "/clear",
    "/exit",
    "/help",
    "/quit",
    "/set",
    "/set system ",
    "/show",
    "/stats",
    "/system ",
];

const QUOTES: &str = "\"\"\"";

/// Talk with a model
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    talk: TalkArgs,
}

/// How to talk with a model: what `chat` and `run` have in common.
#[derive(Debug, Clone, clap::Args)]
pub struct TalkArgs {
    /// Instructions for the model
    #[arg(
        long,
        alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    system: Option<String>,
    #[command(flatten)]
    dialog: DialogArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    talk(args.model.model.as_deref(), &args.talk, None, console)
}

/// Talks with a model: about `prompt` alone, or in a conversation.
pub fn talk(
    model: Option<&str>,
    args: &TalkArgs,
    prompt: Option<String>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let preset = find_preset(model)?;
    let mut options = GenerateOptions::default();
    options.max_tokens = UNBOUNDED;
    if let Some(preset) = &preset {
        preset.apply(&mut options)?;
    }
    let mut options = args.sampling.over(options)?;
    args.engine.apply(&mut options)?;
    args.draft.apply(&mut options)?;
    let draft = args.draft.draft_model.as_deref();
    let named = ModelArgs {
        model: model.map(str::to_owned),
    };
    let loaded = match &preset {
        Some(preset) => load_preset(preset, &args.load, draft, console)?,
        None => load_drafted(&named, &args.load, draft, console)?,
    };
    let preset = preset.unwrap_or_default();
    let model_path = loaded.path.as_path();
    let eos = dialog::eos_ids(&args.dialog.extra_eos_token, loaded.model.as_ref())?;
    options.stop_tokens.extend(eos);
    let mut session = Session {
        model: loaded.model.as_ref(),
        dialog: Dialog::new(&args.dialog, Some(&preset), model_path)?,
        sampling: &args.sampling,
        ctx_size: args.load.ctx_size.or(preset.ctx_size()),
        options,
        system: args.system.clone().or(preset.system),
        messages: preset.messages,
        last: None,
        replies: 0,
        generated_tokens: 0,
    };
    if let Some(prompt) = prompt {
        return session.answer(prompt, console);
    }
    // The editor draws on standard output, which is for replies alone when it is no terminal.
    if !(console.in_is_terminal && console.out_is_terminal) {
        return session.run(&mut Plain, console);
    }
    let history = rust_mlx::hub::state_dir().map(|dir| dir.join("chat_history"));
    let parameters = settings::NAMES
        .split(", ")
        .map(|name| format!("/set {name} "));
    let words = COMMANDS.map(String::from).into_iter().chain(parameters);
    let mut lines = Edited::open(history.ok(), Words(words.collect()))?;
    console.note(&introduction(model, args, &loaded));
    session.run(&mut lines, console)
}

/// What answers, in one line.
fn introduction(model: Option<&str>, args: &TalkArgs, loaded: &Loaded) -> String {
    let info = loaded.model.info();
    let is_name = |name: &&str| !Path::new(name).exists();
    let file = loaded.path.file_stem().map(|name| name.to_string_lossy());
    let name = match model.filter(is_name) {
        Some(name) => name.to_owned(),
        None => file.map_or(info.architecture, std::borrow::Cow::into_owned),
    };
    let context = match (args.load.ctx_size, info.context_length) {
        (Some(n), _) => format!("the last {n} tokens"),
        (None, Some(n)) => format!("{n} tokens"),
        (None, None) => String::from("unknown"),
    };
    format!(
        "{name} on {} ({}), context: {context}; /help for help, Ctrl-D to leave",
        loaded.backend.name(),
        info.device
    )
}

/// A conversation so far.
struct Session<'a> {
    model: &'a dyn TextModel,
    dialog: Dialog,
    sampling: &'a SamplingArgs,
    ctx_size: Option<usize>,
    options: GenerateOptions,
    system: Option<String>,
    /// Without the system message.
    messages: Vec<Message>,
    last: Option<(GenerateMetrics, Option<FinishReason>)>,
    replies: usize,
    generated_tokens: usize,
}

/// What a command asks for.
enum Next {
    Continue,
    Leave,
}

impl Session<'_> {
    fn run(&mut self, lines: &mut dyn Lines, console: &mut Console<'_>) -> Result<(), Failure> {
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

    /// Answers one message, and fails where there is no answer.
    fn answer(&mut self, text: String, console: &mut Console<'_>) -> Result<(), Failure> {
        self.messages.push(Message::user(text));
        let reply = self.reply(true, console)?;
        if console.verbose {
            console.warn(&statistics(&reply.metrics, reply.finish_reason));
        }
        reply.error.map_or(Ok(()), |e| Err(e.into()))
    }

    /// Sends a message and shows the reply. On a terminal a failed reply is reported and the chat
    /// goes on; in a script it is the end.
    fn say(&mut self, text: String, console: &mut Console<'_>) -> Result<(), Failure> {
        self.messages.push(Message::user(text));
        let outcome = self.reply(false, console);
        let reply = match outcome {
            Ok(reply) => reply,
            Err(failure) => {
                self.messages.pop();
                return self.survive(failure, console);
            }
        };
        self.replies += 1;
        self.generated_tokens += reply.metrics.generated_tokens;
        let interrupted = reply.was_interrupted();
        if reply.text.is_empty() || (reply.error.is_some() && !interrupted) {
            // Nothing to remember; a question without an answer would confuse the template.
            self.messages.pop();
        } else {
            // Also a partial one: the user saw it and may refer to it.
            self.messages.push(Message::assistant(reply.text));
        }
        self.last = Some((reply.metrics, reply.finish_reason));
        match reply.error {
            Some(e) if interrupted => console.warn(&format!("(stopped: {e})")),
            Some(e) => return self.survive(e.into(), console),
            None => {}
        }
        Ok(())
    }

    /// The reply to the conversation. Where there is only one and the model has no template, it continues
    /// the message as a text.
    fn reply(&self, once: bool, console: &mut Console<'_>) -> Result<Reply, Failure> {
        let cancel = CancelToken::new();
        let mut options = self.options.clone();
        options.cancel = Some(cancel.clone());
        options.deadline = self.sampling.start();
        let _guard = console
            .catches_interrupts
            .then(|| cancel_on_interrupt(&cancel));
        let _no_caret = NoCaret::start(console);
        let system = self.system.as_ref().map(Message::system);
        let messages: Vec<Message> = system.into_iter().chain(self.messages.clone()).collect();
        let info = self.model.info();
        let written = self.dialog.prompt(self.model, &messages)?;
        let prompt = match &written {
            Some(Prompt::Tokens(ids)) => Some(ids.len()),
            _ => context::tokens(self.model, &Counted::Chat(&messages))?,
        };
        if let Some(prompt) = prompt {
            context::check(&info, prompt, self.ctx_size)?;
        }
        if options.max_tokens == UNBOUNDED {
            let context = self
                .ctx_size
                .or(info.context_length)
                .unwrap_or(UNKNOWN_CONTEXT);
            options.max_tokens = context.saturating_sub(prompt.unwrap_or(0)).max(1);
        }
        let bar = PrefillBar::start(&mut options, console);
        let stream = match (&written, messages.as_slice()) {
            (Some(prompt), _) => self.model.generate(prompt, &options),
            (None, [only]) if once && !info.has_chat_template => {
                let prompt = Prompt::Text(only.content.clone());
                self.model.generate(&prompt, &options)
            }
            _ => self.model.chat(&messages, &options),
        };
        let stream = stream.map_err(of_options)?;
        let reply = Reply::draw(stream, true, console)?;
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
        match name {
            "/bye" | "/exit" | "/quit" => return Next::Leave,
            "/help" | "/?" => console.warn(HELP),
            "/clear" => {
                self.messages.clear();
                console.note("the conversation is forgotten");
            }
            "/system" => self.set_system(rest, console),
            "/set" => self.set(rest, console),
            "/stats" => self.stats(console),
            "/show" => self.show(console),
            _ => console.warn(&format!("no command {name}; /help lists what there is")),
        }
        Next::Continue
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

    fn show(&self, console: &mut Console<'_>) {
        let info = self.model.info();
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

/// Whether an error means that no later reply can work either.
fn is_final(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<inference::Error>()
        .is_some_and(|e| e.kind() == ErrorKind::Closed)
}

/// Commands are a slash and a word; `/usr/lib is full` and a lone `/` are messages.
fn is_command(line: &str) -> bool {
    let (word, _) = split_word(line);
    word.strip_prefix('/')
        .is_some_and(|name| name == "?" || (!name.is_empty() && !name.contains('/')))
}

/// The first word and the rest, trimmed.
fn split_word(text: &str) -> (&str, &str) {
    let text = text.trim();
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, rest.trim_start())
}

/// Text without a pair of quotes around it.
fn unquote(text: &str) -> &str {
    let inner = |quote: &str| text.strip_prefix(quote)?.strip_suffix(quote);
    inner(QUOTES).or_else(|| inner("\"")).unwrap_or(text)
}

/// The rest of a message of several lines, whose first line began with the quotes; `None` when it
/// was given up or is empty.
fn read_quoted(
    first: &str,
    lines: &mut dyn Lines,
    console: &mut Console<'_>,
) -> Result<Option<String>, Failure> {
    let mut text = String::new();
    let mut line = first.to_owned();
    loop {
        if let Some(last) = line.trim_end().strip_suffix(QUOTES) {
            text.push_str(last);
            break;
        }
        text.push_str(&line);
        text.push('\n');
        line = match lines.next("... ", console)? {
            Line::Text(line) => line,
            Line::Interrupted => return Ok(None),
            // The end of the input ends the message too.
            Line::End => break,
        };
    }
    let text = text.trim_matches('\n');
    Ok((!text.trim().is_empty()).then(|| text.to_owned()))
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
