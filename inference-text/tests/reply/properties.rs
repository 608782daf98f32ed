//! Garbage of all kinds, cut anywhere.

use crate::harness::{Golden, render, typed_tools};
use inference_text::reply::{Event, Family, Format, ReasoningTags, Reply};
use proptest::prelude::*;

/// Parts of calls of all families, so that garbage reaches deep into the parsers.
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
            let format = Format::of(family);
            tags.map_or(format, |tags| format.with_reasoning(tags))
        })
}

/// Pieces of a text between cut points.
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

/// The visible characters of all that came out, without those of calls that ended.
fn kept(events: Vec<Event>) -> usize {
    let reply = Reply::collect(events);
    let visible = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
    visible(&reply.content) + visible(&reply.reasoning)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// No panic, complete arguments are JSON (`render` checks both), and cuts change nothing.
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
        let whole = golden.events(&[(&reply, false)]);
        let parts = golden.events(&cut(&reply, &cuts));
        let whole_lines = render(whole.clone());
        prop_assert_eq!(&whole_lines, &render(parts));
        // Without a call or a marker that was taken out, all visible text is still there.
        let taken = whole_lines.iter().any(|line| line.starts_with("call "))
            || PARTS
                .iter()
                .any(|part| part.len() > 3 && part.starts_with(['<', '[']) && reply.contains(part));
        if !taken && format.family != Family::Harmony {
            prop_assert_eq!(kept(whole), reply.chars().filter(|c| !c.is_whitespace()).count());
        }
    }

    /// Without a format every character comes out again.
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

    /// A call with any string as its argument, in the syntaxes whose strings can hold anything.
    #[test]
    fn any_string_comes_through(text in any::<String>()) {
        let json = serde_json::to_string(&text).expect("a string");
        for (family, reply) in [
            (Family::Hermes, format!("<tool_call>{{\"name\":\"f\",\"arguments\":{{\"s\":{json}}}}}</tool_call>")),
            (Family::MistralArgs, format!("[TOOL_CALLS]f[ARGS]{{\"s\":{json}}}")),
            (Family::Llama3, format!("{{\"name\":\"f\",\"parameters\":{{\"s\":{json}}}}}")),
            (Family::KimiK2, format!("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{\"s\":{json}}}")),
        ] {
            let golden = Golden::new(Format::of(family)).tools(typed_tools());
            let reply = Reply::collect(golden.events(&[(&reply, false)]));
            prop_assert_eq!(reply.calls.len(), 1);
            let arguments: serde_json::Value =
                serde_json::from_str(&reply.calls[0].arguments).expect("JSON");
            prop_assert_eq!(&arguments["s"], &text);
        }
        // The strings of Python and of the tagged families; JSON's escapes are Python's, too.
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
            let golden = Golden::new(Format::of(family)).tools(typed_tools());
            let reply = Reply::collect(golden.events(&[(&reply, false)]));
            prop_assert_eq!(reply.calls.len(), 1, "{}", family);
            let arguments: serde_json::Value =
                serde_json::from_str(&reply.calls[0].arguments).expect("JSON");
            prop_assert_eq!(&arguments["s"], &text, "{}", family);
        }
    }
}
