//! Tests that the JSON of messages, tools and prompts has the form of OpenAI's API.

use super::*;

#[test]
fn prompts_come_from_text_and_ids() {
    assert_eq!(Prompt::from("a"), Prompt::Text(String::from("a")));
    assert_eq!(Prompt::from(&String::from("a")), Prompt::from("a"));
    assert_eq!(Prompt::from(vec![1, 2]), Prompt::from(&[1u32, 2][..]));
    assert_eq!(Prompt::from([1, 2]), Prompt::Tokens(vec![1, 2]));
}

#[test]
fn messages_survive_json() {
    let m = Message::assistant("hi \"there\"");
    let json = serde_json::to_string(&m).unwrap();
    assert_eq!(json, r#"{"role":"assistant","content":"hi \"there\""}"#);
    assert_eq!(serde_json::from_str::<Message>(&json).unwrap(), m);
    assert!(serde_json::from_str::<Message>(r#"{"role": "user"}"#).is_err());
    assert!(serde_json::from_str::<Message>(r#"{"role": "user", "content": null}"#).is_err());
}

fn call() -> ToolCall {
    let Value::Object(arguments) = json!({"city": "Bern", "days": 2}) else {
        unreachable!()
    };
    ToolCall::new("call_1", "weather", arguments)
}

#[test]
fn tool_calls_have_openais_shape_in_json_and_hugging_faces_in_templates() {
    let m = Message::assistant("")
        .with_tool_calls([call()])
        .with_reasoning("hm")
        .with_name("me");
    let json = serde_json::to_value(&m).unwrap();
    let expected = json!({
        "role": "assistant",
        "content": "",
        "name": "me",
        "reasoning_content": "hm",
        "tool_calls": [{
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": r#"{"city":"Bern","days":2}"#},
        }],
    });
    assert_eq!(json, expected);
    assert_eq!(serde_json::from_value::<Message>(json).unwrap(), m);
    assert_eq!(
        m.to_template()["tool_calls"][0]["function"]["arguments"],
        json!({"city": "Bern", "days": 2})
    );
    let answer = Message::tool("call_1", "sunny");
    let json = json!({"role": "tool", "content": "sunny", "tool_call_id": "call_1"});
    assert_eq!(serde_json::to_value(&answer).unwrap(), json);
    assert_eq!(serde_json::from_value::<Message>(json).unwrap(), answer);
}

#[test]
fn contents_may_be_parts_or_absent_beside_calls() {
    let m: Message = serde_json::from_value(json!({
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }))
    .unwrap();
    assert_eq!(m, Message::user("ab"));
    let calls = json!([{"id": "1", "type": "function",
        "function": {"name": "f", "arguments": ""}}]);
    for content in [json!(null), json!("")] {
        let m: Message = serde_json::from_value(
            json!({"role": "assistant", "content": content, "tool_calls": calls}),
        )
        .unwrap();
        assert_eq!(m.tool_calls, [ToolCall::new("1", "f", Map::new())]);
    }
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
    let error = serde_json::from_value::<Message>(image).unwrap_err();
    assert!(error.to_string().contains("image_url"), "{error}");
}

#[test]
fn bad_arguments_are_errors_that_name_the_call() {
    for (arguments, says) in [
        (json!("{\"a\": "), "not JSON:"),
        (json!("[1]"), "not a JSON object"),
        (json!(3), "not a JSON object"),
    ] {
        let call = json!({"id": "1", "type": "function",
            "function": {"name": "f", "arguments": arguments}});
        let error = serde_json::from_value::<ToolCall>(call)
            .unwrap_err()
            .to_string();
        assert!(error.contains(says) && error.contains("\"f\""), "{error}");
    }
}

#[test]
fn tools_survive_json() {
    let tool = Tool::new("f", json!({"type": "object"})).with_description("does f");
    let json = json!({"type": "function", "function": {"name": "f", "description": "does f",
        "parameters": {"type": "object"}}});
    assert_eq!(serde_json::to_value(&tool).unwrap(), json);
    assert_eq!(serde_json::from_value::<Tool>(json).unwrap(), tool);
    for bad in [
        json!({"type": "web_search"}),
        json!({"type": "function"}),
        json!({"type": "function", "function": {}}),
        json!({"type": "function", "function": {"name": "f", "parameters": 3}}),
    ] {
        assert!(
            serde_json::from_value::<Tool>(bad.clone()).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn plain_conversations_are_told_from_others() {
    let plain = ChatPrompt::new([Message::user("hi")]);
    assert!(plain.is_plain());
    assert!(plain.clone().with_end(ChatEnd::Messages).is_plain());
    assert!(!plain.clone().with_end(ChatEnd::LastMessage).is_plain());
    assert!(!plain.clone().with_start(ChatStart::LastMessage).is_plain());
    assert!(!plain.clone().with_tools([Tool::new("f", None)]).is_plain());
    assert!(!plain.clone().with_template("a", 1).is_plain());
    assert!(!ChatPrompt::new([Message::tool("1", "x")]).is_plain());
}
