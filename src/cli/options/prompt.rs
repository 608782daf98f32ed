//! Reads a prompt from the command line or standard input, as text or as token ids.

use std::io::{BufRead, Read};
use std::str::FromStr;

use inference::Prompt;

use crate::cli::terminal::bounded::{self, MAX_INPUT};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// A list of token ids: `1,2,3`, or `-` for standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenList {
    /// The ids.
    Ids(Vec<u32>),
    /// The ids are on standard input.
    Stdin,
}

impl FromStr for TokenList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "-" {
            return Ok(TokenList::Stdin);
        }
        parse_ids(text).map(TokenList::Ids)
    }
}

/// A prompt without chat template, as text or as token ids.
#[derive(Debug, Clone, clap::Args)]
#[group(id = "input", multiple = false)]
pub struct RawPromptArgs {
    /// The prompt, without chat template; `-` reads it from standard input, and so does a missing
    /// prompt if standard input is a file or a pipe
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The same as --prompt
    #[arg(value_name = "PROMPT")]
    text: Option<String>,
    /// The prompt as token ids, used unchanged: `1,2,3`; `-` reads them from standard input
    #[arg(long, value_name = "IDS", allow_hyphen_values = true)]
    tokens: Option<TokenList>,
}

impl RawPromptArgs {
    pub fn read(&self, console: &mut Console<'_>) -> Result<Prompt, Failure> {
        const NONE: &str = "there is no prompt: give PROMPT, --prompt or --tokens, or pipe one in";
        match (self.prompt.as_ref().or(self.text.as_ref()), &self.tokens) {
            (Some(prompt), None) => read_text(prompt, console).map(Prompt::Text),
            (None, Some(tokens)) => read_tokens(tokens, console).map(Prompt::Tokens),
            (None, None) if !console.in_is_terminal => match read_text("-", console)? {
                text if text.is_empty() => Err(Failure::usage(NONE)),
                text => Ok(Prompt::Text(text)),
            },
            _ => Err(Failure::usage(NONE)),
        }
    }
}

/// Parses at least one id. Ids are separated by commas or white space.
fn parse_ids(text: &str) -> Result<Vec<u32>, String> {
    let text = text.trim();
    if text.is_empty() {
        return Err("no token ids".into());
    }
    // Two ids may have only one comma between them: `1,,2` is an error, `1, 2` is valid.
    let parse = |part: &str| {
        part.trim()
            .parse()
            .map_err(|_| format!("{part:?} is not a token id (0 to {})", u32::MAX))
    };
    let mut ids = Vec::new();
    for group in text.split(',') {
        if group.trim().is_empty() {
            return Err("an id is missing beside a comma".into());
        }
        for part in group.split_whitespace() {
            ids.push(parse(part)?);
        }
    }
    Ok(ids)
}

/// The text of `--prompt`, or standard input if it is `-`.
pub fn read_text(prompt: &str, console: &mut Console<'_>) -> Result<String, Failure> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let mut text = read_input(console)?;
    // The shell adds the newline at the end of a piped line, so it is removed.
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// The prompt in a file, without the final newline.
pub fn read_file(path: &std::path::Path) -> Result<String, Failure> {
    let text = bounded::read_text(path, MAX_INPUT)
        .map_err(|e| Failure::usage(format!("--file {}: {e}", path.display())))?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).to_owned())
}

/// The ids of `--tokens`.
pub fn read_tokens(tokens: &TokenList, console: &mut Console<'_>) -> Result<Vec<u32>, Failure> {
    match tokens {
        TokenList::Ids(ids) => Ok(ids.clone()),
        TokenList::Stdin => {
            let text = read_input(console)?;
            parse_ids(&text).map_err(|e| Failure::usage(format!("--tokens -: {e}")))
        }
    }
}

/// Reads standard input to its end as UTF-8, up to a size limit.
fn read_input(console: &mut Console<'_>) -> Result<String, Failure> {
    read_bounded(console.input, MAX_INPUT)
}

fn read_bounded(input: &mut dyn BufRead, limit: u64) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    input
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Failure::failed(format!("cannot read standard input: {e}")))?;
    if bytes.len() as u64 > limit {
        return Err(Failure::failed(format!(
            "standard input holds more than {limit} bytes"
        )));
    }
    String::from_utf8(bytes).map_err(|e| {
        Failure::failed(format!(
            "standard input is not UTF-8 text (at byte {})",
            e.utf8_error().valid_up_to()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    #[test]
    fn ids_are_parsed_with_either_separator() {
        let ids = |text: &str| text.parse::<TokenList>();
        assert_eq!(ids("1,2,3"), Ok(TokenList::Ids(vec![1, 2, 3])));
        assert_eq!(ids(" 1, 2\n3 "), Ok(TokenList::Ids(vec![1, 2, 3])));
        assert_eq!(ids("4294967295"), Ok(TokenList::Ids(vec![u32::MAX])));
        assert_eq!(ids("-"), Ok(TokenList::Stdin));
        for bad in [
            "",
            " ",
            "1,,2",
            ",1",
            "1,",
            "-1",
            "4294967296",
            "1.5",
            "a",
            "1;2",
        ] {
            assert!(ids(bad).is_err(), "{bad:?}");
        }
        assert!(ids("4294967296").unwrap_err().contains("4294967296"));
    }

    #[test]
    fn a_raw_prompt_is_a_flag_a_word_or_a_pipe() {
        use clap::Parser;

        #[derive(Parser)]
        struct Program {
            #[command(flatten)]
            prompt: RawPromptArgs,
        }

        let read = |words: &[&str], piped: &str, terminal: bool| {
            let line = ["mlx"].iter().chain(words);
            let args = Program::try_parse_from(line).unwrap().prompt;
            let mut streams = Streams::new(piped);
            let mut console = streams.console();
            console.in_is_terminal = terminal;
            args.read(&mut console)
        };
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(read(&["-p", "a"], "unread", false).unwrap(), text("a"));
        assert_eq!(read(&["a"], "unread", false).unwrap(), text("a"));
        assert_eq!(read(&[], "piped\n", false).unwrap(), text("piped"));
        let ids = read(&["--tokens", "1"], "unread", false).unwrap();
        assert_eq!(ids, Prompt::Tokens(vec![1]));
        for (piped, terminal) in [("", false), ("typed", true)] {
            let failure = read(&[], piped, terminal).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            assert!(failure.report().unwrap().contains("there is no prompt"));
        }
        assert!(Program::try_parse_from(["mlx", "a", "--tokens", "1"]).is_err());
    }

    #[test]
    fn a_dash_reads_standard_input() {
        let mut streams = Streams::new("two\nlines\r\n");
        assert_eq!(
            read_text("-", &mut streams.console()).unwrap(),
            "two\nlines"
        );
        let mut streams = Streams::new("unread");
        assert_eq!(
            read_text("as is\n", &mut streams.console()).unwrap(),
            "as is\n"
        );
        let mut streams = Streams::new("5 6\n");
        assert_eq!(
            read_tokens(&TokenList::Stdin, &mut streams.console()).unwrap(),
            [5, 6]
        );
        let mut streams = Streams::new("five");
        let failure = read_tokens(&TokenList::Stdin, &mut streams.console()).unwrap_err();
        assert_eq!(failure.exit_code(), 2);
    }

    #[test]
    fn input_is_bounded_and_must_be_utf8() {
        let mut long: &[u8] = b"12345";
        let text = read_bounded(&mut long, 4).unwrap_err().report().unwrap();
        assert!(text.contains("more than 4 bytes"), "{text}");
        let mut exact: &[u8] = b"1234";
        assert_eq!(read_bounded(&mut exact, 4).unwrap(), "1234");
        let mut broken: &[u8] = b"ab\xff";
        let text = read_bounded(&mut broken, 9).unwrap_err().report().unwrap();
        assert!(text.contains("at byte 2"), "{text}");
    }
}
