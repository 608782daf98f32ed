//! Converts tensor names between transformers and GGUF.

use crate::family::{Family, GgufFamily, PLAIN};

/// Tensors with factors of rotary wavelengths, which have the same name in all formats.
const KEPT: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];

/// Parts of blocks whose transformers names have no suffix.
const BARE: [&str; 4] = [
    "self_attn.sinks",
    "layer_scalar",
    "experts.gate_up_proj",
    "experts.down_proj",
];

/// The tensor names of one family.
#[derive(Debug, Clone)]
pub struct GgufNames {
    family: &'static GgufFamily,
}

impl GgufNames {
    /// The tensor names of a `model_type`. An unknown `model_type` has the most common names.
    pub fn new(model_type: &str) -> Self {
        Self {
            family: Family::of(model_type)
                .and_then(|family| family.gguf.as_ref())
                .unwrap_or(&PLAIN),
        }
    }

    /// [`GgufFamily::permuted`].
    pub fn permuted(&self) -> bool {
        self.family.permuted
    }

    /// The names inside blocks. The family's own names come first.
    fn block(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        self.family.overrides.iter().chain(self.family.block)
    }

    /// The name in GGUF, such as `blk.0.attn_q.weight` for
    /// `model.layers.0.self_attn.q_proj.weight`. `None` for a tensor without a name in GGUF.
    pub fn tensor(&self, name: &str) -> Option<String> {
        if KEPT.contains(&name) {
            return Some(name.to_owned());
        }
        let in_block = name.strip_prefix(self.family.prefix);
        if let Some((layer, part)) = in_block.and_then(|rest| rest.split_once('.'))
            && let Some((to, _)) = self
                .family
                .unsuffixed
                .iter()
                .find(|(_, from)| *from == part)
        {
            return Some(format!("blk.{layer}.{to}"));
        }
        let (stem, suffix) = match BARE.iter().any(|part| name.ends_with(part)) {
            true => (name, "weight"),
            false => name.rsplit_once('.')?,
        };
        if !matches!(suffix, "weight" | "bias") {
            return None;
        }
        if let Some((to, _)) = self.family.global.iter().find(|(_, from)| *from == stem) {
            return Some(format!("{to}.{suffix}"));
        }
        let (layer, part) = stem.strip_prefix(self.family.prefix)?.split_once('.')?;
        // Mixtral's name of the mixture part.
        let renamed = part
            .strip_prefix("block_sparse_moe.")
            .map(|rest| format!("mlp.{rest}"));
        let part = renamed.as_deref().unwrap_or(part);
        let (to, _) = self.block().find(|(_, from)| *from == part)?;
        Some(format!("blk.{layer}.{to}.{suffix}"))
    }

    /// The inverse of [`Self::tensor`]. `None` for a tensor without another name.
    pub fn usual(&self, stored: &str) -> Option<String> {
        let in_block = stored.strip_prefix("blk.");
        if let Some((layer, part)) = in_block.and_then(|rest| rest.split_once('.'))
            && let Some((_, to)) = self
                .family
                .unsuffixed
                .iter()
                .find(|(from, _)| *from == part)
        {
            layer.parse::<usize>().ok()?;
            return Some(format!("{}{layer}.{to}", self.family.prefix));
        }
        let (stem, suffix) = stored.rsplit_once('.')?;
        if !matches!(suffix, "weight" | "bias") {
            return None;
        }
        let Some((layer, part)) = stem
            .strip_prefix("blk.")
            .and_then(|rest| rest.split_once('.'))
        else {
            let (_, to) = self.family.global.iter().find(|(from, _)| *from == stem)?;
            return Some(format!("{to}.{suffix}"));
        };
        layer.parse::<usize>().ok()?;
        let (_, to) = self.block().find(|(from, _)| *from == part)?;
        let GgufFamily {
            prefix, mixture, ..
        } = *self.family;
        if BARE.contains(to) {
            return Some(format!("{prefix}{layer}.{to}"));
        }
        Some(match to.strip_prefix("mlp.") {
            Some(rest)
                if ["gate", "router.layer"].contains(&rest) || rest.starts_with("switch_mlp") =>
            {
                format!("{prefix}{layer}.{mixture}.{rest}.{suffix}")
            }
            _ => format!("{prefix}{layer}.{to}.{suffix}"),
        })
    }
}
