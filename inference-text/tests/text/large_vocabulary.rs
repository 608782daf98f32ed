//! Tests an artificial vocabulary with 262,144 tokens, the size of Gemma 3's. It must load, encode
//! by the definition of BPE, and stream, in times that do not grow with the vocabulary.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inference_text::{Detokenizer, Tokenizer};
use serde_json::{Map, Value, json};

const SIZE: usize = 262_144;
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789▁é";
/// A generous limit, because the machine may be busy. Each step needs a second or less.
const LIMIT: Duration = Duration::from_secs(60);

/// The tokens by name, and the merges by rank. The first merges are all pairs of letters. Then
/// pairs are merged with letters until the vocabulary is full.
struct Vocabulary {
    ids: HashMap<String, u32>,
    merges: Vec<(String, String)>,
    ranks: HashMap<(String, String), usize>,
}

impl Vocabulary {
    fn new() -> Self {
        let letters: Vec<String> = LETTERS.chars().map(String::from).collect();
        let mut names: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>"]
            .map(String::from)
            .into();
        names.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        names.extend(letters.iter().cloned());
        let mut merges = Vec::new();
        let mut pairs = Vec::new();
        for first in &letters {
            for second in &letters {
                merges.push((first.clone(), second.clone()));
                pairs.push(format!("{first}{second}"));
            }
        }
        names.extend(pairs.iter().cloned());
        // The order is reversed, so that ranks differ from alphabetical order.
        for pair in pairs.iter().rev() {
            for letter in &letters {
                if names.len() < SIZE {
                    merges.push((pair.clone(), letter.clone()));
                    names.push(format!("{pair}{letter}"));
                }
            }
        }
        assert_eq!(names.len(), SIZE);
        let ranks = merges.iter().cloned().zip(0..).collect();
        Self {
            ids: names.into_iter().zip(0..).collect(),
            merges,
            ranks,
        }
    }

    fn tokenizer_json(&self) -> Value {
        let vocab: Map<String, Value> = (self.ids.iter())
            .map(|(name, id)| (name.clone(), (*id).into()))
            .collect();
        let merges: Vec<[&String; 2]> = self.merges.iter().map(|(a, b)| [a, b]).collect();
        let special = |id: u32, name: &str| {
            json!({"id": id, "content": name, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false})
        };
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [special(0, "<pad>"), special(1, "<eos>"), special(2, "<bos>")],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
                "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges},
        })
    }

    /// BPE by its definition (Sennrich et al. 2016): joins the pair with the lowest rank, leftmost
    /// first, until no rule applies. Characters outside the vocabulary become their UTF-8 bytes.
    fn encode(&self, text: &str) -> Vec<u32> {
        let mut parts: Vec<String> = Vec::new();
        for c in text.replace(' ', "▁").chars() {
            let name = String::from(c);
            if self.ids.contains_key(&name) {
                parts.push(name);
            } else {
                parts.extend(name.bytes().map(|byte| format!("<0x{byte:02X}>")));
            }
        }
        loop {
            let ranked = parts.windows(2).enumerate().filter_map(|(at, pair)| {
                let pair = (pair[0].clone(), pair[1].clone());
                Some((*self.ranks.get(&pair)?, at))
            });
            let Some((_, at)) = ranked.min() else {
                return parts.iter().map(|part| self.ids[part]).collect();
            };
            let second = parts.remove(at + 1);
            parts[at] += &second;
        }
    }
}

/// Random texts of letters. Some letters are not in the vocabulary.
fn texts(count: usize, length: usize) -> Vec<String> {
    let letters: Vec<char> = LETTERS.replace('▁', " ").chars().collect();
    let mut state = 1u64;
    let mut next = || {
        // Knuth's MMIX generator.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let mut text = || {
        let mut letter = |_| match next() % 20 {
            0 => ['ß', '漢', '🙂', '\n'][next() % 4],
            _ => letters[next() % letters.len()],
        };
        (0..length).map(&mut letter).collect()
    };
    (0..count).map(|_| text()).collect()
}

#[test]
fn a_quarter_of_a_million_tokens_load_encode_and_stream() {
    let vocabulary = Vocabulary::new();
    let dir = tempfile::tempdir().unwrap();
    let json = serde_json::to_vec(&vocabulary.tokenizer_json()).unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    let timed = |what: &str, start: Instant| {
        let took = start.elapsed();
        println!("{what}: {took:?}");
        assert!(took < LIMIT, "{what}: {took:?}");
    };

    let start = Instant::now();
    let tokenizer = Arc::new(Tokenizer::from_dir(dir.path()).unwrap());
    timed("load", start);
    assert_eq!(tokenizer.vocab_size(), SIZE);

    let short = texts(200, 40);
    for text in &short {
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(ids, vocabulary.encode(text), "{text:?}");
        assert_eq!(&tokenizer.decode(&ids).unwrap(), text);
    }

    // Without word boundaries, this text is a single piece of 100,000 characters.
    let long = texts(1, 100_000).remove(0);
    let start = Instant::now();
    let ids = tokenizer.encode(&long, false).unwrap();
    timed("encode 100,000 characters", start);
    assert!(
        ids.iter().any(|id| *id as usize > SIZE / 2),
        "high ids occur"
    );

    let start = Instant::now();
    let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), &[]);
    let mut streamed = String::new();
    let mut take = |released: inference_text::Released| {
        streamed.extend(released.ready.into_iter().map(|(_, text)| text));
    };
    for id in &ids {
        take(detokenizer.push(*id));
    }
    take(detokenizer.finish());
    timed(&format!("stream {} tokens", ids.len()), start);
    assert_eq!(streamed, long);
}
