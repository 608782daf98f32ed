//! `mlx probe cca` and `mlx probe rsa`: compare layers.

use std::path::PathBuf;

use inference_probe::Matrix;
use inference_probe::cca::{CcaOptions, Components, correlations, held_out, one_hot};
use inference_probe::folds::{encode_labels, stratified};
use inference_probe::report::Analysis;
use inference_probe::rsa::{Metric, agreement, similarities};

use super::{ActivationArgs, Extracted, OutputArgs, failed, put};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Compare layers by canonical correlations, with each other and with a label
#[derive(Debug, Clone, clap::Args)]
pub struct CcaArgs {
    #[command(flatten)]
    activations: ActivationArgs,
    /// The texts from which the hidden states were extracted, for --label
    #[arg(long, short, value_name = "FILE", requires = "label")]
    stimuli: Option<PathBuf>,
    /// A field of the texts, with which to correlate each layer
    #[arg(long, value_name = "FIELD", requires = "stimuli")]
    label: Option<String>,
    /// Number of correlations, the largest first
    #[arg(long, value_name = "N", default_value_t = 10)]
    components: usize,
    /// The ridge term, as a fraction of the mean variance
    #[arg(long, value_name = "SHARE", default_value_t = 1e-4)]
    ridge: f64,
    /// Number of folds. Directions are computed without the fold on which they are tested
    #[arg(long, value_name = "N", default_value_t = 5)]
    folds: usize,
    /// Seed for dividing the texts into folds
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    output: OutputArgs,
}

/// Compare layers by which texts have similar states
#[derive(Debug, Clone, clap::Args)]
pub struct RsaArgs {
    #[command(flatten)]
    activations: ActivationArgs,
    /// The states of the same texts in another model, for the columns
    #[arg(long, value_name = "FILE.npy")]
    activations_b: Option<PathBuf>,
    /// correlation, cosine or euclidean
    #[arg(long, value_name = "METRIC", default_value = "correlation", value_parser = metric)]
    metric: Metric,
    #[command(flatten)]
    output: OutputArgs,
}

fn metric(text: &str) -> Result<Metric, String> {
    text.parse()
        .map_err(|e: inference_probe::Error| e.to_string())
}

fn table(matrix: &[Vec<f64>]) -> Vec<Vec<String>> {
    let first = matrix.first().map_or(0, Vec::len);
    let mut rows = vec![
        std::iter::once(String::from("layer"))
            .chain((0..first).map(|i| i.to_string()))
            .collect(),
    ];
    for (i, row) in matrix.iter().enumerate() {
        let values = row.iter().map(|v| format!("{v:.2}"));
        rows.push(std::iter::once(i.to_string()).chain(values).collect());
    }
    rows
}

/// Runs `mlx probe cca`.
pub fn run_cca(args: &CcaArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    if args.components == 0 || !(args.ridge >= 0.0 && args.ridge.is_finite()) {
        return Err(Failure::usage(
            "--components must be at least 1, and --ridge not negative",
        ));
    }
    let extracted = Extracted::read(&args.activations.activations)?;
    let options = CcaOptions {
        components: args.components,
        ridge: args.ridge,
    };
    let layers: Vec<Matrix> = (0..extracted.activations.layers())
        .map(|layer| extracted.activations.layer(layer))
        .collect();
    let label_correlations = match (&args.stimuli, &args.label) {
        (Some(stimuli), Some(label)) => {
            let (names, labels) = encode_labels(&extracted.labels(stimuli, label)?);
            let features = Components::from_rows(&one_hot(&labels, names.len())).map_err(failed)?;
            layers
                .iter()
                .map(|rows| correlations(&Components::from_rows(rows)?, &features, &options))
                .collect::<inference_probe::Result<_>>()
                .map_err(failed)?
        }
        _ => Vec::new(),
    };
    // With one label for all rows, stratified folds are plain folds.
    let folds = stratified(
        &vec![0; extracted.activations.rows()],
        args.folds,
        args.seed,
    )
    .map_err(failed)?;
    let mut matrix = vec![vec![0.0; layers.len()]; layers.len()];
    for fold in &folds {
        let components = layers
            .iter()
            .map(|rows| Components::from_rows(&rows.select_rows(&fold.train)))
            .collect::<inference_probe::Result<Vec<_>>>()
            .map_err(failed)?;
        for a in 0..layers.len() {
            for b in a..layers.len() {
                let sides = ((&components[a], &layers[a]), (&components[b], &layers[b]));
                let value = held_out(sides.0, sides.1, fold, &options).map_err(failed)?;
                matrix[a][b] += value / folds.len() as f64;
                matrix[b][a] = matrix[a][b];
            }
        }
    }
    let rows = table(&matrix);
    let analysis = Analysis::Cca {
        inputs: extracted.inputs(),
        label_correlations,
        label: args.label.clone(),
        matrix,
    };
    put(&analysis, &args.output, &rows, console)
}

/// Runs `mlx probe rsa`.
pub fn run_rsa(args: &RsaArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let a = Extracted::read(&args.activations.activations)?;
    let b = args
        .activations_b
        .as_deref()
        .map(Extracted::read)
        .transpose()?;
    let of = |extracted: &Extracted| {
        (0..extracted.activations.layers())
            .map(|layer| {
                similarities(&extracted.activations.layer(layer), args.metric).map_err(|e| {
                    Failure::failed(format!("{}: layer {layer}: {e}", extracted.path.display()))
                })
            })
            .collect::<Result<Vec<_>, _>>()
    };
    let mut inputs = a.inputs();
    let rows = of(&a)?;
    let columns = match &b {
        Some(b) => {
            let same = |x: &Extracted| {
                (
                    x.metadata.stimuli_sha256.clone(),
                    x.metadata.row_indices.clone(),
                )
            };
            if same(&a) != same(b) {
                return Err(Failure::failed(format!(
                    "{} and {} are not of the same texts",
                    a.path.display(),
                    b.path.display()
                )));
            }
            let more = b.inputs();
            inputs.activations.extend(more.activations);
            inputs.activations_sha256.extend(more.activations_sha256);
            of(b)?
        }
        None => rows.clone(),
    };
    let matrix = rows
        .iter()
        .map(|row| {
            columns
                .iter()
                .map(|column| agreement(row, column))
                .collect()
        })
        .collect::<inference_probe::Result<Vec<Vec<f64>>>>()
        .map_err(failed)?;
    let rows = table(&matrix);
    let analysis = Analysis::Rsa {
        inputs,
        metric: args.metric,
        matrix,
    };
    put(&analysis, &args.output, &rows, console)
}
