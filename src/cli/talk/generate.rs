//! `mlx generate`: generates one reply to one prompt.

use inference::{
    CancelToken, ChatPrompt, ChatStart, GenerateOptions, Message, Prompt, TextModel, TokenStream,
};
use serde_json::json;

use crate::cli::options::cache::CacheDirArgs;
use crate::cli::options::dialog::{self, Dialog, DialogArgs};
use crate::cli::options::engine::{DraftArgs, EngineArgs};
use crate::cli::options::load::{LoadArgs, ModelArgs, find_preset, load_drafted, load_preset};
use crate::cli::options::preset::Preset;
use crate::cli::options::prompt::{TokenList, read_file, read_text, read_tokens};
use crate::cli::options::sampling::SamplingArgs;
use crate::cli::options::steer::SteerArgs;
use crate::cli::options::tools::{self, Reader};
use crate::cli::talk::context;
use crate::cli::talk::reply::{Reply, figures, statistics};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::{Failure, of_options};
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::progress::PrefillBar;

/// Generate a reply to a prompt
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("input").args(["prompt", "text", "tokens", "file"])))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt; `-` reads it from standard input, and so does a missing prompt if standard input
    /// is a file or a pipe
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The same as --prompt
    #[arg(value_name = "PROMPT")]
    text: Option<String>,
    /// Read the prompt from a UTF-8 file, without a newline at its end
    #[arg(long, short, value_name = "FILE")]
    file: Option<std::path::PathBuf>,
    /// The prompt as token ids, used unchanged: `1,2,3`; `-` reads them from standard input
    #[arg(long, value_name = "IDS", allow_hyphen_values = true, conflicts_with_all = DIALOG)]
    tokens: Option<TokenList>,
    /// Instructions before the prompt [default: those of the model's chat template, if any]
    #[arg(
        long,
        alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true,
        conflicts_with_all = ["raw", "tokens"]
    )]
    system: Option<String>,
    /// Use the prompt unchanged, without the model's chat template
    #[arg(long, alias = "ignore-chat-template", conflicts_with_all = DIALOG)]
    raw: bool,
    /// Print one JSON object at the end, instead of the text while it is generated
    #[arg(long)]
    json: bool,
    /// Continue the message that `mlx cache-prompt` (or mlx-lm's `cache_prompt`) started in this
    /// file
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["system", "tokens", "chat_template", "chat_template_config", "think", "prefill_response", "tools"]
    )]
    prompt_cache_file: Option<std::path::PathBuf>,
    /// With `--json`, also print the log-probability of each token and of the N most likely tokens
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<usize>,
    #[command(flatten)]
    dialog: DialogArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    cache_dir: CacheDirArgs,
    /// The messages of a preset's conversation
    #[arg(skip)]
    history: Vec<Message>,
}

/// Flags for conversations. They have no effect on other prompts.
const DIALOG: [&str; 5] = [
    "chat_template",
    "chat_template_config",
    "think",
    "prefill_response",
    "tools",
];

/// Maximum number of tokens in a reply, if neither a preset nor the model's context sets a limit.
const UNKNOWN_CONTEXT: usize = 8192;

/// The input of the model.
enum Request {
    Text(String),
    Tokens(Vec<u32>),
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    // Checks that need no model come before the model is loaded.
    let preset = find_preset(args.model.model.as_deref())?;
    let mut options = args.options(preset.as_ref())?;
    args.engine.apply(&mut options)?;
    args.draft.apply(&mut options)?;
    options.steering = args.steer.read()?;
    let request = args.request(console)?;
    let draft = args.draft.draft_model.as_deref();
    let load = args.load.keeping(&args.cache_dir);
    let loaded = match &preset {
        Some(preset) => load_preset(preset, &load, draft, console)?,
        None => load_drafted(&args.model, &load, draft, console)?,
    };
    let dialog = Dialog::new(&args.dialog, preset.as_ref(), &loaded.path)?;
    args.preset(preset)
        .answer(loaded.model.as_ref(), &dialog, request, options, console)
}

impl Args {
    /// Whether the prompt is on the command line, not on standard input.
    pub fn has_prompt(&self) -> bool {
        let text = self.prompt.is_some() || self.text.is_some() || self.file.is_some();
        text || self.tokens.is_some()
    }

    fn options(&self, preset: Option<&Preset>) -> Result<GenerateOptions, Failure> {
        let options = self
            .sampling
            .of_preset(preset)?
            .with_logprobs(self.logprobs);
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))?;
        Ok(options)
    }

    /// Returns these arguments, extended by the instructions and the conversation of a preset.
    fn preset(&self, preset: Option<Preset>) -> Self {
        let mut args = self.clone();
        if let Some(preset) = preset {
            args.system = args.system.or(preset.system);
            args.history = preset.messages;
        }
        args
    }

    fn request(&self, console: &mut Console<'_>) -> Result<Request, Failure> {
        let piped = String::from("-");
        let given = match !self.has_prompt() && !console.in_is_terminal {
            true => Some(&piped),
            false => self.prompt.as_ref().or(self.text.as_ref()),
        };
        let of_file = self.file.as_deref().map(read_file).transpose()?;
        match (given.or(of_file.as_ref()), &self.tokens) {
            (Some(prompt), None) => {
                // A single dash in a file is text, not a name for standard input.
                let text = match &of_file {
                    Some(text) => text.clone(),
                    None => read_text(prompt, console)?,
                };
                // A saved prompt can be continued without additional text.
                if text.trim().is_empty() && self.prompt_cache_file.is_none() {
                    return Err(Failure::usage(
                        "the prompt is empty; there is nothing to reply to",
                    ));
                }
                Ok(Request::Text(text))
            }
            (None, Some(tokens)) => Ok(Request::Tokens(read_tokens(tokens, console)?)),
            _ => Err(Failure::usage(
                "there is no prompt: give PROMPT, --prompt, --file or --tokens, or pipe one in",
            )),
        }
    }

    fn answer(
        &self,
        model: &dyn TextModel,
        dialog: &Dialog,
        request: Request,
        mut options: GenerateOptions,
        console: &mut Console<'_>,
    ) -> Result<(), Failure> {
        if options.max_tokens == usize::MAX {
            let context = self.load.ctx_size.or(model.info().context_length);
            options.max_tokens = context.unwrap_or(UNKNOWN_CONTEXT);
        }
        let eos = dialog::eos_ids(&self.dialog.extra_eos_token, model)?;
        options.stop.stop_tokens.extend(eos);
        let cancel = CancelToken::new();
        options.interrupt.cancel = Some(cancel.clone());
        options.interrupt.deadline = self.sampling.start();
        let guard = console
            .catches_interrupts
            .then(|| cancel_on_interrupt(&cancel));

        let bar = PrefillBar::start(&mut options, console);
        let (stream, reader) = self.begin(model, dialog, request, &options)?;
        let reply = Reply::draw(stream, !self.json, None, reader, console)?;
        drop((bar, guard));
        let all = reply.metrics.prompt_tokens + reply.metrics.generated_tokens;
        if let Some(warning) = context::beyond(&model.info(), all, self.load.ctx_size) {
            console.warn(&warning);
        }
        if reply.error.is_none() || reply.was_interrupted() {
            if self.json {
                let mut object = json!({
                    "text": reply.text,
                    "tokens": reply.tokens,
                    "prompt_tokens": reply.metrics.prompt_tokens,
                    "generated_tokens": reply.metrics.generated_tokens,
                    "finish_reason": reply.finish_reason,
                    "metrics": figures(&reply.metrics),
                });
                if self.logprobs.is_some() {
                    object["logprobs"] = json!(reply.logprobs);
                }
                if dialog.has_tools() {
                    object["reasoning"] = json!(reply.reasoning);
                    object["tool_calls"] = reply.calls.iter().map(tools::call).collect();
                }
                console.json(&object)?;
            } else {
                for call in &reply.calls {
                    console.json(&tools::call(call))?;
                }
            }
            console.note(&statistics(&reply.metrics, reply.finish_reason));
        }
        reply.error.map_or(Ok(()), |e| Err(e.into()))
    }

    fn begin(
        &self,
        model: &dyn TextModel,
        dialog: &Dialog,
        request: Request,
        options: &GenerateOptions,
    ) -> Result<(TokenStream, Option<Reader>), Failure> {
        let plain = |stream: inference::Result<TokenStream>| {
            stream.map(|stream| (stream, None)).map_err(of_options)
        };
        let text = match request {
            Request::Tokens(ids) => return self.run(model, Prompt::Tokens(ids), options),
            Request::Text(text) => text,
        };
        if let Some(path) = &self.prompt_cache_file {
            let (cache, tokens) = model
                .as_prompt_cache()
                .zip(model.as_token_model())
                .ok_or_else(|| Failure::failed("this backend keeps no prompts in files"))?;
            let more = match !self.raw && model.info().has_chat_template {
                true => {
                    let chat = ChatPrompt::new([Message::user(text)]);
                    let chat = chat.with_start(ChatStart::LastMessage);
                    tokens.prepare_chat(&chat)?.ids
                }
                false => tokens.encode(&text, false)?,
            };
            let all = cache.prompt_cache_len(path)?.saturating_add(more.len());
            context::check(&model.info(), all, self.load.ctx_size)?;
            return plain(cache.continue_prompt_cache(path, &Prompt::Tokens(more), options));
        }
        if self.raw {
            return self.run(model, dialog::ids_of(model, text), options);
        }
        if model.info().has_chat_template || dialog.has_template() {
            let messages = self.messages(text);
            return match dialog.prepare(model, &messages)? {
                Some((prepared, reader)) => {
                    let (stream, _) = self.run(model, prepared.into(), options)?;
                    Ok((stream, reader))
                }
                None => plain(model.chat(&messages, options)),
            };
        }
        let system = self.system.as_ref().map(|_| "--system");
        if let Some(flag) = system.or(dialog.needs_template()) {
            return Err(Failure::failed(format!(
                "{flag}: this model has no chat template; put the text into the prompt",
            )));
        }
        self.run(model, dialog::ids_of(model, text), options)
    }

    /// Generates the reply to a prompt. Refuses token ids that exceed the model's context.
    fn run(
        &self,
        model: &dyn TextModel,
        prompt: Prompt,
        options: &GenerateOptions,
    ) -> Result<(TokenStream, Option<Reader>), Failure> {
        if let Prompt::Tokens(ids) = &prompt {
            context::check(&model.info(), ids.len(), self.load.ctx_size)?;
        }
        let stream = model.generate(&prompt, options).map_err(of_options)?;
        Ok((stream, None))
    }

    /// The prompt as a conversation. Without `--system` no system message is added; the chat
    /// template decides about instructions, as in training and in mlx-lm.
    fn messages(&self, text: String) -> Vec<Message> {
        let system = self.system.as_deref().filter(|text| !text.is_empty());
        let system = system.map(Message::system);
        let before = system.into_iter().chain(self.history.clone());
        before.chain([Message::user(text)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::{self, Streams};
    use clap::Parser;
    use inference_conformance::scripted::{Scripted, Step};

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        let args = std::iter::once(&"generate").chain(args);
        Program::try_parse_from(args).map(|program| program.args)
    }

    fn answer(model: &Scripted, args: &[&str], streams: &mut Streams) -> Result<(), Failure> {
        let args = parse(args).unwrap();
        let options = args.options(None)?;
        let mut console = streams.console();
        let request = args.request(&mut console)?;
        args.answer(model, &Dialog::default(), request, options, &mut console)
    }

    #[test]
    fn a_prompt_is_needed_and_only_one() {
        assert!(parse(&["--prompt", "a", "--tokens", "1"]).is_err());
        assert!(parse(&["a", "--tokens", "1"]).is_err());
        assert!(parse(&["a", "--prompt", "b"]).is_err());
        assert!(parse(&["a", "b"]).is_err());
        assert!(parse(&["--prompt", "a", "--system", "b", "--raw"]).is_err());
        assert!(parse(&["--tokens", "1", "--system", "b"]).is_err());
        assert!(parse(&["--tokens", "4294967296"]).is_err());
        let args = parse(&["--prompt", "- a list"]).unwrap();
        assert_eq!(args.prompt.as_deref(), Some("- a list"));
        assert_eq!(
            parse(&["--prompt", "-"]).unwrap().prompt.as_deref(),
            Some("-")
        );
    }

    #[test]
    fn a_file_is_the_prompt_as_it_stands() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompt");
        let file = path.to_str().unwrap();
        let model = mock::base(&["x"]);
        for (content, prompt) in [("a\nb\n", "text a\nb"), ("-", "text -")] {
            std::fs::write(&path, content).unwrap();
            answer(&model, &["-f", file], &mut Streams::new("unread")).unwrap();
            assert_eq!(model.asked().last().unwrap(), prompt);
        }
        let failure = answer(&model, &["-f", "absent"], &mut Streams::new("")).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(parse(&["-f", file, "-p", "a"]).is_err());
    }

    #[test]
    fn an_instruct_model_gets_messages_and_raw_gets_text() {
        let model = mock::instruct(&["Par", "is", "."]);
        let mut streams = Streams::new("");
        answer(
            &model,
            &["-p", "Capital?", "--system", "Be brief."],
            &mut streams,
        )
        .unwrap();
        assert_eq!(streams.out(), "Paris.\n");
        assert_eq!(model.asked(), ["chat system:Be brief.|user:Capital?"]);
        assert!(
            streams.err().contains("generated: 3 tokens"),
            "{}",
            streams.err()
        );
        answer(&model, &["-p", "Capital?", "--raw"], &mut streams).unwrap();
        answer(&model, &["--tokens", "7,8"], &mut streams).unwrap();
        answer(&model, &["Capital?", "--raw"], &mut streams).unwrap();
        answer(&model, &["-p", "Capital?"], &mut streams).unwrap();
        answer(&model, &["-p", "Capital?", "--system", ""], &mut streams).unwrap();
        assert_eq!(
            model.asked()[1..],
            [
                "text Capital?",
                "tokens [7, 8]",
                "text Capital?",
                "chat user:Capital?",
                "chat user:Capital?",
            ]
        );
    }

    #[test]
    fn a_base_model_gets_the_prompt_as_text() {
        let model = mock::base(&["x"]);
        let mut streams = Streams::new("from a pipe\n");
        answer(&model, &["-p", "-"], &mut streams).unwrap();
        assert_eq!(model.asked(), ["text from a pipe"]);
        // Without a prompt argument, the piped text is the prompt. An empty pipe is an error.
        let mut streams = Streams::new("from a pipe\n");
        answer(&model, &["--raw"], &mut streams).unwrap();
        assert_eq!(model.asked()[1], "text from a pipe");
        let failure = answer(&model, &[], &mut Streams::new("")).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.report().unwrap().contains("the prompt is empty"));
        let mut streams = Streams::new("typed\n");
        let mut console = streams.console();
        console.in_is_terminal = true;
        let failure = parse(&[]).unwrap().request(&mut console).err().unwrap();
        assert_eq!(failure.exit_code(), 2);
        assert!(failure.report().unwrap().contains("there is no prompt"));
        let failure = answer(&model, &["-p", "a", "--system", "b"], &mut streams).unwrap_err();
        assert!(failure.report().unwrap().contains("no chat template"));
    }

    #[test]
    fn json_is_one_object_with_its_keys_in_order() {
        let model = mock::instruct(&["Par", "is\n"]);
        let mut streams = Streams::new("");
        answer(&model, &["-p", "x", "--json"], &mut streams).unwrap();
        let out = streams.out();
        assert_eq!(out.lines().count(), 1, "{out}");
        let value: serde_json::Value = serde_json::from_str(&out).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(
            keys,
            [
                "text",
                "tokens",
                "prompt_tokens",
                "generated_tokens",
                "finish_reason",
                "metrics"
            ]
        );
        assert_eq!(value["text"], "Paris\n");
        assert_eq!(value["tokens"], json!([0, 1]));
        assert_eq!(value["generated_tokens"], 2);
        assert_eq!(value["finish_reason"], "stop");
        assert!(value["metrics"]["total_time"].is_number(), "{value}");
    }

    #[test]
    fn logprobs_are_part_of_the_object_and_of_nothing_else() {
        assert!(parse(&["-p", "x", "--logprobs", "2"]).is_err());
        let model = mock::instruct(&["Par", "is"]);
        let mut streams = Streams::new("");
        answer(
            &model,
            &["-p", "x", "--json", "--logprobs", "2"],
            &mut streams,
        )
        .unwrap();
        let value: serde_json::Value = serde_json::from_str(&streams.out()).unwrap();
        let of = |id: u32, text: &str| {
            let one = json!({"id": id, "text": text, "logprob": -0.5});
            json!({"logprob": -0.5, "top": [one, one]})
        };
        assert_eq!(value["logprobs"], json!([of(0, "Par"), of(1, "is")]));
        let failure = answer(
            &model,
            &["-p", "x", "--json", "--logprobs", "9999"],
            &mut streams,
        )
        .unwrap_err();
        assert_eq!(failure.exit_code(), 2);
    }

    #[test]
    fn the_output_ends_with_one_newline() {
        for (pieces, want) in [
            (&["a\n"][..], "a\n"),
            (&["a"], "a\n"),
            (&[""], ""),
            (&[], ""),
        ] {
            let mut streams = Streams::new("");
            answer(&mock::instruct(pieces), &["-p", "x"], &mut streams).unwrap();
            assert_eq!(streams.out(), want);
        }
    }

    #[test]
    fn a_stopped_reply_keeps_what_came_and_exits_with_1() {
        let model = mock::instruct(&["a", "b"])
            .after(1, Step::fail(inference::ErrorKind::DeadlineExceeded));
        let mut streams = Streams::new("");
        let failure = answer(&model, &["-p", "x", "--json"], &mut streams).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
        let value: serde_json::Value = serde_json::from_str(&streams.out()).unwrap();
        assert_eq!(
            (&value["text"], &value["finish_reason"]),
            (&json!("a"), &json!("deadline"))
        );
    }

    #[test]
    fn a_broken_engine_prints_no_object() {
        let model = mock::instruct(&["a", "b"]).after(1, Step::fail(inference::ErrorKind::Engine));
        let mut streams = Streams::new("");
        let failure = answer(&model, &["-p", "x", "--json"], &mut streams).unwrap_err();
        assert_eq!(failure.exit_code(), 1);
        assert_eq!(streams.out(), "");
        answer(&model, &["-p", "x"], &mut streams).unwrap_err();
        assert_eq!(streams.out(), "a\n");
    }
}
