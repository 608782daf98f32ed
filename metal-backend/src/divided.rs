//! Determines this process's part of a model that is divided among processes, and the part's size.
//! Also checks that all processes loaded the same model.

use std::sync::Arc;

use inference::{Error, ErrorKind, LoadOptions, ModelInfo, Result, Split};
use inference_formats::footprint::Footprint;
use inference_formats::pipeline::{PipelinePlan, PipelineSplit};
use inference_formats::split::{SplitPlan, TensorSplit};
use mlx_rs_core::Array;
use mlx_rs_core::distributed::{self, Group};

use crate::adapter::hash_of_files;
use crate::checkpoint::ModelConfig;
use crate::error::engine;
use crate::loader::{Member, OwnStage, StageReads, Weights};

/// The group of processes among which the model is divided; `None` if it is not divided.
pub fn group(options: &LoadOptions) -> Result<Option<Group>> {
    if options.split == Split::None {
        return Ok(None);
    }
    let group = distributed::init(false).map_err(engine("group"))?;
    Ok(Some(group).filter(|group| group.size() > 1))
}

/// This process's part of a model.
pub enum OwnPart {
    /// A slice of each layer (tensor parallelism).
    Tensors(Member),
    /// Consecutive layers (pipeline).
    Layers(OwnStage),
}

impl OwnPart {
    /// Determines this process's part of the model that `config` describes. `gguf` says whether the
    /// weights are in a GGUF file.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a model that cannot be divided.
    pub fn new(group: Group, split: Split, config: &ModelConfig, gguf: bool) -> Result<Self> {
        let (Ok(rank), Ok(size)) = (usize::try_from(group.rank()), usize::try_from(group.size()))
        else {
            return Err(Error::new(ErrorKind::Engine, "MLX's group has no size"));
        };
        Ok(match split {
            Split::Pipeline => Self::Layers(OwnStage {
                split: Arc::new(PipelineSplit::new(config, size)?),
                rank,
                group,
                reads: StageReads::All,
            }),
            _ => {
                let split = TensorSplit::new(config, size)?;
                Self::Tensors(Member {
                    split: Arc::new(if gguf { split.of_gguf() } else { split }),
                    rank,
                    group,
                })
            }
        })
    }

    /// Bytes of the part's weights in memory.
    fn bytes(&self, config: &ModelConfig, footprint: &Footprint) -> Result<u64> {
        Ok(match self {
            Self::Tensors(member) => {
                SplitPlan::new(config, footprint, member.split.processes())?.bytes_per_process
            }
            Self::Layers(stage) => {
                let plan = PipelinePlan::new(config, footprint, stage.split.processes())?;
                plan.stages.get(stage.rank).map_or(0, |stage| stage.bytes)
            }
        })
    }

    /// Restricts `weights` to this part.
    pub fn choose(self, weights: &mut Weights) {
        match self {
            Self::Tensors(member) => weights.use_member(member),
            Self::Layers(stage) => weights.use_stage(stage),
        }
    }
}

/// The bytes of weights that this process loads: those of its part, or of the whole model.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a model that cannot be divided.
pub fn loaded_bytes(
    part: Option<&OwnPart>,
    config: &ModelConfig,
    footprint: &Footprint,
) -> Result<u64> {
    part.map_or(Ok(footprint.loaded_bytes()), |part| {
        part.bytes(config, footprint)
    })
}

/// Refuses a group whose processes loaded different models or options. Such processes would
/// deadlock, or sum unrelated values.
///
/// # Errors
/// [`ErrorKind::InvalidOption`], with the ranks that differ from rank 0.
pub fn check_alike(group: Group, options: &LoadOptions, info: &ModelInfo) -> Result<()> {
    let adapter = options.adapter_path.as_deref().map(hash_of_files);
    let adapter = adapter.and_then(std::io::Result::ok);
    let text = format!(
        "{:?} {:?} {:?} {} {} {} {} {} {} {} {} {} {} {:?} {:?} {adapter:?}",
        options.split,
        options.context_len,
        options.kv_bits,
        options.kv_group_size,
        options.quantized_kv_start,
        options.draft_model.is_some(),
        options.attention_sums,
        info.architecture,
        info.vocab_size,
        info.num_layers,
        info.hidden_size,
        info.num_heads,
        info.num_kv_heads,
        info.compute_type,
        info.prompts,
    );
    let mine = words(&text);
    let all = Array::vector(&mine)
        .and_then(|vector| group.all_gather(&vector)?.to_vec::<i32>())
        .map_err(engine("group"))?;
    match first_unlike(&all, mine.len()) {
        None => Ok(()),
        Some(rank) => Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "rank {rank} has loaded another model than rank 0, or with other options or types; \
                 all processes must load the same"
            ),
        )),
    }
}

/// Returns the first rank whose words differ from those of rank 0.
fn first_unlike(all: &[i32], each: usize) -> Option<usize> {
    let mut ranks = all.chunks(each.max(1));
    let first = ranks.next()?;
    ranks.position(|other| other != first).map(|n| n + 1)
}

/// Returns an FNV-1a hash of a text as 16-bit words. Every group backend transfers such words
/// without loss.
fn words(text: &str) -> [i32; 4] {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    [0, 16, 32, 48].map(|shift| ((hash >> shift) & 0xffff) as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_differs_is_found() {
        let (a, b) = (words("llama 2"), words("llama 3"));
        assert_ne!(a, b);
        let of = |all: &[[i32; 4]]| first_unlike(&all.concat(), 4);
        assert_eq!(of(&[a, a, a]), None);
        assert_eq!(of(&[a, a, b]), Some(2));
        assert_eq!(of(&[b, a, a]), Some(1));
        // The published FNV-1a hash of "a".
        assert_eq!(words("a"), [0xec8c, 0x8601, 0xdc4c, 0xaf63]);
    }
}
