//! Tests of encoding and decoding with small vocabularies, from files and in memory, and of damaged
//! files.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::testing::{
    IM_END, IM_START, THINK, byte_level, byte_level_parts, char_of, sentence_piece,
};

/// A byte-level `tokenizer.json` that starts texts like Llama 3.
fn tokenizer_json() -> Value {
    let parts = byte_level_parts(None);
    let vocab: serde_json::Map<String, Value> = parts
        .tokens
        .iter()
        .zip(0u32..)
        .skip(3)
        .map(|(t, id)| (t.clone(), id.into()))
        .collect();
    let added: Vec<Value> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        .iter()
        .zip(0u32..)
        .map(|(t, id)| {
            json!({"id": id, "content": t, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
        })
        .collect();
    let mut vocab = vocab;
    for token in &added {
        vocab.insert(
            token["content"].as_str().unwrap().to_owned(),
            token["id"].clone(),
        );
    }
    json!({
        "version": "1.0", "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": parts.merges},
    })
}

fn write(dir: &Path, name: &str, value: &Value) {
    std::fs::write(dir.join(name), value.to_string()).unwrap();
}

fn load(tokenizer: &Value) -> Result<Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", tokenizer);
    Tokenizer::from_dir(dir.path())
}

#[test]
fn merges_digits_and_special_tokens_are_encoded() {
    let t = byte_level();
    let text = |ids: &[u32]| {
        ids.iter()
            .map(|id| t.token_text(*id).unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        text(&t.encode("hello world12", false).unwrap()),
        ["hello", "Ġworld", "12"]
    );
    assert_eq!(t.encode("<|im_start|>", false).unwrap(), [IM_START]);
    let smollm = Tokenizer::from_gguf(&byte_level_parts(Some("smollm"))).unwrap();
    assert_eq!(
        smollm.encode("12", false).unwrap().len(),
        2,
        "digits one by one"
    );
    assert_eq!(t.vocab_size(), 4 + 256 + 12);
    assert_eq!(
        (t.bos_id(), t.eos_ids()),
        (Some(IM_START), &[IM_END, 0][..])
    );
}

#[test]
fn plain_text_never_becomes_a_control_token() {
    let t = byte_level();
    for text in [
        "<|im_end|>",
        "a<|im_start|>system\n<|im_end|>",
        "<|endoftext|><|endoftext|>",
        "<think>",
    ] {
        let ids = t.encode_plain(text).unwrap();
        assert!(ids.iter().all(|id| !t.is_control(*id)), "{text}: {ids:?}");
        assert_eq!(t.decode(&ids).unwrap(), text);
    }
    assert_eq!(
        t.encode_plain("<think>").unwrap(),
        [THINK],
        "the user may use what users define"
    );
}

#[test]
fn merge_rules_cannot_spell_a_control_token() {
    // In this vocabulary `</` and `s>` are words, and `</s>` ends the text.
    let t = sentence_piece();
    assert_eq!(t.encode("</s>", false).unwrap(), [2]);
    let ids = t.encode_plain("</s></s>").unwrap();
    assert!(!ids.contains(&2), "{ids:?}");
    // Also tests a file whose merge rules produce the control token.
    let mut file = tokenizer_json();
    for token in [
        "<|", "im_end", "|>", "im_end|>", "_e", "nd", "im", "im_e", "<|im_end", "|e",
    ] {
        let id = 1000 + file["model"]["vocab"].as_object().unwrap().len();
        file["model"]["vocab"]
            .as_object_mut()
            .unwrap()
            .entry(token)
            .or_insert(json!(id));
    }
    file["pre_tokenizer"]["use_regex"] = json!(false);
    file["model"]["merges"] = json!([
        "< |",
        "i m",
        "_ e",
        "n d",
        "im _e",
        "im_e nd",
        "| >",
        "im_end |>",
        "<| im_end|>"
    ]);
    let t = load(&file).unwrap();
    assert_eq!(t.encode("<|im_end|>", false).unwrap(), [IM_END]);
    let text = "<|im_end|>".repeat(50);
    let ids = t.encode_plain(&text).unwrap();
    assert!(!ids.contains(&IM_END));
    assert_eq!(t.decode(&ids).unwrap(), text);
}

#[test]
fn a_directory_gives_begin_and_end_tokens() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "tokenizer.json", &tokenizer_json());
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(
        t.encode("hello", true).unwrap()[0],
        IM_START,
        "the file's post-processor"
    );
    assert_eq!(
        t.encode("hello hello hello", false).unwrap().len(),
        5,
        "the file's truncation is not applied"
    );
    assert_eq!((t.bos_id(), t.eos_ids()), (None, &[][..]));
    write(
        dir.path(),
        "special_tokens_map.json",
        &json!({"eos_token": {"content": "<|im_end|>"}, "unk_token": null}),
    );
    write(
        dir.path(),
        "tokenizer_config.json",
        &json!({"bos_token": "<|im_start|>", "added_tokens_decoder": {
        "272": {"content": "<new>", "special": true}}}),
    );
    write(
        dir.path(),
        "generation_config.json",
        &json!({"eos_token_id": [2, 0]}),
    );
    write(
        dir.path(),
        "config.json",
        &json!({"eos_token_id": 2, "bos_token_id": 0}),
    );
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!((t.bos_id(), t.eos_ids()), (Some(1), &[2, 0][..]));
    assert_eq!(t.encode("<new>", false).unwrap(), [272]);
    assert!(t.is_control(272));
    write(
        dir.path(),
        "tokenizer_config.json",
        &json!({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>",
        "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": true, "add_eos_token": true}),
    );
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(
        t.encode("1", true).unwrap(),
        [0, t.id_of("1").unwrap(), 2],
        "Llama's classes decide themselves"
    );
}

#[test]
fn a_forced_begin_token_comes_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut plain = tokenizer_json();
    // First with the file's post-processor, which adds a token, and then without it.
    for _ in 0..2 {
        write(dir.path(), "tokenizer.json", &plain);
        write(
            dir.path(),
            "config.json",
            &json!({"bos_token_id": 0, "eos_token_id": 2, "force_bos_token_insert": true}),
        );
        let t = Tokenizer::from_dir(dir.path()).unwrap();
        let one = t.id_of("1").unwrap();
        assert_eq!(t.encode("1", true).unwrap(), [0, one]);
        assert_eq!(t.encode("1", false).unwrap(), [one]);
        plain["post_processor"] = Value::Null;
    }
    write(dir.path(), "config.json", &json!({"bos_token_id": 0}));
    let t = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(
        t.encode("1", true).unwrap().len(),
        1,
        "only where it is forced"
    );
}

#[test]
fn damaged_directories_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_dir(dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ModelNotFound);
    let bytes = tokenizer_json().to_string().into_bytes();
    for cut in (0..bytes.len()).step_by(211) {
        std::fs::write(dir.path().join("tokenizer.json"), &bytes[..cut]).unwrap_or_default();
        let error = Tokenizer::from_dir(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel);
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
    std::fs::write(dir.path().join("tokenizer.json"), &bytes).unwrap();
    for (file, text, says) in [
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        (
            "generation_config.json",
            r#"{"eos_token_id": "2"}"#,
            "not a token id",
        ),
        ("config.json", r#"{"eos_token_id": [-1]}"#, "config.json"),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"9": {"content": "<x>"}}}"#,
            "the id 9",
        ),
    ] {
        std::fs::write(dir.path().join(file), text).unwrap();
        let error = Tokenizer::from_dir(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        std::fs::remove_file(dir.path().join(file)).unwrap();
    }
    let limits = TextLimits {
        tokenizer_bytes: 1000,
        ..TextLimits::default()
    };
    let error = Tokenizer::from_dir_with(dir.path(), &limits).unwrap_err();
    assert!(
        error.to_string().contains("at most 1000 are accepted"),
        "{error}"
    );
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused() {
    let says = |change: &dyn Fn(&mut Value), what: &str| {
        let mut file = tokenizer_json();
        change(&mut file);
        let error = load(&file).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    };
    // This file makes the `tokenizers` crate itself panic.
    says(
        &|f| f["model"]["merges"] = json!(["hello Ġworld"]),
        "which the vocabulary lacks",
    );
    says(&|f| f["model"]["merges"] = json!([["zz", "y"]]), "\"zz\"");
    says(&|f| f["model"]["merges"] = json!(["alone"]), "no pair");
    says(&|f| f["model"]["vocab"] = json!({}), "empty");
    says(&|f| f["model"]["vocab"]["h"] = json!(7), "given twice");
    says(
        &|f| f["model"]["vocab"]["x".repeat(5000)] = json!(500),
        "5000 bytes",
    );
    says(
        &|f| f["decoder"] = json!({"type": "BPEDecoder", "suffix": "</w>"}),
        "BPEDecoder",
    );
    says(
        &|f| f["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}),
        "tokenizer",
    );
    says(
        &|f| f["post_processor"]["special_tokens"] = json!({}),
        "does not define",
    );
    says(
        &|f| f["post_processor"]["single"][1]["Sequence"]["id"] = json!("B"),
        "does not define",
    );
    let limits = TextLimits {
        vocab: 10,
        ..TextLimits::default()
    };
    let error = Tokenizer::from_gguf_with(&byte_level_parts(None), &limits).unwrap_err();
    assert!(error.to_string().contains("at most 10"), "{error}");
}

#[test]
fn texts_have_a_bound() {
    let limits = TextLimits {
        text_bytes: 100,
        ..TextLimits::default()
    };
    let t = Tokenizer::from_gguf_with(&byte_level_parts(None), &limits).unwrap();
    assert!(t.encode(&"a".repeat(100), false).is_ok());
    for error in [
        t.encode(&"a".repeat(101), false),
        t.encode_plain(&"a".repeat(101)),
    ] {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidOption);
    }
    assert!(t.decode(&vec![t.id_of("a").unwrap(); 401]).is_err());
}

#[test]
fn a_panic_of_the_crate_is_an_error() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let error = guarded("test", || -> tokenizers::Result<()> {
        panic!("vocabulary")
    })
    .unwrap_err();
    std::panic::set_hook(hook);
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Decoding valid text must equal the decoding of the `tokenizers` crate.
    #[test]
    fn decoding_equals_the_crate(text in "(\\PC|[ \n<|>]|<\\|im_end\\|>|hello|world){0,30}") {
        for t in [byte_level(), sentence_piece()] {
            let ids = t.encode(&text, false).unwrap();
            prop_assert_eq!(t.decode(&ids).unwrap(), t.engine.decode(&ids, true).unwrap());
            let plain = t.encode_plain(&text).unwrap();
            prop_assert!(plain.iter().all(|id| !t.is_control(*id)));
            if t.control_spans(&text).unwrap().is_empty() {
                prop_assert_eq!(plain, ids);
            }
        }
    }

    /// Byte-level decoding of arbitrary ids must equal the lossy decoding of all their bytes.
    #[test]
    fn any_bytes_decode_as_a_whole(bytes in prop::collection::vec(any::<u8>(), 0..50)) {
        let t = byte_level();
        let ids: Vec<u32> = bytes.iter().map(|b| t.id_of(&char_of(*b).to_string()).unwrap()).collect();
        prop_assert_eq!(t.decode(&ids).unwrap(), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn mutated_files_never_panic(at in 0usize..6000, byte in any::<u8>()) {
        let mut file = tokenizer_json().to_string().into_bytes();
        let at = at % file.len();
        file[at] = byte;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file).unwrap();
        if let Ok(t) = Tokenizer::from_dir(dir.path()) {
            let _ = t.encode("hello <|im_end|> world é", true);
        }
    }
}
