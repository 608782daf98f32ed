//! `chooser [--backend NAME] [MODEL [PROMPT]]`: without a model, lists the linked backends. With a
//! model, generates a reply.

use std::process::ExitCode;

use inference::{GenerateOptions, LoadOptions, Prompt};

// Backends register themselves when they are linked. The linker drops a crate to which no code
// refers, so each backend needs one line here.
use echo_backend as _;
use metal_backend as _;
use mlxlm_backend as _;

fn run(args: impl Iterator<Item = String>) -> Result<(), String> {
    let mut backend = None;
    let mut rest = Vec::new();
    let mut args = args;
    while let Some(arg) = args.next() {
        if arg == "--backend" {
            backend = Some(args.next().ok_or("--backend needs a name")?);
        } else if let Some(name) = arg.strip_prefix("--backend=") {
            backend = Some(name.to_owned());
        } else {
            rest.push(arg);
        }
    }
    let mut rest = rest.into_iter();
    let Some(path) = rest.next() else {
        for b in inference::backends() {
            match inference::availability(b.as_ref()) {
                Ok(()) => println!(
                    "{}\tavailable\t{}",
                    b.name(),
                    b.capabilities().names().join(",")
                ),
                Err(reason) => println!("{}\tnot available\t{reason}", b.name()),
            }
        }
        return Ok(());
    };
    let prompt = rest
        .next()
        .unwrap_or_else(|| String::from("Once upon a time"));
    let mut options = LoadOptions::new();
    options.backend = backend;
    let model = inference::load_model(path, &options).map_err(|e| e.to_string())?;
    let generate = GenerateOptions::new()
        .with_max_tokens(24)
        .with_ignore_eos(true);
    let stream = model
        .generate(&Prompt::from(prompt), &generate)
        .map_err(|e| e.to_string())?;
    let output = stream.collect_output().map_err(|e| e.to_string())?;
    println!(
        "{}\t{:?}\t{:?}",
        model.model_type(),
        output.tokens,
        output.text
    );
    Ok(())
}

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
