//! Divides the layers of a model among processes that compute one after another (pipeline
//! parallelism). Each process has a stage, a range of adjacent layers. The first process also has
//! the embedding. All processes have the last norm and the output head, so each process can compute
//! logits.
//!
//! This module handles only names and sizes. [`crate::split`] does so for processes that compute
//! each layer together.

use std::ops::Range;

use serde::Serialize;

use crate::config::ModelConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::footprint::Footprint;

/// The parts of names before a layer's index.
const LAYERS: [&str; 3] = ["layers", "blocks", "h"];

/// The prefixes of the token embedding's tensors.
const EMBEDDINGS: [&str; 3] = [
    "model.embed_tokens.",
    "backbone.embeddings.",
    "backbone.embedding.",
];

/// The division of one model's layers among some processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineSplit {
    processes: usize,
    layers: usize,
    /// Whether the embedding is the output matrix. If so, all stages have the embedding.
    tied: bool,
}

impl PipelineSplit {
    /// The division of a model among `processes`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the family cannot be divided, or if there are more processes
    /// than layers.
    pub fn new(config: &ModelConfig, processes: usize) -> Result<Self> {
        let fault = |message: String| Err(Error::new(ErrorKind::Unsupported, message));
        // A model without a `model_type` is read like llama.
        if config.family().is_some_and(|family| !family.pipeline) {
            let name = config.model_type.as_deref().unwrap_or_default();
            return fault(format!(
                "models of type {name:?} cannot be divided into stages of a pipeline yet"
            ));
        }
        let layers = config.num_hidden_layers;
        if processes == 0 || processes > layers {
            return fault(format!(
                "num_hidden_layers is {layers}, which are too few for {processes} stages of a \
                 pipeline"
            ));
        }
        Ok(Self {
            processes,
            layers,
            // If the file does not state it, the output matrix may be the embedding.
            tied: config.tie_word_embeddings != Some(false),
        })
    }

    /// The number of processes.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.processes
    }

    /// The layers of one process. Two processes differ by at most one layer.
    #[must_use]
    pub fn layers(&self, rank: usize) -> Range<usize> {
        let first = |rank: usize| rank.min(self.processes) * self.layers / self.processes;
        first(rank)..first(rank.saturating_add(1))
    }

    /// Whether a tensor of this name in transformers belongs to a layer.
    #[must_use]
    pub fn is_of_layer(name: &str) -> bool {
        layer_of(name).is_some()
    }

    /// Whether a process needs this tensor. `name` is the tensor's name in transformers.
    #[must_use]
    pub fn reads(&self, rank: usize, name: &str) -> bool {
        if EMBEDDINGS.iter().any(|prefix| name.starts_with(prefix)) {
            return rank == 0 || self.tied;
        }
        layer_of(name).is_none_or(|layer| self.layers(rank).contains(&layer))
    }
}

/// The index of the layer to which a tensor of this name belongs: the first number after one of
/// [`LAYERS`].
fn layer_of(name: &str) -> Option<usize> {
    let parts = || name.split('.');
    parts().zip(parts().skip(1)).find_map(|(before, index)| {
        let index = index.parse().ok()?;
        LAYERS.contains(&before).then_some(index)
    })
}

/// The layers and tensors of each process of a pipeline, from the headers of the model's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PipelinePlan {
    /// The stages, in the order in which data passes them.
    pub stages: Vec<PlannedStage>,
    /// Bytes of weights in the memory of a process that has the whole model.
    pub bytes_whole: u64,
}

/// One process of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedStage {
    /// The index among the processes, from 0.
    pub rank: usize,
    /// The layers.
    pub layers: Range<usize>,
    /// Bytes of weights in its memory.
    pub bytes: u64,
    /// The tensors that the process reads, sorted by name.
    pub tensors: Vec<String>,
}

impl PipelinePlan {
    /// The plan for a model of these tensors.
    ///
    /// # Errors
    /// As [`PipelineSplit::new`].
    pub fn new(config: &ModelConfig, footprint: &Footprint, processes: usize) -> Result<Self> {
        let split = PipelineSplit::new(config, processes)?;
        let loaded = || footprint.tensors().iter().filter(|t| t.loaded_bytes > 0);
        let stage = |rank: usize| {
            let mut tensors: Vec<_> = loaded().filter(|t| split.reads(rank, &t.name)).collect();
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            PlannedStage {
                rank,
                layers: split.layers(rank),
                bytes: tensors
                    .iter()
                    .map(|t| t.loaded_bytes)
                    .fold(0, u64::saturating_add),
                tensors: tensors.iter().map(|t| t.name.clone()).collect(),
            }
        };
        Ok(Self {
            stages: (0..processes).map(stage).collect(),
            bytes_whole: footprint.loaded_bytes(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str, processes: usize) -> Result<PipelineSplit> {
        let mut all: serde_json::Map<_, _> = serde_json::from_str(
            r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 7, "vocab_size": 40,
                "intermediate_size": 48, "num_attention_heads": 8, "tie_word_embeddings": false}"#,
        )
        .unwrap();
        let fields: serde_json::Map<_, _> = serde_json::from_str(text).unwrap();
        all.extend(fields);
        PipelineSplit::new(&ModelConfig::from_map(all).unwrap(), processes)
    }

    #[test]
    fn each_layer_is_in_one_stage() {
        for processes in 1..=7 {
            let split = split("{}", processes).unwrap();
            let stages: Vec<_> = (0..processes).map(|rank| split.layers(rank)).collect();
            let all: Vec<usize> = stages.iter().cloned().flatten().collect();
            assert_eq!(all, (0..7).collect::<Vec<_>>());
            let lengths = || stages.iter().map(Range::len);
            assert!(lengths().max() <= lengths().min().map(|n| n + 1));
        }
    }

    #[test]
    fn stages_read_their_own_tensors() {
        let untied = split("{}", 2).unwrap();
        let tied = split(r#"{"tie_word_embeddings": true}"#, 2).unwrap();
        let unsaid = split(r#"{"tie_word_embeddings": null}"#, 2).unwrap();
        for (name, reads) in [
            ("model.layers.2.self_attn.q_proj.weight", [true, false]),
            ("model.layers.3.mlp.experts.1.up_proj.scales", [false, true]),
            ("model.layers.10.mlp.up_proj.weight", [false, false]),
            ("backbone.blocks.2.ffn.proj_up.weight", [true, false]),
            ("transformer.h.4.mlp.experts.1.c_fc.weight", [false, true]),
            ("model.embed_tokens.weight", [true, false]),
            ("backbone.embeddings.weight", [true, false]),
            ("model.norm.weight", [true, true]),
            ("lm_head.weight", [true, true]),
            ("rope_freqs.weight", [true, true]),
        ] {
            assert_eq!([0, 1].map(|rank| untied.reads(rank, name)), reads, "{name}");
        }
        for split in [tied, unsaid] {
            assert!(split.reads(1, "model.embed_tokens.weight"));
        }
    }

    #[test]
    fn what_is_not_divided_is_told() {
        for (text, processes, message) in [
            ("{}", 8, "num_hidden_layers is 7"),
            ("{}", 0, "num_hidden_layers is 7"),
            (r#"{"model_type": "gemma4_text"}"#, 2, "gemma4_text"),
            (r#"{"model_type": "rwkv7"}"#, 2, "rwkv7"),
        ] {
            let error = split(text, processes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(message), "{error}");
        }
    }
}
