use std::thread;

use serde_json::{Map, Value, json};

use super::*;
use crate::sampling::Grammar;

/// Runs `f` on the smallest usual thread stack.
fn on_a_small_stack<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let builder = thread::Builder::new().stack_size(128 << 10);
        builder.spawn_scoped(scope, f).unwrap().join().unwrap()
    })
}

/// Drops deeply nested values on a large stack.
fn on_a_large_stack(f: impl FnOnce() + Send + 'static) {
    let builder = thread::Builder::new().stack_size(1 << 30);
    builder.spawn(f).unwrap().join().unwrap();
}

fn error(grammar: &Grammar) -> String {
    let error = grammar.validate().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    error.to_string()
}

fn schema(value: Value) -> Grammar {
    Grammar::JsonSchema(value)
}

/// Checks a limit: `make(most)` must pass, and `make(most + 1)` must fail.
fn at_the_limit(most: usize, make: impl Fn(usize) -> Value, place: &str) {
    schema(make(most)).validate().unwrap();
    let said = error(&schema(make(most + 1)));
    assert!(
        said.contains(&most.to_string()) && said.contains(place),
        "{said}"
    );
}

fn members(n: usize, value: &Value) -> Value {
    Value::Object((0..n).map(|i| (format!("k{i}"), value.clone())).collect())
}

fn nested(levels: usize) -> Value {
    (1..levels).fold(json!(true), |inner, _| json!({"items": inner}))
}

#[test]
fn depth_is_limited_without_recursion() {
    at_the_limit(SCHEMA_DEPTH, nested, "/items/items");
    on_a_large_stack(|| {
        let object = |v| Value::Object(Map::from_iter([("items".to_owned(), v)]));
        let array = |v| Value::Array(vec![v]);
        let both = |v| object(array(v));
        for wrap in [&object as &dyn Fn(Value) -> Value, &array, &both] {
            let deep = schema((0..100_000).fold(Value::Null, |inner, _| wrap(inner)));
            let said = on_a_small_stack(|| error(&deep));
            assert!(said.contains("deeper than 128 levels"), "{said}");
            assert!(said.len() < 400, "{said}");
        }
        let lark = format!("start: %json {}{}", "[".repeat(5000), "]".repeat(5000));
        // This check ignores the schema's invalid JSON, which the grammar library refuses.
        on_a_small_stack(|| Grammar::Lark(lark).validate()).unwrap();
    });
}

#[test]
fn lengths_and_numbers_are_limited() {
    let any = json!({"type": "null"});
    at_the_limit(
        MEMBERS,
        |n| json!({"properties": members(n, &any)}),
        "/properties",
    );
    at_the_limit(
        ENUM,
        |n| json!({"items": {"enum": vec![7; n]}}),
        "/items/enum",
    );
    at_the_limit(ELEMENTS, |n| json!({"anyOf": vec![&any; n]}), "/anyOf");
    at_the_limit(PATTERN, |n| json!({"pattern": "a".repeat(n)}), "/pattern");
    let long = |n: usize| json!({"patternProperties": {"a".repeat(n): true}});
    at_the_limit(PATTERN, long, "/patternProperties/aaa");
    let patterns = |n| json!({"patternProperties": members(n, &any)});
    at_the_limit(PATTERN_PROPERTIES, patterns, "/patternProperties");
    for name in [
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minProperties",
    ] {
        let most = REPETITIONS as usize;
        at_the_limit(most, |n| json!({"a~": {name: n}}), &format!("/a~0/{name}"));
    }
    let bytes = |n: usize| json!({"title": "a".repeat(n - 14)});
    at_the_limit(SCHEMA_BYTES, bytes, "/title");
    let many = |n: usize| {
        let part = |n: usize| Value::from(vec![0; n]);
        json!({"x": [part(2000), part(n - 2000)], "y": vec![part(1900); 51]})
    };
    schema(many(3000)).validate().unwrap();
    let said = error(&schema(many(4000)));
    assert!(said.contains(&SCHEMA_VALUES.to_string()), "{said}");
    let text = format!("{{\"title\": \"{}\"}}", "a".repeat(SCHEMA_BYTES));
    let said = Grammar::from_json_schema(&text).unwrap_err().to_string();
    assert!(said.contains("1048576"), "{said}");
}

fn chain(n: usize, link: impl Fn(String) -> Value) -> Value {
    let mut defs = Map::new();
    for i in 0..n {
        defs.insert(format!("d{i}"), link(format!("#/$defs/d{}", i + 1)));
    }
    defs.insert(format!("d{n}"), json!({"type": "string"}));
    json!({"$defs": defs, "$ref": "#/$defs/d0"})
}

#[test]
fn references_are_limited() {
    // The root refers to the first definition; the last refers to none.
    let direct = |n: usize| chain(n - 1, |next| json!({"$ref": next}));
    at_the_limit(REFERENCES, direct, "/$ref");
    // Each reference adds four levels of depth: `properties`, `a`, `items` and their values.
    let through = |n| {
        chain(
            n,
            |next| json!({"properties": {"a": {"items": {"$ref": next}}}}),
        )
    };
    schema(through(600)).validate().unwrap();
    let said = error(&schema(through(900)));
    assert!(
        said.contains("4096 levels together") && said.contains("/$defs/d"),
        "{said}"
    );
    // Cycles and missing targets do not form chains.
    let cycle = json!({"$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}}},
        "$ref": "#/$defs/a", "items": {"$ref": "#"}, "not": {"$ref": "http://example.com"}});
    schema(cycle).validate().unwrap();
    let within = format!("start: \"a\"\n\nb: %json {}", direct(REFERENCES + 1));
    let said = error(&Grammar::Lark(within));
    assert!(said.contains("line 3") && said.contains("1000"), "{said}");
}

#[test]
fn patterns_at_once_are_limited() {
    let one = |i: usize| json!({"type": "string", "pattern": format!("a{i}|b")});
    let all = |n: usize| -> Vec<Value> { (0..n).map(one).collect() };
    at_the_limit(COMBINED_PATTERNS, |n| json!({"allOf": all(n)}), "/allOf");
    // Patterns must be counted through every kind of combination.
    let nested = |n: usize| (1..n).fold(one(0), |inner, i| json!({"allOf": [one(i), inner]}));
    at_the_limit(COMBINED_PATTERNS, nested, "/allOf");
    let referred = |n: usize| {
        let refs: Vec<_> = (0..n)
            .map(|i| json!({"$ref": format!("#/$defs/{i}")}))
            .collect();
        json!({"$defs": (0..n).map(|i| (i.to_string(), one(i))).collect::<Map<_, _>>(),
            "properties": {"x": {"allOf": refs}}})
    };
    at_the_limit(COMBINED_PATTERNS, referred, "/properties/x/allOf");
    let merged = |n: usize| {
        let parts: Vec<_> = (0..n)
            .map(|i| json!({"properties": {"x": one(i)}}))
            .collect();
        json!({"allOf": parts})
    };
    at_the_limit(COMBINED_PATTERNS, merged, "/allOf");
    // Patterns that apply to different strings must not add up.
    let apart: Map<_, _> = (0..200).map(|i| (format!("p{i}"), one(i))).collect();
    schema(json!({"properties": apart, "required": ["p0"]}))
        .validate()
        .unwrap();
    schema(json!({"anyOf": all(200)})).validate().unwrap();
    schema(json!({"prefixItems": all(200)})).validate().unwrap();
    let tree = json!({"$defs": {"t": {"properties": {"name": one(0), "children":
        {"type": "array", "items": {"$ref": "#/$defs/t"}}}}}, "$ref": "#/$defs/t"});
    schema(tree).validate().unwrap();
}

#[test]
fn texts_are_limited() {
    Grammar::Regex("a".repeat(REGEX_BYTES)).validate().unwrap();
    let said = error(&Grammar::Regex("a".repeat(REGEX_BYTES + 1)));
    assert!(said.contains(&REGEX_BYTES.to_string()), "{said}");
    let lark = |text: String| Grammar::Lark(format!("start: \"a\"\n{text}"));
    lark("a: \"b\"\n".repeat(1000)).validate().unwrap();
    for (text, limit) in [
        (" ".repeat(LARK_BYTES), LARK_BYTES),
        ("a:b\n".repeat(LARK_COLONS), LARK_COLONS),
        (
            "T: /a/".to_owned() + &" & /b/".repeat(11),
            LARK_INTERSECTIONS,
        ),
    ] {
        let said = error(&lark(text));
        assert!(said.contains(&limit.to_string()), "{said}");
    }
}

#[test]
fn what_is_no_schema_is_named_and_not_shown() {
    for (value, name) in [
        (json!(null), "null"),
        (json!(7), "a number"),
        (json!("x".repeat(1000)), "a string"),
        (json!([1, 2]), "an array"),
    ] {
        let said = error(&schema(value));
        assert!(said.contains(name) && said.len() < 200, "{said}");
    }
}
