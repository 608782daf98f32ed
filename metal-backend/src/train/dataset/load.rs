//! Reads data files and directories within limits. Errors contain the file and the line.
//!
//! `formats` interprets lines, and `batches` makes batches. Only regular local files are read.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use serde_json::{Map, Value as Json};

use super::limits::{DataLimits, bad, io};
use super::{Example, FieldNames, Format, files};
use crate::text::TextPipeline;

/// Options for reading data.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataOptions {
    /// Whether the loss covers only the last message or the completion.
    pub mask_prompt: bool,
    /// Whether to skip bad lines and list them in [`Dataset::bad_lines`]. If false, a bad line is
    /// an error.
    pub skip_bad_lines: bool,
    /// The names of fields in lines.
    pub names: FieldNames,
    /// The limits.
    pub limits: DataLimits,
}

impl DataOptions {
    /// The defaults: no mask, and bad lines are an error.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`DataOptions::mask_prompt`].
    #[must_use]
    pub fn with_mask_prompt(mut self, yes: bool) -> Self {
        self.mask_prompt = yes;
        self
    }

    /// Sets [`DataOptions::skip_bad_lines`].
    #[must_use]
    pub fn with_skip_bad_lines(mut self, yes: bool) -> Self {
        self.skip_bad_lines = yes;
        self
    }

    /// Sets [`DataOptions::names`].
    #[must_use]
    pub fn with_names(mut self, names: FieldNames) -> Self {
        self.names = names;
        self
    }

    /// Sets [`DataOptions::limits`].
    #[must_use]
    pub fn with_limits(mut self, limits: DataLimits) -> Self {
        self.limits = limits;
        self
    }
}

/// An unusable line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLine {
    /// The line's number, from 1.
    pub line: usize,
    /// The reason.
    pub why: String,
}

/// The examples of one file.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The file's path.
    pub path: PathBuf,
    /// The format of the file's lines.
    pub format: Format,
    /// The examples, in the file's order.
    pub examples: Vec<Example>,
    /// The line number of each example, from 1.
    pub lines: Vec<usize>,
    /// The number of fields in each example's line. mlx-lm sorts by this number.
    pub fields: Vec<usize>,
    /// The skipped lines; always empty without [`DataOptions::skip_bad_lines`].
    pub bad_lines: Vec<BadLine>,
    /// The number of blank lines.
    pub blank_lines: usize,
}

impl Dataset {
    /// Reads one JSONL or Parquet file. If it is the first shard of a Parquet file, reads all
    /// shards.
    ///
    /// # Errors
    /// `Unsupported` for a Parquet file without the feature `parquet`; `Io` if the file cannot be
    /// read; `InvalidOption` for bad lines (with file and line number), for a file without
    /// examples, and for a file beyond a limit.
    pub fn read(
        path: impl AsRef<Path>,
        text_to_ids: &TextPipeline,
        options: &DataOptions,
    ) -> Result<Self> {
        let path = path.as_ref();
        of_file(path, || read(path, text_to_ids, options))
    }

    /// The total number of token ids in all examples.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.examples.iter().map(Example::len).sum()
    }

    /// Returns the line numbers of examples without targets after truncation to `max_len` ids.
    #[must_use]
    pub fn nothing_learned(&self, max_len: usize) -> Vec<usize> {
        self.examples
            .iter()
            .zip(&self.lines)
            .filter(|(e, _)| e.learned(max_len) == 0)
            .map(|(_, line)| *line)
            .collect()
    }
}

/// The data of a directory: `train.jsonl`, `valid.jsonl` and `test.jsonl`, each optional. Parquet
/// files can replace them ([`files::part`]).
#[derive(Debug, Clone)]
pub struct DataDir<T = Dataset> {
    /// The training data.
    pub train: Option<T>,
    /// The validation data.
    pub valid: Option<T>,
    /// The test data.
    pub test: Option<T>,
}

impl DataDir {
    /// Reads the data files of a directory.
    ///
    /// # Errors
    /// The errors of [`Dataset::read`]; `InvalidOption` if `dir` is not a directory or contains
    /// none of the three files.
    pub fn read(
        dir: impl AsRef<Path>,
        text_to_ids: &TextPipeline,
        options: &DataOptions,
    ) -> Result<Self> {
        Self::read_with(dir.as_ref(), |path| {
            Dataset::read(path, text_to_ids, options)
        })
    }
}

impl<T> DataDir<T> {
    /// Calls `read` for each of the three files that exists. If the path is a file, it is the
    /// training data.
    pub(super) fn read_with(dir: &Path, read: impl Fn(&Path) -> Result<T>) -> Result<Self> {
        let missing = |what: &str| {
            Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{what}; training data is a directory with train.jsonl, and valid.jsonl and test.jsonl if wanted"
            ),
        )
        .with_path(dir)
        };
        if files::is_file(dir) {
            return Ok(Self {
                train: Some(read(dir)?),
                valid: None,
                test: None,
            });
        }
        if !dir.is_dir() {
            return Err(missing("there is no such directory"));
        }
        let part = |name: &str| {
            let path = files::part(dir, name)?;
            path.as_deref().map(&read).transpose()
        };
        let dataset = Self {
            train: part("train")?,
            valid: part("valid")?,
            test: part("test")?,
        };
        if dataset.train.is_none() && dataset.valid.is_none() && dataset.test.is_none() {
            return Err(missing("none of the three files is there"));
        }
        Ok(dataset)
    }
}

fn no_examples() -> Error {
    bad("the file holds no examples")
}

/// Runs `read` for a file, and adds the file's path to errors.
fn of_file<T>(path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    read().map_err(|e| e.with_path(path).context("training data"))
}

fn read(path: &Path, text_to_ids: &TextPipeline, options: &DataOptions) -> Result<Dataset> {
    let mut format = None;
    let file = read_lines(path, options, |line| {
        let example = example(line, &mut format, text_to_ids, options)?;
        let tokens = example.len();
        Ok(((example, line.len()), tokens))
    })?;
    let format = format.ok_or_else(no_examples)?;
    let (examples, fields) = file.items.into_iter().unzip();
    Ok(Dataset {
        path: path.to_owned(),
        format,
        examples,
        lines: file.lines,
        fields,
        bad_lines: file.bad_lines,
        blank_lines: file.blank_lines,
    })
}

/// The items of a file, each with its line number.
pub(super) struct Lines<T> {
    pub items: Vec<T>,
    pub lines: Vec<usize>,
    pub bad_lines: Vec<BadLine>,
    pub blank_lines: usize,
}

/// Reads the examples of a file with [`read_lines`]. Adds the file's path to errors.
///
/// # Errors
/// The errors of [`super::Dataset::read`]; also if the file has no examples.
pub(super) fn read_examples<T, F>(path: &Path, options: &DataOptions, item: F) -> Result<Lines<T>>
where
    F: FnMut(&Map<String, Json>) -> Result<(T, usize)>,
{
    of_file(path, || {
        let file = read_lines(path, options, item)?;
        if file.items.is_empty() {
            return Err(no_examples());
        }
        Ok(file)
    })
}

/// Reads a file within the limits. `item` converts a line, and also returns its number of token
/// ids.
fn read_lines<T, F>(path: &Path, options: &DataOptions, item: F) -> Result<Lines<T>>
where
    F: FnMut(&Map<String, Json>) -> Result<(T, usize)>,
{
    let limits = &options.limits;
    let mut read = Reading {
        options,
        item,
        number: 0,
        tokens: 0,
        lines: Lines {
            items: Vec::new(),
            lines: Vec::new(),
            bad_lines: Vec::new(),
            blank_lines: 0,
        },
    };
    if !files::is_parquet(path) {
        read_json_lines(path, limits, &mut |line| read.add(line))?;
    }
    #[cfg(feature = "parquet")]
    if files::is_parquet(path) {
        for part in files::shards(path)? {
            check_file(&part, limits)?;
            let mut add = |row: Result<_, String>| read.add(row.map(Some));
            let read = super::parquet::read_rows(&part, limits, &mut add);
            read.map_err(|e| e.with_path(&part))?;
        }
    }
    #[cfg(not(feature = "parquet"))]
    if files::is_parquet(path) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "this build reads no Parquet files; build it with the feature `parquet`, or convert the \
             file to JSONL",
        ));
    }
    read.finish()
}

/// The fields of a line, `None` for a blank line, or the reason why the line is unusable.
type Line = Result<Option<Map<String, Json>>, String>;

/// Returns an error unless the path is a regular file within the size limit.
fn check_file(path: &Path, limits: &DataLimits) -> Result<()> {
    // Checked before the file is opened, because opening a pipe would block.
    let facts = path.metadata().map_err(|e| io("open the file", e))?;
    if !facts.is_file() {
        return Err(bad("it is not a regular file"));
    }
    if facts.len() > limits.file_bytes {
        let (have, most) = (facts.len(), limits.file_bytes);
        return Err(bad(format!(
            "the file has {have} bytes; at most {most} are read: split it"
        )));
    }
    Ok(())
}

/// Calls `each` with every line of a file.
fn read_json_lines(
    path: &Path,
    limits: &DataLimits,
    each: &mut dyn FnMut(Line) -> Result<()>,
) -> Result<()> {
    check_file(path, limits)?;
    let file = File::open(path).map_err(|e| io("open the file", e))?;
    let mut reader = BufReader::new(file.take(limits.file_bytes));
    let mut bytes = Vec::new();
    let mut is_first = true;
    loop {
        bytes.clear();
        let most = limits.line_bytes as u64 + 1;
        let got = (&mut reader)
            .take(most)
            .read_until(b'\n', &mut bytes)
            .map_err(|e| io("read the file", e))?;
        if got == 0 {
            return Ok(());
        }
        let long = bytes.len() > limits.line_bytes && bytes.last() != Some(&b'\n');
        if long {
            skip_line(&mut reader).map_err(|e| io("read the file", e))?;
            each(Err(format!(
                "the line has more than {} bytes",
                limits.line_bytes
            )))?;
        } else {
            each(parse(&bytes, is_first))?;
        }
        is_first = false;
    }
}

/// The lines read so far.
struct Reading<'o, T, F> {
    options: &'o DataOptions,
    item: F,
    number: usize,
    tokens: usize,
    lines: Lines<T>,
}

impl<T, F> Reading<'_, T, F>
where
    F: FnMut(&Map<String, Json>) -> Result<(T, usize)>,
{
    fn add(&mut self, line: Line) -> Result<()> {
        let limits = &self.options.limits;
        self.number += 1;
        let number = self.number;
        if number > limits.lines {
            return Err(bad(format!(
                "the file has more than {} lines: split it",
                limits.lines
            )));
        }
        let result = match line {
            Ok(None) => {
                self.lines.blank_lines += 1;
                return Ok(());
            }
            Ok(Some(line)) => (self.item)(&line).map_err(|e| e.to_string()),
            Err(why) => Err(why),
        };
        match result {
            Ok((one, ids)) => {
                self.tokens = self.tokens.saturating_add(ids);
                if self.tokens > limits.tokens {
                    return Err(bad(format!(
                        "up to line {number} there are {} tokens; at most {} are read: split the file",
                        self.tokens, limits.tokens
                    )));
                }
                self.lines.items.push(one);
                self.lines.lines.push(number);
            }
            Err(why) => self.lines.bad_lines.push(BadLine { line: number, why }),
        }
        if self.lines.bad_lines.len() >= limits.bad_lines {
            return Err(report(&self.lines.bad_lines, true));
        }
        Ok(())
    }

    fn finish(self) -> Result<Lines<T>> {
        let lines = self.lines;
        let usable = self.options.skip_bad_lines && !lines.items.is_empty();
        if !lines.bad_lines.is_empty() && !usable {
            return Err(report(&lines.bad_lines, false));
        }
        Ok(lines)
    }
}

/// Parses the JSON object of a line; `None` for a blank line.
fn parse(bytes: &[u8], first: bool) -> Result<Option<Map<String, Json>>, String> {
    let bytes = match bytes.strip_prefix(b"\xEF\xBB\xBF") {
        Some(rest) if first => rest,
        _ => bytes,
    };
    let text = std::str::from_utf8(bytes)
        .map_err(|e| format!("the line is not UTF-8 at byte {}", e.valid_up_to() + 1))?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    match serde_json::from_str::<Json>(text) {
        Ok(Json::Object(fields)) => Ok(Some(fields)),
        Ok(_) => Err(String::from("the line is JSON, but not an object")),
        // serde reports line 1 for every line, so its line number is dropped.
        Err(e) => {
            let full = e.to_string();
            let what = full.split(" at line ").next().unwrap_or(&full);
            Err(format!("not JSON: {what}, at column {}", e.column()))
        }
    }
}

/// Converts a line to an example. The first valid line determines the format of all lines.
fn example(
    line: &Map<String, Json>,
    format: &mut Option<Format>,
    text_to_ids: &TextPipeline,
    options: &DataOptions,
) -> Result<Example> {
    let kind = match *format {
        Some(kind) => kind,
        None => *format.insert(Format::from_line(
            line,
            &options.names,
            options.mask_prompt,
        )?),
    };
    kind.example(line, &options.names, options.mask_prompt, text_to_ids)
}

/// Skips to the next line.
fn skip_line(reader: &mut impl BufRead) -> std::io::Result<()> {
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Ok(());
        }
        match buffer.iter().position(|b| *b == b'\n') {
            Some(at) => {
                reader.consume(at + 1);
                return Ok(());
            }
            None => {
                let all = buffer.len();
                reader.consume(all);
            }
        }
    }
}

/// Combines all bad lines to one error, with details of the first twenty.
fn report(bad_lines: &[BadLine], stopped: bool) -> Error {
    const SHOWN: usize = 20;
    let mut text = match bad_lines.len() {
        1 => String::from("1 bad line: "),
        n => format!("{n} bad lines: "),
    };
    let shown: Vec<String> = bad_lines
        .iter()
        .take(SHOWN)
        .map(|b| format!("line {}: {}", b.line, b.why))
        .collect();
    text.push_str(&shown.join("; "));
    if bad_lines.len() > SHOWN {
        let more: Vec<String> = bad_lines[SHOWN..]
            .iter()
            .take(200)
            .map(|b| b.line.to_string())
            .collect();
        text.push_str(&format!("; and lines {}", more.join(", ")));
        if bad_lines.len() > SHOWN + 200 {
            text.push_str(", ...");
        }
    }
    if stopped {
        text.push_str("; reading stopped there");
    }
    bad(text)
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
