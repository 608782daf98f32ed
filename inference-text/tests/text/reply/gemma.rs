//! Tests of replies of FunctionGemma and Gemma 4.

use super::harness::{Golden, typed_tools};
use inference_text::reply::{Family, Format};

fn golden(family: Family) -> Golden<'static> {
    Golden::new(Format::for_family(family)).tools(typed_tools())
}

#[test]
fn function_gemma() {
    golden(Family::FunctionGemma)
        .says(
            "<start_function_call>call:f{s:<escape>a, \"b\" {c}: <é><escape>,i:1,b:true,\
             a:[<escape>x<escape>,2]}<end_function_call>",
            &[r#"call 0 call_0 f {"s": "a, \"b\" {c}: <é>", "i": 1, "b": true, "a": ["x", 2]}"#],
        )
        .says(
            "<start_function_call>call:g{}<end_function_call><start_function_call>call:f{s:<escape>\
             <escape>}<end_function_call>",
            &["call 0 call_0 g {}", r#"call 1 call_1 f {"s": ""}"#],
        )
        .says(
            "Hm <start_function_call>call:f{s:<escape>a",
            &[
                "content Hm",
                r#"open 0 call_0 f {"s": "#,
                "fault Unclosed",
                "content  <start_function_call>call:f{s:<escape>a",
            ],
        );
}

#[test]
fn gemma_4() {
    golden(Family::Gemma4)
        .says(
            "<|channel>thought\nI think.\n<channel|>I look. <|tool_call>call:f{s:<|\"|>x, <|y|> \"z\"\n\
             <|\"|>,o:{k:<|\"|>v<|\"|>,<|\"|>l m<|\"|>:[1,{}]},n:1.5}<tool_call|>",
            &[
                "reasoning I think.",
                "content I look.",
                r#"call 0 call_0 f {"s": "x, <|y|> \"z\"\n", "o": {"k": "v", "l m": [1, {}]}, "n": 1.5}"#,
            ],
        )
        .says(
            "<|tool_call>call:g{}<tool_call|><|tool_call>call:f{s:bare word,z:None}<tool_call|>",
            &["call 0 call_0 g {}", r#"call 1 call_1 f {"s": "bare word", "z": null}"#],
        )
        // The schema determines the types of the arguments.
        .says(
            "<|tool_call>call:f{s:5,i:<|\"|>6<|\"|>}<tool_call|>",
            &[r#"call 0 call_0 f {"s": "5", "i": 6}"#],
        )
        // A call ends the reasoning. Then an empty channel, and a channel without a label.
        .says(
            "<|channel>thought\nNow <|tool_call>call:g{}<tool_call|>",
            &["reasoning Now", "call 0 call_0 g {}"],
        )
        .says("<|channel>thought\n<channel|>Hi", &["content Hi"])
        .says("<|channel>thought<channel|>Hi", &["content Hi"])
        .says("<|channel>thoughts <channel|>Hi", &["reasoning thoughts", "content Hi"])
        .says("<|channel>tho", &["reasoning tho"])
        .says("<|tool_call>f{}", &["fault Syntax", "content <|tool_call>f{}"])
        .says(
            "<|tool_call>call:f{s:1]}<tool_call|>",
            &[
                r#"open 0 call_0 f {"s": "#,
                "fault Syntax",
                "content <|tool_call>call:f{s:1]}<tool_call|>",
            ],
        );
    golden(Family::Gemma4)
        .prompt("<|turn>model\n<|channel>thought\n")
        .says("Hm.<channel|>Hi", &["reasoning Hm.", "content Hi"]);
    golden(Family::Gemma4)
        .prompt("<|turn>model\n<|channel>thought\n<channel|>")
        .says("Hi", &["content Hi"]);
}
