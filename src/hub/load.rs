//! Loads a model by name. Bindings for other languages use this function.

use inference::{LoadOptions, Result, TextModel};

use super::progress::Progress;
use super::resolve;

/// Finds a model as [`resolve()`] does, and loads it with the backend that `options` names, or with
/// the best available one. The backend is checked first, so that a wrong name costs no download.
///
/// # Errors
/// As [`inference::backend()`], [`resolve()`] and [`inference::load_model`].
pub fn load(
    model: Option<&str>,
    options: &LoadOptions,
    progress: &mut dyn Progress,
) -> Result<Box<dyn TextModel>> {
    options.validate()?;
    inference::backend(options.backend.as_deref().unwrap_or_default())?;
    inference::load_model(resolve::resolve(model, progress)?, options)
}

#[cfg(test)]
mod tests {
    use super::super::progress::Silent;
    use super::*;
    use inference::ErrorKind;

    #[test]
    fn the_backend_is_checked_before_the_name() {
        let options = LoadOptions::new().with_backend("no-such-backend");
        let failed = |result: Result<Box<dyn TextModel>>| result.err().map(|e| e.kind());
        let error = load(Some("no-such-model"), &options, &mut Silent);
        assert_eq!(failed(error), Some(ErrorKind::UnknownBackend));
    }
}
