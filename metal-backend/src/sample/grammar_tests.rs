//! Grammars over small vocabularies: what is allowed, what is refused, and that every reply fits.

use super::*;
use crate::text::test_support::{END_OF_TEXT, IM_END, byte_level, sentence_piece};

fn compiler(tokenizer: Tokenizer, eos: &[u32]) -> Compiler {
    let n = tokenizer.vocab_size();
    // A model may have more rows than its tokenizer has tokens.
    Compiler::new(Arc::new(tokenizer), eos, n + 7)
}

fn bytes() -> Compiler {
    compiler(byte_level(), &[IM_END, END_OF_TEXT])
}

fn schema(text: &str) -> Grammar {
    Grammar::from_json_schema(text).unwrap()
}

fn allowed(matcher: &mut Matcher) -> Vec<u32> {
    let words = matcher.allowed().unwrap().unwrap();
    (0..words.len() as u32 * 32)
        .filter(|i| words[*i as usize / 32] >> (i % 32) & 1 == 1)
        .collect()
}

/// A reply whose tokens are picked among the allowed ones, pseudo-randomly, for at most `limit`
/// tokens and the end as soon as `eager` tokens are there and it is allowed. The text, and whether it
/// ended.
fn reply(
    compiler: &Compiler,
    grammar: &Grammar,
    mut state: u64,
    eager: usize,
    limit: usize,
) -> (String, bool) {
    let mut matcher = compiler.compile(grammar).unwrap();
    state = state.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut text = Vec::new();
    for n in 0..limit {
        let choices = allowed(&mut matcher);
        assert!(!choices.is_empty(), "stuck after {text:?}");
        let ends = choices.iter().find(|id| compiler.eos.contains(id));
        if let Some(&id) = ends.filter(|_| n >= eager || choices.len() <= compiler.eos.len()) {
            assert!(matcher.may_end());
            matcher.accept(id).unwrap();
            assert!(matcher.allowed().unwrap().is_none());
            return (String::from_utf8(text).unwrap(), true);
        }
        let others: Vec<u32> = choices
            .into_iter()
            .filter(|id| !compiler.eos.contains(id))
            .collect();
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let id = others[(state >> 33) as usize % others.len()];
        text.extend(compiler.tokenizer.token_bytes(id).unwrap());
        matcher.accept(id).unwrap();
    }
    (String::from_utf8_lossy(&text).into_owned(), false)
}

#[test]
fn every_finished_reply_is_json_of_the_schema() {
    let c = bytes();
    let grammar = schema(
        r##"{"type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12},
                           "age": {"type": "integer", "minimum": 0, "maximum": 150},
                           "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3}},
            "required": ["name", "age", "tags"], "additionalProperties": false,
            "$defs": {"tag": {"enum": ["a", "b\n\"c\"", "é"]}}}"##,
    );
    let mut finished = 0;
    for seed in 0..40 {
        let (text, ended) = reply(&c, &grammar, seed, 0, 600);
        if !ended {
            continue;
        }
        finished += 1;
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let object = value.as_object().unwrap();
        assert_eq!(object.len(), 3, "{text}");
        assert!(object["name"].as_str().unwrap().chars().count() <= 12);
        assert!(object["age"].as_u64().unwrap() <= 150);
        for tag in object["tags"].as_array().unwrap() {
            assert!(["a", "b\n\"c\"", "é"].contains(&tag.as_str().unwrap()));
        }
    }
    assert_eq!(finished, 40, "a bounded schema ends by itself");
}

#[test]
fn any_json_is_json() {
    let c = bytes();
    for grammar in [schema("{}"), schema("true"), Grammar::json_object()] {
        let mut finished = 0;
        for seed in 0..20 {
            let (text, ended) = reply(&c, &grammar, seed, 0, 400);
            if !ended {
                continue;
            }
            finished += 1;
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => assert!(grammar != Grammar::json_object() || value.is_object()),
                // 1e999 is JSON, though no double holds it.
                Err(e) => assert!(e.to_string().contains("number out of range"), "{text}: {e}"),
            }
        }
        assert!(finished > 0);
    }
}

#[test]
fn expressions_match_from_beginning_to_end() {
    let c = bytes();
    let grammar = Grammar::Regex("(yes|no|hello world)!{1,3}".into());
    for seed in 0..30 {
        let (text, ended) = reply(&c, &grammar, seed, 100, 100);
        assert!(ended, "{text}");
        let word = text.trim_end_matches('!');
        assert!(["yes", "no", "hello world"].contains(&word), "{text}");
        assert!((1..=3).contains(&(text.len() - word.len())), "{text}");
    }
}

#[test]
fn lark_grammars_nest() {
    let c = bytes();
    let grammar = Grammar::Lark(
        "start: expr\nexpr: NUMBER | \"(\" expr OP expr \")\"\nNUMBER: /[0-9]{1,2}/\nOP: \"+\" | \"*\"".into(),
    );
    let (mut nested, mut texts) = (0, Vec::new());
    for seed in 0..60 {
        let (text, ended) = reply(&c, &grammar, seed, 0, 200);
        if !ended {
            continue;
        }
        let depth = text.chars().fold(0i32, |d, ch| match ch {
            '(' => d + 1,
            ')' => d - 1,
            _ => d,
        });
        assert_eq!(depth, 0, "{text}");
        assert!(
            text.chars()
                .all(|c| c.is_ascii_digit() || "()+*".contains(c)),
            "{text}"
        );
        nested += usize::from(text.starts_with('('));
        texts.push(text);
    }
    assert!(nested > 0, "{texts:?}");
}

#[test]
fn sentence_piece_vocabularies_work() {
    let c = compiler(sentence_piece(), &[2]);
    let grammar = Grammar::Regex("hello( world){0,2}é?".into());
    for seed in 0..20 {
        let (text, ended) = reply(&c, &grammar, seed, 50, 50);
        assert!(ended, "{text}");
        let rest = text.strip_prefix("hello").unwrap().trim_end_matches('é');
        assert!(["", " world", " world world"].contains(&rest), "{text}");
    }
}

#[test]
fn control_tokens_are_never_text() {
    let c = bytes();
    let mut matcher = c.compile(&Grammar::Regex("[^\\n]{3,9}".into())).unwrap();
    let choices = allowed(&mut matcher);
    let n = c.tokenizer.vocab_size() as u32;
    assert!(
        choices
            .iter()
            .all(|id| *id < n && !c.tokenizer.is_control(*id))
    );
    assert!(choices.len() > 100);
    // They end it only where it may end.
    assert!(!matcher.may_end());
    let id = c.tokenizer.id_of("hello").unwrap();
    matcher.accept(id).unwrap();
    let choices = allowed(&mut matcher);
    assert!(choices.contains(&IM_END) && choices.contains(&END_OF_TEXT));
}

#[test]
fn what_does_not_fit_is_refused() {
    let c = bytes();
    let mut matcher = c.compile(&Grammar::Regex("abc".into())).unwrap();
    let wrong = c.tokenizer.id_of("z").unwrap();
    assert_eq!(
        matcher.accept(wrong).unwrap_err().kind(),
        ErrorKind::InvalidOption
    );
}

#[test]
fn bad_grammars_are_invalid_options() {
    let c = bytes();
    for grammar in [
        schema(r#"{"type": "objekt"}"#),
        schema(r#"{"type": 5}"#),
        schema(r##"{"$ref": "#/$defs/none"}"##),
        schema(r#"{"type": "string", "minLength": 5, "maxLength": 2}"#),
        schema(r#"{"type": "string", "pattern": "("}"#),
        schema(r#"{"x-guidance": 3}"#),
        schema(r#"{"enum": []}"#),
        schema(r#"{"$ref": "https://example.com/schema.json"}"#),
        Grammar::Regex("(".into()),
        Grammar::Regex("[z-a]".into()),
        Grammar::Lark("start: missing".into()),
        Grammar::Lark("begin: \"a\"".into()),
        Grammar::Lark("start: \"a".into()),
    ] {
        let e = c
            .compile(&grammar)
            .map(|_| ())
            .expect_err(&format!("{grammar:?}"));
        assert_eq!(e.kind(), ErrorKind::InvalidOption, "{grammar:?}: {e}");
        assert!(e.message().contains("cannot be used"), "{e}");
    }
}

#[test]
fn bombs_end_in_an_error_or_in_bounded_work() {
    let c = bytes();
    let deep = (0..2000).fold(String::from("a"), |r, _| format!("({r})"));
    for grammar in [
        Grammar::Regex("((((a{1,1000}){1,1000}){1,1000}){1,1000})".into()),
        Grammar::Regex(deep),
        schema(&format!(r#"{{"type": "array", "minItems": {}}}"#, u64::MAX)),
        schema(&format!(
            r#"{{"enum": [{}]}}"#,
            vec!["\"x\""; 20_000].join(",")
        )),
    ] {
        if let Err(e) = c.compile(&grammar) {
            assert_eq!(e.kind(), ErrorKind::InvalidOption, "{e}");
        }
    }
}

#[test]
fn a_vocabulary_without_an_end_is_unsupported() {
    let c = compiler(byte_level(), &[]);
    let e = c.compile(&Grammar::json_object()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
}
