//! `mlx run NAME [PROMPT]`: prints one reply to a prompt, or starts a conversation without one.

use crate::cli::options::prompt::read_text;
use crate::cli::options::sampling::Habit;
use crate::cli::talk::chat::{TalkArgs, talk};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Run a model by its name: answer a prompt, or start a conversation on a terminal
///
/// Words after NAME are the prompt. Piped text comes before these words; without words, the piped
/// text is the prompt. Tokens are sampled as the model's files recommend, otherwise with Ollama's
/// defaults. `--temp 0` always chooses the most likely token.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The model: a directory, a .gguf file, a known name (see `mlx pull --list`) or owner/name on
    /// the Hugging Face Hub
    #[arg(value_name = "NAME")]
    name: String,
    /// The prompt; without one, a conversation starts on a terminal
    #[arg(value_name = "PROMPT")]
    prompt: Vec<String>,
    /// The format of the reply, as in ollama: `json` for any JSON object, or a JSON schema
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["json_schema", "json_schema_file", "regex", "grammar", "grammar_file"])]
    format: Option<String>,
    #[command(flatten)]
    talk: TalkArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let prompt = args.prompt(console)?;
    let mut how = args.talk.clone();
    if let Some(schema) = args.schema() {
        how.sampling.grammar.json_schema = Some(schema.to_owned());
    }
    talk(Some(&args.name), &how, Habit::Ollama, prompt, console)
}

impl Args {
    /// The JSON schema for the value of `--format`.
    fn schema(&self) -> Option<&str> {
        match self.format.as_deref() {
            // As in ollama and in the server, `json` means a JSON object. Otherwise a plain number
            // would be a complete reply.
            Some("json") => Some(r#"{"type": "object"}"#),
            schema => schema,
        }
    }

    /// The piped text and the words, joined by a space as in ollama. `None` starts a conversation.
    fn prompt(&self, console: &mut Console<'_>) -> Result<Option<String>, Failure> {
        if console.in_is_terminal && self.prompt.is_empty() {
            return Ok(None);
        }
        let mut parts = self.prompt.clone();
        if !console.in_is_terminal {
            let piped = read_text("-", console)?;
            if !piped.trim().is_empty() {
                parts.insert(0, piped);
            }
        }
        let prompt = parts.join(" ");
        if prompt.trim().is_empty() {
            return Err(Failure::usage(
                "the prompt is empty; there is nothing to reply to",
            ));
        }
        Ok(Some(prompt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    fn prompt(words: &[&str], piped: &str, terminal: bool) -> Result<Option<String>, Failure> {
        let line = ["run", "model"].iter().chain(words);
        let args = Program::try_parse_from(line).unwrap().args;
        let mut streams = Streams::new(piped);
        let mut console = streams.console();
        console.in_is_terminal = terminal;
        args.prompt(&mut console)
    }

    #[test]
    fn the_prompt_is_what_is_piped_and_the_words() {
        let text = |words: &[&str], piped| prompt(words, piped, false).unwrap().unwrap();
        assert_eq!(text(&[], "from a pipe\n"), "from a pipe");
        assert_eq!(
            text(&["sum", "it", "up"], "long text\n"),
            "long text sum it up"
        );
        assert_eq!(text(&["a prompt"], ""), "a prompt");
        assert_eq!(text(&["--temp", "0.5", "a"], ""), "a");
        assert_eq!(prompt(&[], " \n", false).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn json_is_an_object() {
        let schema = |words: &[&str]| {
            let line = ["run", "model"].iter().chain(words);
            let args = Program::try_parse_from(line).unwrap().args;
            args.schema().map(str::to_owned)
        };
        assert_eq!(
            schema(&["--format", "json"]).unwrap(),
            r#"{"type": "object"}"#
        );
        assert_eq!(schema(&["--format", "{}"]).unwrap(), "{}");
        assert_eq!(schema(&[]), None);
    }

    #[test]
    fn a_person_talks_unless_there_are_words() {
        assert_eq!(prompt(&[], "not read", true).unwrap(), None);
        assert_eq!(prompt(&["hi"], "not read", true).unwrap().unwrap(), "hi");
        assert_eq!(prompt(&[" "], "", true).unwrap_err().exit_code(), 2);
    }
}
