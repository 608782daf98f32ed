//! Single replies with verdicts: `prompt`, `completion` and `label` in a JSONL file, with TRL's
//! field names.

use std::path::{Path, PathBuf};

use inference::Result;
use serde_json::{Map, Value as Json, json};

use super::formats::{bad, messages_of, prompt_of, required, text};
use super::load::{DataDir, read_examples};
use super::preferences::{appended, offset_of};
use super::{BadLine, DataOptions, Example};
use crate::text::TextPipeline;

/// A reply to a prompt, with a verdict. The example begins with the prompt, which the loss
/// excludes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The prompt and the reply.
    pub example: Example,
    /// Whether the reply is a good one.
    pub desirable: bool,
}

/// The replies of one file.
#[derive(Debug, Clone)]
pub struct Verdicts {
    /// The file's path.
    pub path: PathBuf,
    /// The replies, in the file's order.
    pub verdicts: Vec<Verdict>,
    /// The line number of each reply, from 1.
    pub lines: Vec<usize>,
    /// The skipped lines; always empty without [`DataOptions::skip_bad_lines`].
    pub bad_lines: Vec<BadLine>,
}

impl Verdicts {
    /// Reads one JSONL file. A line has one of these forms:
    ///
    /// - `{"prompt": "...", "completion": "...", "label": true}`, optionally with `"system"`;
    /// - `{"prompt": [messages], "completion": [messages], "label": false}`.
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
            let names = (&*options.names.prompt, &*options.names.completion);
            let verdict = verdict(line, names, text_to_ids)?;
            let tokens = verdict.example.len();
            Ok((verdict, tokens))
        })?;
        Ok(Self {
            path: path.to_owned(),
            verdicts: file.items,
            lines: file.lines,
            bad_lines: file.bad_lines,
        })
    }
}

impl DataDir<Verdicts> {
    /// Reads the replies of a directory.
    ///
    /// # Errors
    /// The errors of [`Verdicts::read`]; `InvalidOption` if `dir` is not a directory or contains
    /// none of the three files.
    pub fn read_verdicts(
        dir: impl AsRef<Path>,
        text_to_ids: &TextPipeline,
        options: &DataOptions,
    ) -> Result<Self> {
        Self::read_with(dir.as_ref(), |path| {
            Verdicts::read(path, text_to_ids, options)
        })
    }
}

fn verdict(
    line: &Map<String, Json>,
    (prompt_name, completion_name): (&str, &str),
    text_to_ids: &TextPipeline,
) -> Result<Verdict> {
    let needs =
        format!("a reply with a verdict needs {prompt_name:?}, {completion_name:?} and \"label\"");
    let field = |name: &str| required(line, name, &needs);
    field(prompt_name)?;
    let reply = field(completion_name)?;
    let desirable = field("label")?
        .as_bool()
        .ok_or_else(|| bad("\"label\" must be true or false"))?;
    let messages = prompt_of(line, prompt_name)?;
    let reply = match reply.is_array() {
        true => messages_of(reply, completion_name)?,
        false => vec![json!({"role": "assistant", "content": text(line, completion_name)?})],
    };
    let offset = offset_of(&messages, text_to_ids)?;
    let example = appended(&messages, offset, (&reply, completion_name), text_to_ids)?;
    Ok(Verdict { example, desirable })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &Json) -> Result<Verdict> {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny/gpt2");
        let text = TextPipeline::from_dir(model, "gpt2").unwrap();
        verdict(line.as_object().unwrap(), ("prompt", "completion"), &text)
    }

    #[test]
    fn texts_and_messages_say_the_same() {
        let plain = json!({"prompt": "hi", "completion": "ahoy", "label": true});
        let messages = json!({
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "ahoy"}],
            "label": true,
        });
        let verdict = read(&plain).unwrap();
        assert_eq!(verdict, read(&messages).unwrap());
        assert!(verdict.desirable && verdict.example.learned(usize::MAX) > 0);
        for (line, what) in [
            (json!({"prompt": "hi", "completion": "ahoy"}), "\"label\""),
            (
                json!({"prompt": "hi", "completion": "ahoy", "label": 1}),
                "true or false",
            ),
            (
                json!({"prompt": "hi", "chosen": "a", "rejected": "b"}),
                "\"completion\"",
            ),
            (
                json!({"prompt": 1, "completion": "ahoy", "label": true}),
                "not a text",
            ),
        ] {
            let error = read(&line).unwrap_err().to_string();
            assert!(error.contains(what), "{line}: {error}");
        }
    }
}
