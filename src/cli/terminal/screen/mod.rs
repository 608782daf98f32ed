//! Draws replies on a terminal: wraps words at the terminal's width, and renders Markdown. Text
//! arrives in pieces. A word is shown when it is complete, and a line of code when the line ends.
//!
//! Pipes get the model's text unchanged.

mod code;
mod table;

use unicode_width::UnicodeWidthChar;

use crate::cli::terminal::console::Console;
use crate::cli::terminal::screen::code::Code;
use crate::cli::terminal::tty;

/// Longer words are shown in parts, so that text without spaces does not wait long.
const LONG_WORD: usize = 40;
/// Maximum number of characters in a link's text and address. Longer links are shown unchanged.
const LINK: usize = 300;
/// The columns of a tab.
const TAB: usize = 4;

/// The style of a character.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Style {
    bold: bool,
    italic: bool,
    code: bool,
    dim: bool,
}

/// The kind of the current line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    /// The kind is unknown yet. The buffer contains the start of the line.
    #[default]
    Start,
    /// Plain text.
    Text,
    /// A row of a table. It stays in the buffer, because column widths are known only after the
    /// last row.
    Row,
    /// A line of code. It stays in the buffer until the line ends.
    Code,
}

/// Draws one reply.
#[derive(Default)]
pub struct Screen {
    /// The width at which lines wrap, in columns; 0 disables wrapping.
    width: usize,
    markdown: bool,
    line: Line,
    buffer: String,
    /// The rows of the current table.
    table: Vec<String>,
    /// The text of a possible link, from its opening bracket on.
    link: Option<String>,
    /// The fence that ends the block of code: its character and length.
    fence: Option<(char, usize)>,
    code: Option<Code>,
    heading: bool,
    bold: Option<char>,
    italic: Option<char>,
    /// Number of backquotes that end the inline code.
    span: Option<usize>,
    /// Emphasis marks whose meaning is not yet decided: character and number.
    run: Option<(char, usize)>,
    escaped: bool,
    /// The previous visible character.
    before: char,
    word: Vec<(char, Style)>,
    spaces: usize,
    column: usize,
    /// The text at the start of continued lines.
    hanging: &'static str,
    indent: usize,
    shown: Style,
    out: String,
}

impl Screen {
    /// A screen of `width` columns; 0 disables wrapping. `markdown` is whether to render Markdown.
    pub fn new(width: usize, markdown: bool) -> Self {
        Self {
            width,
            markdown,
            before: ' ',
            ..Self::default()
        }
    }

    /// The screen for an interactive terminal; `None` for pipes and for terminals without control
    /// sequences. Without colors (`NO_COLOR`), Markdown is not rendered.
    pub fn on(console: &Console<'_>, word_wrap: bool) -> Option<Self> {
        let is = |name: &str, bad: &dyn Fn(&str) -> bool| {
            std::env::var(name).is_ok_and(|value| bad(&value))
        };
        if !console.out_is_terminal || is("TERM", &|term| term == "dumb") {
            return None;
        }
        let width = if word_wrap {
            tty::columns().unwrap_or(0)
        } else {
            0
        };
        Some(Self::new(
            width,
            !is("NO_COLOR", &|value| !value.is_empty()),
        ))
    }

    /// Returns the output for the next piece.
    pub fn push(&mut self, text: &str) -> String {
        for c in text.chars() {
            match c {
                '\n' => self.end_line(),
                '\r' => {}
                '\t' => self.read('\t'),
                // The model's text must not control the terminal.
                c if c.is_control() => self.read('\u{fffd}'),
                c => self.read(c),
            }
        }
        std::mem::take(&mut self.out)
    }

    /// Returns the rest of the output at the end of the reply.
    pub fn end(&mut self) -> String {
        let pending = !self.buffer.is_empty() || !self.word.is_empty() || self.run.is_some();
        if pending || self.column > 0 || self.escaped || self.link.is_some() {
            self.end_line();
        }
        self.end_table();
        std::mem::take(&mut self.out)
    }

    fn read(&mut self, c: char) {
        match self.line {
            Line::Code | Line::Row => self.buffer.push(c),
            Line::Text => self.inline(c),
            Line::Start => {
                self.buffer.push(c);
                if !may_be_block(&self.buffer, self.markdown) {
                    self.begin_line();
                }
            }
        }
    }

    /// The kind of the line is now known. Draws the line's mark, and continues with its text.
    fn begin_line(&mut self) {
        let line = std::mem::take(&mut self.buffer);
        let text = line.trim_start();
        self.line = Line::Text;
        let mut indent = columns(&line[..line.len() - text.len()]);
        let mut rest = text;
        if self.markdown {
            let hashes = text.len() - text.trim_start_matches('#').len();
            let (number, after) =
                text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(0));
            if text.starts_with('|') {
                self.line = Line::Row;
                self.buffer = line;
                return;
            }
            self.end_table();
            if (1..=6).contains(&hashes) && text[hashes..].starts_with(' ') {
                self.heading = true;
                rest = text[hashes..].trim_start();
            } else if text.len() > 1
                && matches!(text.split_at(1), ("-" | "*" | "+", r) if r.starts_with(' '))
            {
                self.spaces = indent;
                self.put_plain("•", Style::default());
                self.indent = indent + 2;
                indent = 1;
                rest = text[1..].trim_start();
            } else if !number.is_empty() && (after.starts_with(". ") || after.starts_with(") ")) {
                self.spaces = indent;
                self.put_plain(&text[..=number.len()], Style::default());
                self.indent = indent + number.len() + 2;
                indent = 1;
                rest = after[1..].trim_start();
            } else if let Some(after) = text.strip_prefix('>') {
                self.put_plain(
                    "│",
                    Style {
                        dim: true,
                        ..Style::default()
                    },
                );
                self.hanging = "│ ";
                self.indent = 2;
                indent = 1;
                rest = after.trim_start();
            }
        }
        self.spaces = indent;
        let rest = rest.to_owned();
        for c in rest.chars() {
            self.inline(c);
        }
    }

    fn end_line(&mut self) {
        if self.line == Line::Start {
            let line = std::mem::take(&mut self.buffer);
            let text = line.trim();
            if let Some(fence) = fence(text) {
                self.end_table();
                let language = text.trim_start_matches(fence.0).trim();
                self.fence = Some(fence);
                self.code = self.markdown.then(|| Code::new(language)).flatten();
                self.whole_line(&line, true);
                self.line = Line::Code;
                return;
            }
            if self.markdown && is_rule(text) {
                self.end_table();
                let rule = "─".repeat(self.width.clamp(3, LONG_WORD));
                self.whole_line(&rule, true);
                return;
            }
            self.buffer = line;
            self.begin_line();
        }
        if self.line == Line::Row {
            self.table.push(std::mem::take(&mut self.buffer));
            self.line = Line::Start;
            return;
        }
        if self.line == Line::Code {
            let line = std::mem::take(&mut self.buffer);
            let text = line.trim();
            let ends = fence(text)
                .zip(self.fence)
                .is_some_and(|((c, n), (open, least))| {
                    c == open && n >= least && text.chars().all(|t| t == c)
                });
            if ends {
                self.whole_line(&line, true);
                (self.fence, self.code, self.line) = (None, None, Line::Start);
            } else if let Some(code) = &mut self.code {
                let drawn = code.line(&line);
                self.out.push_str(&drawn);
                self.out.push('\n');
            } else {
                self.whole_line(&line, false);
            }
            return;
        }
        if let Some(link) = self.link.take() {
            self.no_link(&link);
        }
        if self.escaped {
            self.escaped = false;
            self.put('\\');
        }
        self.understand('\n');
        self.flush();
        self.style(Style::default());
        self.out.push('\n');
        (self.bold, self.italic, self.span, self.heading) = (None, None, None, false);
        (self.column, self.spaces, self.indent, self.hanging) = (0, 0, 0, "");
        (self.before, self.line) = (' ', Line::Start);
    }

    /// Draws a line without wrapping.
    fn whole_line(&mut self, line: &str, dim: bool) {
        let dim = dim && self.markdown;
        self.style(Style {
            dim,
            ..Style::default()
        });
        self.out.push_str(line);
        self.style(Style::default());
        self.out.push('\n');
    }

    /// Draws the collected table, if there is one.
    fn end_table(&mut self) {
        let rows = std::mem::take(&mut self.table);
        match table::drawn(&rows, self.width) {
            Some(drawn) => self.out.push_str(&drawn),
            None => rows.iter().for_each(|row| self.whole_line(row, false)),
        }
    }

    /// Reads a character of a possible link `[text](address)`.
    fn link(&mut self, mut link: String, c: char) {
        let (text, address) = link
            .split_once(']')
            .map_or((&*link, None), |(t, a)| (t, Some(a)));
        let (fits, ends) = match address {
            None => (c != '[' && text.chars().count() <= LINK, false),
            Some("") => (c == '(', false),
            Some(address) => {
                let open = address.matches('(').count();
                let closed = address.matches(')').count();
                (address.len() <= LINK, c == ')' && open == closed + 1)
            }
        };
        link.push(c);
        if !fits {
            return self.no_link(&link);
        }
        match link.split_once("](") {
            Some((text, address)) if ends => {
                let text = text.trim_start_matches('[').to_owned();
                let address = address.strip_suffix(')').unwrap_or(address).trim();
                // A title may follow the address.
                let address = address.split(' ').next().unwrap_or_default();
                let address = address.trim_matches(['<', '>']).to_owned();
                text.chars().for_each(|c| self.inline(c));
                self.understand(' ');
                if !address.is_empty() && address != text {
                    self.put(' ');
                    let dim = Style {
                        dim: true,
                        ..Style::default()
                    };
                    self.put_plain(&format!("({address})"), dim);
                    self.before = ')';
                }
            }
            _ => self.link = Some(link),
        }
    }

    /// Shows text that turned out not to be a link.
    fn no_link(&mut self, text: &str) {
        let mut rest = text.chars();
        if let Some(bracket) = rest.next() {
            self.put(bracket);
        }
        rest.for_each(|c| self.inline(c));
    }

    /// Reads a character of text, which may be an emphasis mark.
    fn inline(&mut self, c: char) {
        if !self.markdown {
            return self.put(c);
        }
        if let Some(link) = self.link.take() {
            return self.link(link, c);
        }
        match self.run {
            Some((mark, n)) if mark == c => {
                self.run = Some((mark, n + 1));
                return;
            }
            _ => self.understand(c),
        }
        if self.escaped {
            self.escaped = false;
            if !c.is_ascii_punctuation() {
                self.put('\\');
            }
            return self.put(c);
        }
        match c {
            '\\' if self.span.is_none() => self.escaped = true,
            '[' if self.span.is_none() => self.link = Some(String::from(c)),
            '`' => self.run = Some((c, 1)),
            '*' | '_' if self.span.is_none() => self.run = Some((c, 1)),
            c => self.put(c),
        }
    }

    /// Decides the meaning of the emphasis marks, now that the next character is known.
    fn understand(&mut self, next: char) {
        let Some((mark, mut n)) = self.run.take() else {
            return;
        };
        if mark == '`' {
            match self.span {
                Some(open) if open == n => self.span = None,
                None if next != '\n' => self.span = Some(n),
                _ => self.put_marks(mark, n),
            }
            return;
        }
        // As in CommonMark, a mark opens before a word and closes after one. `_` has no meaning
        // inside a word.
        let inner = |c: char| mark == '_' && c.is_alphanumeric();
        let opens = !next.is_whitespace() && !inner(self.before);
        let closes = !self.before.is_whitespace() && !inner(next);
        if n <= 3 {
            if closes && n >= 2 && self.bold == Some(mark) {
                self.bold = None;
                n -= 2;
            }
            if closes && n >= 1 && self.italic == Some(mark) {
                self.italic = None;
                n -= 1;
            }
            if opens && n >= 2 && self.bold.is_none() {
                self.bold = Some(mark);
                n -= 2;
            }
            if opens && n == 1 && self.italic.is_none() {
                self.italic = Some(mark);
                n -= 1;
            }
        }
        self.put_marks(mark, n);
    }

    fn put_marks(&mut self, mark: char, n: usize) {
        for _ in 0..n {
            self.put(mark);
        }
    }

    fn put(&mut self, c: char) {
        self.before = c;
        if matches!(c, ' ' | '\t') {
            self.flush();
            self.spaces += if c == '\t' { TAB } else { 1 };
            return;
        }
        let style = Style {
            bold: self.bold.is_some() || self.heading,
            italic: self.italic.is_some(),
            code: self.span.is_some(),
            dim: false,
        };
        // Wide characters belong to scripts without spaces, so a line may break before each of
        // them.
        let wide = c.width() == Some(2);
        if wide {
            self.flush();
        }
        self.word.push((c, style));
        if wide || self.word.len() >= LONG_WORD {
            self.flush();
        }
    }

    fn put_plain(&mut self, text: &str, style: Style) {
        self.word.extend(text.chars().map(|c| (c, style)));
        self.flush();
    }

    /// Shows the complete word. If it does not fit on this line, it goes to the next line.
    fn flush(&mut self) {
        if self.word.is_empty() {
            return;
        }
        let word = std::mem::take(&mut self.word);
        let width: usize = word.iter().map(|(c, _)| c.width().unwrap_or(0)).sum();
        if self.width > 0
            && self.column > self.indent
            && self.column + self.spaces + width > self.width
        {
            self.wrap();
        }
        self.style(Style::default());
        let spaces = std::mem::take(&mut self.spaces);
        self.out.extend(std::iter::repeat_n(' ', spaces));
        self.column += spaces;
        for (c, style) in word {
            let width = c.width().unwrap_or(0);
            if self.width > 0 && self.column + width > self.width {
                self.wrap();
            }
            self.style(style);
            self.out.push(c);
            self.column += width;
        }
    }

    fn wrap(&mut self) {
        self.style(Style {
            dim: !self.hanging.is_empty(),
            ..Style::default()
        });
        self.out.push('\n');
        // On a very narrow terminal, lines are not indented.
        let indent = if self.indent * 2 < self.width {
            self.indent
        } else {
            0
        };
        let hanging = if indent > 0 { self.hanging } else { "" };
        self.out.push_str(hanging);
        let drawn = hanging.chars().count();
        self.out
            .extend(std::iter::repeat_n(' ', indent.saturating_sub(drawn)));
        self.style(Style::default());
        (self.column, self.spaces) = (indent, 0);
    }

    fn style(&mut self, style: Style) {
        if self.shown == style {
            return;
        }
        self.out.push_str("\u{1b}[0");
        for (on, code) in [
            (style.bold, ";1"),
            (style.dim, ";2"),
            (style.italic, ";3"),
            (style.code, ";36"),
        ] {
            if on {
                self.out.push_str(code);
            }
        }
        self.out.push('m');
        self.shown = style;
    }
}

/// The lines of a table cell, at most `width` columns wide; with 0, a single line.
pub(super) fn cell(text: &str, width: usize, bold: bool) -> Vec<String> {
    let mut screen = Screen::new(width, true);
    // A cell contains only inline text. Characters that begin a block elsewhere have no meaning.
    screen.line = Line::Text;
    screen.heading = bold;
    let drawn = screen.push(text) + &screen.end();
    drawn.lines().map(str::to_owned).collect()
}

/// Whether `line`, the start of a line, may still turn out to begin a Markdown block: a code fence,
/// a heading, a rule, a quote or a list item. Without `markdown`, only code fences count.
fn may_be_block(line: &str, markdown: bool) -> bool {
    let text = line.trim_start();
    let all = |mark: char| text.chars().all(|c| c == mark);
    // A fence is complete only at the end of its line, because a language may follow it.
    if text.is_empty() || all('`') || all('~') || text.starts_with("```") || text.starts_with("~~~")
    {
        return true;
    }
    if !markdown {
        return false;
    }
    let digits = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = digits.len() < text.len() && text.len() <= 10;
    all('#') && text.len() <= 6
        || ['-', '*', '_', '+'].iter().any(|&mark| all(mark))
        || text == ">"
        || numbered && matches!(digits, "" | "." | ")")
}

/// The character and length of a fence, if the line starts with one.
fn fence(text: &str) -> Option<(char, usize)> {
    let mark = text.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let n = text.len() - text.trim_start_matches(mark).len();
    (n >= 3 && !(mark == '`' && text[n..].contains('`'))).then_some((mark, n))
}

fn is_rule(text: &str) -> bool {
    let mut marks = text.chars();
    let first = marks.next().filter(|c| matches!(c, '-' | '*' | '_'));
    text.len() >= 3 && first.is_some_and(|first| marks.all(|c| c == first))
}

fn columns(indent: &str) -> usize {
    indent
        .chars()
        .map(|c| if c == '\t' { TAB } else { 1 })
        .sum()
}

#[cfg(test)]
mod tests;
