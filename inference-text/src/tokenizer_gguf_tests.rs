//! Tests of tokenizers from GGUF metadata: families, pre-tokenizers, and wrong metadata.

use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::*;
use crate::testing::{byte_level_parts, sentence_piece_parts};
use crate::tokenizer_gguf_words::KNOWN;

fn tokens(t: &Tokenizer, text: &str) -> Vec<String> {
    t.encode(text, false)
        .unwrap()
        .iter()
        .map(|id| t.token_text(*id).unwrap())
        .collect()
}

#[test]
fn every_supported_pre_tokenizer_encodes_and_decodes() {
    let named = KNOWN.into_iter().map(Some);
    for pre in named.chain([None]) {
        let t = Tokenizer::from_gguf(&byte_level_parts(pre)).unwrap();
        let text = "hello  world 1234 it's IT'S\r\n\r\n  x\té, 😀!";
        let ids = t.encode(text, false).unwrap();
        assert_eq!(t.decode(&ids).unwrap(), text, "{pre:?}");
    }
    for tried in Tokenizer::GGUF_SPLITS {
        assert!(KNOWN.contains(&tried), "{tried}");
    }
    let error = Tokenizer::from_gguf(&byte_level_parts(Some("viking"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.to_string().contains("viking") && error.to_string().contains("smollm"),
        "{error}"
    );
}

/// The words that a pre-tokenizer finds in a text.
fn words_of(pre: &str, text: &str) -> Vec<String> {
    let mut pieces = PreTokenizedString::from(text);
    for split in words(Some(pre)).unwrap().splits {
        split.pre_tokenize(&mut pieces).unwrap();
    }
    let found = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
    found
        .into_iter()
        .map(|(word, ..)| word.to_owned())
        .collect()
}

#[test]
fn pre_tokenizers_split_as_their_families_do() {
    // `12` is a single token if the pre-tokenizer keeps both digits in one word.
    let count = |pre: &str, text: &str| {
        tokens(
            &Tokenizer::from_gguf(&byte_level_parts(Some(pre))).unwrap(),
            text,
        )
        .len()
    };
    assert_eq!([count("gpt-2", "12"), count("llama-bpe", "12")], [1, 1]);
    assert_eq!(
        [
            count("smollm", "12"),
            count("qwen2", "12"),
            count("tekken", "12")
        ],
        [2, 2, 2]
    );
    // GPT-2 never splits digits, Llama 3 splits after three digits, and the default splits off runs
    // of three digits.
    assert_eq!(
        [
            count("gpt-2", "00012"),
            count("llama-bpe", "00012"),
            count("llama-bpe", "0012")
        ],
        [4, 4, 4]
    );
    // OLMo's tokenizer splits digits like Llama 3, and EXAONE's like GPT-2.
    assert_eq!(
        [count("dbrx", "0001234"), count("exaone4", "0001234")],
        [count("llama-bpe", "0001234"), count("gpt-2", "0001234")]
    );
    // The tokenizer of gpt-oss also splits after three digits.
    assert_eq!(count("gpt-4o", "0001234"), count("dbrx", "0001234"));
    // GLM 4 and DeepSeek V3 also split after three digits. Command R, Granite and DeepSeek V2 split
    // after each digit.
    for pre in ["glm4", "deepseek-v3", "kimi-k2", "minimax-m2"] {
        assert_eq!(count(pre, "0001234"), count("dbrx", "0001234"), "{pre}");
    }
    for pre in [
        "command-r",
        "refact",
        "deepseek-llm",
        "hunyuan",
        "seed-coder",
        "qwen35",
    ] {
        assert_eq!(count(pre, "12"), 2, "{pre}");
    }
    // Cohere's newer tokenizers group three digits from the end of a number.
    assert_eq!(words_of("tiny_aya", "1234567"), ["1", "234", "567"]);
    // Kimi's pre-tokenizer separates Chinese from Latin letters. DeepSeek's also separates
    // Japanese.
    assert_eq!(words_of("kimi-k2", "ab漢字cd"), ["ab", "漢字", "cd"]);
    assert_eq!(words_of("deepseek-v3", "ab漢字cd"), ["ab", "漢字", "cd"]);
    assert_eq!(words_of("deepseek-v3", "x.Foo bar"), ["x", ".Foo", " bar"]);
    // Digits are grouped from the end of a number.
    let words = words_of("afmoe", "ab1234567漢字가cd.Foo 12");
    let wanted = ["ab", "1", "234", "567", "漢字가", "cd", ".Foo", " ", "12"];
    assert_eq!(words, wanted);
    assert_eq!(
        words_of("deepseek-llm", "ab漢字\ncd 1"),
        ["ab", "漢字", "\n", "cd", " ", "1"]
    );
    // Seed's pre-tokenizer separates a line feed from the punctuation before it.
    assert_eq!(words_of("seed-coder", "a;\n"), ["a", ";", "\n"]);
    assert_eq!(words_of("hunyuan", "a;\n"), ["a", ";\n"]);
    // Qwen 3.5's pre-tokenizer keeps combining marks in words; a virama is such a mark.
    assert_eq!(words_of("qwen35", "न्य"), ["न्य"]);
    assert!(words_of("qwen2", "न्य").len() > 1);
    // Qwen first composes characters: e + U+0301 is é, which is one token here.
    assert_eq!(
        [count("qwen2", "e\u{301}"), count("gpt-2", "e\u{301}")],
        [1, 3]
    );
    // With Llama 3's pre-tokenizer, a word that is a token becomes this token, whatever the merge
    // rules.
    let mut parts = byte_level_parts(Some("llama-bpe"));
    parts.tokens.push("xyz".into());
    parts.token_types.as_mut().unwrap().push(1);
    assert_eq!(
        tokens(&Tokenizer::from_gguf(&parts).unwrap(), "xyz"),
        ["xyz"]
    );
    parts.pre = Some("gpt-2".into());
    assert_eq!(
        tokens(&Tokenizer::from_gguf(&parts).unwrap(), "xyz"),
        ["x", "y", "z"]
    );
}

#[test]
fn sentence_piece_merges_the_best_score_first() {
    let t = Tokenizer::from_gguf(&sentence_piece_parts()).unwrap();
    assert_eq!(tokens(&t, "hello world"), ["▁hello", "▁world"]);
    // `▁h` + `el` + `lo` join in the order of their scores, so `helo` is `▁hel` and `o`.
    assert_eq!(tokens(&t, "helo"), ["▁hel", "o"]);
    assert_eq!(tokens(&t, "é€"), ["▁", "é", "<0xE2>", "<0x82>", "<0xAC>"]);
    assert_eq!(
        t.encode("hello", true).unwrap()[0],
        1,
        "SentencePiece begins with bos unless told otherwise"
    );
    let mut parts = sentence_piece_parts();
    parts.add_space_prefix = Some(false);
    parts.add_bos = Some(false);
    parts.add_eos = Some(true);
    let t = Tokenizer::from_gguf(&parts).unwrap();
    assert_eq!(tokens(&t, "hello"), ["h", "el", "lo"]);
    assert_eq!(t.encode("hello", true).unwrap().last(), Some(&2));
    assert_eq!(
        t.decode(&t.encode(" hello", false).unwrap()).unwrap(),
        " hello"
    );
}

#[test]
fn without_bytes_unknown_characters_are_the_unknown_token() {
    let mut parts = sentence_piece_parts();
    parts.tokens[3] = "<no byte>".into();
    let t = Tokenizer::from_gguf(&parts).unwrap();
    assert_eq!(t.encode_plain("h€€").unwrap().last(), Some(&0));
}

/// The file's fields must determine the kind of tokenizer. This vocabulary contains `Ġthe`, the
/// byte-level form of ` the`, but must stay SentencePiece.
#[test]
fn a_letter_of_byte_level_vocabularies_does_not_make_one() {
    let mut parts = sentence_piece_parts();
    for word in ["Ġthe", "Ġ"] {
        parts.tokens.push(word.into());
        parts.scores.as_mut().unwrap().push(-50.0);
        parts.token_types.as_mut().unwrap().push(1);
    }
    parts.add_space_prefix = Some(false);
    let t = Tokenizer::from_gguf(&parts).unwrap();
    let ids = t.encode_plain("Ġhello").unwrap();
    assert_eq!(ids[0] as usize, parts.tokens.len() - 1);
    assert_eq!(t.decode(&ids).unwrap(), "Ġhello");
    let merged = u32::try_from(parts.tokens.len() - 2).unwrap();
    assert_eq!(t.decode(&[merged]).unwrap(), "Ġthe");
    assert_eq!(tokens(&t, "hello world"), ["h", "el", "lo", "▁world"]);
}

#[test]
fn ends_are_collected_from_everywhere() {
    let mut parts = byte_level_parts(None);
    parts.extra_eos_ids = vec![1, 2, 99_999];
    let t = Tokenizer::from_gguf(&parts).unwrap();
    assert_eq!(t.eos_ids(), [2, 1, 0]);
    // A word that looks like an end token must not end a text.
    parts.extra_eos_ids.clear();
    parts.token_types.as_mut().unwrap()[0] = 1;
    assert_eq!(Tokenizer::from_gguf(&parts).unwrap().eos_ids(), [2]);
}

#[test]
fn repeated_tokens_keep_their_text() {
    let mut parts = byte_level_parts(None);
    let id = u32::try_from(parts.tokens.len()).unwrap();
    parts.tokens.push("hello".into());
    parts.token_types.as_mut().unwrap().push(1);
    let t = Tokenizer::from_gguf(&parts).unwrap();
    assert_eq!(t.decode(&[id]).unwrap(), "hello");
    assert!(!t.encode("hello", false).unwrap().contains(&id));
}

#[test]
fn metadata_that_lies_is_refused() {
    let says = |change: &dyn Fn(&mut GgufTokenizerParts), what: &str| {
        for mut parts in [byte_level_parts(None), sentence_piece_parts()] {
            let spm = parts.model == "llama";
            change(&mut parts);
            match Tokenizer::from_gguf(&parts) {
                Err(error) => assert!(error.to_string().contains(what), "{error}"),
                Ok(_) => assert!(spm && what.contains("merges"), "{what}"),
            }
        }
    };
    says(&|p| p.tokens.clear(), "tokens is empty");
    says(
        &|p| p.model = "t5".into(),
        "supported are gpt2, llama, gemma4, rwkv and bert",
    );
    says(
        &|p| p.token_types = Some(vec![1]),
        "token_type has 1 entries",
    );
    says(&|p| p.scores = Some(vec![0.0; 3]), "scores has 3 entries");
    says(&|p| p.eos_id = Some(1 << 30), "eos_token_id is 1073741824");
    says(&|p| p.bos_id = Some(5000), "bos_token_id is 5000");
    says(&|p| p.tokens[20] = "x".repeat(2000), "2000 bytes");
    says(&|p| p.merges = vec!["a".into()], "merges is no pair");
    says(
        &|p| p.merges = vec!["hello Ġworld".into()],
        "merges (\"hello Ġworld\") needs",
    );
    let mut parts = sentence_piece_parts();
    parts.scores.as_mut().unwrap()[270] = f32::NAN;
    assert!(
        Tokenizer::from_gguf(&parts)
            .unwrap_err()
            .to_string()
            .contains("no number for token 270")
    );
    parts.scores = None;
    assert!(
        Tokenizer::from_gguf(&parts)
            .unwrap_err()
            .to_string()
            .contains("needs tokenizer.ggml.scores")
    );
}

/// Expects the ids that SentencePiece itself returns (`tools/golden/text_sentencepiece_golden.py`).
#[test]
fn ids_are_those_of_sentence_piece() {
    #[derive(serde::Deserialize)]
    struct Golden {
        tokens: Vec<String>,
        scores: Vec<f32>,
        token_types: Vec<i32>,
        texts: Vec<Case>,
    }
    #[derive(serde::Deserialize)]
    struct Case {
        text: String,
        ids: Vec<u32>,
        decoded: String,
    }
    let golden: Golden = serde_json::from_str(include_str!(
        "../tests/fixtures/text_sentencepiece_golden.json"
    ))
    .unwrap();
    assert!(golden.texts.len() > 20);
    let t = Tokenizer::from_gguf(&GgufTokenizerParts {
        model: "llama".into(),
        tokens: golden.tokens,
        scores: Some(golden.scores),
        token_types: Some(golden.token_types),
        bos_id: Some(1),
        eos_id: Some(2),
        unk_id: Some(0),
        ..GgufTokenizerParts::default()
    })
    .unwrap();
    for case in golden.texts {
        assert_eq!(
            t.encode_plain(&case.text).unwrap(),
            case.ids,
            "{:?}",
            case.text
        );
        assert_eq!(
            t.decode(&case.ids).unwrap(),
            case.decoded,
            "{:?}",
            case.text
        );
    }
}

/// Expects the ids of a BPE in plain Python (`tools/golden/text_gemma4_golden.py`).
#[test]
fn ids_of_gemma4_are_those_of_its_merge_rules() {
    #[derive(serde::Deserialize)]
    struct Golden {
        tokens: Vec<String>,
        token_types: Vec<i32>,
        merges: Vec<String>,
        texts: Vec<Case>,
    }
    #[derive(serde::Deserialize)]
    struct Case {
        text: String,
        ids: Vec<u32>,
    }
    let golden: Golden =
        serde_json::from_str(include_str!("../tests/fixtures/text_gemma4_golden.json")).unwrap();
    assert!(golden.texts.len() >= 20 && golden.merges.len() > 100);
    let parts = GgufTokenizerParts {
        model: "gemma4".into(),
        tokens: golden.tokens,
        token_types: Some(golden.token_types),
        merges: golden.merges,
        bos_id: Some(2),
        eos_id: Some(1),
        unk_id: Some(3),
        extra_eos_ids: vec![4],
        add_bos: Some(true),
        add_space_prefix: Some(false),
        ..GgufTokenizerParts::default()
    };
    let t = Tokenizer::from_gguf(&parts).unwrap();
    for case in golden.texts {
        let text = &case.text;
        assert_eq!(t.encode_plain(text).unwrap(), case.ids, "{text:?}");
        let decoded = text.replace('\u{2581}', " ");
        assert_eq!(t.decode(&case.ids).unwrap(), decoded, "{text:?}");
    }
    assert_eq!(t.encode("a<turn|>", true).unwrap()[0], 2);
    assert_eq!(t.encode("<turn|>", false).unwrap(), [4]);
    assert_eq!(t.eos_ids(), [1, 4]);
    for (merge, what) in [("ab", "is no pair"), ("a \u{1F600}", "lacks")] {
        let mut parts = parts.clone();
        parts.merges.push(merge.to_owned());
        let error = Tokenizer::from_gguf(&parts).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}
