//! Tests grammars over small vocabularies: allowed and forbidden tokens, and that every reply
//! matches its grammar.

use super::*;
use crate::text::test_support::{END_OF_TEXT, IM_END, byte_level, sentence_piece};

fn compiler(tokenizer: Tokenizer, eos: &[u32]) -> Compiler {
    let n = tokenizer.vocab_size();
    // A model may have more logits than its tokenizer has tokens.
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

/// Generates a pseudo-random reply of at most `limit` allowed tokens. After `eager` tokens, the
/// reply ends where the grammar first allows it. Returns the text and whether the reply ended.
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
                // 1e999 is valid JSON, although it exceeds the range of a double.
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
    // End tokens must be allowed only where the reply may end.
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
fn a_grammar_is_compiled_once_while_it_is_known() {
    let c = bytes();
    let grammar = Grammar::Regex("abc".into());
    let compiled = c.prepare(&grammar).unwrap();
    // Replies must share the compiled grammar, but no state.
    let (mut one, mut other) = (c.compile(&grammar).unwrap(), c.compile(&grammar).unwrap());
    let first = allowed(&mut one);
    one.accept(c.tokenizer.id_of("a").unwrap()).unwrap();
    assert_ne!(allowed(&mut one), first);
    assert_eq!(allowed(&mut other), first);
    assert_eq!(allowed(&mut c.compile(&grammar).unwrap()), first);
    // Compiling further grammars must keep the grammar in use and drop unused ones.
    let mut gone = Weak::new();
    for i in 0..2 * RECENT {
        let other = c.prepare(&Grammar::Regex(format!("x{i}"))).unwrap();
        if i == 0 {
            gone = Arc::downgrade(&other);
        }
    }
    assert!(Arc::ptr_eq(&compiled, &c.prepare(&grammar).unwrap()));
    assert!(gone.upgrade().is_none());
    let known = c.known.lock();
    assert!(known.recent.len() == RECENT && known.all.len() <= RECENT + 1);
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

/// A chain of `n` definitions, each of which refers to the next.
fn chain(n: usize, link: impl Fn(String) -> Value) -> Grammar {
    let mut defs = Map::new();
    for i in 1..n {
        defs.insert(format!("d{i}"), link(format!("#/$defs/d{}", i + 1)));
    }
    defs.insert(format!("d{n}"), json!({"type": "string"}));
    Grammar::JsonSchema(json!({"$defs": defs, "$ref": "#/$defs/d1"}))
}

/// A value with `levels` levels of nesting, the innermost an object.
fn nested(levels: usize, wrap: fn(Value) -> Value) -> Grammar {
    let mut inner = json!({"type": "string"});
    while depth(&inner) < levels {
        inner = wrap(inner);
    }
    Grammar::JsonSchema(inner)
}

fn depth(value: &Value) -> usize {
    let inner = match value {
        Value::Object(members) => members.values().map(depth).max(),
        Value::Array(elements) => elements.iter().map(depth).max(),
        _ => None,
    };
    1 + inner.unwrap_or(0)
}

/// Grammars at the limit of each kind.
fn largest() -> Vec<(&'static str, Grammar)> {
    let members = |n: usize, value: Value| -> Map<String, Value> {
        (0..n).map(|i| (format!("k{i}"), value.clone())).collect()
    };
    let names = |n: usize| -> Vec<String> { (0..n).map(|i| format!("k{i}")).collect() };
    let schema = Grammar::JsonSchema;
    let rules = |n: usize, rule: &dyn Fn(usize) -> String| -> String { (1..n).map(rule).collect() };
    let number = json!({"type": "integer"});
    let most = i32::MAX;
    vec![
        ("items", nested(127, |v| json!({"items": v}))),
        (
            "properties",
            nested(126, |v| {
                json!({"type": "object", "required": ["a"],
            "properties": {"a": v}})
            }),
        ),
        (
            "any",
            nested(126, |v| json!({"anyOf": [v, {"type": "null"}]})),
        ),
        (
            "all",
            nested(126, |v| json!({"allOf": [v, {"maxLength": 9}]})),
        ),
        ("references", chain(1000, |next| json!({"$ref": next}))),
        (
            "referred",
            chain(800, |next| {
                json!({"type": "object", "properties":
            {"a": {"$ref": next}}})
            }),
        ),
        (
            "members",
            schema(
                json!({"type": "object", "properties": members(2000, number.clone()),
            "required": names(2000)}),
            ),
        ),
        ("enum", schema(json!({"enum": names(10_000)}))),
        (
            "elements",
            schema(json!({"prefixItems": vec![number.clone(); 2000]})),
        ),
        (
            "alternatives",
            schema(json!({"anyOf": (0..2000).map(|i| json!({"type": "object",
            "properties": {format!("k{i}"): number}})).collect::<Vec<_>>()})),
        ),
        (
            "patterns",
            schema(json!({"type": "string", "allOf": (0..10)
            .map(|i| json!({"pattern": format!("a{i}|b")})).collect::<Vec<_>>()})),
        ),
        (
            "pattern properties",
            schema(json!({"type": "object", "patternProperties": (0..64)
            .map(|i| (format!("^a{i}$"), number.clone())).collect::<Map<_, _>>()})),
        ),
        (
            "repetitions",
            schema(json!({"type": "array", "minItems": most, "items":
            {"type": "string", "minLength": most, "maxLength": most}})),
        ),
        (
            "numbers",
            schema(json!({"items": {"type": "number", "minimum": 1e300,
            "multipleOf": 1e-300}})),
        ),
        (
            "constant",
            schema(json!({"const": "x".repeat((1 << 20) - 20)})),
        ),
        (
            "groups",
            Grammar::Regex(format!("{}a{}", "(".repeat(131_000), ")".repeat(131_000))),
        ),
        ("stars", Grammar::Regex(format!("a{}", "*".repeat(262_000)))),
        ("a long text", Grammar::Regex("ab?c*".repeat(52_000))),
        (
            "a thousand thousands",
            Grammar::Regex("(a{1000}){1000}(b{1,9}|c){1000}".into()),
        ),
        ("words", Grammar::Regex(names(30_000).join("|"))),
        (
            "rules",
            Grammar::Lark(format!(
                "start: r1\n{}r3900: \"a\"\n",
                rules(3900, &|i| format!("r{i}: \"x\" r{} | \"y\"\n", i + 1))
            )),
        ),
        (
            "terminals",
            Grammar::Lark(format!(
                "start: T1\n{}T3900: \"a\"\n",
                rules(3900, &|i| format!("T{i}: \"x\" T{} | \"y\"\n", i + 1))
            )),
        ),
        (
            "parentheses",
            Grammar::Lark(format!(
                "start: {}\"a\"{}",
                "(".repeat(65_000),
                ")".repeat(65_000)
            )),
        ),
        (
            "maybes",
            Grammar::Lark(format!(
                "start: {}\"a\"{}",
                "[".repeat(65_000),
                "]".repeat(65_000)
            )),
        ),
        (
            "repeated rules",
            Grammar::Lark(
                "start: b{2000000000}\nb: (c{30000}){30000}\nc: \"x\" start \"y\" | \"z\"\n".into(),
            ),
        ),
        (
            "intersections",
            Grammar::Lark(format!("start: T\nT: /x/{}\n", " & /a1|x/".repeat(10))),
        ),
        (
            "schemas in rules",
            Grammar::Lark(format!(
                "start: %json {}\n",
                match chain(1000, |next| json!({"$ref": next})) {
                    Grammar::JsonSchema(schema) => schema,
                    _ => json!(true),
                }
            )),
        ),
    ]
}

/// A grammar may compile or fail, but no grammar may overflow the caller's stack.
#[test]
fn the_largest_grammars_fit_small_stacks() {
    let compiler = bytes();
    let mut usable = Vec::new();
    for (name, grammar) in largest() {
        grammar.validate().unwrap_or_else(|e| panic!("{name}: {e}"));
        let start = std::time::Instant::now();
        let works = thread::scope(|scope| {
            let run = || {
                let mut matcher = compiler.compile(&grammar).ok()?;
                for n in 0..40 {
                    let Some(words) = matcher.allowed().ok()? else {
                        return Some(()); // the end
                    };
                    let ids = (0..words.len() as u32 * 32)
                        .filter(|i| words[*i as usize / 32] >> (i % 32) & 1 == 1);
                    let ids: Vec<u32> = ids.collect();
                    matcher
                        .accept(*ids.get(n * 7919 % ids.len().max(1))?)
                        .ok()?;
                }
                Some(())
            };
            let builder = thread::Builder::new().stack_size(128 << 10);
            builder.spawn_scoped(scope, run).unwrap().join().unwrap()
        });
        assert!(
            start.elapsed().as_secs() < 60,
            "{name} took {:?}",
            start.elapsed()
        );
        if works.is_some() {
            usable.push(name);
        }
    }
    // llguidance rejects these grammars only after it has processed them.
    for name in [
        "properties",
        "all",
        "references",
        "referred",
        "rules",
        "terminals",
        "members",
        "enum",
    ] {
        assert!(usable.contains(&name), "{name} is not among {usable:?}");
    }
}
