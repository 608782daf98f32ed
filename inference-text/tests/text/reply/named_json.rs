//! Tests of replies in Mistral's three formats, and of Kimi K2 and GLM-4-0414.

use super::harness::{Golden, typed_tools};
use inference_text::reply::{Family, Format, ReasoningTags};

fn golden(family: Family) -> Golden<'static> {
    Golden::new(Format::for_family(family))
}

#[test]
fn mistral_nemo() {
    golden(Family::MistralNemo)
        .says(
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": \"x]\"}, \"id\": \"abcDEF123\"}, \
             {\"name\": \"g\", \"arguments\": {}}]",
            &[r#"call 0 abcDEF123 f {"a": "x]"}"#, "call 1 000000000 g {}"],
        )
        .says(
            "Text [1] [TOOL_CALLS] [{\"id\": \"123456789\", \"name\": \"f\", \"arguments\": {\"a\": 1}}]",
            &["content Text [1]", r#"call 0 123456789 f {"a": 1}"#],
        )
        // The template would reject this id, so the parser replaces it.
        .says(
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}, \"id\": \"call-1\"}]",
            &["call 0 000000000 f {}"],
        )
        .says(
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": ",
            &[
                "fault Unclosed",
                "content [TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": ",
            ],
        );
}

#[test]
fn mistral_call_id() {
    golden(Family::MistralCallId)
        .says(
            "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{\"q\": \"[ARGS] {\"}",
            &[r#"call 0 a1B2c3D4e f {"q": "[ARGS] {"}"#],
        )
        .says(
            "Hm. [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}",
            &[
                "content Hm.",
                "call 0 123456789 f {}",
                "call 1 000000000 g {}",
            ],
        )
        .says(
            "[TOOL_CALLS]f[CALL_ID]123456789",
            &["fault Unclosed", "content [TOOL_CALLS]f[CALL_ID]123456789"],
        );
}

#[test]
fn mistral_args() {
    let format = Format::for_family(Family::MistralArgs).with_reasoning(ReasoningTags::MISTRAL);
    Golden::new(format)
        .says(
            "[THINK]I call [TOOL_CALLS] now.[/THINK]\nOk. [TOOL_CALLS]f[ARGS]{\"a\": {\"b\": [\"é\"]}}\
             [TOOL_CALLS]g[ARGS]{} and on [x]",
            &[
                "reasoning I call [TOOL_CALLS] now.",
                "content Ok.",
                r#"call 0 000000000 f {"a": {"b": ["é"]}}"#,
                "call 1 000000001 g {}",
                "content and on [x]",
            ],
        )
        // Also tests a call without [ARGS], and a second reasoning part after content.
        .says("[TOOL_CALLS]f{\"a\": 1}", &[r#"call 0 000000000 f {"a": 1}"#])
        .says("a [THINK]b[/THINK] c", &["content a", "reasoning b", "content c"])
        .says(
            "[TOOL_CALLS]f[ARGS]no",
            &["fault ArgumentsNotObject", "content [TOOL_CALLS]f[ARGS]no"],
        )
        .says("[TOOL_CALLS]", &["fault Unclosed", "content [TOOL_CALLS]"])
        .says(
            "[TOOL_CALLS]f[ARGS]{\"a\": 01}",
            &[
                r#"open 0 000000000 f {"a": 0"#,
                "fault Syntax",
                "content [TOOL_CALLS]f[ARGS]{\"a\": 01}",
            ],
        );
    Golden::new(format)
        .prompt("[INST]x[/INST][THINK]")
        .says("deep[/THINK]flat", &["reasoning deep", "content flat"]);
}

#[test]
fn kimi_k2() {
    let format = Format::for_family(Family::KimiK2).with_reasoning(ReasoningTags::THINK);
    Golden::new(format)
        .says(
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\
             <|tool_call_argument_begin|>{\"q\": \"<|x|> 日\"}<|tool_call_end|><|tool_call_begin|>\
             functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            &[
                "content I look.",
                r#"call 0 functions.f:0 f {"q": "<|x|> 日"}"#,
                "call 1 functions.g:1 g {}",
            ],
        )
        // A call ends the reasoning.
        .says(
            "<think>Now f. <|tool_calls_section_begin|> <|tool_call_begin|> functions.f:7 \
             <|tool_call_argument_begin|> {} <|tool_call_end|> <|tool_calls_section_end|>",
            &["reasoning Now f.", "call 0 functions.f:7 f {}"],
        )
        .says(
            "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
            &["call 0 f f {}"],
        )
        .says(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\"",
            &[
                r#"open 0 functions.f:0 f {"a""#,
                "fault Unclosed",
                "content <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\"",
            ],
        );
}

#[test]
fn deepseek() {
    let think =
        |family| Golden::new(Format::for_family(family).with_reasoning(ReasoningTags::THINK));
    think(Family::DeepSeekV3).prompt("<｜Assistant｜><think>\n").says(
        "Hm.\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n\
         ```json\n{\"q\": \"```é\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n\
         ```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &[
            "reasoning Hm.",
            "content I look.",
            r#"call 0 call_0 f {"q": "```é"}"#,
            "call 1 call_1 g {}",
        ],
    );
    think(Family::DeepSeekV31)
        .says(
            "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": [1]}<｜tool▁call▁end｜>\
             <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            &["content Ok.", r#"call 0 call_0 f {"a": [1]}"#, "call 1 call_1 g {}"],
        )
        .says(
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>no",
            &["fault ArgumentsNotObject", "content <｜tool▁call▁begin｜>f<｜tool▁sep｜>no"],
        )
        .says("```rust\n```", &["content ```rust\n```"]);
}

#[test]
fn glm_4_0414() {
    golden(Family::Glm4)
        .tools(typed_tools())
        .says(
            "f\n{\"s\": \"a\nb\"}<|observation|>",
            &[r#"call 0 call_0 f {"s": "a\nb"}"#],
        )
        .says("\nf\n{\"i\": 1}", &[r#"call 0 call_0 f {"i": 1}"#])
        .says(
            "f\n{}<|assistant|>g\n{}<|observation|>",
            &["call 0 call_0 f {}", "call 1 call_1 g {}"],
        )
        .says(
            "First this.<|assistant|>g\n{}<|observation|>",
            &["content First this.", "call 0 call_0 g {}"],
        )
        .says("for\n{}", &["content for\n{}"])
        .says("Hello\n{}", &["content Hello\n{}"])
        .says("f\nis a function", &["content f\nis a function"]);
    golden(Family::Glm4).says("f\n{}", &["content f\n{}"]);
}
