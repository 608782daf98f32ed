//! The vocabulary of scripted models: the 256 bytes, the end-of-text token, and special tokens.

use inference::{Error, ErrorKind, Result};

/// The token that ends a text.
pub const END: u32 = 256;

/// The tokens of a model: one per byte, [`END`], and the special tokens from 257 on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vocabulary {
    specials: Vec<String>,
}

impl Vocabulary {
    /// A vocabulary of the bytes and [`END`], without special tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds special tokens of these names.
    #[must_use]
    pub fn with_specials<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.specials.extend(names.into_iter().map(Into::into));
        self
    }

    /// The number of tokens.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        END as usize + 1 + self.specials.len()
    }

    /// The name of a special token.
    #[must_use]
    pub fn special(&self, id: u32) -> Option<&str> {
        let at = id.checked_sub(END + 1)?;
        self.specials.get(at as usize).map(String::as_str)
    }

    /// Converts text to ids. The name of a special token becomes that token.
    #[must_use]
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let (mut ids, mut rest) = (Vec::new(), text.as_bytes());
        while let Some((byte, after)) = rest.split_first() {
            let named = (END + 1..).zip(&self.specials);
            let mut named = named.filter_map(|(id, name)| {
                let after = rest.strip_prefix(name.as_bytes())?;
                (!name.is_empty()).then_some((id, after))
            });
            let (id, after) = named.next().unwrap_or((u32::from(*byte), after));
            ids.push(id);
            rest = after;
        }
        ids
    }

    /// Converts ids to text. If `special` is true, special tokens become their names; otherwise
    /// they add nothing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String> {
        self.check(ids)?;
        let mut bytes = Vec::new();
        for &id in ids {
            match u8::try_from(id) {
                Ok(byte) => bytes.push(byte),
                Err(_) if special => bytes.extend(self.special(id).unwrap_or_default().bytes()),
                Err(_) => {}
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Checks that all ids are in the vocabulary.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] that names the first id outside the vocabulary.
    pub fn check(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|id| **id as usize >= self.len()) {
            Some(id) => Err(Error::new(
                ErrorKind::InvalidOption,
                format!("token {id} is outside the vocabulary of {}", self.len()),
            )),
            None => Ok(()),
        }
    }
}
