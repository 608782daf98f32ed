//! Grammars that force a tool call in the model's own format, for a `tool_choice` that requires a
//! call.

use inference::Grammar;
use inference_text::reply::{Format, IdGenerator, RandomIds, Tools};

use super::ReplyRequest;

/// A grammar for a reply that is a call. If the prompt has opened the reasoning, the reply must
/// first close it. Reasoning is useless here, because the call is forced.
pub(super) fn grammar(
    format: Format,
    tools: &Tools,
    request: &ReplyRequest,
    named: Option<&str>,
) -> Result<Grammar, String> {
    let mut ids = RandomIds::new();
    let style = format.family.id_style();
    let mut new_id = || ids.next_id(style);
    let calls = format
        .family
        .call_grammar(tools, named, request.earlier_calls, &mut new_id)
        .map_err(|why| why.to_string())?;
    let lead = match format.reasoning {
        Some(tags) if tags.is_open_at_end_of(&request.prompt_end) => format!("{}\n\n", tags.close),
        _ => String::new(),
    };
    let one = request.one_call || named.is_some();
    Ok(Grammar::Lark(calls.lark(&lead, one)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use inference_text::reply::{Family, ReasoningTags, Tool};
    use serde_json::json;

    /// The white space that the grammars allow in JSON.
    const JSON_SPACE: &str = r"( |\n[ \t]{0,40})";

    fn tools() -> Tools {
        let tool = |name: &str| Tool {
            name: name.to_owned(),
            parameters: json!({"type": "object", "description": "a & b"}),
        };
        Tools::new(vec![tool("f"), tool("g")])
    }

    fn text(format: Format, request: &ReplyRequest, named: Option<&str>) -> String {
        let grammar = grammar(format, &tools(), request, named).unwrap();
        grammar.validate().unwrap();
        let Grammar::Lark(text) = grammar else {
            panic!("{grammar:?}")
        };
        text
    }

    #[test]
    fn any_call_and_several() {
        let request = ReplyRequest::default();
        let lark = text(Format::for_family(Family::DeepSeekV31), &request, None);
        let space = json!({"whitespace_pattern": JSON_SPACE});
        let schema =
            format!(r#"{{"description":"a \u0026 b","type":"object","x-guidance":{space}}}"#);
        let expected = [
            r#"start: "<｜tool▁calls▁begin｜>" call (call)* "<｜tool▁calls▁end｜>""#,
            r#"call: call_0 | call_1"#,
            r#"call_0: "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" json_0 "<｜tool▁call▁end｜>""#,
            &format!("json_0: %json {schema}"),
            r#"call_1: "<｜tool▁call▁begin｜>g<｜tool▁sep｜>" json_1 "<｜tool▁call▁end｜>""#,
            &format!("json_1: %json {schema}"),
        ];
        let lines: Vec<&str> = lark.lines().collect();
        // Whether the schema's keys keep their order depends on a feature of `serde_json`.
        let unordered = |line: &str| {
            let mut bytes = line.replace(' ', "").into_bytes();
            bytes.sort_unstable();
            bytes
        };
        assert_eq!(lines.len(), expected.len(), "{lark}");
        for (line, expected) in lines.iter().zip(expected) {
            assert_eq!(unordered(line), unordered(expected), "{line}");
        }
    }

    #[test]
    fn a_named_call_is_one_after_closed_reasoning() {
        let format = Format::for_family(Family::Hermes).with_reasoning(ReasoningTags::THINK);
        let request = ReplyRequest {
            prompt_end: String::from("assistant\n<think>\n"),
            ..ReplyRequest::default()
        };
        let lark = text(format, &request, Some("g"));
        assert!(
            lark.starts_with("start: \"</think>\\n\\n\" call\ncall: call_0\n"),
            "{lark}"
        );
        assert!(lark.contains("call_0: \"<tool_call>\\n\" json_0 \"\\n</tool_call>\"\n"));
        assert!(!lark.contains("call_1"));
        let lark = text(format, &ReplyRequest::default(), None);
        assert!(lark.starts_with("start: call ( \"\\n\" call)*\n"), "{lark}");
    }

    #[test]
    fn formats_without_json_have_their_own_syntax() {
        let lark = text(
            Format::for_family(Family::Pythonic),
            &ReplyRequest::default(),
            None,
        );
        assert!(
            lark.starts_with("start: \"[\" call ( \", \" call)* \"]\"\ncall: call_0 | call_1\n"),
            "{lark}"
        );
        assert!(lark.contains("call_0: \"f(\" "), "{lark}");
        let tool = json!([{"name": "f", "parameters": {"type": "object",
            "properties": {"a": {"type": "string", "pattern": "a+"}}}}]);
        let format = Format::for_family(Family::Lfm2);
        let request = ReplyRequest::default();
        let error = grammar(format, &Tools::from_json(&tool), &request, None).unwrap_err();
        for part in ["lfm2", "'f'", "'pattern'"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
