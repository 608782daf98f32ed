//! `mlx embed`: a vector for each of many texts.

use inference::{CancelToken, Interrupt, Pooling, Prompt};
use serde_json::json;

use super::console::Console;
use super::failure::Failure;
use super::interrupt::cancel_on_interrupt;
use super::load::{LoadArgs, ModelArgs, load};
use super::records::InputArgs;

/// Print a vector for each of many texts, from the model's last hidden states
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    input: InputArgs,
    /// How the states of a text become one: mean or last
    #[arg(long, value_name = "HOW", default_value = "mean", value_parser = pooling)]
    pooling: Pooling,
    /// Leave the vectors' lengths as they are
    #[arg(long)]
    no_normalize: bool,
    #[command(flatten)]
    load: LoadArgs,
}

fn pooling(text: &str) -> Result<Pooling, String> {
    text.parse().map_err(|_| "must be mean or last".to_owned())
}

/// Texts in one call.
const TOGETHER: usize = 64;

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let records = args.input.read(console)?;
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let embedder = model.as_embedding_model().ok_or_else(|| {
        Failure::failed("this backend makes no embeddings; `mlx backends` shows the others")
    })?;
    let cancel = CancelToken::new();
    let interrupt = Interrupt::new().with_cancel(cancel.clone());
    let _guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    for part in records.chunks(TOGETHER) {
        let prompts = part
            .iter()
            .map(|record| record.ask.prompt(model))
            .collect::<inference::Result<Vec<Prompt>>>()?;
        let vectors =
            embedder.embed_until(&prompts, args.pooling, !args.no_normalize, &interrupt)?;
        for (record, vector) in part.iter().zip(vectors) {
            if vector.iter().any(|v| !v.is_finite()) {
                return Err(Failure::failed(format!(
                    "the vector of text {} holds what is no number",
                    record.index
                )));
            }
            let mut value = json!({"index": record.index});
            if let Some(id) = &record.id {
                value["id"] = id.clone();
            }
            value["embedding"] = vector.into();
            console.json(&value)?;
        }
    }
    Ok(())
}
