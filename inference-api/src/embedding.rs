//! Vectors of texts, and documents in the order in which they answer a query.

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
    /// Their mean.
    #[default]
    Mean,
    /// That of the last token.
    Last,
    /// That of the first token, which many encoders train for this (`[CLS]`).
    Cls,
    /// The greatest number of each element.
    Max,
    /// Their sum divided by the square root of their number.
    MeanSqrtLength,
    /// Their mean, where the state of token `i` of `n` counts `i + 1` times (Muennighoff 2022,
    /// arXiv:2202.08904).
    WeightedMean,
}

impl Pooling {
    /// All of them, with their names.
    pub const ALL: [(&'static str, Pooling); 6] = [
        ("mean", Pooling::Mean),
        ("last", Pooling::Last),
        ("cls", Pooling::Cls),
        ("max", Pooling::Max),
        ("mean_sqrt_length", Pooling::MeanSqrtLength),
        ("weighted_mean", Pooling::WeightedMean),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        let own = Self::ALL.iter().find(|(_, pooling)| *pooling == self);
        own.map_or("mean", |(name, _)| name)
    }
}

impl std::str::FromStr for Pooling {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let own = Self::ALL.iter().find(|(name, _)| *name == s);
        own.map(|(_, pooling)| *pooling).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(name, _)| *name).collect();
            Error::new(
                ErrorKind::InvalidOption,
                format!("pooling `{s}` is not one of {}", names.join(", ")),
            )
        })
    }
}

/// The prefix of a text that becomes a vector.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EmbedPrompt {
    /// The model's default prompt, where it has one.
    #[default]
    Default,
    /// Nothing.
    None,
    /// The prompt of this name among [`EmbeddingInfo::prompts`], such as `query`.
    Named(String),
    /// This text.
    Text(String),
}

/// How texts become vectors. What is `None` is as the model was trained.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EmbedOptions {
    /// How hidden states become one vector.
    pub pooling: Option<Pooling>,
    /// Whether vectors are scaled to length one.
    pub normalize: Option<bool>,
    /// Only the first elements of each vector, for models trained so (Kusupati et al. 2022,
    /// arXiv:2205.13147). They are scaled to length one again where vectors are normalized.
    pub dimensions: Option<usize>,
    /// The most tokens of a text, at most the model's own bound.
    pub max_length: Option<usize>,
    /// Cut a text of more tokens, instead of refusing it.
    pub truncate: bool,
    /// The prefix of each text. Token ids get none.
    pub prompt: EmbedPrompt,
}

impl EmbedOptions {
    /// As the model was trained; a text that is too long is an error.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With this pooling.
    #[must_use]
    pub fn with_pooling(mut self, pooling: impl Into<Option<Pooling>>) -> Self {
        self.pooling = pooling.into();
        self
    }

    /// With vectors of length one, or as they come.
    #[must_use]
    pub fn with_normalize(mut self, normalize: impl Into<Option<bool>>) -> Self {
        self.normalize = normalize.into();
        self
    }

    /// Sets the number of elements of a vector.
    #[must_use]
    pub fn with_dimensions(mut self, dimensions: impl Into<Option<usize>>) -> Self {
        self.dimensions = dimensions.into();
        self
    }

    /// Sets the most tokens that are read of a text.
    #[must_use]
    pub fn with_max_length(mut self, max_length: impl Into<Option<usize>>) -> Self {
        self.max_length = max_length.into();
        self
    }

    /// With texts cut that are too long, or refused.
    #[must_use]
    pub fn with_truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// With this in front of each text.
    #[must_use]
    pub fn with_prompt(mut self, prompt: EmbedPrompt) -> Self {
        self.prompt = prompt;
        self
    }

    /// Checks the numbers against what a model makes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the option and what it may be.
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

/// How a model makes vectors when nothing else is asked for.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EmbeddingInfo {
    /// Elements of a vector.
    pub dimensions: usize,
    /// The most tokens of a text; `None` without a bound.
    pub max_length: Option<usize>,
    /// How hidden states become one vector.
    pub pooling: Pooling,
    /// Whether vectors are scaled to length one.
    pub normalize: bool,
    /// Texts that stand in front of others, by name, such as `query` and `document`.
    pub prompts: BTreeMap<String, String>,
    /// The name of the one that is used unless another is asked for.
    pub default_prompt: Option<String>,
}

impl EmbeddingInfo {
    /// What `prompt` puts in front of a text. `None` for a name that is not there.
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

/// A model that makes vectors of texts.
pub trait EmbeddingModel: TextModel {
    /// How it makes them when nothing else is asked for.
    fn embedding_info(&self) -> EmbeddingInfo;

    /// The ids that [`EmbeddingModel::embed`] runs for a prompt: with the text in front, with the
    /// tokens around it, and cut where `options` say so.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a prompt that is empty or too long, for ids outside of the
    /// vocabulary, and as [`EmbedOptions::validate`].
    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>>;

    /// One vector for each prompt, in their order. Engines look at `interrupt` between the steps of
    /// a call.
    ///
    /// # Errors
    /// As [`EmbeddingModel::embedding_tokens`], for any of the prompts; those of
    /// [`Interrupt::check`]; [`ErrorKind::Closed`] after [`TextModel::close`].
    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>>;
}

/// How documents are scored.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RerankOptions {
    /// Scores as the model's last layer gives them, instead of numbers from 0 to 1.
    pub raw_scores: bool,
    /// The most tokens of a query with a document, at most the model's own bound.
    pub max_length: Option<usize>,
    /// Cut the document of a pair with more tokens, instead of refusing it.
    pub truncate: bool,
    /// What the model is told to look for, for models that read an instruction.
    pub instruction: Option<String>,
}

impl RerankOptions {
    /// Scores from 0 to 1; a pair that is too long is an error.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With scores as the last layer gives them.
    #[must_use]
    pub fn with_raw_scores(mut self, raw_scores: bool) -> Self {
        self.raw_scores = raw_scores;
        self
    }

    /// Sets the most tokens that are read of a text.
    #[must_use]
    pub fn with_max_length(mut self, max_length: impl Into<Option<usize>>) -> Self {
        self.max_length = max_length.into();
        self
    }

    /// With documents cut that are too long, or refused.
    #[must_use]
    pub fn with_truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// With this instruction.
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
    /// One for each document, in their order. A greater one fits the query better.
    pub scores: Vec<f32>,
    /// Tokens that the model has read.
    pub tokens: usize,
}

impl Ranking {
    /// Scores, and the tokens that were read for them.
    #[must_use]
    pub fn new(scores: Vec<f32>, tokens: usize) -> Self {
        Self { scores, tokens }
    }

    /// The numbers of the documents, the best one first. Documents with equal scores stay in their
    /// order.
    #[must_use]
    pub fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.scores.len()).collect();
        order.sort_by(|a, b| self.scores[*b].total_cmp(&self.scores[*a]));
        order
    }
}

/// A model that says how well documents answer a query.
pub trait RerankModel: TextModel {
    /// A score for each document. Engines look at `interrupt` between the steps of a call.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a pair that is too long, and for an instruction that the
    /// model does not read; those of [`Interrupt::check`]; [`ErrorKind::Closed`] after
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
