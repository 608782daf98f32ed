//! Tests of forced calls in the formats whose arguments are not JSON. A matcher follows the
//! grammar, and the parser must read every reply that the grammar allows.

use super::harness::Golden;
use inference_text::reply::{Event, Family, Format, JsonStart, Reply, Tools};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::Arc;

/// The families whose arguments are not JSON.
const FAMILIES: [Family; 8] = [
    Family::Qwen3Coder,
    Family::Glm4Moe,
    Family::MiniMax,
    Family::Pythonic,
    Family::Lfm2,
    Family::Olmo3,
    Family::FunctionGemma,
    Family::Gemma4,
];

const END: u32 = 256;

/// A vocabulary of the 256 bytes and an end-of-text token.
fn factory() -> ParserFactory {
    let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    words[usize::from(TokTrie::SPECIAL_TOKEN_MARKER)].clear();
    words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], &b"<end>"[..]].concat());
    let trie = TokTrie::from(&TokRxInfo::new(257, END), &words);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).expect("a usable vocabulary");
    factory.quiet();
    factory
}

fn lark(family: Family, tools: &Value, one: bool) -> String {
    let tools = Tools::from_json(tools);
    let grammar = family.call_grammar(&tools, None, 0, &mut String::new);
    grammar.unwrap_or_else(|e| panic!("{e}")).lark("", one)
}

fn matcher(factory: &ParserFactory, lark: &str) -> Matcher {
    let grammar = TopLevelGrammar::from_lark(lark.to_owned());
    let matcher = Matcher::new(factory.create_parser(grammar));
    assert_eq!(matcher.get_error(), None, "{lark}");
    matcher
}

/// Whether the grammar allows the text as a whole reply.
fn allows(start: &Matcher, text: &str) -> bool {
    let mut matcher = start.deep_clone();
    text.bytes().all(|byte| {
        let fits = matcher
            .validate_tokens(&[u32::from(byte)])
            .is_ok_and(|n| n == 1);
        fits && matcher.consume_token(u32::from(byte)).is_ok()
    }) && (matcher.is_stopped() || matcher.is_accepting().expect("no error"))
}

/// The calls that the parser reads in a reply, which must consist of calls.
fn calls(family: Family, tools: &Value, text: &str) -> Vec<(String, Value)> {
    let golden = Golden::new(Format::for_family(family)).tools(tools.clone());
    let events = golden.events(&[(text, false)]);
    let malformed = |event: &Event| matches!(event, Event::Malformed(_));
    assert!(
        !events.iter().any(malformed),
        "{family}: {text:?} {events:?}"
    );
    let reply = Reply::collect(events);
    assert_eq!(reply.content, "", "{family}: {text:?}");
    let read = |arguments: &str| match serde_json::from_str(arguments) {
        Ok(value) => value,
        // 1e999 is valid JSON, although it exceeds the range of a double.
        Err(e) if e.to_string().contains("out of range") => Value::Null,
        Err(e) => panic!("{family}: {text:?} {arguments}: {e}"),
    };
    let calls = reply.calls.iter();
    calls
        .map(|call| (call.name.clone(), read(&call.arguments)))
        .collect()
}

/// Whether a value fits a schema. Checks only the keywords that these tests use.
fn fits(value: &Value, schema: &Value, root: &Value) -> bool {
    if let Some(name) = schema.get("$ref").and_then(Value::as_str) {
        return fits(value, root.pointer(&name[1..]).expect("a target"), root);
    }
    for word in ["anyOf", "oneOf", "allOf"] {
        if let Some(parts) = schema.get(word).and_then(Value::as_array) {
            return parts.iter().any(|part| fits(value, part, root));
        }
    }
    let is = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => {
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|n| n.fract() == 0.0)
        }
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    let typed = match &schema["type"] {
        Value::String(name) => is(name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is),
        _ => true,
    };
    let number = |word: &str| schema.get(word).and_then(Value::as_f64);
    let between = |n: f64, low: &str, high: &str| {
        number(low).is_none_or(|low| n >= low) && number(high).is_none_or(|high| n <= high)
    };
    typed
        && schema.get("const").is_none_or(|constant| constant == value)
        && schema["enum"]
            .as_array()
            .is_none_or(|list| list.contains(value))
        && value
            .as_f64()
            .is_none_or(|n| between(n, "minimum", "maximum"))
        && value
            .as_str()
            .is_none_or(|text| between(text.chars().count() as f64, "minLength", "maxLength"))
        && value.as_array().is_none_or(|list| {
            between(list.len() as f64, "minItems", "maxItems")
                && list
                    .iter()
                    .all(|value| schema.get("items").is_none_or(|s| fits(value, s, root)))
        })
        && value.as_object().is_none_or(|map| {
            let names = schema["required"].as_array().into_iter().flatten();
            names
                .filter_map(Value::as_str)
                .all(|name| map.contains_key(name))
                && map
                    .iter()
                    .all(|(key, value)| match schema["properties"].get(key) {
                        Some(schema) => fits(value, schema, root),
                        None => match schema.get("additionalProperties") {
                            None | Some(Value::Bool(true)) => true,
                            Some(Value::Bool(false)) => false,
                            Some(schema) => fits(value, schema, root),
                        },
                    })
        })
}

/// Parts of random replies: parts of all syntaxes, and texts that resemble them.
const PARTS: &[&str] = &[
    "\n</parameter>\n",
    "</parameter>\n",
    "</arg_value>\n",
    "</arg_value",
    "</param",
    "</",
    "<",
    "<|\"|>",
    "<escape>",
    "<|\"|",
    "<esc",
    "\"",
    "'",
    "\\",
    "\\n",
    "\\\"",
    "]",
    "}",
    ")",
    ",",
    ", ",
    "[",
    "{",
    "(",
    "1",
    "-2.5",
    "7e1",
    "true",
    "True",
    "false",
    "null",
    "None",
    "none",
    " ",
    "\n",
    "x",
    "é",
    "a b",
    "&",
    "/",
    "\\u003c",
    "</tool_call>",
    "</function>",
    "<tool_call>",
    "key",
    ":",
];

/// A random reply of the grammar; `None` if it does not end soon.
fn reply(start: &Matcher, seed: u64) -> Option<String> {
    let mut matcher = start.deep_clone();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as usize % n
    };
    let mut text = Vec::new();
    while text.len() < 3000 {
        if matcher.is_stopped() || matcher.is_accepting().expect("no error") {
            return Some(String::from_utf8(text).expect("whole characters"));
        }
        // Closing parts come first in the list and are drawn more often, so replies end.
        let most = if next(2) == 0 { 24 } else { PARTS.len() };
        let part = PARTS[next(most)];
        let tokens: Vec<u32> = part.bytes().map(u32::from).collect();
        let fitting = matcher.validate_tokens(&tokens).expect("no error");
        let whole = (0..=fitting)
            .rev()
            .find(|n| part.is_char_boundary(*n))
            .unwrap_or(0);
        let mut chosen = part.as_bytes()[..whole].to_vec();
        if whole == 0 {
            let mask = matcher.compute_mask_or_eos().expect("no error");
            let allowed = |b: &u8| mask.is_allowed(u32::from(*b));
            let mut some: Vec<u8> = (9..127u8).filter(allowed).collect();
            if some.is_empty() {
                // DeepSeek's markers contain non-ASCII characters, so other bytes may be the only
                // ones allowed.
                some.extend((128..=255u8).filter(allowed));
            }
            assert!(
                !some.is_empty(),
                "stuck after {:?}",
                String::from_utf8_lossy(&text)
            );
            chosen = vec![some[next(some.len())]];
        }
        for byte in chosen {
            matcher.consume_token(u32::from(byte)).expect("allowed");
            text.push(byte);
        }
    }
    None
}

/// One tool for each kind of schema.
fn tools() -> Value {
    json!([
        {"name": "text", "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f & k", "c d"]}},
            "required": ["city"], "additionalProperties": false}},
        {"name": "numbers", "parameters": {"type": "object",
            "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 120},
                "x": {"type": "number"}, "yes": {"type": "boolean"}, "no": {"type": "null"}},
            "required": ["n", "yes"], "additionalProperties": false}},
        {"name": "unions", "parameters": {"type": "object", "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 5}]},
            "b": {"type": ["string", "null"], "maxLength": 3},
            "c": {"anyOf": [{"const": false}, {"type": "string", "minLength": 2}]},
            "d": {"enum": [1, "one", null, [true]]}},
            "required": ["a", "c"], "additionalProperties": false}},
        {"name": "nested", "parameters": {"type": "object",
            "$defs": {"tree": {"type": "object", "properties": {
                "name": {"type": "string"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
                "required": ["name"], "additionalProperties": false}},
            "properties": {"tree": {"$ref": "#/$defs/tree"},
                "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
                "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
                "free": {}},
            "required": ["tags", "tree"], "additionalProperties": false}},
        {"name": "nothing"},
    ])
}

#[test]
fn every_reply_of_a_grammar_is_calls_of_the_schema() {
    let (factory, tools) = (factory(), tools());
    for family in FAMILIES {
        for tool in tools.as_array().expect("a list") {
            let own = json!([tool]);
            let start = matcher(&factory, &lark(family, &own, true));
            let mut ended = 0;
            for seed in 1..=40 {
                let Some(text) = reply(&start, seed) else {
                    continue;
                };
                let calls = calls(family, &own, &text);
                let [(name, arguments)] = calls.as_slice() else {
                    panic!("{family}: {text:?} {calls:?}")
                };
                assert_eq!(*name, tool["name"]);
                if arguments.is_null() {
                    continue;
                }
                ended += 1;
                let schema = &tool["parameters"];
                assert!(
                    fits(arguments, schema, schema),
                    "{family}: {text:?} {arguments}"
                );
            }
            assert!(ended >= 10, "{family} {}: {ended}", tool["name"]);
        }
    }
}

/// A tool with a required string, an optional integer and an optional list.
fn small() -> Value {
    json!([{"name": "f", "parameters": {"type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"},
            "c": {"type": "array", "items": {"enum": ["x", "y"]}}},
        "required": ["a"]}}, {"name": "g"}])
}

/// Replies as the models write them, their arguments, and replies that violate the schema.
#[test]
fn replies_of_the_models_are_allowed_and_others_are_refused() {
    let (factory, tools) = (factory(), small());
    for (family, good, bad) in [
        (
            Family::Qwen3Coder,
            "<tool_call>\n<function=f>\n<parameter=a>\n1 < 2\n</parameter>\n<parameter=b>\n7\n</parameter>\n<parameter=c>\n[\"x\", \"y\"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
            &[
                "<tool_call>\n<function=h>\n</function>\n</tool_call>",
                "<tool_call>\n<function=f>\n</function>\n</tool_call>",
                "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\nseven\n</parameter>\n</function>\n</tool_call>",
                "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=d>\n7\n</parameter>\n</function>\n</tool_call>",
            ][..],
        ),
        (
            Family::Glm4Moe,
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1 < 2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>7</arg_value>\n<arg_key>c</arg_key>\n<arg_value>[\"x\", \"y\"]</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
            &[
                "<tool_call>f\n</tool_call>",
                "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b</arg_key>\n<arg_value>seven</arg_value>\n</tool_call>",
            ],
        ),
        (
            Family::MiniMax,
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">1 < 2</parameter>\n<parameter name=\"b\">7</parameter>\n<parameter name=\"c\">[\"x\", \"y\"]</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
            &[
                "<minimax:tool_call>\n<invoke name=\"f\">\n</invoke>\n</minimax:tool_call>",
                "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"a\">x</parameter>\n<parameter name=\"c\">[\"z\"]</parameter>\n</invoke>\n</minimax:tool_call>",
            ],
        ),
        (
            Family::Pythonic,
            "[f(a='1 < 2', b=7, c=[\"x\", \"y\"]), g()]",
            &[
                "[f()]",
                "[f(a=1)]",
                "[f(a='x', b='7')]",
                "[f(a='x', d=7)]",
                "[h()]",
                "[f(b=7)]",
            ],
        ),
        (
            Family::Lfm2,
            "<|tool_call_start|>[f(a=\"1 < 2\", b=7, c=[\"x\", \"y\"]), g()]<|tool_call_end|>",
            &["<|tool_call_start|>[f()]<|tool_call_end|>", "[g()]"],
        ),
        (
            Family::Olmo3,
            "<function_calls>f(a=\"1 < 2\", b=7, c=[\"x\", \"y\"])\ng()</function_calls>",
            &[
                "<function_calls>f()</function_calls>",
                "<function_calls>f(a=\"x\", c=[\"z\"])</function_calls>",
            ],
        ),
        (
            Family::FunctionGemma,
            "<start_function_call>call:f{a:<escape>1 < 2<escape>,b:7,c:[<escape>x<escape>,<escape>y<escape>]}<end_function_call><start_function_call>call:g{}<end_function_call>",
            &[
                "<start_function_call>call:f{}<end_function_call>",
                "<start_function_call>call:f{a:<escape>x<escape>,b:<escape>7<escape>}<end_function_call>",
            ],
        ),
        (
            Family::Gemma4,
            "<|tool_call>call:f{a:<|\"|>1 < 2<|\"|>,b:7,c:[<|\"|>x<|\"|>,<|\"|>y<|\"|>]}<tool_call|><|tool_call>call:g{}<tool_call|>",
            &[
                "<|tool_call>call:f{a:x}<tool_call|>",
                "<|tool_call>call:f{b:7}<tool_call|>",
                "<|tool_call>call:h{}<tool_call|>",
            ],
        ),
    ] {
        let start = matcher(&factory, &lark(family, &tools, false));
        assert!(allows(&start, good), "{family}: {good}");
        let expected = [
            ("f".into(), json!({"a": "1 < 2", "b": 7, "c": ["x", "y"]})),
            ("g".into(), json!({})),
        ];
        assert_eq!(calls(family, &tools, good), expected, "{family}");
        for text in bad {
            assert!(!allows(&start, text), "{family}: {text}");
        }
        let one = matcher(&factory, &lark(family, &tools, true));
        assert!(!allows(&one, good), "{family} writes one call only");
    }
}

#[test]
fn what_a_syntax_cannot_express_says_so() {
    for family in FAMILIES {
        for (schema, part) in [
            (json!({"type": "string", "pattern": "^a+$"}), "'pattern'"),
            (
                json!({"type": "array", "uniqueItems": true}),
                "'uniqueItems'",
            ),
            (json!({"type": "string", "not": {"const": "x"}}), "'not'"),
            (
                json!({"allOf": [{"type": "string"}, {"minLength": 1}]}),
                "'allOf'",
            ),
            (json!({"$ref": "#/properties/a"}), "$ref"),
            (json!({"$ref": "https://example.com/schema"}), "$ref"),
            (
                json!({"type": "array", "items": {"type": "string", "pattern": "a"}}),
                "'pattern'",
            ),
            (json!({"enum": []}), "no value"),
            (
                json!({"type": "string", "minLength": 3, "maxLength": 2}),
                "'minLength'",
            ),
        ] {
            let tools = json!([{"name": "f", "parameters": {"type": "object",
                "properties": {"a": schema}}}]);
            let tools = Tools::from_json(&tools);
            let grammar = family.call_grammar(&tools, None, 0, &mut String::new);
            let error = grammar.expect_err("not expressible").to_string();
            for part in [part, "'f'", family.to_string().as_str()] {
                assert!(error.contains(part), "{family} {schema}: {error}");
            }
        }
    }
    // References that double at each step end in time.
    let parts = json!([{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}]);
    let tools = json!([{"name": "f", "parameters": {"$defs": {"tree": {"anyOf": parts}},
        "properties": {"a": {"$ref": "#/$defs/tree"}}}}]);
    let tools = Tools::from_json(&tools);
    let grammar = Family::Lfm2.call_grammar(&tools, None, 0, &mut String::new);
    assert!(grammar.expect_err("a cycle").to_string().contains("$ref"));
    // These texts would end the argument, or the parser would read them as a number.
    for (family, schema) in [
        (Family::Qwen3Coder, json!({"const": "a</parameter>"})),
        (Family::Gemma4, json!({"const": "a<|\"|>"})),
        (Family::Glm4Moe, json!({"enum": ["5", 6]})),
        (Family::MiniMax, json!({"const": "x</parameter>"})),
    ] {
        let tools = json!([{"name": "f", "parameters": {"properties": {"a": schema}}}]);
        let grammar = family.call_grammar(&Tools::from_json(&tools), None, 0, &mut String::new);
        assert!(grammar.is_err(), "{family} {schema}");
    }
    // These families cannot write such argument names.
    for (family, key) in [
        (Family::Lfm2, "a b"),
        (Family::Gemma4, "a:b"),
        (Family::Qwen3Coder, "a>b"),
    ] {
        let tools = json!([{"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}]);
        let grammar = family.call_grammar(&Tools::from_json(&tools), None, 0, &mut String::new);
        let error = grammar.expect_err("not expressible").to_string();
        assert!(error.contains(key), "{error}");
    }
}

/// A reply is either a call or JSON of a schema, in all formats in which the two begin differently.
#[test]
fn a_reply_is_a_call_or_json() {
    let factory = factory();
    let tools = json!([{"name": "f", "parameters": {"type": "object",
        "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": false}}]);
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}},
        "required": ["a"], "additionalProperties": false});
    for family in Family::ALL {
        if matches!(family, Family::None) {
            continue;
        }
        let list = Tools::from_json(&tools);
        let grammar = family
            .call_grammar(&list, None, 0, &mut || "123456789".into())
            .unwrap();
        let json_calls = matches!(family, Family::Llama3);
        assert_eq!(
            grammar.begins_like(JsonStart::of(&schema)),
            json_calls,
            "{family}"
        );
        let both = matcher(&factory, &grammar.lark_or_json("", true, &schema));
        let forced = matcher(&factory, &grammar.lark("", true));
        let json = r#"{"a": "<tool_call> & x"}"#;
        assert!(allows(&both, json), "{family}");
        assert!(!allows(&forced, json), "{family}");
        for no in ["", "x", r#"{"b": 1}"#, "[1]"] {
            assert!(!allows(&both, no), "{family}: {no}");
        }
        let mut calls = 0;
        for seed in 1..20 {
            let Some(call) = reply(&forced, seed) else {
                continue;
            };
            assert!(allows(&both, &call), "{family}: {call}");
            assert!(!allows(&both, &format!("{json}{call}")), "{family}: {call}");
            calls += 1;
        }
        assert!(calls > 0, "{family}");
    }
}
