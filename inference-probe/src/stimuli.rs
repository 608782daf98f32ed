//! Stimuli: texts with labels, read from a JSON array of objects.
//!
//! The text of a stimulus is its field `prompts[TEMPLATE]`, or `prompt`, or `text`. Each other
//! field with a string, a number or a Boolean is a label. `expected_surface` is the expected
//! continuation of the text.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::files::{MAX_TEXT, read_text};

/// A text and its labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Stimulus {
    /// The input text for the model.
    pub text: String,
    /// The labels by name.
    pub labels: BTreeMap<String, String>,
}

impl Stimulus {
    /// The text with which the model should continue.
    pub fn expected(&self) -> Option<&str> {
        self.labels.get("expected_surface").map(String::as_str)
    }

    /// The byte range of the text in which the value of the label `field` occurs. It must occur
    /// exactly once.
    ///
    /// # Errors
    /// [`Error::Data`] if there is no such label, or if its value does not occur exactly once.
    pub fn span(&self, field: &str) -> Result<Range<usize>> {
        let Some(part) = self.labels.get(field).filter(|part| !part.is_empty()) else {
            return Err(Error::data(format!(
                "the stimulus {:?} has no field `{field}`",
                self.text
            )));
        };
        // Overlapping occurrences count, too.
        let mut matches = self
            .text
            .char_indices()
            .map(|(i, _)| i)
            .filter(|i| self.text[*i..].starts_with(part.as_str()));
        match (matches.next(), matches.next()) {
            (Some(start), None) => Ok(start..start + part.len()),
            (None, _) => Err(Error::data(format!(
                "`{field}` ({part:?}) does not occur in {:?}",
                self.text
            ))),
            (Some(_), Some(_)) => Err(Error::data(format!(
                "`{field}` ({part:?}) occurs twice in {:?}: the position is not unique",
                self.text
            ))),
        }
    }
}

/// A set of stimuli, and the hash of its file.
#[derive(Debug, Clone, PartialEq)]
pub struct Stimuli {
    /// The stimuli in the order of the file.
    pub list: Vec<Stimulus>,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
}

impl Stimuli {
    /// Reads a file. `template` selects one of the texts in `prompts`.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::File`] with the number of the first unusable stimulus.
    pub fn read(path: &Path, template: Option<&str>) -> Result<Self> {
        let bytes = read_text(path, MAX_TEXT)?;
        Self::parse(&bytes, template).map_err(|message| Error::file(path, message))
    }

    fn parse(bytes: &[u8], template: Option<&str>) -> std::result::Result<Self, String> {
        let values: Vec<Map<String, Value>> = serde_json::from_slice(bytes)
            .map_err(|e| format!("a JSON array of objects was expected: {e}"))?;
        if values.is_empty() {
            return Err(String::from("there are no stimuli in it"));
        }
        let list = values
            .iter()
            .enumerate()
            .map(|(i, value)| stimulus(value, template).map_err(|e| format!("stimulus {i}: {e}")))
            .collect::<std::result::Result<_, _>>()?;
        let digest = Sha256::digest(bytes);
        Ok(Self {
            list,
            sha256: digest.iter().map(|b| format!("{b:02x}")).collect(),
        })
    }

    /// The label `field` of each stimulus.
    ///
    /// # Errors
    /// [`Error::Data`] with the first stimulus that lacks the label, and the existing fields.
    pub fn labels(&self, field: &str) -> Result<Vec<&str>> {
        self.list
            .iter()
            .enumerate()
            .map(|(i, stimulus)| {
                stimulus
                    .labels
                    .get(field)
                    .map(String::as_str)
                    .ok_or_else(|| {
                        let there: Vec<_> = stimulus.labels.keys().map(String::as_str).collect();
                        Error::data(format!(
                            "stimulus {i} has no field `{field}`; it has {}",
                            there.join(", ")
                        ))
                    })
            })
            .collect()
    }
}

fn stimulus(
    value: &Map<String, Value>,
    template: Option<&str>,
) -> std::result::Result<Stimulus, String> {
    let prompts = value.get("prompts").and_then(Value::as_object);
    let text = match (template, prompts) {
        (Some(name), Some(prompts)) => prompts.get(name).ok_or_else(|| {
            let there: Vec<_> = prompts.keys().map(String::as_str).collect();
            format!(
                "no template `{name}` in `prompts`; there is {}",
                there.join(", ")
            )
        })?,
        (Some(name), None) => {
            return Err(format!(
                "there are no `prompts` to take template `{name}` from"
            ));
        }
        (None, _) => value
            .get("prompt")
            .or_else(|| value.get("text"))
            .ok_or_else(|| match prompts {
                Some(prompts) => {
                    let there: Vec<_> = prompts.keys().map(String::as_str).collect();
                    format!(
                        "its texts are templates: choose one of {}",
                        there.join(", ")
                    )
                }
                None => String::from("no `prompt` and no `text`"),
            })?,
    };
    let Some(text) = text.as_str().filter(|text| !text.is_empty()) else {
        return Err(String::from("the text is empty or not a string"));
    };
    let labels = value
        .iter()
        .filter(|(name, _)| !matches!(name.as_str(), "prompt" | "text" | "prompts"))
        .filter_map(|(name, value)| {
            let label = match value {
                Value::String(s) => s.clone(),
                Value::Number(n) => n.to_string(),
                Value::Bool(b) => b.to_string(),
                Value::Null | Value::Array(_) | Value::Object(_) => return None,
            };
            Some((name.clone(), label))
        })
        .collect();
    Ok(Stimulus {
        text: text.to_owned(),
        labels,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str, template: Option<&str>) -> std::result::Result<Stimuli, String> {
        Stimuli::parse(json.as_bytes(), template)
    }

    #[test]
    fn texts_and_labels_are_found() {
        let json = r#"[{"prompts": {"en": "The root k-t-b in form fa3il", "ar": "x"},
                        "root": "k-t-b", "n": 3, "plural": false, "ignored": [1]}]"#;
        let stimuli = parse(json, Some("en")).unwrap();
        let first = &stimuli.list[0];
        assert_eq!(first.text, "The root k-t-b in form fa3il");
        assert_eq!(first.labels.len(), 3);
        assert_eq!(
            (first.labels["n"].as_str(), first.labels["plural"].as_str()),
            ("3", "false")
        );
        assert_eq!(first.span("root").unwrap(), 9..14);
        assert_eq!(stimuli.labels("n").unwrap(), ["3"]);
        assert_eq!(stimuli.sha256.len(), 64);
        let e = stimuli.labels("absent").unwrap_err().to_string();
        assert!(e.contains("n, plural, root"), "{e}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, template, expected) in [
            ("{}", None, "array of objects"),
            ("[]", None, "no stimuli"),
            (r#"[{"prompts": {"en": "a"}}]"#, None, "choose one of en"),
            (r#"[{"prompts": {"en": "a"}}]"#, Some("de"), "there is en"),
            (r#"[{"text": "a"}]"#, Some("de"), "no `prompts`"),
            (r#"[{"text": "a"}, {"x": 1}]"#, None, "stimulus 1"),
            (r#"[{"text": ""}]"#, None, "empty"),
        ] {
            let e = parse(json, template).unwrap_err();
            assert!(e.contains(expected), "{json}: {e}");
        }
    }

    #[test]
    fn a_span_is_unique() {
        let stimulus = |text: &str| Stimulus {
            text: text.to_owned(),
            labels: [(String::from("x"), String::from("aa"))].into(),
        };
        assert!(
            stimulus("aaa")
                .span("x")
                .unwrap_err()
                .to_string()
                .contains("twice")
        );
        assert!(
            stimulus("bb")
                .span("x")
                .unwrap_err()
                .to_string()
                .contains("does not occur")
        );
        assert!(
            stimulus("bb")
                .span("y")
                .unwrap_err()
                .to_string()
                .contains("no field")
        );
        assert_eq!(stimulus("éaa").span("x").unwrap(), 2..4);
    }
}
