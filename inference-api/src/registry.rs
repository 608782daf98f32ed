//! Which backends there are, and choosing among them. Backends come from linked crates (through
//! `inventory`) and from explicit calls of [`register`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock, RwLock};

use crate::backend::{Backend, TextModel};
use crate::error::{Error, ErrorKind, Result};
use crate::options::LoadOptions;

/// The order in which [`default_backend`] prefers names; then any other, by name.
pub const PREFERENCE: [&str; 5] = ["metal", "cuda", "rocm", "llama_cpp", "cpu"];

/// A backend that a crate contributes by being linked; see [`crate::register_backend`].
pub struct BackendRegistration {
    name: &'static str,
    make: fn() -> Box<dyn Backend>,
}

impl BackendRegistration {
    /// A backend of this name, made by `make` on first use.
    #[must_use]
    pub const fn new(name: &'static str, make: fn() -> Box<dyn Backend>) -> Self {
        Self { name, make }
    }
}

inventory::collect!(BackendRegistration);

/// Contributes backends to every program that links this crate:
/// `register_backend!("mine", || Box::new(Mine));`. The expression is a function without captures
/// that returns a `Box<dyn Backend>`.
#[macro_export]
macro_rules! register_backend {
    ($name:expr, $make:expr $(,)?) => {
        $crate::inventory::submit! { $crate::BackendRegistration::new($name, $make) }
    };
}

struct Registry {
    /// Sorted by name.
    backends: Vec<Arc<dyn Backend>>,
    /// Names that several linked crates claim; none of them is served.
    duplicates: Vec<String>,
}

static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(|| {
    let mut linked: Vec<_> = inventory::iter::<BackendRegistration>.into_iter().collect();
    linked.sort_by_key(|r| r.name);
    let mut registry = Registry { backends: Vec::new(), duplicates: Vec::new() };
    for group in linked.chunk_by(|a, b| a.name == b.name) {
        match group {
            [one] => registry.backends.push(Arc::from((one.make)())),
            _ => registry.duplicates.push(group[0].name.to_owned()),
        }
    }
    RwLock::new(registry)
});

/// Runs `f` on the registry; a panic of a plugin elsewhere leaves it usable.
fn read<R>(f: impl FnOnce(&Registry) -> R) -> R {
    f(&REGISTRY.read().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// Adds a backend made at run time.
///
/// # Errors
/// [`ErrorKind::DuplicateBackend`] when the name is taken; [`ErrorKind::InvalidOption`] when it is
/// empty.
pub fn register(backend: Arc<dyn Backend>) -> Result<()> {
    let name = backend.name().to_owned();
    if name.trim().is_empty() {
        return Err(Error::new(ErrorKind::InvalidOption, "a backend must have a name"));
    }
    let mut registry = REGISTRY.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let taken = registry.duplicates.contains(&name);
    match registry.backends.binary_search_by(|b| b.name().cmp(&name)) {
        Err(at) if !taken => {
            registry.backends.insert(at, backend);
            Ok(())
        }
        _ => Err(Error::new(
            ErrorKind::DuplicateBackend,
            format!("a backend named `{name}` is registered already; choose another name"),
        )),
    }
}

/// Every backend there is, available or not, sorted by name.
#[must_use]
pub fn backends() -> Vec<Arc<dyn Backend>> {
    read(|r| r.backends.clone())
}

/// Names that several linked crates claim. None of them can be used until only one is linked.
#[must_use]
pub fn duplicates() -> Vec<String> {
    read(|r| r.duplicates.clone())
}

/// Whether a backend can work. A plugin that panics when asked cannot.
///
/// # Errors
/// The reason why it cannot.
pub fn availability(backend: &dyn Backend) -> Result<(), String> {
    let asked = catch_unwind(AssertUnwindSafe(|| {
        if backend.available() { None } else { Some(backend.unavailable_reason()) }
    }));
    match asked {
        Ok(None) => Ok(()),
        Ok(Some(reason)) => {
            Err(reason.unwrap_or_else(|| String::from("it is not available on this machine")))
        }
        Err(_) => Err(String::from("it panicked when asked whether it is available")),
    }
}

fn available_names() -> Vec<String> {
    backends()
        .iter()
        .filter(|b| availability(b.as_ref()).is_ok())
        .map(|b| b.name().to_owned())
        .collect()
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { String::from("none") } else { names.join(", ") }
}

/// The backend called `name`; an empty name means [`default_backend`].
///
/// # Errors
/// [`ErrorKind::UnknownBackend`] listing what there is, [`ErrorKind::UnavailableBackend`] with the
/// reason and what is available, [`ErrorKind::DuplicateBackend`] when several crates claim it.
pub fn backend(name: &str) -> Result<Arc<dyn Backend>> {
    if name.is_empty() {
        return default_backend();
    }
    if duplicates().iter().any(|d| d == name) {
        return Err(Error::new(
            ErrorKind::DuplicateBackend,
            format!("several linked crates register a backend named `{name}`; link only one"),
        ));
    }
    let all = backends();
    let Some(found) = all.iter().find(|b| b.name() == name) else {
        let names: Vec<String> = all.iter().map(|b| b.name().to_owned()).collect();
        let hint = names
            .iter()
            .find(|n| similar(n, name))
            .map(|n| format!("; did you mean `{n}`?"))
            .unwrap_or_default();
        return Err(Error::new(
            ErrorKind::UnknownBackend,
            format!("no backend is named `{name}`; there are: {}{hint}", listed(&names)),
        ));
    };
    match availability(found.as_ref()) {
        Ok(()) => Ok(Arc::clone(found)),
        Err(reason) => Err(Error::new(
            ErrorKind::UnavailableBackend,
            format!(
                "backend `{name}` cannot be used: {reason}; available are: {}",
                listed(&available_names())
            ),
        )),
    }
}

/// Whether two names differ by at most two edits (Levenshtein), case aside.
fn similar(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let cost = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()] <= 2.min(b.len().saturating_sub(1))
}

/// The best available backend: the first of [`PREFERENCE`], then any other by name.
///
/// # Errors
/// [`ErrorKind::NoBackend`] when none is linked or none can work, with the reasons.
pub fn default_backend() -> Result<Arc<dyn Backend>> {
    let all = backends();
    if all.is_empty() {
        return Err(Error::new(
            ErrorKind::NoBackend,
            "no backend is linked; depend on a backend crate such as `metal-backend`",
        ));
    }
    let preferred = PREFERENCE.iter().filter_map(|n| all.iter().find(|b| b.name() == *n));
    let others = all.iter().filter(|b| !PREFERENCE.contains(&b.name()));
    let mut reasons = Vec::new();
    for candidate in preferred.chain(others) {
        match availability(candidate.as_ref()) {
            Ok(()) => return Ok(Arc::clone(candidate)),
            Err(reason) => reasons.push(format!("{}: {reason}", candidate.name())),
        }
    }
    Err(Error::new(
        ErrorKind::NoBackend,
        format!("no backend can be used on this machine ({})", reasons.join("; ")),
    ))
}

/// Loads the model at `path` with the backend that `options` name, or the default one.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] when there is nothing at `path`; else as [`backend`],
/// [`LoadOptions::validate`] and [`Backend::load_model`].
pub fn load_model(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
    let path = path.as_ref();
    options.validate()?;
    let backend = backend(options.backend.as_deref().unwrap_or_default())?;
    if !path.exists() {
        return Err(Error::new(
            ErrorKind::ModelNotFound,
            "there is no model here; give a directory with config.json and safetensors files, or a \
             .gguf file",
        )
        .with_path(path));
    }
    backend.load_model(path, options)
}

#[cfg(test)]
mod tests {
    use super::similar;

    #[test]
    fn similar_names_are_near() {
        assert!(similar("metal", "Metall"));
        assert!(similar("cpu", "gpu"));
        assert!(!similar("cpu", "mlx_lm"));
        assert!(!similar("cuda", ""));
    }
}
