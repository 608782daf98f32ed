//! `mlx probe direction`: computes a steering vector from two sets of prompts.

use std::path::{Path, PathBuf};

use inference::{CancelToken, Hook, Interrupt, Prompt, SteerableModel, TokenModel};
use inference_probe::Matrix;
use inference_probe::direction::{Direction, Method, direction};
use inference_probe::files::write_whole;
use serde_json::json;

use super::failed;
use crate::cli::measure::trace::Layers;
use crate::cli::measure::trace::patch::hook;
use crate::cli::options::load::{LoadArgs, ModelArgs, load};
use crate::cli::terminal::bounded;
use crate::cli::terminal::bounded::MAX_INPUT;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Find a direction between the states of two sets of prompts, and write it as a file for --steer
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompts to steer towards, one per line
    #[arg(long, value_name = "FILE")]
    positive: PathBuf,
    /// Prompts to steer away from, one per line
    #[arg(long, value_name = "FILE")]
    negative: PathBuf,
    /// The layers in which to find a direction and to edit, such as `10-14`
    #[arg(long, value_name = "LIST")]
    layers: Layers,
    /// The hook in a layer: resid_pre, resid_mid, resid_post, attn_out, mlp_out, z or mlp_post
    #[arg(long, value_name = "HOOK", default_value = "resid_post", value_parser = hook)]
    at: Hook,
    /// `means`: difference of means; `probe`: weights of a logistic regression; `pca`: first
    /// principal component
    #[arg(long, value_name = "METHOD", default_value = "means", value_parser = method)]
    method: Method,
    /// Which state represents a prompt: that of its `last` token, or the `mean` of all tokens
    #[arg(long, value_name = "WHERE", default_value = "last", value_parser = position)]
    position: Position,
    /// The coefficient in the file
    #[arg(
        long,
        value_name = "C",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    coefficient: f32,
    /// The file to write for --steer; its vectors are written beside it, to a file that ends in
    /// .npy
    #[arg(long, short, value_name = "FILE.json")]
    output: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Position {
    Last,
    Mean,
}

fn method(name: &str) -> Result<Method, String> {
    match name {
        "means" => Ok(Method::Means),
        "probe" => Ok(Method::Probe),
        "pca" => Ok(Method::Pca),
        _ => Err(String::from("is not one of means, probe and pca")),
    }
}

fn position(name: &str) -> Result<Position, String> {
    match name {
        "last" => Ok(Position::Last),
        "mean" => Ok(Position::Mean),
        _ => Err(String::from("is not one of last and mean")),
    }
}

/// The non-empty lines of a file.
fn prompts(path: &Path) -> Result<Vec<String>, Failure> {
    let text = bounded::read_text(path, MAX_INPUT)
        .map_err(|e| Failure::failed(format!("cannot read {}: {e}", path.display())))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    Ok(lines.map(String::from).collect())
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let sets = [prompts(&args.positive)?, prompts(&args.negative)?];
    let vectors = args.output.with_extension("npy");
    if vectors == args.output {
        return Err(Failure::usage(
            "--output ends in .npy, which is for the vectors; give a name such as calm.json",
        ));
    }
    if !args.coefficient.is_finite() {
        return Err(Failure::usage("--coefficient must be finite"));
    }
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let (Some(steerable), Some(tokens)) = (model.as_steerable(), model.as_token_model()) else {
        return Err(Failure::failed(
            "this backend takes no edits; `mlx backends` shows which do",
        ));
    };
    let shape = steerable.steering_shape()?;
    args.layers.check("--layers", shape.layers.len())?;
    let layers: Vec<usize> = (0..shape.layers.len())
        .filter(|l| args.layers.has(*l))
        .collect();
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let interrupt = Interrupt::new().with_cancel(cancel);
    let mut states = Vec::new();
    for set in &sets {
        states.push(args.states(steerable, tokens, set, &layers, &interrupt)?);
    }
    let directions: Vec<Direction> = (states[0].iter().zip(&states[1]))
        .map(|(positive, negative)| direction(positive, negative, args.method))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    let width = directions
        .first()
        .map_or(0, |directions| directions.vector.len());
    if directions
        .iter()
        .any(|directions| directions.vector.len() != width)
    {
        return Err(Failure::usage(
            "the layers have states of different widths; name layers that are alike",
        ));
    }
    let values: Vec<f32> = (directions.iter().flat_map(|f| &f.vector))
        .map(|v| *v as f32)
        .collect();
    inference_probe::npy::write(&vectors, &[layers.len(), width], &values).map_err(failed)?;
    let name = vectors
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let edits: Vec<_> = (layers.iter().enumerate())
        .map(|(row, layer)| {
            json!({"layers": layer, "hook": args.at, "op": "add",
                   "vector": {"file": name, "row": row}, "coefficient": args.coefficient})
        })
        .collect();
    let text = format!("{}\n", json!({ "edits": edits }));
    write_whole(&args.output, text.as_bytes()).map_err(failed)?;
    for (layer, directions) in layers.iter().zip(&directions) {
        console.json(
            &json!({"layer": layer, "norm": directions.norm, "separated": directions.separated}),
        )?;
    }
    Ok(())
}

impl Args {
    /// The states of all prompts for each layer, `[prompts, width]`.
    fn states(
        &self,
        model: &dyn SteerableModel,
        tokens: &dyn TokenModel,
        prompts: &[String],
        layers: &[usize],
        interrupt: &Interrupt,
    ) -> Result<Vec<Matrix>, Failure> {
        let places: Vec<(usize, Hook)> = layers.iter().map(|layer| (*layer, self.at)).collect();
        let mut rows: Vec<Vec<Vec<f64>>> = vec![Vec::new(); layers.len()];
        for prompt in prompts {
            let ids = Prompt::Tokens(tokens.encode(prompt, true)?);
            let hooked = model.hook_states(&ids, &places, interrupt)?;
            for (layer_rows, states) in rows.iter_mut().zip(hooked) {
                let all: Vec<&[f32]> = states.rows().collect();
                let taken = match self.position {
                    Position::Last => all.len().saturating_sub(1)..all.len(),
                    Position::Mean => 0..all.len(),
                };
                let count = taken.len() as f64;
                let mut mean = vec![0.0; all.first().map_or(0, |row| row.len())];
                for row in &all[taken] {
                    for (sum, v) in mean.iter_mut().zip(*row) {
                        *sum += f64::from(*v) / count;
                    }
                }
                layer_rows.push(mean);
            }
        }
        let matrix = |rows: Vec<Vec<f64>>| {
            let width = rows.first().map_or(0, Vec::len);
            Matrix::from_row_iterator(rows.len(), width, rows.into_iter().flatten())
        };
        Ok(rows.into_iter().map(matrix).collect())
    }
}
