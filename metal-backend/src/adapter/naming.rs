//! What a file of adapters calls layers, and which way around it has their parts.

use mlx_rs_core::Array;

use crate::checkpoint::Family;
use crate::checkpoint::family::Renaming;
use crate::nn::adapter::SlotKind;

/// How mlx-lm calls a model's layers, where it is not as we do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Naming(Renaming);

impl Naming {
    /// For an architecture.
    pub fn of(architecture: &str) -> Self {
        let family = Family::of(architecture);
        Self(family.map_or_else(Renaming::default, |f| f.mlx_lm_names(architecture)))
    }

    /// What mlx-lm calls a layer.
    pub(super) fn theirs(&self, name: &str) -> String {
        let Renaming { added, dropped } = self.0;
        let name = name.strip_prefix(dropped).unwrap_or(name);
        match name.strip_prefix(added) {
            Some(rest) if !rest.is_empty() => name.to_owned(),
            _ => format!("{added}{name}"),
        }
    }

    /// What mlx-lm's `keys` call a layer: what is after the number of the block, or all of it for
    /// one that is in none.
    pub(crate) fn key(&self, name: &str) -> String {
        match key(name) {
            inside if inside.len() < name.len() => inside.to_owned(),
            whole => self.theirs(whole),
        }
    }
}

/// What is after the number of the block in a name; all of it for one that is in none.
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

/// Whether mlx-lm stores this part transposed. Of matrices it has A as `[in, rank]` and B as
/// `[rank, out]`; of experts it has them as we do. Of tables it exchanges the two names, which
/// transposes them, too.
pub(super) fn is_turned(part: &Array, kind: SlotKind) -> bool {
    part.shape().len() == 2 && kind == SlotKind::Matrix
}

/// A part as the file has it.
pub(super) fn turned(part: &Array, kind: SlotKind) -> mlx_rs_core::Result<Array> {
    if is_turned(part, kind) {
        part.swap_axes(0, 1)
    } else {
        Ok(part.clone())
    }
}

/// Whether two names are of one layer: others put something in front of the names of a checkpoint.
pub(crate) fn same_layer(a: &str, b: &str) -> bool {
    // GPT-2's own checkpoints put this where mlx-lm puts `model.`.
    let [a, b] = [a, b].map(|name| name.strip_prefix("transformer.").unwrap_or(name));
    let ends = |long: &str, short: &str| {
        long.strip_suffix(short)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    ends(a, b) || ends(b, a)
}
