//! Small tokenizers for tests, one of each family. Each can represent all 256 bytes.

use inference_formats::GgufTokenizerParts;

use super::pieces::byte_of;
use super::{TextPipeline, Tokenizer};

/// The id of `<|endoftext|>` in the byte-level tokenizer, a control token.
pub const END_OF_TEXT: u32 = 0;
/// The id of `<|im_start|>` in the byte-level tokenizer, a control token.
pub const IM_START: u32 = 1;
/// The id of `<|im_end|>` in the byte-level tokenizer, a control token.
pub const IM_END: u32 = 2;
/// The id of `<think>` in the byte-level tokenizer, a token that is ordinary text.
pub const THINK: u32 = 3;

/// The character of GPT-2's alphabet for a byte.
pub fn char_of(byte: u8) -> char {
    ('\0'..'\u{200}')
        .find(|c| byte_of(*c) == Some(byte))
        .expect("an alphabet of 256")
}

/// Byte-level BPE: three control tokens, a user-defined token, 256 bytes, and a few merges.
pub fn byte_level_parts(pre: Option<&str>) -> GgufTokenizerParts {
    let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
        .map(String::from)
        .to_vec();
    let mut token_types = vec![3, 3, 3, 4];
    tokens.extend((0..=255u8).map(|b| char_of(b).to_string()));
    let merges = [
        "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2", "Ġ Ġ",
        "Ã ©",
    ];
    for merge in merges {
        tokens.push(merge.replace(' ', ""));
    }
    token_types.resize(tokens.len(), 1);
    GgufTokenizerParts {
        model: "gpt2".into(),
        pre: pre.map(String::from),
        tokens,
        token_types: Some(token_types),
        merges: merges.map(String::from).to_vec(),
        bos_id: Some(IM_START),
        eos_id: Some(IM_END),
        unk_id: Some(END_OF_TEXT),
        add_bos: Some(false),
        add_space_prefix: Some(false),
        ..GgufTokenizerParts::default()
    }
}

/// SentencePiece BPE with byte fallback: `<unk>`, `<s>`, `</s>`, 256 bytes, letters and some words.
pub fn sentence_piece_parts() -> GgufTokenizerParts {
    let mut tokens: Vec<(String, f32, i32)> = vec![
        ("<unk>".into(), 0.0, 2),
        ("<s>".into(), 0.0, 3),
        ("</s>".into(), 0.0, 3),
    ];
    tokens.extend((0..=255u8).map(|b| (format!("<0x{b:02X}>"), 0.0, 6)));
    let words = [
        "▁h", "el", "lo", "▁hel", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁", "</", "s>",
    ];
    tokens.extend(
        words
            .iter()
            .zip(1u8..)
            .map(|(w, n)| ((*w).to_owned(), -f32::from(n), 1)),
    );
    tokens.extend("▁helowrds</>é".chars().map(|c| (c.to_string(), -100.0, 1)));
    GgufTokenizerParts {
        model: "llama".into(),
        scores: Some(tokens.iter().map(|t| t.1).collect()),
        token_types: Some(tokens.iter().map(|t| t.2).collect()),
        tokens: tokens.into_iter().map(|t| t.0).collect(),
        bos_id: Some(1),
        eos_id: Some(2),
        unk_id: Some(0),
        ..GgufTokenizerParts::default()
    }
}

/// The tokenizer of [`byte_level_parts`], with GPT-2's splitting of words.
pub fn byte_level() -> Tokenizer {
    Tokenizer::from_gguf(&byte_level_parts(Some("gpt-2"))).expect("the small vocabulary")
}

/// The tokenizer of [`sentence_piece_parts`].
pub fn sentence_piece() -> Tokenizer {
    Tokenizer::from_gguf(&sentence_piece_parts()).expect("the small vocabulary")
}

/// A pipeline of the byte-level tokenizer and the ChatML format.
pub fn chatml() -> TextPipeline {
    TextPipeline::from_gguf(&byte_level_parts(Some("gpt-2")), "llama")
        .expect("the small vocabulary")
}
