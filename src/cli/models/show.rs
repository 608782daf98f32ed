//! `mlx show NAME`: describes a model in ollama's form. It reads only headers. `mlx inspect`
//! reports the needed memory and whether the model fits.

use std::path::{Path, PathBuf};

use metal_backend::model_report::ModelReport;
use serde::Serialize;

use crate::cli::models::directory::{format_name, quantization};
use crate::cli::options::dialog::inline;
use crate::cli::options::files::Files;
use crate::cli::options::load::{fetched, find_preset};
use crate::cli::options::modelfile;
use crate::cli::options::preset::Preset;
use crate::cli::terminal::console::{Console, table};
use crate::cli::terminal::failure::Failure;

/// The number of lines of a license and of instructions in the overview.
const LINES: usize = 4;

/// Describe a model: architecture, sizes, quantization, template, license
#[derive(Debug, Clone, clap::Args)]
#[command(group(clap::ArgGroup::new("part").multiple(false)))]
pub struct Args {
    /// A directory, a .gguf file, a known name, or owner/name on the Hugging Face Hub
    #[arg(value_name = "NAME")]
    name: String,
    /// Print only the license
    #[arg(long, group = "part")]
    license: bool,
    /// Print only the chat template
    #[arg(long, group = "part")]
    template: bool,
    /// Print only a preset's instructions
    #[arg(long, group = "part")]
    system: bool,
    /// Print only a preset's parameters
    #[arg(long, group = "part")]
    parameters: bool,
    /// Print the description as a Modelfile
    #[arg(long, group = "part")]
    modelfile: bool,
    /// Print all of this as one JSON object
    #[arg(long, group = "part")]
    json: bool,
}

/// The parts to show.
#[derive(Debug, Serialize)]
struct Shown {
    name: String,
    path: PathBuf,
    architecture: String,
    parameters: u64,
    context_length: Option<usize>,
    embedding_length: usize,
    quantization: Option<String>,
    format: Option<&'static str>,
    bytes: u64,
    capabilities: Vec<&'static str>,
    template: Option<String>,
    /// The place where the template was found.
    template_origin: Option<String>,
    license: Option<String>,
    system: Option<String>,
    adapter: Option<String>,
    /// The preset's parameters, one on each line.
    options: Option<String>,
    modelfile: String,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let preset = find_preset(Some(&args.name))?;
    let preset = preset.unwrap_or_else(|| Preset {
        from: args.name.clone(),
        ..Preset::default()
    });
    let path = fetched(Some(&preset.from), console)?;
    let shown = Shown::new(&args.name, &path, preset)?;
    if args.json {
        return console.json(&shown);
    }
    if args.license {
        return part(&args.name, "license", shown.license.as_deref(), console);
    }
    if args.template {
        return part(
            &args.name,
            "chat template",
            shown.template.as_deref(),
            console,
        );
    }
    for (wanted, what, text) in [
        (args.system, "system message", &shown.system),
        (args.parameters, "parameters", &shown.options),
        (args.modelfile, "Modelfile", &Some(shown.modelfile.clone())),
    ] {
        if wanted {
            return part(&args.name, what, text.as_deref(), console);
        }
    }
    for line in shown.overview() {
        console.line(&line)?;
    }
    Ok(())
}

/// The single part that the flags select.
fn part(
    name: &str,
    what: &str,
    text: Option<&str>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let text = text.ok_or_else(|| Failure::failed(format!("the {what} of {name} is not known")))?;
    console.text(text)?;
    if text.ends_with('\n') {
        return Ok(());
    }
    console.text("\n")
}

impl Shown {
    fn new(name: &str, path: &Path, preset: Preset) -> Result<Self, Failure> {
        let template = preset.template.as_deref();
        let template = template.map(|t| inline(t, "the preset")).transpose()?;
        let files = Files::read(path, template)?;
        let report = ModelReport::read(path, None, None)?;
        // A broken neighboring model must not hide this one.
        let discovered = inference::discover(path)
            .ok()
            .and_then(|mut all| all.find_map(Result::ok));
        let template = files.text.template();
        let source = template.map(|t| t.source().to_owned());
        let mut capabilities = vec!["completion"];
        if let Some(source) = &source {
            capabilities.push("chat");
            if source.contains("tools") {
                capabilities.push("tools");
            }
            if source.contains("enable_thinking") || source.contains("<think>") {
                capabilities.push("thinking");
            }
        }
        let modelfile = modelfile::write(&preset);
        let options: Vec<String> = preset
            .parameters
            .iter()
            .map(|(name, value)| format!("{name} {value}"))
            .collect();
        let license = (!preset.license.is_empty()).then(|| preset.license.join("\n"));
        let catalog = rust_mlx::hub::find(&preset.from).map(|known| known.license.to_owned());
        Ok(Self {
            name: name.to_owned(),
            path: path.to_owned(),
            architecture: report.model_type,
            parameters: report.parameters,
            context_length: files.config.max_position_embeddings,
            embedding_length: files.config.hidden_size,
            quantization: discovered
                .as_ref()
                .map(quantization)
                .filter(|name| name != "-")
                .or_else(|| report.formats.first().map(|share| share.name.clone())),
            format: discovered
                .as_ref()
                .map(|discovered| format_name(discovered.format)),
            bytes: discovered
                .as_ref()
                .map_or(report.stored_bytes, |discovered| discovered.bytes),
            capabilities,
            template: source,
            template_origin: template.map(|t| t.origin().to_owned()),
            license: license.or(files.license).or(catalog),
            system: preset.system,
            adapter: preset.adapter,
            options: (!options.is_empty()).then(|| options.join("\n")),
            modelfile,
        })
    }

    fn overview(&self) -> Vec<String> {
        let unknown = || "unknown".to_owned();
        let mut lines = Vec::new();
        let mut section = |title: &str, rows: Vec<Vec<String>>| {
            lines.push(format!("  {title}"));
            lines.extend(table(&rows).into_iter().map(|row| format!("    {row}")));
            lines.push(String::new());
        };
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let context = self.context_length.map_or_else(unknown, |n| n.to_string());
        let mut model = vec![
            row("architecture", self.architecture.clone()),
            row("parameters", human(self.parameters)),
            row("context length", context),
            row("embedding length", self.embedding_length.to_string()),
            row(
                "quantization",
                self.quantization.clone().unwrap_or_else(unknown),
            ),
        ];
        if let Some(origin) = &self.template_origin {
            model.push(row("chat template", origin.clone()));
        }
        if let Some(adapter) = &self.adapter {
            model.push(row("adapter", adapter.clone()));
        }
        section("Model", model);
        let capabilities = self.capabilities.iter();
        section(
            "Capabilities",
            capabilities.map(|name| vec![(*name).to_owned()]).collect(),
        );
        if let Some(options) = &self.options {
            let pair = |line: &str| {
                let (name, value) = line.split_once(' ').unwrap_or((line, ""));
                row(name, value.to_owned())
            };
            section("Parameters", options.lines().map(pair).collect());
        }
        if let Some(system) = &self.system {
            section("System", first_lines(system));
        }
        if let Some(license) = &self.license {
            section("License", first_lines(license));
        }
        lines.pop();
        lines
    }
}

/// The first non-blank lines of a text.
fn first_lines(text: &str) -> Vec<Vec<String>> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut rows: Vec<_> = lines
        .by_ref()
        .take(LINES)
        .map(|l| vec![l.to_owned()])
        .collect();
    if lines.next().is_some() {
        rows.push(vec!["...".to_owned()]);
    }
    rows
}

/// A number of weights as text: `134.5M`, `8.0B`.
fn human(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1}K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.1}B", n as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_long_texts_are_cut_for_people() {
        assert_eq!(human(999), "999");
        assert_eq!(human(134_515_008), "134.5M");
        assert_eq!(human(8_030_261_248), "8.0B");
        let rows = first_lines("\n a\n\nb\nc\nd\ne\n");
        assert_eq!(rows.len(), LINES + 1);
        assert_eq!((rows[0][0].as_str(), rows[LINES][0].as_str()), ("a", "..."));
        assert_eq!(first_lines("mit").len(), 1);
    }
}
