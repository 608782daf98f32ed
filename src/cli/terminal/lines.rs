//! The source of a chat's lines: an editor with history on a terminal, plain reads otherwise.

use std::fs::OpenOptions;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use rustyline::completion::Completer;
use rustyline::config::{CompletionType, Config};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Context, Editor, Helper};

use crate::cli::terminal::bounded::MAX_INPUT;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Maximum number of saved history lines.
const HISTORY: usize = 1000;

/// One input of the user.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line, without its newline.
    Text(String),
    /// Ctrl-C, which discards the line.
    Interrupted,
    /// Ctrl-D, or the end of the input.
    End,
}

/// A source of lines.
pub trait Lines {
    /// Reads the next line. On a terminal, `prompt` is shown before it.
    fn next(&mut self, prompt: &str, console: &mut Console<'_>) -> Result<Line, Failure>;
}

/// Reads the lines of `console`'s input unchanged.
pub struct Plain;

impl Lines for Plain {
    fn next(&mut self, _: &str, console: &mut Console<'_>) -> Result<Line, Failure> {
        let mut bytes = Vec::new();
        let read = (&mut *console.input)
            .take(MAX_INPUT)
            .read_until(b'\n', &mut bytes);
        let n = read.map_err(|e| Failure::failed(format!("cannot read standard input: {e}")))?;
        if n == 0 {
            return Ok(Line::End);
        }
        if n as u64 == MAX_INPUT && bytes.last() != Some(&b'\n') {
            return Err(Failure::failed(format!(
                "a line of standard input holds more than {MAX_INPUT} bytes"
            )));
        }
        let text = String::from_utf8(bytes)
            .map_err(|_| Failure::failed("standard input is not UTF-8 text"))?;
        let line = text.strip_suffix('\n').unwrap_or(&text);
        Ok(Line::Text(
            line.strip_suffix('\r').unwrap_or(line).to_owned(),
        ))
    }
}

/// Completes the start of a line, for example to a command.
pub struct Words(pub Vec<String>);

impl Words {
    fn beginning(&self, typed: &str) -> Vec<String> {
        let fits = |word: &&String| !typed.is_empty() && word.starts_with(typed);
        self.0.iter().filter(fits).cloned().collect()
    }
}

impl Completer for Words {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        cursor: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = line.get(..cursor).unwrap_or_default();
        Ok((0, self.beginning(typed)))
    }
}

impl Hinter for Words {
    type Hint = String;
}

impl Highlighter for Words {}
impl Validator for Words {}
impl Helper for Words {}

/// An editor on the terminal. It saves its lines in a file that only the user can read.
pub struct Edited {
    editor: Editor<Words, FileHistory>,
    history: Option<PathBuf>,
}

impl Edited {
    /// Opens the editor. Tab completes `words`. If the history cannot be saved, there is only a
    /// warning.
    pub fn open(history: Option<PathBuf>, words: Words) -> Result<Self, Failure> {
        let config = Config::builder()
            .max_history_size(HISTORY)
            .and_then(|builder| builder.history_ignore_dups(true))
            .map(|builder| {
                builder
                    .history_ignore_space(true)
                    .completion_type(CompletionType::List)
                    .build()
            })
            .map_err(no_terminal)?;
        let mut editor = Editor::with_config(config).map_err(no_terminal)?;
        editor.set_helper(Some(words));
        let history = history.filter(|path| match make_private(path) {
            Ok(()) => true,
            Err(e) => {
                tracing::warn!(path = %path.display(), "no history is kept: {e}");
                false
            }
        });
        if let Some(path) = &history
            && let Err(e) = editor.load_history(path)
        {
            tracing::info!(path = %path.display(), "no history to load: {e}");
        }
        Ok(Self { editor, history })
    }
}

impl Lines for Edited {
    fn next(&mut self, prompt: &str, _: &mut Console<'_>) -> Result<Line, Failure> {
        match self.editor.readline(prompt) {
            Ok(line) => {
                if !line.trim().is_empty() {
                    self.remember(&line);
                }
                Ok(Line::Text(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(e) => Err(no_terminal(e)),
        }
    }
}

impl Edited {
    /// Appends a line to the history file immediately, because a killed program could not save it
    /// later.
    fn remember(&mut self, line: &str) {
        let added = self.editor.add_history_entry(line);
        if !matches!(added, Ok(true)) {
            return;
        }
        if let Some(path) = &self.history
            && let Err(e) = self.editor.append_history(path)
        {
            // The warning appears only once, so that it does not disturb the chat.
            tracing::warn!(path = %path.display(), "the history is not saved: {e}");
            self.history = None;
        }
    }
}

fn no_terminal(error: ReadlineError) -> Failure {
    Failure::Failed(anyhow::Error::new(error).context("cannot read from the terminal"))
}

/// Creates the history file if it is missing, and removes access for other users.
fn make_private(path: &Path) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
        let file = options.mode(0o600).open(path)?;
        // An existing file may have other permissions.
        file.set_permissions(std::fs::Permissions::from_mode(0o600))
    }
    #[cfg(not(unix))]
    options.open(path).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    #[test]
    fn plain_lines_lose_their_newline_only() {
        let mut streams = Streams::new(" a \r\n\nb");
        let mut console = streams.console();
        let mut next = || Plain.next("> ", &mut console).unwrap();
        assert_eq!(next(), Line::Text(" a ".into()));
        assert_eq!(next(), Line::Text(String::new()));
        assert_eq!(next(), Line::Text("b".into()));
        assert_eq!(next(), Line::End);
        assert_eq!(streams.out(), "");
    }

    #[test]
    fn what_is_typed_is_completed_from_its_beginning() {
        let words = Words(["/set", "/show", "/set seed"].map(String::from).to_vec());
        assert_eq!(words.beginning("/se"), ["/set", "/set seed"]);
        assert_eq!(words.beginning("/set s"), ["/set seed"]);
        // Otherwise each word of a message would be completed.
        assert!(words.beginning("").is_empty() && words.beginning("a /s").is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn the_history_is_private_even_if_it_was_not() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let path = dir.path().join("state/chat_history");
        make_private(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        std::fs::write(&path, "kept").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        make_private(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
    }
}
