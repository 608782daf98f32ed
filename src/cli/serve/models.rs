//! The models that `mlx serve` may load by name: an allow-list of directories and caches.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use inference::{
    DiscoveredModel, Error, ErrorKind, GenerateOptions, LoadOptions, ModelInfo, Prompt, Result,
    TextModel,
};
use inference_server::{ModelDescription, ModelEntry, ModelSource, PullProgress, ServedModel};
use rust_mlx::hub::{self, Stage};

use crate::cli::models::directory::{format_name, quantization};
use crate::cli::models::remove;
use crate::cli::terminal::failure::Failure;

/// An adapter for served models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// The adapter's name in requests: `MODEL:NAME`.
    pub name: String,
    /// The directory.
    pub path: PathBuf,
}

/// The models that may be loaded, with their load options.
pub struct Source {
    /// The load options, which contain the backend's name.
    pub options: LoadOptions,
    /// Maximum number of tokens in a prompt and its reply together.
    pub context: Option<usize>,
    /// The directories whose models may be loaded.
    pub dirs: Vec<PathBuf>,
    /// Whether models in the caches may be loaded.
    pub cached: bool,
    /// Whether clients may fetch models.
    pub pulls: bool,
    /// Whether clients may delete models of the caches.
    pub deletes: bool,
    /// The models named on the command line, and their paths.
    pub named: Vec<(String, PathBuf)>,
    /// Whether these models may be unloaded and loaded again.
    pub reload: bool,
    /// The n-gram length of the prompt lookup; 0 disables it.
    pub prompt_lookup: usize,
    /// Adapters for the models.
    pub adapters: Vec<Adapter>,
}

/// Refuses a model that cannot verify the tokens of a prompt lookup with n-grams of this length.
///
/// # Errors
/// [`ErrorKind::Unsupported`], with the reason.
pub fn check_lookup(model: &dyn TextModel, lookup: usize) -> Result<()> {
    // A request for zero tokens is checked, and computes nothing.
    let check = |lookup| {
        let options = GenerateOptions::new()
            .with_max_tokens(0)
            .with_cache_prompt(false)
            .with_prompt_lookup(lookup);
        model.generate(&Prompt::Tokens(vec![0]), &options).map(drop)
    };
    // Encoders generate no text, so they have nothing to look up.
    if lookup == 0 || check(0).is_err() {
        return Ok(());
    }
    check(lookup).map_err(|e| e.context("--prompt-lookup"))
}

/// A model that may be loaded.
struct Candidate {
    entry: ModelEntry,
    path: PathBuf,
    adapter: Option<PathBuf>,
    /// The name of the model without the adapter.
    base: Option<String>,
}

impl Source {
    /// Checks that the given paths exist.
    pub fn check(&self) -> std::result::Result<(), Failure> {
        if let Some(dir) = &self.options.cache_dir {
            inference_formats::atomic::private_dir(dir).map_err(|e| {
                let dir = dir.display();
                Failure::failed(format!("--cache-dir: {dir} cannot be made or written: {e}"))
            })?;
        }
        for dir in &self.dirs {
            inference::discover(dir).map_err(|e| e.context("--models-dir"))?;
        }
        for (i, adapter) in self.adapters.iter().enumerate() {
            if !adapter.path.is_dir() {
                return Err(Failure::failed(format!(
                    "--adapter: {} is no directory",
                    adapter.path.display()
                )));
            }
            if self.adapters[..i].iter().any(|a| a.name == adapter.name) {
                let name = &adapter.name;
                return Err(Failure::usage(format!("two adapters have the name {name}")));
            }
        }
        Ok(())
    }

    /// All models without adapters; those of the command line come first. If two models have one
    /// name, the first is used. If two names have the same files, the second refers to the first.
    fn bases(&self) -> Vec<Candidate> {
        let mut bases: Vec<Candidate> = Vec::new();
        let mut files: Vec<PathBuf> = Vec::new();
        let mut add = |name: String, path: &Path, discovered: Option<&DiscoveredModel>| {
            if bases.iter().any(|b| b.entry.name == name) {
                return;
            }
            let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let same = files.iter().position(|other| *other == real);
            let same = same.and_then(|at| bases.get(at)).map(|b| &b.entry);
            let same = same.map(|entry| entry.same_as.clone().unwrap_or(entry.name.clone()));
            files.push(real);
            bases.push(Candidate {
                entry: entry(name, path, discovered).with_same_as(same),
                path: path.to_owned(),
                adapter: None,
                base: None,
            });
        };
        for (name, path) in &self.named {
            add(name.clone(), path, one(path).as_ref());
        }
        for dir in &self.dirs {
            for model in models_below(dir) {
                if let Some(name) = name_below(dir, &model.path) {
                    add(name, &model.path, Some(&model));
                }
            }
        }
        if self.cached {
            for (name, path) in cached() {
                add(name, &path, one(&path).as_ref());
            }
        }
        bases
    }

    /// The model of this name, if it is a model with an adapter.
    fn with_adapter(&self, name: &str) -> Option<Candidate> {
        let mut all = self.candidates().into_iter();
        all.find(|c| c.adapter.is_some() && c.entry.name == name)
    }

    /// All models that may be loaded.
    fn candidates(&self) -> Vec<Candidate> {
        let mut bases = self.bases();
        let with_adapters: Vec<Candidate> = bases
            .iter()
            .flat_map(|base| {
                self.adapters.iter().map(|adapter| {
                    let mut entry = base.entry.clone();
                    let with = |name: String| format!("{name}:{}", adapter.name);
                    entry.same_as = entry.same_as.map(with);
                    entry.name = format!("{}:{}", entry.name, adapter.name);
                    Candidate {
                        entry,
                        path: base.path.clone(),
                        adapter: Some(adapter.path.clone()),
                        base: Some(base.entry.name.clone()),
                    }
                })
            })
            .collect();
        if !self.reload {
            // Models of the command line stay loaded, so they are not part of the source.
            bases.drain(..self.named.len().min(bases.len()));
        }
        bases.extend(with_adapters);
        bases
    }
}

/// The name of a model below a directory: its relative path without `.gguf`.
fn name_below(dir: &Path, path: &Path) -> Option<String> {
    let path = match path.extension() {
        Some(extension) if extension == "gguf" => path.with_extension(""),
        _ => path.to_owned(),
    };
    let below = path.strip_prefix(dir).ok()?;
    let parts: Option<Vec<&str>> = below.iter().map(|part| part.to_str()).collect();
    match parts?.join("/") {
        // The directory itself is a model.
        name if name.is_empty() => {
            let directory = dir.canonicalize().ok()?;
            Some(directory.file_name()?.to_str()?.to_owned())
        }
        name => Some(name),
    }
}

fn models_below(dir: &Path) -> Vec<DiscoveredModel> {
    let discovered = match inference::discover(dir) {
        Ok(discovered) => discovered,
        Err(e) => {
            tracing::warn!("cannot read {}: {e}", dir.display());
            return Vec::new();
        }
    };
    // An unreadable model must not hide the others, so errors are ignored.
    let mut models: Vec<DiscoveredModel> = discovered.filter_map(Result::ok).collect();
    models.sort_by(|a, b| a.path.cmp(&b.path));
    models
}

/// The single model at a path, without models below it.
pub fn one(path: &Path) -> Option<DiscoveredModel> {
    inference::discover(path).ok()?.find_map(Result::ok)
}

/// The names and paths of complete models in both caches.
fn cached() -> Vec<(String, PathBuf)> {
    let known = hub::catalog().iter().filter_map(|model| {
        let there = hub::is_cached(model.name).ok()?;
        let path = there.then(|| hub::cached_path(model.name))?;
        Some((model.name.to_owned(), path.ok()?))
    });
    let mut all: Vec<(String, PathBuf)> = known.collect();
    let shared = hub::HfHub::from_env().and_then(|hub| Ok((hub.list()?, hub)));
    match shared {
        Ok((list, hub)) => {
            all.extend(list.into_iter().filter(|m| m.complete).filter_map(|model| {
                let spec = hub::ModelSpec::parse(&model.id)?;
                Some((model.id, hub.cached(&spec)?))
            }));
        }
        Err(e) => tracing::warn!("cannot read the Hugging Face cache: {e}"),
    }
    all
}

/// The information about the model at `path` for model lists.
pub fn entry(name: String, path: &Path, discovered: Option<&DiscoveredModel>) -> ModelEntry {
    let modified = std::fs::metadata(path).and_then(|m| m.modified());
    let modified = modified
        .ok()
        .and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    let modified = modified.map_or(0, |d| d.as_secs());
    let info = discovered.map(|discovered| {
        let mut info = ModelInfo::default();
        info.architecture.clone_from(&discovered.model_type);
        info.weight_bytes = discovered.bytes;
        info.quantization_bits = discovered.quantization.map(|q| q.bits);
        info.quantization_group = discovered.quantization.map(|q| q.group_size);
        info
    });
    let bytes = discovered.map_or(0, |discovered| discovered.bytes);
    let format = discovered.map_or("", |discovered| format_name(discovered.format));
    let stored = discovered.map(quantization).filter(|name| name != "-");
    ModelEntry::new(name)
        .with_format(format, stored.unwrap_or_default())
        .with_files(bytes, modified)
        .with_info(info)
}

impl ModelSource for Source {
    fn entries(&self) -> Vec<ModelEntry> {
        self.candidates().into_iter().map(|c| c.entry).collect()
    }

    fn load(&self, name: &str) -> Result<ServedModel> {
        let candidates = self.candidates();
        let Some(candidate) = candidates.into_iter().find(|c| c.entry.name == name) else {
            return Err(Error::new(
                ErrorKind::ModelNotFound,
                format!("{name} no longer exists"),
            ));
        };
        let mut options = self.options.clone();
        if candidate.adapter.is_some() {
            options.adapter_path = candidate.adapter;
        }
        let backend = inference::backend(options.backend.as_deref().unwrap_or_default())?;
        let model = inference::load_model(&candidate.path, &options)?;
        check_lookup(model.as_ref(), self.prompt_lookup)?;
        let served = ServedModel::new(name, model, backend.capabilities())?;
        Ok(served.with_context(self.context))
    }

    fn base_of(&self, name: &str) -> Option<String> {
        let candidate = self.with_adapter(name)?;
        candidate.base
    }

    fn add_adapter(&self, name: &str, model: &dyn TextModel) -> Result<()> {
        match self.with_adapter(name).and_then(|c| c.adapter) {
            Some(path) => model.add_adapter(name, &path),
            None => Err(Error::new(
                ErrorKind::ModelNotFound,
                format!("{name} no longer exists"),
            )),
        }
    }

    fn describe(&self, name: &str) -> Option<ModelDescription> {
        let mut all = self.bases();
        all.extend(
            self.candidates()
                .into_iter()
                .filter(|c| c.adapter.is_some()),
        );
        let candidate = all.into_iter().find(|c| c.entry.name == name)?;
        let known = hub::find(name).map(|known| known.license.to_owned());
        Some(described(&candidate, known))
    }

    fn can_delete(&self) -> bool {
        self.deletes
    }

    fn delete(&self, name: &str) -> Result<()> {
        let ours = cached().into_iter().any(|(cached, _)| cached == name);
        if !ours {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{name} is not in the caches; models of directories are not deleted"),
            ));
        }
        remove::take(name).map(drop).map_err(|failure| {
            let why = failure.report().unwrap_or_default();
            Error::new(ErrorKind::Io, format!("{name} cannot be deleted: {why}"))
        })
    }

    fn can_pull(&self) -> bool {
        self.pulls
    }

    fn pull(&self, name: &str, progress: &mut dyn FnMut(PullProgress)) -> Result<()> {
        let mut told = Told {
            tell: progress,
            now: PullProgress::default(),
        };
        // A known model's name has priority over a path with the same text.
        if hub::find(name).is_some() {
            return hub::fetch(name, &mut told).map(drop);
        }
        let spec = hub::on_the_hub(name).unwrap_or(name);
        let spec = hub::ModelSpec::parse(spec).ok_or_else(|| {
            Error::new(
                ErrorKind::ModelNotFound,
                format!("{name:?} is neither a known name nor owner/name"),
            )
        })?;
        hub::HfHub::from_env()?
            .pull(&spec, false, &mut told)
            .map(drop)
    }
}

/// The information in the headers of a model's files. Unreadable parts are omitted.
#[cfg(feature = "mlx-backend")]
fn described(candidate: &Candidate, license: Option<String>) -> ModelDescription {
    let mut info = candidate.entry.info.clone().unwrap_or_default();
    let report = metal_backend::model_report::ModelReport::read(&candidate.path, None, None);
    if let Ok(report) = report {
        info.parameters = report.parameters;
        info.context_length = report.context_length.and_then(|n| usize::try_from(n).ok());
        info.architecture = report.model_type;
    }
    let mut description = ModelDescription::new();
    if let Ok(files) = crate::cli::options::files::Files::read(&candidate.path, None) {
        let config = &files.config;
        info.hidden_size = config.hidden_size;
        info.num_layers = config.num_hidden_layers;
        info.num_heads = config.num_attention_heads;
        info.num_kv_heads = config.num_key_value_heads;
        info.vocab_size = config.vocab_size;
        let template = files.text.template().map(|t| t.source().to_owned());
        description = description
            .with_license(files.license.or(license))
            .with_template(template);
    }
    description.with_info(info)
}

/// Returns only the known information, because the program cannot read model files without the
/// engine.
#[cfg(not(feature = "mlx-backend"))]
fn described(candidate: &Candidate, license: Option<String>) -> ModelDescription {
    ModelDescription::new()
        .with_info(candidate.entry.info.clone())
        .with_license(license)
}

/// Converts progress of the hub to progress of the server.
struct Told<'a> {
    tell: &'a mut dyn FnMut(PullProgress),
    now: PullProgress,
}

impl hub::Progress for Told<'_> {
    fn begin(&mut self, stage: Stage, what: &str, total: u64) {
        let total = (total > 0).then_some(total);
        let now = PullProgress::new(format!("{} {what}", stage.as_str()));
        self.now = now.with_file(what, 0, total);
        (self.tell)(self.now.clone());
    }

    fn advance(&mut self, done: u64) {
        // Reports progress at most once per percent.
        let step = self.now.total.map_or(1 << 24, |total| (total / 100).max(1));
        if done >= self.now.completed.saturating_add(step) {
            self.now.completed = done;
            (self.tell)(self.now.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_paths_from_the_directory() {
        let dir = Path::new("models");
        for (path, name) in [
            ("models/tiny", "tiny"),
            ("models/owner/tiny-4bit", "owner/tiny-4bit"),
            ("models/tiny.Q4_0.gguf", "tiny.Q4_0"),
        ] {
            let actual = name_below(dir, Path::new(path));
            assert_eq!(actual.as_deref(), Some(name));
        }
        assert_eq!(name_below(dir, Path::new("elsewhere/tiny")), None);
    }

    #[test]
    fn what_clients_ask_to_fetch_is_never_a_path() {
        let source = Source {
            options: LoadOptions::default(),
            context: None,
            dirs: Vec::new(),
            cached: false,
            pulls: true,
            deletes: false,
            named: Vec::new(),
            reload: false,
            prompt_lookup: 0,
            adapters: Vec::new(),
        };
        let here = env!("CARGO_MANIFEST_DIR");
        for name in [here, "..", "../x", "/etc/passwd", "Cargo.toml", "a/b/c", ""] {
            let error = source.pull(name, &mut |_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ModelNotFound, "{name}");
        }
    }
}
