//! The detection of a model's syntax, and the choice of the parser.

use super::engine::{Engine, Plain};
use super::family::{Family, ReasoningTags};
use super::harmony::Harmony;
use super::{ParserOptions, ReplyParser, families};
use inference_formats::Family as ModelFamily;

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
    // Excludes Apriel, which writes a list, and MiniMax M3, which writes XML.
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
    /// Creates the format without calls and reasoning: all text is content.
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
