//! `mlx trace --patch`: activation patching. A state of the prompt replaces the corresponding state
//! of a corrupted prompt, for one layer and position at a time. If a state restores the answer, the
//! state carries the answer.

use std::path::PathBuf;
use std::sync::Arc;

use inference::{
    Edit, EditOperation, EditPositions, Hook, Interrupt, Numbers, Prompt, SteerableModel, Steering,
    TextModel, TokenModel,
};
use inference_probe::chart::heat_map;
use inference_probe::files::write_whole;
use serde::Serialize;

use crate::cli::measure::trace::{Layers, first_token};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Flags of activation patching.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Patching")]
pub struct PatchArgs {
    /// A corrupted prompt with as many tokens. The prompt's states are patched into its computation
    /// at each layer and position; the table shows how much of the answer each state restores
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        conflicts_with_all = ["activations", "attention", "save", "steer", "top"]
    )]
    pub patch: Option<String>,
    /// The answer of the corrupted prompt: the first token of this text [default: the model's most
    /// likely token]
    #[arg(
        long,
        value_name = "TEXT",
        requires = "patch",
        allow_hyphen_values = true
    )]
    against: Option<String>,
    /// The hook in a layer: resid_pre, resid_mid, resid_post, attn_out, mlp_out, z or mlp_post
    #[arg(long, value_name = "HOOK", requires = "patch", default_value = "resid_post", value_parser = hook)]
    at: Hook,
    /// Write the table as an SVG image to this file; without --patch, the image shows how the
    /// answer develops
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

pub fn hook(name: &str) -> Result<Hook, String> {
    let matching = Hook::ALL.into_iter().find(|hook| hook.name() == name);
    matching.ok_or_else(|| {
        let all: Vec<_> = Hook::ALL.iter().map(|hook| hook.name()).collect();
        format!("is not one of {}", all.join(", "))
    })
}

#[derive(Debug, Serialize)]
struct Answer {
    token: u32,
    text: String,
}

#[derive(Debug, Serialize)]
struct Row {
    layer: usize,
    /// For each position, the restored fraction of the difference: 0 means as in the corrupted
    /// prompt, 1 means as in the original prompt.
    recovered: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    hook: Hook,
    tokens: Vec<u32>,
    pieces: Vec<String>,
    corrupted_tokens: Vec<u32>,
    corrupted_pieces: Vec<String>,
    answer: Answer,
    against: Answer,
    /// The answer's logit minus the logit of `against`.
    difference: f32,
    corrupted_difference: f32,
    layers: Vec<Row>,
}

/// The arguments of `--patch`.
pub struct Asked<'a> {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// The answer, if one is named.
    pub answer: Option<&'a str>,
    /// The layers to show.
    pub layers: Option<&'a Layers>,
    /// Whether to print JSON.
    pub json: bool,
}

/// Runs `mlx trace --patch`.
pub fn run(
    args: &PatchArgs,
    corrupted: &str,
    asked: &Asked<'_>,
    model: &dyn TextModel,
    interrupt: &Interrupt,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let (Some(steerable), Some(tokens)) = (model.as_steerable(), model.as_token_model()) else {
        return Err(Failure::failed(
            "this backend takes no edits; `mlx backends` shows which do",
        ));
    };
    let mut named = |text: Option<&str>, flag| {
        text.map(|text| first_token(tokens, text, flag, console))
            .transpose()
    };
    let answers = (
        named(asked.answer, "--for")?,
        named(args.against.as_deref(), "--against")?,
    );
    let models = (steerable, tokens);
    let report = report(args, (corrupted, answers), asked, models, interrupt)?;
    if let Some(path) = &args.plot {
        let rows: Vec<Vec<f64>> = (report.layers.iter().map(|r| r.recovered.clone())).collect();
        let title = format!(
            "{}: {:?} brought back, by layer (down) and position",
            report.hook, report.answer.text
        );
        write_whole(path, heat_map(&title, &rows, 0.0, 1.0).as_bytes())
            .map_err(|e| Failure::failed(e.to_string()))?;
    }
    if asked.json {
        return console.json(&report);
    }
    print(&report, console)
}

fn report(
    args: &PatchArgs,
    (corrupted, (answer, against)): (&str, (Option<u32>, Option<u32>)),
    asked: &Asked<'_>,
    (model, tokens): (&dyn SteerableModel, &dyn TokenModel),
    interrupt: &Interrupt,
) -> Result<Report, Failure> {
    let clean = &asked.tokens;
    let other = tokens.encode(corrupted, true)?;
    if other.len() != clean.len() {
        return Err(Failure::usage(format!(
            "--patch has {} tokens and the prompt {}; positions must stand for each other, so give \
             prompts of as many",
            other.len(),
            clean.len()
        )));
    }
    let shape = model.steering_shape()?;
    let layers: Vec<usize> = (0..shape.layers.len())
        .filter(|layer| {
            asked
                .layers
                .is_none_or(|asked_layers| asked_layers.has(*layer))
        })
        .collect();
    let places: Vec<(usize, Hook)> = layers.iter().map(|layer| (*layer, args.at)).collect();
    let (good, bad) = (Prompt::Tokens(clean.clone()), Prompt::Tokens(other.clone()));
    let states = model.hook_states(&good, &places, interrupt)?;
    let good = tokens.logits(&good, false, interrupt)?.logits;
    let plain = tokens.logits(&bad, false, interrupt)?.logits;
    let answer = answer.unwrap_or_else(|| most_likely(&good));
    let against = against.unwrap_or_else(|| most_likely(&plain));
    if answer == against {
        return Err(Failure::usage(format!(
            "both prompts are answered with {:?}; name answers with --for and --against",
            piece(tokens, answer)
        )));
    }
    let difference = |logits: &[f32]| {
        let of = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NAN);
        of(answer) - of(against)
    };
    let (clean_difference, none) = (difference(&good), difference(&plain));
    let span = f64::from(clean_difference - none);
    if !span.is_finite() || span == 0.0 {
        return Err(Failure::failed(
            "both prompts have the same difference of logits; there is nothing to bring back",
        ));
    }
    let mut rows = Vec::with_capacity(states.len());
    for states in &states {
        let mut recovered = Vec::with_capacity(clean.len());
        for (position, state) in states.rows().enumerate() {
            let edit = Edit {
                layers: Numbers::List(vec![states.layer]),
                hook: states.hook,
                positions: EditPositions::At(Numbers::List(vec![position])),
                units: None,
                operation: EditOperation::Replace(Arc::from(state)),
            };
            let steering = Steering::new(vec![edit])?;
            let logits = model.steered_logits(&bad, false, &steering, interrupt)?;
            let part = f64::from(difference(&logits.logits) - none) / span;
            recovered.push((part * 1e4).round() / 1e4);
        }
        rows.push(Row {
            layer: states.layer,
            recovered,
        });
    }
    let named = |token: u32| Answer {
        token,
        text: piece(tokens, token),
    };
    let pieces = |ids: &[u32]| ids.iter().map(|id| piece(tokens, *id)).collect();
    Ok(Report {
        hook: args.at,
        pieces: pieces(clean),
        corrupted_pieces: pieces(&other),
        tokens: clean.clone(),
        corrupted_tokens: other,
        answer: named(answer),
        against: named(against),
        difference: clean_difference,
        corrupted_difference: none,
        layers: rows,
    })
}

/// The token with the greatest logit.
fn most_likely(logits: &[f32]) -> u32 {
    let best = (0u32..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(id, _)| id)
}

fn piece(tokens: &dyn TokenModel, id: u32) -> String {
    tokens.decode(&[id]).unwrap_or_default()
}

fn print(report: &Report, console: &mut Console<'_>) -> Result<(), Failure> {
    console.line(&format!(
        "{:?} less {:?}: {:.3}, corrupted {:.3}",
        report.answer.text, report.against.text, report.difference, report.corrupted_difference
    ))?;
    let names = report.pieces.iter().zip(&report.corrupted_pieces);
    for (at, (token, other)) in names.enumerate() {
        let changed = match token == other {
            true => String::new(),
            false => format!(" for {other:?}"),
        };
        console.line(&format!("{at:>4}  {token:?}{changed}"))?;
    }
    let head: Vec<String> = (0..report.tokens.len())
        .map(|at| format!("{at:>6}"))
        .collect();
    console.line(&format!("layer{}", head.concat()))?;
    for row in &report.layers {
        let cells: Vec<String> = row.recovered.iter().map(|v| format!("{v:>6.2}")).collect();
        console.line(&format!("{:>5}{}", row.layer, cells.concat()))?;
    }
    Ok(())
}
