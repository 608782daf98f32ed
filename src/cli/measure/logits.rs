//! `mlx logits`: prints the logits of the next token.

use inference::{Interrupt, Prompt, Steering, TextModel};

use crate::cli::options::load::{LoadArgs, ModelArgs, load};
use crate::cli::options::prompt::RawPromptArgs;
use crate::cli::options::steer::{self, SteerArgs};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Print the logits after a prompt as JSON: {tokens, shape, logits}
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: RawPromptArgs,
    /// Print the logits of all positions instead of the last one
    #[arg(long)]
    all: bool,
    /// Write the logits to this file instead of printing them, as float32 `[rows, vocabulary]` in
    /// numpy's format (`.npy`)
    #[cfg(feature = "probe")]
    #[arg(long, short, value_name = "FILE")]
    output: Option<std::path::PathBuf>,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    pub load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let prompt = args.prompt.read(console)?;
    let steering = args.steer.read()?;
    let steering = steering.as_ref();
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    #[cfg(feature = "probe")]
    if let Some(path) = &args.output {
        let output = steer::logits(model, &prompt, args.all, steering, &Interrupt::new())?;
        return inference_probe::npy::write(path, &output.shape, &output.logits)
            .map_err(|e| Failure::failed(e.to_string()));
    }
    print(model, &prompt, (args.all, steering), console)
}

fn print(
    model: &dyn TextModel,
    prompt: &Prompt,
    (all, steering): (bool, Option<&Steering>),
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let output = steer::logits(model, prompt, all, steering, &Interrupt::new())?;
    // JSON has no NaN. Printing null instead would hide a broken model.
    if let Some(at) = output.logits.iter().position(|x| !x.is_finite()) {
        let vocab = output.shape.last().copied().unwrap_or(1).max(1);
        return Err(Failure::failed(format!(
            "the logit of token {} in row {} is {}, which is not a number JSON can hold",
            at % vocab,
            at / vocab,
            output.logits[at]
        )));
    }
    console.json(&output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::{self, Streams};
    use inference_conformance::scripted::Scripted;

    fn printed(model: &Scripted, all: bool) -> Result<String, Failure> {
        let mut streams = Streams::new("");
        let prompt = Prompt::Tokens(vec![1, 2]);
        print(model, &prompt, (all, None), &mut streams.console())?;
        Ok(streams.out())
    }

    #[test]
    fn the_object_has_tokens_shape_and_logits() {
        let model = mock::base(&[]).with_logits(|_| vec![0.5, -1.25, 3.0]);
        let out = printed(&model, false).unwrap();
        assert_eq!(
            out,
            "{\"tokens\":[1,2],\"shape\":[1,3],\"logits\":[0.5,-1.25,3.0]}\n"
        );
        let value: serde_json::Value =
            serde_json::from_str(&printed(&model, true).unwrap()).unwrap();
        assert_eq!(value["shape"], serde_json::json!([2, 3]));
        assert_eq!(value["logits"].as_array().unwrap().len(), 6);
    }

    #[test]
    fn what_json_cannot_hold_is_an_error_that_says_where() {
        let model = mock::base(&[]).with_logits(|_| vec![0.5, f32::NAN, 3.0]);
        let text = printed(&model, false).unwrap_err().report().unwrap();
        assert!(text.contains("token 1 in row 0 is NaN"), "{text}");
    }

    #[test]
    fn a_backend_without_logits_is_a_clear_error() {
        let text = printed(&mock::base(&[]).opaque(), false)
            .unwrap_err()
            .report()
            .unwrap();
        assert!(text.contains("no logits"), "{text}");
    }
}
