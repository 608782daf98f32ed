//! Prompt caches: the computed state of a prompt, saved in a file.

use std::path::Path;

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Prompt;
use crate::options::GenerateOptions;
use crate::token::TokenStream;

/// A model that can save the computed state of a prompt.
pub trait PromptCacheModel: TextModel {
    /// Runs a prompt and saves its computed state to the file `path`, with the prompt's tokens and
    /// the model's identity. Returns the number of tokens. The file is replaced atomically. Engines
    /// check `interrupt` between prefill steps; an interrupted call writes no file.
    ///
    /// # Errors
    /// As [`TextModel::generate`] and [`Interrupt::check`], and [`crate::ErrorKind::Io`] when the
    /// file cannot be written.
    fn save_prompt_cache(
        &self,
        prompt: &Prompt,
        path: &Path,
        interrupt: &Interrupt,
    ) -> Result<usize>;

    /// Loads a file of [`PromptCacheModel::save_prompt_cache`]. A later prompt that begins with the
    /// returned tokens reuses the state.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] for a damaged file or a file of another model, and
    /// [`crate::ErrorKind::Unsupported`] for a file without token ids.
    fn load_prompt_cache(&self, path: &Path) -> Result<Vec<u32>>;

    /// The number of tokens in a file. This default reads the whole file.
    ///
    /// # Errors
    /// As [`PromptCacheModel::load_prompt_cache`].
    fn prompt_cache_len(&self, path: &Path) -> Result<usize> {
        self.load_prompt_cache(path).map(|tokens| tokens.len())
    }

    /// Continues the saved prompt with `prompt`. A text gets no start tokens, because it follows
    /// the saved prompt. Engines may accept files without token ids, such as those of mlx-lm;
    /// penalties then apply to `prompt` only.
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
