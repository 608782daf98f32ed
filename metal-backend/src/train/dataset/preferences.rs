//! Pairs of a better and a worse reply to one prompt: `chosen` and `rejected` in a JSONL file.
//!
//! The formats are those of preference data sets on the Hugging Face Hub. `load` reads the files
//! within limits.

use std::path::{Path, PathBuf};

use inference::Result;
use serde_json::{Map, Value as Json, json};

use super::formats::{bad, messages_of, required, text};
use super::load::{DataDir, read_examples};
use super::{BadLine, DataOptions, Example};
use crate::text::{ChatOptions, TextPipeline};

/// Two replies to one prompt. Both examples begin with the prompt, which the loss excludes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The better reply.
    pub chosen: Example,
    /// The worse reply.
    pub rejected: Example,
}

impl Pair {
    /// The number of ids in the longer reply, with the prompt.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a pair is never empty")]
    pub fn len(&self) -> usize {
        self.chosen.len().max(self.rejected.len())
    }

    /// Whether both replies have targets after truncation to `max_len` ids.
    #[must_use]
    pub fn is_usable(&self, max_len: usize) -> bool {
        self.chosen.learned(max_len) > 0 && self.rejected.learned(max_len) > 0
    }
}

/// The pairs of one file.
#[derive(Debug, Clone)]
pub struct Pairs {
    /// The file's path.
    pub path: PathBuf,
    /// The pairs, in the file's order.
    pub pairs: Vec<Pair>,
    /// The line number of each pair, from 1.
    pub lines: Vec<usize>,
    /// The skipped lines; always empty without [`DataOptions::skip_bad_lines`].
    pub bad_lines: Vec<BadLine>,
}

impl Pairs {
    /// Reads one JSONL file. A line has one of these forms:
    ///
    /// - `{"prompt": "...", "chosen": "...", "rejected": "..."}`, optionally with `"system"`;
    /// - `{"prompt": [messages], "chosen": [messages], "rejected": [messages]}`;
    /// - `{"chosen": [messages], "rejected": [messages]}`; the prompt is the messages at the start
    ///   that both have in common.
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
            let pair = pair(line, &options.names.prompt, text_to_ids)?;
            let tokens = pair.chosen.len() + pair.rejected.len();
            Ok((pair, tokens))
        })?;
        Ok(Self {
            path: path.to_owned(),
            pairs: file.items,
            lines: file.lines,
            bad_lines: file.bad_lines,
        })
    }
}

impl DataDir<Pairs> {
    /// Reads the pairs of a directory.
    ///
    /// # Errors
    /// The errors of [`Pairs::read`]; `InvalidOption` if `dir` is not a directory or contains none
    /// of the three files.
    pub fn read_pairs(
        dir: impl AsRef<Path>,
        text_to_ids: &TextPipeline,
        options: &DataOptions,
    ) -> Result<Self> {
        Self::read_with(dir.as_ref(), |path| Pairs::read(path, text_to_ids, options))
    }
}

/// Converts a line to a pair.
fn pair(line: &Map<String, Json>, prompt_name: &str, text_to_ids: &TextPipeline) -> Result<Pair> {
    let needs = format!(
        "a pair needs \"chosen\" and \"rejected\", and {prompt_name:?} unless both are lists of messages"
    );
    let field = |name: &str| required(line, name, &needs);
    let (chosen, rejected) = (field("chosen")?, field("rejected")?);
    if !chosen.is_array() {
        let mut prompt = Vec::new();
        if line.contains_key("system") {
            prompt.push(json!({"role": "system", "content": text(line, "system")?}));
        }
        field(prompt_name)?;
        prompt.push(json!({"role": "user", "content": text(line, prompt_name)?}));
        let reply = |name: &str| -> Result<Vec<Json>> {
            Ok(vec![
                json!({"role": "assistant", "content": text(line, name)?}),
            ])
        };
        return encoded(&prompt, &reply("chosen")?, &reply("rejected")?, text_to_ids);
    }
    let (chosen, rejected) = (
        messages_of(chosen, "chosen")?,
        messages_of(rejected, "rejected")?,
    );
    if let Some(prompt) = line.get(prompt_name) {
        let prompt = match prompt {
            Json::String(text) => vec![json!({"role": "user", "content": text})],
            list => messages_of(list, prompt_name)?,
        };
        // Some data sets repeat the prompt in both replies, so the prompt is removed from the
        // replies.
        let without = |messages: &[Json]| match messages.strip_prefix(prompt.as_slice()) {
            Some(rest) => rest.to_vec(),
            None => messages.to_vec(),
        };
        return encoded(&prompt, &without(&chosen), &without(&rejected), text_to_ids);
    }
    let common = chosen
        .iter()
        .zip(&rejected)
        .take_while(|(a, b)| a == b)
        .count();
    if common == 0 {
        return Err(bad(
            "\"chosen\" and \"rejected\" begin with different messages, so there is no common prompt",
        ));
    }
    encoded(
        &chosen[..common],
        &chosen[common..],
        &rejected[common..],
        text_to_ids,
    )
}

fn encoded(
    prompt: &[Json],
    chosen: &[Json],
    rejected: &[Json],
    text_to_ids: &TextPipeline,
) -> Result<Pair> {
    let offset = offset_of(prompt, text_to_ids)?;
    let pair = Pair {
        chosen: appended(prompt, offset, (chosen, "chosen"), text_to_ids)?,
        rejected: appended(prompt, offset, (rejected, "rejected"), text_to_ids)?,
    };
    if pair.chosen.ids == pair.rejected.ids {
        return Err(bad("\"chosen\" and \"rejected\" are the same"));
    }
    Ok(pair)
}

/// Returns the number of tokens of a prompt, including the beginning of the reply.
pub(super) fn offset_of(prompt: &[Json], text_to_ids: &TextPipeline) -> Result<usize> {
    let prepared = text_to_ids.prepare_values(prompt.to_vec(), &ChatOptions::answer())?;
    Ok(prepared.ids.len())
}

/// Makes an example from a prompt of `offset` tokens and a reply, which is the field `name` of a
/// line.
pub(super) fn appended(
    prompt: &[Json],
    offset: usize,
    (reply, name): (&[Json], &str),
    text_to_ids: &TextPipeline,
) -> Result<Example> {
    if reply.is_empty() {
        return Err(bad(format!("{name:?} adds nothing to the prompt")));
    }
    let messages = [prompt, reply].concat();
    let ids = text_to_ids
        .prepare_values(messages, &ChatOptions::default())?
        .ids;
    let example = Example::new(ids, offset);
    if example.learned(usize::MAX) == 0 {
        return Err(bad(format!(
            "nothing is left to learn of {name:?}: {} tokens, of which the prompt takes {offset}",
            example.len()
        )));
    }
    Ok(example)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[Json]) -> Result<Pairs> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("train.jsonl");
        let text: Vec<String> = lines.iter().map(Json::to_string).collect();
        std::fs::write(&path, text.join("\n")).unwrap();
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny/gpt2");
        let text = TextPipeline::from_dir(model, "gpt2").unwrap();
        Pairs::read(path, &text, &DataOptions::new())
    }

    #[test]
    fn the_three_forms_say_the_same() {
        let user = json!({"role": "user", "content": "hi"});
        let reply = |text: &str| json!({"role": "assistant", "content": text});
        let plain = json!({"prompt": "hi", "chosen": "good", "rejected": "so bad"});
        let both =
            json!({"prompt": [user], "chosen": [reply("good")], "rejected": [reply("so bad")]});
        let repeated = json!({"prompt": "hi", "chosen": [user, reply("good")], "rejected": [user, reply("so bad")]});
        let implicit =
            json!({"chosen": [user, reply("good")], "rejected": [user, reply("so bad")]});
        let actual = read(&[plain, both, repeated, implicit]).unwrap();
        assert_eq!(actual.lines, [1, 2, 3, 4]);
        for pair in &actual.pairs {
            assert_eq!(pair, &actual.pairs[0]);
        }
        let pair = &actual.pairs[0];
        let offset = pair.chosen.parts[0].offset;
        assert_eq!(pair.chosen.ids[..offset], pair.rejected.ids[..offset]);
        assert_ne!(pair.chosen.ids[offset], pair.rejected.ids[offset]);
        assert_eq!(pair.len(), pair.rejected.len());
        assert!(pair.is_usable(offset + 1) && !pair.is_usable(offset));
        // The template's default system message is shorter than this one, so the prompt must be
        // longer.
        let system = json!({"system": "Be brief, and say no more than a word or two.", "prompt": "hi", "chosen": "a", "rejected": "b"});
        let actual = read(&[system]).unwrap();
        assert!(actual.pairs[0].chosen.parts[0].offset > offset);
    }

    #[test]
    fn what_is_no_pair_is_told() {
        let user = json!({"role": "user", "content": "hi"});
        for (line, what) in [
            (json!({"prompt": "hi", "chosen": "a"}), "\"rejected\""),
            (json!({"chosen": "a", "rejected": "b"}), "\"prompt\""),
            (
                json!({"prompt": "hi", "chosen": "a", "rejected": "a"}),
                "the same",
            ),
            (
                json!({"prompt": "hi", "chosen": "a", "rejected": 1}),
                "not a text",
            ),
            (json!({"chosen": [], "rejected": []}), "empty"),
            (
                json!({"chosen": [user], "rejected": [user]}),
                "adds nothing",
            ),
            (
                json!({"chosen": [user], "rejected": [{"role": "system", "content": "x"}]}),
                "no common prompt",
            ),
        ] {
            let error = read(std::slice::from_ref(&line)).unwrap_err().to_string();
            assert!(
                error.contains(what) && error.contains("line 1"),
                "{line}: {error}"
            );
        }
    }
}
