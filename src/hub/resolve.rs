//! What a user types after `--model`, turned into a path.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

use super::progress::Progress;
use super::{catalog, fetch};

/// The longest content of a `refs/main` file worth reading, in bytes.
const MAX_REF: u64 = 256;

/// Finds the model: an existing directory or file; else a known name, fetched if need be; else
/// `owner/name` in the local Hugging Face cache. `None` is the first model.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] listing the known names, and whatever [`super::fetch()`] returns.
pub fn resolve(model: Option<&str>, progress: &mut dyn Progress) -> Result<PathBuf> {
    let Some(model) = model else {
        return fetch::fetch(catalog::catalog()[0].name, progress);
    };
    let path = Path::new(model);
    if !model.is_empty() && path.exists() {
        return Ok(path.to_owned());
    }
    if catalog::find(model).is_some() {
        return fetch::fetch(model, progress);
    }
    let hub = hub_cache(&|name| std::env::var_os(name), std::env::home_dir());
    if let Some(found) = hub.and_then(|hub| in_hub_cache(&hub, model)) {
        return Ok(found);
    }
    Err(not_found(model))
}

pub(super) fn not_found(model: &str) -> Error {
    Error::new(
        ErrorKind::ModelNotFound,
        format!(
            "no model {model:?}: not a directory, a file or a known name; known names: {}",
            catalog::names()
        ),
    )
}

/// The Hugging Face cache that other tools share. We only read there.
fn hub_cache(
    var: &dyn Fn(&str) -> Option<std::ffi::OsString>,
    home: Option<PathBuf>,
) -> Option<PathBuf> {
    let set = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("HF_HUB_CACHE")
        .or_else(|| set("HF_HOME").map(|dir| dir.join("hub")))
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("huggingface/hub")))
        .or_else(|| home.map(|dir| dir.join(".cache/huggingface/hub")))
}

/// The snapshot that `refs/main` names, of the repository `owner/name`.
fn in_hub_cache(hub: &Path, id: &str) -> Option<PathBuf> {
    let (owner, name) = id.split_once('/')?;
    if !is_plain(owner) || !is_plain(name) {
        return None;
    }
    let repository = hub.join(format!("models--{owner}--{name}"));
    let reference = repository.join("refs/main");
    if std::fs::metadata(&reference).ok()?.len() > MAX_REF {
        return None;
    }
    let commit = std::fs::read_to_string(reference).ok()?;
    let commit = commit.trim();
    let snapshot = repository.join("snapshots").join(commit);
    (is_plain(commit) && snapshot.is_dir()).then_some(snapshot)
}

/// Whether a part of a repository's name is one plain path component.
fn is_plain(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::super::progress::Silent;
    use super::*;

    #[test]
    fn a_path_that_exists_wins() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().to_str().unwrap();
        assert_eq!(resolve(Some(text), &mut Silent).unwrap(), dir.path());
    }

    #[test]
    fn what_is_nowhere_lists_the_known_names() {
        for name in [
            "no-such-model",
            "",
            "a/b/c",
            "../no-such-model-beside-this",
            "no\0pe",
        ] {
            let error = resolve(Some(name), &mut Silent).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ModelNotFound);
            assert!(
                error.to_string().contains("smollm2-135m-instruct"),
                "{error}"
            );
        }
    }

    #[test]
    fn the_shared_cache_is_read_and_never_left() {
        let hub = tempfile::tempdir().unwrap();
        let repository = hub.path().join("models--own--tiny.model");
        let snapshot = repository.join("snapshots/abc123");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        let reference = repository.join("refs/main");
        std::fs::write(&reference, "abc123\n").unwrap();
        let found = in_hub_cache(hub.path(), "own/tiny.model");
        assert_eq!(found, Some(snapshot));
        assert_eq!(in_hub_cache(hub.path(), "own/other"), None);
        assert_eq!(in_hub_cache(hub.path(), "../own/tiny.model"), None);
        for lie in ["../../..", "..", "", "gone"] {
            std::fs::write(&reference, lie).unwrap();
            assert_eq!(in_hub_cache(hub.path(), "own/tiny.model"), None, "{lie:?}");
        }
    }

    #[test]
    fn the_shared_cache_is_where_its_variables_say() {
        let var = |name: &str| (name == "HF_HOME").then(|| "/hf".into());
        assert_eq!(hub_cache(&var, None), Some(PathBuf::from("/hf/hub")));
        assert_eq!(hub_cache(&|_| None, None), None);
        let home = hub_cache(&|_| None, Some("/h".into()));
        assert_eq!(home, Some(PathBuf::from("/h/.cache/huggingface/hub")));
    }
}
