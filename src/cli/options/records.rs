//! Reads many prompts from standard input or a file, one per line.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;

use inference::{ChatPrompt, Message, Prompt, TextModel};
use serde::Deserialize;
use serde_json::Value;

use crate::cli::terminal::bounded::MAX_INPUT;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// The source of the prompts.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Input")]
pub struct InputArgs {
    /// The prompts, one JSON value per line: a string, or an object with `prompt`, `tokens` or
    /// `messages`; `-` reads standard input
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    input: PathBuf,
    /// Read each line as a plain text prompt, not as JSON
    #[arg(long)]
    text: bool,
}

/// One prompt of the input.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The prompt's number in the input, from 0: the line number in text input, the number of the
    /// value in JSON input.
    pub index: usize,
    /// The value of the record's `id` field.
    pub id: Option<Value>,
    /// The prompt or conversation.
    pub ask: Ask,
}

/// The input of a model.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// A text, unchanged.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// A conversation.
    Chat(Vec<Message>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text(String),
    Object(Object),
}

#[derive(Deserialize)]
struct Object {
    id: Option<Value>,
    #[serde(alias = "text")]
    prompt: Option<String>,
    tokens: Option<Vec<u32>>,
    messages: Option<Vec<Message>>,
}

impl Ask {
    /// The prompt for `model`.
    ///
    /// # Errors
    /// If the input is a conversation and the model has no chat template.
    pub fn prompt(&self, model: &dyn TextModel) -> inference::Result<Prompt> {
        match self {
            Ask::Text(text) => Ok(Prompt::Text(text.clone())),
            Ask::Tokens(ids) => Ok(Prompt::Tokens(ids.clone())),
            Ask::Chat(messages) => {
                let tokens = model.as_token_model().ok_or_else(|| {
                    inference::Error::new(
                        inference::ErrorKind::Unsupported,
                        "this backend does not format conversations for batches",
                    )
                })?;
                let chat = ChatPrompt::new(messages.as_slice());
                tokens.prepare_chat(&chat).map(Prompt::from)
            }
        }
    }
}

impl InputArgs {
    /// All prompts.
    pub fn read(&self, console: &mut Console<'_>) -> Result<Vec<Record>, Failure> {
        let name = self.input.display().to_string();
        let mut file;
        let source: &mut dyn BufRead = if name == "-" {
            &mut *console.input
        } else {
            let opened = std::fs::File::open(&self.input)
                .map_err(|e| Failure::failed(format!("cannot read {name}: {e}")))?;
            file = BufReader::new(opened);
            &mut file
        };
        let mut all = Vec::new();
        // Reads one byte more than the limit, to detect larger input.
        let mut limited = source.take(MAX_INPUT + 1);
        let mut line = String::new();
        let mut number = 0;
        loop {
            line.clear();
            let n = limited
                .read_line(&mut line)
                .map_err(|e| Failure::failed(format!("cannot read {name}: {e}")))?;
            if n == 0 {
                break;
            }
            number += 1;
            let line = line.trim_end_matches(['\n', '\r']);
            if line.trim().is_empty() {
                continue;
            }
            let (id, ask) = if self.text {
                (None, Ask::Text(line.to_owned()))
            } else {
                parse(line).map_err(|e| Failure::failed(format!("{name}, line {number}: {e}")))?
            };
            // In text input, the line number identifies a prompt. A JSON value may have an `id`
            // instead.
            let index = if self.text { number - 1 } else { all.len() };
            all.push(Record { index, id, ask });
        }
        if limited.limit() == 0 {
            return Err(Failure::failed(format!(
                "{name} has more than {MAX_INPUT} bytes; cut it into parts"
            )));
        }
        Ok(all)
    }
}

fn parse(line: &str) -> Result<(Option<Value>, Ask), String> {
    let shape = "a JSON string, or an object with one of `prompt`, `tokens` and `messages`";
    let line: Line = serde_json::from_str(line).map_err(|e| format!("not {shape}: {e}"))?;
    match line {
        Line::Text(text) => Ok((None, Ask::Text(text))),
        Line::Object(Object {
            id,
            prompt,
            tokens,
            messages,
        }) => match (prompt, tokens, messages) {
            (Some(text), None, None) => Ok((id, Ask::Text(text))),
            (None, Some(ids), None) => Ok((id, Ask::Tokens(ids))),
            (None, None, Some(messages)) => Ok((id, Ask::Chat(messages))),
            _ => Err(format!("not {shape}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    fn read(input: &str, text: bool) -> Result<Vec<Record>, Failure> {
        let args = InputArgs {
            input: "-".into(),
            text,
        };
        args.read(&mut Streams::new(input).console())
    }

    #[test]
    fn the_index_of_a_text_is_its_line() {
        let all = read("a\n\n  \nb\n", true).unwrap();
        let lines: Vec<usize> = all.iter().map(|r| r.index).collect();
        assert_eq!(lines, [0, 3]);
    }

    #[test]
    fn every_form_of_a_line_is_read() {
        let all = read(
            "\"a\"\n\n{\"prompt\":\"b\",\"id\":7}\n{\"tokens\":[1,2]}\n\
             {\"messages\":[{\"role\":\"user\",\"content\":\"c\"}]}",
            false,
        )
        .unwrap();
        let asks: Vec<_> = all.iter().map(|r| r.ask.clone()).collect();
        assert_eq!(
            asks,
            [
                Ask::Text("a".into()),
                Ask::Text("b".into()),
                Ask::Tokens(vec![1, 2]),
                Ask::Chat(vec![Message::user("c")]),
            ]
        );
        assert_eq!((all[1].index, &all[1].id), (1, &Some(7.into())));
        let plain = read("{not json}\n two \n", true).unwrap();
        assert_eq!(plain[0].ask, Ask::Text("{not json}".into()));
        assert_eq!(plain[1].ask, Ask::Text(" two ".into()));
    }

    #[test]
    fn a_bad_line_is_named() {
        for bad in [
            "\"a\"\n{\"prompt\":1}\n",
            "\"a\"\n[1]\n",
            "\"a\"\n{}\n",
            "\"a\"\n{\"prompt\":\"x\",\"tokens\":[1]}\n",
            "\"a\"\nplain\n",
        ] {
            let text = read(bad, false).unwrap_err().report().unwrap();
            assert!(text.contains("line 2"), "{text}");
        }
    }
}
