//! A loaded model that threads share.

use inference::{LoadOptions, TextModel};

/// A loaded model, and how it was loaded. Threads share it.
pub(crate) struct Shared {
    pub(crate) model: Box<dyn TextModel>,
    /// The path or name that the caller gave.
    pub(crate) name: String,
    /// The load options, with the backend's name.
    pub(crate) options: LoadOptions,
}
