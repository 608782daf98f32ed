//! `mlx inspect M`: describes a model.

use std::path::Path;

use inference::{DiscoveredModel, ModelInfo};
use serde_json::{Map, Value, json};

use crate::cli::models::directory::{describe, format_name, quantization, type_name};
use crate::cli::options::load::{LoadArgs, find_model, load_with};
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::failure::{Failure, chain};

#[cfg(feature = "mlx-backend")]
use inference_formats::split::Share;
#[cfg(feature = "mlx-backend")]
use metal_backend::model_report::{BlockInfo, BlockKind, ModelReport};

/// Without the engine, the needed memory is unknown.
#[cfg(not(feature = "mlx-backend"))]
type ModelReport = std::convert::Infallible;

/// Describe a model: its files, architecture, sizes, quantization, and whether it fits in memory
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// A directory, a .gguf file, a known name, or owner/name on the Hugging Face Hub
    #[arg(value_name = "MODEL")]
    model: String,
    /// Show only what the files contain, without loading the model
    #[arg(long)]
    no_load: bool,
    /// Show what each of N processes would hold (see `mlx launch`), without loading the model
    #[cfg(feature = "mlx-backend")]
    #[arg(long, value_name = "N", value_parser = crate::cli::options::load::at_least_one)]
    split: Option<usize>,
    /// With --split: divide the model by whole layers, as `mlx launch --pipeline` does
    #[cfg(feature = "mlx-backend")]
    #[arg(long, requires = "split")]
    pipeline: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    #[cfg(feature = "mlx-backend")]
    if let Some(processes) = args.split {
        if args.load.changes_needs() {
            return Err(Failure::usage(
                "--split shows weights alone, each process's; leave out --ffn, --vindex, \
                 --walk-only, --adapter-path, --ctx-size, --kv-bits and --attention-sums",
            ));
        }
        if args.pipeline {
            return stages(args, processes, console);
        }
        return split(args, processes, console);
    }
    let backend = match args.no_load {
        true => None,
        false => Some(args.load.backend()?),
    };
    let path = find_model(Some(&args.model), console)?;
    let files = discovered(&path);
    let report = report(&path, args, backend.as_deref())?;
    let loaded = match backend {
        Some(_) if report.as_ref().is_some_and(is_too_large) => {
            console.warn("warning: there is not enough free memory, so it is not loaded; what follows is from its files");
            None
        }
        Some(backend) => Some(load_with(backend, &path, &args.load, None, console)?),
        None => None,
    };
    let files = match (files, &loaded) {
        (Ok(files), _) => Some(files),
        // The backend could read a file that discovery could not.
        (Err(e), loaded) if loaded.is_some() || report.is_some() => {
            tracing::info!("discovery: {}", chain(&e));
            None
        }
        (Err(e), _) => return Err(e.into()),
    };
    let info = loaded
        .as_ref()
        .map(|loaded| (loaded.backend.name(), loaded.model.info()));
    let findings = Found {
        files: files.as_ref(),
        report: report.as_ref(),
        loaded: info,
    };
    print(&path, findings, args.json, console)
}

/// All known facts about a model.
#[derive(Default)]
struct Found<'a> {
    files: Option<&'a DiscoveredModel>,
    report: Option<&'a ModelReport>,
    loaded: Option<(&'a str, ModelInfo)>,
}

/// Prints the parts of the model that each of `processes` processes would hold.
#[cfg(feature = "mlx-backend")]
fn split(args: &Args, processes: usize, console: &mut Console<'_>) -> Result<(), Failure> {
    let path = find_model(Some(&args.model), console)?;
    let (name, dtype) = (args.load.backend.as_deref(), args.load.dtype);
    let plan = metal_backend::model_report::split_plan(&path, name, dtype, processes)?;
    if args.json {
        return console.json(&json!({"path": path.to_string_lossy(), "split": plan}));
    }
    let each = format!(
        "{} of {}",
        bytes(plan.bytes_per_process),
        bytes(plan.bytes_whole)
    );
    let heads = format!("{}, {} for keys and values", plan.heads, plan.kv_heads);
    for (name, value) in [
        ("path", path.display().to_string()),
        ("processes", plan.processes.to_string()),
        ("each holds", each),
        ("heads of each", heads),
    ] {
        console.line(&format!("{name:<18} {value}"))?;
    }
    let longest = plan.tensors.iter().map(|t| t.name.len()).max().unwrap_or(0);
    for tensor in &plan.tensors {
        let share = match tensor.share {
            Share::Outputs => "outputs",
            Share::Inputs => "inputs",
            Share::Once => "whole, once",
            Share::Whole => "whole",
        };
        console.line(&format!(
            "{:<longest$}  {share:<11}  {} of {}",
            tensor.name,
            bytes(tensor.bytes_per_process),
            bytes(tensor.bytes_whole)
        ))?;
    }
    Ok(())
}

/// Prints the layers that each of `processes` processes would hold.
#[cfg(feature = "mlx-backend")]
fn stages(args: &Args, processes: usize, console: &mut Console<'_>) -> Result<(), Failure> {
    let path = find_model(Some(&args.model), console)?;
    let (name, dtype) = (args.load.backend.as_deref(), args.load.dtype);
    let plan = metal_backend::model_report::pipeline_plan(&path, name, dtype, processes)?;
    if args.json {
        return console.json(&json!({"path": path.to_string_lossy(), "pipeline": plan}));
    }
    for (name, value) in [
        ("path", path.display().to_string()),
        ("processes", plan.stages.len().to_string()),
    ] {
        console.line(&format!("{name:<18} {value}"))?;
    }
    for stage in &plan.stages {
        let label = format!("rank {}", stage.rank);
        let layers = match (stage.layers.start, stage.layers.end.saturating_sub(1)) {
            (first, last) if first == last => format!("layer {first}"),
            (first, last) => format!("layers {first} to {last}"),
        };
        console.line(&format!(
            "{label:<18} {layers}, {} tensors, {} of {}",
            stage.tensors.len(),
            bytes(stage.bytes),
            bytes(plan.bytes_whole)
        ))?;
    }
    Ok(())
}

/// The information in the model's headers, for loading with `backend`.
#[cfg(feature = "mlx-backend")]
fn report(
    path: &Path,
    args: &Args,
    backend: Option<&dyn inference::Backend>,
) -> Result<Option<ModelReport>, Failure> {
    let name = backend.map(inference::Backend::name);
    let name = name.or(args.load.backend.as_deref());
    let mut options = args.load.checked(name.unwrap_or_default())?;
    options.backend = name.map(str::to_owned);
    match ModelReport::with_options(path, &options) {
        Ok(report) => Ok(Some(report)),
        // The report would ignore these flags, so the error must be shown.
        Err(e) if args.load.changes_needs() => Err(e.into()),
        Err(e) => {
            // Loading reports the same error, or another backend can read the file.
            tracing::info!("headers: {}", chain(&e));
            Ok(None)
        }
    }
}

#[cfg(not(feature = "mlx-backend"))]
fn report(
    _: &Path,
    _: &Args,
    _: Option<&dyn inference::Backend>,
) -> Result<Option<ModelReport>, Failure> {
    Ok(None)
}

#[cfg(feature = "mlx-backend")]
fn is_too_large(report: &ModelReport) -> bool {
    report.memory.room_for_tokens.is_none()
}

#[cfg(not(feature = "mlx-backend"))]
fn is_too_large(_: &ModelReport) -> bool {
    false
}

/// The most expanded matrices of a format that are listed by name.
#[cfg(feature = "mlx-backend")]
const MAX_EXPANDED: usize = 8;

/// The rows from the headers. If the model was loaded, `loaded` replaces some of them by measured
/// values.
#[cfg(feature = "mlx-backend")]
fn report_rows(report: &ModelReport, loaded: Option<&ModelInfo>) -> Vec<(&'static str, String)> {
    let millions = |n: u64| format!("{:.1} M", n as f64 / 1e6);
    let mut rows = Vec::new();
    if loaded.is_none() {
        let supported = if report.supported {
            report.model_type.clone()
        } else {
            format!("{} (not supported; see `mlx arch`)", report.model_type)
        };
        rows.push(("architecture", supported));
        rows.push(("parameters", millions(report.parameters)));
        let template = report.template.clone().unwrap_or_else(|| "no".into());
        rows.push(("chat template", template));
    }
    for (n, share) in report.formats.iter().enumerate() {
        let label = if n == 0 { "stored as" } else { "" };
        let mut text = format!("{}: {}", share.name, bytes(share.stored_bytes));
        // A smaller difference is only padding of rows.
        if share.loaded_bytes > share.stored_bytes / 8 * 9 {
            text.push_str(&format!(" ({} in memory)", bytes(share.loaded_bytes)));
        }
        rows.push((label, text));
    }
    for expansion in &report.expansions {
        rows.push(("expanded", format!("{expansion}")));
        for name in expansion.tensors.iter().take(MAX_EXPANDED) {
            rows.push(("", format!("  {name}")));
        }
        if expansion.tensors.len() > MAX_EXPANDED {
            rows.push(("", "  ... (--json lists all)".into()));
        }
    }
    for (n, part) in report.parts.iter().enumerate() {
        let label = if n == 0 { "memory by part" } else { "" };
        let weights = millions(part.parameters);
        rows.push((
            label,
            format!("{}: {} ({weights})", part.name, bytes(part.loaded_bytes)),
        ));
    }
    for (kind, count) in kinds(&report.blocks) {
        rows.push(("blocks", format!("{count} of kind {kind}")));
    }
    let memory = &report.memory;
    let keys = bytes(memory.cache_per_token.saturating_mul(1000));
    let text = match (memory.cache_per_token, memory.state) {
        (0, state) => format!("{} of state at any length", bytes(state)),
        (_, 0) => format!("{keys} for 1000 tokens"),
        (_, state) => format!("{keys} for 1000 tokens, {} of state", bytes(state)),
    };
    rows.push((
        "needs",
        format!(
            "{} for weights, {text}, in {}",
            // A measured value takes precedence over an estimate.
            bytes(loaded.map_or(memory.weights, |info| info.weight_bytes)),
            memory.compute_type
        ),
    ));
    let available = bytes(memory.available);
    let mut fit = match memory.room_for_tokens {
        Some(tokens) => {
            // A sequence cannot exceed the context length, so the text reports no more than that.
            let room = match report.context_length.filter(|&n| tokens >= n) {
                Some(n) => format!("the whole context of {n} tokens"),
                None => format!("{tokens} tokens"),
            };
            format!("yes: {available} are free, room for {room}")
        }
        None => format!("no: {available} are free"),
    };
    if loaded.is_some() {
        fit.push_str(" (before it was loaded)");
    }
    rows.push(("fits", fit));
    rows
}

/// The number of blocks of each kind, in the order of first appearance.
#[cfg(feature = "mlx-backend")]
fn kinds(blocks: &[BlockInfo]) -> Vec<(BlockKind, usize)> {
    let mut kinds: Vec<(BlockKind, usize)> = Vec::new();
    for block in blocks {
        match kinds.iter_mut().find(|(kind, _)| *kind == block.kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((block.kind, 1)),
        }
    }
    kinds
}

#[cfg(not(feature = "mlx-backend"))]
fn report_rows(_: &ModelReport, _: Option<&ModelInfo>) -> Vec<(&'static str, String)> {
    Vec::new()
}

/// The result of discovery for this model alone.
fn discovered(path: &Path) -> inference::Result<DiscoveredModel> {
    let no_model = || {
        inference::Error::new(
            inference::ErrorKind::InvalidModel,
            "no model here: expected a .gguf file, or a directory with config.json and .safetensors files",
        )
        .with_path(path)
    };
    // The model at `path` is found first; all other models are below it.
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
    findings: Found<'_>,
    as_json: bool,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    let Found {
        files,
        report,
        loaded,
    } = findings;
    if as_json {
        let mut object = match files.map(describe) {
            Some(Value::Object(object)) => object,
            _ => Map::new(),
        };
        object.insert("path".into(), json!(path.to_string_lossy()));
        #[cfg(feature = "mlx-backend")]
        if let Some(report) = report {
            object.insert("report".into(), json!(report));
        }
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
    if let Some((backend, info)) = &loaded {
        rows.push(("backend", format!("{backend} ({})", info.device)));
        rows.push(("architecture", info.architecture.clone()));
        rows.push((
            "parameters",
            format!("{:.1} M", info.parameters as f64 / 1e6),
        ));
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
        if let Some(prompts) = &info.prompts {
            rows.push(("prompts", format!("inputs as {prompts}")));
        }
        if let Some(cache) = &info.cache {
            rows.push(("cache", format!("keys and values as {cache}")));
        }
        #[cfg(feature = "mlx-backend")]
        let origin = report.and_then(|report| report.template.clone());
        #[cfg(not(feature = "mlx-backend"))]
        let origin: Option<String> = None;
        let template = match (info.has_chat_template, origin) {
            (true, Some(origin)) => format!("yes, {origin}"),
            (true, None) => "yes".into(),
            (false, _) => "no".into(),
        };
        rows.push(("chat template", template));
    }
    if let Some(report) = report {
        rows.extend(report_rows(report, loaded.as_ref().map(|(_, info)| info)));
    }
    for (name, value) in rows {
        console.line(&format!("{name:<18} {value}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::{self, Streams};
    use inference::TextModel;

    #[test]
    fn info_is_printed_for_people_and_programs() {
        let info = mock::instruct(&[]).info();
        let mut streams = Streams::new("");
        let path = Path::new("somewhere/m.gguf");
        print(
            path,
            Found {
                loaded: Some(("cpu", info.clone())),
                ..Found::default()
            },
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
            Found {
                loaded: Some(("cpu", info)),
                ..Found::default()
            },
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
