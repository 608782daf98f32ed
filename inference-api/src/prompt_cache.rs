//! What a model has computed of a prompt, kept in a file.

use std::path::Path;

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::Result;
use crate::message::Prompt;

/// A model that saves the computed state of a prompt.
pub trait PromptCacheModel: TextModel {
    /// Runs a prompt and writes its computed state to the file `path`, with its tokens and the
    /// model's identity. Returns the number of tokens. The file is replaced as a whole or not at
    /// all.
    ///
    /// # Errors
    /// As [`TextModel::generate`], and [`crate::ErrorKind::Io`] when the file cannot be written.
    fn save_prompt_cache(&self, prompt: &Prompt, path: &Path) -> Result<usize>;

    /// [`PromptCacheModel::save_prompt_cache`], unless `interrupt` ends it. Engines ask between the
    /// steps of the prompt, and then write nothing. This default, for those that do not, asks
    /// before.
    ///
    /// # Errors
    /// As [`PromptCacheModel::save_prompt_cache`] and [`Interrupt::check`].
    fn save_prompt_cache_until(
        &self,
        prompt: &Prompt,
        path: &Path,
        interrupt: &Interrupt,
    ) -> Result<usize> {
        interrupt.check()?;
        self.save_prompt_cache(prompt, path)
    }

    /// Reads the file of [`PromptCacheModel::save_prompt_cache`]. The next prompt that begins with
    /// the tokens returned is then not computed from the start.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] for a damaged file or one of another model.
    fn load_prompt_cache(&self, path: &Path) -> Result<Vec<u32>>;
}
