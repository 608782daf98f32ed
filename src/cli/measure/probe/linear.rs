//! `mlx probe train`: measures how well a classifier can predict a label from each layer.

use std::path::PathBuf;

use inference_probe::folds::{encode_labels, grouped, stratified};
use inference_probe::linear::{ProbeOptions, distinct_rows, doubts, probe};
use inference_probe::logistic::LogisticOptions;
use inference_probe::report::Analysis;

use super::{ActivationArgs, Extracted, OutputArgs, failed, put};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// The most frequent reason why a probe finds nothing.
const HINT: &str = "a causal model's state knows nothing of what comes after its position";

/// Train a linear classifier on each layer, and test it on other texts
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    activations: ActivationArgs,
    /// The texts from which the hidden states were extracted
    #[arg(long, short, value_name = "FILE")]
    stimuli: PathBuf,
    /// The field of the texts that the classifier predicts
    #[arg(long, value_name = "FIELD")]
    label: String,
    /// `random`: folds with equal label frequencies. FIELD-heldout: no value of that field is in
    /// both training and test texts
    #[arg(long, value_name = "HOW", default_value = "random")]
    split: String,
    /// Number of folds
    #[arg(long, value_name = "N", default_value_t = 5)]
    folds: usize,
    /// Seed for dividing the texts into folds
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The inverse of the L2 penalty's strength
    #[arg(long, value_name = "C", default_value_t = 1.0)]
    c: f64,
    /// Number of repetitions with shuffled labels
    #[arg(long, value_name = "N", default_value_t = 5)]
    controls: usize,
    #[command(flatten)]
    output: OutputArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    if !(args.c > 0.0 && args.c.is_finite()) {
        return Err(Failure::usage("--c must be a positive number"));
    }
    let held_out = match args.split.as_str() {
        "random" => None,
        split => Some(split.strip_suffix("-heldout").ok_or_else(|| {
            Failure::usage(format!(
                "--split `{split}` is neither random nor FIELD-heldout"
            ))
        })?),
    };
    let extracted = Extracted::read(&args.activations.activations)?;
    let names = extracted.labels(&args.stimuli, &args.label)?;
    let (classes, labels) = encode_labels(&names);
    let folds = match held_out {
        None => stratified(&labels, args.folds, args.seed),
        Some(field) => {
            let (_, groups) = encode_labels(&extracted.labels(&args.stimuli, field)?);
            grouped(&labels, &groups, args.folds, args.seed)
        }
    }
    .map_err(failed)?;
    let options = ProbeOptions {
        logistic: LogisticOptions {
            c: args.c,
            ..LogisticOptions::default()
        },
        controls: args.controls,
    };
    let mut rows = vec![
        ["layer", "accuracy", "control", "selectivity", "majority"]
            .map(String::from)
            .to_vec(),
    ];
    let mut layers = Vec::new();
    let mut distinct = usize::MAX;
    for layer in 0..extracted.activations.layers() {
        let states = extracted.activations.layer(layer);
        distinct = distinct.min(distinct_rows(&states));
        let result = probe(&states, &labels, &folds, &options).map_err(failed)?;
        rows.push(vec![
            layer.to_string(),
            format!("{:.3}", result.accuracy),
            format!("{:.3}", result.control),
            format!("{:.3}", result.selectivity),
            format!("{:.3}", result.majority),
        ]);
        if !result.converged {
            console.warn(&format!(
                "layer {layer}: a regression ended by its limit of {} steps",
                options.logistic.max_iterations
            ));
        }
        layers.push(result);
    }
    let inputs = extracted.inputs();
    for doubt in doubts(&layers, inputs.shape[0], distinct) {
        console.warn(&format!("warning: {doubt}; {HINT}"));
    }
    let analysis = Analysis::Linear {
        inputs,
        label: args.label.clone(),
        classes,
        split: args.split.clone(),
        layers,
        distinct,
    };
    put(&analysis, &args.output, &rows, console)
}
