//! The families of tool-call syntax, and the detection of a model's syntax.

use super::engine::{Engine, Plain};
use super::harmony::Harmony;
use super::{IdStyle, ParserOptions, ReplyParser, families};
use inference_formats::Family as ModelFamily;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A syntax of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Family {
    /// No tool calls: all text outside reasoning is content.
    None,
    /// Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3: `<tool_call>{"name", "arguments"}</tool_call>`.
    Hermes,
    /// Qwen3-Coder and 3.5, Nemotron 3, Seed-OSS:
    /// `<tool_call><function=f><parameter=k>v</parameter></function></tool_call>`.
    Qwen3Coder,
    /// GLM-4.5 to 4.7: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`.
    Glm4Moe,
    /// GLM-4-0414: `f`, a newline and a JSON object.
    Glm4,
    /// Llama 3.1 to 3.3: `{"name", "parameters"}`, optionally after `<|python_tag|>`.
    Llama3,
    /// Llama 3.2 and 4: `[f(k="v")]`.
    Pythonic,
    /// LFM2: `<|tool_call_start|>[f(k="v")]<|tool_call_end|>`.
    Lfm2,
    /// OLMo 3: `<function_calls>f(k="v")</function_calls>`, one call per line.
    Olmo3,
    /// Mistral Nemo: `[TOOL_CALLS][{"name", "arguments", "id"}]`.
    MistralNemo,
    /// Mistral Small 3.2: `[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{…}`.
    MistralCallId,
    /// Devstral, Ministral 3, Magistral: `[TOOL_CALLS]f[ARGS]{…}`.
    MistralArgs,
    /// FunctionGemma: `<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>`.
    FunctionGemma,
    /// Gemma 4: `<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>`.
    Gemma4,
    /// gpt-oss: messages with channels and recipients.
    Harmony,
    /// Command-R7B and Command A: `<|START_ACTION|>[{"tool_call_id", "tool_name", "parameters"}]`.
    CommandR,
    /// Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.
    KimiK2,
    /// DeepSeek V3 and R1: a type, a name, and JSON in a code block.
    #[serde(rename = "deepseek_v3")]
    DeepSeekV3,
    /// DeepSeek V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
    #[serde(rename = "deepseek_v31")]
    DeepSeekV31,
    /// MiniMax M2:
    /// `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>`.
    #[serde(rename = "minimax")]
    MiniMax,
    /// Granite 3 and Phi-4-mini: `<|tool_call|>[{"name", "arguments"}]`.
    Granite3,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 21] = [
        Self::None,
        Self::Hermes,
        Self::Qwen3Coder,
        Self::Glm4Moe,
        Self::Glm4,
        Self::Llama3,
        Self::Pythonic,
        Self::Lfm2,
        Self::Olmo3,
        Self::MistralNemo,
        Self::MistralCallId,
        Self::MistralArgs,
        Self::FunctionGemma,
        Self::Gemma4,
        Self::Harmony,
        Self::CommandR,
        Self::KimiK2,
        Self::DeepSeekV3,
        Self::DeepSeekV31,
        Self::MiniMax,
        Self::Granite3,
    ];

    /// The name used in messages and settings, as `serde` writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Glm4Moe => "glm4_moe",
            Self::Glm4 => "glm4",
            Self::Llama3 => "llama3",
            Self::Pythonic => "pythonic",
            Self::Lfm2 => "lfm2",
            Self::Olmo3 => "olmo3",
            Self::MistralNemo => "mistral_nemo",
            Self::MistralCallId => "mistral_call_id",
            Self::MistralArgs => "mistral_args",
            Self::FunctionGemma => "function_gemma",
            Self::Gemma4 => "gemma4",
            Self::Harmony => "harmony",
            Self::CommandR => "command_r",
            Self::KimiK2 => "kimi_k2",
            Self::DeepSeekV3 => "deepseek_v3",
            Self::DeepSeekV31 => "deepseek_v31",
            Self::MiniMax => "minimax",
            Self::Granite3 => "granite3",
        }
    }

    /// The family with this [`Self::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// The form of generated ids.
    pub fn id_style(self) -> IdStyle {
        match self {
            Self::MistralNemo | Self::MistralCallId | Self::MistralArgs => IdStyle::Nine,
            _ => IdStyle::Call,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The tags around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReasoningTags {
    /// The opening tag.
    pub open: &'static str,
    /// The closing tag.
    pub close: &'static str,
    /// A label directly after the opening tag. It is not part of the reasoning.
    pub label: Option<&'static str>,
    /// Whether the opening tag is recognized anywhere. That is safe if the tag is a single token.
    /// Otherwise it is recognized only before any content.
    pub anywhere: bool,
}

impl ReasoningTags {
    /// `<think>…</think>`.
    pub const THINK: Self = Self {
        open: "<think>",
        close: "</think>",
        label: None,
        anywhere: false,
    };
    /// `<seed:think>…</seed:think>` of Seed-OSS.
    pub const SEED: Self = Self {
        open: "<seed:think>",
        close: "</seed:think>",
        label: None,
        anywhere: false,
    };
    /// `[THINK]…[/THINK]` of Mistral.
    pub const MISTRAL: Self = Self {
        open: "[THINK]",
        close: "[/THINK]",
        label: None,
        anywhere: true,
    };
    /// `<|channel>thought\n…<channel|>` of Gemma 4.
    pub const GEMMA4: Self = Self {
        open: "<|channel>",
        close: "<channel|>",
        label: Some("thought\n"),
        anywhere: true,
    };
    /// `<|START_THINKING|>…<|END_THINKING|>` of Command-R.
    pub const COMMAND_R: Self = Self {
        open: "<|START_THINKING|>",
        close: "<|END_THINKING|>",
        label: None,
        anywhere: true,
    };

    /// Whether a prompt ends inside reasoning: its last text is the opening tag, followed by the
    /// label if there is one.
    ///
    /// A prompt that ends with a closed pair, or with neither tag, does not end inside reasoning.
    /// Users cannot change the result by their text, because only the very end of the prompt is
    /// checked.
    pub fn is_open_at_end_of(&self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        let label = self.label.map(str::trim_end).unwrap_or_default();
        prompt.ends_with(self.open)
            || prompt
                .strip_suffix(label)
                .is_some_and(|prompt| prompt.ends_with(self.open))
    }
}

/// The syntax in which a model writes calls and reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The syntax of calls.
    pub family: Family,
    /// The reasoning tags. gpt-oss has channels instead.
    pub reasoning: Option<ReasoningTags>,
}

/// A rule: a family, texts that must all occur in the template, texts of which at least one must
/// occur, and texts that must not occur. The first matching rule applies.
type Rule = (
    Family,
    &'static [&'static str],
    &'static [&'static str],
    &'static [&'static str],
);

/// The rules for [`Format::detect`], with the most specific markers first.
const RULES: &[Rule] = &[
    (Family::Harmony, &["<|channel|>", "<|message|>"], &[], &[]),
    (Family::Gemma4, &["<|tool_call>"], &[], &[]),
    (Family::FunctionGemma, &["<start_function_call>"], &[], &[]),
    (Family::MiniMax, &["<minimax:tool_call>"], &[], &[]),
    (Family::KimiK2, &["<|tool_call_argument_begin|>"], &[], &[]),
    (Family::DeepSeekV3, &["<｜tool▁sep｜>", "```json"], &[], &[]),
    (Family::DeepSeekV31, &["<｜tool▁sep｜>"], &[], &[]),
    (Family::CommandR, &["<|START_ACTION|>"], &[], &[]),
    (
        Family::MistralCallId,
        &["[TOOL_CALLS]", "[CALL_ID]"],
        &[],
        &[],
    ),
    (Family::MistralArgs, &["[TOOL_CALLS]", "[ARGS]"], &[], &[]),
    (Family::MistralNemo, &["[TOOL_CALLS]"], &[], &[]),
    (Family::Qwen3Coder, &["<function=", "<parameter="], &[], &[]),
    (Family::Glm4Moe, &["<arg_key>"], &[], &[]),
    (
        Family::Lfm2,
        &[],
        &["<|tool_call_start|>", "<|tool_list_start|>"],
        &[],
    ),
    (Family::Olmo3, &["<function_calls>"], &[], &[]),
    (Family::Granite3, &["<|tool_call|>"], &[], &[]),
    // Excludes the list of Apriel, and the XML of MiniMax M3.
    (
        Family::Hermes,
        &["<tool_call>"],
        &[],
        &["<tool_calls>", "minimax"],
    ),
    (Family::Glm4, &["[gMASK]", "<|observation|>"], &[], &[]),
    (
        Family::Granite3,
        &["<|start_of_role|>", "<response>"],
        &[],
        &[],
    ),
    (Family::Pythonic, &["<|python_start|>"], &[], &[]),
    (Family::Pythonic, &["[func_name1("], &[], &[]),
    // Excludes functionary, which has Llama's tokens but another syntax.
    (Family::Llama3, &["<|python_tag|>"], &[], &["<function="]),
    (
        Family::Llama3,
        &["ipython", "\"parameters\""],
        &[],
        &["<|header_start|>"],
    ),
    (Family::Pythonic, &["<|header_start|>", "ipython"], &[], &[]),
];

/// Call syntaxes by `model_type`, for templates without any marker of calls. The list has only
/// models that `inference_formats::family` does not describe, or describes as an alias of a family
/// with another syntax. For all other models, the family's descriptor names the syntax.
const OTHER_MODELS: &[(&str, Family)] = &[("kimi_k2", Family::KimiK2)];

impl Format {
    /// No format: all text is content.
    pub const fn none() -> Self {
        Self {
            family: Family::None,
            reasoning: None,
        }
    }

    /// The format of a family, with the reasoning tags that always belong to it: Gemma 4's channel
    /// and Command-R's thinking. Other families have no reasoning tags unless the template contains
    /// them.
    pub fn for_family(family: Family) -> Self {
        let reasoning = match family {
            Family::Gemma4 => Some(ReasoningTags::GEMMA4),
            Family::CommandR => Some(ReasoningTags::COMMAND_R),
            _ => None,
        };
        Self { family, reasoning }
    }

    /// Sets the tags of reasoning.
    #[must_use]
    pub fn with_reasoning(mut self, tags: ReasoningTags) -> Self {
        self.reasoning = Some(tags);
        self
    }

    /// Detects the format from markers in the text of the chat template.
    ///
    /// The configuration's `model_type` decides only if the template has no marker of calls. If a
    /// model has two templates, pass the template for tools. A model without tool calls of its own,
    /// such as Gemma 3, gets [`Family::None`], and reasoning tags if the template contains them.
    pub fn detect(template: &str, model_type: Option<&str>) -> Self {
        let has = |marker: &&str| template.contains(*marker);
        let by_template = RULES
            .iter()
            .find(|(_, all, any, none)| {
                all.iter().all(has)
                    && (any.is_empty() || any.iter().any(has))
                    && !none.iter().any(has)
            })
            .map(|rule| rule.0);
        let by_type = || {
            let model_type = model_type?;
            let other = OTHER_MODELS.iter().find(|(name, _)| *name == model_type);
            other.map(|entry| entry.1).or_else(|| {
                let known = ModelFamily::of(model_type)?;
                known.reply.and_then(Family::from_name)
            })
        };
        // A template without any kind of call does not support tools. If there is no template, the
        // `model_type` decides.
        let family = by_template
            .or_else(|| by_type().filter(|_| template.is_empty() || template.contains("tool")))
            .unwrap_or(Family::None);
        let mut format = Self::for_family(family);
        if format.reasoning.is_none() && family != Family::Harmony {
            format.reasoning = [
                ReasoningTags::MISTRAL,
                ReasoningTags::SEED,
                ReasoningTags::THINK,
            ]
            .into_iter()
            .find(|tags| has(&tags.open) || has(&tags.close));
        }
        format
    }

    /// The format for a request without tools: reasoning is parsed, and text that looks like a call
    /// is content.
    #[must_use]
    pub fn without_calls(self) -> Self {
        match self.family {
            // Channels belong to the call syntax and also mark reasoning, so the format stays.
            // Without tools, no message has a recipient.
            Family::Harmony => self,
            _ => Self {
                family: Family::None,
                ..self
            },
        }
    }

    /// The format for a request with tools. A format without calls gets the call syntax of Hermes
    /// models, and [`written`](super::written) explains it to the model.
    #[must_use]
    pub fn with_calls(self) -> Self {
        match self.family {
            Family::None => Self {
                family: Family::Hermes,
                ..self
            },
            _ => self,
        }
    }

    /// Whether replies can have tool calls.
    pub fn has_tool_calls(&self) -> bool {
        self.family != Family::None
    }

    /// Whether replies can have reasoning.
    pub fn has_reasoning(&self) -> bool {
        self.reasoning.is_some() || self.family == Family::Harmony
    }

    /// Creates a parser of one reply.
    pub fn parser(&self, options: ParserOptions) -> Box<dyn ReplyParser> {
        match (self.family, self.reasoning) {
            (Family::None, None) => Box::new(Plain),
            (Family::Harmony, _) => Box::new(Harmony::new(options)),
            (family, reasoning) => {
                let spec = families::spec(family, reasoning.is_some());
                Box::new(Engine::new(spec, reasoning, family, options))
            }
        }
    }
}

impl Default for Format {
    fn default() -> Self {
        Self::none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_name_families_that_exist() {
        for known in ModelFamily::all() {
            let family = known.reply.map(Family::from_name);
            assert_ne!(family, Some(None), "{}", known.model_type);
            let twice = (OTHER_MODELS.iter()).any(|(name, _)| *name == known.model_type);
            assert!(!twice, "a model has its family from its descriptor only");
        }
        let kimi = Format::detect("", Some("kimi_k2"));
        assert_eq!(kimi.family, Family::KimiK2);
        let glm = ModelFamily::of("glm4").and_then(|known| known.reply);
        assert_eq!(glm.and_then(Family::from_name), Some(Family::Glm4));
    }
}
