//! What a user types after `--model`, turned into a path.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

use super::progress::Progress;
use super::{HfHub, ModelSpec, catalog, fetch};

/// Finds the model: an existing directory or file; else a known name, fetched if need be; else
/// `owner/name[@revision][:file]` in the Hugging Face cache, fetched from the hub if it is not there.
/// `None` is the first model.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] listing the known names, and whatever [`super::fetch()`] and
/// [`HfHub::get`] return.
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
    if let Some(spec) = ModelSpec::parse(model) {
        return HfHub::from_env()?.get(&spec, progress);
    }
    Err(not_found(model))
}

pub(super) fn not_found(model: &str) -> Error {
    Error::new(
        ErrorKind::ModelNotFound,
        format!(
            "no model {model:?}: not a directory, a file, a known name or owner/name; known names: {}",
            catalog::names()
        ),
    )
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
}
