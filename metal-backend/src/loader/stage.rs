//! The layers that one process of a pipeline, or one step of an extraction, reads. How processes pass
//! hidden states on is the decoder's.

use std::ops::Range;
use std::sync::Arc;

use inference_formats::footprint::Part;
use inference_formats::pipeline::PipelineSplit;
use mlx_rs_core::distributed::Group;

use super::{Source, Weights};

/// What of a stage is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageReads {
    /// What a process of a pipeline computes with.
    All,
    /// Its layers, without the table of tokens and the head. Only its blocks can be used.
    Layers,
    /// What is of no layer. Only the norm, the head and the table can be used.
    Ends,
}

/// This process's stage of a pipeline.
#[derive(Debug, Clone)]
pub struct OwnStage {
    /// How the layers are divided.
    pub split: Arc<PipelineSplit>,
    /// Which process this is, from 0.
    pub rank: usize,
    /// All of them.
    pub group: Group,
    /// What of it is read.
    pub reads: StageReads,
}

impl OwnStage {
    /// Its layers.
    pub fn layers(&self) -> Range<usize> {
        match self.reads {
            StageReads::Ends => 0..0,
            StageReads::All | StageReads::Layers => self.split.layers(self.rank),
        }
    }

    /// Whether it reads a tensor.
    pub fn reads(&self, name: &str) -> bool {
        match self.reads {
            StageReads::All => self.split.reads(self.rank, name),
            StageReads::Layers => {
                let end = matches!(Part::of(name), Part::Embedding | Part::Output);
                !end && self.split.reads(self.rank, name)
            }
            StageReads::Ends => !PipelineSplit::is_of_layer(name),
        }
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
