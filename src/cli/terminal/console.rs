//! The three standard streams. Tests replace them by buffers.
//!
//! All results are written through this type, so that a closed pipe ends the program without an
//! error message.

use std::io::{self, BufRead, BufWriter, Write};

use serde::Serialize;

use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::tty;
use crate::cli::terminal::wrap::wrapped;

/// Standard input, output and error.
pub struct Console<'a> {
    /// Standard input.
    pub input: &'a mut dyn BufRead,
    /// Standard output: results only.
    pub out: &'a mut dyn Write,
    /// Standard error: progress, statistics, warnings.
    pub err: &'a mut dyn Write,
    /// Whether the input is a terminal.
    pub in_is_terminal: bool,
    /// Whether the output is a terminal.
    pub out_is_terminal: bool,
    /// Whether the error stream is a terminal.
    pub err_is_terminal: bool,
    /// Whether progress and statistics are hidden.
    pub quiet: bool,
    /// Whether statistics are shown even where they are hidden by default.
    pub verbose: bool,
    /// Whether Ctrl-C is caught while a reply is generated.
    pub catches_interrupts: bool,
}

impl Console<'_> {
    /// Writes a piece of a result and flushes it, so that it appears immediately. On a terminal,
    /// control characters are replaced, because the model's text must not control the terminal.
    pub fn text(&mut self, text: &str) -> Result<(), Failure> {
        if text.is_empty() {
            return Ok(());
        }
        let written = if self.out_is_terminal && text.contains(drives_terminal) {
            let safe = text.replace(drives_terminal, "\u{fffd}");
            self.out.write_all(safe.as_bytes())
        } else {
            self.out.write_all(text.as_bytes())
        };
        written
            .and_then(|()| self.out.flush())
            .map_err(write_failed)
    }

    /// Writes text that the program itself made, with its control sequences unchanged.
    pub fn drawn(&mut self, text: &str) -> Result<(), Failure> {
        let written = self.out.write_all(text.as_bytes());
        written
            .and_then(|()| self.out.flush())
            .map_err(write_failed)
    }

    /// Writes one line of a result.
    pub fn line(&mut self, line: &str) -> Result<(), Failure> {
        self.text(line)?;
        self.text("\n")
    }

    /// Writes a value as one line of JSON.
    pub fn json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let mut out = BufWriter::with_capacity(1 << 16, &mut *self.out);
        let written = serde_json::to_writer(&mut out, value)
            .map_err(io::Error::from)
            .and_then(|()| out.write_all(b"\n"))
            .and_then(|()| out.flush());
        written.map_err(write_failed)
    }

    /// Writes a message for information. `quiet` suppresses it.
    pub fn note(&mut self, text: &str) {
        if !self.quiet {
            self.warn(text);
        }
    }

    /// Writes a warning. `quiet` does not suppress it.
    pub fn warn(&mut self, text: &str) {
        let columns = self.err_is_terminal.then(tty::error_columns).flatten();
        // Without standard error no message can be shown, so an error is ignored.
        let _ = writeln!(self.err, "{}", wrapped(text, columns.unwrap_or(0)));
        let _ = self.err.flush();
    }

    /// Writes one line of a result. On a terminal, the line wraps between words.
    pub fn wrapped_line(&mut self, line: &str) -> Result<(), Failure> {
        let columns = self.out_is_terminal.then(tty::columns).flatten();
        self.line(&wrapped(line, columns.unwrap_or(0)))
    }

    /// Writes lines of a table. On a terminal, the last column wraps between words.
    pub fn rows(&mut self, rows: &[Vec<String>]) -> Result<(), Failure> {
        let lines = table(rows);
        lines.iter().try_for_each(|line| self.wrapped_line(line))
    }
}

fn drives_terminal(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\r' | '\t')
}

/// Converts an error of writing a result.
pub fn write_failed(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Failure::PipeClosed;
    }
    Failure::Failed(anyhow::Error::new(error).context("cannot write to standard output"))
}

/// A size as text: `1.5 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// The lines of a table with aligned columns. The last column is not padded.
pub fn table(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths);
        let cells: Vec<String> = cells.map(|(cell, &w)| format!("{cell:<w$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        let mut streams = Streams::new("");
        let mut console = streams.console();
        let mut closed = Closed;
        console.out = &mut closed;
        assert_eq!(console.text("x").unwrap_err().exit_code(), 0);
        let failure = console.json(&vec![1; 100_000]).unwrap_err();
        assert_eq!(failure.exit_code(), 0);
        // A closed standard error must not end the program.
        let mut closed = Closed;
        console.err = &mut closed;
        console.warn("nobody hears this");
    }

    #[test]
    fn control_characters_reach_pipes_but_not_terminals() {
        let mut streams = Streams::new("");
        streams.console().text("a\x1b[2J\tb\n").unwrap();
        assert_eq!(streams.out(), "a\x1b[2J\tb\n");
        let mut streams = Streams::new("");
        let mut console = streams.console();
        console.out_is_terminal = true;
        console.text("a\x1b[2J\tb\u{9b}\n").unwrap();
        assert_eq!(streams.out(), "a\u{fffd}[2J\tb\u{fffd}\n");
    }

    #[test]
    fn sizes_and_tables_are_readable() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        let rows = [
            vec!["a".into(), "b".into()],
            vec!["long".into(), "c".into()],
        ];
        assert_eq!(table(&rows), ["a     b", "long  c"]);
        assert!(table(&[]).is_empty());
    }
}
