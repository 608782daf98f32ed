//! Prompts for generated replies: `prompt` in a JSONL file. The reward receives the other fields of
//! a line.

use std::path::{Path, PathBuf};

use inference::Result;
use serde_json::{Map, Value as Json};

use super::formats::{prompt_of, required};
use super::load::{DataDir, read_examples};
use super::{BadLine, DataOptions};
use crate::text::{ChatOptions, TextPipeline};

/// A prompt, including the beginning of the reply.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptLine {
    /// The token ids of the prompt.
    pub ids: Vec<u32>,
    /// The fields of the line.
    pub line: Map<String, Json>,
}

/// The prompts of one file.
#[derive(Debug, Clone)]
pub struct Prompts {
    /// The file's path.
    pub path: PathBuf,
    /// The prompts, in the file's order.
    pub prompts: Vec<PromptLine>,
    /// The skipped lines; always empty without [`DataOptions::skip_bad_lines`].
    pub bad_lines: Vec<BadLine>,
}

impl Prompts {
    /// Reads one JSONL file. A line is `{"prompt": "..."}` or `{"prompt": [messages]}`, optionally
    /// with `"system"`, and with any other fields.
    ///
    /// # Errors
    /// The errors of [`super::Dataset::read`].
    pub fn read(
        path: impl AsRef<Path>,
        text_to_ids: &TextPipeline,
        options: &DataOptions,
    ) -> Result<Self> {
        let path = path.as_ref();
        let file = read_examples(path, options, |line| {
            let prompt = prompt(line, &options.names.prompt, text_to_ids)?;
            let tokens = prompt.ids.len();
            Ok((prompt, tokens))
        })?;
        Ok(Self {
            path: path.to_owned(),
            prompts: file.items,
            bad_lines: file.bad_lines,
        })
    }
}

impl DataDir<Prompts> {
    /// Reads the prompts of a directory.
    ///
    /// # Errors
    /// The errors of [`Prompts::read`]; `InvalidOption` if `dir` is not a directory or contains
    /// none of the three files.
    pub fn read_prompts(
        dir: impl AsRef<Path>,
        text_to_ids: &TextPipeline,
        options: &DataOptions,
    ) -> Result<Self> {
        Self::read_with(dir.as_ref(), |path| {
            Prompts::read(path, text_to_ids, options)
        })
    }
}

fn prompt(line: &Map<String, Json>, name: &str, text_to_ids: &TextPipeline) -> Result<PromptLine> {
    required(line, name, &format!("a prompt needs {name:?}"))?;
    let messages = prompt_of(line, name)?;
    let prepared = text_to_ids.prepare_values(messages, &ChatOptions::answer())?;
    Ok(PromptLine {
        ids: prepared.ids,
        line: line.clone(),
    })
}
