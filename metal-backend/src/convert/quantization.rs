//! Options for quantizing matrices.

use mlx_rs_core::QuantMode;

/// Options for quantizing matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// The format of the quantized weights.
    pub mode: QuantMode,
    /// Bits per weight. `None` means the mode's default: 4, or 8 for `mxfp8`.
    pub bits: Option<i32>,
    /// The number of adjacent weights that share a scale. `None` means the mode's default: 64 for
    /// `affine`.
    pub group_size: Option<i32>,
    /// Different bits per layer. A recipe determines the bits, so `bits` must be `None`.
    pub recipe: Option<Recipe>,
}

impl Default for Quantization {
    fn default() -> Self {
        Self {
            mode: QuantMode::Affine,
            bits: None,
            group_size: None,
            recipe: None,
        }
    }
}

/// Different bits per layer, with `mlx-lm`'s names. `v_proj` and `down_proj` get the high bits in
/// the first and last eighth of the layers, and in every third layer between. The output matrix
/// also gets the high bits. All other matrices get the low bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recipe {
    /// Low bits 2, high bits 6.
    Mixed2_6,
    /// Low bits 3, high bits 4.
    Mixed3_4,
    /// Low bits 3, high bits 6.
    Mixed3_6,
    /// Low bits 4, high bits 6.
    Mixed4_6,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Recipe; 4] = [
        Self::Mixed2_6,
        Self::Mixed3_4,
        Self::Mixed3_6,
        Self::Mixed4_6,
    ];

    /// The name, such as `mixed_3_6`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed2_6 => "mixed_2_6",
            Self::Mixed3_4 => "mixed_3_4",
            Self::Mixed3_6 => "mixed_3_6",
            Self::Mixed4_6 => "mixed_4_6",
        }
    }

    /// Returns the recipe with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.name() == name)
    }

    /// Returns the low and the high bits.
    pub(super) fn bits(self) -> (i32, i32) {
        match self {
            Self::Mixed2_6 => (2, 6),
            Self::Mixed3_4 => (3, 4),
            Self::Mixed3_6 => (3, 6),
            Self::Mixed4_6 => (4, 6),
        }
    }
}
