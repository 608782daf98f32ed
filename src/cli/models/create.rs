//! `mlx create NAME -f Modelfile`: creates a preset from a Modelfile.

use std::path::{Path, PathBuf};

use rust_mlx::hub;

use crate::cli::options::modelfile::{self, Modelfile};
use crate::cli::options::preset::{self, Kind, Preset};
use crate::cli::terminal::bounded;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

/// Create a preset: a model with instructions, parameters, a template and an adapter, under a name
///
/// A Modelfile has lines FROM MODEL, SYSTEM TEXT, PARAMETER NAME VALUE, TEMPLATE JINJA, ADAPTER
/// DIR, LICENSE TEXT and MESSAGE ROLE TEXT. Put longer texts between three double quotes. `run`,
/// `chat`, `generate`, `show`, `ls` and `rm` know presets by their names.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The preset's name
    #[arg(value_name = "NAME")]
    name: String,
    /// The Modelfile
    #[arg(long, short, value_name = "FILE", default_value = "Modelfile")]
    file: PathBuf,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let wrong = |why: String| Failure::usage(format!("{}: {why}", args.file.display()));
    let text =
        bounded::read_text(&args.file, modelfile::MAX_BYTES).map_err(|e| wrong(e.to_string()))?;
    let parsed = modelfile::parse(&text).map_err(wrong)?;
    let preset = checked(parsed, args.file.parent().unwrap_or(Path::new("")), console).map_err(
        |failure| match failure {
            Failure::Usage(why) => wrong(why),
            other => other,
        },
    )?;
    preset::save(&args.name, &preset)?;
    console.line(&args.name)
}

/// The preset with absolute paths. Each part is checked as far as possible without a model.
fn checked(parsed: Modelfile, dir: &Path, console: &mut Console<'_>) -> Result<Preset, Failure> {
    let Modelfile { mut preset, lines } = parsed;
    let mut parameters = Vec::new();
    for ((name, value), line) in preset.parameters.into_iter().zip(lines) {
        match preset::check(&name, &value) {
            Ok(Kind::Used) => parameters.push((name, value)),
            Ok(Kind::Resource) => console.warn(&format!(
                "note: line {line}: {name} is left out; it changes no reply, and this engine does not have it"
            )),
            Err(e) => return Err(Failure::usage(format!("line {line}: {e}"))),
        }
    }
    preset.parameters = parameters;
    #[cfg(feature = "mlx-backend")]
    if let Some(template) = &preset.template {
        crate::cli::options::dialog::inline(template, "TEMPLATE")?;
    }
    if let Some(adapter) = &preset.adapter {
        let path = absolute(dir, adapter)
            .filter(|path| Path::new(path).join("adapters.safetensors").is_file())
            .ok_or_else(|| {
                Failure::usage(format!(
                    "ADAPTER {adapter}: no directory with adapters.safetensors"
                ))
            })?;
        preset.adapter = Some(path);
    }
    if let Some(path) = absolute(dir, &preset.from) {
        preset.from = path;
    } else if let Some(base) = preset::find(&preset.from)? {
        preset = preset.over(base);
    } else if hub::find(&preset.from).is_none()
        && hub::on_the_hub(&preset.from).is_none()
        && hub::ModelSpec::parse(&preset.from).is_none()
    {
        return Err(Failure::usage(format!(
            "FROM {}: not a directory, a file, a preset, a known name or owner/name",
            preset.from
        )));
    }
    Ok(preset)
}

/// The absolute path of an existing `path`, relative to `dir`.
fn absolute(dir: &Path, path: &str) -> Option<String> {
    let absolute = std::path::absolute(dir.join(path)).ok()?;
    absolute
        .exists()
        .then(|| absolute.to_string_lossy().into_owned())
}
