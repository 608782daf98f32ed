//! Selects the layers that one process of a pipeline reads, or that one step of an extraction
//! reads. The decoder exchanges hidden states between processes.

use std::ops::Range;
use std::sync::Arc;

use inference_formats::footprint::Part;
use inference_formats::pipeline::PipelineSplit;
use mlx_rs_core::distributed::Group;

use super::{Source, Weights};

/// The tensors that a stage reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageReads {
    /// All tensors that a process of a pipeline needs.
    All,
    /// The layers, without the token embedding and the head. The model can then only compute its
    /// blocks.
    Layers,
    /// The tensors outside the layers. The model can then only compute the norm, the head and the
    /// token embedding.
    Ends,
}

/// This process's stage of a pipeline.
#[derive(Debug, Clone)]
pub struct OwnStage {
    /// How the layers are divided.
    pub split: Arc<PipelineSplit>,
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The group of all processes.
    pub group: Group,
    /// The tensors to read.
    pub reads: StageReads,
}

impl OwnStage {
    /// The range of the stage's layers.
    pub fn layers(&self) -> Range<usize> {
        match self.reads {
            StageReads::Ends => 0..0,
            StageReads::All | StageReads::Layers => self.split.layers(self.rank),
        }
    }

    /// Whether the stage reads the tensor `name`.
    pub fn reads(&self, name: &str) -> bool {
        match self.reads {
            StageReads::All => self.split.reads(self.rank, name),
            StageReads::Layers => {
                let end = matches!(Part::from_name(name), Part::Embedding | Part::Output);
                !end && self.split.reads(self.rank, name)
            }
            StageReads::Ends => !PipelineSplit::is_of_layer(name),
        }
    }
}

impl Weights {
    /// Makes later reads return only the tensors of one stage.
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

    /// The stage to read; `None` for the complete model.
    pub fn stage(&self) -> Option<&OwnStage> {
        self.stage.as_ref()
    }
}
