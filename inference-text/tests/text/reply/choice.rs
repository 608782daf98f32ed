//! Tests which format is detected for a template. The templates here imitate those of the families.

use inference_text::reply::{Family, Format, ReasoningTags};

#[test]
fn templates() {
    let think = Some(ReasoningTags::THINK);
    for (snippet, family, reasoning) in [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            Family::None,
            None,
        ),
        (
            "<start_of_turn>model\n{{ content }}<end_of_turn>",
            Family::None,
            None,
        ),
        ("{{ content.split('</think>')[-1] }}", Family::None, think),
        (
            "'<tool_call>\\n{\"name\": \"' ~ call.name ~ '\", \"arguments\": '",
            Family::Hermes,
            None,
        ),
        (
            "<tool_call>{{ call | tojson }}</tool_call> <think>",
            Family::Hermes,
            think,
        ),
        (
            "<tool_call>\\n<function=' ~ name ~ '>\\n<parameter=' ~ key ~ '>",
            Family::Qwen3Coder,
            None,
        ),
        (
            "<think> <tool_call>' ~ name ~ '<arg_key>' ~ k ~ '</arg_key><arg_value>",
            Family::Glm4Moe,
            think,
        ),
        (
            "[gMASK]<sop> <|observation|> {{ tool }}",
            Family::Glm4,
            None,
        ),
        (
            "Environment: ipython <|python_tag|> \"parameters\": ",
            Family::Llama3,
            None,
        ),
        (
            "Environment: ipython {\"name\": x, \"parameters\": y}",
            Family::Llama3,
            None,
        ),
        (
            "<|header_start|>ipython<|header_end|> \"parameters\"",
            Family::Pythonic,
            None,
        ),
        (
            "in the format of [func_name1(params_name1=value)]",
            Family::Pythonic,
            None,
        ),
        (
            "<|tool_list_start|>[{{ tools }}]<|tool_list_end|>",
            Family::Lfm2,
            None,
        ),
        (
            "<functions>{{ tools }}</functions> <function_calls>",
            Family::Olmo3,
            None,
        ),
        (
            "[AVAILABLE_TOOLS] [TOOL_CALLS] [{\"name\"",
            Family::MistralNemo,
            None,
        ),
        (
            "[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]'",
            Family::MistralCallId,
            None,
        ),
        (
            "[THINK]{{ text }}[/THINK] [TOOL_CALLS]' + name + '[ARGS]'",
            Family::MistralArgs,
            Some(ReasoningTags::MISTRAL),
        ),
        (
            "<start_function_call>call:' ~ name",
            Family::FunctionGemma,
            None,
        ),
        (
            "<|tool_call>call:{{ name }} <|channel>thought\n<channel|>",
            Family::Gemma4,
            Some(ReasoningTags::GEMMA4),
        ),
        (
            "<|start|>assistant<|channel|>final<|message|>",
            Family::Harmony,
            None,
        ),
        (
            "<|START_ACTION|>[{{ x }}]",
            Family::CommandR,
            Some(ReasoningTags::COMMAND_R),
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>{{id}}<|tool_call_argument_begin|>",
            Family::KimiK2,
            None,
        ),
        (
            "<think> <minimax:tool_call><invoke name=\"{{ n }}\">",
            Family::MiniMax,
            think,
        ),
        (
            "<|start_of_role|> <think> <response>",
            Family::Granite3,
            think,
        ),
        (
            "<|start_of_role|> <tool_call>{{ call | tojson }}",
            Family::Hermes,
            None,
        ),
        (
            "<|tool_call|>[{{ calls }}]<|/tool_call|>",
            Family::Granite3,
            None,
        ),
        (
            "<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n",
            Family::DeepSeekV3,
            None,
        ),
        (
            "</think> <｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>",
            Family::DeepSeekV31,
            think,
        ),
        // Similar syntaxes for which there is no parser.
        (
            "within <tool_call></tool_call>: <tool_calls>[{}]</tool_calls>",
            Family::None,
            None,
        ),
        (
            "<function=example>{\"a\": 1}</function> <|python_tag|>",
            Family::None,
            None,
        ),
    ] {
        let format = Format::detect(snippet, None);
        assert_eq!(
            (format.family, format.reasoning),
            (family, reasoning),
            "{snippet}"
        );
        assert_eq!(format.has_tool_calls(), family != Family::None);
    }
}

#[test]
fn the_model_type_helps_where_the_template_is_silent() {
    let family = |template, model_type| Format::detect(template, Some(model_type)).family;
    assert_eq!(family("", "gpt_oss"), Family::Harmony);
    assert_eq!(family("{{ tools }}", "llama4"), Family::Pythonic);
    assert_eq!(family("{{ tools }}", "qwen3"), Family::Hermes);
    // A template without tools has no call format. Markers have priority over the `model_type`.
    assert_eq!(family("{{ messages }}", "qwen3"), Family::None);
    assert_eq!(
        family("<tool_call><function=f><parameter=k>", "qwen3"),
        Family::Qwen3Coder
    );
    assert_eq!(family("{{ tools }}", "gemma3"), Family::None);
    assert_eq!(family("", "unheard_of"), Family::None);
}

#[test]
fn families_have_one_name() {
    for family in Family::ALL {
        let json = serde_json::to_value(family).expect("a name");
        assert_eq!(json, family.name());
        assert_eq!(
            serde_json::from_value::<Family>(json).expect("a family"),
            family
        );
    }
}
