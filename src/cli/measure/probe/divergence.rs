//! `mlx probe divergence`: measures how predictions differ between layers, and between groups of
//! texts.

use std::path::PathBuf;

use inference::{AttentionInspector, CancelToken, Interrupt};
use inference_probe::divergence::{MeanDistribution, jensen_shannon, mean_distance};
use inference_probe::report::Analysis;

use super::extract::identity_of;
use super::{ActivationArgs, Extracted, OutputArgs, failed, put};
use crate::cli::measure::trace::probabilities;
use crate::cli::options::load::{LoadArgs, ModelArgs, load};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Compare what each layer would predict (logit lens), in nats of Jensen-Shannon divergence
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    activations: ActivationArgs,
    /// The texts from which the hidden states were extracted, for --group FIELD=VALUE
    #[arg(long, short, value_name = "FILE")]
    stimuli: Option<PathBuf>,
    /// Also compare two groups of texts: `correct` (as `extract --generate` found), or FIELD=VALUE
    /// and the others
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    load: LoadArgs,
}

/// Whether each row is in the group; `None` for a row that is in neither group.
fn group(args: &Args, extracted: &Extracted) -> Result<Option<Vec<Option<bool>>>, Failure> {
    let Some(group) = &args.group else {
        return Ok(None);
    };
    if group == "correct" {
        let Some(correctness) = &extracted.metadata.correctness else {
            return Err(Failure::failed(format!(
                "{} does not say which texts were continued as expected: extract with --generate",
                extracted.path.display()
            )));
        };
        return Ok(Some(
            correctness.iter().map(|c| c.map(|c| c.contains)).collect(),
        ));
    }
    let Some((field, value)) = group.split_once('=') else {
        return Err(Failure::usage(format!(
            "--group `{group}` is neither `correct` nor FIELD=VALUE"
        )));
    };
    let Some(stimuli) = &args.stimuli else {
        return Err(Failure::usage("--group FIELD=VALUE needs --stimuli"));
    };
    let labels = extracted.labels(stimuli, field)?;
    Ok(Some(labels.iter().map(|l| Some(l == value)).collect()))
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let extracted = Extracted::read(&args.activations.activations)?;
    let group = group(args, &extracted)?;
    if let Some(group) = &group {
        let inside = group.iter().filter(|g| **g == Some(true)).count();
        let outside = group.iter().filter(|g| **g == Some(false)).count();
        if inside == 0 || outside == 0 {
            return Err(Failure::failed(format!(
                "the groups have {inside} and {outside} texts; both need at least one"
            )));
        }
    }
    let loaded = load(&args.model, &args.load, console)?;
    let Some(inspector) = loaded.model.as_attention_inspector() else {
        return Err(Failure::failed(
            "this backend does not show hidden states; `mlx backends` shows the others",
        ));
    };
    let [_, _, width] = extracted.activations.shape();
    if width != loaded.model.info().hidden_size {
        return Err(Failure::failed(format!(
            "the states have {width} elements, but those of the model have {}",
            loaded.model.info().hidden_size
        )));
    }
    if identity_of(&loaded.path, &args.load)? != extracted.metadata.model_identity {
        return Err(Failure::failed(format!(
            "{} has states of the model {}, and {} is another model, another version of it, or has \
             another adapter on it; extract them again",
            extracted.path.display(),
            extracted.metadata.model,
            loaded.path.display()
        )));
    }
    let analysis = compute(args, inspector, &extracted, group.as_deref())?;
    let Analysis::Divergence {
        consecutive,
        from_last,
        groups,
        ..
    } = &analysis
    else {
        return Err(Failure::failed("no divergence was computed"));
    };
    let mut rows = vec![
        ["layer", "to the next", "to the last", "between groups"]
            .map(String::from)
            .to_vec(),
    ];
    let shown = |values: &[f64], i: usize| {
        values
            .get(i)
            .map_or_else(String::new, |v| format!("{v:.4}"))
    };
    for i in 0..from_last.len() {
        rows.push(vec![
            i.to_string(),
            shown(consecutive, i),
            shown(from_last, i),
            shown(groups, i),
        ]);
    }
    put(&analysis, &args.output, &rows, console)
}

fn compute(
    args: &Args,
    inspector: &dyn AttentionInspector,
    extracted: &Extracted,
    group: Option<&[Option<bool>]>,
) -> Result<Analysis, Failure> {
    let [rows, layers, _] = extracted.activations.shape();
    let token = CancelToken::new();
    let interrupt = Interrupt::new().with_cancel(token.clone());
    let _guard = cancel_on_interrupt(&token);
    let mut consecutive = vec![0.0; layers - 1];
    let mut from_last = vec![0.0; layers];
    let mut means: Vec<[MeanDistribution; 2]> = vec![Default::default(); layers];
    for row in 0..rows {
        interrupt.check()?;
        let states: Vec<f32> = (0..layers)
            .flat_map(|layer| extracted.activations.state(row, layer))
            .copied()
            .collect();
        let predictions: Vec<Vec<f64>> = inspector
            .unembed(&states)?
            .iter()
            .enumerate()
            .map(|(i, logits)| probabilities(logits, &format!("of row {row}, layer {i}")))
            .collect::<Result<_, _>>()?;
        let last = predictions.len().saturating_sub(1);
        for layer in 0..predictions.len() {
            let to = |other: usize| {
                jensen_shannon(&predictions[layer], &predictions[other]).map_err(failed)
            };
            if layer < last {
                consecutive[layer] += to(layer + 1)? / rows as f64;
            }
            from_last[layer] += to(last)? / rows as f64;
            if let Some(inside) = group.and_then(|g| g[row]) {
                means[layer][usize::from(inside)]
                    .add(&predictions[layer])
                    .map_err(failed)?;
            }
        }
    }
    let mut groups = Vec::new();
    let mut distances = Vec::new();
    if let Some(group) = group {
        for pair in &means {
            if let [Some(a), Some(b)] = [pair[0].mean(), pair[1].mean()] {
                groups.push(jensen_shannon(&a, &b).map_err(failed)?);
            }
        }
        let grouped_rows: Vec<usize> = (0..rows).filter(|row| group[*row].is_some()).collect();
        let inside: Vec<bool> = grouped_rows
            .iter()
            .map(|row| group[*row] == Some(true))
            .collect();
        for layer in 0..layers {
            let states = extracted
                .activations
                .layer(layer)
                .select_rows(&grouped_rows);
            distances.push(mean_distance(&states, &inside).map_err(failed)?);
        }
    }
    Ok(Analysis::Divergence {
        inputs: extracted.inputs(),
        consecutive,
        from_last,
        groups,
        means: distances,
        group: args.group.clone(),
    })
}
