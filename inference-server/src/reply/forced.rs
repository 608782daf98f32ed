//! Grammars that force a tool call in the model's own format, for a `tool_choice` that requires a
//! call. With a schema for the reply, they allow either a call or JSON of the schema.

use inference::Grammar;
use inference_text::reply::{CallGrammar, Format, IdGenerator, JsonStart, RandomIds, Tools};
use serde_json::Value;

use super::{CallOrJson, ReplyRequest};

/// A grammar for a reply that is a call. If the prompt has opened the reasoning, the reply must
/// first close it. Reasoning is useless here, because the call is forced.
pub(super) fn grammar(
    format: Format,
    tools: &Tools,
    request: &ReplyRequest,
    named: Option<&str>,
) -> Result<Grammar, String> {
    let calls = calls(format, tools, request, named)?;
    let one = request.one_call || named.is_some();
    Ok(Grammar::Lark(calls.lark(&lead(format, request), one)))
}

/// A grammar for a reply that is either a call or JSON of `schema`. The reply closes reasoning as
/// in [`grammar`].
pub(super) fn or_json(
    format: Format,
    tools: &Tools,
    request: &ReplyRequest,
    schema: &Value,
) -> Result<CallOrJson, String> {
    let calls = calls(format, tools, request, None)?;
    let start = JsonStart::of(schema);
    if calls.begins_like(start) {
        return Err(format!(
            "in format {}, a call may begin like JSON of the schema",
            format.family
        ));
    }
    let lead = lead(format, request);
    let grammar = calls.lark_or_json(&lead, request.one_call, schema);
    Ok(CallOrJson {
        grammar: Grammar::Lark(grammar),
        lead,
        start,
    })
}

fn calls(
    format: Format,
    tools: &Tools,
    request: &ReplyRequest,
    named: Option<&str>,
) -> Result<CallGrammar, String> {
    let mut ids = RandomIds::new();
    let style = format.family.id_style();
    let mut new_id = || ids.next_id(style);
    format
        .family
        .call_grammar(tools, named, request.earlier_calls, &mut new_id)
        .map_err(|why| why.to_string())
}

/// The text that closes the reasoning, if the prompt has opened it.
fn lead(format: Format, request: &ReplyRequest) -> String {
    match format.reasoning {
        Some(tags) if tags.is_open_at_end_of(&request.prompt_end) => format!("{}\n\n", tags.close),
        _ => String::new(),
    }
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

    #[test]
    fn a_call_or_json_is_one_of_two_rules_after_closed_reasoning() {
        let format = Format::for_family(Family::Hermes).with_reasoning(ReasoningTags::THINK);
        let request = ReplyRequest {
            prompt_end: String::from("assistant\n<think>\n"),
            ..ReplyRequest::default()
        };
        let object = json!({"type": "object"});
        let either = or_json(format, &tools(), &request, &object).unwrap();
        assert_eq!(either.lead, "</think>\n\n");
        either.grammar.validate().unwrap();
        let Grammar::Lark(lark) = either.grammar else {
            panic!("{:?}", either.grammar)
        };
        let rules = "start: \"</think>\\n\\n\" (calls | answer)\n\
                     calls: call ( \"\\n\" call)*\ncall: call_0 | call_1\n";
        assert!(lark.starts_with(rules), "{lark}");
        assert!(lark.contains("\nanswer: %json {"), "{lark}");
    }

    #[test]
    fn a_call_that_begins_like_the_json_is_refused() {
        let request = ReplyRequest::default();
        let try_one = |family: Family, schema: &Value| {
            or_json(Format::for_family(family), &tools(), &request, schema)
        };
        let object = json!({"type": "object"});
        let list = json!({"type": "array"});
        for (family, schema) in [
            (Family::Llama3, &object),
            (Family::Pythonic, &list),
            (Family::Pythonic, &json!({})),
            // The call begins with the name `f`, like `false`.
            (Family::Glm4, &json!({"enum": ["no", false]})),
        ] {
            let error = try_one(family, schema).unwrap_err();
            assert!(error.contains(family.name()), "{error}");
        }
        for (family, schema) in [
            (Family::Llama3, &list),
            (Family::Pythonic, &object),
            (Family::Glm4, &object),
            (Family::Hermes, &json!({})),
            (Family::Harmony, &json!({})),
        ] {
            try_one(family, schema).unwrap();
        }
    }
}
