//! Embeddings of texts, and scores for how well documents answer a query.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::cancel::Interrupt;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Prompt;

/// How the hidden states of a text become one vector.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The mean of all tokens' states.
    #[default]
    Mean,
    /// The state of the last token.
    Last,
    /// The state of the first token (`[CLS]`). Many encoders are trained so that this state
    /// represents the text.
    Cls,
    /// The maximum of each element over all tokens.
    Max,
    /// The sum of the states divided by the square root of their number.
    MeanSqrtLength,
    /// The weighted mean: token `i` of `n` has weight `i + 1` (Muennighoff 2022, arXiv:2202.08904).
    WeightedMean,
}

impl Pooling {
    /// All variants with their names.
    pub const ALL: [(&'static str, Pooling); 6] = [
        ("mean", Pooling::Mean),
        ("last", Pooling::Last),
        ("cls", Pooling::Cls),
        ("max", Pooling::Max),
        ("mean_sqrt_length", Pooling::MeanSqrtLength),
        ("weighted_mean", Pooling::WeightedMean),
    ];

    /// The variant's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        let entry = Self::ALL.iter().find(|(_, pooling)| *pooling == self);
        entry.map_or("mean", |(name, _)| name)
    }
}

impl std::str::FromStr for Pooling {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let entry = Self::ALL.iter().find(|(name, _)| *name == s);
        entry.map(|(_, pooling)| *pooling).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(name, _)| *name).collect();
            Error::new(
                ErrorKind::InvalidOption,
                format!("pooling `{s}` is not one of {}", names.join(", ")),
            )
        })
    }
}

/// The prefix that the model adds to a text before it embeds the text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EmbedPrompt {
    /// The model's default prompt, if it has one.
    #[default]
    Default,
    /// No prefix.
    None,
    /// The prompt of this name among [`EmbeddingInfo::prompts`], such as `query`.
    Named(String),
    /// This text, as a prefix.
    Text(String),
}

/// Options for embeddings. `None` means the model's own setting.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EmbedOptions {
    /// How hidden states become one vector.
    pub pooling: Option<Pooling>,
    /// Whether vectors are normalized to length one.
    pub normalize: Option<bool>,
    /// Return only the first elements of each vector, for models trained that way (Kusupati et al.
    /// 2022, arXiv:2205.13147). The shortened vectors are normalized again, if normalization is on.
    pub dimensions: Option<usize>,
    /// Maximum number of tokens in a text. The model's own maximum also applies.
    pub max_length: Option<usize>,
    /// Truncate a text that is too long, instead of refusing it.
    pub truncate: bool,
    /// The prefix of each text. Token ids get no prefix.
    pub prompt: EmbedPrompt,
}

impl EmbedOptions {
    /// The model's own settings; a text that is too long is an error.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the pooling.
    #[must_use]
    pub fn with_pooling(mut self, pooling: impl Into<Option<Pooling>>) -> Self {
        self.pooling = pooling.into();
        self
    }

    /// Sets whether vectors are normalized.
    #[must_use]
    pub fn with_normalize(mut self, normalize: impl Into<Option<bool>>) -> Self {
        self.normalize = normalize.into();
        self
    }

    /// Sets the number of elements per vector.
    #[must_use]
    pub fn with_dimensions(mut self, dimensions: impl Into<Option<usize>>) -> Self {
        self.dimensions = dimensions.into();
        self
    }

    /// Sets the maximum tokens of a text.
    #[must_use]
    pub fn with_max_length(mut self, max_length: impl Into<Option<usize>>) -> Self {
        self.max_length = max_length.into();
        self
    }

    /// Sets whether texts that are too long are truncated.
    #[must_use]
    pub fn with_truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// Sets the prefix of each text.
    #[must_use]
    pub fn with_prompt(mut self, prompt: EmbedPrompt) -> Self {
        self.prompt = prompt;
        self
    }

    /// Checks the options against the model's limits.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] with the option's name and the allowed values.
    pub fn validate(&self, info: &EmbeddingInfo) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if let Some(n) = self.dimensions
            && !(1..=info.dimensions).contains(&n)
        {
            return bad(format!(
                "dimensions is {n}; vectors of this model have {} elements",
                info.dimensions
            ));
        }
        if self.max_length == Some(0) {
            return bad(String::from("max_length is 0; it must be at least 1"));
        }
        if let EmbedPrompt::Named(name) = &self.prompt
            && !info.prompts.contains_key(name)
        {
            let known: Vec<_> = info.prompts.keys().map(String::as_str).collect();
            return bad(match known.as_slice() {
                [] => format!("prompt `{name}` is not known: the model has no named prompts"),
                known => format!("prompt `{name}` is not one of {}", known.join(", ")),
            });
        }
        Ok(())
    }
}

/// The model's default settings for embeddings.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EmbeddingInfo {
    /// Elements per vector.
    pub dimensions: usize,
    /// The maximum tokens of a text; `None` if unlimited.
    pub max_length: Option<usize>,
    /// How hidden states become one vector.
    pub pooling: Pooling,
    /// Whether vectors are scaled to length one.
    pub normalize: bool,
    /// Named prefixes, such as `query` and `document`.
    pub prompts: BTreeMap<String, String>,
    /// The name of the default prefix.
    pub default_prompt: Option<String>,
}

impl EmbeddingInfo {
    /// The prefix that `prompt` selects. `None` for an unknown name.
    #[must_use]
    pub fn prefix<'a>(&'a self, prompt: &'a EmbedPrompt) -> Option<&'a str> {
        match prompt {
            EmbedPrompt::None => Some(""),
            EmbedPrompt::Text(text) => Some(text),
            EmbedPrompt::Named(name) => self.prompts.get(name).map(String::as_str),
            EmbedPrompt::Default => match &self.default_prompt {
                Some(name) => self.prompts.get(name).map(String::as_str),
                None => Some(""),
            },
        }
    }
}

/// A model that embeds texts.
pub trait EmbeddingModel: TextModel {
    /// The model's default settings.
    fn embedding_info(&self) -> EmbeddingInfo;

    /// The token ids that [`EmbeddingModel::embed`] runs for a prompt, with prefix, special tokens
    /// and truncation by `options`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for an empty or too long prompt and for ids outside the
    /// vocabulary; otherwise as [`EmbedOptions::validate`].
    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>>;

    /// Returns one vector per prompt, in order. Engines check `interrupt` between steps.
    ///
    /// # Errors
    /// As [`EmbeddingModel::embedding_tokens`], for any of the prompts; as [`Interrupt::check`];
    /// [`ErrorKind::Closed`] after [`TextModel::close`].
    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>>;
}

/// Options for scoring documents.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RerankOptions {
    /// Return the raw scores of the last layer, instead of scores from 0 to 1.
    pub raw_scores: bool,
    /// Maximum number of tokens in a pair of query and document. The model's own maximum also
    /// applies.
    pub max_length: Option<usize>,
    /// If a pair is too long, truncate its document instead of refusing the pair.
    pub truncate: bool,
    /// A description of the task, for models that expect an instruction.
    pub instruction: Option<String>,
}

impl RerankOptions {
    /// Creates the defaults: scores from 0 to 1, and an error for a pair that is too long.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether to return the raw scores of the last layer.
    #[must_use]
    pub fn with_raw_scores(mut self, raw_scores: bool) -> Self {
        self.raw_scores = raw_scores;
        self
    }

    /// Sets the maximum tokens of a pair.
    #[must_use]
    pub fn with_max_length(mut self, max_length: impl Into<Option<usize>>) -> Self {
        self.max_length = max_length.into();
        self
    }

    /// Sets whether documents that are too long are truncated.
    #[must_use]
    pub fn with_truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// Sets the instruction.
    #[must_use]
    pub fn with_instruction(mut self, instruction: impl Into<Option<String>>) -> Self {
        self.instruction = instruction.into();
        self
    }
}

/// The scores of documents.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// One score per document, in order. A higher score is a better match.
    pub scores: Vec<f32>,
    /// Tokens that the model processed.
    pub tokens: usize,
}

impl Ranking {
    /// A ranking with these scores. `tokens` is the number of tokens that the model processed.
    #[must_use]
    pub fn new(scores: Vec<f32>, tokens: usize) -> Self {
        Self { scores, tokens }
    }

    /// The indices of the documents, best first. Documents with equal scores keep their order.
    #[must_use]
    pub fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.scores.len()).collect();
        order.sort_by(|a, b| self.scores[*b].total_cmp(&self.scores[*a]));
        order
    }
}

/// A model that scores how well documents answer a query.
pub trait RerankModel: TextModel {
    /// Returns a score for each document. Engines check `interrupt` between steps.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a pair that is too long, and for an instruction if the
    /// model reads none; errors of [`Interrupt::check`]; [`ErrorKind::Closed`] after
    /// [`TextModel::close`].
    fn rerank(
        &self,
        query: &str,
        documents: &[String],
        options: &RerankOptions,
        interrupt: &Interrupt,
    ) -> Result<Ranking>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poolings_are_found_by_their_names() {
        for (name, pooling) in Pooling::ALL {
            assert_eq!(name.parse::<Pooling>().unwrap(), pooling);
            assert_eq!(pooling.name(), name);
            assert_eq!(
                serde_json::to_value(pooling).unwrap(),
                serde_json::json!(name)
            );
        }
        let error = "median".parse::<Pooling>().unwrap_err();
        assert!(error.message().contains("weighted_mean"), "{error}");
    }

    #[test]
    fn options_that_a_model_does_not_have_are_refused() {
        let info = EmbeddingInfo {
            dimensions: 8,
            prompts: BTreeMap::from([("query".to_owned(), "query: ".to_owned())]),
            ..EmbeddingInfo::default()
        };
        let named = |name: &str| EmbedPrompt::Named(name.to_owned());
        let new = EmbedOptions::new;
        for (options, word) in [
            (new().with_dimensions(9), "8 elements"),
            (new().with_dimensions(0), "dimensions is 0"),
            (new().with_max_length(0), "max_length"),
            (new().with_prompt(named("x")), "not one of query"),
        ] {
            let error = options.validate(&info).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption);
            assert!(error.message().contains(word), "{error}");
        }
        let fine = new().with_dimensions(8).with_prompt(named("query"));
        fine.validate(&info).unwrap();
        assert_eq!(info.prefix(&fine.prompt), Some("query: "));
        assert_eq!(info.prefix(&EmbedPrompt::Default), Some(""));
        assert_eq!(info.prefix(&named("x")), None);
    }

    #[test]
    fn the_best_document_is_first_and_equals_keep_their_order() {
        let ranking = Ranking::new(vec![0.5, f32::NAN, 0.9, 0.5, -1.0], 7);
        assert_eq!(ranking.order()[1..], [2, 0, 3, 4]);
    }
}
