//! Limits on the size of tokenizers, templates and texts.
//!
//! Model directories are untrusted, so each number is checked before memory or time is spent. The
//! context length is a separate limit, which the model checks on token ids.

/// Upper bounds for everything that this crate reads, builds or renders.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextLimits {
    /// Bytes of `tokenizer.json`.
    pub tokenizer_bytes: u64,
    /// Bytes of each small JSON file beside `tokenizer.json`.
    pub config_bytes: u64,
    /// Tokens of a vocabulary.
    pub vocab: usize,
    /// Merge rules of a BPE model, given or derived from scores.
    pub merges: usize,
    /// Bytes of one token of a vocabulary.
    pub token_bytes: usize,
    /// Bytes of all tokens of a GGUF vocabulary together.
    pub vocab_bytes: usize,
    /// Bytes of one text to encode, and of one rendered chat.
    pub text_bytes: usize,
    /// Bytes of a chat template.
    pub template_bytes: usize,
    /// Number of instructions that a template may execute per rendering.
    pub template_fuel: u64,
    /// Nesting of macros, loops and blocks while a template runs.
    pub template_recursion: usize,
    /// Concatenations, additions and multiplications inside one template tag.
    pub template_operators: usize,
}

impl Default for TextLimits {
    fn default() -> Self {
        Self {
            tokenizer_bytes: 128 << 20,
            config_bytes: 16 << 20,
            vocab: 1 << 20,
            merges: 1 << 22,
            token_bytes: 1024,
            vocab_bytes: 32 << 20,
            text_bytes: 8 << 20,
            template_bytes: 256 << 10,
            template_fuel: 4_000_000,
            template_recursion: 64,
            template_operators: 48,
        }
    }
}
