//! Tests of the tokenizers that `mlx fuse --export-gguf` writes, for those of SentencePiece.

use std::path::Path;

use crate::common::{fixture, load};
use inference_formats::gguf::Gguf;
use rust_mlx::export::{GgufType, export_gguf};
use serde_json::{Value, json};

/// A directory with a tokenizer of SentencePiece: byte tokens, and merges between characters.
fn with_pieces(dir: &Path, prefix: bool) {
    std::fs::create_dir(dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("tiny/mistral").join(name), dir.join(name)).unwrap();
    }
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    let merges = [
        ("\u{2581}", "t"),
        ("h", "e"),
        ("i", "n"),
        ("\u{2581}t", "he"),
        ("r", "e"),
        ("in", "g"),
        ("o", "n"),
        ("\u{2581}", "\u{2581}"),
    ];
    tokens.extend(merges.iter().map(|(a, b)| format!("{a}{b}")));
    tokens.extend("\u{2581}thergionas.l".chars().map(String::from));
    let vocabulary: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), id.into()))
        .collect();
    assert!(vocabulary.len() == tokens.len() && tokens.len() <= 300);
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut steps = vec![replace(" ", "\u{2581}")];
    let mut decoders = vec![
        replace("\u{2581}", " "),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        steps.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "vocab": vocabulary,
            "merges": merges.map(|(a, b)| format!("{a} {b}"))},
    });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let settings = json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": true, "add_eos_token": false});
    std::fs::write(dir.join("tokenizer_config.json"), settings.to_string()).unwrap();
}

#[test]
fn files_have_the_tokenizer_of_sentencepiece() {
    for prefix in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        with_pieces(&source, prefix);
        let path = dir.path().join("model.gguf");
        export_gguf(&source, &path, GgufType::F16).unwrap();
        let (own, read) = (load(&source), load(&path));
        let (own, read) = (
            own.as_token_model().unwrap(),
            read.as_token_model().unwrap(),
        );
        for text in [
            "the thing in there",
            "  the  \n",
            "naïve 漢字 🙂",
            "re<s>in </s>x <unk>",
            "",
        ] {
            let ids = own.encode(text, true).unwrap();
            assert_eq!(ids, read.encode(text, true).unwrap(), "{prefix} {text:?}");
            assert_eq!(own.decode(&ids).unwrap(), read.decode(&ids).unwrap());
        }
        let file = Gguf::open(&path).unwrap();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        assert_eq!(file.metadata().str(&key("model")).unwrap(), Some("llama"));
        let space = file.metadata().bool(&key("add_space_prefix")).unwrap();
        assert_eq!(space, Some(prefix));
        let types = file.metadata().i32s(&key("token_type")).unwrap().unwrap();
        assert_eq!(types[..4], [2, 3, 3, 6]);
        assert_eq!((types[259], *types.last().unwrap()), (1, 5));
        // The score of the first merge is the highest.
        let scores = file.metadata().f32s(&key("scores")).unwrap().unwrap();
        assert_eq!(scores[259..262], [0.0, -1.0, -2.0]);
    }
}

#[test]
fn a_tokenizer_of_another_kind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    with_pieces(&source, true);
    let path = source.join("tokenizer.json");
    let mut tokenizer: Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let output = dir.path().join("model.gguf");
    let refused = |tokenizer: &Value| {
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        let error = export_gguf(&source, &output, GgufType::F16).unwrap_err();
        assert!(!output.exists());
        error.to_string()
    };
    let mut words = tokenizer.clone();
    words["pre_tokenizer"] = json!({"type": "WhitespaceSplit"});
    words["normalizer"] = Value::Null;
    let error = refused(&words);
    assert!(error.contains("as SentencePiece"), "{error}");
    tokenizer["model"] = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["a", -1.0]]});
    let error = refused(&tokenizer);
    assert!(error.contains("BPE"), "{error}");
}
