//! The registry of backends, and the choice among them. Backends come from linked crates (through
//! `inventory`) and from explicit calls of [`register`]. The registry knows backends only by name.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock};

use parking_lot::RwLock;

use crate::backend::{Backend, Capabilities, TextModel};
use crate::error::{Error, ErrorKind, Result};
use crate::kit::panic_text;
use crate::options::LoadOptions;

/// The preferred order of names for [`default_backend`]; other names follow in sorted order.
pub const PREFERENCE: [&str; 5] = ["metal", "cuda", "rocm", "llama_cpp", "cpu"];

const NOTHING_LINKED: &str = "no backend is linked into this program; depend on a backend crate such as `rust-mlx-metal-backend` and \
     refer to it (`use metal_backend as _;`), or call `inference::register`";

/// A backend that a crate registers when it is linked; see [`crate::register_backend`].
#[derive(Debug, Clone, Copy)]
pub struct BackendRegistration {
    name: &'static str,
    make: fn() -> Box<dyn Backend>,
    origin: &'static str,
}

impl BackendRegistration {
    /// A backend called `name`. `make` creates it when the registry is first used.
    /// [`Backend::name`] must return the same name. `make` must not use the registry.
    #[must_use]
    pub const fn new(name: &'static str, make: fn() -> Box<dyn Backend>) -> Self {
        Self {
            name,
            make,
            origin: "an unnamed crate",
        }
    }

    /// Sets the source location of the registration, for the error about duplicate names.
    #[must_use]
    pub const fn with_origin(mut self, origin: &'static str) -> Self {
        self.origin = origin;
        self
    }
}

inventory::collect!(BackendRegistration);

/// Registers a backend in each program that links this crate. Use it outside of functions:
/// `register_backend!("mine", || Box::new(Mine));`. The expression is a function without captures
/// that returns a `Box<dyn Backend>`.
#[macro_export]
macro_rules! register_backend {
    ($name:expr, $make:expr $(,)?) => {
        $crate::inventory::submit! {
            $crate::BackendRegistration::new($name, $make)
                .with_origin(::core::concat!(::core::module_path!(), ":", ::core::line!()))
        }
    };
}

/// A backend with its registered name. The name is stored, because [`Backend::name`] would run
/// plugin code.
struct Entry {
    name: String,
    origin: &'static str,
    backend: Arc<dyn Backend>,
}

/// A name that several linked crates register.
struct Duplicate {
    name: String,
    origins: Vec<&'static str>,
}

impl Duplicate {
    fn error(&self) -> Error {
        Error::new(
            ErrorKind::DuplicateBackend,
            format!(
                "{} linked crates register a backend named `{}` ({}); link only one of them",
                self.origins.len(),
                self.name,
                self.origins.join(", ")
            ),
        )
    }
}

struct Registry {
    /// Sorted by name. Each name occurs once.
    entries: Vec<Entry>,
    /// Names that several backends claim, sorted by name. Lookups return none of these backends,
    /// because one would hide the others.
    duplicates: Vec<Duplicate>,
}

static REGISTRY: LazyLock<RwLock<Registry>> = LazyLock::new(|| {
    let mut linked: Vec<_> = inventory::iter::<BackendRegistration>.into_iter().collect();
    // The linker's order is not stable, so registrations are sorted by name and source location.
    linked.sort_by_key(|r| (r.name, r.origin));
    let mut registry = Registry {
        entries: Vec::new(),
        duplicates: Vec::new(),
    };
    for group in linked.chunk_by(|a, b| a.name == b.name) {
        match group {
            [one] => registry.entries.push(Entry {
                name: one.name.to_owned(),
                origin: one.origin,
                backend: make(one),
            }),
            _ => registry.duplicates.push(Duplicate {
                name: group[0].name.to_owned(),
                origins: group.iter().map(|r| r.origin).collect(),
            }),
        }
    }
    RwLock::new(registry)
});

/// Creates a linked backend; a plugin that fails is listed as unavailable.
fn make(registration: &BackendRegistration) -> Arc<dyn Backend> {
    // The name is compared inside the closure, because `name` and the drop of a refused backend run
    // plugin code, which may panic.
    let made = catch_unwind(|| {
        let backend = (registration.make)();
        if backend.name() == registration.name {
            return Ok(backend);
        }
        Err(format!(
            "it is registered as `{}` but calls itself `{}` ({}); both must be the same",
            registration.name,
            backend.name(),
            registration.origin
        ))
    });
    let reason = match made {
        Ok(Ok(backend)) => return Arc::from(backend),
        Ok(Err(reason)) => reason,
        Err(panic) => format!(
            "it panicked when it was made ({}){}",
            registration.origin,
            said(panic.as_ref())
        ),
    };
    Arc::new(Broken {
        name: registration.name,
        reason,
    })
}

/// A placeholder for a plugin that could not be created.
struct Broken {
    name: &'static str,
    reason: String,
}

impl Backend for Broken {
    fn name(&self) -> &str {
        self.name
    }
    fn available(&self) -> bool {
        false
    }
    fn unavailable_reason(&self) -> Option<String> {
        Some(self.reason.clone())
    }
    fn device(&self) -> String {
        String::from("none")
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new()
    }
    fn load_model(&self, _: &Path, _: &LoadOptions) -> Result<Box<dyn TextModel>> {
        Err(Error::new(
            ErrorKind::UnavailableBackend,
            format!("backend `{}` cannot be used: {}", self.name, self.reason),
        ))
    }
}

/// `: message` for a panic with a message, otherwise an empty text.
fn said(panic: &(dyn Any + Send)) -> String {
    panic_text(panic).map_or_else(String::new, |message| format!(": {message}"))
}

/// Runs `f` on the registry. `f` must not run plugin code, because the lock is held.
fn read<R>(f: impl FnOnce(&Registry) -> R) -> R {
    f(&REGISTRY.read())
}

/// Adds a backend made at run time, under its [`Backend::name`].
///
/// # Errors
/// [`ErrorKind::DuplicateBackend`] when the name is taken; [`ErrorKind::InvalidOption`] when it is
/// empty or has surrounding white space.
pub fn register(backend: Arc<dyn Backend>) -> Result<()> {
    let name = backend.name().to_owned();
    if name.is_empty() || name.trim() != name {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "a backend cannot be named `{name}`; a name is not empty and has no white space around it"
            ),
        ));
    }
    let mut registry = REGISTRY.write();
    if let Some(duplicate) = registry.duplicates.iter().find(|d| d.name == name) {
        return Err(duplicate.error());
    }
    match registry.entries.binary_search_by(|e| e.name.cmp(&name)) {
        Err(at) => {
            let origin = "an explicit call of `register`";
            registry.entries.insert(
                at,
                Entry {
                    name,
                    origin,
                    backend,
                },
            );
            Ok(())
        }
        Ok(at) => Err(Error::new(
            ErrorKind::DuplicateBackend,
            format!(
                "a backend named `{name}` is registered already, by {}; choose another name",
                registry.entries[at].origin
            ),
        )),
    }
}

/// All backends, available or not, sorted by name. A linked backend that could not be created is
/// listed as unavailable with the reason. Names claimed twice are not listed; see [`duplicates`].
#[must_use]
pub fn backends() -> Vec<Arc<dyn Backend>> {
    read(|r| r.entries.iter().map(|e| Arc::clone(&e.backend)).collect())
}

/// Names that several linked crates register, sorted. Such a name is unusable until only one crate
/// registers it.
#[must_use]
pub fn duplicates() -> Vec<String> {
    read(|r| r.duplicates.iter().map(|d| d.name.clone()).collect())
}

/// All backends with their names, sorted by name.
fn named() -> Vec<(String, Arc<dyn Backend>)> {
    let pair = |e: &Entry| (e.name.clone(), Arc::clone(&e.backend));
    read(|r| r.entries.iter().map(pair).collect())
}

/// Returns an error if several crates register `name`.
fn refuse_duplicate(name: &str) -> Result<()> {
    let duplicate_error = |r: &Registry| {
        let duplicate = r.duplicates.iter().find(|d| d.name == name);
        duplicate.map(Duplicate::error)
    };
    read(duplicate_error).map_or(Ok(()), Err)
}

/// Whether a backend can work on this machine. A plugin that panics counts as unavailable.
///
/// # Errors
/// The reason why it is unavailable.
pub fn availability(backend: &dyn Backend) -> Result<(), String> {
    let asked = catch_unwind(AssertUnwindSafe(|| {
        if backend.available() {
            None
        } else {
            Some(backend.unavailable_reason())
        }
    }));
    match asked {
        Ok(None) => Ok(()),
        Ok(Some(reason)) => {
            Err(reason.unwrap_or_else(|| String::from("it is not available on this machine")))
        }
        Err(panic) => Err(format!(
            "it panicked when asked whether it is available{}",
            said(panic.as_ref())
        )),
    }
}

fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.collect();
    if names.is_empty() {
        String::from("none")
    } else {
        names.join(", ")
    }
}

/// The backend called `name`; an empty name means [`default_backend`].
///
/// # Errors
/// [`ErrorKind::UnknownBackend`] listing the known names; [`ErrorKind::UnavailableBackend`] with
/// the reason and the available names; [`ErrorKind::DuplicateBackend`] when several crates claim
/// the name.
pub fn backend(name: &str) -> Result<Arc<dyn Backend>> {
    if name.is_empty() {
        return default_backend();
    }
    refuse_duplicate(name)?;
    let all = named();
    let Some((_, backend)) = all.iter().find(|(n, _)| n == name) else {
        return Err(unknown(name, &all));
    };
    match availability(backend.as_ref()) {
        Ok(()) => Ok(Arc::clone(backend)),
        Err(reason) => {
            let available = all
                .iter()
                .filter(|(_, b)| availability(b.as_ref()).is_ok())
                .map(|(n, _)| n.as_str());
            Err(Error::new(
                ErrorKind::UnavailableBackend,
                format!(
                    "backend `{name}` cannot be used: {reason}; available are: {}",
                    listed(available)
                ),
            ))
        }
    }
}

fn unknown(name: &str, all: &[(String, Arc<dyn Backend>)]) -> Error {
    let duplicates = duplicates();
    let names = || all.iter().map(|(n, _)| n).chain(&duplicates);
    let message = if names().next().is_none() {
        format!("no backend is named `{name}`: {NOTHING_LINKED}")
    } else {
        let hint = question(name, names().map(String::as_str));
        let there_are = listed(all.iter().map(|(n, _)| n.as_str()));
        format!("no backend is named `{name}`; there are: {there_are}{hint}")
    };
    Error::new(ErrorKind::UnknownBackend, message)
}

/// Returns the question "; did you mean `NAME`?" with the most similar of `names`. The text is
/// empty if no name is similar.
pub(crate) fn question<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> String {
    names
        .map(|known| (distance(known, name), known))
        .min()
        .filter(|(edits, _)| *edits <= 2.min(name.chars().count().saturating_sub(1)))
        .map(|(_, known)| format!("; did you mean `{known}`?"))
        .unwrap_or_default()
}

/// The Levenshtein distance between two names, ignoring case. Long names are truncated.
fn distance(a: &str, b: &str) -> usize {
    let [a, b] = [a, b].map(|name| name.to_lowercase().chars().take(64).collect::<String>());
    strsim::levenshtein(&a, &b)
}

/// The first available backend in the order of [`PREFERENCE`], then by name.
///
/// # Errors
/// [`ErrorKind::NoBackend`] with the reasons when none is linked or available;
/// [`ErrorKind::DuplicateBackend`] when several crates claim a name that precedes the first
/// available one.
pub fn default_backend() -> Result<Arc<dyn Backend>> {
    let all = named();
    let duplicates = duplicates();
    let mut names: Vec<&str> = all.iter().map(|(n, _)| n.as_str()).collect();
    names.extend(duplicates.iter().map(String::as_str));
    if names.is_empty() {
        return Err(Error::new(ErrorKind::NoBackend, NOTHING_LINKED));
    }
    let rank = |n: &str| PREFERENCE.iter().position(|p| *p == n);
    names.sort_by_key(|n| (rank(n).unwrap_or(PREFERENCE.len()), *n));
    let mut reasons = Vec::new();
    for name in names {
        refuse_duplicate(name)?;
        let Some((_, candidate)) = all.iter().find(|(n, _)| n == name) else {
            continue;
        };
        match availability(candidate.as_ref()) {
            Ok(()) => return Ok(Arc::clone(candidate)),
            Err(reason) => reasons.push(format!("{name}: {reason}")),
        }
    }
    Err(Error::new(
        ErrorKind::NoBackend,
        format!(
            "no backend can be used on this machine ({})",
            reasons.join("; ")
        ),
    ))
}

/// Loads the model at `path` with the backend that `options` names, or with the default one.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] if `path` does not exist, before any backend is called; otherwise
/// as [`LoadOptions::validate`], [`backend()`] and [`Backend::load_model`].
pub fn load_model(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
    let path = path.as_ref();
    options.validate()?;
    match path.try_exists() {
        Ok(true) => {}
        Ok(false) => {
            return Err(Error::new(
                ErrorKind::ModelNotFound,
                "there is no model here; give a directory with config.json and safetensors files, \
                 or a .gguf file",
            )
            .with_path(path));
        }
        Err(e) => {
            return Err(Error::new(ErrorKind::Io, "the model cannot be reached")
                .with_path(path)
                .with_source(e));
        }
    }
    backend(options.backend.as_deref().unwrap_or_default())?.load_model(path, options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        assert_eq!(distance("metal", "Metall"), 1);
        assert_eq!(distance("cpu", "gpu"), 1);
        assert_eq!(distance("cuda", ""), 4);
        assert_eq!(distance("abc", "cab"), 2);
    }

    #[test]
    fn panics_speak() {
        let panic = catch_unwind(|| panic!("no {}", "driver")).unwrap_err();
        assert_eq!(said(panic.as_ref()), ": no driver");
        assert_eq!(said(&7u8), "");
    }
}
