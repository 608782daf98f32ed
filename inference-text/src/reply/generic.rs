//! Tool calls for models whose chat template does not support tools. The conversation describes the
//! tools to the model. The model calls them in the syntax of Hermes models, which
//! [`Format::with_calls`] parses.

use inference::{ChatPrompt, Message, Result, ToolCall};
use serde_json::json;

use super::Format;

/// The message that describes the tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The first message, with the role `system`.
    System,
    /// The first message of the user, together with the system message. Some templates reject the
    /// role `system`.
    User,
}

/// Calls `prepare` with the conversation. If necessary, converts the conversation first, so that
/// the model's template can render it. `format` is the model's format.
///
/// If the format has calls, the template supports them, and the conversation stays unchanged.
/// Otherwise the tools are described in the system message or, if `prepare` rejects it, in the
/// user's first message. Calls and their results become text.
///
/// # Errors
/// The error of `prepare`: for the conversation, or for the converted one with a system message.
pub fn written<T>(
    format: Format,
    prompt: &ChatPrompt,
    prepare: impl Fn(&ChatPrompt) -> Result<T>,
) -> Result<T> {
    let speaks = |m: &Message| m.role == "tool" || !m.tool_calls.is_empty();
    let has_tools = !prompt.tools.is_empty() || prompt.messages.iter().any(speaks);
    if format.has_tool_calls() || !has_tools {
        return prepare(prompt);
    }
    prepare(&described(prompt, Place::System))
        .or_else(|error| prepare(&described(prompt, Place::User)).map_err(|_| error))
}

/// The conversation without tools, calls and messages of the role `tool`.
fn described(prompt: &ChatPrompt, place: Place) -> ChatPrompt {
    let mut messages: Vec<Message> = Vec::with_capacity(prompt.messages.len() + 1);
    // Whether the last message contains tool results, to which further results may be added.
    let mut results = false;
    for message in &prompt.messages {
        let mut message = message.clone();
        let is_result = message.role == "tool";
        if is_result {
            let text = format!("<tool_response>\n{}\n</tool_response>", message.content);
            message = Message::user(text);
        }
        for call in std::mem::take(&mut message.tool_calls) {
            if !message.content.is_empty() {
                message.content.push('\n');
            }
            message.content.push_str(&written_call(&call));
        }
        match messages.last_mut() {
            // Templates expect alternating turns, so adjacent user messages are joined.
            Some(last) if results && message.role == "user" => {
                last.content.push('\n');
                last.content.push_str(&message.content);
            }
            _ => messages.push(message),
        }
        results = is_result;
    }
    if !prompt.tools.is_empty() || place == Place::User {
        introduce(&mut messages, description(prompt), place);
    }
    let mut described = prompt.clone();
    described.messages = messages;
    described.tools = Vec::new();
    described
}

/// Adds the introduction to the start of the conversation.
fn introduce(messages: &mut Vec<Message>, introduction: String, place: Place) {
    let leads = |m: &Message| matches!(m.role.as_str(), "system" | "developer");
    match place {
        Place::System => match messages.first_mut().filter(|m| leads(m)) {
            Some(first) => join(&mut first.content, &introduction),
            None => messages.insert(0, Message::system(introduction)),
        },
        Place::User => {
            let mut text = String::new();
            if messages.first().is_some_and(leads) {
                text = messages.remove(0).content;
            }
            join(&mut text, &introduction);
            match messages.iter_mut().find(|m| m.role == "user") {
                Some(user) => {
                    join(&mut text, &user.content);
                    user.content = text;
                }
                None => messages.insert(0, Message::user(text)),
            }
        }
    }
}

/// Appends a paragraph.
fn join(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

fn written_call(call: &ToolCall) -> String {
    let call = json!({"name": call.name, "arguments": call.arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

/// The description of the tools for the model; empty without tools.
fn description(prompt: &ChatPrompt) -> String {
    if prompt.tools.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "You can call functions. Each of the following lines describes one as JSON; `parameters` is \
         the JSON schema of its arguments.\n",
    );
    for tool in &prompt.tools {
        let line = json!({
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        });
        text.push_str(&format!("{line}\n"));
    }
    text.push_str(
        "To call a function, write its name and its arguments as JSON, in this form:\n\
         <tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"ARGUMENT\": VALUE}}\n</tool_call>\n\
         Write nothing after the last call. The results follow as <tool_response>. When no function \
         is needed, answer in plain text.",
    );
    text
}

#[cfg(test)]
mod tests {
    use inference::{Error, ErrorKind, Tool};
    use serde_json::{Map, Value};

    use super::super::{Family, ReasoningTags};
    use super::*;

    /// Renders each message on a separate line, like a template without tools.
    fn plain(prompt: &ChatPrompt) -> Result<String> {
        assert!(prompt.tools.is_empty());
        let line = |m: &Message| {
            assert!(m.tool_calls.is_empty() && m.role != "tool", "{m:?}");
            format!("{}: {}", m.role, m.content)
        };
        Ok(prompt
            .messages
            .iter()
            .map(line)
            .collect::<Vec<_>>()
            .join("\n"))
    }

    /// The converted conversation, and its rendered text.
    fn both(
        render: impl Fn(&ChatPrompt) -> Result<String>,
    ) -> impl Fn(&ChatPrompt) -> Result<(ChatPrompt, String)> {
        move |prompt| Ok((prompt.clone(), render(prompt)?))
    }

    /// A template that rejects the role `system`, like Gemma's.
    fn without_system(prompt: &ChatPrompt) -> Result<String> {
        if prompt.messages.iter().any(|m| m.role == "system") {
            return Err(Error::new(ErrorKind::InvalidOption, "no system role"));
        }
        plain(prompt)
    }

    fn conversation() -> ChatPrompt {
        let arguments: Map<String, Value> = serde_json::from_str(r#"{"place": "Paris"}"#).unwrap();
        let mut call = Message::assistant("Let me see.");
        call.tool_calls = vec![ToolCall::new("1", "warmth", arguments.clone())];
        call.tool_calls.push(ToolCall::new("2", "time", arguments));
        let result = |id: &str, text: &str| {
            let mut message = Message::new("tool", text);
            message.tool_call_id = Some(id.to_owned());
            message
        };
        ChatPrompt::new([
            Message::system("Be brief."),
            Message::user("How warm is it?"),
            call,
            result("1", "20 C"),
            result("2", "noon"),
            Message::user("And now?"),
        ])
        .with_tools([
            Tool::new("warmth", json!({"type": "object"})).with_description("In Celsius"),
            Tool::new("time", None),
        ])
    }

    #[test]
    fn tools_calls_and_results_become_text() {
        let (written, text) = written(Format::none(), &conversation(), both(plain)).unwrap();
        assert!(written.tools.is_empty());
        let roles: Vec<_> = written.messages.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert!(text.starts_with("system: Be brief.\n\nYou can call functions."));
        for part in [
            r#""name":"warmth""#,
            r#""description":"In Celsius""#,
            "Let me see.\n<tool_call>\n{",
            "<tool_response>\n20 C\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\nAnd now?",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        // The description and the parser must use the same syntax.
        let call = &written.messages[2].content;
        let mut parser = Format::none().with_calls().parser(
            super::super::ParserOptions::default().with_ids(super::super::SequentialIds::default()),
        );
        let mut events = parser.feed(super::super::Piece::text(call));
        events.extend(parser.finish());
        let reply = super::super::Reply::collect(events);
        assert_eq!(reply.content, "Let me see.");
        assert_eq!(reply.calls[1].name, "time");
        let arguments: Value = serde_json::from_str(&reply.calls[0].arguments).unwrap();
        assert_eq!(arguments, json!({"place": "Paris"}));
    }

    #[test]
    fn a_template_without_the_system_role_has_them_in_the_users_message() {
        let (written, text) =
            written(Format::none(), &conversation(), both(without_system)).unwrap();
        assert!(
            text.starts_with("user: Be brief.\n\nYou can call functions."),
            "{text}"
        );
        assert!(text.contains("plain text.\n\nHow warm is it?"), "{text}");
        assert_eq!(written.messages.len(), 3);
        let refuse = |_: &ChatPrompt| Err::<(), _>(Error::new(ErrorKind::InvalidOption, "first"));
        assert!(super::written(Format::none(), &conversation(), refuse).is_err());
    }

    #[test]
    fn other_conversations_stay() {
        let formats = [
            Format::for_family(Family::Hermes),
            Format::for_family(Family::Gemma4),
        ];
        for format in formats {
            let asked = conversation();
            let written = written(format, &asked, |prompt| Ok(prompt.clone())).unwrap();
            assert_eq!(written, asked);
        }
        let asked = ChatPrompt::new([Message::user("hi")]);
        let (written, text) = super::written(Format::none(), &asked, both(plain)).unwrap();
        assert_eq!((written, text.as_str()), (asked, "user: hi"));
    }

    #[test]
    fn calls_go_together_with_the_models_own_reasoning() {
        let reasoning = Format::none().with_reasoning(ReasoningTags::THINK);
        let format = reasoning.with_calls();
        assert_eq!(format.family, Family::Hermes);
        assert_eq!(format.reasoning, reasoning.reasoning);
        let mistral = Format::for_family(Family::Pythonic);
        assert_eq!(mistral.with_calls(), mistral);
    }
}
