//! What a model has computed of a prompt, kept in a file.

use std::path::Path;

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Prompt;
use crate::options::GenerateOptions;
use crate::token::TokenStream;

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
    /// [`crate::ErrorKind::InvalidModel`] for a damaged file or one of another model, and
    /// [`crate::ErrorKind::Unsupported`] for one that does not say its tokens.
    fn load_prompt_cache(&self, path: &Path) -> Result<Vec<u32>>;

    /// The number of tokens that a file holds. This default reads all of it.
    ///
    /// # Errors
    /// As [`PromptCacheModel::load_prompt_cache`].
    fn prompt_cache_len(&self, path: &Path) -> Result<usize> {
        self.load_prompt_cache(path).map(|tokens| tokens.len())
    }

    /// Goes on from a file with `prompt`, which begins where the file's prompt ends: a text gets no
    /// tokens that begin one. Engines do it also for files that do not say their tokens, such as
    /// those of mlx-lm; penalties then see `prompt` alone.
    ///
    /// # Errors
    /// As [`PromptCacheModel::load_prompt_cache`] and [`TextModel::generate`].
    fn continue_prompt_cache(
        &self,
        path: &Path,
        prompt: &Prompt,
        options: &GenerateOptions,
    ) -> Result<TokenStream> {
        let mut tokens = self.load_prompt_cache(path)?;
        match (prompt, self.as_token_model()) {
            (Prompt::Tokens(more), _) => tokens.extend(more),
            (Prompt::Text(text), Some(model)) => tokens.extend(model.encode(text, false)?),
            _ => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "this backend does not turn texts into tokens",
                ));
            }
        }
        self.generate(&Prompt::Tokens(tokens), options)
    }
}
