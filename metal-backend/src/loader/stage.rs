//! The layers that one process of a pipeline reads. How they pass hidden states on is the
//! decoder's.

use std::ops::Range;
use std::sync::Arc;

use inference_formats::pipeline::PipelineSplit;
use mlx_rs_core::distributed::Group;

use super::{Source, Weights};

/// This process's stage of a pipeline.
#[derive(Debug, Clone)]
pub struct OwnStage {
    /// How the layers are divided.
    pub split: Arc<PipelineSplit>,
    /// Which process this is, from 0.
    pub rank: usize,
    /// All of them.
    pub group: Group,
}

impl OwnStage {
    /// Its layers.
    pub fn layers(&self) -> Range<usize> {
        self.split.layers(self.rank)
    }

    /// Whether it reads a tensor.
    pub fn reads(&self, name: &str) -> bool {
        self.split.reads(self.rank, name)
    }
}

impl Weights {
    /// Reads the tensors of one stage only.
    pub fn use_stage(&mut self, stage: OwnStage) {
        let source = &self.source;
        self.unused.retain(|stored| {
            let usual = match source {
                Source::Gguf(_, names) => names.usual(stored),
                Source::Safetensors(..) => None,
            };
            stage.reads(usual.as_deref().unwrap_or(stored))
        });
        self.stage = Some(stage);
    }

    /// The stage that is read, where it is not the whole model.
    pub fn stage(&self) -> Option<&OwnStage> {
        self.stage.as_ref()
    }
}
