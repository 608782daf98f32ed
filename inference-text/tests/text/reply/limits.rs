//! Tests of extreme lengths: the parsers need linear time, bounded memory and bounded depth.

use super::harness::{render, typed_tools};
use inference_text::reply::{
    Event, Family, Fault, Format, Limits, ParserOptions, Piece, ReasoningTags, Reply,
    SequentialIds, Tools,
};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn formats() -> impl Iterator<Item = Format> {
    Family::ALL
        .into_iter()
        .map(|family| match Format::for_family(family) {
            Format {
                reasoning: None, ..
            } if family != Family::None => {
                Format::for_family(family).with_reasoning(ReasoningTags::THINK)
            }
            format => format,
        })
}

fn options() -> ParserOptions {
    ParserOptions::default()
        .with_ids(SequentialIds::default())
        .with_tools(Tools::from_json(&typed_tools()))
}

/// Feeds a reply to the parser in pieces of about 8 bytes, like the tokens of a model.
fn run(format: Format, reply: &str) -> (Vec<Event>, Duration) {
    let start = Instant::now();
    let mut parser = format.parser(options());
    let mut events = Vec::new();
    let mut rest = reply;
    while !rest.is_empty() {
        let (text, after) = rest.split_at(rest.ceil_char_boundary(8.min(rest.len())));
        events.extend(parser.feed(Piece::text(text)));
        rest = after;
    }
    events.extend(parser.finish());
    (events, start.elapsed())
}

/// The start of a value inside arguments, for each family.
const BEGINNINGS: &[(Family, &str)] = &[
    (Family::None, ""),
    (
        Family::Hermes,
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": ",
    ),
    (Family::Qwen3Coder, "<tool_call><function=f><parameter=o>"),
    (
        Family::Glm4Moe,
        "<tool_call>f<arg_key>o</arg_key><arg_value>",
    ),
    (Family::Glm4, "f\n{\"s\": "),
    (Family::Llama3, "{\"name\": \"f\", \"parameters\": {\"s\": "),
    (Family::Pythonic, "[f(o="),
    (Family::Lfm2, "<|tool_call_start|>[f(o="),
    (Family::Olmo3, "<function_calls>f(o="),
    (
        Family::MistralNemo,
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"s\": ",
    ),
    (
        Family::MistralCallId,
        "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"s\": ",
    ),
    (Family::MistralArgs, "[TOOL_CALLS]f[ARGS]{\"s\": "),
    (Family::FunctionGemma, "<start_function_call>call:f{o:"),
    (Family::Gemma4, "<|tool_call>call:f{o:"),
    (
        Family::Harmony,
        "<|channel|>commentary to=functions.f<|message|>{\"s\": ",
    ),
    (
        Family::CommandR,
        "<|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"s\": ",
    ),
    (
        Family::KimiK2,
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": ",
    ),
    (
        Family::DeepSeekV3,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"s\": ",
    ),
    (
        Family::DeepSeekV31,
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": ",
    ),
    (
        Family::MiniMax,
        "<minimax:tool_call><invoke name=\"f\"><parameter name=\"o\">",
    ),
    (
        Family::Granite3,
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": ",
    ),
];

/// 1 MiB for the simplest attacks, and an eighth for the others. With either length, a quadratic
/// parser would need minutes.
fn length(unit: &str) -> usize {
    if matches!(unit, "<" | "[" | "{") {
        MIB
    } else {
        MIB / 8
    }
}

/// The time limit: the time for plain content of equal length, times a factor that no linear parser
/// exceeds. A quadratic parser would need minutes for 1 MiB.
fn allowed() -> Duration {
    let format = Format::none().with_reasoning(ReasoningTags::THINK);
    run(format, &"text ".repeat(MIB / 5)).1 * 100 + Duration::from_secs(2)
}

#[test]
fn a_mebibyte_of_the_beginnings_of_markers() {
    let allowed = allowed();
    for unit in [
        "<",
        "<|",
        "[",
        "[TOOL_CALL",
        "<tool_cal",
        "<think",
        "</",
        "{",
        " ",
        "\n",
        ";",
    ] {
        let reply = unit.repeat(length(unit) / unit.len());
        for format in formats() {
            let (events, time) = run(format, &reply);
            assert!(time < allowed, "{format:?} {unit:?}: {time:?}");
            let content = Reply::collect(events).content;
            // White space at the start of a harmony message does not belong to its text.
            let same = match format.family {
                Family::Harmony => content.trim() == reply.trim(),
                _ => content == reply,
            };
            // `assert_eq` would print a mebibyte of text.
            assert!(same, "{format:?} {unit:?}");
        }
    }
}

#[test]
fn a_mebibyte_inside_arguments() {
    let allowed = allowed();
    for (family, beginning) in BEGINNINGS {
        for unit in [
            "[",
            "{",
            "(",
            "[1,",
            "{\"a\":",
            "<",
            "\"",
            "'",
            "\\",
            "</parameter",
            " ",
        ] {
            let reply = format!("{beginning}{}", unit.repeat(length(unit) / unit.len()));
            let (events, time) = run(Format::for_family(*family), &reply);
            assert!(time < allowed, "{family} {unit:?}: {time:?}");
            let reply_out = Reply::collect(events);
            assert!(reply_out.calls.is_empty(), "{family} {unit:?}");
            // The parser may drop white space at the ends, but nothing else.
            let same = reply_out.content.trim() == reply.trim();
            assert!(same, "{family} {unit:?}: {:?}", reply_out.diagnoses);
            assert_eq!(
                reply_out.diagnoses.len(),
                usize::from(*family != Family::None)
            );
        }
    }
}

#[test]
fn depth_is_bounded() {
    for (open, close, fits) in [("[", "]", 63), ("{\"a\":", "}", 63)] {
        let call = |depth: usize| {
            let value = format!("{}1{}", open.repeat(depth), close.repeat(depth));
            format!("<tool_call>{{\"name\":\"f\",\"arguments\":{{\"s\":{value}}}}}</tool_call>")
        };
        let (events, _) = run(Format::for_family(Family::Hermes), &call(fits));
        let reply = Reply::collect(events);
        assert_eq!(reply.calls.len(), 1);
        serde_json::from_str::<serde_json::Value>(&reply.calls[0].arguments).expect("JSON");
        let (events, _) = run(Format::for_family(Family::Hermes), &call(fits + 1));
        let reply = Reply::collect(events);
        assert_eq!(reply.diagnoses[0].fault, Fault::TooDeep);
        assert_eq!(reply.content, call(fits + 1));
    }
}

#[test]
fn a_call_is_bounded() {
    let limits = Limits {
        max_call_bytes: 64,
        ..Limits::default()
    };
    for (family, beginning) in BEGINNINGS.iter().filter(|entry| entry.0 != Family::None) {
        let mut parser = Format::for_family(*family).parser(options().with_limits(limits));
        let reply = format!("{beginning}\"{}", "x".repeat(100));
        let mut events = parser.feed(Piece::text(&reply));
        let after = parser.feed(Piece::text("tail"));
        events.extend(after.clone());
        events.extend(parser.finish());
        assert_eq!(render(after), ["content tail"], "{family}");
        let out = Reply::collect(events);
        assert_eq!(out.diagnoses[0].fault, Fault::TooLarge, "{family}");
        assert_eq!(out.content, format!("{reply}tail"), "{family}");
    }
}

#[test]
fn diagnoses_say_where() {
    let mut parser = Format::for_family(Family::Hermes).parser(options());
    let events = parser.feed(Piece::text("é <tool_call>{\"name\": 7}"));
    let diagnosis = Reply::collect(events).diagnoses[0];
    assert_eq!(diagnosis.offset, "é <tool_call>{\"name\": ".len());
    assert_eq!(
        diagnosis.to_string(),
        "tool call of format hermes at byte 23: the name of the function is not usable"
    );
}
