//! Tests of replies of Qwen3-Coder, MiniMax and GLM-4.5 to 4.7.

use super::harness::{Golden, typed_tools};
use inference_text::reply::{Family, Format, ReasoningTags};

fn golden(family: Family) -> Golden<'static> {
    let format = Format::for_family(family).with_reasoning(ReasoningTags::THINK);
    Golden::new(format).tools(typed_tools())
}

#[test]
fn qwen3_coder() {
    golden(Family::Qwen3Coder)
        .says(
            "I write it.\n<tool_call>\n<function=f>\n<parameter=s>\nlet x = \"a\";\n\n  if x < 1 { }\\n\n\
             </parameter>\n<parameter=i>\n5\n</parameter>\n<parameter=n>\n0.5\n</parameter>\n\
             <parameter=b>\nTrue\n</parameter>\n<parameter=a>\n[1, \"é\"]\n</parameter>\n\
             <parameter=o>\n{\"k\": {}}\n</parameter>\n</function>\n</tool_call>",
            &[
                "content I write it.",
                concat!(
                    r#"call 0 call_0 f {"s": "let x = \"a\";\n\n  if x < 1 { }\\n", "i": 5, "n": 0.5, "#,
                    r#""b": true, "a": [1, "é"], "o": {"k": {}}}"#
                ),
            ],
        )
        // A string stays a string, whatever its content. A value that does not fit another type
        // becomes a string.
        .says(
            "<tool_call>\n<function=f>\n<parameter=s>\n42\n</parameter>\n<parameter=t>null</parameter>\n\
             <parameter=i>\nmany\n</parameter>\n<parameter=z>\nnull\n</parameter>\n\
             <parameter=new>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>",
            &[r#"call 0 call_0 f {"s": "42", "t": "null", "i": "many", "z": null, "new": {"a": 1}}"#],
        )
        // No arguments, empty values, several calls, and text between and after calls.
        .says(
            "<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n\
             <parameter=s>\n</parameter>\n<parameter=t></parameter>\n</function>\n</tool_call>\nbye",
            &["call 0 call_0 g {}", r#"call 1 call_1 f {"s": "", "t": ""}"#, "content bye"],
        )
        // The opening tag is missing.
        .says(
            "Ok\n<function=f>\n<parameter=s>\n</param\n\n</parameter>\n</function>\n</tool_call>\n\
             <function=g></function>",
            &["content Ok", r#"call 0 call_0 f {"s": "</param\n"}"#, "call 1 call_1 g {}"],
        )
        // A call inside the reasoning ends it, but the tag alone does not.
        .says(
            "<think>I use <tool_call> like <tool_call>\n<function=g>\n</function>\n</tool_call></think>\nok",
            &["reasoning I use <tool_call> like", "call 0 call_0 g {}", "content ok"],
        );
    golden(Family::Qwen3Coder)
        .prompt("<|im_start|>assistant\n<think>\n")
        .says(
            "\nThe <tool_call> tag.\n</think>\n\n<tool_call><function=g></function></tool_call>",
            &["reasoning The <tool_call> tag.", "call 0 call_0 g {}"],
        );
    Golden::new(Format::for_family(Family::Qwen3Coder)).says(
        "<tool_call><function=f><parameter=s>42</parameter><parameter=t>4 2</parameter></function>",
        &[r#"call 0 call_0 f {"s": 42, "t": "4 2"}"#],
    );
}

#[test]
fn seed_oss() {
    let format = Format::detect(
        "<seed:tool_call>\n<function=f>\n<parameter=k> <seed:think>",
        None,
    );
    assert_eq!(format.family, Family::Qwen3Coder);
    Golden::new(format).tools(typed_tools()).says(
        "<seed:think>Hm.</seed:think>So\n<seed:tool_call>\n<function=f>\n<parameter=i>7</parameter>\n\
         </function>\n</seed:tool_call>",
        &["reasoning Hm.", "content So", r#"call 0 call_0 f {"i": 7}"#],
    );
}

#[test]
fn qwen3_coder_malformed() {
    golden(Family::Qwen3Coder)
        .says(
            "<tool_call>\n<function=f>\n<parameter=s>\nabc",
            &[
                r#"open 0 call_0 f {"s": "abc"#,
                "fault Unclosed",
                "content <tool_call>\n<function=f>\n<parameter=s>\nabc",
            ],
        )
        .says(
            "<tool_call>\n{\"name\": 1}</tool_call>",
            &[
                "fault Syntax",
                "content <tool_call>\n{\"name\": 1}</tool_call>",
            ],
        )
        .says(
            "<function=f oo></function>",
            &["fault BadName", "content <function=f oo></function>"],
        )
        .says(
            "<tool_call><function=f>text</function></tool_call>",
            &[
                "open 0 call_0 f {",
                "fault Syntax",
                "content <tool_call><function=f>text</function></tool_call>",
            ],
        );
}

#[test]
fn minimax() {
    golden(Family::MiniMax)
        .says(
            "<think>Hm.</think>\n\nSure.\n<minimax:tool_call>\n<invoke name=\"f\">\n\
             <parameter name=\"s\">a < b & \"c\"\nd</parameter>\n<parameter name=\"i\">-3</parameter>\n\
             <parameter name=\"a\">[\"x\"]</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n\
             </minimax:tool_call>\nAfter",
            &[
                "reasoning Hm.",
                "content Sure.",
                r#"call 0 call_0 f {"s": "a < b & \"c\"\nd", "i": -3, "a": ["x"]}"#,
                "call 1 call_1 g {}",
                "content After",
            ],
        )
        .says(
            "<minimax:tool_call><invoke name=\"g\"></invoke></minimax:tool_call>",
            &["call 0 call_0 g {}"],
        )
        .says("<invoke name=\"g\"></invoke>", &["content <invoke name=\"g\"></invoke>"])
        .says(
            "<minimax:tool_call><invoke name=\"g\"></invoke><invoke name=\"f\"><parameter",
            &[
                "call 0 call_0 g {}",
                "open 1 call_1 f {",
                "fault Unclosed",
                "content <invoke name=\"f\"><parameter",
            ],
        );
}

#[test]
fn glm_4_5() {
    golden(Family::Glm4Moe)
        .says(
            "\n<think>Let me see <tool_call>.</think>\nI look.\n<tool_call>f\n<arg_key>s</arg_key>\n\
             <arg_value>5 < 6 \"q\" é</arg_value>\n<arg_key>i</arg_key>\n<arg_value>5</arg_value>\n\
             <arg_key>o</arg_key>\n<arg_value>{\"k\": [1, 2]}</arg_value>\n</tool_call>",
            &[
                "reasoning Let me see <tool_call>.",
                "content I look.",
                r#"call 0 call_0 f {"s": "5 < 6 \"q\" é", "i": 5, "o": {"k": [1, 2]}}"#,
            ],
        )
        // GLM-4.7 writes no newlines, and calls may have no arguments.
        .says(
            "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value><arg_key>b</arg_key>\
             <arg_value>false</arg_value></tool_call><tool_call>g</tool_call>",
            &[r#"call 0 call_0 f {"s": "x", "b": false}"#, "call 1 call_1 g {}"],
        )
        .says("<tool_call>g\n</tool_call>\n", &["call 0 call_0 g {}"])
        .says(
            "<tool_call>f<arg_key>s</arg_key>x<arg_value>",
            &[
                "open 0 call_0 f {",
                "fault Syntax",
                "content <tool_call>f<arg_key>s</arg_key>x<arg_value>",
            ],
        )
        .says("<tool_call></tool_call>", &["fault MissingName", "content <tool_call></tool_call>"]);
}
