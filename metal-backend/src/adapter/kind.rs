//! The kinds of adapters, by their names in configurations.

use serde::{Deserialize, Serialize};

/// Which weights an adapter trains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterKind {
    /// `base(x) + scale * (x A^T) B^T` (Hu et al. 2021).
    #[default]
    Lora,
    /// LoRA with a learned magnitude for each row (Liu et al. 2024). Experts are not supported.
    Dora,
    /// Replaces every matrix, norm and bias of the blocks. The model must not be quantized. Ignores
    /// rank, scale, dropout and targets.
    Full,
}
