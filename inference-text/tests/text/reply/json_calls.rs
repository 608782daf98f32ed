//! Tests of replies of Hermes, Llama, Mistral Nemo, Command-R and Granite 3.

use super::harness::{Golden, typed_tools};
use inference_text::reply::{Family, Format};

fn golden(family: Family) -> Golden<'static> {
    Golden::new(Format::for_family(family))
}

#[test]
fn hermes() {
    golden(Family::Hermes)
        .says("Just <b>text</b>, 1 < 2 <tool", &["content Just <b>text</b>, 1 < 2 <tool"])
        .says(
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            &[r#"call 0 call_0 f {"a": 1}"#],
        )
        .says(
            "Let me look.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"q\": \"naïve \\\"“日本”\\\" \
             \\u00e9 {[\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n\
             </tool_call>\nDone. ",
            &[
                "content Let me look.",
                r#"call 0 call_0 f {"q": "naïve \"“日本”\" \u00e9 {["}"#,
                "call 1 call_1 g {}",
                "content Done. ",
            ],
        )
        // Arguments before the name, as a string, missing, or null. Also unknown keys, and no white
        // space.
        .says(
            r#"<tool_call>{"arguments":{"a":[{"b":[]},{}]},"name":"f"}</tool_call>"#,
            &[r#"call 0 call_0 f {"a":[{"b":[]},{}]}"#],
        )
        .says(
            r#"<tool_call>{"name":"f","arguments":"{\"a\": \"x\"}"}</tool_call>"#,
            &[r#"call 0 call_0 f {"a": "x"}"#],
        )
        .says(r#"<tool_call>{"name":"f"}</tool_call>"#, &["call 0 call_0 f {}"])
        .says(r#"<tool_call>{"name":"f","arguments":null}</tool_call>"#, &["call 0 call_0 f {}"])
        .says(r#"<tool_call>{"name":"f","arguments":""}</tool_call>"#, &["call 0 call_0 f {}"])
        .says(
            r#"<tool_call>{"n":1,"type":"function","name":"f","x":[1.5e3,"}"],"arguments":{},"y":2}</tool_call>"#,
            &["call 0 call_0 f {}"],
        )
        .says(
            r#"<tool_call>{"id":"abc","name":"f","arguments":{}}</tool_call>"#,
            &["call 0 abc f {}"],
        )
        // A raw newline in a string is escaped.
        .says(
            "<tool_call>{\"name\":\"f\",\"arguments\":{\"s\":\"a\nb\tc\"}}</tool_call>",
            &[r#"call 0 call_0 f {"s":"a\nb\tc"}"#],
        )
        // An array of calls, and a missing closing tag.
        .says(
            r#"<tool_call>[{"name":"f","arguments":{}},{"name":"g","arguments":{}}]</tool_call>"#,
            &["call 0 call_0 f {}", "call 1 call_1 g {}"],
        )
        .says(r#"<tool_call>{"name":"f","arguments":{}}"#, &["call 0 call_0 f {}"])
        // A closing tag alone is text.
        .says("a </tool_call> b", &["content a </tool_call> b"]);
}

#[test]
fn hermes_malformed() {
    golden(Family::Hermes)
        // White space before a malformed call becomes content again.
        .says(
            "So.\n\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"}}",
            &[
                "content So.",
                r#"open 0 call_0 f {"a""#,
                "fault Syntax",
                "content \n\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\"}}",
            ],
        )
        .says(
            "Hi <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, ",
            &[
                "content Hi",
                r#"open 0 call_0 f {"a": [1, "#,
                "fault Unclosed",
                "content  <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, ",
            ],
        )
        .says(
            "<tool_call>not json</tool_call>",
            &["fault Syntax", "content <tool_call>not json</tool_call>"],
        )
        .says(
            "Hi <tool_call>\n",
            &["content Hi", "fault Unclosed", "content  <tool_call>\n"],
        )
        // The next call is still parsed. The index of the open call is not used again.
        .says(
            r#"<tool_call>{"name":"f","arguments":{"a":<tool_call>{"name":"g","arguments":{}}</tool_call>"#,
            &[
                r#"open 0 call_0 f {"a":"#,
                "fault Syntax",
                r#"content <tool_call>{"name":"f","arguments":{"a":"#,
                "call 1 call_1 g {}",
            ],
        )
        .says(
            r#"<tool_call>{"name":"f","arguments":[1]}</tool_call>"#,
            &[
                "fault ArgumentsNotObject",
                r#"content <tool_call>{"name":"f","arguments":[1]}</tool_call>"#,
            ],
        )
        .says(
            r#"<tool_call>{"name":"f","arguments":"no"}</tool_call>"#,
            &[
                "fault ArgumentsNotObject",
                r#"content <tool_call>{"name":"f","arguments":"no"}</tool_call>"#,
            ],
        )
        .says(
            r#"<tool_call>{"arguments":{}}</tool_call>"#,
            &["fault MissingName", r#"content <tool_call>{"arguments":{}}</tool_call>"#],
        )
        .says(
            r#"<tool_call>{"name":"a b","arguments":{}}</tool_call>"#,
            &["fault BadName", r#"content <tool_call>{"name":"a b","arguments":{}}</tool_call>"#],
        )
        .says(
            r#"<tool_call>[{"name":"f","arguments":{}},7]</tool_call>"#,
            &["call 0 call_0 f {}", "fault Syntax", "content ,7]</tool_call>"],
        )
        .says("<tool_call>[]</tool_call>", &["fault Syntax", "content <tool_call>[]</tool_call>"]);
}

#[test]
fn llama() {
    golden(Family::Llama3)
        .tools(typed_tools())
        .says(
            r#"{"name": "f", "parameters": {"s": "a; {b}", "o": {"k": {}}}}"#,
            &[r#"call 0 call_0 f {"s": "a; {b}", "o": {"k": {}}}"#],
        )
        .says(
            r#"<|python_tag|>{"type": "function", "name": "f", "parameters": {}}<|eom_id|>"#,
            &["call 0 call_0 f {}"],
        )
        .says(
            "\n{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
            &["call 0 call_0 f {}", "call 1 call_1 g {}"],
        )
        .says(
            "{\"name\": \"g\", \"arguments\": {}}",
            &["call 0 call_0 g {}"],
        )
        // JSON that is not a call is content, and not a fault. JSON after text is content, too.
        .says(r#"{"answer": 42}"#, &[r#"content {"answer": 42}"#])
        .says(
            r#"{"name": "Bob", "parameters": 1}"#,
            &[r#"content {"name": "Bob", "parameters": 1}"#],
        )
        .says(
            r#"{"name": "g", "age": 3}"#,
            &[r#"content {"name": "g", "age": 3}"#],
        )
        .says(r#"{"name": "g"}"#, &[r#"content {"name": "g"}"#])
        .says(r#"{"name": "f", "#, &[r#"content {"name": "f", "#])
        .says(
            r#"See: {"name": "f", "parameters": {}}"#,
            &[r#"content See: {"name": "f", "parameters": {}}"#],
        )
        .says("a; b", &["content a; b"])
        // Code for the built-in interpreter is not a call.
        .says(
            "<|python_tag|>print(1)",
            &["fault Syntax", "content <|python_tag|>print(1)"],
        )
        .says(
            r#"{"name": "f", "parameters": {"s": "#,
            &[
                r#"open 0 call_0 f {"s": "#,
                "fault Unclosed",
                r#"content {"name": "f", "parameters": {"s": "#,
            ],
        );
    // Without tools, a JSON reply is content.
    golden(Family::Llama3).says(
        r#"{"name": "f", "parameters": {}}"#,
        &[r#"content {"name": "f", "parameters": {}}"#],
    );
}

#[test]
fn command_r() {
    golden(Family::CommandR)
        .says(
            "<|START_THINKING|>I need f.<|END_THINKING|><|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \
             \"tool_name\": \"f\", \"parameters\": {\"q\": \"ä [x]\"}},\n    {\"tool_call_id\": 1, \
             \"tool_name\": \"g\", \"parameters\": {}}\n]<|END_ACTION|>",
            &["reasoning I need f.", r#"call 0 0 f {"q": "ä [x]"}"#, "call 1 1 g {}"],
        )
        .says(
            "<|START_THINKING|> Easy. <|END_THINKING|><|START_RESPONSE|>Hello [1].<|END_RESPONSE|>",
            &["reasoning Easy.", "content Hello [1]."],
        )
        .says(
            "<|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {}}",
            &["call 0 call_0 f {}"],
        )
        .says(
            "<|START_ACTION|>[{\"tool_name\": \"f\"",
            &["fault Unclosed", "content <|START_ACTION|>[{\"tool_name\": \"f\""],
        );
}

#[test]
fn granite_3() {
    let format = Format::detect("<|start_of_role|> <|tool_call|> <think> <response>", None);
    Golden::new(format)
        .says(
            "<|tool_call|>[{\"arguments\": {\"a\": 1}, \"name\": \"f\"}, {\"name\": \"g\", \"arguments\": {}}]",
            &[r#"call 0 call_0 f {"a": 1}"#, "call 1 call_1 g {}"],
        )
        .says(
            "<think>Hm, <b>.</think>\n\n<response>So <x></response>",
            &["reasoning Hm, <b>.", "content So <x>"],
        )
        .says("So <response>x</response>.", &["content So <response>x</response>."])
        .says("<think>never ends", &["reasoning never ends"]);
    golden(Family::Granite3).says(
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {}}]<|/tool_call|>",
        &["call 0 call_0 f {}"],
    );
}
