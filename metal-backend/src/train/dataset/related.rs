//! Texts that belong together, for encoders: `anchor`, `positive` and negatives in a JSONL file,
//! with the field names of sentence-transformers.

use std::path::{Path, PathBuf};

use inference::{EmbedOptions, EmbedPrompt, Prompt, Result};
use serde_json::{Map, Value as Json};

use super::formats::{bad, text};
use super::load::{DataDir, read_examples};
use super::{BadLine, DataOptions};
use crate::sentence::Sentence;
use crate::text::TextPipeline;
use crate::train::RelatedTexts;

/// How the texts of a line become token ids.
pub struct Encoding<'a> {
    /// The settings of the model.
    pub sentence: &'a Sentence,
    /// The tokenizer.
    pub text: &'a TextPipeline,
    /// The name of the model's prompt before anchors; `None` means its default prompt.
    pub anchor_prompt: Option<String>,
    /// The name of the model's prompt before positives and negatives; `None` means its default
    /// prompt.
    pub positive_prompt: Option<String>,
    /// The maximum number of tokens per text; longer texts are truncated.
    pub max_len: usize,
}

impl Encoding<'_> {
    fn ids(&self, text: &str, prompt: Option<&String>) -> Result<Vec<u32>> {
        let prompt = prompt.map_or(EmbedPrompt::Default, |name| {
            EmbedPrompt::Named(name.clone())
        });
        let options = EmbedOptions::new()
            .with_prompt(prompt)
            .with_truncate(true)
            .with_max_length(self.max_len);
        self.sentence
            .tokens(self.text, &Prompt::from(text), &options)
    }
}

/// The examples of one file.
#[derive(Debug, Clone)]
pub struct RelatedFile {
    /// The file's path.
    pub path: PathBuf,
    /// The examples, in the file's order.
    pub examples: Vec<RelatedTexts>,
    /// The skipped lines; always empty without [`DataOptions::skip_bad_lines`].
    pub bad_lines: Vec<BadLine>,
}

impl RelatedFile {
    /// Reads one JSONL file. A line is `{"anchor": "...", "positive": "..."}`, optionally with
    /// `"negative"` (a text or a list of texts), or with `"negative_1"`, `"negative_2"` and so on.
    ///
    /// # Errors
    /// The errors of [`super::Dataset::read`].
    pub fn read(path: &Path, encoding: &Encoding<'_>, options: &DataOptions) -> Result<Self> {
        let file = read_examples(path, options, |line| {
            let example = example(line, encoding)?;
            let tokens = example.tokens();
            Ok((example, tokens))
        })?;
        Ok(Self {
            path: path.to_owned(),
            examples: file.items,
            bad_lines: file.bad_lines,
        })
    }
}

impl DataDir<RelatedFile> {
    /// Reads the files of a directory.
    ///
    /// # Errors
    /// The errors of [`RelatedFile::read`]; `InvalidOption` if `dir` is not a directory or contains
    /// none of the three files.
    pub fn read_related(
        dir: &Path,
        encoding: &Encoding<'_>,
        options: &DataOptions,
    ) -> Result<Self> {
        Self::read_with(dir, |path| RelatedFile::read(path, encoding, options))
    }
}

/// Reads the texts of a line: anchor, positive and negatives.
fn texts(line: &Map<String, Json>) -> Result<(String, String, Vec<String>)> {
    for name in ["anchor", "positive"] {
        if !line.contains_key(name) {
            let fields: Vec<&str> = line.keys().take(8).map(String::as_str).collect();
            return Err(bad(format!(
                "the line has the fields {fields:?}; an example needs \"anchor\" and \"positive\""
            )));
        }
    }
    let mut negatives = Vec::new();
    match line.get("negative") {
        None | Some(Json::Null) => {}
        Some(Json::Array(list)) => {
            for one in list {
                let one = one
                    .as_str()
                    .ok_or_else(|| bad("\"negative\" must be a text or a list of texts"))?;
                negatives.push(one.to_owned());
            }
        }
        Some(_) => negatives.push(text(line, "negative")?.to_owned()),
    }
    for n in 1.. {
        let name = format!("negative_{n}");
        if !line.contains_key(&name) {
            break;
        }
        negatives.push(text(line, &name)?.to_owned());
    }
    Ok((
        text(line, "anchor")?.to_owned(),
        text(line, "positive")?.to_owned(),
        negatives,
    ))
}

fn example(line: &Map<String, Json>, encoding: &Encoding<'_>) -> Result<RelatedTexts> {
    let (anchor, positive, negatives) = texts(line)?;
    if negatives.contains(&positive) {
        return Err(bad("a negative is the same as \"positive\""));
    }
    let behind = encoding.positive_prompt.as_ref();
    Ok(RelatedTexts {
        anchor: encoding.ids(&anchor, encoding.anchor_prompt.as_ref())?,
        positive: encoding.ids(&positive, behind)?,
        negatives: negatives
            .iter()
            .map(|text| encoding.ids(text, behind))
            .collect::<Result<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(line: Json) -> Result<(String, String, Vec<String>)> {
        texts(line.as_object().unwrap())
    }

    #[test]
    fn negatives_have_three_forms() {
        let (anchor, positive, none) = read(json!({"anchor": "a", "positive": "b"})).unwrap();
        assert_eq!((anchor.as_str(), positive.as_str()), ("a", "b"));
        assert!(none.is_empty());
        for (line, expected) in [
            (
                json!({"anchor": "a", "positive": "b", "negative": "c"}),
                vec!["c"],
            ),
            (
                json!({"anchor": "a", "positive": "b", "negative": null}),
                vec![],
            ),
            (
                json!({"anchor": "a", "positive": "b", "negative": ["c", "d"]}),
                vec!["c", "d"],
            ),
            (
                json!({"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}),
                vec!["c", "d"],
            ),
        ] {
            assert_eq!(read(line.clone()).unwrap().2, expected, "{line}");
        }
        for line in [
            json!({"anchor": "a"}),
            json!({"sentence1": "a", "sentence2": "b"}),
            json!({"anchor": "a", "positive": 1}),
            json!({"anchor": "a", "positive": "b", "negative": 1}),
            json!({"anchor": "a", "positive": "b", "negative": [1]}),
            json!({"anchor": "a", "positive": "b", "negative_1": 1}),
        ] {
            assert!(read(line.clone()).is_err(), "{line}");
        }
    }
}
