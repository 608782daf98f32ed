//! `mlx rerank`: sorts documents by relevance to a query.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use inference::{CancelToken, Interrupt, RerankOptions};
use serde_json::{Value, json};

use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::terminal::bounded::MAX_INPUT;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::progress::CountBar;

/// Sort documents by how well they answer a query, with a model trained for scoring
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The query
    #[arg(value_name = "QUERY")]
    query: String,
    /// The documents, one per line: a text, a JSON string, or a JSON object with `text` and
    /// optionally `id`; `-` reads standard input
    #[arg(value_name = "FILE", default_value = "-")]
    file: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Print only the best N documents
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    top_n: Option<usize>,
    /// Print the raw scores of the model's last layer, instead of scores from 0 to 1
    #[arg(long)]
    raw_scores: bool,
    /// Maximum tokens of a query with a document; the model's own maximum also applies
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_length: Option<usize>,
    /// Truncate documents that are too long, instead of refusing them
    #[arg(long)]
    truncate: bool,
    /// The task, for models that expect an instruction
    #[arg(long, value_name = "TEXT")]
    instruction: Option<String>,
    /// Print one JSON value per document, with `index`, `score` and `text`
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// Number of documents per call of the engine.
const TOGETHER: usize = 64;

/// A document, and the value of its `id` field.
struct Document {
    text: String,
    id: Option<Value>,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let documents = read(&args.file, console)?;
    let loaded = load(&args.model, &args.load, console)?;
    let ranker = loaded.model.as_rerank_model().ok_or_else(|| {
        Failure::failed(format!(
            "{} is not made to score documents; give a cross-encoder, or compare vectors of `mlx \
             embed`",
            loaded.model.model_type()
        ))
    })?;
    let cancel = CancelToken::new();
    let interrupt = Interrupt::new().with_cancel(cancel.clone());
    let _guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    let options = RerankOptions::new()
        .with_raw_scores(args.raw_scores)
        .with_max_length(args.max_length)
        .with_truncate(args.truncate)
        .with_instruction(args.instruction.clone());
    let texts: Vec<String> = documents.iter().map(|d| d.text.clone()).collect();
    let mut ranking = inference::Ranking::default();
    let bar = CountBar::start("documents", texts.len() as u64, console);
    for part in texts.chunks(TOGETHER) {
        let partial = ranker.rerank(&args.query, part, &options, &interrupt)?;
        ranking.scores.extend(partial.scores);
        bar.advance(part.len() as u64);
    }
    drop(bar);
    for index in ranking
        .order()
        .into_iter()
        .take(args.top_n.unwrap_or(usize::MAX))
    {
        let (score, document) = (ranking.scores[index], &documents[index]);
        if !score.is_finite() {
            let message = format!("the score of document {index} is not a number");
            return Err(Failure::failed(message));
        }
        if args.json {
            let mut value = json!({"index": index, "score": score, "text": document.text});
            if let Some(id) = &document.id {
                value["id"] = id.clone();
            }
            console.json(&value)?;
        } else {
            console.line(&format!("{score:.4}  {}", document.text))?;
        }
    }
    Ok(())
}

fn read(path: &Path, console: &mut Console<'_>) -> Result<Vec<Document>, Failure> {
    let name = path.display().to_string();
    let failed = |e: std::io::Error| Failure::failed(format!("cannot read {name}: {e}"));
    let mut file;
    let source: &mut dyn BufRead = if name == "-" {
        &mut *console.input
    } else {
        file = BufReader::new(std::fs::File::open(path).map_err(failed)?);
        &mut file
    };
    let mut text = String::new();
    // Reads one byte more than the limit, to detect larger input.
    let read = source.take(MAX_INPUT + 1).read_to_string(&mut text);
    if read.map_err(failed)? as u64 > MAX_INPUT {
        return Err(Failure::failed(format!(
            "{name} has more than {MAX_INPUT} bytes; cut it into parts"
        )));
    }
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    Ok(lines.map(document).collect())
}

/// Parses a line: a JSON string, an object with `text`, or plain text.
fn document(line: &str) -> Document {
    let plain = || Document {
        text: line.to_owned(),
        id: None,
    };
    match serde_json::from_str(line) {
        Ok(Value::String(text)) => Document { text, id: None },
        Ok(Value::Object(mut map)) => match map.remove("text") {
            Some(Value::String(text)) => Document {
                text,
                id: map.remove("id"),
            },
            _ => plain(),
        },
        _ => plain(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_texts_json_strings_or_objects() {
        for (line, text, id) in [
            ("a plain line", "a plain line", None),
            ("\"a \\\"quoted\\\" one\"", "a \"quoted\" one", None),
            ("{\"text\": \"x\", \"id\": 7}", "x", Some(json!(7))),
            ("{\"other\": 1}", "{\"other\": 1}", None),
            ("12", "12", None),
        ] {
            let actual = document(line);
            assert_eq!((actual.text.as_str(), actual.id), (text, id));
        }
    }
}
