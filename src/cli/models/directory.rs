//! `mlx models DIR`: lists the models below a directory.

use std::path::PathBuf;

use inference::{DiscoveredModel, ModelFormat};
use serde_json::{Value, json};

use crate::cli::terminal::console::{Console, bytes, table};
use crate::cli::terminal::failure::{Failure, chain};

/// List the models below a directory
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The directory to search
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    print(inference::discover(&args.dir)?, args.json, console)
}

/// The facts about a model that are known without loading.
pub fn describe(model: &DiscoveredModel) -> Value {
    json!({
        "path": model.path.to_string_lossy(),
        "model_type": model.model_type,
        "format": model.format,
        "quantization": model.quantization,
        "quantization_name": model.quantization_name,
        "num_files": model.num_files,
        "bytes": model.bytes,
    })
}

/// The quantization in short form: `Q4_1`, `4-bit/32` (bits and group size), `mxfp4 4-bit/32` for a
/// mode other than affine, or `-`.
pub fn quantization(model: &DiscoveredModel) -> String {
    match (&model.quantization_name, &model.quantization) {
        (Some(name), _) if model.format == ModelFormat::Gguf => name.clone(),
        (Some(name), Some(q)) => format!("{name}/{}", q.group_size),
        (None, Some(q)) => format!("{}-bit/{}", q.bits, q.group_size),
        (Some(name), None) => name.clone(),
        (None, None) => "-".into(),
    }
}

/// The file format's name.
pub fn format_name(format: ModelFormat) -> &'static str {
    match format {
        ModelFormat::Safetensors => "safetensors",
        ModelFormat::Gguf => "gguf",
        _ => "other",
    }
}

/// The model's type, or `-` if its files do not name it.
pub fn type_name(model: &DiscoveredModel) -> String {
    if model.model_type.is_empty() {
        "-".into()
    } else {
        model.model_type.clone()
    }
}

fn print(
    models: impl Iterator<Item = inference::Result<DiscoveredModel>>,
    as_json: bool,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let mut listed = Vec::new();
    for model in models {
        match model {
            Ok(model) => listed.push(model),
            // One bad model must not hide the others.
            Err(e) => console.warn(&format!("warning: {}", chain(&e))),
        }
    }
    listed.sort_by(|a, b| a.path.cmp(&b.path));
    if as_json {
        let values: Vec<Value> = listed.iter().map(describe).collect();
        return console.json(&values);
    }
    if listed.is_empty() {
        console.note("no models found");
        return Ok(());
    }
    let mut rows = vec![
        ["TYPE", "FORMAT", "QUANTIZATION", "SIZE", "PATH"]
            .map(String::from)
            .to_vec(),
    ];
    rows.extend(listed.iter().map(|model| {
        vec![
            type_name(model),
            format_name(model.format).into(),
            quantization(model),
            bytes(model.bytes),
            model.path.display().to_string(),
        ]
    }));
    for line in table(&rows) {
        console.line(&line)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    /// A model directory that discovery accepts: a config and an empty, valid safetensors file.
    fn model_in(dir: &std::path::Path) {
        std::fs::create_dir_all(dir).unwrap();
        let config = r#"{"model_type":"llama","quantization":{"bits":4,"group_size":32}}"#;
        std::fs::write(dir.join("config.json"), config).unwrap();
        let mut weights = 2u64.to_le_bytes().to_vec();
        weights.extend(b"{}");
        std::fs::write(dir.join("model.safetensors"), weights).unwrap();
    }

    #[test]
    fn models_are_listed_and_bad_ones_warned_about() {
        let root = tempfile::tempdir().unwrap();
        model_in(&root.path().join("good"));
        std::fs::write(root.path().join("bad.gguf"), b"not a model").unwrap();
        let args = |json| Args {
            dir: root.path().into(),
            json,
        };

        let mut streams = Streams::new("");
        run(&args(false), &mut streams.console()).unwrap();
        assert!(
            streams.err().contains("warning: ") && streams.err().contains("bad.gguf"),
            "{}",
            streams.err()
        );
        let out = streams.out();
        assert_eq!(out.lines().count(), 2, "{out}");
        assert!(
            out.contains("llama") && out.contains("4-bit/32") && out.contains("good"),
            "{out}"
        );

        let mut streams = Streams::new("");
        run(&args(true), &mut streams.console()).unwrap();
        let value: Value = serde_json::from_str(&streams.out()).unwrap();
        assert_eq!(value[0]["model_type"], "llama");
        assert_eq!(value[0]["quantization"]["bits"], 4);
    }

    #[test]
    fn another_mode_of_four_bits_has_its_name() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("m");
        model_in(&dir);
        let named = |mode: &str| {
            let config = format!(
                r#"{{"model_type":"llama","quantization":{{"bits":4,"group_size":32{mode}}}}}"#
            );
            std::fs::write(dir.join("config.json"), config).unwrap();
            quantization(&inference::discover(&dir).unwrap().next().unwrap().unwrap())
        };
        assert_eq!(named(""), "4-bit/32");
        assert_eq!(named(r#","mode":"affine""#), "4-bit/32");
        assert_eq!(named(r#","mode":"mxfp4""#), "mxfp4 4-bit/32");
    }

    #[test]
    fn a_missing_directory_fails_and_an_empty_one_does_not() {
        let root = tempfile::tempdir().unwrap();
        let mut streams = Streams::new("");
        let args = Args {
            dir: root.path().join("gone"),
            json: false,
        };
        assert_eq!(
            run(&args, &mut streams.console()).unwrap_err().exit_code(),
            1
        );
        let args = Args {
            dir: root.path().into(),
            json: true,
        };
        run(&args, &mut streams.console()).unwrap();
        assert_eq!(streams.out(), "[]\n");
    }
}
