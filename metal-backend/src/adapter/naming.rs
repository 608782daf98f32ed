//! Maps layer names to the names in adapter files, and decides which parameters are transposed.

use mlx_rs_core::Array;

use crate::checkpoint::Family;
use crate::checkpoint::family::Renaming;
use crate::nn::adapter::SlotKind;

/// The mapping from our layer names to mlx-lm's layer names, where they differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Naming(Renaming);

impl Naming {
    /// Returns the mapping of an architecture.
    pub fn for_architecture(architecture: &str) -> Self {
        let family = Family::of(architecture);
        Self(family.map_or_else(Renaming::default, |f| f.mlx_lm_names(architecture)))
    }

    /// Returns the name of a layer in mlx-lm.
    pub(super) fn theirs(&self, name: &str) -> String {
        let Renaming { added, dropped } = self.0;
        let name = name.strip_prefix(dropped).unwrap_or(name);
        match name.strip_prefix(added) {
            Some(rest) if !rest.is_empty() => name.to_owned(),
            _ => format!("{added}{name}"),
        }
    }

    /// Returns the entry of mlx-lm's `keys` for a layer: the name after the block number, or the
    /// complete name outside the blocks.
    pub(crate) fn key(&self, name: &str) -> String {
        match key(name) {
            inside if inside.len() < name.len() => inside.to_owned(),
            outside => self.theirs(outside),
        }
    }
}

/// Returns the name after the block number, or the complete name outside the blocks.
pub(crate) fn key(name: &str) -> &str {
    let mut rest = name;
    while let Some((part, after)) = rest.split_once('.') {
        if part.parse::<usize>().is_ok() {
            return after;
        }
        rest = after;
    }
    name
}

/// Whether mlx-lm stores this parameter transposed. For matrices, mlx-lm stores A as `[in, rank]`
/// and B as `[rank, out]`. For experts, its layout equals ours. For embedding tables, it exchanges
/// the names A and B instead of transposing.
pub(super) fn is_turned(part: &Array, kind: SlotKind) -> bool {
    part.shape().len() == 2 && kind == SlotKind::Matrix
}

/// Returns a parameter in the file's layout.
pub(super) fn turned(part: &Array, kind: SlotKind) -> mlx_rs_core::Result<Array> {
    if is_turned(part, kind) {
        part.swap_axes(0, 1)
    } else {
        Ok(part.clone())
    }
}

/// Whether two names refer to the same layer. Other tools add a prefix to a checkpoint's names.
pub(crate) fn same_layer(a: &str, b: &str) -> bool {
    // GPT-2's original checkpoints have this prefix instead of mlx-lm's `model.`.
    let [a, b] = [a, b].map(|name| name.strip_prefix("transformer.").unwrap_or(name));
    let ends = |long: &str, short: &str| {
        long.strip_suffix(short)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    ends(a, b) || ends(b, a)
}
