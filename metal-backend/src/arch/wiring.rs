//! Finds the blocks of a model from the names of its tensors, without reading weights. This is used
//! for models with several kinds of blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use inference::Result;
use serde::Serialize;

use super::build::invalid;

/// The mixer of positions in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockKind {
    /// A recurrent layer with a matrix memory (xLSTM).
    Mlstm,
    /// A recurrent layer with a scalar memory (xLSTM).
    Slstm,
    /// A convolution over the last positions.
    Convolution,
    /// A gated delta net.
    #[serde(rename = "gated_delta")]
    GatedDelta,
    /// Mamba.
    Mamba,
    /// Mamba-2.
    Mamba2,
    /// RWKV-7.
    Rwkv7,
    /// Attention.
    Attention,
    /// No known mixer.
    Unknown,
}

impl fmt::Display for BlockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mlstm => "mLSTM",
            Self::Slstm => "sLSTM",
            Self::Convolution => "convolution",
            Self::GatedDelta => "gated delta net",
            Self::Mamba => "Mamba",
            Self::Mamba2 => "Mamba-2",
            Self::Rwkv7 => "RWKV-7",
            Self::Attention => "attention",
            Self::Unknown => "unknown",
        })
    }
}

/// A block that was found from the names of tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BlockInfo {
    /// The index of the block.
    pub index: usize,
    /// The mixer of positions.
    pub kind: BlockKind,
    /// The names of its layers, sorted.
    pub components: Vec<String>,
}

/// The blocks of a checkpoint, found from tensor names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wiring {
    /// The blocks, first to last.
    pub blocks: Vec<BlockInfo>,
}

impl Wiring {
    /// Finds the blocks at `prefix` from the tensor names `names`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if a block between other blocks is missing, or a name has no
    /// block number after `prefix`.
    pub fn from_names<'a>(prefix: &str, names: impl Iterator<Item = &'a str>) -> Result<Self> {
        let mut by_index: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
        for name in names {
            let Some((number, rest)) = (name.strip_prefix(prefix)).and_then(|n| n.split_once('.'))
            else {
                continue;
            };
            let Ok(index) = number.parse::<usize>() else {
                return Err(invalid(format!(
                    "tensor `{name}` belongs to no numbered block"
                )));
            };
            let component = rest.rsplit_once('.').map_or(rest, |(layer, _)| layer);
            by_index.entry(index).or_default().insert(component);
        }
        if let Some(missing) = (0..by_index.len()).find(|i| !by_index.contains_key(i)) {
            return Err(invalid(format!(
                "block {missing} has no tensors, though there are {} blocks",
                by_index.len()
            )));
        }
        let blocks = by_index.into_iter().map(|(index, components)| BlockInfo {
            index,
            kind: kind(&components),
            components: components.into_iter().map(str::to_owned).collect(),
        });
        Ok(Self {
            blocks: blocks.collect(),
        })
    }
}

/// Returns the kind of a block that has these layers.
fn kind(components: &BTreeSet<&str>) -> BlockKind {
    let has = |layer: &str| {
        let inside = |c: &&str| c.split('.').next() == Some(layer);
        components.iter().any(inside)
    };
    if has("mlstm_layer") {
        BlockKind::Mlstm
    } else if has("slstm_layer") {
        BlockKind::Slstm
    } else if components.contains("self_attn.f_a_proj") {
        // Kimi Delta Attention, a gated delta net with a gate for each channel.
        BlockKind::GatedDelta
    } else if components.contains("attn.r_proj") {
        BlockKind::Rwkv7
    } else if has("attn_layer") || has("attention") || has("self_attn") {
        BlockKind::Attention
    } else if has("linear_attn") {
        BlockKind::GatedDelta
    } else if ["mamba.x_proj", "mixer.x_proj"]
        .iter()
        .any(|c| components.contains(c))
    {
        BlockKind::Mamba
    } else if ["mamba.conv1d", "mixer.conv1d"]
        .iter()
        .any(|c| components.contains(c))
    {
        BlockKind::Mamba2
    } else if has("conv") {
        BlockKind::Convolution
    } else {
        BlockKind::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(all: &[&str]) -> Result<Wiring> {
        Wiring::from_names("backbone.blocks.", all.iter().copied())
    }

    #[test]
    fn blocks_are_found_by_the_names_of_their_tensors() {
        let wiring = names(&[
            "backbone.embeddings.weight",
            "backbone.blocks.1.slstm_layer.igate.weight",
            "backbone.blocks.0.mlstm_layer.q.weight",
            "backbone.blocks.0.mlstm_layer.q.scales",
            "backbone.blocks.0.ffn.proj_up.weight",
            "backbone.blocks.2.attention.q_proj.weight",
            "backbone.blocks.3.mamba.a",
            "lm_head.weight",
        ]);
        let blocks = wiring.unwrap().blocks;
        let kinds: Vec<BlockKind> = blocks.iter().map(|b| b.kind).collect();
        use BlockKind::{Attention, Mlstm, Slstm, Unknown};
        assert_eq!(kinds, [Mlstm, Slstm, Attention, Unknown]);
        assert_eq!(blocks[0].components, ["ffn.proj_up", "mlstm_layer.q"]);
        assert_eq!(blocks[3].index, 3);
    }

    #[test]
    fn gaps_and_blocks_without_a_number_are_refused() {
        let gap = names(&[
            "backbone.blocks.0.mlstm_layer.q.weight",
            "backbone.blocks.2.mlstm_layer.q.weight",
        ]);
        assert!(gap.unwrap_err().message().contains("block 1"));
        assert!(names(&["backbone.blocks.x.mlstm_layer.q.weight"]).is_err());
        assert!(names(&[]).unwrap().blocks.is_empty());
    }

    #[test]
    fn blocks_of_hybrids_are_told_apart() {
        let wiring = Wiring::from_names(
            "model.layers.",
            [
                "model.layers.0.conv.conv.weight",
                "model.layers.0.conv.in_proj.weight",
                "model.layers.0.feed_forward.w1.weight",
                "model.layers.1.self_attn.q_proj.weight",
                "model.layers.2.linear_attn.conv1d.weight",
                "model.layers.3.mamba.conv1d.weight",
                "model.layers.4.mixer.conv1d.weight",
                "model.layers.5.mamba.conv1d.weight",
                "model.layers.5.mamba.x_proj.weight",
                "model.layers.6.self_attn.f_a_proj.weight",
                "model.layers.6.self_attn.q_proj.weight",
                "model.layers.7.attn.r_proj.weight",
                "model.layers.7.ffn.key.weight",
            ]
            .into_iter(),
        );
        let kinds: Vec<BlockKind> = wiring.unwrap().blocks.iter().map(|b| b.kind).collect();
        use BlockKind::{Attention, Convolution, GatedDelta, Mamba, Mamba2, Rwkv7};
        assert_eq!(
            kinds,
            [
                Convolution,
                Attention,
                GatedDelta,
                Mamba2,
                Mamba2,
                Mamba,
                GatedDelta,
                Rwkv7
            ]
        );
    }
}
