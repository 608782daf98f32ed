//! The markers of each family, and the bodies that parse its calls.

use super::Family;
use super::engine::{Action, Body, Marker, Spec, Unmarked, When};
use super::gemma::GemmaCall;
use super::json_calls::JsonCalls;
use super::named_json::NamedJson;
use super::pythonic::Pythonic;
use super::sink::Sink;
use super::tagged::TaggedCall;

type NewBody = fn(bool) -> Box<dyn Body>;

fn call(text: &'static str, body: NewBody) -> Marker {
    Marker {
        text,
        when: When::Always,
        action: Action::Call(body),
    }
}

fn drop(text: &'static str, when: When) -> Marker {
    Marker {
        text,
        when,
        action: Action::Drop,
    }
}

/// A marker for the end of a call. At other places, this text is content.
fn end(text: &'static str) -> Marker {
    drop(text, When::AfterCall)
}

/// The syntax of a family that the engine reads.
pub(super) fn spec(family: Family, has_reasoning: bool) -> Spec {
    let always = |text| drop(text, When::Always);
    match family {
        // gpt-oss has a separate parser.
        Family::None | Family::Harmony => Spec::default(),
        Family::Hermes => Spec {
            markers: vec![call("<tool_call>", JsonCalls::boxed), end("</tool_call>")],
            ..Spec::default()
        },
        Family::Qwen3Coder => Spec {
            markers: vec![
                call("<tool_call>", TaggedCall::qwen),
                // The outer tag may be missing.
                call("<function=", TaggedCall::qwen_function),
                end("</tool_call>"),
                // The tag of Seed-OSS.
                call("<seed:tool_call>", TaggedCall::qwen),
                end("</seed:tool_call>"),
            ],
            breaks: &["<tool_call>"],
            ..Spec::default()
        },
        Family::Glm4Moe => Spec {
            markers: vec![call("<tool_call>", TaggedCall::glm)],
            inner: &[
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ],
            ..Spec::default()
        },
        Family::Glm4 => Spec {
            markers: vec![
                always("<|observation|>"),
                Marker {
                    text: "<|assistant|>",
                    when: When::Always,
                    action: Action::Restart,
                },
            ],
            unmarked: Some(Unmarked {
                begins: begins_tool,
                body: NamedJson::glm,
            }),
            ..Spec::default()
        },
        Family::Llama3 => Spec {
            markers: vec![
                call("<|python_tag|>", JsonCalls::boxed),
                end(";"),
                always("<|eom_id|>"),
                always("<|eot_id|>"),
            ],
            unmarked: Some(Unmarked {
                begins: |c, _| c == '{',
                body: JsonCalls::boxed,
            }),
            ..Spec::default()
        },
        Family::Pythonic => Spec {
            markers: vec![
                Marker {
                    text: "<|python_start|>",
                    when: When::Always,
                    action: Action::Restart,
                },
                always("<|python_end|>"),
            ],
            unmarked: Some(Unmarked {
                begins: |c, _| c == '[',
                body: Pythonic::boxed,
            }),
            ..Spec::default()
        },
        Family::Lfm2 => Spec {
            markers: vec![
                call("<|tool_call_start|>", Pythonic::boxed),
                end("<|tool_call_end|>"),
            ],
            ..Spec::default()
        },
        Family::Olmo3 => Spec {
            markers: vec![
                call("<function_calls>", Pythonic::boxed),
                end("</function_calls>"),
            ],
            ..Spec::default()
        },
        Family::MistralNemo | Family::MistralCallId | Family::MistralArgs => Spec {
            markers: vec![call("[TOOL_CALLS]", NamedJson::mistral)],
            inner: &["[CALL_ID]", "[ARGS]"],
            ..Spec::default()
        },
        Family::FunctionGemma => Spec {
            markers: vec![
                call("<start_function_call>", GemmaCall::function_gemma),
                end("<end_function_call>"),
            ],
            inner: &["<escape>"],
            ..Spec::default()
        },
        Family::Gemma4 => Spec {
            markers: vec![call("<|tool_call>", GemmaCall::gemma4), end("<tool_call|>")],
            breaks: &["<|tool_call>"],
            inner: &["<|\"|>"],
            ..Spec::default()
        },
        Family::CommandR => Spec {
            markers: vec![
                call("<|START_ACTION|>", JsonCalls::boxed),
                end("<|END_ACTION|>"),
                always("<|START_RESPONSE|>"),
                always("<|END_RESPONSE|>"),
                always("<|START_TEXT|>"),
                always("<|END_TEXT|>"),
            ],
            ..Spec::default()
        },
        Family::KimiK2 => Spec {
            markers: vec![
                // Both spellings are in use.
                always("<|tool_calls_section_begin|>"),
                always("<|tool_call_section_begin|>"),
                always("<|tool_calls_section_end|>"),
                always("<|tool_call_section_end|>"),
                call("<|tool_call_begin|>", NamedJson::kimi),
                end("<|tool_call_end|>"),
            ],
            breaks: &[
                "<|tool_calls_section_begin|>",
                "<|tool_call_section_begin|>",
                "<|tool_call_begin|>",
            ],
            inner: &["<|tool_call_argument_begin|>"],
            ..Spec::default()
        },
        Family::DeepSeekV3 | Family::DeepSeekV31 => {
            let mut markers = vec![
                always("<｜tool▁calls▁begin｜>"),
                always("<｜tool▁calls▁end｜>"),
                call("<｜tool▁call▁begin｜>", NamedJson::deepseek),
                end("<｜tool▁call▁end｜>"),
            ];
            if family == Family::DeepSeekV3 {
                // Arguments are in a code block, so its closing fence is a marker, too.
                markers.push(end("```"));
            }
            Spec {
                markers,
                inner: &["<｜tool▁sep｜>"],
                ..Spec::default()
            }
        }
        Family::MiniMax => Spec {
            markers: vec![
                call("<minimax:tool_call>", TaggedCall::minimax),
                Marker {
                    text: "<invoke name=",
                    when: When::AfterCall,
                    action: Action::Call(TaggedCall::minimax_invoke),
                },
                end("</minimax:tool_call>"),
            ],
            ..Spec::default()
        },
        Family::Granite3 => {
            let mut markers = vec![
                call("<|tool_call|>", JsonCalls::boxed),
                end("<|/tool_call|>"),
            ];
            if has_reasoning {
                markers.push(drop("<response>", When::Fresh));
                markers.push(drop("</response>", When::Wrapped));
            }
            Spec {
                markers,
                ..Spec::default()
            }
        }
    }
}

/// Whether the name of any tool starts with this character.
fn begins_tool(c: char, sink: &Sink) -> bool {
    sink.tools.iter().any(|tool| tool.name.starts_with(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Hold` requires this property of each set of markers.
    #[test]
    fn no_marker_is_the_beginning_of_another() {
        for family in Family::ALL {
            let spec = spec(family, true);
            let mut texts: Vec<_> = spec.markers.iter().map(|marker| marker.text).collect();
            texts.extend([
                "<think>",
                "</think>",
                "[THINK]",
                "[/THINK]",
                "<|channel>",
                "<channel|>",
            ]);
            for a in &texts {
                let others = texts.iter().filter(|b| *b != a);
                assert!(!others.clone().any(|b| b.starts_with(a)), "{family} {a}");
            }
        }
    }
}
