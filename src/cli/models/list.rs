//! `mlx ls`: lists the models in the caches.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rust_mlx::hub;
use serde::Serialize;

use crate::cli::models::directory::{quantization, type_name};
use crate::cli::options::preset;
use crate::cli::terminal::console::{Console, bytes, table};
use crate::cli::terminal::failure::Failure;

/// List presets and the models in the caches: fetched known models, and those of the Hugging Face
/// cache
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// One cached model.
#[derive(Debug, Serialize)]
struct Row {
    /// The name that `--model` and `mlx rm` accept.
    name: String,
    /// The commit; `None` for known models.
    revision: Option<String>,
    /// The branches and tags of this commit.
    refs: Vec<String>,
    model_type: Option<String>,
    quantization: Option<String>,
    bytes: u64,
    files: usize,
    /// Whether all files that the model needs are cached.
    complete: bool,
    /// The time of the last change, in seconds since 1970.
    modified: Option<u64>,
    path: PathBuf,
    /// The preset's model; `None` for models.
    preset_of: Option<String>,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let mut rows = presets()?;
    rows.extend(known()?);
    rows.extend(hub::HfHub::from_env()?.list()?.into_iter().map(shared));
    print(&rows, args.json, console)
}

/// Returns the presets. The size of a preset is that of its own file.
fn presets() -> Result<Vec<Row>, Failure> {
    let row = |(name, path, preset): (String, PathBuf, preset::Preset)| {
        let metadata = std::fs::metadata(&path).ok();
        Row {
            name,
            revision: None,
            refs: Vec::new(),
            model_type: None,
            quantization: None,
            bytes: metadata.as_ref().map_or(0, std::fs::Metadata::len),
            files: 1,
            complete: true,
            modified: metadata.and_then(|m| seconds(m.modified().ok()?)),
            path,
            preset_of: Some(preset.from),
        }
    };
    Ok(preset::all()?.into_iter().map(row).collect())
}

/// Known models that are cached.
fn known() -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for model in hub::catalog() {
        if !hub::is_cached(model.name)? {
            continue;
        }
        let path = hub::cached_path(model.name)?;
        let metadata = std::fs::metadata(&path).ok();
        let mut row = Row {
            name: model.name.to_owned(),
            revision: None,
            refs: Vec::new(),
            model_type: None,
            quantization: None,
            bytes: match &metadata {
                Some(metadata) if metadata.is_file() => metadata.len(),
                _ => model.kept_bytes(),
            },
            files: model.files.len().max(1),
            complete: true,
            modified: metadata.and_then(|m| seconds(m.modified().ok()?)),
            path,
            preset_of: None,
        };
        describe(&mut row);
        rows.push(row);
    }
    Ok(rows)
}

fn seconds(time: SystemTime) -> Option<u64> {
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

fn shared(model: hub::CachedModel) -> Row {
    let mut row = Row {
        name: model.id,
        revision: Some(model.commit),
        refs: model.refs,
        model_type: None,
        quantization: None,
        bytes: model.bytes,
        files: model.files,
        complete: model.complete,
        modified: model.modified,
        path: model.path,
        preset_of: None,
    };
    describe(&mut row);
    row
}

/// Adds facts from the files, if they can be read.
fn describe(row: &mut Row) {
    let discovered = inference::discover(&row.path)
        .ok()
        .and_then(|mut f| f.find_map(Result::ok));
    if let Some(discovered) = discovered {
        row.model_type = Some(type_name(&discovered)).filter(|t| t != "-");
        row.quantization = Some(quantization(&discovered)).filter(|q| q != "-");
    }
}

fn print(rows: &[Row], as_json: bool, console: &mut Console<'_>) -> Result<(), Failure> {
    if as_json {
        return console.json(&rows);
    }
    if rows.is_empty() {
        console.note("no models; `mlx pull owner/name` fetches one");
        return Ok(());
    }
    let mut lines = vec![
        [
            "NAME",
            "REVISION",
            "TYPE",
            "QUANTIZATION",
            "SIZE",
            "MODIFIED",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let now = seconds(SystemTime::now());
    for row in rows {
        let commit = row.revision.as_deref().map(|c| c.get(..8).unwrap_or(c));
        let revision = match (commit, row.refs.as_slice()) {
            (None, _) => match &row.preset_of {
                Some(model) => format!("preset of {model}"),
                None => "-".to_owned(),
            },
            (Some(commit), []) => commit.to_owned(),
            (Some(commit), refs) => format!("{commit} ({})", refs.join(", ")),
        };
        let size = bytes(row.bytes);
        let dash = || "-".to_owned();
        lines.push(vec![
            row.name.clone(),
            revision,
            row.model_type.clone().unwrap_or_else(dash),
            row.quantization.clone().unwrap_or_else(dash),
            if row.complete {
                size
            } else {
                format!("{size} (incomplete)")
            },
            row.modified
                .zip(now)
                .map_or_else(dash, |(then, now)| ago(now.saturating_sub(then))),
        ]);
    }
    for line in table(&lines) {
        console.line(&line)?;
    }
    Ok(())
}

/// A time span as text: `3 days ago`.
fn ago(seconds: u64) -> String {
    let (n, unit) = match seconds {
        0..120 => return "just now".to_owned(),
        120..7_200 => (seconds / 60, "minutes"),
        7_200..172_800 => (seconds / 3_600, "hours"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{n} {unit} ago")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    #[test]
    fn rows_are_for_people_and_programs() {
        let row = Row {
            name: "own/tiny".into(),
            revision: Some("0123456789abcdef".into()),
            refs: vec!["main".into()],
            model_type: Some("llama".into()),
            quantization: None,
            bytes: 1536,
            files: 3,
            complete: false,
            modified: None,
            path: "somewhere".into(),
            preset_of: None,
        };
        let mut streams = Streams::new("");
        print(std::slice::from_ref(&row), false, &mut streams.console()).unwrap();
        let out = streams.out();
        for part in [
            "own/tiny",
            "01234567 (main)",
            "llama",
            "1.5 KiB (incomplete)",
        ] {
            assert!(out.contains(part), "{out}");
        }
        let mut streams = Streams::new("");
        print(&[row], true, &mut streams.console()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&streams.out()).unwrap();
        assert_eq!(value[0]["revision"], "0123456789abcdef");
        assert_eq!(value[0]["complete"], false);
    }

    #[test]
    fn spans_are_readable() {
        assert_eq!(ago(5), "just now");
        assert_eq!(ago(7_199), "119 minutes ago");
        assert_eq!(ago(3 * 86_400), "3 days ago");
    }
}
