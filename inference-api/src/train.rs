//! Models that can be trained.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::backend::TextModel;
use crate::error::{Error, ErrorKind, Result};
use crate::options::ComputeType;

/// A low-rank adapter (Hu et al. 2021): `base(x) + scale * (x A^T) B^T`, `scale = alpha / rank`.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f32,
    /// Fraction of inputs dropped in training.
    pub dropout: f32,
    /// Projections to adapt, each given by the end of its name.
    pub targets: Vec<String>,
    /// Number of last blocks to adapt; `None` adapts all blocks.
    pub num_layers: Option<usize>,
    /// The type of A and B.
    pub dtype: ComputeType,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            dropout: 0.0,
            targets: vec![String::from("q_proj"), String::from("v_proj")],
            num_layers: None,
            dtype: ComputeType::Float32,
        }
    }
}

impl LoraConfig {
    /// Creates the defaults: rank 8, alpha 16, query and value projections of all blocks, float32.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the rank: rows of A, columns of B.
    #[must_use]
    pub fn with_rank(mut self, rank: usize) -> Self {
        self.rank = rank;
        self
    }

    /// Sets the numerator of the scale.
    #[must_use]
    pub fn with_alpha(mut self, alpha: f32) -> Self {
        self.alpha = alpha;
        self
    }

    /// Sets the fraction of inputs dropped in training, from 0 to below 1.
    #[must_use]
    pub fn with_dropout(mut self, dropout: f32) -> Self {
        self.dropout = dropout;
        self
    }

    /// Sets the projections to adapt, each given by the end of its name.
    #[must_use]
    pub fn with_targets<S: Into<String>>(mut self, targets: impl IntoIterator<Item = S>) -> Self {
        self.targets = targets.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the number of last blocks to adapt; `None` means all.
    #[must_use]
    pub fn with_num_layers(mut self, num_layers: impl Into<Option<usize>>) -> Self {
        self.num_layers = num_layers.into();
        self
    }

    /// Sets the type of A and B.
    #[must_use]
    pub fn with_dtype(mut self, dtype: ComputeType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The factor on the adapter's output.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the field, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if self.rank == 0 {
            return bad(String::from("rank is 0; it must be at least 1"));
        }
        if !self.alpha.is_finite() {
            return bad(format!("alpha is {}; it must be a number", self.alpha));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return bad(format!(
                "dropout is {}; it must lie in 0 to below 1",
                self.dropout
            ));
        }
        if self.targets.is_empty() || self.targets.iter().any(String::is_empty) {
            return bad(String::from(
                "targets must name at least one projection, none empty",
            ));
        }
        if self.num_layers == Some(0) {
            return bad(String::from("num_layers is 0; it must be at least 1"));
        }
        Ok(())
    }
}

/// An adapter applied to a model.
pub trait Adapter: Send {
    /// The names of the adapter's trainable parameters, sorted.
    fn parameter_names(&self) -> Vec<String>;

    /// The number of trainable values.
    fn num_parameters(&self) -> usize;

    /// Writes the adapter (not the base model) to a directory.
    ///
    /// # Errors
    /// If writing fails. An adapter that was saved there before stays complete.
    fn save(&self, path: &Path) -> Result<()>;
}

/// A model that can be fine-tuned.
pub trait TrainableModel: TextModel {
    /// Applies a new adapter. The base weights do not change in training.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for an invalid configuration, or if no projection matches the
    /// targets.
    fn apply_lora(&self, config: &LoraConfig) -> Result<Box<dyn Adapter>>;

    /// Applies the adapter in a directory, and replaces the current one. Running requests use it
    /// from their next step on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if the adapter does not fit the model, which then stays
    /// unchanged; [`ErrorKind::Unsupported`] if the backend cannot exchange adapters.
    fn load_adapter(&self, path: &Path) -> Result<Box<dyn Adapter>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend does not exchange adapters; load the model again with adapter_path",
        )
        .with_path(path))
    }

    /// Removes the adapter, so that replies come from the base model. Does nothing without an
    /// adapter.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the backend cannot exchange adapters.
    fn remove_adapter(&self) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend does not exchange adapters; load the model again without one",
        ))
    }

    /// Converts text to ids.
    ///
    /// # Errors
    /// If the text cannot be encoded.
    fn encode(&self, text: &str) -> Result<Vec<u32>>;

    /// Converts ids to text.
    ///
    /// # Errors
    /// If an id is not in the vocabulary.
    fn decode(&self, ids: &[u32]) -> Result<String>;

    /// The number of transformer blocks.
    fn num_layers(&self) -> usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_and_the_checks() {
        let c = LoraConfig::default();
        assert_eq!(c.scale(), 2.0);
        c.validate().unwrap();
        for bad in [
            c.clone().with_rank(0),
            c.clone().with_alpha(f32::NAN),
            c.clone().with_dropout(1.0),
            c.clone().with_targets(Vec::<String>::new()),
            c.clone().with_targets(["q_proj", ""]),
            c.clone().with_num_layers(0),
        ] {
            assert_eq!(
                bad.validate().unwrap_err().kind(),
                ErrorKind::InvalidOption,
                "{bad:?}"
            );
        }
        let c = c
            .with_targets(["down_proj"])
            .with_num_layers(4)
            .with_dtype(ComputeType::BFloat16);
        let json = serde_json::to_string(&c).unwrap();
        assert_eq!(serde_json::from_str::<LoraConfig>(&json).unwrap(), c);
        assert!(serde_json::from_str::<LoraConfig>(r#"{"ranks": 8}"#).is_err());
    }
}
