//! Tests of replies of Llama 3.2 and 4, LFM2 and OLMo 3.

use super::harness::{Golden, typed_tools};
use inference_text::reply::{Family, Format};

fn golden(family: Family) -> Golden<'static> {
    Golden::new(Format::for_family(family)).tools(typed_tools())
}

#[test]
fn bare_lists() {
    golden(Family::Pythonic)
        .says(
            r#"[f(s="a, b) \"c\"", i=1), g()]"#,
            &[r#"call 0 call_0 f {"s": "a, b) \"c\"", "i": 1}"#, "call 1 call_1 g {}"],
        )
        .says(
            "[f( s = 'it\\'s é' , n = -0.5, b = True, a = ['x', (1, None)], o = {'k': {'l': []}}, )]",
            &[concat!(
                r#"call 0 call_0 f {"s": "it's é", "n": -0.5, "b": true, "#,
                r#""a": ["x", [1, null]], "o": {"k": {"l": []}}}"#
            )],
        )
        // The schema determines the types: a string stays a string, and a quoted number becomes a
        // number.
        .says(
            "[f(s=94103, i='7', t=None, z=None, b='true')]",
            &[r#"call 0 call_0 f {"s": "94103", "i": 7, "t": "None", "z": null, "b": true}"#],
        )
        // Empty and triple quotes, and words without quotes.
        .says(
            "[f(s='', t='''a 'b', c''', x=word, y=f(1))]",
            &[r#"call 0 call_0 f {"s": "", "t": "a 'b', c", "x": "word", "y": "f(1)"}"#],
        )
        .says(
            "<|python_start|>[g()]<|python_end|>",
            &["call 0 call_0 g {}"],
        )
        // Text that looks like a call but is none.
        .says("[1, 2, 3]", &["content [1, 2, 3]"])
        .says("[f](https://example.com)", &["content [f](https://example.com)"])
        .says("[f(x)]", &["content [f(x)]"])
        .says("[h(x=1)]", &["content [h(x=1)]"])
        .says("[", &["content ["])
        .says("See [g()]", &["content See [g()]"])
        .says(
            "[g(), f(s='a",
            &["call 0 call_0 g {}", r#"open 1 call_1 f {"s": "#, "fault Unclosed", "content , f(s='a"],
        )
        .says(
            "[f(s='a', 1)]",
            &[r#"open 0 call_0 f {"s": "a""#, "fault Syntax", "content [f(s='a', 1)]"],
        );
    Golden::new(Format::for_family(Family::Pythonic)).says("[f(a=1)]", &["content [f(a=1)]"]);
}

#[test]
fn lfm2() {
    golden(Family::Lfm2)
        .says(
            "<|tool_call_start|>[f(s=\"x\", o={\"k\": true}), g()]<|tool_call_end|>Checking.",
            &[
                r#"call 0 call_0 f {"s": "x", "o": {"k": true}}"#,
                "call 1 call_1 g {}",
                "content Checking.",
            ],
        )
        .says("[g()]", &["content [g()]"])
        // A call of a function that was not offered is still a call.
        .says(
            "<|tool_call_start|>[h.i(x=1)]",
            &[r#"call 0 call_0 h.i {"x": 1}"#],
        )
        .says(
            "<|tool_call_start|>[f(x)]<|tool_call_end|>",
            &[
                "fault Syntax",
                "content <|tool_call_start|>[f(x)]<|tool_call_end|>",
            ],
        );
}

#[test]
fn olmo_3() {
    golden(Family::Olmo3)
        .says(
            "Ok.\n<function_calls>\nf(s=\"a\\nb\", i=2)\ng()\n</function_calls>\nDone",
            &[
                "content Ok.",
                r#"call 0 call_0 f {"s": "a\nb", "i": 2}"#,
                "call 1 call_1 g {}",
                "content Done",
            ],
        )
        .says(
            "<function_calls>f(b=true, z=null)</function_calls>",
            &[r#"call 0 call_0 f {"b": true, "z": null}"#],
        )
        .says(
            "<function_calls>",
            &["fault Unclosed", "content <function_calls>"],
        );
}
