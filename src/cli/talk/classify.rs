//! `mlx classify`: computes the most likely next token of many prompts together.

use inference::{GenerateOptions, Prompt, TextModel};
use serde_json::{Value, json};

use crate::cli::options::load::{LoadArgs, ModelArgs, load};
use crate::cli::options::records::InputArgs;
use crate::cli::options::steer::SteerArgs;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::{Failure, of_options};

/// Print the most likely next token of many prompts, or which of several labels comes next
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    input: InputArgs,
    /// Choose among these labels. Their first tokens must differ. Start with a space if the model
    /// would; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    label: Vec<String>,
    /// Print this number of most likely tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    top: usize,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// Number of prompts per call of the engine. Results are printed after each call.
const TOGETHER: usize = 64;

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let records = args.input.read(console)?;
    let options = GenerateOptions::default().with_steering(args.steer.read()?);
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let labels = args.labels(model)?;
    for part in records.chunks(TOGETHER) {
        let prompts = part
            .iter()
            .map(|record| record.ask.prompt(model))
            .collect::<inference::Result<Vec<Prompt>>>()?;
        let wants_logits = !labels.is_empty() || args.top > 0;
        let results = model
            .classify(&prompts, &options, wants_logits)
            .map_err(of_options)?;
        for (record, result) in part.iter().zip(results) {
            let mut value = json!({"index": record.index});
            if let Some(id) = &record.id {
                value["id"] = id.clone();
            }
            value["token"] = result.token.id.into();
            value["text"] = result.token.text.into();
            if let Some(logits) = result.logits {
                let log_total = log_sum_exp(&logits);
                if !labels.is_empty() {
                    add_labels(&mut value, &args.label, &labels, &logits);
                }
                if args.top > 0 {
                    value["top"] = top(model, &logits, log_total, args.top)?;
                }
            }
            console.json(&value)?;
        }
    }
    Ok(())
}

impl Args {
    /// The first token of each label.
    fn labels(&self, model: &dyn TextModel) -> Result<Vec<u32>, Failure> {
        if self.label.is_empty() {
            return Ok(Vec::new());
        }
        let tokens = model
            .as_token_model()
            .ok_or_else(|| Failure::failed("this backend has no tokenizer to read labels with"))?;
        let mut firsts = Vec::new();
        for label in &self.label {
            let ids = tokens.encode(label, false)?;
            let Some(&first) = ids.first() else {
                return Err(Failure::usage("--label is empty; give a text"));
            };
            if let Some(at) = firsts.iter().position(|&id| id == first) {
                return Err(Failure::usage(format!(
                    "the labels {:?} and {label:?} begin with the same token; choose others",
                    self.label[at]
                )));
            }
            firsts.push(first);
        }
        Ok(firsts)
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let greatest = f64::from(greatest);
    let total: f64 = logits
        .iter()
        .map(|&v| (f64::from(v) - greatest).exp())
        .sum();
    total.ln() + greatest
}

/// Adds the most likely label, and each label's probability among all labels.
fn add_labels(value: &mut Value, names: &[String], ids: &[u32], logits: &[f32]) {
    let label_logits: Vec<f32> = ids
        .iter()
        .map(|&id| {
            logits
                .get(id as usize)
                .copied()
                .unwrap_or(f32::NEG_INFINITY)
        })
        .collect();
    let total = log_sum_exp(&label_logits);
    let mut best = 0;
    let mut shares = serde_json::Map::new();
    for (i, (name, logit)) in names.iter().zip(&label_logits).enumerate() {
        if *logit > label_logits[best] {
            best = i;
        }
        shares.insert(name.clone(), (f64::from(*logit) - total).exp().into());
    }
    value["label"] = names[best].clone().into();
    value["labels"] = Value::Object(shares);
}

/// The `n` most likely tokens with their probabilities.
fn top(model: &dyn TextModel, logits: &[f32], log_total: f64, n: usize) -> Result<Value, Failure> {
    let mut order: Vec<u32> = (0..u32::try_from(logits.len()).unwrap_or(u32::MAX)).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    let tokens = model.as_token_model();
    order
        .into_iter()
        .take(n)
        .map(|id| {
            let text = tokens
                .and_then(|t| t.decode(&[id]).ok())
                .unwrap_or_default();
            let share = (f64::from(logits[id as usize]) - log_total).exp();
            Ok(json!({"token": id, "text": text, "probability": share}))
        })
        .collect::<Result<Vec<_>, Failure>>()
        .map(Value::Array)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_share_the_probability() {
        let mut value = json!({});
        let names = ["yes".to_owned(), "no".to_owned()];
        add_labels(&mut value, &names, &[2, 0], &[1.0, 9.0, 1.0 + 3f32.ln()]);
        assert_eq!(value["label"], "yes");
        assert!((value["labels"]["yes"].as_f64().unwrap() - 0.75).abs() < 1e-6);
        assert!((log_sum_exp(&[f32::NEG_INFINITY, 2.0]) - 2.0).abs() < 1e-9);
    }
}
