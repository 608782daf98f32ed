//! Tests of replies that are parsed from the tokens of a stream.

use inference::{ChatPrompt, Error, ErrorKind, Message, Result, Token, Tool};
use inference_conformance::scripted;
use inference_text::reply::{Event, Family, Format, ReasoningTags, Reply, ReplyStream, reader};
use serde_json::json;

fn stream(tokens: Vec<Result<Token>>, tools: &[Tool], rendered: &str) -> ReplyStream {
    let format = Format::for_family(Family::Hermes).with_reasoning(ReasoningTags::THINK);
    let prompt = ChatPrompt::new([Message::user("hi")]).with_tools(tools);
    let reader = reader(format, &prompt, rendered);
    ReplyStream::new(scripted::Reply::new(tokens).into_stream(), reader)
}

fn words(parts: &[&str]) -> Vec<Result<Token>> {
    parts.iter().map(|part| Ok(Token::new(0, *part))).collect()
}

#[test]
fn tokens_become_content_reasoning_and_calls() {
    // The prompt opens the reasoning. The call's marker is a special token.
    let mut tokens = words(&["hm", "</think>", "So: "]);
    let marker = Token::new(7, "")
        .with_bytes(&b"<tool_call>"[..])
        .with_special(true);
    tokens.push(Ok(marker));
    tokens.extend(words(&["{\"name\": \"f\", \"argu", "ments\": {\"a\": 1}}"]));
    let mut end = Token::new(8, "")
        .with_bytes(&b"</tool_call>"[..])
        .with_special(true);
    end.text = String::from("\n");
    tokens.push(Ok(end));
    let reply = stream(tokens, &[Tool::new("f", None)], "<assistant><think>\n");
    let reply = reply.collect_reply().unwrap();
    assert_eq!(
        (reply.content.as_str(), reply.reasoning.as_str()),
        ("So:", "hm")
    );
    assert_eq!(reply.calls.len(), 1);
    let call = inference::ToolCall::from(reply.calls[0].clone());
    assert_eq!(call.name, "f");
    assert_eq!(json!(call.arguments), json!({"a": 1}));
}

#[test]
fn without_tools_a_call_is_content() {
    let text = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    let reply = stream(words(&[text]), &[], "").collect_reply().unwrap();
    assert_eq!(reply.content, text);
    assert!(reply.calls.is_empty());
}

#[test]
fn an_error_ends_the_reply() {
    let mut tokens = words(&["a"]);
    tokens.push(Err(Error::new(ErrorKind::Engine, "broken")));
    tokens.extend(words(&["b"]));
    let mut reply = stream(tokens, &[], "");
    assert_eq!(
        reply.next().unwrap().unwrap(),
        Event::Content(String::from("a"))
    );
    assert_eq!(reply.next().unwrap().unwrap_err().kind(), ErrorKind::Engine);
    assert!(reply.next().is_none() && reply.next().is_none());
}

#[test]
fn a_format_without_calls_takes_those_of_the_generic_one() {
    let text = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    let reply = |tools: &[Tool]| {
        let prompt = ChatPrompt::new([Message::user("hi")]).with_tools(tools);
        let mut reader = reader(Format::none(), &prompt, "");
        let mut events = reader.feed(&Token::new(1, text));
        events.extend(reader.finish());
        Reply::collect(events)
    };
    assert_eq!(reply(&[Tool::new("f", None)]).calls[0].name, "f");
    assert_eq!(reply(&[]).content, text);
    assert_eq!(Reply::collect([]).content, "");
}
