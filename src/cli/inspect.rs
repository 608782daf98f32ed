//! `mlx inspect M`: what a model is.

use std::path::Path;

use inference::{DiscoveredModel, ModelInfo};
use serde_json::{Map, Value, json};

use super::console::{Console, bytes};
use super::failure::{Failure, chain};
use super::load::{LoadArgs, choose_backend, find_model, load_with};
use super::models::{describe, format_name, quantization, type_name};

/// Show what a model is: its files, architecture, sizes and quantization
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// A directory, a .gguf file, a known name, or owner/name on the Hugging Face Hub
    #[arg(value_name = "MODEL")]
    model: String,
    /// Only what the files say, without loading the model
    #[arg(long)]
    no_load: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let backend = match args.no_load {
        true => None,
        false => Some(choose_backend(args.load.backend.as_deref())?),
    };
    let path = find_model(Some(&args.model), console)?;
    let files = discovered(&path);
    let loaded = match backend {
        Some(backend) => Some(load_with(backend, &path, &args.load, console)?),
        None => None,
    };
    let files = match (files, &loaded) {
        (Ok(files), _) => Some(files),
        // The backend could read what discovery could not.
        (Err(e), Some(_)) => {
            tracing::info!("discovery: {}", chain(&e));
            None
        }
        (Err(e), None) => return Err(e.into()),
    };
    let info = loaded
        .as_ref()
        .map(|loaded| (loaded.backend.name(), loaded.model.info()));
    print(&path, files.as_ref(), info, args.json, console)
}

/// What discovery says about exactly this model.
fn discovered(path: &Path) -> inference::Result<DiscoveredModel> {
    let no_model = || {
        inference::Error::new(
            inference::ErrorKind::InvalidModel,
            "no model here: expected a .gguf file, or a directory with config.json and .safetensors files",
        )
        .with_path(path)
    };
    // A model is the first thing found at its own path; anything else lies below it.
    match inference::discover(path)?.next() {
        Some(Ok(model)) if model.path == path => Ok(model),
        Some(Err(e))
            if e.path()
                .is_some_and(|at| at == path || at.parent() == Some(path)) =>
        {
            Err(e)
        }
        _ => Err(no_model()),
    }
}

fn print(
    path: &Path,
    files: Option<&DiscoveredModel>,
    loaded: Option<(&str, ModelInfo)>,
    as_json: bool,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    if as_json {
        let mut object = match files.map(describe) {
            Some(Value::Object(object)) => object,
            _ => Map::new(),
        };
        object.insert("path".into(), json!(path.to_string_lossy()));
        if let Some((backend, info)) = loaded {
            object.insert("backend".into(), json!(backend));
            object.insert("info".into(), json!(info));
        }
        return console.json(&object);
    }
    let mut rows = vec![("path", path.display().to_string())];
    if let Some(files) = files {
        rows.push(("model type", type_name(files)));
        rows.push(("format", format_name(files.format).into()));
        rows.push(("quantization", quantization(files)));
        rows.push((
            "files",
            format!("{} ({})", files.num_files, bytes(files.bytes)),
        ));
    }
    if let Some((backend, info)) = loaded {
        rows.push(("backend", format!("{backend} ({})", info.device)));
        rows.push(("architecture", info.architecture.clone()));
        rows.push((
            "parameters",
            format!("{:.1} M", info.parameters as f64 / 1e6),
        ));
        rows.push(("weights in memory", bytes(info.weight_bytes)));
        rows.push(("layers", info.num_layers.to_string()));
        rows.push(("hidden size", info.hidden_size.to_string()));
        let heads = format!(
            "{}, {} for keys and values, of {}",
            info.num_heads, info.num_kv_heads, info.head_dim
        );
        rows.push(("heads", heads));
        rows.push(("vocabulary", info.vocab_size.to_string()));
        if let Some(length) = info.context_length {
            rows.push(("context", format!("{length} tokens")));
        }
        if let (Some(bits), Some(group)) = (info.quantization_bits, info.quantization_group) {
            rows.push(("weights", format!("{bits} bits, groups of {group}")));
        }
        if let Some(compute) = info.compute_type {
            rows.push(("computes in", compute.to_string()));
        }
        let template = if info.has_chat_template { "yes" } else { "no" };
        rows.push(("chat template", template.into()));
    }
    for (name, value) in rows {
        console.line(&format!("{name:<18} {value}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::mock::{Mock, Streams};
    use super::*;
    use inference::TextModel;

    #[test]
    fn info_is_printed_for_people_and_programs() {
        let info = Mock::instruct(&[]).info();
        let mut streams = Streams::new("");
        let path = Path::new("somewhere/m.gguf");
        print(
            path,
            None,
            Some(("cpu", info.clone())),
            false,
            &mut streams.console(),
        )
        .unwrap();
        let out = streams.out();
        assert!(out.contains("architecture       mock"), "{out}");
        assert!(out.contains("chat template      yes"), "{out}");
        let mut streams = Streams::new("");
        print(
            path,
            None,
            Some(("cpu", info)),
            true,
            &mut streams.console(),
        )
        .unwrap();
        let value: Value = serde_json::from_str(&streams.out()).unwrap();
        assert_eq!(value["path"], "somewhere/m.gguf");
        assert_eq!(value["backend"], "cpu");
        assert_eq!(value["info"]["architecture"], "mock");
    }

    #[test]
    fn what_is_no_model_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = discovered(dir.path()).unwrap_err();
        assert!(error.to_string().contains("config.json"), "{error}");
        let file = dir.path().join("x.gguf");
        std::fs::write(&file, b"GGUF").unwrap();
        let error = discovered(&file).unwrap_err();
        assert!(chain(&error).contains("x.gguf"), "{error}");
    }
}
