//! `mlx chat`: a conversation on the terminal or in a script. `session` implements the
//! conversation.
//!
//! Only replies go to standard output, so scripts can use a chat. If standard input is not a
//! terminal, each input line is a message.

use std::path::Path;

use inference::GenerateOptions;
use rust_mlx::hub;

use crate::cli::options::cache::CacheDirArgs;
use crate::cli::options::dialog::{self, Dialog, DialogArgs};
use crate::cli::options::engine::{DraftArgs, EngineArgs};
use crate::cli::options::load::{LoadArgs, Loaded, ModelArgs, find_preset, load_preset};
use crate::cli::options::mcp::McpArgs;
use crate::cli::options::preset::{self, Preset};
use crate::cli::options::sampling::{Habit, SamplingArgs};
use crate::cli::options::steer::SteerArgs;
use crate::cli::talk::chat_commands::words;
use crate::cli::talk::session::{Held, Session, Source, UNBOUNDED};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::lines::{Edited, Plain, Words};

/// Talk with a model
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    talk: TalkArgs,
}

/// The flags that `chat` and `run` share.
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
    steer: SteerArgs,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    cache_dir: CacheDirArgs,
    #[command(flatten)]
    mcp: McpArgs,
    /// Continue the last conversation on this machine
    #[arg(long, help_heading = "Conversation")]
    resume: bool,
    /// Do not wrap words at the terminal's width
    #[arg(long, alias = "nowordwrap", help_heading = "Conversation")]
    no_word_wrap: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let model = args.model.model.as_deref();
    talk(model, &args.talk, Habit::Greedy, None, console)
}

/// Answers `prompt` and returns; without a prompt, starts a conversation.
pub fn talk(
    model: Option<&str>,
    args: &TalkArgs,
    habit: Habit,
    prompt: Option<String>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let last = hub::state_dir().map(|dir| dir.join("last_chat.json")).ok();
    let preset = args.beginning(model, last.as_deref())?;
    let mut options = GenerateOptions::default();
    options.max_tokens = UNBOUNDED;
    preset.apply(&mut options)?;
    let mut options = args.sampling.over(options)?;
    args.engine.apply(&mut options)?;
    args.draft.apply(&mut options)?;
    options.steering = args.steer.read()?;
    // If a tool server does not start, the error comes before the model is loaded.
    let mcp = args.mcp.start()?;
    let load_args = args.load.keeping(&args.cache_dir);
    let load = |preset: &Preset, console: &mut Console<'_>| {
        let draft = args.draft.draft_model.as_deref();
        load_preset(preset, &load_args, draft, console)
    };
    let loaded = load(&preset, console)?;
    let eos = dialog::eos_ids(&args.dialog.extra_eos_token, loaded.model.as_ref())?;
    options.stop.stop_tokens.extend(eos);
    let mut choices = habit.options(&loaded.model.info().sampling);
    preset.apply(&mut choices)?;
    let choices = args.sampling.choices_over(choices)?;
    options.sampling = choices.sampling;
    options.penalties = choices.penalties;
    let introduction = args.introduction(model, &loaded);
    let on_terminal = console.in_is_terminal && console.out_is_terminal;
    let mut session = Session::new(Held::Owned(loaded.model), options);
    session.dialog = Dialog::new(&args.dialog, Some(&preset), &loaded.path)?;
    if let Some(mcp) = mcp {
        session.dialog.offer(mcp.host.tools());
        session.mcp = Some(mcp);
    }
    session.source = Source {
        path: loaded.path,
        from: preset.from.clone(),
        adapter: preset.adapter.clone(),
        license: preset.license,
    };
    session.sampling = Some(&args.sampling);
    session.habit = habit;
    session.ctx_size = args.load.ctx_size.or(session_context(&preset.parameters));
    session.system = args.system.clone().or(preset.system);
    session.messages = preset.messages;
    session.word_wrap = !args.no_word_wrap;
    if let Some(prompt) = prompt {
        return session.answer(prompt, console);
    }
    session.open = Some(&load);
    // A script saves its conversation only with `--resume`.
    session.last_chat = last.filter(|_| on_terminal || args.resume);
    // The line editor draws on standard output. If standard output is not a terminal, it must
    // contain only replies.
    if !on_terminal {
        return session.run(&mut Plain, console);
    }
    let history = hub::state_dir().map(|dir| dir.join("chat_history"));
    let mut lines = Edited::open(history.ok(), Words(words()))?;
    console.note(&introduction);
    session.remind(console);
    session.run(&mut lines, console)
}

fn session_context(parameters: &[(String, String)]) -> Option<usize> {
    let preset = Preset {
        parameters: parameters.to_vec(),
        ..Preset::default()
    };
    preset.ctx_size()
}

impl TalkArgs {
    /// The start of the conversation: a preset, a plain model, or the last conversation.
    fn beginning(&self, model: Option<&str>, last: Option<&Path>) -> Result<Preset, Failure> {
        let named = match find_preset(model)? {
            Some(preset) => preset,
            None => Preset {
                from: from(model),
                ..Preset::default()
            },
        };
        if !self.resume {
            return Ok(named);
        }
        let last_chat = last.map(preset::read).transpose()?.flatten();
        let last_chat =
            last_chat.ok_or_else(|| Failure::failed("there is no conversation to go on with"))?;
        Ok(match model {
            // Another model may continue the last conversation.
            Some(_) => Preset {
                messages: last_chat.messages,
                system: last_chat.system,
                ..named
            },
            None => last_chat,
        })
    }

    /// One line with the names of model and backend.
    fn introduction(&self, model: Option<&str>, loaded: &Loaded) -> String {
        let info = loaded.model.info();
        let is_name = |name: &&str| !Path::new(name).exists();
        let file = loaded.path.file_stem().map(|name| name.to_string_lossy());
        let name = match model.filter(is_name) {
            Some(name) => name.to_owned(),
            None => file.map_or(info.architecture, std::borrow::Cow::into_owned),
        };
        let context = match (self.load.ctx_size, info.context_length) {
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
}

/// The model's name in a form that works in every directory: a path is absolute.
fn from(model: Option<&str>) -> String {
    let Some(name) = model else {
        return hub::catalog()[0].name.to_owned();
    };
    let path = Path::new(name);
    match std::path::absolute(path) {
        Ok(absolute) if path.exists() => absolute.to_string_lossy().into_owned(),
        _ => name.to_owned(),
    }
}
