//! The families of tool-call syntax, and the tags around reasoning.

use super::ids::IdStyle;
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
