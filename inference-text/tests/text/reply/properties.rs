//! Property tests: random text of all kinds, split at random places.

use super::harness::{Golden, render, typed_tools};
use inference_text::reply::{Event, Family, Format, ReasoningTags, Reply};
use proptest::prelude::*;

/// Parts of calls of all families. Random text made of them reaches deep code of the parsers.
const PARTS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<function_calls>",
    "</function_calls>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "thought\n",
    "<channel|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<minimax:tool_call>",
    "<invoke name=\"f\">",
    "</invoke>",
    "<parameter name=\"s\">",
    "<function=f>",
    "<parameter=s>",
    "<parameter=i>",
    "</parameter>",
    "</function>",
    "call:f{",
    "<|tool_call|>",
    "<response>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "\n```json\n",
    "<seed:tool_call>",
    "[f(",
    "f(",
    "s=",
    "i=",
    ")",
    "f",
    "g",
    "f\n",
    "functions.f:0",
    "{\"name\": \"f\", \"arguments\": ",
    "{\"name\": \"f\", \"parameters\": ",
    "{\"s\": \"",
    "\"}",
    "}",
    "]",
    "[",
    "{",
    ",",
    ":",
    "\"",
    "'",
    "\\",
    "\\u12",
    "\\ud83d",
    "1",
    "-",
    ".",
    "true",
    "nul",
    " to=functions.f",
    "analysis",
    "commentary",
    "assistant",
    " ",
    "\n",
    "é",
    "日",
    "\u{0}",
    "😀",
    "123456789",
    "s:",
    "'''",
    "{}",
    "{\"a\": [1]}",
    "[[",
    "x",
];

fn garbage() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        8 => prop::sample::select(PARTS).prop_map(str::to_owned),
        1 => ".{0,3}",
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

fn format() -> impl Strategy<Value = Format> {
    let tags = prop_oneof![
        Just(ReasoningTags::THINK),
        Just(ReasoningTags::MISTRAL),
        Just(ReasoningTags::GEMMA4),
        Just(ReasoningTags::COMMAND_R),
    ];
    (
        prop::sample::select(&Family::ALL[..]),
        prop::option::of(tags),
    )
        .prop_map(|(family, tags)| {
            let format = Format::for_family(family);
            tags.map_or(format, |tags| format.with_reasoning(tags))
        })
}

/// Random JSON with names as keys. Strings contain no markers of any syntax.
fn value() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::Value;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9).prop_map(Value::from),
        "[a-z0-9 ,:{}()\\[\\]'\"\\\\\\n\\té日😀|>=-]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,6}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Random arguments without strings at the top level. Families without JSON can write such strings
/// in many ways.
fn arguments() -> impl Strategy<Value = serde_json::Map<String, serde_json::Value>> {
    let value = value().prop_filter("no string at the top", |value| !value.is_string());
    prop::collection::btree_map("[a-z_]{1,6}", value, 0..5)
        .prop_map(|map| map.into_iter().collect())
}

/// A value in Python's notation.
fn python(value: &serde_json::Value) -> String {
    use serde_json::Value;
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Array(list) => {
            let list: Vec<_> = list.iter().map(python).collect();
            format!("[{}]", list.join(", "))
        }
        Value::Object(map) => {
            let entry = |(key, value)| format!("'{key}': {}", python(value));
            format!(
                "{{{}}}",
                map.iter().map(entry).collect::<Vec<_>>().join(", ")
            )
        }
        Value::String(text) => {
            let text = text
                .replace('\\', "\\\\")
                .replace('\'', "\\'")
                .replace('\n', "\\n");
            format!("'{text}'")
        }
        other => other.to_string(),
    }
}

/// A value in Gemma's notation.
fn gemma(value: &serde_json::Value, mark: &str) -> String {
    use serde_json::Value;
    match value {
        Value::Array(list) => {
            let list: Vec<_> = list.iter().map(|value| gemma(value, mark)).collect();
            format!("[{}]", list.join(","))
        }
        Value::Object(map) => {
            let entry = |(key, value)| format!("{key}:{}", gemma(value, mark));
            format!(
                "{{{}}}",
                map.iter().map(entry).collect::<Vec<_>>().join(",")
            )
        }
        Value::String(text) => format!("{mark}{text}{mark}"),
        other => other.to_string(),
    }
}

/// The pieces of a text that is split at these positions.
fn cut<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<(&'a str, bool)> {
    let bounds: Vec<_> = text
        .char_indices()
        .map(|(at, _)| at)
        .chain([text.len()])
        .collect();
    let mut points: Vec<_> = cuts
        .iter()
        .map(|cut| bounds[cut.index(bounds.len())])
        .collect();
    points.extend([0, text.len()]);
    points.sort_unstable();
    points
        .windows(2)
        .map(|pair| (&text[pair[0]..pair[1]], false))
        .collect()
}

/// The number of visible characters in all events, except those of complete calls.
fn kept(events: Vec<Event>) -> usize {
    let reply = Reply::collect(events);
    let visible = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
    visible(&reply.content) + visible(&reply.reasoning)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// No parser may panic, complete arguments must be JSON (`render` checks both), and the split
    /// must have no effect.
    #[test]
    fn cuts_change_nothing(
        format in format(),
        reply in garbage(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        with_tools in any::<bool>(),
    ) {
        let mut golden = Golden::new(format);
        if with_tools {
            golden = golden.tools(typed_tools());
        }
        let uncut = golden.events(&[(&reply, false)]);
        let parts = golden.events(&cut(&reply, &cuts));
        let whole_lines = render(uncut.clone());
        prop_assert_eq!(&whole_lines, &render(parts));
        // Without a call or a removed marker, no visible character may be lost.
        let taken = whole_lines.iter().any(|line| line.starts_with("call "))
            || PARTS
                .iter()
                .any(|part| part.len() > 3 && part.starts_with(['<', '[']) && reply.contains(part));
        if !taken && format.family != Family::Harmony {
            prop_assert_eq!(kept(uncut), reply.chars().filter(|c| !c.is_whitespace()).count());
        }
    }

    /// Without a format, the parser must return each character.
    #[test]
    fn no_format_loses_nothing(
        reply in prop_oneof![garbage(), any::<String>()],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let golden = Golden::new(Format::none());
        let out = Reply::collect(golden.events(&cut(&reply, &cuts)));
        prop_assert_eq!(out.content, reply);
        prop_assert!(out.reasoning.is_empty() && out.calls.is_empty());
    }

    /// A call with an arbitrary string argument, in the syntaxes that can express all strings.
    #[test]
    fn any_string_comes_through(text in any::<String>()) {
        let json = serde_json::to_string(&text).expect("a string");
        for (family, reply) in [
            (Family::Hermes, format!("<tool_call>{{\"name\":\"f\",\"arguments\":{{\"s\":{json}}}}}</tool_call>")),
            (Family::MistralArgs, format!("[TOOL_CALLS]f[ARGS]{{\"s\":{json}}}")),
            (Family::Llama3, format!("{{\"name\":\"f\",\"parameters\":{{\"s\":{json}}}}}")),
            (Family::KimiK2, format!("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{\"s\":{json}}}")),
        ] {
            let golden = Golden::new(Format::for_family(family)).tools(typed_tools());
            let reply = Reply::collect(golden.events(&[(&reply, false)]));
            prop_assert_eq!(reply.calls.len(), 1);
            let arguments: serde_json::Value =
                serde_json::from_str(&reply.calls[0].arguments).expect("JSON");
            prop_assert_eq!(&arguments["s"], &text);
        }
        // Python strings and tagged values. JSON's escapes are also valid in Python.
        let raw = !text.contains("</") && !text.contains('\u{7f}');
        for (family, reply, fits) in [
            (Family::Lfm2, format!("<|tool_call_start|>[f(s={json})]<|tool_call_end|>"),
             !json.contains("\\b") && !json.contains("\\f")),
            (Family::Qwen3Coder, format!("<tool_call><function=f><parameter=s>\n{text}\n</parameter></function>"), raw),
            (Family::Glm4Moe, format!("<tool_call>f<arg_key>s</arg_key><arg_value>\n{text}\n</arg_value></tool_call>"), raw),
            (Family::MiniMax, format!("<minimax:tool_call><invoke name=\"f\"><parameter name=\"s\">\n{text}\n</parameter></invoke>"), raw),
            (Family::Gemma4, format!("<|tool_call>call:f{{s:<|\"|>{text}<|\"|>}}<tool_call|>"), !text.contains("<|")),
        ] {
            if !fits {
                continue;
            }
            let golden = Golden::new(Format::for_family(family)).tools(typed_tools());
            let reply = Reply::collect(golden.events(&[(&reply, false)]));
            prop_assert_eq!(reply.calls.len(), 1, "{}", family);
            let arguments: serde_json::Value =
                serde_json::from_str(&reply.calls[0].arguments).expect("JSON");
            prop_assert_eq!(&arguments["s"], &text, "{}", family);
        }
    }

    /// Arbitrary arguments in a family's syntax must be parsed to equal JSON.
    #[test]
    fn any_arguments_come_through(arguments in arguments()) {
        let json = serde_json::Value::Object(arguments.clone());
        let python: Vec<_> = arguments.iter().map(|(k, v)| format!("{k}={}", python(v))).collect();
        let python = python.join(", ");
        let escape = gemma(&json, "<escape>");
        let quote = gemma(&json, "<|\"|>");
        let tags = |open: &str, middle: &str, close: &str| {
            let tag = |(key, value)| format!("{open}{key}{middle}{value}{close}\n");
            arguments.iter().map(tag).collect::<String>()
        };
        let qwen = tags("<parameter=", ">\n", "\n</parameter>");
        let glm = tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>");
        let minimax = tags("<parameter name=\"", "\">", "</parameter>");
        for (family, reply) in [
            (Family::Hermes, format!("<tool_call>{{\"name\":\"f\",\"arguments\":{json}}}</tool_call>")),
            (Family::MistralNemo, format!("[TOOL_CALLS][{{\"name\":\"f\",\"arguments\":{json}}}]")),
            (Family::MistralCallId, format!("[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{json}")),
            (Family::CommandR, format!("<|START_ACTION|>[{{\"tool_name\":\"f\",\"parameters\":{json}}}]<|END_ACTION|>")),
            (Family::Harmony, format!("<|channel|>commentary to=functions.f<|message|>{json}<|call|>")),
            (Family::DeepSeekV3, format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json}\n```<｜tool▁call▁end｜>")),
            (Family::Lfm2, format!("<|tool_call_start|>[f({python})]<|tool_call_end|>")),
            (Family::Olmo3, format!("<function_calls>\nf({python})\n</function_calls>")),
            (Family::FunctionGemma, format!("<start_function_call>call:f{escape}<end_function_call>")),
            (Family::Gemma4, format!("<|tool_call>call:f{quote}<tool_call|>")),
            (Family::Qwen3Coder, format!("<tool_call>\n<function=f>\n{qwen}</function>\n</tool_call>")),
            (Family::Glm4Moe, format!("<tool_call>f\n{glm}</tool_call>")),
            (Family::MiniMax, format!("<minimax:tool_call>\n<invoke name=\"f\">\n{minimax}</invoke>\n</minimax:tool_call>")),
        ] {
            let golden = Golden::new(Format::for_family(family));
            let out = Reply::collect(golden.events(&[(&reply, false)]));
            prop_assert_eq!(out.calls.len(), 1, "{} {}", family, reply);
            let read: serde_json::Value = serde_json::from_str(&out.calls[0].arguments).expect("JSON");
            prop_assert_eq!(&read, &json, "{} {}", family, reply);
            prop_assert!(out.content.is_empty(), "{} {}", family, out.content);
        }
    }
}
