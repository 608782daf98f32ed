//! Tests of `<think>` in its three cases, and of formats without calls.

use super::harness::{Golden, render, typed_tools};
use inference_text::reply::{Event, Family, Format, ParserOptions, Piece, ReasoningTags};

fn think() -> Golden<'static> {
    Golden::new(Format::none().with_reasoning(ReasoningTags::THINK))
}

#[test]
fn the_model_opens_the_tag() {
    think()
        .says(
            "<think>\nHm, 1 < 2.\n\n</think>\n\nHi <x>\n",
            &["reasoning Hm, 1 < 2.", "content Hi <x>\n"],
        )
        .says("\n <think></think>Hi", &["content Hi"])
        .says("<think>cut </thi", &["reasoning cut </thi"])
        .says("  Hi", &["content   Hi"])
        // In the middle of content, the tag is ordinary text.
        .says(
            "Use <think> and </think>.",
            &["content Use <think> and </think>."],
        )
        .says(
            "<think>a</think><think>b</think>c",
            &["reasoning ab", "content c"],
        )
        .says("", &[]);
}

#[test]
fn the_prompt_opens_the_tag() {
    think()
        .prompt("<|im_start|>assistant\n<think>\n")
        .says("Hm.\n</think>\n\nHi", &["reasoning Hm.", "content Hi"])
        .says("never ends", &["reasoning never ends"])
        .says("</think>Hi", &["content Hi"]);
}

#[test]
fn the_prompt_holds_a_closed_pair() {
    think()
        .prompt("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        .says("Hi", &["content Hi"]);
    // The user's text must not open the reasoning.
    think()
        .prompt("user: <think>\nassistant:\n")
        .says("Hi", &["content Hi"]);
}

#[test]
fn the_caller_knows_better() {
    let format = Format::none().with_reasoning(ReasoningTags::THINK);
    let mut parser = format.parser(ParserOptions::default().with_reasoning_open(true));
    assert!(parser.in_reasoning());
    let mut events = parser.feed(Piece::text("more</think>x"));
    assert!(!parser.in_reasoning());
    events.extend(parser.finish());
    assert_eq!(render(events), ["reasoning more", "content x"]);
}

#[test]
fn reasoning_comes_at_once() {
    let mut parser = think().format.parser(ParserOptions::default());
    assert_eq!(
        parser.feed(Piece::text("<think>one")),
        [Event::Reasoning("one".into())]
    );
    assert_eq!(
        parser.feed(Piece::text(" two<")),
        [Event::Reasoning(" two".into())]
    );
    assert_eq!(parser.feed(Piece::text("/think")), []);
    assert_eq!(
        parser.feed(Piece::text(">three")),
        [Event::Content("three".into())]
    );
}

#[test]
fn arguments_come_at_once() {
    let started = Event::CallStarted {
        index: 0,
        id: "call_0".into(),
        name: "f".into(),
    };
    let delta = |delta: &str| Event::ArgumentsDelta {
        index: 0,
        delta: delta.into(),
    };
    let ids = inference_text::reply::SequentialIds::default;
    let options = ParserOptions::default().with_ids(ids());
    let mut parser = Format::for_family(Family::Hermes).parser(options);
    assert_eq!(
        parser.feed(Piece::text("<tool_call>{\"name\": \"f\", \"arguments\": ")),
        []
    );
    assert_eq!(
        parser.feed(Piece::text("{\"a\": \"x")),
        [started.clone(), delta("{\"a\": \"x")]
    );
    assert_eq!(parser.feed(Piece::text("y")), [delta("y")]);
    assert_eq!(
        parser.feed(Piece::text("\"}}")),
        [delta("\"}"), Event::CallEnded { index: 0 }]
    );

    let tools = inference_text::reply::Tools::from_json(&typed_tools());
    let options = ParserOptions::default().with_ids(ids()).with_tools(tools);
    let mut parser = Format::for_family(Family::Qwen3Coder).parser(options);
    let text = "<tool_call>\n<function=f>\n<parameter=s>\nlong";
    assert_eq!(
        parser.feed(Piece::text(text)),
        [started, delta("{\"s\": \"long")]
    );
    assert_eq!(parser.feed(Piece::text(" text\n")), [delta(" text")]);
    assert_eq!(parser.feed(Piece::text("</parameter>")), [delta("\"")]);
}

#[test]
fn without_tools_a_call_is_content() {
    let call = r#"[f(s="x")]"#;
    let reply = format!("<think>x</think>{call}");
    let format = Format::for_family(Family::Pythonic).with_reasoning(ReasoningTags::THINK);
    Golden::new(format)
        .tools(typed_tools())
        .says(&reply, &["reasoning x", r#"call 0 call_0 f {"s": "x"}"#]);
    Golden::new(format.without_calls())
        .tools(typed_tools())
        .says(&reply, &["reasoning x", &format!("content {call}")]);
    let harmony = Format::for_family(Family::Harmony);
    assert_eq!(harmony.without_calls(), harmony);
}

#[test]
fn no_format_passes_text_through() {
    let golden = Golden::new(Format::none());
    let text = " <think> [x] <tool_call>{\"name\": 1} é \n";
    let (first, second) = text.split_at(20);
    let events = golden.events(&[(first, false), (second, false)]);
    assert_eq!(render(events), [format!("content {text}")]);
    // A special token is not content.
    let events = golden.events(&[("a", false), ("<|im_end|>", true), ("b", false)]);
    assert_eq!(render(events), ["content ab"]);
}
