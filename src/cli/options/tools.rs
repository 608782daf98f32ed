//! `--tools FILE`: the tools of a conversation, and the calls in a reply.

use std::path::PathBuf;

use inference::{Tool, ToolCall};
use serde_json::{Value, json};

use crate::cli::terminal::failure::Failure;

/// Maximum size of a file with tools, in bytes.
#[cfg(feature = "mlx-backend")]
const MAX_FILE: u64 = 4 << 20;

/// Separates tool calls and reasoning from a reply's text.
#[cfg(feature = "mlx-backend")]
pub type Reader = inference_text::reply::TokenReader;

/// Without the engine there is no reader: only the engine reads the chat template, which determines
/// the format of calls.
#[cfg(not(feature = "mlx-backend"))]
pub enum Reader {}

/// The tools in the file that `--tools` names.
#[cfg(feature = "mlx-backend")]
pub fn of(file: Option<&PathBuf>) -> Result<Vec<Tool>, Failure> {
    let Some(path) = file else {
        return Ok(Vec::new());
    };
    let wrong = |why: String| Failure::usage(format!("--tools {}: {why}", path.display()));
    let text = crate::cli::terminal::bounded::read_text(path, MAX_FILE)
        .map_err(|e| wrong(e.to_string()))?;
    read(&text).map_err(wrong)
}

#[cfg(not(feature = "mlx-backend"))]
pub fn of(file: Option<&PathBuf>) -> Result<Vec<Tool>, Failure> {
    match file {
        None => Ok(Vec::new()),
        Some(_) => Err(Failure::failed(
            "--tools needs the MLX engine, which is not built in",
        )),
    }
}

/// Parses tools: a JSON list, or an object with a list `tools`. Each tool has OpenAI's form, the
/// inner part of OpenAI's form, or Anthropic's form.
#[cfg_attr(
    not(feature = "mlx-backend"),
    allow(dead_code, reason = "without templates no tools")
)]
fn read(text: &str) -> Result<Vec<Tool>, String> {
    let value: Value = serde_json::from_str(text).map_err(|e| format!("it is not JSON: {e}"))?;
    let list = match &value {
        Value::Object(fields) if fields.contains_key("tools") => &value["tools"],
        other => other,
    };
    let list = list
        .as_array()
        .ok_or("must be a list of tools, or an object with one as `tools`")?;
    if list.is_empty() {
        return Err(String::from("the list of tools is empty"));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        let normalized = match (value.get("function"), value.get("name")) {
            (None, Some(name)) => json!({"type": "function", "function": {
                "name": name,
                "description": value.get("description"),
                "parameters": value.get("parameters").or(value.get("input_schema")),
            }}),
            _ => value.clone(),
        };
        let tool: Tool =
            serde_json::from_value(normalized).map_err(|e| format!("tool {}: {e}", i + 1))?;
        if tools.iter().any(|other| other.name == tool.name) {
            return Err(format!("two tools are called {:?}", tool.name));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// A call as JSON. Its arguments are an object.
pub fn call(call: &ToolCall) -> Value {
    json!({"id": call.id, "name": call.name, "arguments": call.arguments})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_come_in_three_forms() {
        let openai = r#"[{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]"#;
        let inner = r#"{"tools": [{"name": "a", "parameters": {"type": "object"}}]}"#;
        let anthropic = r#"[{"name": "a", "input_schema": {"type": "object"}}]"#;
        let wanted = [Tool::new("a", json!({"type": "object"}))];
        for text in [openai, inner, anthropic] {
            assert_eq!(read(text).unwrap(), wanted, "{text}");
        }
        for (bad, why) in [
            ("", "not JSON"),
            ("{}", "list of tools"),
            ("[]", "empty"),
            ("[1]", "tool 1"),
            (r#"[{"name": "a"}, {"type": "retrieval"}]"#, "tool 2"),
            (r#"[{"name": "a", "parameters": "x"}]"#, "schema"),
            (r#"[{"name": "a"}, {"name": "a"}]"#, "two tools"),
        ] {
            let error = read(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
