//! Tests of replies of gpt-oss.

use super::harness::{Golden, typed_tools};
use inference_text::reply::{Family, Format};

fn golden() -> Golden<'static> {
    Golden::new(Format::for_family(Family::Harmony)).prompt("<|end|><|start|>assistant")
}

#[test]
fn channels() {
    golden()
        .says(
            "<|channel|>analysis<|message|>User says hi.<|end|><|start|>assistant<|channel|>final\
             <|message|>Hello <there>!<|return|>",
            &["reasoning User says hi.", "content Hello <there>!"],
        )
        .says("<|channel|>final<|message|>Hi\n", &["content Hi\n"])
        .says("<|channel|>analysis<|message|>never ends", &["reasoning never ends"])
        // Several messages of one kind, and a preamble without a recipient.
        .says(
            "<|channel|>analysis<|message|> A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.\
             <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant\
             <|channel|>final<|message|>Done.<|return|>",
            &["reasoning A.\nB.", "content I look.\nDone."],
        )
        // A header that starts twice. Its last part must apply.
        .says(
            "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>",
            &["reasoning Hm."],
        )
        // The header is incomplete or missing.
        .says("<|message|>Hi", &["content Hi"])
        .says("Hi there", &["content Hi there"])
        .says("asks", &["content asks"])
        .says(
            "<|channel|>final",
            &["fault BadHeader", "content <|channel|>final"],
        );
    let in_final = "<|start|>assistant<|channel|>final<|message|>";
    Golden::new(Format::for_family(Family::Harmony))
        .prompt(in_final)
        .says("{\"a\": 1}", &["content {\"a\": 1}"]);
    let in_analysis = "<|start|>assistant<|channel|>analysis<|message|>";
    Golden::new(Format::for_family(Family::Harmony))
        .prompt(in_analysis)
        .says(
            "x<|end|><|start|>assistant<|channel|>final<|message|>y",
            &["reasoning x", "content y"],
        );
}

#[test]
fn calls() {
    golden()
        .says(
            "<|channel|>analysis<|message|>I need f.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.f <|constrain|>json<|message|>{\"q\": \"{<é>}\", \"n\": [1]}<|call|>",
            &["reasoning I need f.", r#"call 0 call_0 f {"q": "{<é>}", "n": [1]}"#],
        )
        // The recipient is in the role part, in the channel `analysis`, and without a constraint.
        .says(
            " to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
            &["call 0 call_0 f {}"],
        )
        .says(
            "<|channel|>analysis to=functions.f code<|message|>{\"a\":1}<|call|>",
            &[r#"call 0 call_0 f {"a":1}"#],
        )
        // Several calls, a call without arguments, and a missing end marker.
        .says(
            "<|channel|>commentary to=functions.f<|message|><|call|><|start|>assistant to=functions.g\
             <|channel|>commentary<|message|> {} \n<|start|>assistant<|channel|>final<|message|>x",
            &["call 0 call_0 f {}", "call 1 call_1 g {}", "content x"],
        )
        .says("<|channel|>commentary to=functions.f<|message|>{}", &["call 0 call_0 f {}"])
        .says(
            "<|channel|>commentary to=functions.f<|message|>{\"a\": ",
            &[
                r#"open 0 call_0 f {"a": "#,
                "fault Unclosed",
                "content <|channel|>commentary to=functions.f<|message|>{\"a\": ",
            ],
        )
        .says(
            "<|channel|>commentary to=functions.f<|message|>print(1)<|call|>",
            &[
                "open 0 call_0 f ",
                "fault ArgumentsNotObject",
                "content <|channel|>commentary to=functions.f<|message|>print(1)",
            ],
        )
        .says(
            "<|channel|>commentary to=functions.f<|message|>{} {}<|call|>",
            &[
                "open 0 call_0 f {}",
                "fault Syntax",
                "content <|channel|>commentary to=functions.f<|message|>{} {}",
            ],
        )
        // A built-in tool is not a function, so its message is not a call.
        .says(
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            &["fault UnknownRecipient", "reasoning print(1)"],
        );
    golden().tools(typed_tools()).says(
        "<|channel|>commentary to=f<|message|>{}<|call|>",
        &["call 0 call_0 f {}"],
    );
}
