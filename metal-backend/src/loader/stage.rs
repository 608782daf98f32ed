//! The layers that one process of a pipeline reads, or one step of an extraction. The decoder
//! exchanges hidden states between processes.

use std::ops::Range;
use std::sync::Arc;

use inference_formats::footprint::Part;
use inference_formats::pipeline::PipelineSplit;
use mlx_rs_core::distributed::Group;

use super::{Source, Weights};

/// The tensors of a stage to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageReads {
    /// All that a process of a pipeline needs.
    All,
    /// The layers, without the token embedding and the head. Only its blocks can be used.
    Layers,
    /// Only tensors outside the layers. Only the norm, the head and the token embedding can be
    /// used.
    Ends,
}

/// This process's stage of a pipeline.
#[derive(Debug, Clone)]
pub struct OwnStage {
    /// The division of layers.
    pub split: Arc<PipelineSplit>,
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The group of all processes.
    pub group: Group,
    /// The tensors to read.
    pub reads: StageReads,
}

impl OwnStage {
    /// The range of its layers.
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
    /// Reads only the tensors of one stage.
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

    /// The stage to read, unless it is the whole model.
    pub fn stage(&self) -> Option<&OwnStage> {
        self.stage.as_ref()
    }
}
