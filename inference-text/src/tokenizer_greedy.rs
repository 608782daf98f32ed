//! Tokenizers that take the longest token at each position of a text (RWKV's "World" vocabulary). A
//! token may be any bytes, so its text in a GGUF file has Python's escapes.

use std::collections::HashMap;

use inference::{Error, ErrorKind, Result};
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Encoding, OffsetType, Token, Tokenizer};

use super::pieces::byte_of;
use inference_formats::GgufTokenizerParts;

/// The value of `tokenizer.ggml.model`.
pub(super) const MODEL: &str = "rwkv";

/// The type of ordinary tokens in `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;

/// The type of control tokens.
const CONTROL: i32 = 3;

/// The vocabulary of a model directory. Each line has a token's number, its value as a literal of
/// Python (text or bytes), and its number of bytes.
pub(super) const FILE: &str = "rwkv_vocab_v20230424.txt";

/// Token 0, which ends texts. Vocabulary files begin with token 1.
const END: &str = "<|rwkv_tokenizer_end_of_text|>";

/// The parts that a vocabulary file describes.
///
/// # Errors
/// `InvalidModel` if a line has another form, or tokens are not numbered from 1.
pub(super) fn from_file(text: &str) -> Result<GgufTokenizerParts> {
    let mut tokens = vec![END.to_owned()];
    for (number, line) in (1..).zip(text.lines()) {
        let fault = |why: &str| bad(format!("line {number}: {why}"));
        let parts =
            (line.split_once(' ')).and_then(|(id, rest)| Some((id, rest.rsplit_once(' ')?)));
        let Some((id, (value, length))) = parts else {
            return Err(fault("needs a number, a token and its length"));
        };
        if id.parse() != Ok(tokens.len()) {
            let next = tokens.len();
            return Err(fault(&format!(
                "has the number {id:?}; the next token is {next}"
            )));
        }
        let bytes = literal(value).ok_or_else(|| fault("the token is no literal of Python"))?;
        if length.trim().parse() != Ok(bytes.len()) {
            let count = bytes.len();
            return Err(fault(&format!(
                "says {length:?}; the token has {count} bytes"
            )));
        }
        tokens.push(bytes.iter().map(|byte| format!(r"\x{byte:02x}")).collect());
    }
    let mut token_types = vec![NORMAL; tokens.len()];
    token_types[0] = CONTROL;
    Ok(GgufTokenizerParts {
        model: MODEL.into(),
        tokens,
        token_types: Some(token_types),
        bos_id: Some(0),
        eos_id: Some(0),
        ..GgufTokenizerParts::default()
    })
}

/// The vocabulary file of these parts; `None` for another kind of tokenizer.
///
/// # Errors
/// `InvalidModel` if an escape is incomplete.
pub(super) fn to_file(parts: &GgufTokenizerParts) -> Result<Option<String>> {
    if parts.model != MODEL {
        return Ok(None);
    }
    let mut text = String::new();
    let ordinary = (1..parts.tokens.len()).take_while(|id| kind(parts, *id) == NORMAL);
    for id in ordinary {
        let bytes = unescaped(&parts.tokens[id])
            .ok_or_else(|| bad(format!("token {id} has an incomplete escape")))?;
        let value: String = bytes.iter().map(|byte| format!(r"\x{byte:02x}")).collect();
        text += &format!("{id} b'{value}' {}\n", bytes.len());
    }
    Ok(Some(text))
}

/// The bytes of a literal of Python, text or bytes; `None` if it is neither.
fn literal(value: &str) -> Option<Vec<u8>> {
    let (is_bytes, quoted) = match value.strip_prefix('b') {
        Some(quoted) => (true, quoted),
        None => (false, value),
    };
    let quote = quoted.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let inner = quoted.strip_prefix(quote)?.strip_suffix(quote)?;
    let (mut bytes, mut chars) = (Vec::new(), inner.chars());
    let push = |bytes: &mut Vec<u8>, c: char| {
        bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
    };
    while let Some(c) = chars.next() {
        if c != '\\' {
            // The quote inside is escaped, and bytes are ASCII.
            if c == quote || (is_bytes && !c.is_ascii()) {
                return None;
            }
            push(&mut bytes, c);
            continue;
        }
        let digits = match chars.next()? {
            'n' => {
                bytes.push(b'\n');
                continue;
            }
            't' => {
                bytes.push(b'\t');
                continue;
            }
            'r' => {
                bytes.push(b'\r');
                continue;
            }
            other @ ('\\' | '\'' | '"') => {
                push(&mut bytes, other);
                continue;
            }
            'x' => 2,
            'u' if !is_bytes => 4,
            'U' if !is_bytes => 8,
            _ => return None,
        };
        let mut code = 0u32;
        for _ in 0..digits {
            code = code.checked_mul(16)? + chars.next()?.to_digit(16)?;
        }
        if is_bytes {
            bytes.push(u8::try_from(code).ok()?);
        } else {
            push(&mut bytes, char::from_u32(code)?);
        }
    }
    Some(bytes)
}

/// A trie of the tokens of ordinary text.
#[derive(Debug, Default)]
pub(crate) struct Greedy {
    /// The child of a node for a byte. The root is node 0.
    children: HashMap<(u32, u8), u32>,
    /// The token that ends at each node.
    ids: Vec<Option<u32>>,
}

impl Greedy {
    /// Adds a token. Of equal tokens, the first one is used.
    fn insert(&mut self, bytes: &[u8], id: u32) {
        let mut node = 0;
        for byte in bytes {
            let next = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
            node = *self.children.entry((node, *byte)).or_insert(next);
            if node == next {
                self.ids.push(None);
            }
        }
        if let Some(place) = self.ids.get_mut(node as usize) {
            place.get_or_insert(id);
        }
    }

    /// The longest token at the start of `bytes`, and its length.
    fn longest(&self, bytes: &[u8]) -> Option<(u32, usize)> {
        let (mut node, mut found) = (0, None);
        for (length, byte) in (1..).zip(bytes) {
            let Some(next) = self.children.get(&(node, *byte)) else {
                break;
            };
            node = *next;
            if let Some(id) = self.ids.get(node as usize).copied().flatten() {
                found = Some((id, length));
            }
        }
        found
    }

    /// Encodes a text. `engine` finds the added tokens in it.
    pub(crate) fn encode(&self, engine: &Tokenizer, text: &str) -> tokenizers::Result<Encoding> {
        let added = engine.get_added_vocabulary();
        let mut parts = added.extract_and_normalize(None::<&NormalizerWrapper>, text);
        parts.tokenize(|part| {
            let bytes = part.get().as_bytes();
            let (mut tokens, mut at) = (Vec::new(), 0);
            while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
                // Each byte has a token, so there is always one.
                let (id, length) = self.longest(rest).ok_or("a byte has no token")?;
                tokens.push(Token::new(id, String::new(), (at, at + length)));
                at += length;
            }
            Ok(tokens)
        })?;
        parts.into_encoding(None, 0, OffsetType::Byte)
    }
}

/// The parts, with the tokens of ordinary text spelled in the alphabet of byte-level vocabularies.
/// The byte-level decoder can then decode them.
///
/// # Errors
/// `InvalidModel` if an escape is incomplete.
pub(super) fn respelled(parts: &GgufTokenizerParts) -> Result<GgufTokenizerParts> {
    let alphabet: HashMap<u8, char> = ('\0'..'\u{200}')
        .filter_map(|c| Some((byte_of(c)?, c)))
        .collect();
    let mut parts = parts.clone();
    for id in 0..parts.tokens.len() {
        if kind(&parts, id) != NORMAL {
            continue;
        }
        let bytes = unescaped(&parts.tokens[id]).ok_or_else(|| {
            let token = &parts.tokens[id];
            bad(format!("token {id} has an incomplete escape: {token:?}"))
        })?;
        parts.tokens[id] = bytes.iter().filter_map(|b| alphabet.get(b)).collect();
    }
    Ok(parts)
}

/// The trie of respelled parts.
///
/// # Errors
/// `InvalidModel` if a byte has no token.
pub(super) fn build(parts: &GgufTokenizerParts) -> Result<Greedy> {
    let mut greedy = Greedy {
        ids: vec![None],
        ..Greedy::default()
    };
    for (id, token) in parts.tokens.iter().enumerate() {
        if kind(parts, id) == NORMAL && !token.is_empty() {
            let bytes: Vec<u8> = token.chars().filter_map(byte_of).collect();
            greedy.insert(&bytes, u32::try_from(id).unwrap_or(u32::MAX));
        }
    }
    if let Some(byte) = (0..=255u8).find(|byte| greedy.longest(&[*byte]).is_none()) {
        return Err(bad(format!(
            "tokenizer.ggml.tokens has no token for the byte {byte:#04x}"
        )));
    }
    Ok(greedy)
}

/// The engine, which decodes and finds added tokens.
pub(super) fn engine(vocab: Vocab) -> tokenizers::Result<Tokenizer> {
    let model = WordLevel::builder()
        .vocab(vocab.into_iter().collect())
        .unk_token(String::new())
        .build()?;
    let mut engine = Tokenizer::new(model);
    engine.with_decoder(Some(ByteLevel::default()));
    Ok(engine)
}

fn bad(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidModel, what)
}

fn kind(parts: &GgufTokenizerParts, id: usize) -> i32 {
    let types = parts.token_types.as_deref().unwrap_or_default();
    types.get(id).copied().unwrap_or(NORMAL)
}

/// The bytes of a text with Python's escapes; `None` if an escape is incomplete.
fn unescaped(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut rest) = (Vec::new(), text.bytes());
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'\\' => match rest.next()? {
                b't' => b'\t',
                b'n' => b'\n',
                b'r' => b'\r',
                b'x' => {
                    let mut digit = || char::from(rest.next()?).to_digit(16);
                    u8::try_from(digit()? * 16 + digit()?).ok()?
                }
                other => other,
            },
            other => other,
        });
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::{FILE, GgufTokenizerParts, MODEL, NORMAL, from_file, to_file};
    use crate::Tokenizer;

    /// `<s>`, all bytes, some words, a part of a character and a padding token.
    fn parts() -> GgufTokenizerParts {
        let mut tokens = vec!["<s>".to_owned()];
        tokens.extend((0..=255u8).map(|byte| match byte {
            b'\n' => r"\n".to_owned(),
            b'\\' => r"\\".to_owned(),
            b'\'' => r"\'".to_owned(),
            0x20..0x7f => char::from(byte).to_string(),
            _ => format!(r"\x{byte:02x}"),
        }));
        let words = [
            r"\n\n",
            "ab",
            "abcd",
            "bcd",
            " the",
            r"\xe4\xbd",
            r"\xe4\xbd\xa0\xe5",
        ];
        tokens.extend(words.map(str::to_owned));
        let mut token_types = vec![3];
        token_types.resize(tokens.len(), NORMAL);
        tokens.push("[PAD264]".to_owned());
        token_types.push(5);
        GgufTokenizerParts {
            model: MODEL.into(),
            tokens,
            token_types: Some(token_types),
            bos_id: Some(0),
            eos_id: Some(0),
            ..GgufTokenizerParts::default()
        }
    }

    /// The id of a byte in [`parts`].
    fn byte(byte: u8) -> u32 {
        u32::from(byte) + 1
    }

    #[test]
    fn the_longest_token_is_taken_at_each_position() {
        let tokenizer = Tokenizer::from_gguf(&parts()).unwrap();
        for (text, ids) in [
            ("abcd", vec![259]),
            // The longest first token wins, although two tokens would cover the text.
            ("abc", vec![258, byte(b'c')]),
            ("abbcd", vec![258, 260]),
            ("\n\n\n", vec![257, byte(b'\n')]),
            (" the\\'", vec![261, byte(b'\\'), byte(b'\'')]),
            // Tokens may end inside a character.
            ("你", vec![262, byte(0xa0)]),
            ("你好", vec![263, byte(0xa5), byte(0xbd)]),
            ("é", vec![byte(0xc3), byte(0xa9)]),
            ("", vec![]),
        ] {
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
            assert_eq!(tokenizer.encode_plain(text).unwrap(), ids, "{text:?}");
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        }
    }

    #[test]
    fn control_tokens_are_found_in_prompts_and_not_in_plain_text() {
        let tokenizer = Tokenizer::from_gguf(&parts()).unwrap();
        let ids = tokenizer.encode("ab<s>abcd", false).unwrap();
        assert_eq!(ids, [258, 0, 259]);
        let plain = tokenizer.encode_plain("ab<s>").unwrap();
        assert_eq!(plain, [258, byte(b'<'), byte(b's'), byte(b'>')]);
        // Unused tokens are ordinary text.
        let padding = tokenizer.encode("[PAD264]", false).unwrap();
        assert_eq!(padding.len(), 8);
        assert_eq!(tokenizer.eos_ids(), [0]);
        assert_eq!(tokenizer.vocab_size(), 265);
        // The token that ends a turn is not a part of a message.
        let mut ends = parts();
        ends.extra_eos_ids = vec![257];
        let tokenizer = Tokenizer::from_gguf(&ends).unwrap();
        let line = byte(b'\n');
        assert_eq!(tokenizer.encode_plain("\n\n").unwrap(), [line, line]);
        assert_eq!(tokenizer.encode("\n\n", false).unwrap(), [257]);
    }

    /// A vocabulary file with all bytes and some words.
    fn file() -> String {
        let mut text = String::new();
        let mut line = |id: usize, value: &str, length: usize| {
            text += &format!("{id} {value} {length}\n");
        };
        for byte in 0..=255u8 {
            let value = match byte {
                b'\n' => r"'\n'".to_owned(),
                b'\'' => r#""'""#.to_owned(),
                b'\\' => r"'\\'".to_owned(),
                0x20..0x7f => format!("'{}'", char::from(byte)),
                0..0x80 => format!(r"'\x{byte:02x}'"),
                _ => format!(r"b'\x{byte:02x}'"),
            };
            line(usize::from(byte) + 1, &value, 1);
        }
        line(257, "' the'", 4);
        line(258, "'a b'", 3);
        line(259, "'你'", 3);
        line(260, r"'\u4f60\xe9'", 5);
        line(261, r"b'\xe4\xbd'", 2);
        text
    }

    #[test]
    fn a_vocabulary_file_is_the_tokenizer_of_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(FILE, &file());
        write("config.json", r#"{"eos_token_id": [0, 258]}"#);
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        for (text, ids) in [
            (" the", vec![257]),
            ("a b'", vec![258, byte(b'\'')]),
            ("你", vec![259]),
            ("你é", vec![260]),
            ("佀", vec![261, byte(0x80)]),
            ("\\\n\u{7f}", vec![byte(b'\\'), byte(b'\n'), byte(0x7f)]),
            ("<|rwkv_tokenizer_end_of_text|>", vec![0]),
        ] {
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        }
        assert_eq!(tokenizer.eos_ids(), [0, 258]);
        // The written file has the same tokens.
        let parts = from_file(&file()).unwrap();
        let again = from_file(&to_file(&parts).unwrap().unwrap()).unwrap();
        assert_eq!(again.tokens, parts.tokens);
        for (line, why) in [
            ("262", "needs a number"),
            ("263 'a' 1", "next token is 262"),
            ("262 'a' 2", "1 bytes"),
            ("262 a 1", "no literal"),
            ("262 b'é' 2", "no literal"),
            (r"262 b'\u4f60' 3", "no literal"),
            (r"262 '\x1' 1", "no literal"),
            (r"262 '\ud800' 3", "no literal"),
            ("262 'a'b' 3", "no literal"),
        ] {
            write(FILE, &(file() + line));
            let error = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("line 262"), "{error}");
        }
    }

    #[test]
    fn incomplete_vocabularies_are_refused() {
        let mut without = parts();
        without.tokens[usize::from(b'a') + 1] = "aa".into();
        let error = Tokenizer::from_gguf(&without).unwrap_err();
        assert!(error.to_string().contains("0x61"), "{error}");
        for escape in [r"\", r"\x1", r"\xg0"] {
            let mut broken = parts();
            broken.tokens[258] = escape.into();
            let error = Tokenizer::from_gguf(&broken).unwrap_err();
            assert!(error.to_string().contains("token 258"), "{error}");
        }
    }
}
