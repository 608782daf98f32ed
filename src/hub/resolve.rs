//! Resolves the text after `--model` to a path.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

use super::progress::Progress;
use super::{HfHub, ModelSpec, catalog, elsewhere, fetch, suggest};

/// Finds the model. The text may be the path of an existing directory or file. It may be a known
/// name, which is downloaded if necessary. It may be a name from another tool, if the Hugging Face
/// cache contains that model. Otherwise it is `owner/name[@revision][:file]` or the URL of a
/// model's page, which is downloaded if necessary. `None` means the first known model.
///
/// # Errors
/// [`ErrorKind::ModelNotFound`] with similar names, or with instructions for getting the model; the
/// errors of [`super::fetch()`] and [`HfHub::get`].
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
    if let Some(spec) = elsewhere::on_the_hub(model).and_then(ModelSpec::parse) {
        let cached = HfHub::from_env()?.cached(&spec);
        return cached.ok_or_else(|| suggest::not_found(model));
    }
    if let Some(spec) = ModelSpec::parse(model) {
        return HfHub::from_env()?.get(&spec, progress).map_err(|e| {
            let like = suggest::similar(&spec.id(), &[]);
            let question = suggest::question(&like);
            // The name is known, so the network caused the error.
            if e.kind() != ErrorKind::ModelNotFound
                || question.is_empty()
                || like.contains(&spec.id())
            {
                return e;
            }
            Error::new(e.kind(), format!("{e}{question}"))
        });
    }
    Err(suggest::not_found(model))
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
    fn a_typo_is_answered_with_the_name_and_other_names_with_the_way() {
        let error = suggest::not_found("smolm2-135m-instrct").to_string();
        assert!(
            error.contains("did you mean smollm2-135m-instruct"),
            "{error}"
        );
        let error = suggest::not_found("llama3.2").to_string();
        assert!(
            error.contains("mlx pull mlx-community/Llama-3.2-3B-Instruct-4bit"),
            "{error}"
        );
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
