//! Tests of forced calls in the formats whose arguments are not JSON.

use crate::common::{Script, config, serve_script};
use crate::tools::{lark, openai, openai_whole};
use serde_json::json;

/// A template of each format whose arguments are not JSON, a reply with two calls, and the text
/// before the arguments of `f` in the grammar.
const NOT_JSON: &[(&str, &str, &str)] = &[
    (
        "<function=f><parameter=a>",
        "<tool_call>⏎<function=f>⏎<parameter=a>⏎1⏎</parameter>⏎</function>⏎</tool_call>⏎<tool_call>⏎<function=g>⏎</function>⏎</tool_call>",
        r#""<tool_call>\n<function=f>\n""#,
    ),
    (
        "<arg_key>",
        "<tool_call>f⏎<arg_key>a</arg_key>⏎<arg_value>1</arg_value>⏎</tool_call>⏎<tool_call>g⏎</tool_call>",
        r#""<tool_call>f\n""#,
    ),
    (
        "<minimax:tool_call>",
        "<minimax:tool_call>⏎<invoke name=\"f\">⏎<parameter name=\"a\">1</parameter>⏎</invoke>⏎<invoke name=\"g\">⏎</invoke>⏎</minimax:tool_call>",
        r#""<invoke name=\"f\">\n""#,
    ),
    ("<|python_start|>", "[f(a=1), g()]", r#""f(""#),
    (
        "<|tool_list_start|>",
        "<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>",
        r#""f(""#,
    ),
    (
        "<function_calls>",
        "<function_calls>f(a=1)⏎g()</function_calls>",
        r#""f(""#,
    ),
    (
        "<start_function_call>",
        "<start_function_call>call:f{a:1}<end_function_call><start_function_call>call:g{}<end_function_call>",
        r#""<start_function_call>call:f{""#,
    ),
    (
        "<|tool_call>",
        "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>",
        r#""<|tool_call>call:f{""#,
    ),
];

#[test]
fn calls_are_forced_in_formats_without_json() {
    for (template, said, opening) in NOT_JSON {
        let server = serve_script(&config(), Script::writing(template, &[]), |model| {
            model.with_context(2000)
        });
        let client = server.client();
        let outcome = openai_whole(&client, &openai(said, &json!({"tool_choice": "required"})));
        let calls = [("f".into(), json!({"a": 1})), ("g".into(), json!({}))];
        assert_eq!(outcome.calls, calls, "{template}");
        let grammar = lark(&server);
        assert!(grammar.contains("call: call_0 | call_1\n"), "{grammar}");
        assert!(
            grammar.contains(&format!("call_0: {opening} arguments_0_1")),
            "{grammar}"
        );

        let named = json!({"type": "function", "function": {"name": "g"}});
        openai_whole(&client, &openai("", &json!({"tool_choice": named})));
        let grammar = lark(&server);
        assert!(grammar.contains("call: call_0\n"), "{grammar}");
        assert!(!grammar.contains(opening), "{grammar}");
    }
}
