//! Parses the lines of a chat: commands and quoted messages. It also has the text of `/help`.

use crate::cli::options::settings;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::lines::{Line, Lines};

/// The text of `/help`.
pub const HELP: &str = r#"/clear               forget the conversation
/system TEXT         instructions for the model, from here on; without TEXT show them
/set                 show the parameters
/set NAME VALUE      set one: temperature, top_p, top_k, min_p, repeat_penalty, max_tokens, seed, stop
                     (also: /set parameter NAME VALUE, /set system TEXT)
/set verbose         statistics after each reply; /set quiet: none
/set nowordwrap      lines as they come; /set wordwrap: wrapped between words
/template [FILE]     show the chat template, or take another (Jinja)
/save NAME           keep the conversation, its model and parameters as a preset
/load NAME           go on with a preset, or talk with another model
/resume              go on with the last conversation
/tool TEXT           what a tool gives that the model called; the oldest call without an answer
/stats               what the last reply and the whole chat took
/show                what the model is; also /show system, parameters, template, license, modelfile
/help, /?            this
/bye, /exit          leave; so does Ctrl-D
"""                  begins and ends a message of several lines
Ctrl-C               stops a reply"#;

/// The commands that Tab completes. Option names are completed, too.
const COMMANDS: [&str; 19] = [
    "/bye",
    "/clear",
    "/exit",
    "/help",
    "/load ",
    "/quit",
    "/resume",
    "/save ",
    "/set",
    "/set nowordwrap",
    "/set quiet",
    "/set system ",
    "/set verbose",
    "/set wordwrap",
    "/show",
    "/stats",
    "/system ",
    "/template ",
    "/tool ",
];

/// The quotes around a multi-line message.
pub const QUOTES: &str = "\"\"\"";

/// All words that Tab completes.
pub fn words() -> Vec<String> {
    let parameters = settings::names().map(|name| format!("/set {name} "));
    COMMANDS
        .map(String::from)
        .into_iter()
        .chain(parameters)
        .collect()
}

/// Whether a line is a command: a slash and a single word. `/usr/lib is full` and a lone `/` are
/// messages.
pub fn is_command(line: &str) -> bool {
    let (word, _) = split_word(line);
    word.strip_prefix('/')
        .is_some_and(|name| name == "?" || (!name.is_empty() && !name.contains('/')))
}

/// The first word and the remaining text, both trimmed.
pub fn split_word(text: &str) -> (&str, &str) {
    let text = text.trim();
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, rest.trim_start())
}

/// The text without surrounding quotes.
pub fn unquote(text: &str) -> &str {
    let inner = |quote: &str| text.strip_prefix(quote)?.strip_suffix(quote);
    inner(QUOTES).or_else(|| inner("\"")).unwrap_or(text)
}

/// Reads the rest of a multi-line message whose first line starts with quotes. `None` if the
/// message was cancelled or is empty.
pub fn read_quoted(
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
            // The end of the input also ends the message.
            Line::End => break,
        };
    }
    let text = text.trim_matches('\n');
    Ok((!text.trim().is_empty()).then(|| text.to_owned()))
}
