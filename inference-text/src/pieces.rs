//! Converts a token to its bytes, for each encoding that vocabularies use.
//!
//! Decoding is defined per token. Therefore a whole sequence and a stream give equal texts. The
//! module `detokenizer` implements streaming.

use inference::kit::Utf8Decoder;
use inference::{Error, ErrorKind, Result};
use serde_json::Value;

/// The encoding of bytes in a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DecodeRule {
    /// GPT-2's alphabet: each character of a token represents one byte.
    ByteLevel,
    /// SentencePiece: text with a marker for spaces, and bytes as `<0xNN>`.
    Pieces(PieceRule),
    /// No decoder: tokens are words with one space between them.
    Words,
    /// WordPiece: words, and pieces that continue a word.
    WordPiece {
        /// The prefix of a piece that continues a word.
        prefix: String,
        /// Whether spaces before punctuation and English contractions are removed.
        cleanup: bool,
    },
}

/// Before these texts, cleanup removes a space, as in the `tokenizers` crate.
const CLOSING: [&str; 9] = [".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"];

/// The steps of a SentencePiece decoder, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct PieceRule {
    /// Text replacements inside each token. Usually the space marker is replaced by a space.
    replace: Vec<(String, String)>,
    /// The space marker, and whether markers are removed from the first token.
    marker: Option<(char, bool)>,
    /// Whether `<0xNN>` represents a byte.
    bytes: bool,
    /// A character to strip from the start of the whole text, and the maximum number of times.
    strip: Option<(char, usize)>,
}

impl PieceRule {
    #[cfg(test)]
    /// The rule of a SentencePiece vocabulary: `▁` is a space. One leading space may be stripped.
    pub(crate) fn sentence_piece(strip_leading_space: bool) -> Self {
        Self {
            replace: vec![("▁".into(), " ".into())],
            marker: None,
            bytes: true,
            strip: strip_leading_space.then_some((' ', 1)),
        }
    }
}

impl DecodeRule {
    /// Reads the rule from the `decoder` of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Unsupported` for a decoder that cannot be expressed by these rules.
    pub(crate) fn from_json(decoder: &Value) -> Result<Self> {
        if decoder.is_null() {
            return Ok(Self::Words);
        }
        let steps: Vec<&Value> = match kind(decoder) {
            "Sequence" => decoder["decoders"]
                .as_array()
                .into_iter()
                .flatten()
                .collect(),
            _ => vec![decoder],
        };
        if steps.iter().any(|step| kind(step) == "ByteLevel") {
            if steps
                .iter()
                .all(|step| matches!(kind(step), "ByteLevel" | "Fuse"))
            {
                return Ok(Self::ByteLevel);
            }
            return Err(unsupported("ByteLevel mixed with other steps"));
        }
        if let [step] = steps.as_slice()
            && kind(step) == "WordPiece"
        {
            return Ok(Self::WordPiece {
                prefix: step["prefix"].as_str().unwrap_or("##").to_owned(),
                cleanup: step["cleanup"].as_bool().unwrap_or(true),
            });
        }
        let mut rule = PieceRule::default();
        let mut fused = false;
        for step in steps {
            match kind(step) {
                "Replace" if !fused => {
                    let pattern = &step["pattern"]["String"];
                    let (Some(from), Some(to)) = (pattern.as_str(), step["content"].as_str())
                    else {
                        return Err(unsupported("Replace with a regular expression"));
                    };
                    if from.is_empty() {
                        return Err(unsupported("Replace of an empty string"));
                    }
                    rule.replace.push((from.to_owned(), to.to_owned()));
                }
                "Metaspace" if !fused => {
                    let marker = step["replacement"].as_str().and_then(|s| s.chars().next());
                    let never = step["prepend_scheme"].as_str() == Some("never");
                    rule.marker = Some((marker.unwrap_or('▁'), !never));
                }
                "ByteFallback" if !fused => rule.bytes = true,
                "Fuse" => fused = true,
                "Strip" if fused && rule.strip.is_none() => {
                    let what = step["content"].as_str().and_then(|s| s.chars().next());
                    let start = step["start"].as_u64().unwrap_or(0);
                    if step["stop"].as_u64().unwrap_or(0) != 0 {
                        return Err(unsupported("Strip at the end of the text"));
                    }
                    let start = usize::try_from(start).unwrap_or(usize::MAX);
                    rule.strip = what.filter(|_| start > 0).map(|c| (c, start));
                }
                other => return Err(unsupported(other)),
            }
        }
        Ok(Self::Pieces(rule))
    }

    /// The bytes of one token. An `added` token of a byte-level vocabulary is plain UTF-8. `first`
    /// marks the first token of a text.
    pub(crate) fn bytes(&self, token: &str, added: bool, first: bool) -> Vec<u8> {
        match self {
            Self::ByteLevel if added => token.as_bytes().to_vec(),
            Self::ByteLevel => token
                .chars()
                .map(byte_of)
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| token.as_bytes().to_vec()),
            Self::Words if first => token.as_bytes().to_vec(),
            Self::Words => [b" ", token.as_bytes()].concat(),
            Self::Pieces(rule) => rule.bytes(token, first),
            Self::WordPiece { prefix, cleanup } => match token.strip_prefix(prefix.as_str()) {
                _ if first => token.as_bytes().to_vec(),
                Some(rest) => rest.as_bytes().to_vec(),
                None if *cleanup && CLOSING.iter().any(|c| token.starts_with(c)) => {
                    token.as_bytes().to_vec()
                }
                None => [b" ", token.as_bytes()].concat(),
            },
        }
    }

    /// A character to strip from the start of the whole text, and the maximum number of times.
    fn strip(&self) -> Option<(char, usize)> {
        match self {
            Self::Pieces(rule) => rule.strip,
            _ => None,
        }
    }
}

/// Joins the bytes of tokens to text. It returns complete characters, and withholds incomplete
/// ones.
#[derive(Debug, Clone)]
pub(crate) struct TextBuilder {
    strip: Option<(char, usize)>,
    first: bool,
    characters: Utf8Decoder,
}

impl TextBuilder {
    /// Starts a text.
    pub(crate) fn new(rule: &DecodeRule) -> Self {
        Self {
            strip: rule.strip(),
            first: true,
            characters: Utf8Decoder::new(),
        }
    }

    /// Treats the text as the continuation of another text, so its leading space stays.
    pub(crate) fn keep_start(&mut self) {
        self.strip = None;
        self.first = false;
    }

    /// Whether a character is incomplete.
    pub(crate) fn is_open(&self) -> bool {
        self.characters.is_open()
    }

    /// Adds one token and returns the text that is now complete. Each maximal invalid part becomes
    /// one U+FFFD, as in `String::from_utf8_lossy` of the whole.
    pub(crate) fn push(&mut self, rule: &DecodeRule, token: &str, added: bool) -> String {
        let bytes = rule.bytes(token, added, self.first);
        self.first = false;
        let text = self.characters.push(&bytes);
        self.strip_start(text)
    }

    /// Ends the text: U+FFFD if a character is still incomplete.
    pub(crate) fn finish(&mut self) -> String {
        let text = self.characters.finish();
        self.strip_start(text)
    }

    fn strip_start(&mut self, text: String) -> String {
        let Some((what, limit)) = self.strip else {
            return text;
        };
        if text.is_empty() {
            return text;
        }
        let n = text.chars().take(limit).take_while(|c| *c == what).count();
        // If everything was stripped, the next text is still at the start.
        let all = n == text.chars().count();
        self.strip = (all && n < limit).then(|| (what, limit - n));
        text.chars().skip(n).collect()
    }
}

impl PieceRule {
    fn bytes(&self, token: &str, first: bool) -> Vec<u8> {
        if self.bytes
            && let Some(byte) = byte_token(token)
        {
            return vec![byte];
        }
        let mut text = token.to_owned();
        for (from, to) in &self.replace {
            if text.contains(from.as_str()) {
                text = text.replace(from.as_str(), to);
            }
        }
        match self.marker {
            Some((marker, true)) if first => text.replace(marker, ""),
            Some((marker, _)) => text.replace(marker, " "),
            None => text,
        }
        .into_bytes()
    }
}

/// The byte that a `<0xNN>` token represents; `None` for other tokens.
///
/// ```
/// assert_eq!(inference_text::byte_token("<0x0A>"), Some(10));
/// ```
pub fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}

/// The byte that a character of GPT-2's alphabet represents. Printable Latin-1 characters represent
/// themselves. The characters from U+0100 on represent the other 68 bytes, in order.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("unknown")
}

fn unsupported(what: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "the tokenizer's decoder uses {what}; supported are ByteLevel, WordPiece, Metaspace, and a \
             Sequence of Replace (plain strings), ByteFallback, Metaspace, Fuse and Strip (at the start)"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [0usize; 256];
        for code in 0..0x400u32 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('A'), Some(b'A'));
    }

    #[test]
    fn byte_tokens_are_exactly_two_digits() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xff>"), Some(255));
        for not in ["<0x+A>", "<0xA>", "<0x0A", "<0x0AB>", "0x0A"] {
            assert_eq!(byte_token(not), None, "{not}");
        }
    }

    #[test]
    fn rules_are_read_from_decoders() {
        let llama = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert_eq!(
            DecodeRule::from_json(&llama).unwrap(),
            DecodeRule::Pieces(PieceRule::sentence_piece(true))
        );
        let level = json!({"type": "ByteLevel", "add_prefix_space": false});
        assert_eq!(
            DecodeRule::from_json(&level).unwrap(),
            DecodeRule::ByteLevel
        );
        assert_eq!(
            DecodeRule::from_json(&Value::Null).unwrap(),
            DecodeRule::Words
        );
        let error = DecodeRule::from_json(&json!({"type": "CTC"})).unwrap_err();
        assert!(error.to_string().contains("WordPiece"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
}
