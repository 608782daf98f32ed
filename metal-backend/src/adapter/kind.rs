//! The kinds of adapters, as configurations name them.

use serde::{Deserialize, Serialize};

/// The trained weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterKind {
    /// `base(x) + scale * (x A^T) B^T` (Hu et al. 2021).
    #[default]
    Lora,
    /// LoRA with a learned magnitude for each row (Liu et al. 2024). Experts are not supported.
    Dora,
    /// Replaces every matrix, norm and bias of the blocks, which must not be quantized. Rank,
    /// scale, dropout and targets are then ignored.
    Full,
}
