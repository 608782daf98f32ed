//! `mlx probe extract`: writes the hidden states of many texts to one `.npy` file.

use std::path::{Path, PathBuf};

use inference::{AttentionInspector, CancelToken, GenerateOptions, Interrupt, Prompt, TokenModel};
use inference_probe::activations::{Metadata, Writer, metadata_path};
use inference_probe::behavior::{Correctness, correctness};
use inference_probe::stimuli::{Stimuli, Stimulus};

use super::failed;
use super::spans::{tokens_in, tokens_with_spans};
use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// Write the hidden states of texts after every block: .npy, [texts, layers, width]
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The texts: a JSON array of objects with `prompt`, `text` or `prompts`, and labels
    #[arg(long, short, value_name = "FILE")]
    stimuli: PathBuf,
    /// Which text of `prompts` to use
    #[arg(long, value_name = "KEY")]
    template: Option<String>,
    /// Which token's state: the `last` token, the `mean` of all tokens, or the mean of the tokens
    /// of a FIELD whose value occurs once in the text
    #[arg(long, value_name = "WHERE", default_value = "last")]
    position: String,
    /// Use only the first N texts
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    limit: Option<usize>,
    /// Also write the input of the first block, as layer 0
    #[arg(long)]
    embedding: bool,
    /// Also generate N tokens after each text, and compare them with its `expected_surface`
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "16", value_parser = at_least_one)]
    generate: Option<usize>,
    /// The file to write; its metadata are written beside it, to FILE_metadata.json
    #[arg(long, short, value_name = "FILE.npy")]
    output: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
}

/// Number of texts per call of the engine.
const TOGETHER: usize = 32;

/// The prompt of a stimulus, and the positions whose states are averaged.
fn place(
    model: &dyn TokenModel,
    stimulus: &Stimulus,
    position: &str,
) -> Result<(Vec<u32>, Vec<usize>), Failure> {
    let nonempty = |ids: Vec<u32>| {
        if ids.is_empty() {
            return Err(Failure::failed(format!(
                "{:?} has no tokens",
                stimulus.text
            )));
        }
        Ok(ids)
    };
    match position {
        "last" => {
            let ids = nonempty(model.encode(&stimulus.text, true)?)?;
            let last = ids.len() - 1;
            Ok((ids, vec![last]))
        }
        "mean" => {
            let ids = nonempty(model.encode(&stimulus.text, true)?)?;
            let all = (0..ids.len()).collect();
            Ok((ids, all))
        }
        field => {
            let span = stimulus.span(field).map_err(failed)?;
            let (ids, spans) = tokens_with_spans(model, &stimulus.text)?;
            let span_tokens = tokens_in(&spans, &span);
            if span_tokens.is_empty() {
                return Err(Failure::failed(format!(
                    "no token of {:?} holds `{field}`",
                    stimulus.text
                )));
            }
            Ok((ids, span_tokens))
        }
    }
}

/// The mean of the states at several positions.
fn mean(states: &[f32], width: usize) -> Vec<f32> {
    let rows = states.len() / width;
    let mut sum = vec![0f64; width];
    for row in states.chunks_exact(width) {
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += f64::from(*value);
        }
    }
    sum.iter().map(|sum| (sum / rows as f64) as f32).collect()
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    if args.output.extension().is_none_or(|e| e != "npy") {
        return Err(Failure::usage("--output must end in .npy"));
    }
    let stimuli = Stimuli::read(&args.stimuli, args.template.as_deref()).map_err(failed)?;
    let count = args.limit.unwrap_or(usize::MAX).min(stimuli.list.len());
    let chosen = &stimuli.list[..count];
    if args.generate.is_some() && chosen.iter().all(|s| s.expected().is_none()) {
        return Err(Failure::failed(format!(
            "{}: no text has an `expected_surface` to compare a continuation with",
            args.stimuli.display()
        )));
    }
    let loaded = load(&args.model, &args.load, console)?;
    let model = loaded.model.as_ref();
    let (Some(tokens), Some(inspector)) = (model.as_token_model(), model.as_attention_inspector())
    else {
        return Err(Failure::failed(
            "this backend does not show hidden states; `mlx backends` shows the others",
        ));
    };
    let mut prompts = Vec::with_capacity(count);
    let mut positions = Vec::with_capacity(count);
    for (i, stimulus) in chosen.iter().enumerate() {
        let (ids, at) = place(tokens, stimulus, &args.position).map_err(|e| match e {
            Failure::Failed(e) => Failure::Failed(e.context(format!("stimulus {i}"))),
            e => e,
        })?;
        prompts.push(Prompt::Tokens(ids));
        positions.push(at);
    }
    let token = CancelToken::new();
    let interrupt = Interrupt::new().with_cancel(token.clone());
    let _guard = cancel_on_interrupt(&token);
    let correctness = args
        .generate
        .map(|n| behavior(inspector, chosen, &prompts, n, &token))
        .transpose()?;
    if let Some(all) = &correctness {
        let known: Vec<&Correctness> = all.iter().flatten().collect();
        console.note(&format!(
            "expected continuations: {} exact and {} contained of {}",
            known.iter().filter(|c| c.exact).count(),
            known.iter().filter(|c| c.contains).count(),
            known.len()
        ));
    }
    let mut writer: Option<Writer> = None;
    for (prompts, positions) in prompts.chunks(TOGETHER).zip(positions.chunks(TOGETHER)) {
        for states in inspector.hidden_states_many(prompts, positions, &interrupt)? {
            let width = states.hidden_size;
            let mut layers = Vec::with_capacity(states.blocks.len() + 1);
            if args.embedding {
                if states.embedding.is_empty() {
                    return Err(Failure::failed(
                        "this backend does not show what the first block reads; leave out --embedding",
                    ));
                }
                layers.push(mean(&states.embedding, width));
            }
            layers.extend(states.blocks.iter().map(|block| mean(block, width)));
            let writer = match &mut writer {
                Some(writer) => writer,
                None => {
                    let shape = [count, layers.len(), width];
                    writer.insert(Writer::begin(&args.output, shape).map_err(failed)?)
                }
            };
            writer.push(&layers).map_err(failed)?;
        }
    }
    let Some(writer) = writer else {
        return Err(Failure::failed("the backend showed no hidden states"));
    };
    let written = writer
        .finish(Metadata {
            activation_shape: [0; 3],
            model: loaded.path.display().to_string(),
            architecture: model.info().architecture.clone(),
            model_identity: identity_of(&loaded.path, &args.load)?,
            stimuli_sha256: stimuli.sha256.clone(),
            template: args.template.clone(),
            position: args.position.clone(),
            row_indices: (0..count).collect(),
            with_embedding: args.embedding,
            correctness,
            activations_sha256: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
        .map_err(failed)?;
    console.note(&format!(
        "{}: {:?}, with {}",
        args.output.display(),
        written.activation_shape,
        metadata_path(&args.output).display()
    ));
    Ok(())
}

/// An identifier of the model, which differs between models.
pub fn identity(model: &Path) -> Result<String, Failure> {
    inference_probe::files::identity(model).map_err(failed)
}

/// An identifier of the model with its adapter.
pub fn identity_of(model: &Path, load: &LoadArgs) -> Result<String, Failure> {
    let model_identity = identity(model)?;
    Ok(match &load.adapter_path {
        None => model_identity,
        Some(adapter) => format!("{model_identity}+{}", identity(adapter)?),
    })
}

/// Whether the model continues each stimulus as expected; `None` for a stimulus without an expected
/// text.
fn behavior(
    model: &dyn AttentionInspector,
    stimuli: &[Stimulus],
    prompts: &[Prompt],
    tokens: usize,
    cancel: &CancelToken,
) -> Result<Vec<Option<Correctness>>, Failure> {
    let options = GenerateOptions::new()
        .with_max_tokens(tokens)
        .with_cancel(cancel.clone());
    stimuli
        .iter()
        .zip(prompts)
        .map(|(stimulus, prompt)| {
            let Some(expected) = stimulus.expected() else {
                return Ok(None);
            };
            let output = model.generate(prompt, &options)?.collect_output()?;
            Ok(Some(correctness(&output.text, expected)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_averaged_in_float64() {
        assert_eq!(mean(&[1.0, 2.0, 3.0, 6.0], 2), [2.0, 4.0]);
        let tiny = [1e8f32, 1.0, -1e8, 1.0].map(|v| v);
        assert_eq!(mean(&tiny, 1), [0.5]);
    }
}
